"""FedFW: Dadras, Banerjee, Prakhya and Yurtsever, "Federated Frank-Wolfe Algorithm" (Algorithm 1
and its variants).

    minimize F(x) = 1/n sum_i f_i(x) over x in D,   a convex compact set

Client i holds x_i, the server their average, the center. A growing penalty lambda_t/2 sum_i |x_i -
center|^2 enforces consensus, and a client moves towards the extreme point of D that minimizes its
penalized gradient. Only that point is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from foedus.algorithms.fedfw.constrained import ConstrainedTraining, gap
from foedus.algorithms.fedfw.points import Supersets, dense_points, noisy, outside, wide_sum
from foedus.base import random, tree
from foedus.base.rows import Rows
from foedus.base.settings import Means
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.copies import Copies
from foedus.core.exchange import Accept, Replies
from foedus.core.held import HeldArrays, shortest
from foedus.errors import ConfigError
from foedus.geometry import ModelDomain, domain_of
from foedus.models.base import Params

NotNegative = Annotated[float, Ge(0), Means("a number that is not negative")]


@dataclass(frozen=True)
class FedFW(ConstrainedTraining):
    """Federated Frank-Wolfe: clients send extreme points of a convex set (Dadras et al.).

    Round t, with steps eta_t, penalties lambda_t and n clients:

        client i:  "penalty"     g_i = grad f_i(x_i) / n + lambda_t (x_i - center)
                   "augmented"   y_i <- y_i + lambda_0 (x_i - center)
                                 g_i = grad f_i(x_i) / n + lambda_t (x_i - center) + y_i
                   "stochastic"  d_i <- (1 - rho_t) d_i + rho_t grad f_i(x_i; batch) / n
                                 g_i = d_i + lambda_t (x_i - center)
                   s_i = argmin over s in D of <g_i, s>;  x_i <- (1 - eta_t) x_i + eta_t s_i
                   sends s_i
        server:    center <- (1 - eta_t) center + eta_t / n sum_i s_i

    Schedules, with tau = p (t - 1) + 1 for participation p (tau = t with full participation):

        "convex"      eta = 2 / (tau + 1),  lambda = lambda_0 sqrt(tau + 1)   Theorem 1, Section 4.2
        "nonconvex"   eta = T^(-2/3),       lambda = lambda_0 T^(1/3)         Theorem 2, Section 4.2
                      T = horizon, and p T + 1 if p < 1
        "stochastic"  eta = 9 / (tau + 8),  lambda = lambda_0 sqrt(tau + 8)   Theorem 3

    and rho = 4 / (tau + 7)^(2/3) for the stochastic variant, with every schedule (Theorem 3; p < 1
    is ours). Under partial participation, absent clients keep x_i, and the center, which is the
    average of all x_i, moves by eta/n sum (s_i - x_i) over those who take part; the server knows
    their x_i from the points they have sent, late ones included, each by the eta of the round that
    it answers. Where it sees only averages of points (differential privacy, secure aggregation),
    their x_i count as the center:

        center <- (1 - p eta_t) center + p eta_t mean of s_i over those who take part

    Over the choice of clients, this has the same expectation, p eta_t / n sum_i (s_i - x_i). Its
    error, and the noise in the mean, decays at the rate p eta_t, as the x_i themselves do; summed
    up as s_i - x_i, noise would stay in the center forever.

    Both directions are short. Up goes the extreme point in its own form (one entry, one sign each,
    rank one). Down goes what turns a client's copy of the center into this one, sparse or of low
    rank where that is shorter than the center.

    Where clients are untrusted (real sites, `fd.Hostile`), a point outside of the set is provably
    not honest: it is left out of the round, and its client named. A hostile point inside moves the
    center by eta / n times the diameter at most.

    Args:
        variant: "penalty", "augmented" or "stochastic".
        penalty: lambda_0, or "auto": the mean over clients of the Frank-Wolfe gap of f_i / n at the
            start, over the squared diameter of D, so that gradient and penalty are of one size at
            any scale of either (one more number up, once).
        schedule: "convex", "nonconvex" or "stochastic"; by default that of the variant.
        horizon: T, for "nonconvex".
        batch_size: Rows of a mini-batch, for "stochastic".
        noise: Standard deviation, relative to the root mean square of g_i, of Gaussian noise on the
            oracle's input (Section 3.2).
        supersets: {client: set} for stragglers (Section 4.3): a larger set with a cheaper oracle,
            such as an L2 ball around a nuclear ball; it must contain the domain, and at least one
            client must use the domain itself. The center is then in the domain only in the limit:
            clients with a superset pull it outside on the way.
        measure_every: Log `objective`, `fw_gap` (equation 11, at the center) and `consensus` (mean
            of |x_i - center|^2) every this number of rounds (0: never); they are measured by the
            simulation and not charged.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.FedFW(fd.Linear(), fd.L1Ball(30.0)), fed, rounds=30)
        >>> last = run.history.iloc[-1]
        >>> last.accuracy > 0.7, last.bytes_up / last.messages_up < 30
        (True, True)
    """

    weighs_rows: ClassVar[bool] = True
    sends_points: ClassVar[str] = "step"

    variant: Literal["penalty", "augmented", "stochastic"] = "penalty"
    penalty: Annotated[float, Ge(0)] | Literal["auto"] = "auto"
    schedule: Literal["convex", "nonconvex", "stochastic"] | None = None
    horizon: Annotated[int, Ge(1)] | None = None
    batch_size: Annotated[int, Ge(1)] = 64
    noise: NotNegative = 0.0
    supersets: Supersets = Supersets()  # noqa: RUF009 - a tuple
    measure_every: Annotated[int, Ge(0)] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "supersets", Supersets.of(self.supersets))
        super().__post_init__()
        if self.pacing == "nonconvex" and self.horizon is None:
            raise ConfigError(
                "horizon=None: schedule='nonconvex' needs the number of rounds T, such as "
                "horizon=100"
            )

    @property
    def names_clients(self) -> bool:
        return bool(self.supersets)

    @property
    def sets(self) -> list[ModelDomain]:
        return [self.set, *(domain_of(outer) for _, outer in self.supersets)]

    @property
    def pacing(self) -> str:
        return self.schedule or ("stochastic" if self.variant == "stochastic" else "convex")

    def check(self, spec: Spec) -> None:
        super().check(spec)
        self.supersets.check(self.set, self.domain, self.model.init(spec, random.key(0)))

    def kinds(self, ids: Tensor) -> Tensor | None:
        return self.supersets.kinds(ids)

    def dense(self, kind: int, point: Tree, like: Params) -> Params:
        """The parameters that points of clients of a kind, or their average, stand for."""
        return point if self.supersets.mixed(self.set) else self.set_of(kind).dense(point, like)

    def set_of(self, kind: int) -> ModelDomain:
        """The set of clients of a kind: the domain, or a superset."""
        return domain_of(self.supersets[kind - 1][1]) if kind else self.set

    def steps(self, t: int, participation: float) -> tuple[float, float, float]:
        """eta_t, lambda_t / lambda_0 and rho_t."""
        tau = participation * (t - 1) + 1
        rho = 4 / (tau + 7) ** (2 / 3)
        if self.pacing == "convex":
            return 2 / (tau + 1), math.sqrt(tau + 1), rho
        if self.pacing == "stochastic":
            return 9 / (tau + 8), math.sqrt(tau + 8), rho
        assert self.horizon is not None
        horizon = self.horizon if participation == 1 else participation * self.horizon + 1
        return horizon ** (-2 / 3), horizon ** (1 / 3), rho

    # -- clients -----------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Params]:
        x = self.first(client.spec, client.shared)
        more = {"augmented": {"y": tree.zeros_like(x)}, "stochastic": {"d": tree.zeros_like(x)}}
        return {"x": x, **more.get(self.variant, {})}

    def first_held(self, spec: Spec, shared: Tensor) -> dict[str, Params]:
        return {"center": self.first(spec, shared)}

    def scale(self, client: Client) -> tuple[Tensor, None]:
        """For penalty="auto": the gap of f_i at the start."""
        x = client.state["x"]
        return gap(self.set, self.slope(client, x), x), None

    def step(self, client: Client, center: Params, pace: Tensor) -> tuple[Any, dict[str, Params]]:
        """Lines 4 to 8: one Frank-Wolfe step on the penalized objective; the extreme point is sent
        back.
        """
        eta, pull, start_pull, rho, share = pace.unbind()
        x, state = client.state["x"], dict(client.state)
        # fresh, so scale in place
        g = tree.map(lambda g: g.mul_(share), self.slope(client, x, self.batch(client)))
        if self.variant == "stochastic":
            g = state["d"] = tree.map(lambda d, g: (1 - rho) * d + rho * g, client.state["d"], g)
        apart = tree.sub(x, center)
        g = tree.map(lambda g, a: torch.addcmul(g, a, pull), g, apart)
        if self.variant == "augmented":
            state["y"] = tree.map(lambda y, a: y + start_pull * a, client.state["y"], apart)
            g = tree.add(g, state["y"])
        point = self.set_of(client.kind).lmo(noisy(g, self.noise, random.fold(client.key, 2)))
        s = self.set_of(client.kind).dense(point, x)
        state["x"] = tree.map(lambda x, s: x.lerp(s, eta), x, s)
        return s if self.supersets.mixed(self.set) else point, state

    def batch(self, client: Client) -> Rows | None:
        """A mini-batch, drawn with replacement, for the stochastic variant."""
        if self.variant != "stochastic":
            return None
        data, size = client.data, self.batch_size
        picked = random.integers(random.fold(client.key, 1), size, data.count.long())
        index, ones = data.index.gather(0, picked), torch.ones(size)
        return Rows(data.table_x, data.table_y, index, ones, data.spec, None, data.table_w)

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        center, penalty = self.beginning(clients), self.penalty
        self.supersets.check_clients(clients.ids, self.domain)
        if penalty == "auto":
            diameter = self.set.diameter_of(center)
            mean_gap = float(clients.mean(self.scale, weights="uniform")) / clients.total
            penalty = mean_gap / diameter**2 if diameter else 0.0
        clients.log(penalty=penalty)
        self.measure(clients, center, self.measure_every)
        # Who stays away, or is late, keeps x_i, so that the average moves by s_i - x_i: the server
        # has to know the x_i.
        copies = clients.copies(center)
        return State(
            center=HeldArrays(center), spec=clients.spec, penalty=float(penalty), copies=copies
        )

    def round(self, clients: Clients, state: State) -> State:
        eta, factor, rho = self.steps(clients.round, clients.participation)  # line 2
        pace = torch.tensor([eta, state.penalty * factor, state.penalty, rho, 1 / clients.total])
        sent = {"center": state.center, "pace": pace, "weights": "uniform"}
        sent["accept"] = self.outside(state.center.value)
        if state.copies is None:
            rate = eta * clients.participation
            keep, add = 1 - rate, self.average(clients, sent, rate, state.center.value)  # line 10
        else:
            replies = clients.gather(self.step, **sent)  # Section 4.2
            copies, moves = self.moved(clients, state.copies, replies, state.center.value)
            keep, add = 1.0, shortest(tree.scale(moves, 1 / clients.total))
            state = state.replace(copies=copies)
        center = state.center.moved(keep, add)
        self.measure(clients, center.value, self.measure_every)
        return state.replace(center=center)

    def average(
        self, clients: Clients, sent: dict[str, Any], rate: float, like: Params
    ) -> dict[str, Tree]:
        """`rate` times the average of the extreme points, in its shortest form: matrices of rank
        one add up to one of low rank.
        """
        if not self.set.low_rank(like):
            return shortest(tree.scale(self.dense(0, clients.mean(self.step, **sent), like), rate))
        mean, each = clients.mean_and_each(self.step, **sent)
        dense = tree.scale(self.dense(0, mean, like), rate)
        return shortest(
            dense, None if each is None or self.supersets else wide_sum(each, rate, dense)
        )

    def moved(
        self, clients: Clients, copies: Copies, replies: Replies, like: Params
    ) -> tuple[Copies, Params]:
        """The x_i of the clients whose points arrived, after the steps that these were made with;
        and the sum of their moves.
        """
        total = tree.zeros_like(like)
        for broadcast, some in replies.by_broadcast():
            eta, _, _ = self.steps(broadcast.round, clients.participation)
            copies, moves = copies.moved(
                clients.positions(some.ids), dense_points(self, some, like), eta
            )
            total = tree.add(total, moves)
        return copies, total

    def outside(self, like: Params) -> Accept:
        """Points that are not in their client's set: no oracle gives such a point, so their clients
        are hostile or broken.
        """
        return lambda ids, points: outside(self, ids, points, like)

    def readmit(self, state: State, ids: Tensor) -> State:
        """They begin at x^1 again; the old x_i decays in the center as every x_i does."""
        return state
