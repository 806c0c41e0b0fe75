"""FedFW: Dadras, Banerjee, Prakhya and Yurtsever, "Federated Frank-Wolfe Algorithm" (Algorithm 1 and its variants).

    minimise F(x) = 1/n sum_i f_i(x) over x in D,   a convex compact set

Client i holds x_i, the server their average, the centre. Consensus is asked for by a penalty lambda_t/2 sum_i |x_i - centre|^2 that
grows, and a client moves towards the extreme point of D that its penalised gradient likes best. Only that point is sent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from foedus import wire
from foedus.algorithms.fedfw.constrained import ConstrainedTraining, gap
from foedus.base import random, tree
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived, Replies
from foedus.errors import ConfigError, unknown, whole_number
from foedus.geometry import Domain, ModelDomain, domain_of, inside
from foedus.models.base import Params
from foedus.wire.arrays import LowRank, Sparse

VARIANTS = ("penalty", "augmented", "stochastic")
SCHEDULES = ("convex", "nonconvex", "stochastic")
MEMBER = 1e-4
"""How far, relative to the size of the set, a point may be outside of it by rounding: float32 with millions of entries needs less."""


def noisy(g: Params, noise: float, key: Tensor) -> Params:
    """g plus normal noise, of `noise` times the root mean square of g's entries (Section 3.2)."""
    if not noise:
        return g
    total = sum(v.square().sum() for v in g.values())
    deviation = noise * (total / sum(v.numel() for v in g.values())).sqrt()
    return {k: v + deviation * random.normal(random.fold(key, i), v.shape) for i, (k, v) in enumerate(g.items())}


