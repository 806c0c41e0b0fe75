"""The workloads, each done three ways: by `fd.run`, by a plain PyTorch loop, and by hand at the
limit of batching.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import foedus as fd
from benchmarks.nets import CLASSES, FEATURES, NETS

LR, BATCH = 0.1, 32


@dataclass(frozen=True)
class Workload:
    """clients x rows each, `cohort` of them in a round, one epoch of batches. net: the model as a
    module, of `benchmarks.nets`.
    """

    name: str
    title: str
    clients: int
    rows: int
    cohort: int
    model: fd.Model | nn.Module
    net: str
    rounds: int
    hidden: int | None = None
    limit: bool = True
    batch: int = BATCH
    shape: tuple[int, ...] = (FEATURES,)
    signal: float = 4.0  # length of a pattern; the noise has length 1 in every direction

    def data(self) -> fd.Federation:
        """Ten coarse patterns under noise, so that every model learns something in a few rounds;
        the last 2,000 rows are held out.
        """
        rng = np.random.default_rng(0)
        n = self.clients * self.rows
        size = self.features
        side = int((size // self.channels) ** 0.5)
        blocks = -(-side // 4)
        coarse = rng.standard_normal((CLASSES, self.channels, blocks, blocks), dtype=np.float32)
        patterns = np.kron(coarse, np.ones((4, 4), np.float32))[..., :side, :side].reshape(
            CLASSES, *self.shape
        )
        y = rng.integers(CLASSES, size=n + 2000)
        x = rng.standard_normal((n + 2000, *self.shape), dtype=np.float32)
        x += (self.signal / size**0.5) * patterns[y]
        return fd.split(
            fd.Data.from_arrays(x[:n], y[:n], x[n:], y[n:], classes=CLASSES),
            "iid",
            clients=self.clients,
        )

    @property
    def features(self) -> int:
        return int(np.prod(self.shape))

    @property
    def channels(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    def module(self) -> nn.Module:
        return NETS[self.net]()

    @property
    def algorithm(self) -> fd.FedAvg:
        return fd.FedAvg(self.model, lr=LR, batch_size=self.batch)


def seeded(net: str) -> nn.Module:
    """A network whose first weights are the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETS[net]()


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "w1",
            "softmax regression, 100 x 600 rows, cohort 10",
            100,
            600,
            10,
            fd.Linear(),
            "softmax regression",
            20,
        ),
        Workload(
            "w2",
            "MLP 784-200-10, 100 x 600 rows, cohort 10",
            100,
            600,
            10,
            fd.MLP(200),
            "mlp",
            10,
            hidden=200,
        ),
        Workload(
            "w3",
            "softmax regression, 1,000 x 60 rows, cohort 100",
            1000,
            60,
            100,
            fd.Linear(),
            "softmax regression",
            20,
        ),
        Workload(
            "w4",
            "CNN 32/64, fc 512, 100 x 600 rows, cohort 10",
            100,
            600,
            10,
            fd.CNN.mnist(),
            "mnist cnn",
            1,
            limit=False,
            signal=16.0,
        ),
        Workload(
            "w5",
            "CNN for CIFAR, 1,000 x 50 rows, cohort 50, batches of 10",
            1000,
            50,
            50,
            seeded("cifar cnn"),
            "cifar cnn",
            2,
            limit=False,
            batch=10,
            shape=(3, 32, 32),
            signal=60.0,
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
    "softmax 100",
    20,
    batch=10,
    shape=(100,),
)


def foedus_rounds(work: Workload, fed: fd.Federation, rounds: int) -> Tensor:
    """`fd.run`, evaluation off; returns one of the learned tensors, for comparison."""
    run = fd.run(
        work.algorithm, fed, rounds, participation=work.cohort / work.clients, evaluate_every=0
    )
    return next(iter(run.state.w.values()))


class PlainLoop:
    """What one would write without a framework: a module, an optimizer, one client after the
    other.
    """

    def __init__(self, work: Workload, fed: fd.Federation):
        self.work = work
        self.x = torch.from_numpy(fed.data.x_train)[fed.rows].view(
            work.clients, work.rows, *work.shape
        )
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
    """Softmax regression or one hidden layer by hand: `bmm` over clients, analytic gradients, in
    place.

    The data lie where they are, as they do for foedus: a copy in the order of clients would take as
    much memory again.
    """

    def __init__(self, work: Workload, fed: fd.Federation):
        self.work = work
        self.x, self.y = (
            torch.from_numpy(fed.data.x_train).flatten(1),
            torch.from_numpy(fed.data.y_train),
        )
        self.rows = torch.from_numpy(fed.rows).view(work.clients, work.rows)
        self.rng = np.random.default_rng(0)
        sizes = (
            (work.features, CLASSES)
            if work.hidden is None
            else (work.features, work.hidden, CLASSES)
        )
        scale = 0.0 if work.hidden is None else 0.03
        self.weights = [scale * torch.randn(b, a) for a, b in itertools.pairwise(sizes)]
        self.biases = [torch.zeros(b) for b in sizes[1:]]

    @torch.no_grad()
    def round(self) -> None:
        work, c = self.work, self.work.cohort
        chosen = torch.from_numpy(self.rng.choice(work.clients, c, replace=False))
        order = torch.from_numpy(self.rng.random((c, work.rows)).argsort(1))
        index = self.rows[chosen].gather(1, order).flatten()
        x = self.x.index_select(0, index).view(c, work.rows, -1)
        y = self.y.index_select(0, index).view(c, work.rows, 1)
        weights = [w.expand(c, -1, -1).clone() for w in self.weights]
        biases = [b.expand(c, 1, -1).clone() for b in self.biases]
        for first in range(0, work.rows, work.batch):
            a, target = x[:, first : first + work.batch], y[:, first : first + work.batch]
            step = -LR / a.shape[1]
            if work.hidden is None:
                slope = _product(biases[0], weights[0], a).softmax(-1)
                slope.scatter_add_(-1, target, torch.full((), -1.0).expand_as(target))
            else:
                h = torch.baddbmm(biases[0], a, weights[0].mT).relu_()
                top = _product(biases[1], weights[1], h).softmax(-1)
                top.scatter_add_(-1, target, torch.full((), -1.0).expand_as(target))
                slope = torch.bmm(top, weights[1]).mul_(h > 0)
                weights[1].baddbmm_(top.mT, h, alpha=step)
                biases[1].add_(top.sum(1, keepdim=True), alpha=step)
            weights[0].baddbmm_(slope.mT, a, alpha=step)
            biases[0].add_(slope.sum(1, keepdim=True), alpha=step)
        self.weights = [w.mean(0) for w in weights]
        self.biases = [b.mean(0)[0] for b in biases]


def _product(bias: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """x W^T + b by (W x^T)^T: faster where rows outnumber outputs."""
    return torch.baddbmm(bias.mT, weight, x.mT).mT.contiguous()
