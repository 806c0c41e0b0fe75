"""Some columns of rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

Columns = Sequence[int] | None


def part(x: Tensor, columns: Columns, batch: int) -> Tensor:
    """Some features of rows with `batch` leading dimensions."""
    if columns is None:
        return x
    place = _place(columns)
    return (
        x.flatten(batch)[..., place]
        if isinstance(place, slice)
        else x.flatten(batch).index_select(-1, place)
    )


@functools.lru_cache(maxsize=256)
def _place(columns: tuple[int, ...]) -> slice | Tensor:
    """The index of columns: adjacent ones are a slice, which needs no copy."""
    side_by_side = columns == tuple(range(columns[0], columns[0] + len(columns)))
    return slice(columns[0], columns[0] + len(columns)) if side_by_side else torch.tensor(columns)
