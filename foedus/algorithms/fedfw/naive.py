"""Frank-Wolfe at the clients, then averaging: the method that FedFW's Appendix A warns of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from foedus.algorithms.fedfw.constrained import ConstrainedTraining
from foedus.base import tree
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.models.base import Params


@dataclass(frozen=True)
class NaiveFW(ConstrainedTraining):
    """Frank-Wolfe at the clients, then averaging (equation 20): a method that can fail.

        client i:  s_i = argmin over s in D of <grad f_i(x), s>
        server:    x <- (1 - eta) x + eta / n sum_i s_i

    with eta = 2 / (t + 1). It averages the best points of each client alone, not the clients'
    gradients: the paper's Appendix A shows that it can stay where it is forever. Kept as a warning.

    Args:
        measure_every: Log `objective` and `fw_gap` every this number of rounds (0: never).

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.NaiveFW(fd.Linear(), fd.L1Ball(30.0)), fed, rounds=5)
        >>> run.history.fw_gap.iloc[-1] > 1
        True

    Reference: Dadras, Banerjee, Prakhya and Yurtsever, "Federated Frank-Wolfe Algorithm", Appendix
    A.
    """

    weighs_rows: ClassVar[bool] = True
    sends_points: ClassVar[str] = "point"

    measure_every: Annotated[int, Ge(0)] = 1

    def point(self, client: Client, x: Params) -> tuple[Any, None]:
        return self.set.lmo(self.slope(client, x)), None

    def start(self, clients: Clients) -> State:
        return State(center=self.beginning(clients), spec=clients.spec)

    def round(self, clients: Clients, state: State) -> State:
        eta = 2 / (clients.round + 1)
        mean = self.set.dense(
            clients.mean(self.point, weights="uniform", x=state.center), state.center
        )
        center = tree.map(lambda c, s: (1 - eta) * c + eta * s, state.center, mean)
        self.measure(clients, center, self.measure_every, consensus=False)
        return state.replace(center=center)
