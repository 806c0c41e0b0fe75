"""What is run on a device and compared with the CPU: by `tests/engines/test_devices.py` on one that
is simulated, and by `make gpu-test` on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import foedus as fd
from tests import conformance

WEIGHTS = torch.linspace(0.5, 2.0, 10)


def seeded(module: nn.Module) -> nn.Module:
    """The module with parameters of a fixed draw; the global generator stays as it is."""
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator)
    return module


class Dense(nn.Module):
    """BatchNorm, dropout, a constant buffer, and a bias that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x * self.scale)).relu()))


class Tied(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.layer(self.layer(x).relu()).relu())


class Transformer(nn.Module):
    """Attention with dropout; positions are a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8 * width, 10)
        self.register_buffer("places", torch.linspace(-1, 1, 8 * width).view(8, width))

    def forward(self, x):
        rows = self.rows(x.view(-1, 8, 8)) + self.places
        return self.last(self.layer(rows).flatten(1))


class Recurrent(nn.Module):
    """Two layers of LSTM with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 6, 2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(6, 10)

    def forward(self, x):
        return self.last(self.layers(x.view(-1, 8, 8))[0][:, -1])


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def moved_weights(outputs, y):
    """A function that takes its tensor to the outputs."""
    return F.cross_entropy(outputs, y, WEIGHTS.to(outputs.device), reduction="none")


LOSSES = {
    "a module with weights": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"),
    "a module of a mean": nn.MultiMarginLoss(),
    "a function": moved_weights,
    "a mean": lambda outputs, y: F.cross_entropy(outputs, y, label_smoothing=0.1),
    "weights of classes": fd.losses.WeightedCrossEntropy(WEIGHTS.tolist()),
    "focal": "focal",
    "squared": "squared",
    "huber": "huber",
    "logistic": "logistic",
}
_HOW = {"lr": 0.05, "batch_size": 16}
_SHARED = nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none")

RUNS: dict[str, fd.Algorithm] = dict(conformance.ALGORITHMS)
for norm in ("average", "local", "silo", "frozen", "group"):
    RUNS[f"own, {norm}"] = fd.FedAvg(fd.Module(seeded(Dense()), norm=norm), **_HOW)
    RUNS[f"own images, {norm}"] = fd.FedAvg(fd.Module(seeded(_images()), norm=norm), **_HOW)
RUNS |= {
    "own, tied": fd.FedAvg(seeded(Tied()), **_HOW),
    "own, attention": fd.FedAvg(seeded(Transformer()), momentum=0.9, **_HOW),
    # not of attention: the bias of keys has no gradient, and Adam makes steps of rounding errors
    "own, tied, Adam": fd.FedAvg(
        seeded(Tied()), lr=0.01, optimizer="adam", clip=1.0, batch_size=16
    ),
    "own, recurrent": fd.FedAvg(seeded(Recurrent()), **_HOW),
    "own, Ditto": fd.Ditto(
        fd.Module(seeded(Dense()), norm="average"), lam=0.5, own_steps=2, loss=_SHARED, **_HOW
    ),
    "own, Scaffold": fd.Scaffold(fd.Module(seeded(Dense()), norm="average"), **_HOW),
    "own, FedFW": fd.FedFW(seeded(nn.Linear(64, 10)), fd.L2Ball(20.0), loss=_SHARED),
    "own, FedRes": fd.FedRes(seeded(nn.Linear(64, 10)), fd.Linear()),
    "own, FFGB": fd.FFGB(
        fd.Net(fd.Module(seeded(Dense()), norm="frozen"), conformance._FEW_EPOCHS), step=1.0
    ),
    "largest errors, FFGB": fd.FFGB(fd.MaxNet(fd.MLP(4), steps=5), step=1.0),
    "Adam, uneven steps": fd.Independent(fd.MLP(6), lr=0.01, optimizer="adam", batch_size=16),
}
for name, loss in LOSSES.items():
    RUNS[f"loss, {name}, Linear"] = fd.FedAvg(fd.Linear(), loss=loss, **_HOW)
    RUNS[f"loss, {name}, own"] = fd.FedAvg(
        fd.Module(seeded(Dense()), norm="average"), loss=loss, **_HOW
    )

ON_THE_CPU = (
    "DKRR", "FedNewton", "RidgeFed", "FedBoost", "AFLBoost", "FedRes", "FictitiousPlay", "KRR",
    "Everything", "own, FedRes", "FederatedGBDT",
)  # fmt: skip
"""Families that train no network by `fd.Training`: their arithmetic stays on the CPU."""


def trains_there(name: str) -> bool:
    """Whether a run computes on the device."""
    forests = name in ("FFGB", "FFGB, two steps, theorem's step", "FFGB, line search")
    return not forests and not name.startswith(ON_THE_CPU)
