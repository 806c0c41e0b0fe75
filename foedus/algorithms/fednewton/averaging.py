"""FedAvg and FedProx on ridge regression with the closed-form start: the FedNewton paper's
baselines.

They are the averaging methods on the objective of `foedus.algorithms.fednewton`, so a local step
needs only the client's normal equations, M^2 operations an output for any number of rows.
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
    """FedAvg on ridge regression, started from the average of the clients' own solutions.

    A client makes `steps` gradient steps on all its rows, from w; the server averages the w_j:

        client j:  w_j <- w, then w_j <- w_j - lr (H_j w_j - b_j), `steps` times;  sends w_j
        server:    w <- sum_j p_j w_j

    The same as `FedAvg(Linear(bias=False), loss="squared", batch_size=None, steps=steps,
    weight_decay=reg)` on features, but for the start.

    Args:
        lr: Step size.
        steps: Local gradient steps; the paper makes 2.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> features = fd.RandomFourier(200, bandwidth=4.0)
        >>> run = fd.run(fd.RidgeFedAvg(features, reg=1e-3, lr=0.5), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: "Efficient Newton-type federated learning with non-IID data", its baselines.
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
    """FedProx on ridge regression, with the exact local solution.

    Client j solves min F_j(v) + mu/2 |v - w|^2, and the server averages:

        client j:  sends w_j = (H_j + mu I)^-1 (b_j + mu w)
        server:    w <- sum_j p_j w_j

    Started from the average of the clients' own solutions (with `reg` alone), as in the paper.

    Args:
        mu: Weight of the proximal term.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> features = fd.RandomFourier(200, bandwidth=4.0)
        >>> run = fd.run(fd.RidgeFedProx(features, reg=1e-3, mu=1e-2), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: "Efficient Newton-type federated learning with non-IID data", its baselines.
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