@dataclass(frozen=True)
class FedFW(ConstrainedTraining):
    """Projection-free federated learning: clients send extreme points.

    Round t, with steps eta_t, penalties lambda_t and n clients:

        client i:  g_i = grad f_i(x_i) / n + lambda_t (x_i - centre)                               variant="penalty"
                   y_i <- y_i + lambda_0 (x_i - centre);  g_i = grad f_i(x_i) / n + lambda_t (x_i - centre) + y_i  "augmented"
                   d_i <- (1 - rho_t) d_i + rho_t grad f_i(x_i; batch) / n;  g_i = d_i + lambda_t (x_i - centre)   "stochastic"
                   s_i = argmin over s in D of <g_i, s>;   x_i <- (1 - eta_t) x_i + eta_t s_i;   sends s_i
        server:    centre <- (1 - eta_t) centre + eta_t / n sum_i s_i

    Schedules, with tau = p (t - 1) + 1 for participation p (tau = t if everybody takes part):

        "convex"      eta = 2 / (tau + 1),  lambda = lambda_0 sqrt(tau + 1)                           Theorem 1, Section 4.2
        "nonconvex"   eta = T^(-2/3),       lambda = lambda_0 T^(1/3), T = horizon (p T + 1 if p < 1)  Theorem 2, Section 4.2
        "stochastic"  eta = 9 / (tau + 8),  lambda = lambda_0 sqrt(tau + 8)                            Theorem 3

    and rho = 4 / (tau + 7)^(2/3) for the stochastic variant, whatever its schedule (Theorem 3; p < 1 is ours). With some of the clients, those who stay away keep x_i, and the centre, which is the average of
    all x_i, moves by eta/n sum (s_i - x_i) over those who came; the server knows their x_i from the points they have sent.
    Where it sees only averages of points (differential privacy), their x_i count as the centre:

        centre <- (1 - p eta_t) centre + p eta_t mean of s_i over those who came

    Over who comes, this has the same expectation, p eta_t / n sum_i (s_i - x_i). What it misses by, and the noise in the mean, is forgotten at the rate
    p eta_t, as the x_i themselves forget; summed up as s_i - x_i, noise would stay in the centre for ever.

    penalty: lambda_0, or "auto": the mean over clients of the Frank-Wolfe gap of f_i / n at the start, over the squared
    diameter of D, so that gradient and penalty pull alike whatever the scale of either (one more number up, once).
    batch_size: rows of a mini-batch, for "stochastic". noise: standard deviation, relative to the root mean square of g_i, of
    Gaussian noise on what the oracle sees (Section 3.2). supersets: {client: set} for stragglers (Section 4.3): a larger set
    with a cheaper oracle, such as an L2 ball around a nuclear ball; it must contain the domain, and somebody must keep to the
    domain itself. The centre is then in the domain only in the limit: clients with a superset pull it outside on the way.
    measure_every: log `objective`, `fw_gap` (equation 11, at the centre) and `consensus` (mean of |x_i - centre|^2) every so
    many rounds (0: never); they are measured by the simulation and not charged.

    Both directions are short. Up goes the extreme point in its own form (one entry, one sign each, rank one). Down goes what
    turns the last centre into this one, sparse or of low rank where that is shorter, and the dense centre only to a client
    that has missed a round, or where nothing is shorter. Where messages are late, the dense centre is sent, and the server's x_i are what
    the points that have arrived make of them, each by the eta of the round that it answers.

    Where clients are strangers (real sites, `fd.Hostile`), a point outside of the set is provably not honest: it is left out of the round,
    and its client named. A hostile point inside moves the centre by eta / n times the diameter at most.

    Example:
        >>> fd.run(fd.FedFW(fd.Linear(), fd.L1Ball(30.0)), fed, rounds=300)
    """

    variant: str = "penalty"
    penalty: float | str = "auto"
    schedule: str | None = None
    horizon: int | None = None
    batch_size: int = 64
    noise: float = 0.0
    supersets: tuple[tuple[int, Domain | ModelDomain], ...] = ()
    measure_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "supersets", _supersets(self.supersets))
        if self.variant not in VARIANTS:
            raise ConfigError(unknown("variant", self.variant, list(VARIANTS)))
        if self.schedule not in (None, *SCHEDULES):
            raise ConfigError(unknown("schedule", self.schedule, list(SCHEDULES)))
        if self.pacing == "nonconvex" and self.horizon is None:
            raise ConfigError("horizon=None: schedule='nonconvex' needs the number of rounds T, such as horizon=100")
        if self.penalty != "auto" and not _number(self.penalty):
            raise ConfigError(f"penalty={self.penalty!r} must be 'auto' or a number that is not negative")
        if not _number(self.noise):
            raise ConfigError(f"noise={self.noise!r} must be a number that is not negative")
        for name, least in (("batch_size", 1), ("measure_every", 0), ("horizon", 1)):
            if name != "horizon" or self.horizon is not None:
                whole_number(name, getattr(self, name), least)

    @property
    def names_clients(self) -> bool:
        return bool(self.supersets)

    @property
    def pacing(self) -> str:
        return self.schedule or ("stochastic" if self.variant == "stochastic" else "convex")

    def check(self, spec: Spec) -> None:
        super().check(spec)
        x = self.model.init(spec, random.key(0))
        for client, outer in self.supersets:
            if not inside(domain_of(outer), self.set, x):
                raise ConfigError(f"supersets[{client}]={outer} does not contain {self.domain}; give a larger set")

    def check_supersets(self, ids: Tensor) -> None:
        """Refuse supersets of nobody, and of everybody: the sets of all clients must have the domain in common."""
        known = set(ids.tolist())
        strange = [client for client, _ in self.supersets if client not in known]
        if strange:
            raise ConfigError(f"supersets[{strange[0]}] is for a client that does not exist; there are {len(ids)} clients")
        if self.supersets and len(self.supersets) == len(ids) and all(o != self.domain for _, o in self.supersets):
            raise ConfigError(f"supersets are given for all {len(ids)} clients; at least one must keep to {self.domain}")

    def steps(self, t: int, participation: float) -> tuple[float, float, float]:
        """eta_t, lambda_t / lambda_0 and rho_t."""
        tau = participation * (t - 1) + 1
        rho = 4 / (tau + 7) ** (2 / 3)
        if self.pacing == "convex":
            return 2 / (tau + 1), math.sqrt(tau + 1), rho
        if self.pacing == "stochastic":
            return 9 / (tau + 8), math.sqrt(tau + 8), rho
        horizon = self.horizon if participation == 1 else participation * self.horizon + 1
        return horizon ** (-2 / 3), horizon ** (1 / 3), rho

    # -- clients -----------------------------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Params]:
        x = self.first(client.spec, client.shared)
        more = {"augmented": {"y": tree.zeros_like(x)}, "stochastic": {"d": tree.zeros_like(x)}}
        return {"x": x, "center": x, **more.get(self.variant, {})}

    def scale(self, client: Client) -> tuple[Tensor, None]:
        """For penalty="auto": the gap of f_i at the start."""
        x = client.state["x"]
        return gap(self.set, self.slope(client, x), x), None

    def follow(self, client: Client, add: Any, keep: float, pace: Tensor, outer: int) -> tuple[Any, dict[str, Params]]:
        """A step, for a client that has the last centre: this one is keep * centre + add."""
        center = tree.map(lambda c, a: keep * c + a, client.state["center"], _dense(add))
        return self.step(client, center, pace, outer)

    def step(self, client: Client, center: Params, pace: Tensor, outer: int) -> tuple[Any, dict[str, Params]]:
        """One Frank-Wolfe step on the penalised objective, from a centre that is sent; the extreme point is sent back."""
        eta, pull, start_pull, rho, share = pace.float().unbind()
        x, state = client.state["x"], {**client.state, "center": center}
        g = tree.map(lambda g: g.mul_(share), self.slope(client, x, self.batch(client)))  # in place: nobody else has it
        if self.variant == "stochastic":
            g = state["d"] = tree.map(lambda d, g: (1 - rho) * d + rho * g, client.state["d"], g)
        apart = tree.sub(x, center)
        g = tree.map(lambda g, a: torch.addcmul(g, a, pull), g, apart)
        if self.variant == "augmented":
            state["y"] = tree.map(lambda y, a: y + start_pull * a, client.state["y"], apart)
            g = tree.add(g, state["y"])
        domain = self.set_of(outer)
        point = domain.lmo(noisy(g, self.noise, random.fold(client.key, 2)))
        state["x"] = tree.map(lambda x, s: x.lerp(s, eta), x, domain.dense(point, x))
        return point, state

    def batch(self, client: Client) -> Rows | None:
        """A mini-batch, drawn with replacement, for the stochastic variant."""
        if self.variant != "stochastic":
            return None
        data, size = client.data, self.batch_size
        picked = random.integers(random.fold(client.key, 1), size, data.count.long())
        return Rows(data.table_x, data.table_y, data.index.gather(0, picked), torch.ones(size), data.spec)

    # -- server ------------------------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        center = self.beginning(clients)
        self.check_supersets(clients.ids)
        penalty = self.penalty
        if penalty == "auto":
            diameter = self.set.diameter_of(center)
            mean_gap = float(clients.mean(self.scale, weights="uniform")) / clients.total
            penalty = mean_gap / diameter**2 if diameter else 0.0
        clients.log(penalty=penalty)
        if self.measure_every:
            self.log(clients, clients.ids, center)
        state = State(center=center, spec=clients.spec, penalty=float(penalty), ids=clients.ids)
        state = state.replace(keep=1.0, add=short(tree.zeros_like(center)), changed=0, have=torch.zeros_like(clients.ids))
        if (clients.participation < 1 and not clients.hidden) or clients.longest:
            # Who stays away (or is late) keeps x_i, so the average moves by s_i - x_i: the server has to know the x_i.
            state = state.replace(x=tree.map(lambda c: c.expand(clients.total, *c.shape).clone(), center))
        return state

    def round(self, clients: Clients, state: State) -> State:
        eta, factor, rho = self.steps(clients.round, clients.participation)
        pull = state.penalty * factor
        pace = torch.tensor([eta, pull, state.penalty, rho, 1 / clients.total], dtype=torch.float64)
        at = torch.searchsorted(state.ids, clients.ids)
        center = state.center
        news = {"add": state.add, "keep": state.keep}
        long = wire.nbytes(news) >= wire.nbytes({"center": center})
        partly = clients.participation < 1
        behind = (
            (state.have[at] != state.changed) | (long & (state.changed > 0)) | (clients.longest > 0) | (clients.hidden & partly)
        )
        if clients.aggregator is not None and bool(behind.any()):
            behind = torch.ones_like(behind)  # all together: a few alone are no sum that hides them, and no majority
        kinds = self.kinds(clients.ids)
        means, points = [], []
        for outer in kinds.unique().tolist():
            for late in (False, True):
                chosen = (kinds == outer) & (behind == late)
                if not bool(chosen.any()):
                    continue
                some, domain = clients.some(chosen, f"set {outer}"), self.set_of(outer)
                step, sent = (self.step, {"center": center}) if late else (self.follow, news)
                accept = lambda points, domain=domain: self.outside(points, domain, center)  # noqa: E731
                sent = {**sent, "pace": pace, "outer": outer, "accept": accept}
                if "x" in state:
                    with contextlib.suppress(NothingArrived):
                        points.append((some.gather(step, weights="uniform", **sent), domain))
                    continue
                with contextlib.suppress(NothingArrived):  # of this group
                    mean, each = self.average(some, domain, center, step, sent)
                    means.append((mean, some.who))
                    points.append(each)
        if "x" in state:
            return self.partly(clients, state, points)
        who = torch.cat([who for _, who in means]).sort().values
        total = tree.zeros_like(center)
        for mean, some in means:
            total = tree.add(total, mean, len(some) / len(who))
        rate = eta * clients.participation
        add = tree.scale(total, rate)
        moved = tree.map(lambda c, a: (1 - rate) * c + a, center, add)
        ranks = points[0] if len(points) == 1 else None
        state = state.replace(center=moved, keep=1 - rate, add=short(add, ranks, rate), changed=clients.round)
        return self.finish(clients, state, who)

    def outside(self, points: Any, domain: ModelDomain, like: Params) -> dict[int, str]:
        """Which of some clients' points are not in their set: no oracle gives such a point, so they are hostile, or broken."""
        found = ~domain.contains(domain.dense(points, like), MEMBER, batch=1)
        return dict.fromkeys(torch.nonzero(found).flatten().tolist(), "its point lies outside of the set")

    def kinds(self, ids: Tensor) -> Tensor:
        """Which of the supersets a client has, -1 for the domain itself."""
        kinds, sets = torch.full_like(ids, -1), [outer for _, outer in self.supersets]
        for client, outer in self.supersets:
            kinds[ids == client] = sets.index(outer)
        return kinds

    def set_of(self, kind: int) -> ModelDomain:
        """The set of the clients of a kind."""
        return self.set if kind < 0 else domain_of(self.supersets[kind][1])

    def average(self, some: Clients, domain: ModelDomain, like: Params, step: Any, sent: dict[str, Any]) -> tuple[Params, Any]:
        """The average of some clients' extreme points; and every one of them, where they are of low rank."""
        if some.hidden or not any(getattr(d, "matrix", False) for d in _sets(domain, like)):
            return domain.dense(some.mean(step, weights="uniform", **sent), like), None
        replies = some.gather(step, weights="uniform", **sent)
        points, even = replies.stack(), replies.weights.float()
        whole = tree.pytree.tree_map(
            lambda p: p.weighted_sum(even) if hasattr(p, "weighted_sum") else p.mean(0),
            points,
            is_leaf=lambda p: hasattr(p, "weighted_sum"),
        )
        return domain.dense(whole, like), points

    def partly(self, clients: Clients, state: State, points: list[tuple[Replies, ModelDomain]]) -> State:
        """Section 4.2: the x_i of those whose points came move, and the centre with them."""
        if not points:
            raise NothingArrived(f"round {clients.round}: no extreme point has arrived yet")
        x, center = tree.map(torch.clone, state.x), state.center
        add = tree.zeros_like(center)
        for replies, domain in points:
            whose = torch.searchsorted(state.ids, replies.ids)
            rounds, made = replies.versions.unique(return_inverse=True)
            eta = torch.tensor([self.steps(t, clients.participation)[0] for t in rounds.tolist()])[made]
            for k, s in domain.dense(replies.stack(), center).items():
                move = eta.view(-1, *[1] * (s.dim() - 1)) * (s - x[k][whose])
                x[k][whose] += move
                add[k] += move.sum(0) / clients.total
        moved = tree.add(center, add)
        state = state.replace(center=moved, x=x, keep=1.0, add=short(add), changed=clients.round)
        return self.finish(clients, state, torch.cat([replies.ids for replies, _ in points]))

    def finish(self, clients: Clients, state: State, who: Tensor) -> State:
        have = state.have.clone()
        have[torch.searchsorted(state.ids, who)] = (
            state.changed
        )  # they have been sent the centre of this round, and will be sent the difference to the next
        if self.measure_every and clients.round % self.measure_every == 0:
            self.log(clients, state.ids, state.center)
        return state.replace(have=have)

    def readmit(self, state: State, ids: Tensor) -> State:
        """They begin at x^1 again, and are sent the centre itself; what x_i was fades from the centre as it does from every x_i."""
        return state.replace(have=state.have.index_fill(0, torch.searchsorted(state.ids, ids), -1))


