"""FedAvg with fine-tuning, the usual baseline of personal methods: Wang, Mathews, Kiddon, Eichner,
Beaufays and Ramage, "Federated evaluation of on-device personalization", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

from foedus.algorithms.own_model import OwnTraining
from foedus.core.algorithm import Client
from foedus.models.base import Params


@dataclass(frozen=True)
class FineTuned(OwnTraining):
    """FedAvg; each client's own model is the global one after some local steps (Wang et al., 2019).

        client i:  w_i <- w, then local training;  sends w_i - w
                   v_i <- w, then `own_steps` steps with `own_lr`;  keeps v_i
        server:    as FedAvg

    v_i starts from the global model that the client was sent last. Nothing is sent for it: messages
    are FedAvg's. With the default settings v_i is w_i, and is not trained twice. `accuracy` is the
    global model's, `own_accuracy` that of the v_i on the clients' own test rows.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.FineTuned(fd.Linear(), lr=0.1, own_lr=0.05), fed, rounds=5)
        >>> last = run.history.iloc[-1]
        >>> last.own_accuracy > last.accuracy
        True

    Reference: Wang, Mathews, Kiddon, Eichner, Beaufays and Ramage, "Federated evaluation of
    on-device personalization", 2019.
    """

    def train(self, client: Client, w: Params) -> tuple[Params, dict[str, Params]]:
        trained = self.descend(client, w)["params"]
        alike = self.own_lr is None and self.own_steps is None
        own = trained if alike else self.descend_own(client, w)
        return {k: trained[k] - v for k, v in w.items()}, {"w": own}
