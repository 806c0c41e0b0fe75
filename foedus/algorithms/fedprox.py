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
    """FedAvg whose clients are held near the server's model: client i minimises f_i(w_i) + mu/2
    |w_i - w|^2.

        client i:  w_i <- w_i - lr * (g_i(w_i) + mu (w_i - w));  sends w_i - w

    `mu=0` is FedAvg.
    """

    mu: Annotated[float, Ge(0)] = 0.01

    @client_step(batch="whole")
    def train(self, client: Client, w: Params) -> tuple[Params, Any]:
        return self.answer(client, w, self.descend(client, w, prox=self.mu)["params"])
