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
from foedus.wire.arrays import STRUCTURED, LowRank, Quantised, Signs, Sparse
from foedus.wire.layout import (
    CODES,
    DICT,
    FALSE,
    FLOAT,
    HEADER,
    INNER,
    INT,
    LIST,
    LOW_RANK,
    MAGIC,
    MAX_DEPTH,
    MAX_VALUES,
    NAMES,
    NODE,
    NONE,
    QUANTISED,
    SIGNS,
    SPARSE,
    STATE,
    STR,
    TRAILER,
    TREES,
    TRUE,
    TUPLE,
    VERSION,
    container_header,
    dense_header,
    disorder,
    encoded_dims,
    encoded_key,
    encoded_text,
    index_dtype,
    is_empty,
    varint,
)


def encode(tree: Tree) -> bytes:
    """The message of a tree.

    An empty tree (`{}`, `[]`, `()`, `None`) is the empty message, of no bytes.
    """
    if is_empty(tree):
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
    if is_empty(tree):
        return 0
    return _write(tree, int(batched), keep=False).size + TRAILER


def _write(tree: Tree, skip: int, keep: bool) -> _Writer:
    writer = _Writer(keep)
    try:
        writer.value(tree, skip, 0)
    except WireError as error:
        raise WireError(
            f"cannot encode {'.'.join(map(str, writer.path)) or 'the tree'}: {error}"
        ) from None
    return writer


class _Writer:
    """Walks a tree and adds up its length; with `keep`, also collects the pieces of the message,
    tensors uncopied.
    """

    def __init__(self, keep: bool):
        self.keep = keep
        self.chunks: list = [MAGIC + bytes([VERSION])]
        self.size = HEADER
        self.path: list[str | int] = []
        self.values = 0

    def put(self, data: bytes) -> None:
        self.size += len(data)
        if self.keep:
            self.chunks.append(data)

    def raw(self, t: Tensor, size: int) -> None:
        self.size += size
        if self.keep:
            if t.layout != torch.strided:
                raise WireError(f"expected a strided tensor, got {t.layout}")
            # an empty tensor from NumPy may have a stride of 0, which has no view as bytes
            if size:
                self.chunks.append(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def narrow(self, t: Tensor, count: int, low: int, high: int, what: str) -> None:
        """A dtype and integers in `low .. high - 1`, each minus `low` and in as few bytes as that
        range needs.
        """
        width = index_dtype(high - low)
        self.put(bytes([CODES[t.dtype]]))
        self.size += count * width
        if self.keep:
            numbers = t.detach().cpu().contiguous().view(-1).numpy()
            if numbers.size and not (low <= numbers.min() and numbers.max() < high):
                raise WireError(
                    f"expected {what} in {low} .. {high - 1}, got {numbers.min()} .. "
                    f"{numbers.max()}"
                )
            kind = np.dtype(container_header(width))
            numbers = (numbers.astype(np.int64) - low).astype(kind)
            if width != kind.itemsize:
                numbers = np.ascontiguousarray(
                    numbers.view(np.uint8).reshape(-1, kind.itemsize)[:, :width]
                )
            self.chunks.append(numbers.view(np.uint8).reshape(-1))

    def dense(self, t: Tensor, skip: int) -> None:
        if t.dim() < skip:
            raise WireError("expected a leading dimension of clients, got a single number")
        head, size = dense_header(t.dtype, t.shape[skip:] if skip else t.shape)
        self.put(head)
        self.raw(t, size)

    def value(self, t: Tree, skip: int, depth: int) -> None:
        """Any tree; `skip` leading dimensions of each tensor are not part of the message."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise WireError(f"expected at most {MAX_VALUES} values in a message")
        if isinstance(t, Tensor):
            self.dense(t, skip)
        elif t is None or isinstance(t, bool):
            self.put(bytes((NONE if t is None else TRUE if t else FALSE,)))
        elif isinstance(t, int):
            if not -(1 << 63) <= t < 1 << 63:
                raise WireError(f"expected an integer of 64 bits, got {t}")
            self.put(struct.pack("<Bq", INT, t))
        elif isinstance(t, float):
            self.put(struct.pack("<Bd", FLOAT, t))
        elif isinstance(t, str):
            self.put(bytes((STR,)) + encoded_text(t))
        elif isinstance(t, STRUCTURED):
            if problem := t.fault():
                raise WireError(f"a {type(t).__name__} cannot be sent: {problem}")
            self.structured(t, skip)
        elif depth == MAX_DEPTH:
            raise WireError(f"expected nesting of at most {MAX_DEPTH}")
        elif isinstance(t, dict):
            self.put(bytes((STATE if isinstance(t, State) else DICT,)) + varint(len(t)))
            for name, child in t.items():
                if not isinstance(name, str):
                    raise WireError(f"expected keys that are strings, got {name!r}")
                self.put(encoded_key(name))
                self.child(name, child, skip, depth)
        elif isinstance(t, list | tuple):
            self.put(bytes((LIST if isinstance(t, list) else TUPLE,)) + varint(len(t)))
            for i, child in enumerate(t):
                self.child(i, child, skip, depth)
        elif NODES.get(type(t).__name__) is type(t):
            self.put(bytes((NODE,)) + encoded_text(type(t).__name__))
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
        if getattr(t, t.tree_children[0]).dim() - INNER.get(type(t), 0) < skip:
            raise WireError(
                f"expected a leading dimension of clients, got a single {type(t).__name__}"
            )
        if isinstance(t, Sparse):
            shape = tuple(t.values.shape)[skip:]
            count = math.prod(shape)
            self.put(bytes((SPARSE,)) + encoded_dims(tuple(t.shape)) + encoded_dims(shape))
            self.narrow(t.indices, count, 0, math.prod(t.shape), "indices")
            self.put(bytes((CODES[t.values.dtype],)))
            self.raw(t.values, count * t.values.itemsize)
        elif isinstance(t, LowRank):
            self.put(bytes((LOW_RANK,)))
            self.dense(t.left, skip)
            self.dense(t.right, skip)
        elif isinstance(t, Signs):
            self.put(bytes((SIGNS,)) + encoded_dims(tuple(t.shape)))
            self.dense(t.scale, skip)
            self.raw(t.bits, math.prod(tuple(t.bits.shape)[skip:]))
        elif isinstance(t, Quantised):
            self.put(bytes((QUANTISED, CODES[NAMES[t.dtype]])))
            self.dense(t.scale, skip)
            self.dense(t.codes, skip)
        else:
            lead, nodes = tuple(t.feature.shape)[skip:-1], t.feature.shape[-1]
            (leaves, outputs), trees, batch = t.value.shape[-2:], t.roots.shape[-1], math.prod(lead)
            if self.keep and (problem := disorder(t)):
                raise WireError(problem)
            sizes = (t.features, nodes, leaves, outputs, trees)
            self.put(
                bytes((TREES,))
                + encoded_dims(lead)
                + b"".join(encoded_dims((d,))[1:] for d in sizes)
            )
            self.narrow(t.feature, batch * nodes, -1, t.features, "feature")
            self.narrow(t.left, batch * nodes, -1, nodes, "left")
            self.narrow(t.right, batch * nodes, -1, nodes, "right")
            self.narrow(t.roots, batch * trees, 0, nodes, "roots")
            self.raw(t.threshold, 4 * batch * nodes)
            self.raw(t.value, 4 * batch * leaves * outputs)
