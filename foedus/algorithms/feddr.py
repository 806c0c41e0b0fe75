"""FedDR: Tran-Dinh, Pham, Phan and Nguyen, "FedDR: randomized Douglas-Rachford splitting algorithms
for nonconvex federated composite optimization", NeurIPS 2021. A method to compare FedFW with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from foedus.algorithms.local_training import LocalTraining
from foedus.base import random, tree
from foedus.base.settings import Remedy
from foedus.base.spec import Spec
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.geometry import Domain, L2Ball, ModelDomain, domain_of
from foedus.models.base import Params


@dataclass(frozen=True)
class FedDR(LocalTraining):
    """Randomized Douglas-Rachford splitting (Tran-Dinh et al., 2021).

        client i:  y_i <- y_i + alpha (x - x_i);   x_i ~ prox_{eta f_i}(y_i);   h_i = 2 x_i - y_i
                   sends h_i - (its last h_i)
        server:    h <- h + 1/n sum_i (what arrived);   x <- prox_{eta g}(h)

    for min 1/n sum_i f_i(x) + g(x). Here g says that x is in `domain`, so its prox is the
    projection. The prox of f_i is approximated by local training from y_i on f_i(v) + |v - y_i|^2 /
    (2 eta). Absent clients change nothing. All begin at x_i = y_i = h_i, the model's own start.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        domain: The convex set of the parameters.
        eta: Step of the proximal operators.
        relaxation: alpha, in (0, 2).
        weights: "uniform": FedDR's clients count alike.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.FedDR(fd.Linear(), lr=0.1, domain=fd.L2Ball(5.0)), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Tran-Dinh, Pham, Phan and Nguyen, "FedDR: randomized Douglas-Rachford splitting
    algorithms for nonconvex federated composite optimization", NeurIPS 2021, Algorithm 1.
    """

    domain: Domain | ModelDomain = L2Ball(10.0)  # noqa: RUF009 - frozen
    eta: Annotated[float, Gt(0)] = 10.0
    relaxation: Annotated[float, Gt(0), Lt(2)] = 1.0
    weights: Annotated[Literal["uniform"], Remedy("FedDR's clients count alike")] = "uniform"

    def __post_init__(self) -> None:
        domain_of(self.domain)
        super().__post_init__()

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
