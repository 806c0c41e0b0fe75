"""What dropout, BatchNorm and a custom loss cost, against the same network without them.

A chain of layers is trained by compiled loops, a module with a forward function of its own by
autograd: each is compared with its like.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foedus as fd
from benchmarks.timing import in_turns, ratio, seconds, shown


def smoothed(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy as a custom loss function."""
    return F.cross_entropy(outputs, y)


def dense(between: nn.Module | None = None) -> nn.Module:
    """An MLP of 784, 200, 200 and 10 numbers, with a layer after each hidden one."""
    more = [between] if between is not None else []
    again = [type(between)(*_given(between))] if between is not None else []
    return nn.Sequential(
        nn.Linear(784, 200), *more, nn.ReLU(), nn.Linear(200, 200), *again, nn.ReLU(),
        nn.Linear(200, 10),
    )  # fmt: skip


class Own(nn.Module):
    """A module with a forward function of its own, which compiled loops do not know."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _given(layer: nn.Module) -> tuple:
    return (layer.p,) if isinstance(layer, nn.Dropout) else (layer.num_features,)


def residual(norm: bool, dropout: float = 0.0) -> nn.Module:
    """A small residual network for images of 3 x 32 x 32 numbers."""

    class Block(nn.Module):
        def __init__(self, inputs: int, channels: int, stride: int):
            super().__init__()
            conv = lambda i, o, s: nn.Conv2d(i, o, 3, s, 1, bias=not norm)  # noqa: E731
            self.first, self.second = conv(inputs, channels, stride), conv(channels, channels, 1)
            layers = [nn.BatchNorm2d(channels) if norm else nn.Identity() for _ in range(2)]
            self.norms, self.drop = nn.ModuleList(layers), nn.Dropout(dropout)
            self.short = nn.Conv2d(inputs, channels, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.drop(self.norms[0](self.first(x)).relu())
            return (self.norms[1](self.second(y)) + self.short(x)).relu()

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def plain_round(net: nn.Module, fed: fd.Federation, loss: object) -> float:
    """One epoch of every client in PyTorch alone, on the same rows."""
    x, y = torch.from_numpy(fed.data.x_train), torch.from_numpy(fed.data.y_train)
    start = {k: v.clone() for k, v in net.state_dict().items()}
    net.train()

    def work() -> None:
        for i in range(len(fed)):
            net.load_state_dict(start)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            rows = torch.from_numpy(fed.rows[fed.offsets[i] : fed.offsets[i + 1]])
            for part in rows.split(32):
                optimizer.zero_grad()
                loss(net(x[part]), y[part]).backward()  # type: ignore[operator]
                optimizer.step()

    return seconds(work)


def layers(repeats: int) -> None:
    """One round of FedAvg, in turns; beside it the same ratio of plain PyTorch."""
    rng = np.random.default_rng(0)

    def federation(*shape: int, rows: int) -> fd.Federation:
        x = rng.standard_normal((10 * rows, *shape), dtype=np.float32)
        data = fd.Data.from_arrays(x, np.arange(10 * rows) % 10, classes=10)
        return fd.split(data, "iid", clients=10)

    ways = {
        "MLP 784-200-200-10": (
            federation(784, rows=128),
            {
                "without": (dense(), {}),
                "dropout 0.5": (dense(nn.Dropout(0.5)), {}),
                "BatchNorm, average": (fd.Module(dense(nn.BatchNorm1d(200)), norm="average"), {}),
                "BatchNorm, local": (fd.Module(dense(nn.BatchNorm1d(200)), norm="local"), {}),
                "BatchNorm, frozen": (fd.Module(dense(nn.BatchNorm1d(200)), norm="frozen"), {}),
                "forward of its own": (Own(dense()), {}),
                "forward of its own, dropout 0.5": (Own(dense(nn.Dropout(0.5))), {}),
                "forward of its own, BatchNorm, average": (
                    fd.Module(Own(dense(nn.BatchNorm1d(200))), norm="average"),
                    {},
                ),
                "forward of its own, own loss": (Own(dense()), {"loss": smoothed}),
            },
        ),
        "ResNet-8, 3 x 32 x 32": (
            federation(3, 32, 32, rows=64),
            {
                "without": (residual(False), {}),
                "dropout 0.2": (residual(False, 0.2), {}),
                "BatchNorm, average": (fd.Module(residual(True), norm="average"), {}),
                "BatchNorm, local": (fd.Module(residual(True), norm="local"), {}),
                "BatchNorm, group": (fd.Module(residual(True), norm="group"), {}),
                "own loss": (residual(False), {"loss": smoothed}),
            },
        ),
    }
    print("\n| network | with | seconds a round | ratio | ratio of plain PyTorch |")
    print("|---|---|---|---|---|")
    for network, (fed, kinds) in ways.items():

        def one(model: object, more: dict, fed: fd.Federation = fed) -> float:
            algorithm = fd.FedAvg(model, lr=0.01, **more)  # type: ignore[arg-type]
            run = fd.run(algorithm, fed, 1, evaluate_every=0, progress=False)
            return run.records.last("seconds") - run.records.rows[0]["seconds"]

        runs = {k: lambda m=m, e=e: one(m, e) for k, (m, e) in kinds.items()}
        times = in_turns(runs, repeats)
        nets = {k: m.module if isinstance(m, fd.Module) else m for k, (m, _) in kinds.items()}
        alone = {k: lambda n=n, f=fed: plain_round(n, f, smoothed) for k, n in nets.items()}
        plain = in_turns(alone, repeats)
        for name in kinds:
            apart = name.startswith("forward of its own, ")
            base = "forward of its own" if apart else "without"
            ours, theirs = ratio(times, name, base), ratio(plain, name, base)
            print(f"| {network} | {name} | {shown(times[name])} | {ours:.2f} | {theirs:.2f} |")
