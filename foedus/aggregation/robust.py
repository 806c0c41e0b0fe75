"""Means that a few hostile clients cannot move: `fd.run(..., aggregation=fd.Median())`.

One dishonest client can move a plain mean anywhere. These replace the mean (or, times the number of
clients, the sum) of an exchange. All of them need every reply at once: no sums in a stream or on
Ray workers, memory for clients x numbers, and no secure aggregation, under which the server sees no
single reply. None of them is differentially private: the sensitivity of a robust mean of clipped
replies is not that of a mean. They assume that honest clients send similar replies: the more their
rows differ, the more honest information is lost. They apply to exchanges that ask for an average or
a sum (`clients.mean`, `clients.sum`); an algorithm that looks at single replies itself (FFGB's
functions, FedFW's matrices of rank one) refuses to run with them.

Replies of another form, and those that are not finite, are dropped before anything is computed
(`foedus.wire.checks`), named in the history (`left_out`) and counted (`dropped`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from foedus.base import tree
from foedus.base.settings import Remedy, check_settings
from foedus.base.tree import Tree
from foedus.core.aggregation import Aggregation, Aggregator, Setting
from foedus.core.exchange import Replies
from foedus.core.network import RoundTrip
from foedus.core.participation import expected
from foedus.errors import ConfigError, ReplyError, TooFewClients
from foedus.wire import checks

_CHUNK = 1 << 22  # numbers that are sorted, or converted to float64, at a time
# shares of the weight that are nothing: sums of weights are not exact, and hostile numbers may be
# huge
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Robust(Aggregation):
    """Base of the robust means: `combine` maps the rows of the clients to one row.

    Args:
        weighted: Whether a client counts by its rows where the algorithm says so. A site reports
            its own number of rows; with `False` every client counts the same, and the tolerated
            share of hostile clients is one of clients, not of rows.
    """

    weighted: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_settings(self)

    def open(self, setting: Setting) -> RobustAggregator:
        self.check(expected(setting.participation, len(setting.ids)) * len(setting.ids))
        return RobustAggregator(self)

    def check(self, clients: float) -> None:
        """Refuse settings that this number of clients a round cannot satisfy."""

    def combine(self, x: Tensor, weights: Tensor, dropped: int = 0) -> Tensor:
        """One vector from x (clients, numbers) and the clients' weights, float64 that sum to 1.

        dropped: how many clients of the round were left out already.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define combine")


class RobustAggregator(Aggregator):
    """Collects every reply and combines them."""

    checks_replies = True

    def __init__(self, settings: Robust):
        self.settings = settings

    def total(self, trip: RoundTrip, weights: str | None) -> Tree:
        replies = trip.collect(weights or "uniform")
        even = torch.full_like(replies.weights, 1 / len(replies))
        x, apart = _joined(_stacked(replies))
        if x is None:
            return replies.stack()
        share = replies.weights if self.settings.weighted else even
        mean = self.settings.combine(x, share, len(trip.dropped))
        return apart(mean if weights else mean * len(replies))

    def gathered(self, trip: RoundTrip, replies: Replies) -> None:
        if tree.leaves(replies[0]):
            raise ConfigError(
                f"aggregation={self.settings}: {type(trip.algorithm).__name__} looks at every "
                f"reply to {trip.step} itself, so that another mean does not protect it; leave "
                "aggregation out (replies of untrusted clients are checked in any case)"
            )


def _stacked(replies: Replies) -> Tree:
    """Replies as dense tensors with a leading client dimension."""
    if replies.separate is None:
        return checks.dense(replies.stacked)
    return replace(replies, separate=[checks.dense(reply) for reply in replies.separate]).stack()


def _joined(reply: Tree) -> tuple[Tensor | None, Callable[[Tensor], Tree]]:
    """Stacked replies as one matrix, a row for each client; and the way back from one row."""
    leaves, form = tree.flatten(reply)
    if not leaves:
        return None, lambda row: reply
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ReplyError(
                f"a reply to be averaged holds a {type(leaf).__name__}; only tensors have a mean"
            )
    kinds = [t.dtype if t.is_floating_point() else torch.float32 for t in leaves]
    widest = torch.float64 if torch.float64 in kinds else torch.float32
    flat = [t.reshape(len(t), -1).to(widest) for t in leaves]
    x = flat[0] if len(flat) == 1 else torch.cat(flat, 1)

    def apart(row: Tensor) -> Tree:
        parts = row.split([f.shape[1] for f in flat])
        shaped = [
            p.reshape(t.shape[1:]).to(k) for p, t, k in zip(parts, leaves, kinds, strict=True)
        ]
        return tree.unflatten(shaped, form)

    return x, apart


