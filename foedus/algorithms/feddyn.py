"""FedDyn: Acar, Zhao, Matas, Mattina, Whatmough and Saligrama, "Federated learning based on dynamic
regularization", ICLR 2021, Algorithm 1. With every client in every round it is FedPD (Zhang, Hong,
Dhople, Yin and Liu, 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from foedus.algorithms.local_training import LocalTraining
from foedus.base import tree
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.models.base import Params


@dataclass(frozen=True)
class FedDyn(LocalTraining):
    """Federated dynamic regularization (Acar et al., 2021), or FedPD (Zhang et al., 2021).

    Each client's objective is changed so that the clients' minimizers agree with the global one:

        client i:  w_i ~ argmin of f_i(v) - <grad_i, v> + alpha/2 |v - w|^2, by local training
                   grad_i <- grad_i - alpha (w_i - w);  sends w_i - w
        server:    h <- h - alpha |P|/m * mean_P(w_i - w);  w <- mean_P(w_i) - h / alpha

    P are the clients of the round, m is the number of all clients. With every client in every round
    this is FedPD.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        weights: How clients count in averages: "uniform", as in the paper, or "rows".
        alpha: Weight of the regularization.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.FedDyn(fd.Linear(), lr=0.1, alpha=0.1), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Acar, Zhao, Matas, Mattina, Whatmough and Saligrama, "Federated learning based on
    dynamic regularization", ICLR 2021, Algorithm 1.
    """

    averages_statistics: ClassVar[bool] = True

    weights: Literal["rows", "uniform"] = "uniform"
    alpha: Annotated[float, Gt(0)] = 0.01

    def init(self, client: Client) -> Params:
        return tree.zeros_like(self.moving(self.model.init(client.spec, client.shared)))

    def train(self, client: Client, w: Params) -> tuple[Params, Params]:
        grad = client.state
        trained = self.descend(client, w, prox=self.alpha, correction=tree.scale(grad, -1.0))
        move = tree.sub(trained["params"], w)
        return move, tree.add(grad, self.moving(move), -self.alpha)

    def start(self, clients: Clients) -> State:
        state = super().start(clients)
        return state.replace(h=tree.zeros_like(self.moving(state.w)))

    def round(self, clients: Clients, state: State) -> State:
        move = clients.mean(self.train, weights=self.weights, w=state.w)
        h = tree.add(state.h, self.moving(move), -self.alpha * clients.share(self.weights))
        w = tree.add(state.w, move)
        w = {**w, **{k: w[k] - v / self.alpha for k, v in h.items()}}
        return state.replace(w=w, h=h)
