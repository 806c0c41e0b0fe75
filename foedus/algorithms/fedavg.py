"""FedAvg: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-efficient learning of
deep networks from decentralized data", AISTATS 2017; server momentum as in Hsu, Qi and Brown
(2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from foedus.algorithms.local_training import LocalTraining
from foedus.base import tree
from foedus.base.tree import State
from foedus.core.algorithm import Client, client_step
from foedus.core.clients import Clients
from foedus.models.base import Params


@dataclass(frozen=True)
class FedAvg(LocalTraining):
    """Federated averaging (McMahan et al., 2017).

        client i:  w_i <- w, then mini-batch steps w_i <- w_i - lr * g_i(w_i);  sends w_i - w
        server:    v <- server_momentum * v + sum_i p_i (w_i - w);  w <- w + server_lr * v

    p_i is proportional to client i's number of rows (`weights="uniform"`: equal). With
    `server_lr=1` and no momentum this is the paper's weighted average of the w_i.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        server_lr: Server step size; 1 gives the paper's average.
        server_momentum: Share of v that is kept from round to round (Hsu, Qi and Brown, 2019).

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-efficient learning
    of deep networks from decentralized data", AISTATS 2017.
    """

    averages_statistics: ClassVar[bool] = True
    keeps_layers: ClassVar[bool] = True

    server_lr: Annotated[float, Gt(0)] = 1.0
    server_momentum: Annotated[float, Ge(0), Lt(1)] = 0.0

    @client_step(batch="whole")
    def train(self, client: Client, w: Params) -> tuple[Params, Any]:
        return self.answer(client, w, self.descend(client, w)["params"])

    def round(self, clients: Clients, state: State) -> State:
        move = clients.mean(self.train, weights=self.weights, w=state.w)
        if self.server_momentum:
            v = self.moving(move)
            v = tree.add(v, state.v, self.server_momentum) if "v" in state else v
            state, move = state.replace(v=v), {**move, **v}
        return state.replace(w=self.moved(state.w, move, self.server_lr))
