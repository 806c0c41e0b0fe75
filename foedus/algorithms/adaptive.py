"""FedAdam, FedYogi and FedAdagrad: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and
McMahan, "Adaptive federated optimization", ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from foedus.algorithms.local_training import LocalTraining
from foedus.base import tree
from foedus.base.tree import State
from foedus.core.algorithm import Client, client_step
from foedus.core.clients import Clients
from foedus.models.base import Params


@dataclass(frozen=True)
class AdaptiveServer(LocalTraining):
    """FedAvg whose server takes the average change as the gradient of an adaptive method.

        client i:  w_i <- w, then mini-batch steps w_i <- w_i - lr * g_i(w_i);  sends w_i - w
        server:    d <- sum_i p_i (w_i - w);   m <- beta1 m + (1 - beta1) d                  line 10
                   v <- `second`(v, d)                                                lines 11 to 13
                   w <- w + server_lr * m / (sqrt(v) + tau)                                  line 14

    with m = 0 and v = tau^2 before the first round, and without bias correction, as in the paper.

    Args:
        server_lr: Server step size (eta): about how far a parameter moves in a round.
        beta1: Decay of the average change m.
        tau: Degree of adaptivity: the larger, the more the steps are like FedAvg's.
    """

    keeps_layers: ClassVar[bool] = True

    server_lr: Annotated[float, Gt(0)] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    tau: Annotated[float, Gt(0)] = 1e-3

    @client_step(batch="whole")
    def train(self, client: Client, w: Params) -> tuple[Params, Any]:
        return self.answer(client, w, self.descend(client, w)["params"])

    def second(self, v: Tensor, d: Tensor) -> Tensor:
        """The second moment v after a round whose average change is d."""
        raise NotImplementedError(f"{type(self).__name__} does not define second")

    def start(self, clients: Clients) -> State:
        state = super().start(clients)
        v = tree.map(lambda w: torch.full_like(w, self.tau**2), state.w)
        return state.replace(m=tree.zeros_like(state.w), v=v)

    def round(self, clients: Clients, state: State) -> State:
        d = clients.mean(self.train, weights=self.weights, w=state.w)
        m = tree.add(tree.scale(state.m, self.beta1), d, 1 - self.beta1)
        v = tree.map(self.second, state.v, d)
        step = tree.map(lambda m, v: m / (v.sqrt() + self.tau), m, v)
        return state.replace(w=tree.add(state.w, step, self.server_lr), m=m, v=v)


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """FedAvg with Adam's steps at the server (Reddi et al., 2021).

        client i:  w_i <- w, then mini-batch steps w_i <- w_i - lr * g_i(w_i);  sends w_i - w
        server:    d <- sum_i p_i (w_i - w);   m <- beta1 m + (1 - beta1) d                  line 10
                   v <- beta2 v + (1 - beta2) d^2                                            line 13
                   w <- w + server_lr * m / (sqrt(v) + tau)                                  line 14

    with m = 0 and v = tau^2 before the first round, and without bias correction, as in the paper.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        beta2: Decay of the second moment v.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAdam(fd.Linear(), lr=0.1, server_lr=0.03), fed, rounds=10)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive
    federated optimization", ICLR 2021, Algorithm 2.
    """

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99

    def second(self, v: Tensor, d: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * d.square()


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAvg with Yogi's steps at the server (Reddi et al., 2021).

    As `fd.FedAdam`, with the second moment

        v <- v - (1 - beta2) d^2 sign(v - d^2)                                               line 12

    which moves by at most (1 - beta2) d^2, so that a round of large changes is forgotten slowly.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedYogi(fd.Linear(), lr=0.1, server_lr=0.03), fed, rounds=10)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive
    federated optimization", ICLR 2021, Algorithm 2.
    """

    def second(self, v: Tensor, d: Tensor) -> Tensor:
        square = d.square()
        return v - (1 - self.beta2) * square * (v - square).sign()


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    """FedAvg with Adagrad's steps at the server (Reddi et al., 2021).

    As `fd.FedAdam`, with the second moment

        v <- v + d^2                                                                         line 11

    so that steps shrink where changes were large.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        server_lr: Server step size (eta): about how far a parameter moves in a round.
        beta1: Decay of the average change m; 0 is the paper's Adagrad.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAdagrad(fd.Linear(), lr=0.1), fed, rounds=10)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive
    federated optimization", ICLR 2021, Algorithm 2.
    """

    server_lr: Annotated[float, Gt(0)] = 0.1
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.0

    def second(self, v: Tensor, d: Tensor) -> Tensor:
        return v + d.square()
