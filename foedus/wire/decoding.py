"""Bytes to trees of tensors.

Decoding trusts nothing: every length is checked before it is believed.
"""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from foedus.base.tree import NODES, State, Tree
from foedus.errors import WireError
from foedus.wire.arrays import STRUCTURED, LowRank, Quantised, Signs, Sparse, Trees
from foedus.wire.layout import (
    DENSE,
    DTYPES,
    FALSE,
    FLOAT,
    HEADER,
    INT,
    LIST,
    LOW_RANK,
    MAGIC,
    MAX_DEPTH,
    MAX_NDIM,
    MAX_VALUES,
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
    disorder,
    excess,
    index_dtype,
    is_empty,
)


def decode(data: bytes | bytearray | memoryview, max_bytes: int = 1 << 31) -> Tree:
    """The tree of a message; the empty message gives `{}`.

    Raises `WireError` on anything that `encode` did not write.
    """
    view = memoryview(data).cast("B")
    if not len(view):
        return {}
    if len(view) > max_bytes:
        raise WireError(f"the message has {len(view)} bytes; expected at most {max_bytes}")
    if len(view) < HEADER + 1 + TRAILER:
        raise WireError(
            f"the message is truncated: expected at least {HEADER + 1 + TRAILER} bytes, got "
            f"{len(view)}"
        )
    if view[:2] != MAGIC:
        raise WireError(
            f"expected {MAGIC!r} at byte 0, where a message starts, got {bytes(view[:2])!r}"
        )
    if view[2] != VERSION:
        raise WireError(f"expected version {VERSION} of the wire form at byte 2, got {view[2]}")
    body, (crc,) = view[:-TRAILER], struct.unpack("<I", view[-TRAILER:])
    if zlib.crc32(body) != crc:
        raise WireError(
            f"the checksum at byte {len(body)} does not match: the message is truncated or damaged"
        )
    reader = _Reader(body)
    tree = reader.value(0)
    if reader.at != len(body):
        raise WireError(
            f"expected the end of the message at byte {reader.at}, got {len(body) - reader.at} "
            "more bytes"
        )
    if is_empty(tree):
        raise WireError(
            f"expected a value that is not empty at byte {HEADER}: an empty tree is a message of "
            "no bytes"
        )
    return tree