def _supersets(given: Any) -> tuple[tuple[int, Domain | ModelDomain], ...]:
    """As pairs, in order of client; an error names the entry that is wrong."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        pairs = [(client, outer) for client, outer in pairs]
    except (TypeError, ValueError):
        raise ConfigError(f"supersets={given!r} must be a dict {{client: set}}, such as {{3: L2Ball(10.0)}}") from None
    for client, outer in pairs:
        if isinstance(client, bool) or not isinstance(client, Integral):
            raise ConfigError(f"supersets[{client!r}]: a client is named by its number, such as {{3: L2Ball(10.0)}}")
        try:
            domain_of(outer)
        except ConfigError as error:
            raise ConfigError(f"supersets[{client}]: {error}") from None
    if len({client for client, _ in pairs}) < len(pairs):
        raise ConfigError("supersets names a client twice; give each one set")
    return tuple(sorted(((int(c), o) for c, o in pairs), key=lambda pair: pair[0]))


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= value < math.inf


def _dense(add: Any) -> Params:
    return {k: v if isinstance(v, Tensor) else v.dense() for k, v in add.items()}


def _sets(domain: ModelDomain, like: Params) -> list[Domain]:
    return [domain.domain] if hasattr(domain, "domain") else list(domain.each(like).values())


def short(add: Params, points: Any = None, eta: float = 1.0) -> dict[str, Any]:
    """What is added to the centre in its shortest form: sparse, of low rank (from the clients' points), or dense."""
    ranks = {} if points is None else points if isinstance(points, dict) else {next(iter(add)): points}
    forms = {}
    for name, dense in add.items():
        flat = dense.flatten()
        where = flat.nonzero().flatten()
        choices = [dense, Sparse(where.to(torch.int32), flat[where], tuple(dense.shape))]
        if isinstance(ranks.get(name), LowRank):
            left, right = ranks[name].left, ranks[name].right
            wide = LowRank((left * (eta / len(left))).movedim(0, -2).flatten(-2), right.movedim(0, -2).flatten(-2))
            choices.append(wide)
        forms[name] = min(choices, key=wire.nbytes)
    return forms
