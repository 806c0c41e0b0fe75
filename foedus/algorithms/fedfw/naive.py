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
    """Frank-Wolfe at the clients, then averaging (equation 20): the paper's Appendix A shows that
    it can stay where it is forever.

        client i:  s_i = argmin over s in D of <grad f_i(x), s>
        server:    x <- (1 - eta) x + eta / n sum_i s_i

    with eta = 2 / (t + 1). It averages what each client alone would like best, not the clients'
    gradients. Kept as a warning.
    """

    weighs_rows: ClassVar[bool] = True

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
