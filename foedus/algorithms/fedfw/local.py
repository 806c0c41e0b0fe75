"""FedFW's local steps: averages of points, starts of the oracle, and settings that go together."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.base import random, tree
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived
from foedus.errors import ConfigError
from foedus.geometry import ModelDomain, NuclearBall, PerLayer, Whole
from foedus.models.base import Params
from foedus.wire.arrays import LowRank, Sparse

if TYPE_CHECKING:
    from foedus.algorithms.fedfw.fedfw import FedFW


def nth_key(key: Tensor, purpose: int, step: int) -> Tensor:
    """The key of a client's draws for a purpose in a local step."""
    return random.fold(key, purpose, step) if step else random.fold(key, purpose)


def average_point(points: list[tuple[Tensor, Any]]) -> Any:
    """u with (1 - h) x + h u = the end of steps x <- (1 - eta_k) x + eta_k s_k, from their eta_k
    and s_k; of one step, its point in its own form.

    The weight of s_k is eta_k prod over j > k (1 - eta_j), and h is the sum of all weights.
    """
    if len(points) == 1:
        return points[0][1]
    etas, each = [eta for eta, _ in points], [point for _, point in points]
    later, weights = torch.ones_like(etas[0]), []
    for eta in reversed(etas):
        weights.append(eta * later)
        later = later * (1 - eta)
    return weighted_sum((torch.stack(weights[::-1]) / (1 - later)).unbind(), each)


def weighted_sum(weights: Any, points: list[Any]) -> Any:
    """The weighted sum of points: sparse ones in one list of entries, matrices of low rank side by
    side, all others dense.
    """
    first = points[0]
    if isinstance(first, dict):
        return {name: weighted_sum(weights, [p[name] for p in points]) for name in first}
    if isinstance(first, Sparse):
        values = torch.cat([w * p.values for w, p in zip(weights, points, strict=True)], -1)
        return Sparse(torch.cat([p.indices for p in points], -1), values, first.shape)
    if isinstance(first, LowRank):
        left = torch.cat([w * p.left for w, p in zip(weights, points, strict=True)], -1)
        return LowRank(left, torch.cat([p.right for p in points], -1))
    dense = [p if isinstance(p, Tensor) else p.dense() for p in points]
    return sum(w * p for w, p in zip(weights, dense, strict=True))


def penalty_errors(algorithm: FedFW, client: Client, center: Params, pace: Tensor) -> Tensor:
    """Of this client: what its distance from the center hides, and what the penalty adds to its
    gap.
    """
    pull, share = pace.unbind()
    x = client.state["x"]
    slope = tree.map(lambda g: share * g, algorithm.slope(client, x))
    apart = tree.sub(x, center)
    g = tree.map(lambda g, a: g + pull * a, slope, apart)
    domain = algorithm.set_of(client.kind)
    s = domain.dense(domain.lmo(g), x)
    hidden = sum((slope[k] * -apart[k]).sum() for k in x)
    added = sum((pull * apart[k] * (x[k] - s[k])).sum() for k in x)
    return torch.stack([torch.as_tensor(hidden), torch.as_tensor(added)])


def balanced(algorithm: FedFW, clients: Clients, state: State) -> State:
    """penalty="balanced": the lambda_0 at which a bound of the error is least, in rounds 4, 8, ...

    For convex f_i, with X the x_i, X_bar the center n times, F_hat(X) = sum_i f_i(x_i) / n, and
    the surrogate gap of equation 45 at lambda,

        F(center) - F* <= <grad F_hat(X_bar), X_bar - X> + F_hat(X) - F*
                       <= <grad F_hat(X_bar), X_bar - X> + gap(X) - lambda/2 |X - X_bar|^2

    The first term, e, falls with lambda as the distance from consensus does: like 1 / lambda
    (equation 37). Of the gap, q = lambda <X - X_bar, X - S> grows with it. a lambda + b / lambda is
    least where both terms are equal: lambda <- lambda sqrt(e / q), by at most a factor of 2. The
    clients send their parts of e (with grad f_i(x_i), which they have) and q, two numbers.
    """
    round = clients.round
    if round < 4 or round & (round - 1):
        return state
    factor = algorithm.paces(round, clients.participation)[0][1]
    pace = torch.tensor([state.penalty * factor, 1 / clients.total])
    with contextlib.suppress(NothingArrived):
        errors = clients.mean(
            algorithm.errors, weights="uniform", center=state.center, pace=pace
        ).double()
        hidden, added = errors.clamp(min=torch.finfo(torch.float32).tiny).tolist()
        penalty = state.penalty * min(max(math.sqrt(hidden / added), 0.5), 2.0)
        clients.log(penalty=penalty)
        return state.replace(penalty=penalty)
    return state


def nuclear(domain: ModelDomain, x: Params) -> list[str]:
    """The tensors whose set is a nuclear ball."""
    if isinstance(domain, Whole):
        return [next(iter(x))] if isinstance(domain.domain, NuclearBall) else []
    assert isinstance(domain, PerLayer)
    return [name for name, ball in domain.each(x).items() if isinstance(ball, NuclearBall)]


def first_vectors(domain: ModelDomain, x: Params) -> Params:
    """Right vectors from which the first oracles start: as without `warm`, nothing is known."""
    return {name: x[name].new_ones(x[name].shape[-1]) for name in nuclear(domain, x)}


def vectors_of(point: Any, known: Params) -> Params:
    """The right vectors of a point, from which the next oracle starts."""
    if isinstance(point, LowRank):
        return dict.fromkeys(known, point.right.squeeze(-1))
    return {name: point[name].right.squeeze(-1) for name in known}


def check_together(settings: FedFW) -> None:
    """Refuse settings that do not go together."""
    search = settings.step_size == "line_search"
    wrong = {
        "variant='stochastic' draws mini-batches, along which nothing can be minimized": (
            search and settings.variant == "stochastic"
        ),
        "noise would decide the direction of a line search": search and settings.noise > 0,
        "momentum averages gradients, along which the objective may rise": (
            search and settings.momentum > 0
        ),
        "supersets need steps that are known to the server": search and bool(settings.supersets),
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"step_size='line_search': {why}; use step_size='schedule'")
    if settings.penalty == "balanced" and (search or settings.variant != "penalty"):
        raise ConfigError(
            "penalty='balanced' bounds the error of variant='penalty' with a schedule; use "
            "penalty='auto'"
        )
    if settings.direction == "pairwise" and not search:
        raise ConfigError(
            "direction='pairwise' is limited by the weight of a vertex, which no schedule knows; "
            "use step_size='line_search'"
        )
    if settings.momentum and settings.variant == "stochastic":
        raise ConfigError(
            f"momentum={settings.momentum!r}: variant='stochastic' averages gradients by rho_t; "
            "leave momentum out"
        )


def check_oracle(settings: FedFW, x: Params) -> None:
    """Refuse sets without pairwise directions, and `warm` without a nuclear ball."""
    if settings.direction == "pairwise":
        settings.set.pairwise(tree.zeros_like(x), settings.set.start(x))
    if settings.warm and not nuclear(settings.set, x):
        raise ConfigError(
            f"warm=True is for fd.NuclearBall, not for {settings.domain}; leave it out"
        )
    if settings.warm and settings.supersets:
        raise ConfigError("warm=True and supersets do not go together; leave one of them out")
