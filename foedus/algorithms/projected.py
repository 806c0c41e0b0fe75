"""FedAvg with a projection onto a convex set after every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from foedus.algorithms.fedavg import FedAvg
from foedus.algorithms.fedfw.constrained import gap
from foedus.base import random
from foedus.base.spec import Spec
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.geometry import Domain, L2Ball, ModelDomain, domain_of
from foedus.models.base import Params
from foedus.models.training.gradients import value_and_gradient


@dataclass(frozen=True)
class ProjectedFedAvg(FedAvg):
    """FedAvg whose server projects the average onto a convex set in every round.

        server:    w <- P_D(w + server_lr * sum_i p_i (w_i - w))

    The history has `fw_gap` and `objective`.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        domain: The set D: over all parameters as one vector, or `fd.PerLayer(...)`.
        measure_every: Log `objective` and `fw_gap` every this number of rounds (0: never).

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> projected = fd.ProjectedFedAvg(fd.Linear(), lr=0.1, domain=fd.L2Ball(5.0))
        >>> fd.run(projected, fed, rounds=5).history.accuracy.iloc[-1] > 0.8
        True
    """

    averages_statistics: ClassVar[bool] = False

    domain: Domain | ModelDomain = L2Ball(10.0)  # noqa: RUF009 - frozen
    measure_every: Annotated[int, Ge(0)] = 1

    def __post_init__(self) -> None:
        domain_of(self.domain)
        super().__post_init__()

    def check(self, spec: Spec) -> None:
        super().check(spec)
        domain_of(self.domain).check(self.model.init(spec, random.key(0)))

    def look(self, client: Client, w: Params) -> tuple[dict[str, Any], None]:
        loss = self.loss_of(client.spec)
        value, slope = value_and_gradient(self.model, loss, w, client.data)
        return {"objective": value, "slope": slope}, None

    def start(self, clients: Clients) -> State:
        state = super().start(clients)
        return state.replace(
            w=domain_of(self.domain).project(state.w), ids=clients.ids, sizes=clients.sizes
        )

    def round(self, clients: Clients, state: State) -> State:
        state = super().round(clients, state)
        state = state.replace(w=domain_of(self.domain).project(state.w))
        if self.measure_every and clients.round % self.measure_every == 0:
            seen = clients.measure(self.look, weights=self.weights, w=state.w)
            if seen is not None:
                clients.log(
                    objective=seen["objective"],
                    fw_gap=gap(domain_of(self.domain), seen["slope"], state.w),
                )
        return state
