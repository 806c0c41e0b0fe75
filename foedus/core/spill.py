"""Room on disk for what does not fit in memory: files without a name, which vanish with the process that made them."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, MutableMapping

import torch
from torch import Tensor

from foedus.core import tree, wire
from foedus.core.tree import Tree


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor that lies in a file: the system keeps in memory what there is room for, and the rest on disk."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="foedus-") as file:  # the mapping outlives the name
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def nbytes(t: Tree) -> int:
    """Bytes that the tensors of a tree take."""
    return sum(v.numel() * v.element_size() for v in tree.leaves(t) if isinstance(v, Tensor))


class Pile(MutableMapping[int, Tree]):
    """Trees by number: in memory while all of them take at most `memory` bytes, those that come later encoded in a file."""

    def __init__(self, memory: int):
        self.memory, self.held = memory, 0
        self.near: dict[int, Tree] = {}
        self.far: dict[int, tuple[int, int, int]] = {}
        """Where in the file, how many bytes, and how many there is room for."""
        self.file, self.end = tempfile.TemporaryFile(prefix="foedus-"), 0  # noqa: SIM115 - open as long as the pile is

    def __getitem__(self, number: int) -> Tree:
        if number in self.near:
            return self.near[number]
        at, size, _ = self.far[number]
        return wire.decode(os.pread(self.file.fileno(), size, at), max_bytes=size)[0]

    def __setitem__(self, number: int, value: Tree) -> None:
        if number in self.near:
            self.held -= nbytes(self.near.pop(number))
        if number not in self.far and self.held + nbytes(value) <= self.memory:
            self.held += nbytes(value)
            self.near[number] = value
            return
        message = wire.encode([value])
        at, _, room = self.far.get(number, (0, 0, -1))
        if len(message) > room:
            at, room = self.end, len(message)
            self.end += room
        os.pwrite(self.file.fileno(), message, at)
        self.far[number] = at, len(message), room

    def __delitem__(self, number: int) -> None:
        if number in self.near:
            self.held -= nbytes(self.near.pop(number))
        else:
            del self.far[number]

    def __iter__(self) -> Iterator[int]:
        yield from self.near
        yield from self.far

    def __len__(self) -> int:
        return len(self.near) + len(self.far)
