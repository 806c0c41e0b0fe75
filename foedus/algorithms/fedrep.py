"""FedRep: Collins, Hassani, Mokhtari and Shakkottai, "Exploiting shared representations for
personalized federated learning", ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from foedus.algorithms.fedper import FedPer
from foedus.algorithms.own_model import OwnTraining
from foedus.base import tree
from foedus.core.algorithm import Client
from foedus.models.base import Params


@dataclass(frozen=True)
class FedRep(OwnTraining, FedPer):
    """As FedPer, but a client first fits its head to the shared body (Collins et al., 2021).

        client i:  h_i <- h_i - own_lr * grad_h f_i(b, h_i), `own_steps` times                line 6
                   b_i <- b, then local training of b_i alone, with h_i fixed                 line 8
                   sends b_i - b;  keeps (b, h_i), its own model
        server:    as FedAvg, on b alone                                                     line 10

    The own model has the body that h_i was fitted to, not the b_i that is sent.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> fedrep = fd.FedRep(fd.MLP(20), shared="*0", lr=0.1, own_steps=20)
        >>> fd.run(fedrep, fed, rounds=5).history.own_accuracy.iloc[-1] > 0.8
        True

    Reference: Collins, Hassani, Mokhtari and Shakkottai, "Exploiting shared representations for
    personalized federated learning", ICML 2021, Algorithm 1.
    """

    def train(self, client: Client, w: Params) -> tuple[Params, dict[str, Params]]:
        own = {**client.state["w"], **w}
        head = own.keys() - w.keys()
        own = self.descend_own(client, own, frozen=frozenset(w))
        body = self.body(self.descend(client, own, frozen=frozenset(head))["params"])
        return tree.sub(body, w), {"w": own}
