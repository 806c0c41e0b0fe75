"""FedAvg and FedProx on ridge regression with the closed-form start: what the FedNewton paper
compares itself with.

They are the averaging methods on the very objective of `foedus.algorithms.fednewton`, so a local
step needs only the client's normal equations, M^2 operations an output however many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt
from torch import Tensor

from foedus.algorithms.fednewton.regression import FeatureRegression
from foedus.base.rows import Rows
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.models.least_squares import DTYPES, Ridge, prepare_ridge, product, solve


@dataclass(frozen=True)
class RidgeFedAvg(FeatureRegression):
    """FedAvg: `steps` gradient steps on all local rows, w_j <- w_j - lr (H_j w_j - b_j) from w; the
    server averages the w_j.

    The same as `FedAvg(Linear(bias=False), loss="squared", batch_size=None, steps=steps,
    weight_decay=reg)` on features, but started from the average of the clients' own solutions. The
    paper makes 2 steps.
    """

    lr: Annotated[float, Gt(0)] = 0.1
    steps: Annotated[int, Ge(1)] = 2

    def train(self, client: Client, w: Tensor) -> tuple[Tensor, None]:
        for _ in range(self.steps):
            w = w - self.lr * (product(client.prepared, self.reg, w) - client.prepared["right"])
        return w, None

    def round(self, clients: Clients, state: State) -> State:
        return state.replace(w=clients.mean(self.train, w=state.w))


@dataclass(frozen=True)
class RidgeFedProx(FeatureRegression):
    """FedProx with the exact local solution of min F_j(v) + mu/2 |v - w|^2, which is (H_j + mu
    I)^-1 (b_j + mu w).

    Started from the average of the clients' own solutions (with `reg` alone), as in the paper.
    """

    mu: Annotated[float, Gt(0)] = 1e-4

    def prepare(self, data: Rows) -> Ridge:
        return prepare_ridge(self.features, self.reg, DTYPES[self.dtype], data, pull=self.mu)

    def train(self, client: Client, w: Tensor) -> tuple[Tensor, None]:
        return solve(
            client.prepared, self.reg + self.mu, client.prepared["right"] + self.mu * w
        ), None

    def round(self, clients: Clients, state: State) -> State:
        return state.replace(w=clients.mean(self.train, w=state.w))
