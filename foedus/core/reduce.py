"""Sums of replies, added up in a stream in twice their precision; and the ledger of what was
sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foedus import wire
from foedus.base import tree
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.errors import DivergenceError, ReplyError

_SMALL, _SHORT, _BLOCK = 1 << 16, 64, 1 << 14
"""Numbers that are summed in double precision at once; clients in a sum of single precision;
numbers of a reply that are added at a time.
"""


@dataclass
class Ledger:
    """What has been sent so far, in encoded bytes and in messages."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0

    def charge(self, reply: Tree, stacked: bool, clients: int) -> None:
        """So many clients send a reply of this form."""
        each = wire.nbytes(reply, batched=stacked)
        self.bytes_up += clients * each
        self.messages_up += clients * bool(each)


class Accumulator:
    """A weighted sum of replies, added up in a stream: stacked batches or single replies,
    structured arrays included.

    Sums are carried in twice the precision of the replies (`rest` is what doubles leave over), so
    that how clients were batched, or spread over workers that add up their own, leaves next to no
    trace.
    """

    def __init__(self, remedy: str = Algorithm.remedy) -> None:
        self.remedy = remedy
        self.total: list[Tensor] | None = None
        self.rest: list[Tensor | None] = []
        self.dtypes: list[torch.dtype] = []
        self.form: tree.Form = None

    def add(self, reply: Tree, weights: Tensor, round: int, ids: Tensor) -> None:
        """Add sum_c weights[c] * reply[c]; a sum that is not finite is traced to its clients and
        refused.
        """
        leaves, form = tree.flatten(reply, is_leaf=lambda t: hasattr(t, "weighted_sum"))
        if self.total is not None and len(weights) == 1 and self._fits(leaves, form):
            if not tree.all_finite(leaves):
                raise not_finite(leaves, round, ids, remedy=self.remedy)
            # By blocks, which stay in cache while they change precision; so small that PyTorch does
            # not wait for threads whose cores other clients are using.
            for total, leaf in zip(self.total, leaves, strict=True):
                for there, part in zip(
                    total.view(-1).split(_BLOCK), leaf.reshape(-1).split(_BLOCK), strict=True
                ):
                    there.add_(part, alpha=float(weights[0]))
            return
        batch = Accumulator(self.remedy)
        sums = [_weighted_sum(leaf, weights) for leaf in leaves]
        batch.total, batch.dtypes, batch.form = (
            [total for total, _ in sums],
            [dtype for _, dtype in sums],
            form,
        )
        if not tree.all_finite([t.to(d) for t, d in sums]):
            raise not_finite(leaves, round, ids, remedy=self.remedy)
        batch.rest = [torch.zeros_like(t) if d == torch.float64 else None for t, d in sums]
        self.merge(batch, round, ids)

    def _fits(self, leaves: list[Tree], form: tree.Form) -> bool:
        """Whether a single reply can be added where the sum lies: large models come one after the
        other.
        """
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
        """Add another sum, of the clients `ids`."""
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
            rest, more = self.rest[i], other.rest[i]
            if rest is None or more is None:
                t.add_(p)
                continue
            total = t + p  # and what rounding took from it, exactly (Knuth's two-sum)
            grown = total - t
            rest += (t - (total - grown)) + (p - grown) + more
            self.total[i] = total

    def result(self) -> Tree:
        assert self.total is not None
        sums = (t if r is None else t + r for t, r in zip(self.total, self.rest, strict=True))
        return tree.unflatten([t.to(d) for t, d in zip(sums, self.dtypes, strict=True)], self.form)


def _weighted_sum(leaf: Tree, weights: Tensor) -> tuple[Tensor, torch.dtype]:
    """The sum, in double precision, and the precision that the result should have."""
    if hasattr(leaf, "weighted_sum"):
        found = leaf.weighted_sum(weights)
        return (found.double() if found.is_floating_point() else found), found.dtype
    if not isinstance(leaf, Tensor):
        raise ReplyError(
            f"a reply to be averaged holds a {type(leaf).__name__}; only tensors have a mean"
        )
    if not leaf.is_floating_point():
        leaf = leaf.float()
    flat, shape = leaf.reshape(len(leaf), -1), leaf.shape[1:]
    if len(flat) == 1:
        return flat[0].to(torch.float64, copy=True).mul_(weights[0]).view(shape), leaf.dtype
    if flat.numel() <= _SMALL or leaf.dtype == torch.float64:
        return torch.mv(flat.mT.double(), weights.double()).view(shape), leaf.dtype
    # Single precision loses digits over thousands of clients, so only short sums are made in it.
    weights, whole = weights.to(leaf.dtype), len(flat) // _SHORT * _SHORT
    if not whole:
        return torch.mv(flat.mT, weights).double().view(shape), leaf.dtype
    parts = torch.bmm(
        weights[:whole].view(-1, 1, _SHORT), flat[:whole].view(-1, _SHORT, flat.shape[1])
    )
    total = parts.sum((0, 1), dtype=torch.float64) + torch.mv(flat[whole:].mT, weights[whole:])
    return total.view(shape), leaf.dtype


def not_finite(
    leaves: list[Tree], round: int, ids: Tensor, what: str = "reply", remedy: str = Algorithm.remedy
) -> DivergenceError:
    """The error that says in which round which of the clients `ids` sent (or keep) a number that is
    not finite.
    """
    bad = torch.zeros(len(ids), dtype=torch.bool)
    for leaf in tree.leaves(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            bad |= ~torch.isfinite(leaf.reshape(len(ids), -1)).all(1)
    return diverged(what, round, ids[bad].tolist() or ids.tolist(), remedy)


def diverged(what: str, round: int, clients: list[int], remedy: str) -> DivergenceError:
    """The error for clients whose `what` is not finite, which it keeps: a session may find some
    here and some there.
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
