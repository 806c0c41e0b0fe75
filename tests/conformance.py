"""The list of algorithms that must pass the checks of `foedus.testing`: one entry each, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import foedus as fd
from foedus import wire
from foedus.base import random


@dataclass(frozen=True)
class Everything(fd.Algorithm):
    """No method of use, but all that the contract allows: preparation, states drawn at random,
    several exchanges in a round with payloads of different size, batched and looped steps,
    structured and constant parts of replies, gathered replies.
    """

    personal: ClassVar[bool] = True

    def prepare(self, data):
        x = data.x.flatten(1) * data.weight.unsqueeze(-1)
        return {"center": x.sum(0) / data.count, "kind": "mean"}

    def init(self, client):
        return {
            "point": client.prepared["center"]
            + 0.1 * random.normal(client.key, client.spec.features),
            "rows": client.data.count,
        }

    def outputs(self, client, x):
        return (x.flatten(1) @ client.state["point"]).unsqueeze(-1) * torch.ones(
            client.spec.outputs
        )

    def row_loss(self, outputs, y):
        return outputs.square().mean(-1)

    def top(self, client):
        i = client.state["point"].abs().argmax().reshape(1)
        return wire.Sparse(i, client.state["point"].gather(0, i), (client.spec.features,)), None

    def move(self, client, to, big):
        point = (
            0.9 * client.state["point"]
            + 0.1 * to
            + 1e-3 * big[: len(to)]
            + 0.01 * random.normal(client.key, len(to))
        )
        signs = wire.Signs.pack(point, point.abs().mean())
        return {"signs": signs, "depth": 3}, {**client.state, "point": point}

    @fd.looped
    def farthest(self, client):
        distance = (client.data.x.flatten(1) - client.prepared["center"]).square().sum(-1)
        keep = distance > distance.mean()
        return {"distances": distance[keep].sort().values}, None

    def start(self, clients):
        return fd.State(to=clients.mean(self.top), spread=torch.zeros(()))

    def round(self, clients, state):
        to = clients.mean(self.top)
        moved = clients.gather(self.move, to=to, big=torch.ones(5000))
        mean = torch.stack([reply["signs"].dense() for reply in moved]).mean(0)
        far = clients.gather(self.farthest)
        return fd.State(
            to=0.5 * to + mean, spread=torch.stack([r["distances"].sum() for r in far]).mean()
        )


def _networks(count: int) -> list[torch.nn.Module]:
    """Linear networks on the 64 pixels of a digit, with weights of a fixed draw."""
    generator, networks = torch.Generator().manual_seed(0), []
    for _ in range(count):
        # the global generator stays as it is
        network = torch.nn.utils.skip_init(torch.nn.Linear, 64, 10)
        for p in network.parameters():
            p.data = 0.2 * torch.randn(p.shape, generator=generator)
        networks.append(network)
    return networks


def _normalized() -> torch.nn.Module:
    """A network with BatchNorm and dropout, with weights of a fixed draw."""
    first, last = _networks(1)[0], torch.nn.Linear(10, 10, bias=False)
    last.weight.data = torch.linspace(-1, 1, 100).view(10, 10).cos()
    dropout = torch.nn.Dropout(0.2)
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(10), torch.nn.ReLU(), dropout, last)


PREDICTORS = fd.Classifiers(_networks(4), classes=10)
DENSITIES = fd.Densities(0.9 * torch.eye(10)[:7] + 0.01, torch.full((10,), 0.1), 0.1)
_PUBLIC = torch.linspace(-1, 1, 30 * 64).view(30, 64).sin().numpy()
_FEW_EPOCHS = fd.Training(lr=0.01, optimizer="adam", epochs=2, batch_size=16)
# some clients have fewer rows, and solve in the dual
FEATURES = fd.RandomFourier(50, bandwidth=4.0)

ALGORITHMS: dict[str, fd.Algorithm] = {
    "FedAvg": fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16),
    "FedAvg, MLP, server momentum": fd.FedAvg(
        fd.MLP(12), lr=0.05, batch_size=16, server_momentum=0.5, server_lr=0.7
    ),
    "FedAvg, Adam, clipping": fd.FedAvg(
        fd.Linear(), lr=0.01, optimizer="adam", steps=5, batch_size=8, clip=1.0
    ),
    "FedAvg, BatchNorm averaged, dropout": fd.FedAvg(
        fd.Module(_normalized(), norm="average"), lr=0.05, batch_size=16, server_lr=0.7
    ),
    "FedAvg, BatchNorm at its client": fd.FedAvg(
        fd.Module(_normalized(), norm="local"), lr=0.05, batch_size=16
    ),
    "FedAvg, schedules, AdamW, some layers, accumulation": fd.FedAvg(
        fd.Module(_normalized(), norm="average", trainable=["1.*", "4.*"]),
        lr=fd.schedules.WarmUp(2, then=fd.schedules.Cosine(0.05, over=6, end=0.01), by="step"),
        optimizer="adamw",
        weight_decay=0.1,
        decay="weights",
        batch_size=8,
        accumulate=3,
        epochs=2,
    ),
    "FedAvg, bfloat16, step size by round": fd.FedAvg(
        fd.MLP(12),
        lr=fd.schedules.Step(0.1, every=1, factor=0.7),
        batch_size=16,
        precision="bfloat16",
    ),
    "FedProx": fd.FedProx(fd.Linear(), lr=0.1, mu=0.1, batch_size=16),
    "Scaffold": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16),
    "Scaffold, step sizes by round and step": fd.Scaffold(
        fd.Linear(),
        lr=fd.schedules.WarmUp(2, then=fd.schedules.Step(0.1, every=2, factor=0.5, by="step")),
        batch_size=16,
    ),
    "Scaffold, option 1": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16, option=1),
    "FedDyn": fd.FedDyn(fd.Linear(), lr=0.1, batch_size=16, alpha=0.1),
    "FedAdam": fd.FedAdam(fd.Linear(), lr=0.1, batch_size=16, server_lr=0.05),
    "FedYogi": fd.FedYogi(fd.MLP(12), lr=0.05, batch_size=16, tau=0.1, beta1=0.5, beta2=0.9),
    "FedOpt, AdamW": fd.FedOpt(
        fd.Linear(),
        lr=0.1,
        batch_size=16,
        server_optimizer="AdamW",
        server_lr=0.05,
        server_options={"weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3},
    ),
    "FedAdagrad": fd.FedAdagrad(fd.Linear(), lr=0.1, batch_size=16, tau=0.01, weights="uniform"),
    "FedNova": fd.FedNova(fd.Linear(), lr=0.1, batch_size=16, epochs=2),
    "FedNova, momentum": fd.FedNova(
        fd.Linear(), lr=0.05, batch_size=16, momentum=0.5, server_lr=0.7, weights="uniform"
    ),
    "FedNova, step sizes by step": fd.FedNova(
        fd.Linear(),
        lr=fd.schedules.Cosine(0.1, over=9, by="step"),
        batch_size=16,
        epochs=2,
        momentum=0.3,
    ),
    "FineTuned": fd.FineTuned(fd.Linear(), lr=0.1, batch_size=16, own_steps=3, own_lr=0.05),
    "Ditto": fd.Ditto(fd.Linear(), lr=0.1, batch_size=16, lam=0.5, own_steps=4),
    "FedPer": fd.FedPer(fd.MLP(12), shared="*0", lr=0.05, batch_size=16),
    "FedRep": fd.FedRep(fd.MLP(12), shared="*0", lr=0.05, batch_size=16, own_steps=5),
    "Independent": fd.Independent(fd.Linear(), lr=0.1, momentum=0.5, batch_size=16),
    "DKRR": fd.DKRR(FEATURES, reg=0.1),
    "FedNewton": fd.FedNewton(FEATURES, reg=0.1),
    "FedNewton, cg": fd.FedNewton(FEATURES, reg=0.1, solver="cg", tol=1e-6),
    "FedNewton, float32": fd.FedNewton(FEATURES, reg=0.1, solver="cg", tol=1e-3, dtype="float32"),
    "FedNewton, softmax": fd.FedNewton(FEATURES, reg=0.1, loss="cross_entropy"),
    "FedNewton, logistic, inexact": fd.FedNewton(
        fd.Polynomial(2), reg=10.0, loss="logistic", inner=5
    ),
    "RidgeFedAvg": fd.RidgeFedAvg(FEATURES, reg=0.1, lr=0.5),
    "RidgeFedProx": fd.RidgeFedProx(FEATURES, reg=0.1, mu=0.1),
    "FedFW": fd.FedFW(fd.Linear(), fd.L2Ball(5.0)),
    "FedFW, one entry": fd.FedFW(
        fd.Linear(), fd.PerLayer(fd.L1Ball(5.0)), penalty=1e-2, schedule="nonconvex", horizon=10
    ),
    "FedFW, augmented, signs": fd.FedFW(
        fd.Linear(), fd.LInfBall(0.1), variant="augmented", noise=0.1
    ),
    "FedFW, augmented, a network": fd.FedFW(
        fd.MLP(6), fd.L2Ball(4.0), begin="projected", variant="augmented", penalty=1e-3
    ),
    "FedFW, stochastic, rank one": fd.FedFW(
        fd.Linear(bias=False), fd.NuclearBall(5.0), variant="stochastic", batch_size=8
    ),
    "FedFW, stragglers": fd.FedFW(fd.Linear(), fd.L1Ball(5.0), supersets={2: fd.L2Ball(5.0)}),
    "NaiveFW": fd.NaiveFW(fd.Linear(), fd.L2Ball(5.0)),
    "FedDR": fd.FedDR(fd.Linear(), lr=0.1, batch_size=16, domain=fd.L2Ball(5.0), eta=1.0),
    "ProjectedFedAvg": fd.ProjectedFedAvg(
        fd.Linear(), lr=0.1, batch_size=16, domain=fd.L1Ball(5.0)
    ),
    "FedBoost": fd.FedBoost(PREDICTORS, budget=2.5),
    "FedBoost, squared, corrected, repeats": fd.FedBoost(
        PREDICTORS,
        budget=1.5,
        sampling="uniform",
        loss="squared",
        bias_correction=True,
        mirror=fd.Euclidean(),
        repeats=2,
    ),
    "FedBoost, cache": fd.FedBoost(
        PREDICTORS, budget=2, cache=True, explore=0.2, step=0.1, average=False
    ),
    "FedBoost, predictors from messages": fd.FedBoost(
        PREDICTORS.remote(), budget=2, step=0.1, measure_every=0
    ),
    "FedBoost, densities": fd.FedBoost(
        DENSITIES, budget=3, sampling="uniform", horizon=10, reweigh=False
    ),
    "FedBoost, densities from messages": fd.FedBoost(
        DENSITIES.remote(), budget=2, loss="squared", bias_correction=True, measure_every=0
    ),
    "AFLBoost": fd.AFLBoost(PREDICTORS, budget=2, low=0.1, step=0.2, step_domains=0.1),
    "AFLBoost, densities, cache": fd.AFLBoost(
        DENSITIES, budget=3, mirror_domains=fd.Euclidean(), cache=True, repeats=2
    ),
    "FedRes": fd.FedRes(step=0.05),
    "FedRes, logistic, columns, mini-batches, ball": fd.FedRes(
        loss="logistic",
        shared=range(32),
        private=range(20, 64),
        schedule="sqrt",
        batch_size=3,
        radius=2.0,
        send="gradient",
    ),
    "FedRes, a network and different local models": fd.FedRes(
        fd.MLP(5),
        {i: fd.Linear() if i % 2 else fd.MLP(3) for i in range(12)},
        private={i: range(8 + i) for i in range(12)},
    ),
    "FedRes, alone": fd.FedRes(global_model=None, schedule="constant", step=0.001),
    "FedRes, central": fd.FedRes(local_model=None, rule="misaligned"),
    "FedResERM": fd.FedResERM(shared=range(6), private=range(6, 12), radius=1.0),
    "FictitiousPlay": fd.FictitiousPlay(
        shared=range(6), private=range(6, 12), bias=False, batch_size=2
    ),
    "FFGB": fd.FFGB(fd.Forest(trees=2, depth=3)),
    "FFGB, two steps, theorem's step": fd.FFGB(
        fd.Forest(trees=1, depth=4), local_steps=2, mu=0.1, step="theorem4.3", weights="rows"
    ),
    "FFGB, line search": fd.FFGB(fd.Forest(trees=2, depth=3, rows=0.7), step="search"),
    "FederatedGBDT": fd.FederatedGBDT(depth=2, leaf=5, bins=8),
    "FFGB, networks": fd.FFGB(fd.Net(fd.MLP(4), _FEW_EPOCHS), step=1.0),
    "FFGBDistill": fd.FFGBDistill(
        fd.MLP(5), _PUBLIC, oracle=_FEW_EPOCHS, student=_FEW_EPOCHS, local_steps=2
    ),
    # not by Adam: where teacher and student nearly agree, it makes steps of rounding errors
    "FedAvgDistill": fd.FedAvgDistill(
        model=fd.MLP(5),
        public=_PUBLIC,
        student=fd.Training(lr=0.05, epochs=2, batch_size=16),
        lr=0.05,
        batch_size=16,
    ),
    "Everything the contract allows": Everything(),
    "Central": fd.Central(fd.Linear(), lr=0.1, momentum=0.9, batch_size=16),
    "KRR": fd.KRR(FEATURES, reg=0.1),
}

ENGINES = {
    "Local": fd.Local(),
    "Delayed by nothing": fd.Delayed(fd.Local()),
    "Ray": fd.Ray(workers=2),
}

# A round of several exchanges that build on each other: late messages are refused.
AT_ONCE = ("FFGB, line search", "FederatedGBDT")

# On Ray every algorithm is compared with Local; these pass every check there.
ONE_A_FAMILY = (
    "FedAvg, MLP, server momentum",
    "Scaffold",
    "Ditto",
    "FedRep",
    "Independent",
    "FedNewton, cg",
    "FedFW, augmented, signs",
    "FedBoost, cache",
    "FedRes, a network and different local models",
    "FFGB, networks",
    "Everything the contract allows",
    "Central",
)
