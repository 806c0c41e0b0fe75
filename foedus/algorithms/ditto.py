"""Ditto: Li, Hu, Beirami and Smith, "Ditto: Fair and robust federated learning through
personalization", ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from foedus.algorithms.own_model import OwnTraining
from foedus.base import tree
from foedus.core.algorithm import Client
from foedus.models.base import Params


@dataclass(frozen=True)
class Ditto(OwnTraining):
    """FedAvg, and a model for each client that is held near the global one (Li et al., 2021).

        client i:  w_i <- w, then local training on f_i;  sends w_i - w                       line 6
                   v_i <- v_i - own_lr * (g_i(v_i) + lam (v_i - w)), `own_steps` times;       line 5
                   keeps v_i
        server:    as FedAvg                                                                  line 7

    w is the model that the client was sent in this round. `lam=0` trains every v_i alone; the
    larger lam, the nearer v_i is to w. Messages are FedAvg's. `accuracy` is the global model's,
    `own_accuracy` that of the v_i on the clients' own test rows.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        lam: The pull to the global model (lambda).

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.Ditto(fd.Linear(), lr=0.1, lam=0.5), fed, rounds=5)
        >>> last = run.history.iloc[-1]
        >>> last.own_accuracy > last.accuracy
        True

    Reference: Li, Hu, Beirami and Smith, "Ditto: Fair and robust federated learning through
    personalization", ICML 2021, Algorithm 1.
    """

    keeps_layers: ClassVar[bool] = False

    lam: Annotated[float, Ge(0)] = 0.1

    def train(self, client: Client, w: Params) -> tuple[Params, dict[str, Params]]:
        move = tree.sub(self.descend(client, w)["params"], w)
        own = client.state["w"]
        # lam (v - w) = lam (v - own) + lam (own - w), where training starts at own
        pull = tree.scale(tree.sub(own, w), self.lam)
        return move, {"w": self.descend_own(client, own, prox=self.lam, correction=pull)}
