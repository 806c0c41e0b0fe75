"""Sums of replies, added up in a stream as pairs of doubles; and the ledger of what was sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foedus import kernels, wire
from foedus.base import tree
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.exchange import map_tensors
from foedus.errors import DivergenceError, ReplyError

_CHUNK = 1 << 22
"""Numbers of structured arrays that are made dense at a time."""


@dataclass
class Ledger:
    """Bytes and messages sent so far, in their encoded form."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0

    def charge(self, reply: Tree, stacked: bool, clients: int) -> None:
        """Count a reply of this form from each of a number of clients."""
        each = wire.nbytes(reply, batched=stacked)
        self.bytes_up += clients * each
        self.messages_up += clients * bool(each)


class Accumulator:
    """A weighted sum of replies, added up in a stream of batches or single replies.

    Replies may hold structured arrays. Each product of a weight and a number is rounded to a double
    by itself; their sum is carried in two doubles (`total`, and its rounding error `rest`) and
    rounded once, at the end. So neither the batching of clients, nor partial sums by workers,
    changes a bit.
    """

    def __init__(self, remedy: str = Algorithm.remedy) -> None:
        self.remedy = remedy
        self.total: list[Tensor] | None = None
        self.rest: list[Tensor] = []
        self.dtypes: list[torch.dtype] = []
        self.form: tree.Form = None

    def add(self, reply: Tree, weights: Tensor, round: int, ids: Tensor) -> None:
        """Add sum_c weights[c] * reply[c].

        Raises:
            DivergenceError: The sum is not finite; the error names the clients.
        """
        leaves, form = tree.flatten(reply, is_leaf=lambda t: hasattr(t, "dense"))
        weights = weights.double().contiguous()
        if self.total is not None and len(weights) == 1 and self._fits(leaves, form):
            if not tree.all_finite(leaves):
                raise not_finite(leaves, round, ids, remedy=self.remedy)
            for total, rest, leaf in zip(self.total, self.rest, leaves, strict=True):
                _add(total.view(-1), rest.view(-1), leaf, weights)
            return
        batch = Accumulator(self.remedy)
        sums = [_weighted_sum(leaf, weights) for leaf in leaves]
        batch.total, batch.rest = [total for total, _, _ in sums], [rest for _, rest, _ in sums]
        batch.dtypes, batch.form = [dtype for _, _, dtype in sums], form
        if not all(tree.finite(t.to(d)) for t, _, d in sums):
            raise not_finite(leaves, round, ids, remedy=self.remedy)
        self.merge(batch, round, ids)

    def _fits(self, leaves: list[Tree], form: tree.Form) -> bool:
        """Whether a single reply can be added in place: large models arrive one by one."""
        return (
            self.total is not None
            and form == self.form
            and all(
                isinstance(leaf, Tensor)
                and leaf.dtype == dtype == torch.float32
                and leaf.shape[1:] == total.shape
                and total.is_contiguous()
                for leaf, total, dtype in zip(leaves, self.total, self.dtypes, strict=True)
            )
        )

    def merge(self, other: Accumulator, round: int, ids: Tensor) -> None:
        """Add the sum of the clients `ids`."""
        if self.total is None:
            self.total, self.rest, self.dtypes, self.form = (
                other.total,
                other.rest,
                other.dtypes,
                other.form,
            )
            return
        assert other.total is not None
        if other.form != self.form or [p.shape for p in other.total] != [
            t.shape for t in self.total
        ]:
            raise ReplyError(
                f"round {round}: clients {ids.tolist()[:5]} replied with another structure than "
                "those before"
            )
        for i, (t, p) in enumerate(zip(self.total, other.total, strict=True)):
            total, lost = _two_sum(t, p)
            self.rest[i] += lost + other.rest[i]
            self.total[i] = total

    def result(self) -> Tree:
        assert self.total is not None
        sums = (t + r for t, r in zip(self.total, self.rest, strict=True))
        return tree.unflatten([t.to(d) for t, d in zip(sums, self.dtypes, strict=True)], self.form)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b and its exact rounding error (Knuth)."""
    total = a + b
    grown = total - a
    return total, (a - (total - grown)) + (b - grown)


def _weighted_sum(leaf: Any, weights: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
    """The sum as two doubles (`Accumulator`), and the precision of the result."""
    if isinstance(leaf, Tensor):
        one, shape = leaf, tuple(leaf.shape[1:])
    elif isinstance(leaf, wire.Sparse):
        one, shape = leaf.values, leaf.shape
    elif hasattr(leaf, "dense"):
        one = map_tensors(lambda t: t[:1], leaf).dense()
        shape = tuple(one.shape[1:])
    else:
        raise ReplyError(
            f"a reply to be averaged holds a {type(leaf).__name__}; only tensors have a mean"
        )
    size = math.prod(shape)
    total, rest = torch.zeros(2, size, dtype=torch.float64, device=one.device).unbind()
    for terms, shares in _terms(leaf, weights, size):
        _add(total, rest, terms, shares)
    dtype = one.dtype if one.is_floating_point() else torch.float32
    return total.view(shape), rest.view(shape), dtype


def _terms(leaf: Any, weights: Tensor, size: int) -> Iterable[tuple[Tensor | wire.Sparse, Tensor]]:
    """The summands and their weights; structured arrays become dense, some clients at a time."""
    compiled = kernels.ready and weights.device.type == "cpu"
    whole = isinstance(leaf, Tensor) or (isinstance(leaf, wire.Sparse) and compiled)
    return ((leaf, weights),) if whole else _dense_terms(leaf, weights, size)


def _dense_terms(leaf: Any, weights: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    step = max(1, _CHUNK // max(1, size))
    for first in range(0, len(weights), step):
        part = slice(first, first + step)
        some = map_tensors(lambda t, part=part: t[part], leaf)
        if not isinstance(some, wire.LowRank):
            yield some.dense(), weights[part]
            continue
        # rank by rank: a matrix product would choose its own order of summation
        left, right = some.left.double(), some.right.double()
        for r in range(left.shape[-1]):
            yield left[..., r].unsqueeze(-1) * right[..., r].unsqueeze(-2), weights[part]


def _add(total: Tensor, rest: Tensor, terms: Tensor | wire.Sparse, weights: Tensor) -> None:
    """total + rest += sum_c weights[c] terms[c], in place; terms (c, ...)."""
    if isinstance(terms, wire.Sparse):
        values = _real(terms.values).contiguous()
        kernels.sum_sparse(total, rest, terms.indices.long().contiguous(), values, weights)
        return
    x = _real(terms).reshape(len(weights), -1)
    if kernels.ready and x.device.type == "cpu":
        kernels.sum_replies(total, rest, x.contiguous(), weights)
        return
    columns, weights = max(1, _CHUNK // len(x)), weights.to(x.device).unsqueeze(1)
    parts = (total.split(columns), rest.split(columns), x.split(columns, 1))
    for there, lost, part in zip(*parts, strict=True):
        summands = torch.cat((there.unsqueeze(0), weights * part.double()))
        while len(summands) > 1:  # by halves: few operations for many clients
            half = len(summands) // 2
            sums, errors = _two_sum(summands[:half], summands[half : 2 * half])
            lost += errors.sum(0)
            summands = torch.cat((sums, summands[2 * half :]))
        there.copy_(summands[0])


def _real(t: Tensor) -> Tensor:
    """In single or double precision."""
    return t.detach() if t.dtype in (torch.float32, torch.float64) else t.detach().float()


def not_finite(
    leaves: list[Tree], round: int, ids: Tensor, what: str = "reply", remedy: str = Algorithm.remedy
) -> DivergenceError:
    """The error for replies (or states) that are not finite, with the round and the clients."""
    bad = torch.zeros(len(ids), dtype=torch.bool)
    for leaf in tree.leaves(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            bad |= ~torch.isfinite(leaf.reshape(len(ids), -1)).all(1)
    return diverged(what, round, ids[bad].tolist() or ids.tolist(), remedy)


def diverged(what: str, round: int, clients: list[int], remedy: str) -> DivergenceError:
    """The error for clients whose `what` is not finite.

    It keeps `what`: a session may find such clients in several places.
    """
    shown = ", ".join(map(str, clients[:10])) + (
        f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    )
    error = DivergenceError(
        f"round {round}: the {what} of client{'s' * (len(clients) > 1)} {shown} is not finite (NaN "
        f"or infinity); {remedy}",
        round,
        clients,
    )
    error.what = what
    return error
