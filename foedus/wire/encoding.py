"""Trees of tensors to bytes, and the length of a message from shapes alone."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from foedus.base.tree import NODES, State, Tree
from foedus.errors import WireError
from foedus.wire import layout
from foedus.wire.arrays import STRUCTURED, LowRank, Quantised, Signs, Sparse


def encode(tree: Tree) -> bytes:
    """The message of a tree.

    An empty tree (`{}`, `[]`, `()`, `None`) is the empty message, of no bytes.
    """
    if layout.is_empty(tree):
        return b""
    writer = _write(tree, 0, keep=True)
    crc = 0
    for chunk in writer.chunks:
        crc = zlib.crc32(chunk, crc)
    return b"".join((*writer.chunks, struct.pack("<I", crc)))


def nbytes(tree: Tree, batched: bool = False) -> int:
    """`len(encode(tree))`, from the shapes alone.

    With `batched`, every tensor has a leading dimension of clients and the result is the length of
    one client's message.
    """
    if layout.is_empty(tree):
        return 0
    return _write(tree, int(batched), keep=False).size + layout.TRAILER


def _write(tree: Tree, skip: int, keep: bool) -> _Writer:
    writer = _Writer(keep)
    try:
        writer.value(tree, skip, 0)
    except WireError as error:
        path = ".".join(map(str, writer.path))
        raise WireError(f"cannot encode {path or 'the tree'}: {error}") from None
    return writer


class _Writer:
    """Walks a tree and adds up its length; with `keep`, also collects the pieces, uncopied."""

    def __init__(self, keep: bool):
        self.keep = keep
        self.chunks: list = [layout.MAGIC + bytes([layout.VERSION])]
        self.size = layout.HEADER
        self.path: list[str | int] = []
        self.values = 0

    def put(self, data: bytes) -> None:
        self.size += len(data)
        if self.keep:
            self.chunks.append(data)

    def head(self, tag: int, *parts: bytes) -> None:
        self.put(b"".join((bytes((tag,)), *parts)))

    def raw(self, t: Tensor, size: int) -> None:
        self.size += size
        if self.keep:
            if t.layout != torch.strided:
                raise WireError(f"expected a strided tensor, got {t.layout}")
            # an empty tensor from NumPy may have a stride of 0, which has no view as bytes
            if size:
                self.chunks.append(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def narrow(self, t: Tensor, count: int, low: int, high: int, what: str) -> None:
        """A dtype and integers in `low .. high - 1`, less `low`, in as few bytes as they need."""
        width = layout.index_dtype(high - low)
        self.put(bytes([layout.CODES[t.dtype]]))
        self.size += count * width
        if self.keep:
            numbers = t.detach().cpu().contiguous().view(-1).numpy()
            if numbers.size and not (low <= numbers.min() and numbers.max() < high):
                given = f"{numbers.min()} .. {numbers.max()}"
                raise WireError(f"expected {what} in {low} .. {high - 1}, got {given}")
            kind = np.dtype(layout.container_header(width))
            numbers = (numbers.astype(np.int64) - low).astype(kind)
            if width != kind.itemsize:
                parts = numbers.view(np.uint8).reshape(-1, kind.itemsize)
                numbers = np.ascontiguousarray(parts[:, :width])
            self.chunks.append(numbers.view(np.uint8).reshape(-1))

    def dense(self, t: Tensor, skip: int) -> None:
        if t.dim() < skip:
            raise WireError("expected a leading dimension of clients, got a single number")
        head, size = layout.dense_header(t.dtype, t.shape[skip:] if skip else t.shape)
        self.put(head)
        self.raw(t, size)

    def value(self, t: Tree, skip: int, depth: int) -> None:
        """Any tree; `skip` leading dimensions of each tensor are not part of the message."""
        self.values += 1
        if self.values > layout.MAX_VALUES:
            raise WireError(f"expected at most {layout.MAX_VALUES} values in a message")
        if isinstance(t, Tensor):
            self.dense(t, skip)
        elif t is None or isinstance(t, bool):
            self.head(layout.NONE if t is None else layout.TRUE if t else layout.FALSE)
        elif isinstance(t, int):
            if not -(1 << 63) <= t < 1 << 63:
                raise WireError(f"expected an integer of 64 bits, got {t}")
            self.put(struct.pack("<Bq", layout.INT, t))
        elif isinstance(t, float):
            self.put(struct.pack("<Bd", layout.FLOAT, t))
        elif isinstance(t, str):
            self.head(layout.STR, layout.encoded_text(t))
        elif isinstance(t, STRUCTURED):
            if problem := t.fault():
                raise WireError(f"a {type(t).__name__} cannot be sent: {problem}")
            self.structured(t, skip)
        elif depth == layout.MAX_DEPTH:
            raise WireError(f"expected nesting of at most {layout.MAX_DEPTH}")
        elif isinstance(t, dict):
            kind = layout.STATE if isinstance(t, State) else layout.DICT
            self.head(kind, layout.varint(len(t)))
            for name, child in t.items():
                if not isinstance(name, str):
                    raise WireError(f"expected keys that are strings, got {name!r}")
                self.put(layout.encoded_key(name))
                self.child(name, child, skip, depth)
        elif isinstance(t, list | tuple):
            self.head(layout.LIST if isinstance(t, list) else layout.TUPLE, layout.varint(len(t)))
            for i, child in enumerate(t):
                self.child(i, child, skip, depth)
        elif NODES.get(type(t).__name__) is type(t):
            self.head(layout.NODE, layout.encoded_text(type(t).__name__))
            for names, batch in ((t.tree_children, skip), (t.tree_static, 0)):
                for name in names:
                    self.child(name, getattr(t, name), batch, depth)
        else:
            raise WireError(
                f"expected tensors, scalars, text and trees of them, got a {type(t).__name__}"
            )

    def child(self, name: str | int, t: Tree, skip: int, depth: int) -> None:
        self.path.append(name)  # stays as it is when something fails, and so says where
        self.value(t, skip, depth + 1)
        self.path.pop()

    def structured(self, t: Tree, skip: int) -> None:
        if getattr(t, t.tree_children[0]).dim() - layout.INNER.get(type(t), 0) < skip:
            raise WireError(
                f"expected a leading dimension of clients, got a single {type(t).__name__}"
            )
        if isinstance(t, Sparse):
            shape = tuple(t.values.shape)[skip:]
            count = math.prod(shape)
            dims = (tuple(t.shape), shape)
            self.head(layout.SPARSE, *map(layout.encoded_dims, dims))
            self.narrow(t.indices, count, 0, math.prod(t.shape), "indices")
            self.head(layout.CODES[t.values.dtype])
            self.raw(t.values, count * t.values.itemsize)
        elif isinstance(t, LowRank):
            self.head(layout.LOW_RANK)
            self.dense(t.left, skip)
            self.dense(t.right, skip)
        elif isinstance(t, Signs):
            self.head(layout.SIGNS, layout.encoded_dims(tuple(t.shape)))
            self.dense(t.scale, skip)
            self.raw(t.bits, math.prod(tuple(t.bits.shape)[skip:]))
        elif isinstance(t, Quantised):
            self.put(bytes((layout.QUANTISED, layout.CODES[layout.NAMES[t.dtype]])))
            self.dense(t.scale, skip)
            self.dense(t.codes, skip)
        else:
            lead, nodes = tuple(t.feature.shape)[skip:-1], t.feature.shape[-1]
            (leaves, outputs), trees, batch = t.value.shape[-2:], t.roots.shape[-1], math.prod(lead)
            if self.keep and (problem := layout.disorder(t)):
                raise WireError(problem)
            counts = (t.features, nodes, leaves, outputs, trees)
            sizes = (layout.encoded_dims((n,))[1:] for n in counts)
            self.head(layout.TREES, layout.encoded_dims(lead), *sizes)
            self.narrow(t.feature, batch * nodes, -1, t.features, "feature")
            self.narrow(t.left, batch * nodes, -1, nodes, "left")
            self.narrow(t.right, batch * nodes, -1, nodes, "right")
            self.narrow(t.roots, batch * trees, 0, nodes, "roots")
            self.raw(t.threshold, 4 * batch * nodes)
            self.raw(t.value, 4 * batch * leaves * outputs)
