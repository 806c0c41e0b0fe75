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
from annotated_types import Ge, Interval
from torch import Tensor

from foedus.algorithms.fedfw.constrained import ConstrainedTraining, gap
from foedus.algorithms.fedfw.local import (
    average_point,
    balanced,
    check_oracle,
    check_together,
    first_vectors,
    nth_key,
    penalty_errors,
    vectors_of,
)
from foedus.algorithms.fedfw.points import Supersets, averaged, moved_copies, noisy, outside
from foedus.algorithms.fedfw.search import search_round, searched
from foedus.base import random, tree
from foedus.base.rows import Rows
from foedus.base.settings import Means
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.exchange import Accept
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

    `local_steps` K makes the clients' two lines K times a round; the schedules count these steps. A
    client then sends the average u_i of its K points, weighted so that x_i <- (1 - h) x_i + h u_i
    with h = 1 - prod over k (1 - eta_k), and h takes the place of eta at the server.
    begin_round="center" starts each round at x_i = center, as the authors' code does; absent
    clients' x_i then count as the center.

    With step_size="line_search" a step minimizes the penalized objective of its client along its
    direction, and the client sends how its x_i has moved (see `foedus.algorithms.fedfw.search`).
    The augmented variant with some local steps is then a consensus ADMM whose subproblems are
    solved by Frank-Wolfe.

    Args:
        variant: "penalty", "augmented" or "stochastic".
        penalty: lambda_0, or "auto": the mean over clients of the Frank-Wolfe gap of f_i / n at the
            start, over the squared diameter of D, so that gradient and penalty are of one size at
            any scale of either (one more number up, once); with a line search it then follows the
            iterates, by two more numbers a message. "balanced" begins like "auto" and lowers a
            bound of the error in rounds 4, 8, 16, ... (`foedus.algorithms.fedfw.local.balanced`).
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
        local_steps: K, Frank-Wolfe steps of a client in a round.
        begin_round: Where a client's steps start: at its "own" x_i, or at the "center".
        step_size: By "schedule", or by "line_search" (two more gradients a step).
        direction: "frank_wolfe", toward an extreme point; or, with a line search on an L1 ball or a
            simplex, "pairwise": the weight of the worst active vertex moves to the best vertex.
        momentum: m, for an average of gradients: d_i <- m d_i + (1 - m) grad f_i(x_i) / n.
        warm: Whether a nuclear ball's oracle starts at the client's last right vector.
        surrogate_gap: Whether to log `surrogate_gap` too (equation 45), a second gradient a
            measurement.

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
    penalty: Annotated[float, Ge(0)] | Literal["auto", "balanced"] = "auto"
    schedule: Literal["convex", "nonconvex", "stochastic"] | None = None
    horizon: Annotated[int, Ge(1)] | None = None
    batch_size: Annotated[int, Ge(1)] = 64
    noise: NotNegative = 0.0
    supersets: Supersets = Supersets()  # noqa: RUF009 - a tuple
    measure_every: Annotated[int, Ge(0)] = 1
    local_steps: Annotated[int, Ge(1)] = 1
    begin_round: Literal["own", "center"] = "own"
    step_size: Literal["schedule", "line_search"] = "schedule"
    direction: Literal["frank_wolfe", "pairwise"] = "frank_wolfe"
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    warm: bool = False
    surrogate_gap: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "supersets", Supersets.of(self.supersets))
        super().__post_init__()
        check_together(self)
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
        if self.step_size == "line_search" and self.variant == "augmented":
            return self.schedule or "constant"
        return self.schedule or ("stochastic" if self.variant == "stochastic" else "convex")

    def check(self, spec: Spec) -> None:
        super().check(spec)
        x = self.model.init(spec, random.key(0))
        self.supersets.check(self.set, self.domain, x)
        if self.direction == "pairwise" or self.warm:
            check_oracle(self, x)

    def kinds(self, ids: Tensor) -> Tensor | None:
        return self.supersets.kinds(ids)

    def dense(self, kind: int, point: Tree, like: Params) -> Params:
        """The parameters that points of clients of a kind, or their average, stand for."""
        return point if self.supersets.mixed(self.set) else self.set_of(kind).dense(point, like)

    def set_of(self, kind: int) -> ModelDomain:
        """The set of clients of a kind: the domain, or a superset."""
        return domain_of(self.supersets[kind - 1][1]) if kind else self.set

    def steps(self, t: int, participation: float) -> tuple[float, float, float]:
        """eta_t, lambda_t / lambda_0 and rho_t of step t."""
        tau = participation * (t - 1) + 1
        rho = 4 / (tau + 7) ** (2 / 3) if self.variant == "stochastic" else 1 - self.momentum
        if self.pacing == "constant":
            return 1.0, 1.0, rho  # the line search chooses eta
        if self.pacing == "convex":
            return 2 / (tau + 1), math.sqrt(tau + 1), rho
        if self.pacing == "stochastic":
            return 9 / (tau + 8), math.sqrt(tau + 8), rho
        assert self.horizon is not None
        made = self.horizon * self.local_steps
        horizon = made if participation == 1 else participation * made + 1
        return horizon ** (-2 / 3), horizon ** (1 / 3), rho

    def paces(self, round: int, participation: float) -> list[tuple[float, float, float]]:
        """`steps` of a round's local steps."""
        before = (round - 1) * self.local_steps
        return [self.steps(before + k, participation) for k in range(1, self.local_steps + 1)]

    def rate(self, round: int, participation: float) -> float:
        """h = 1 - prod (1 - eta_k): how far the steps of a round move x_i."""
        etas = [eta for eta, _, _ in self.paces(round, participation)]
        return etas[0] if len(etas) == 1 else 1 - math.prod(1 - eta for eta in etas)

    # -- clients -----------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Params]:
        x = self.first(client.spec, client.shared)
        state = {"x": x}
        if self.variant == "augmented":
            state["y"] = tree.zeros_like(x)
        if self.averages:
            state["d"] = tree.zeros_like(x)
        if self.warm:
            state["v"] = first_vectors(self.set, x)
        return state

    @property
    def averages(self) -> bool:
        """Whether clients average their gradients."""
        return self.variant == "stochastic" or self.momentum > 0

    def first_held(self, spec: Spec, shared: Tensor) -> dict[str, Params]:
        return {"center": self.first(spec, shared)}

    def scale(self, client: Client) -> tuple[Tensor, None]:
        """For penalty="auto": the gap of f_i at the start."""
        x = client.state["x"]
        return gap(self.set, self.slope(client, x), x), None

    def step(self, client: Client, center: Params, pace: Tensor) -> tuple[Any, dict[str, Params]]:
        """Lines 4 to 8: Frank-Wolfe steps on the penalized objective; the extreme point is sent
        back, of several steps their average.
        """
        *each, start_pull, share = pace.unbind()
        x, state = client.state["x"], dict(client.state)
        if self.variant == "augmented":
            state["y"] = tree.map(lambda y, a: y + start_pull * a, state["y"], tree.sub(x, center))
        x, points = center if self.begin_round == "center" else x, []
        for k in range(self.local_steps):
            eta, pull, rho = each[3 * k : 3 * k + 3]
            # fresh, so scale in place
            g = tree.map(lambda g: g.mul_(share), self.slope(client, x, self.batch(client, k)))
            if self.averages:
                g = state["d"] = tree.map(lambda d, g, r=rho: (1 - r) * d + r * g, state["d"], g)
            g = tree.map(lambda g, a, p=pull: torch.addcmul(g, a, p), g, tree.sub(x, center))
            if self.variant == "augmented":
                g = tree.add(g, state["y"])
            domain, g = self.set_of(client.kind), noisy(g, self.noise, nth_key(client.key, 2, k))
            point = domain.lmo(g, warm=state["v"] if self.warm else None)
            s = domain.dense(point, x)
            if self.warm:
                state["v"] = vectors_of(point, state["v"])
            points.append((eta, s if self.supersets.mixed(self.set) else point))
            x = tree.map(lambda x, s, e=eta: x.lerp(s, e), x, s)
        state["x"] = x
        return average_point(points), state

    def search(self, client: Client, center: Params, pace: Tensor) -> tuple[Any, dict[str, Params]]:
        """The same with a line search: how x_i has moved is sent back."""
        return searched(self, client, center, pace)

    def errors(self, client: Client, center: Params, pace: Tensor) -> tuple[Tensor, None]:
        """For penalty="balanced": this client's parts of the two errors."""
        return penalty_errors(self, client, center, pace), None

    def batch(self, client: Client, step: int) -> Rows | None:
        """A mini-batch, drawn with replacement, for the stochastic variant."""
        if self.variant != "stochastic":
            return None
        data, size = client.data, self.batch_size
        picked = random.integers(nth_key(client.key, 1, step), size, data.count.long())
        index, ones = data.index.gather(0, picked), torch.ones(size)
        return Rows(data.table_x, data.table_y, index, ones, data.spec, None, data.table_w)

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        center, penalty = self.beginning(clients), self.penalty
        self.supersets.check_clients(clients.ids, self.domain)
        if isinstance(penalty, str):
            diameter = self.set.diameter_of(center)
            mean_gap = float(clients.mean(self.scale, weights="uniform")) / clients.total
            penalty = mean_gap / diameter**2 if diameter else 0.0
        clients.log(penalty=penalty)
        self.log(clients, center, penalty)
        # Who stays away, or is late, keeps x_i, so that the average moves by s_i - x_i: the server
        # has to know the x_i.
        copies = clients.copies(center) if self.keeps_points else None
        more = {"pull": 0.0} if self.step_size == "line_search" else {}
        held, penalty = HeldArrays(center), float(penalty)
        return State(center=held, spec=clients.spec, penalty=penalty, copies=copies, **more)

    @property
    def keeps_points(self) -> bool:
        """Whether the center moves by points, from each client's own x_i."""
        return self.begin_round == "own" and self.step_size == "schedule"

    def round(self, clients: Clients, state: State) -> State:
        if self.step_size == "line_search":
            return search_round(self, clients, state)
        state = balanced(self, clients, state) if self.penalty == "balanced" else state
        rate, sent = self.question(clients, state)  # line 2
        if state.copies is None:
            rate = rate * clients.participation
            keep, add = 1 - rate, averaged(self, clients, sent, rate, state.center.value)  # line 10
        else:
            replies = clients.gather(self.step, **sent)  # Section 4.2
            copies, moves = moved_copies(self, clients, state, replies)
            keep, add = 1.0, shortest(tree.scale(moves, 1 / clients.total))
            state = state.replace(copies=copies)
        center = state.center.moved(keep, add)
        self.log(clients, center.value, state.penalty)
        return state.replace(center=center)

    def question(self, clients: Clients, state: State) -> tuple[float, dict[str, Any]]:
        """h, and what clients are asked: eta, lambda_t and rho of each local step, lambda_0 and
        1 / n.
        """
        each = self.paces(clients.round, clients.participation)
        pace = [v for eta, factor, rho in each for v in (eta, state.penalty * factor, rho)]
        pace += [state.penalty, 1 / clients.total]
        accept = self.outside(state.center.value)
        sent = {"center": state.center, "pace": torch.tensor(pace)}
        rate = self.rate(clients.round, clients.participation)
        return rate, {**sent, "weights": "uniform", "accept": accept}

    def outside(self, like: Params) -> Accept:
        """Points that are not in their client's set: no oracle gives such a point, so their clients
        are hostile or broken.
        """
        return lambda ids, points: outside(self, ids, points, like)

    def log(self, clients: Clients, center: Params, penalty: float) -> None:
        """What is measured for the history."""
        self.measure(clients, center, self.measure_every)
        if self.surrogate_gap and self.measure_every and clients.round % self.measure_every == 0:
            factor = self.steps(clients.round * self.local_steps + 1, clients.participation)[1]
            pace = torch.tensor([penalty * factor, 1 / clients.total])
            seen = clients.measure(self.surrogate, weights=None, center=center, pace=pace)
            if seen is not None:
                clients.log(surrogate_gap=seen)

    def surrogate(self, client: Client, center: Params, pace: Tensor) -> tuple[Tensor, None]:
        """This client's part of equation 45, with the penalty of its next step."""
        x, (pull, share) = client.state["x"], pace.unbind()
        g = tree.map(lambda g, x, c: share * g + pull * (x - c), self.slope(client, x), x, center)
        return gap(self.set_of(client.kind), g, x), None

    def readmit(self, state: State, ids: Tensor) -> State:
        """They begin at x^1 again; the old x_i decays in the center as every x_i does."""
        return state