def _columns(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`f` on blocks of columns in turn, so that its working memory is bounded."""
    return torch.cat([f(part) for part in x.split(max(1, _CHUNK // len(x)), 1)])


def _mix(x: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i x_i, added in float64."""
    return _columns(lambda part: (weights @ part.double()).to(x.dtype), x)


def _ranked(part: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Each column in order, and the weight up to and with each entry."""
    ordered, order = part.sort(0)
    if bool((weights == weights[0]).all()):
        return ordered, (torch.arange(1, len(part) + 1, dtype=torch.float64) / len(part)).unsqueeze(
            1
        )
    return ordered, weights[order].cumsum(0)


def _median(x: Tensor, weights: Tensor) -> Tensor:
    """The median of each column: where two values halve the weight, the middle of them."""

    def middle(part: Tensor) -> Tensor:
        ordered, ends = _ranked(part, weights)
        low, high = (
            (ends < 0.5 + off).sum(0).clamp(max=len(part) - 1) for off in (-_ROUNDING, _ROUNDING)
        )
        pair = [
            ordered.gather(0, at.expand(1, part.shape[1])).squeeze(0).double() for at in (low, high)
        ]
        return ((pair[0] + pair[1]) / 2).to(x.dtype)

    return _columns(middle, x)


def _products(x: Tensor, center: Tensor) -> Tensor:
    """<x_i - center, x_j - center>, in float64.

    Around a robust center, honest rows keep their digits, however large the others are.
    """
    total, step = torch.zeros(len(x), len(x), dtype=torch.float64), max(1, _CHUNK // len(x))
    for part, middle in zip(x.split(step, 1), center.split(step), strict=True):
        part = part.double() - middle.double()
        total += part @ part.mT
    return total


@dataclass(frozen=True)
class NormBound(Robust):
    """The mean of replies no longer than a bound (Sun, Kairouz, Suresh and McMahan, 2019).

        mean of x_i min(1, bound / |x_i|)

    The norm is the Euclidean one of the whole reply as it is sent: for FedAvg, of a client's change
    in the round. One hostile client moves the mean by at most weight x bound: it is slowed down,
    not excluded. Costs one pass. With fewer than half of the clients hostile, "median" is at most
    the longest honest reply.

    Args:
        bound: A number, or "median": the median of the clients' norms in this exchange.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> hostile = fd.Hostile(clients=0.2, attack="scale", strength=100.0)
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, 5, engine=hostile, aggregation=fd.NormBound())
        >>> run.history.accuracy.iloc[-1] > 0.8
        True
    """

    bound: Annotated[float, Gt(0)] | Literal["median"] = "median"

    def combine(self, x: Tensor, weights: Tensor, dropped: int = 0) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        # of an even number, the lower of the two
        bound = norms.median() if self.bound == "median" else self.bound
        return _mix(x, weights * torch.where(norms > bound, bound / norms, 1.0))


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean of each number without the largest and the smallest (Yin et al., 2018).

    With at most a share `part` hostile, every number of the result lies between honest clients'. Of
    a client at the edge, only a part of its weight is cut off. Costs a sort of each number over the
    clients.

    Args:
        part: The share of the weight that is cut off at each end, above 0 and below 0.5.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> hostile = fd.Hostile(clients=0.2, attack="scale", strength=100.0)
        >>> trimmed = fd.TrimmedMean(part=0.2)
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, 5, engine=hostile, aggregation=trimmed)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards
    optimal statistical rates", ICML 2018.
    """

    part: Annotated[float, Gt(0), Lt(0.5), Remedy("it is what is cut off at each end")] = 0.2

    def combine(self, x: Tensor, weights: Tensor, dropped: int = 0) -> Tensor:
        def trimmed(part: Tensor) -> Tensor:
            ordered, ends = _ranked(part, weights)
            starts = torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
            kept = ends.clamp(max=1 - self.part) - starts.clamp(min=self.part)
            # a hostile number may be huge: even a rounding error of its weight is too much
            kept = torch.where(kept > _ROUNDING, kept, 0.0)
            return ((kept * ordered).sum(0) / kept.sum(0)).to(x.dtype)

        return _columns(trimmed, x)


@dataclass(frozen=True)
class Median(Robust):
    """The median of each number (Yin et al., 2018).

    With less than half of the weight hostile, every number of the result lies between honest
    clients'. Costs a sort of each number over the clients. Not for replies that are mostly zero
    (FedFW's points of one entry): their median is zero.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> hostile = fd.Hostile(clients=0.3, attack="scale", strength=100.0)
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, 5, engine=hostile, aggregation=fd.Median())
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards
    optimal statistical rates", ICML 2018.
    """

    def combine(self, x: Tensor, weights: Tensor, dropped: int = 0) -> Tensor:
        return _median(x, weights)


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point of least weighted distance to all replies (Pillutla, Kakade and Harchaoui, 2022).

        argmin over v of sum_i w_i |v - x_i|

    by smoothed Weiszfeld steps,

        v <- sum_i b_i x_i / sum_i b_i,   b_i = w_i / max(nu, |v - x_i|)

    from the median of each number, with nu = 1e-6 of the median distance from it, until the pulls
    of the clients cancel: |sum_i b_i (v - x_i)| <= tolerance, where each client alone pulls with
    w_i; or until `steps`. With a share a < 1/2 of the weight hostile, |v - c| <= 2 (1 - a) / (1 - 2
    a) max |x_i - c| over the honest clients, for any c. Costs clients^2 x numbers once (products of
    the replies), then clients^2 a step.

    Args:
        tolerance: Largest norm of the sum of the pulls.
        steps: Most Weiszfeld steps.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> hostile = fd.Hostile(clients=0.3, attack="scale", strength=100.0)
        >>> median = fd.GeometricMedian()
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, 5, engine=hostile, aggregation=median)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Pillutla, Kakade and Harchaoui, "Robust aggregation for federated learning", IEEE
    Transactions on Signal Processing, 2022.
    """

    tolerance: Annotated[float, Gt(0)] = 1e-5
    steps: Annotated[int, Ge(1)] = 1000

    def combine(self, x: Tensor, weights: Tensor, dropped: int = 0) -> Tensor:
        center = _median(x, weights)
        products = _products(x, center)
        squares = products.diagonal()
        scale = _median(squares.sqrt().unsqueeze(1), weights)
        if not scale:  # half of the weight is reached
            return center
        # v = center + sum_i mix_i (x_i - center)
        mix, distances = torch.zeros_like(weights), squares.sqrt()
        for _ in range(self.steps):
            pulls = weights / distances.clamp(min=1e-6 * scale)
            new = pulls / pulls.sum()
            moved, mix = new - mix, new
            if pulls.sum() * (moved @ products @ moved).clamp(min=0).sqrt() <= self.tolerance:
                break
            side = products @ mix
            distances = (squares - 2 * side + mix @ side).clamp(min=0).sqrt()
        return _mix(x, mix)


@dataclass(frozen=True)
class Krum(Robust):
    """The reply closest to its neighbors (Blanchard et al., 2017); with `select` > 1, multi-Krum.

        score_i = sum of |x_i - x_j|^2 over the n - hostile - 2 closest j

    and the result is the mean of the `select` replies of least score. It needs n >= 2 hostile + 3
    clients in a round. Where fewer replies remain, those that were dropped count as hostile ones
    (or else one client could stop a run by sending invalid replies); if that is not enough,
    `fd.TooFewClients` is raised. Clients count the same in the scores, and by weight in the mean of
    those selected. Costs clients^2 x numbers. Most replies are discarded: with `select=1` the model
    follows one client a round.

    Args:
        hostile: How many of the n clients of a round may be hostile.
        select: Number of replies that are averaged.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> hostile = fd.Hostile(clients=0.2, attack="scale", strength=100.0)
        >>> krum = fd.Krum(hostile=2, select=5)
        >>> run = fd.run(fd.FedAvg(fd.Linear()), fed, 5, engine=hostile, aggregation=krum)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries:
    Byzantine tolerant gradient descent", NeurIPS 2017.
    """

    hostile: Annotated[int, Ge(0)]
    select: Annotated[int, Ge(1)] = 1

    def check(self, clients: float) -> None:
        least = max(2 * self.hostile + 3, self.hostile + self.select)
        if clients < least:
            raise ConfigError(
                f"hostile={self.hostile} and select={self.select} need at least {least} clients a "
                f"round; there are {clients:g}"
            )

    def combine(self, x: Tensor, weights: Tensor, dropped: int = 0) -> Tensor:
        n, hostile = len(x), self.hostile
        if n < 2 * hostile + 3:
            hostile = max(0, hostile - dropped)
        if n < 2 * hostile + 3:
            raise TooFewClients(
                f"{self} needs {2 * hostile + 3} replies that can be used; {n} came"
            )
        chosen = torch.zeros_like(weights)
        chosen[self.scores(x, hostile).argsort(stable=True)[: min(self.select, n - hostile)]] = 1.0
        return _mix(x, chosen * weights / (chosen @ weights))

    @staticmethod
    def scores(x: Tensor, hostile: int) -> Tensor:
        """The score of each row."""
        products = _products(x, _median(x, torch.full((len(x),), 1 / len(x), dtype=torch.float64)))
        squares = products.diagonal()
        apart = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * products).clamp(min=0)
        apart.fill_diagonal_(torch.inf)  # a client is not its own neighbor
        return apart.sort(1).values[:, : len(x) - hostile - 2].sum(1)