class _Reader:
    """Reads a message from `at` on.

    Checks every length against what is left before it allocates anything.
    """

    def __init__(self, data: memoryview):
        self.data = data
        self.at = HEADER
        self.values = 0

    def fail(self, expected: str, at: int | None = None) -> WireError:
        return WireError(
            f"expected {expected} at byte {self.at if at is None else at} of the message"
        )

    def take(self, count: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            raise self.fail(f"{count} bytes of {what}, of which only {left} are there,")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self, what: str) -> int:
        return self.take(1, what)[0]

    def varint(self, what: str) -> int:
        start, n, shift = self.at, 0, 0
        while True:
            byte = self.byte(what)
            n |= (byte & 127) << shift
            if byte < 128:
                if shift and not byte:
                    raise self.fail(f"the shortest form of {what}", start)
                return n
            shift += 7
            if shift > 56:
                raise self.fail(f"{what} of at most 63 bits", start)

    def count(self, what: str, least: int) -> int:
        """How many items follow, of at least `least` bytes each."""
        start, n = self.at, self.varint(f"the number of {what}")
        if n * least > len(self.data) - self.at:
            raise self.fail(f"a number of {what} that fits into the message, got {n},", start)
        return n

    def dims(self) -> tuple[int, ...]:
        start, count = self.at, self.count("dimensions", 1)
        if count > MAX_NDIM:
            raise self.fail(f"at most {MAX_NDIM} dimensions, got {count},", start)
        shape = tuple(self.varint("a dimension") for _ in range(count))
        if problem := excess(shape):
            raise self.fail(problem + ",", start)
        return shape

    def text(self, what: str) -> str:
        start = self.at
        try:
            return str(self.take(self.count(f"bytes of {what}", 1), what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"valid UTF-8 in {what}", start) from error

    def dtype(self) -> torch.dtype:
        code = self.byte("a dtype")
        if code >= len(DTYPES):
            raise self.fail(
                f"the code of a dtype (0 .. {len(DTYPES) - 1}), got {code},", self.at - 1
            )
        return DTYPES[code]

    def raw(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        start = self.at
        source = np.frombuffer(
            self.take(math.prod(shape) * dtype.itemsize, f"{dtype} {list(shape)}"), np.uint8
        )
        if dtype == torch.bool and source.size and source.max() > 1:
            raise self.fail(f"booleans of 0 or 1, got {source.max()},", start)
        t = torch.empty(math.prod(shape), dtype=dtype)
        t.view(torch.uint8).numpy()[:] = source
        return t.view(shape)

    def narrow(self, shape: tuple[int, ...], low: int, high: int, what: str) -> Tensor:
        dtype, start, count, width = (
            self.dtype(),
            self.at,
            math.prod(shape),
            index_dtype(high - low),
        )
        if dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
            raise self.fail(f"the code of a signed integer dtype for {what}", start - 1)
        source = np.frombuffer(self.take(count * width, what), np.uint8).reshape(count, width)
        kind = np.dtype(container_header(width))
        if width != kind.itemsize:
            source = np.pad(source, ((0, 0), (0, kind.itemsize - width)))
        numbers = np.frombuffer(source.tobytes(), kind)
        high = min(high, torch.iinfo(dtype).max + 1)
        if count and int(numbers.max()) + low >= high:
            raise self.fail(
                f"{what} in {low} .. {high - 1}, got {int(numbers.max()) + low},", start
            )
        return torch.from_numpy(numbers.astype(np.int64)).add_(low).to(dtype).view(shape)

    def dense(self, tag: int) -> Tensor:
        if not DENSE <= tag < DENSE + len(DTYPES):
            raise self.fail(f"the tag of a value, got {tag:#04x},", self.at - 1)
        return self.raw(DTYPES[tag - DENSE], self.dims())

    def value(self, depth: int) -> Tree:
        start, tag = self.at, self.byte("a value")
        self.values += 1
        if self.values > MAX_VALUES:
            raise self.fail(f"at most {MAX_VALUES} values", start)
        if tag in (NONE, FALSE, TRUE):
            return (None, False, True)[tag]
        if tag == INT:
            return struct.unpack("<q", self.take(8, "an integer"))[0]
        if tag == FLOAT:
            return struct.unpack("<d", self.take(8, "a float"))[0]
        if tag == STR:
            return self.text("text")
        if SPARSE <= tag <= TREES:
            new = self.structured(tag)
            problem = new.fault()
            if problem or (isinstance(new, Trees) and (problem := disorder(new))):
                raise self.fail(f"a sound {type(new).__name__} ({problem})", start)
            return new
        if tag > NODE:
            return self.dense(tag)
        if depth == MAX_DEPTH:
            raise self.fail(f"nesting of at most {MAX_DEPTH}", start)
        if tag in (LIST, TUPLE):
            items = [self.value(depth + 1) for _ in range(self.count("items", 1))]
            return items if tag == LIST else tuple(items)
        if tag == NODE:
            return self.node(depth)
        new = State() if tag == STATE else {}
        for _ in range(self.count("entries", 2)):
            start, name = self.at, self.text("a key")
            if name in new:
                raise self.fail(f"every key once, got {name!r} again,", start)
            new[name] = self.value(depth + 1)
        return new

    def node(self, depth: int) -> Tree:
        start, name = self.at, self.text("the name of a node")
        cls = NODES.get(name)
        # structured arrays have tags of their own, with their own checks
        if cls is None or issubclass(cls, STRUCTURED):
            raise self.fail(f"the name of a registered node, got {name!r},", start)
        fields = {field: self.value(depth + 1) for field in (*cls.tree_children, *cls.tree_static)}
        try:
            return cls(**fields)
        except Exception as error:
            raise self.fail(f"the fields of a {name} ({error})", start) from error

    def structured(self, tag: int) -> Tree:
        if tag == SPARSE:
            shape, stored = self.dims(), self.dims()
            indices = self.narrow(stored, 0, math.prod(shape), "indices")
            return Sparse(indices, self.raw(self.dtype(), stored), shape)
        if tag == LOW_RANK:
            return LowRank(*(self.dense(self.byte("a factor")) for _ in range(2)))
        if tag == SIGNS:
            shape, scale = self.dims(), self.dense(self.byte("a scale"))
            return Signs(
                self.raw(torch.uint8, (*scale.shape, -(-math.prod(shape) // 8))), scale, shape
            )
        if tag == QUANTISED:
            dtype, scale = self.dtype(), self.dense(self.byte("a scale"))
            return Quantised(
                self.dense(self.byte("codes")), scale, str(dtype).removeprefix("torch.")
            )
        start, lead = self.at, self.dims()
        names = ("features", "nodes", "leaves", "outputs", "trees")
        features, nodes, leaves, outputs, trees = (
            self.varint(f"the number of {name}") for name in names
        )
        for shape in ((features,), (*lead, nodes), (*lead, leaves, outputs), (*lead, trees)):
            if problem := excess(shape):
                raise self.fail(problem + ",", start)
        feature = self.narrow((*lead, nodes), -1, features, "features")
        left, right = (self.narrow((*lead, nodes), -1, nodes, "children") for _ in range(2))
        roots = self.narrow((*lead, trees), 0, nodes, "roots")
        threshold = self.raw(torch.float32, (*lead, nodes))
        return Trees(
            feature,
            threshold,
            left,
            right,
            self.raw(torch.float32, (*lead, leaves, outputs)),
            roots,
            features,
        )
