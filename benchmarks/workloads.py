"""The workloads, each done three ways: by `fd.run`, by a plain PyTorch loop, and by hand at the limit of batching."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import foedus as fd

LR, BATCH, FEATURES, CLASSES = 0.1, 32, 784, 10


@dataclass(frozen=True)
class Workload:
    """clients x rows each, `cohort` of them in a round, one epoch of mini-batches."""

    name: str
    title: str
    clients: int
    rows: int
    cohort: int
    model: fd.Model
    module: Callable[[], nn.Module]
    rounds: int
    hidden: int | None = None
    limit: bool = True
    features: int = FEATURES
    batch: int = BATCH

    def data(self) -> fd.Federation:
        """Random rows, the same for everybody: timing does not depend on their values."""
        rng = np.random.default_rng(0)
        n = self.clients * self.rows
        x = rng.standard_normal((n, self.features), dtype=np.float32)
        y = (x[:, :CLASSES] + rng.standard_normal((n, CLASSES))).argmax(1)
        return fd.split(fd.Data.from_arrays(x, y, classes=CLASSES), "iid", clients=self.clients)


class McMahanCNN(nn.Module):
    """The same network as `fd.CNN.mnist()`."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.view(-1, 1, 28, 28)))


def softmax_regression() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, CLASSES))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("w1", "softmax regression, 100 x 600 rows, cohort 10", 100, 600, 10, fd.Linear(), softmax_regression, 20),
        Workload("w2", "MLP 784-200-10, 100 x 600 rows, cohort 10", 100, 600, 10, fd.MLP(200), mlp, 10, hidden=200),
        Workload("w3", "softmax regression, 1,000 x 60 rows, cohort 100", 1000, 60, 100, fd.Linear(), softmax_regression, 20),
        Workload(
            "w4", "CNN 32/64, fc 512, 100 x 600 rows, cohort 10", 100, 600, 10, fd.CNN.mnist(), McMahanCNN, 1, limit=False
        ),
    )
}


CROWD = Workload(
    "crowd",
    "Softmax regression, 100,000 clients x 20 rows x 100 features, cohort 1,000, batches of 10",
    100_000,
    20,
    1000,
    fd.Linear(),
    lambda: nn.Linear(100, CLASSES),
    20,
    features=100,
    batch=10,
)


def foedus_rounds(work: Workload, fed: fd.Federation, rounds: int) -> Tensor:
    """`fd.run`, evaluation off; returns one of the learnt tensors, for comparison."""
    algorithm = fd.FedAvg(work.model, lr=LR, batch_size=work.batch)
    run = fd.run(algorithm, fed, rounds, participation=work.cohort / work.clients, evaluate_every=0)
    return next(iter(run.state.w.values()))


class PlainLoop:
    """What one would write without a framework: a module, an optimizer, one client after the other."""

    def __init__(self, work: Workload, fed: fd.Federation):
        self.work = work
        self.x = torch.from_numpy(fed.data.x_train)[fed.rows].view(work.clients, work.rows, work.features)
        self.y = torch.from_numpy(fed.data.y_train)[fed.rows].view(work.clients, work.rows)
        self.rng = np.random.default_rng(0)
        self.model = work.module()
        self.local = copy.deepcopy(self.model)

    def round(self) -> None:
        loss_of = nn.functional.cross_entropy
        total = [torch.zeros_like(p) for p in self.model.parameters()]
        chosen = self.rng.choice(self.work.clients, self.work.cohort, replace=False)
        for c in chosen:
            self.local.load_state_dict(self.model.state_dict())
            optimizer = torch.optim.SGD(self.local.parameters(), lr=LR)
            order = torch.from_numpy(self.rng.permutation(self.work.rows))
            for part in order.split(self.work.batch):
                optimizer.zero_grad()
                loss_of(self.local(self.x[c][part]), self.y[c][part]).backward()
                optimizer.step()
            with torch.no_grad():
                for t, p in zip(total, self.local.parameters(), strict=True):
                    t.add_(p, alpha=1 / len(chosen))
        with torch.no_grad():
            for p, t in zip(self.model.parameters(), total, strict=True):
                p.copy_(t)


class Limit:
    """Softmax regression or one hidden layer by hand: `bmm` over clients, analytic gradients, in place."""

    def __init__(self, work: Workload, fed: fd.Federation):
        self.work = work
        self.x = torch.from_numpy(fed.data.x_train)[fed.rows]
        self.y = torch.from_numpy(fed.data.y_train)[fed.rows]
        self.rng = np.random.default_rng(0)
        sizes = (work.features, CLASSES) if work.hidden is None else (work.features, work.hidden, CLASSES)
        scale = 0.0 if work.hidden is None else 0.03
        self.weights = [scale * torch.randn(b, a) for a, b in itertools.pairwise(sizes)]
        self.biases = [torch.zeros(b) for b in sizes[1:]]

    @torch.no_grad()
    def round(self) -> None:
        work, c = self.work, self.work.cohort
        chosen = torch.from_numpy(self.rng.choice(work.clients, c, replace=False))
        order = torch.from_numpy(self.rng.random((c, work.rows)).argsort(1))
        index = (chosen.unsqueeze(1) * work.rows + order).flatten()
        x = self.x.index_select(0, index).view(c, work.rows, -1)
        y = self.y.index_select(0, index).view(c, work.rows, 1)
        weights = [w.expand(c, -1, -1).clone() for w in self.weights]
        biases = [b.expand(c, 1, -1).clone() for b in self.biases]
        for first in range(0, work.rows, work.batch):
            a, target = x[:, first : first + work.batch], y[:, first : first + work.batch]
            step = -LR / a.shape[1]
            if work.hidden is None:
                slope = torch.baddbmm(biases[0], a, weights[0].mT).softmax(-1)
                slope.scatter_add_(-1, target, torch.full((), -1.0).expand_as(target))
            else:
                h = torch.baddbmm(biases[0], a, weights[0].mT).relu_()
                top = torch.baddbmm(biases[1], h, weights[1].mT).softmax(-1)
                top.scatter_add_(-1, target, torch.full((), -1.0).expand_as(target))
                slope = torch.bmm(top, weights[1]).mul_(h > 0)
                weights[1].baddbmm_(top.mT, h, alpha=step)
                biases[1].add_(top.sum(1, keepdim=True), alpha=step)
            weights[0].baddbmm_(slope.mT, a, alpha=step)
            biases[0].add_(slope.sum(1, keepdim=True), alpha=step)
        self.weights = [w.mean(0) for w in weights]
        self.biases = [b.mean(0)[0] for b in biases]
