"""Constrained averaging with projections: FedDR, and FedAvg with a projection at the server. What FedFW is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from foedus.algorithms.fedavg import FedAvg
from foedus.algorithms.fedfw import gap
from foedus.algorithms.training import LocalTraining, positive
from foedus.core import random, tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.spec import Spec
from foedus.core.tree import State
from foedus.errors import ConfigError, whole_number
from foedus.geometry import Domain, L2Ball, ModelDomain, domain_of
from foedus.models.base import Params
from foedus.models.losses import loss_for
from foedus.models.training import value_and_gradient


@dataclass(frozen=True)
class FedDR(LocalTraining):
    """Randomised Douglas-Rachford splitting: Tran-Dinh, Pham, Phan and Nguyen, NeurIPS 2021, Algorithm 1.

        client i:  y_i <- y_i + alpha (x - x_i);   x_i ~ prox_{eta f_i}(y_i);   h_i = 2 x_i - y_i;   sends h_i - (its last h_i)
        server:    h <- h + 1/n sum_i (what arrived);   x <- prox_{eta g}(h)

    for min 1/n sum_i f_i(x) + g(x). Here g says that x is in `domain`, so its prox is the projection. The prox of f_i is
    approximated by local training from y_i on f_i(v) + |v - y_i|^2 / (2 eta); `relaxation` is alpha, in (0, 2). Clients that stay
    away change nothing. All begin at x_i = y_i = h_i, the model's own start.
    """

    domain: Domain | ModelDomain = L2Ball(10.0)  # noqa: RUF009 - frozen
    eta: float = 10.0
    relaxation: float = 1.0
    weights: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        domain_of(self.domain)
        positive(self, "eta")
        if self.weights != "uniform":
            raise ConfigError(f"weights={self.weights!r}: FedDR's clients count alike; leave it at 'uniform'")
        if isinstance(self.relaxation, bool) or not isinstance(self.relaxation, Real) or not 0 < self.relaxation < 2:
            raise ConfigError(f"relaxation={self.relaxation!r} must be above 0 and below 2")

    def check(self, spec: Spec) -> None:
        super().check(spec)
        domain_of(self.domain).check(self.model.init(spec, random.key(0)))

    def init(self, client: Client) -> dict[str, Params]:
        w = self.model.init(client.spec, client.shared)
        return {"x": w, "y": w}

    def train(self, client: Client, w: Params) -> tuple[Params, dict[str, Params]]:
        old = client.state
        y = tree.map(lambda y, w, x: y + self.relaxation * (w - x), old["y"], w, old["x"])
        x = self.descend(client, y, prox=1 / self.eta)["params"]
        move = tree.map(lambda x, y, x0, y0: 2 * (x - x0) - (y - y0), x, y, old["x"], old["y"])
        return move, {"x": x, "y": y}

    def start(self, clients: Clients) -> State:
        w = self.model.init(clients.spec, clients.shared)
        return State(w=domain_of(self.domain).project(w), h=w, spec=clients.spec)

    def round(self, clients: Clients, state: State) -> State:
        move = clients.mean(self.train, weights="uniform", w=state.w)
        h = tree.add(state.h, move, clients.share("uniform"))
        return state.replace(h=h, w=domain_of(self.domain).project(h))


@dataclass(frozen=True)
class ProjectedFedAvg(FedAvg):
    """FedAvg whose server projects the average onto `domain` in every round. The history has `fw_gap` and `objective`."""

    domain: Domain | ModelDomain = L2Ball(10.0)  # noqa: RUF009 - frozen
    measure_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        domain_of(self.domain)
        whole_number("measure_every", self.measure_every, 0)

    def check(self, spec: Spec) -> None:
        super().check(spec)
        domain_of(self.domain).check(self.model.init(spec, random.key(0)))

    def look(self, client: Client, w: Params) -> tuple[dict[str, Any], None]:
        value, slope = value_and_gradient(self.model, loss_for(self.loss, client.spec.classes), w, client.data)
        return {"objective": value, "slope": slope}, None

    def start(self, clients: Clients) -> State:
        state = super().start(clients)
        return state.replace(w=domain_of(self.domain).project(state.w), ids=clients.ids, sizes=clients.sizes)

    def round(self, clients: Clients, state: State) -> State:
        state = super().round(clients, state)
        state = state.replace(w=domain_of(self.domain).project(state.w))
        if self.measure_every and clients.measures and clients.round % self.measure_every == 0:
            seen: dict[str, Tensor] = clients.watched(state.ids, state.sizes).mean(self.look, weights=self.weights, w=state.w)
            clients.log(objective=seen["objective"], fw_gap=gap(domain_of(self.domain), seen["slope"], state.w))
        return state
