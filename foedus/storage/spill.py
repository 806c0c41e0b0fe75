"""Disk space for values that do not fit in memory: unnamed files, which disappear with the
process."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor

from foedus import wire
from foedus.base import tree
from foedus.base.tree import Tree


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor mapped to a file: the system keeps as much in memory as fits."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="foedus-") as file:  # the mapping outlives the name
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype).view(
            shape
        )


def nbytes(t: Tree) -> int:
    """Bytes that the tensors of a tree take."""
    return sum(v.numel() * v.element_size() for v in tree.leaves(t) if isinstance(v, Tensor))


class _Place(NamedTuple):
    """The position of a tree in the file, its bytes, and its capacity."""

    at: int
    size: int
    room: int


class Pile(MutableMapping[int, Tree]):
    """Trees by number: up to `memory` bytes of them in memory, later ones encoded in a file."""

    def __init__(self, memory: int):
        self.memory, self.taken, self.end = memory, 0, 0
        self.held: dict[int, Tree | _Place] = {}
        self.file = tempfile.TemporaryFile(prefix="foedus-")  # noqa: SIM115 - open as long as the pile is

    def __getitem__(self, number: int) -> Tree:
        held = self.held[number]
        if not isinstance(held, _Place):
            return held
        return wire.decode(os.pread(self.file.fileno(), held.size, held.at), max_bytes=held.size)[0]

    def __setitem__(self, number: int, value: Tree) -> None:
        old = self.held.get(number)
        size = nbytes(value)
        if not isinstance(old, _Place):
            self.taken -= nbytes(old)
            if self.taken + size <= self.memory:
                self.taken += size
                self.held[number] = value
                return
        message = wire.encode([value])
        if isinstance(old, _Place) and len(message) <= old.room:
            place = old._replace(size=len(message))
        else:
            place = _Place(self.end, len(message), len(message))
            self.end += len(message)
        os.pwrite(self.file.fileno(), message, place.at)
        self.held[number] = place

    def __delitem__(self, number: int) -> None:
        old = self.held.pop(number)
        self.taken -= 0 if isinstance(old, _Place) else nbytes(old)

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)
