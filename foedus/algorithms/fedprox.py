"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated optimization in heterogeneous
networks", MLSys 2020, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from foedus.algorithms.fedavg import FedAvg
from foedus.core.algorithm import Client, client_step
from foedus.models.base import Params


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients are held near the server's model (Li et al., 2020).

    Client i minimizes f_i(w_i) + mu/2 |w_i - w|^2:

        client i:  w_i <- w_i - lr * (g_i(w_i) + mu (w_i - w));  sends w_i - w
        server:    as FedAvg

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        mu: Weight of the proximal term; 0 is FedAvg.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.FedProx(fd.Linear(), lr=0.1, mu=0.1), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated optimization in
    heterogeneous networks", MLSys 2020, Algorithm 2.
    """

    mu: Annotated[float, Ge(0)] = 0.01

    @client_step(batch="whole")
    def train(self, client: Client, w: Params) -> tuple[Params, Any]:
        return self.answer(client, w, self.descend(client, w, prox=self.mu)["params"])
