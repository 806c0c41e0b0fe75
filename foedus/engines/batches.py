"""Batches of clients: an index into the rows of all of them, padded to the largest member."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.rows import Rows, take, tensor_of
from foedus.base.spec import RawSpec, Spec
from foedus.base.tree import Tree

_KEPT, _KEPT_ROWS = 8, 1 << 23
"""The number of batches whose row numbers are kept, and their largest number of rows: with all
clients, batches are the same in every round.
"""


class Table:
    """Row numbers by client; `order` has the positions of the clients in the federation."""

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        rows: np.ndarray,
        offsets: np.ndarray,
        order: np.ndarray,
        spec: Spec,
        device: str = "cpu",
        weights: np.ndarray | None = None,
    ):
        self.spec = spec
        sizes = np.diff(offsets)[order]
        if not np.array_equal(order, np.arange(len(order))):
            starts = np.repeat(
                offsets[:-1][order] - np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes
            )
            rows = rows[starts + np.arange(sizes.sum())]
        raw = isinstance(spec, RawSpec)
        self.x = tensor_of(x, None if raw else spec.integers).to(device)
        self.y, self.rows = tensor_of(y).to(device), tensor_of(rows)
        self.w = None if weights is None else torch.from_numpy(weights).float()
        self.sizes = torch.from_numpy(np.ascontiguousarray(sizes))
        self.starts = torch.cumsum(self.sizes, 0) - self.sizes
        self.kept: dict[tuple[bytes, int], tuple[Tensor, Tensor]] = {}

    @cached_property
    def row_bytes(self) -> int:
        return sum(t[:1].numel() * t.element_size() for t in (self.x, self.y)) + 16

    def index(self, positions: Tensor, width: int = 0) -> tuple[Tensor, Tensor]:
        """Row numbers (c, n) of some clients, padded with their own first row, and weights (1, or 0
        for padding).

        n is the largest client's number of rows, or `width` if that is more.
        """
        key = (positions.numpy().tobytes(), width)
        if key not in self.kept:
            sizes = self.sizes[positions]
            n = max(int(sizes.max()), width)
            at = self.starts[positions].unsqueeze(1)
            if int(sizes.min()) == n:  # no padding
                found = take(self.rows, at + torch.arange(n)), torch.ones(len(sizes), n)
            else:
                column = torch.arange(n)
                real = column < sizes.unsqueeze(1)
                found = take(self.rows, at + torch.where(real, column, 0)), real.float()
            if found[0].numel() > _KEPT_ROWS:
                return found
            if len(self.kept) == _KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = found
        return self.kept[key]

    def stack(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The clients' rows as (c, n, ...): a view if they have one size and are adjacent in the
        data, otherwise a copy.
        """
        index, weight = self.index(positions)
        flat = index.flatten()
        if bool((flat[1:] == flat[:-1] + 1).all()) and bool(weight.all()):
            part = slice(int(flat[0]), int(flat[-1]) + 1)
            x, y = (t[part].view(*index.shape, *t.shape[1:]) for t in (self.x, self.y))
        else:
            x, y = (take(t, index.to(t.device)) for t in (self.x, self.y))
        return x, y

    def one(self, position: int) -> Rows:
        """One client's rows, without padding."""
        start, size = int(self.starts[position]), int(self.sizes[position])
        index = self.rows[start : start + size]
        return Rows(self.x, self.y, index, torch.ones(size), self.spec, None, self.w)

    def weight_sums(self) -> Tensor:
        """The sum of the weights of each client's rows."""
        assert self.w is not None
        total = torch.cat((torch.zeros(1).double(), self.w[self.rows].double().cumsum(0)))
        return total[self.starts + self.sizes] - total[self.starts]

    def groups(self, positions: Tensor, spread: float, limit: Callable[[int], int]) -> list[Tensor]:
        """Cut clients into batches: sizes within a factor `spread`, and at most `limit(rows)`
        clients if the largest has that number of rows.
        """
        sizes = self.sizes[positions]
        if (
            len(positions)
            and spread == float("inf")
            and len(positions) <= limit(max(int(sizes.max()), 1))
        ):
            return [positions.sort().values]
        order = torch.argsort(sizes, descending=True, stable=True)
        falling = -sizes[order]
        groups, at = [], 0
        while at < len(order):
            n = -int(falling[at])
            last = (
                int(torch.searchsorted(falling, -n / spread, right=True))
                if spread != float("inf")
                else len(order)
            )
            stop = min(max(last, at + 1), at + limit(max(n, 1)))
            # Back into order of position, so that neighbors of one size stay a view.
            groups.append(positions[order[at:stop]].sort().values)
            at = stop
        return groups


@dataclass(eq=False)
class Group:
    """A batch of clients, with the tensors that are cached between rounds."""

    positions: Tensor
    stacked: tuple[Tensor, Tensor] | None = None
    prepared: Tree = None
    width: int = 0
    """Number of rows to which cached tensors are padded; a part of a batch keeps the padding of the
    whole."""


def members_of(group: Group, positions: Tensor) -> Group | None:
    """The members of a batch that are among `positions`, with their part of the cached tensors."""
    present = torch.isin(group.positions, positions)
    if bool(present.all()):
        return group
    at = torch.nonzero(present).flatten()
    return _pick(group, lambda t: t.index_select(0, at)) if len(at) else None


def slices_of(group: Group, size: int) -> Iterator[Group]:
    """A batch cut into smaller ones, without copying cached tensors."""
    for first in range(0, len(group.positions), size):
        yield _pick(group, itemgetter(slice(first, first + size)))


def _pick(group: Group, f: Callable[[Tensor], Tensor]) -> Group:
    stacked, prepared = tree.map(
        lambda t: f(t) if isinstance(t, Tensor) else t, (group.stacked, group.prepared)
    )
    return Group(f(group.positions), stacked, prepared, group.width)
