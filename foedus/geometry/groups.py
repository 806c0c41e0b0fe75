"""Balls of groups of coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, MinLen
from torch import Tensor

from foedus.base.settings import Means
from foedus.errors import ConfigError
from foedus.geometry.domain import Ball, Shape, length, plain_numbers, scaled, simplex, unit
from foedus.wire.arrays import Sparse


@dataclass(frozen=True)
class GroupBall(Ball):
    """The ball of the group lasso, {x : sum over groups of |x_g|_2 <= radius}.

    Extreme points: vectors of length radius in one group. The point is sparse, with as many entries
    as the largest group has; if the chosen group has fewer, other entries come with the value zero.
    At g = 0: zero.

    Args:
        radius: Largest sum of the groups' norms.
        groups: The size of equal consecutive groups; "rows" for one group for each index of the
            first dimension (the inputs of one neuron); or a label (an integer) for each entry, as a
            tuple.

    Example:
        >>> fd.GroupBall(1.0, groups=2).lmo(torch.tensor([1.0, 0.0, 3.0, 4.0])).dense()
        tensor([ 0.0000,  0.0000, -0.6000, -0.8000])
    """

    radius: Annotated[float, Gt(0)]
    groups: (
        Annotated[int, Ge(1), Means("the size of the groups")]
        | Literal["rows"]
        | Annotated[
            tuple[int, ...], MinLen(1), Means("a tuple with a label, an integer, for each entry")
        ]
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", plain_numbers(self.groups))
        super().__post_init__()

    def check(self, shape: Shape) -> None:
        super().check(shape)
        entries, groups = math.prod(shape), self.groups
        if groups == "rows" and len(shape) < 2:
            raise ConfigError(
                f"groups='rows' needs a matrix, not a tensor of shape {tuple(shape)}: use "
                "PerLayer, or give the size of the groups"
            )
        if isinstance(groups, int) and entries % groups:
            wrong = f"groups={groups} does not divide the {entries} entries of {tuple(shape)}"
            raise ConfigError(f"{wrong}: label each entry")
        if isinstance(groups, tuple) and len(groups) != entries:
            size = f"a tensor of shape {tuple(shape)} has {entries} entries"
            raise ConfigError(f"groups has {len(groups)} labels, but {size}")

    @cached_property
    def _labels(self) -> tuple[Tensor, Tensor, Tensor]:
        """The number of each entry's group, the entries ordered by it, and the groups' sizes."""
        labels = torch.tensor(self.groups)
        _, numbers, sizes = labels.unique(return_inverse=True, return_counts=True)
        return numbers, numbers.argsort(stable=True), sizes

    def _size(self, shape: Shape) -> int:
        """The size of the largest group."""
        if isinstance(self.groups, tuple):
            return int(self._labels[2].max())
        return math.prod(shape[1:]) if self.groups == "rows" else int(self.groups)

    def count(self, shape: Shape) -> int:
        """The number of groups."""
        if isinstance(self.groups, tuple):
            return len(self._labels[2])
        return math.prod(shape) // self._size(shape)

    def _lengths(self, x: Tensor, shape: Shape) -> Tensor:
        """The Euclidean norm of each group, in float64."""
        if not isinstance(self.groups, tuple):
            size = self._size(shape)
            return length(x.reshape(*x.shape[:-1], x.shape[-1] // size, size))
        numbers, _, sizes = self._labels
        zeros = x.new_zeros(*x.shape[:-1], len(sizes), dtype=torch.float64)
        return zeros.scatter_add(-1, numbers.expand(x.shape), x.double().square()).sqrt()

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        shape = tuple(g.shape[batch:])
        flat = scaled(self._flat(g, batch))
        winner = self._lengths(flat, shape).argmax(-1, keepdim=True)
        place = torch.arange(self._size(shape))
        if isinstance(self.groups, tuple):
            # behind the members of the group come those of the next: other entries, value zero
            _, order, sizes = self._labels
            index = order[((sizes.cumsum(0) - sizes)[winner] + place) % len(order)]
            values = torch.where(place < sizes[winner], flat.gather(-1, index), 0)
        else:
            index = winner * len(place) + place
            values = flat.gather(-1, index)
        return Sparse(index, unit(values) * -self.radius, shape)

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        norms = self._lengths(x, shape)
        ratios = simplex(norms, self.radius) / torch.where(norms > 0, norms, 1)
        ratios = torch.where(norms.sum(-1, keepdim=True) <= self.radius, 1.0, ratios)
        if isinstance(self.groups, tuple):
            return x * ratios.gather(-1, self._labels[0].expand(x.shape))
        return x * ratios.repeat_interleave(self._size(shape), -1)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        return self._lengths(x, shape).sum(-1) <= self.radius * (1 + tolerance)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        if norm == "nuclear":
            return self.radius * math.sqrt(self._rank(shape))
        return self.radius * (math.sqrt(self._size(shape)) if norm == "l1" else 1.0)

    def _rank(self, shape: tuple[int, ...]) -> int:
        """The largest rank of a matrix that is zero outside one group.

        It is the most entries of a group in different rows and columns.

        |X|_* <= sqrt(rank) |X|_2, and equal entries at such places attain it.
        """
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import maximum_bipartite_matching

        entries, most = torch.arange(math.prod(shape)), 0
        if isinstance(self.groups, tuple):
            parts = entries[self._labels[1]].split(self._labels[2].tolist())
        else:
            parts = entries.split(self._size(shape))
        for part in parts:
            rows, columns = (part // shape[1]).numpy(), (part % shape[1]).numpy()
            pattern = csr_matrix(([1] * len(part), (rows - rows.min(), columns)))
            most = max(most, int((maximum_bipartite_matching(pattern) >= 0).sum()))
        return most
