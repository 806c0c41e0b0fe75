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
from foedus.wire import layout
from foedus.wire.arrays import STRUCTURED, LowRank, Quantised, Signs, Sparse, Trees


def decode(data: bytes | bytearray | memoryview, max_bytes: int = 1 << 31) -> Tree:
    """The tree of a message; the empty message gives `{}`.

    Raises `WireError` on anything that `encode` did not write.
    """
    view = memoryview(data).cast("B")
    if not len(view):
        return {}
    if len(view) > max_bytes:
        raise WireError(f"the message has {len(view)} bytes; expected at most {max_bytes}")
    if len(view) < (least := layout.HEADER + 1 + layout.TRAILER):
        needed = f"expected at least {least} bytes, got {len(view)}"
        raise WireError(f"the message is truncated: {needed}")
    magic, version = bytes(view[:2]), view[2]
    if magic != layout.MAGIC:
        start = f"expected {layout.MAGIC!r} at byte 0, where a message starts"
        raise WireError(f"{start}, got {magic!r}")
    if version != layout.VERSION:
        wanted = f"expected version {layout.VERSION} of the wire form at byte 2"
        raise WireError(f"{wanted}, got {version}")
    body, (crc,) = view[: -layout.TRAILER], struct.unpack("<I", view[-layout.TRAILER :])
    if zlib.crc32(body) != crc:
        raise WireError(
            f"the checksum at byte {len(body)} does not match: the message is truncated or damaged"
        )
    reader = _Reader(body)
    tree = reader.value(0)
    if reader.at != len(body):
        more = f"got {len(body) - reader.at} more bytes"
        raise WireError(f"expected the end of the message at byte {reader.at}, {more}")
    if layout.is_empty(tree):
        value = f"expected a value that is not empty at byte {layout.HEADER}"
        raise WireError(f"{value}: an empty tree is a message of no bytes")
    return tree


class _Reader:
    """Reads a message from `at` on.

    Checks every length against what is left before it allocates anything.
    """

    def __init__(self, data: memoryview):
        self.data = data
        self.at = layout.HEADER
        self.values = 0

    def fail(self, expected: str, at: int | None = None) -> WireError:
        place = self.at if at is None else at
        return WireError(f"expected {expected} at byte {place} of the message")

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
        if count > layout.MAX_NDIM:
            raise self.fail(f"at most {layout.MAX_NDIM} dimensions, got {count},", start)
        shape = tuple(self.varint("a dimension") for _ in range(count))
        if problem := layout.excess(shape):
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
        if code >= (count := len(layout.DTYPES)):
            raise self.fail(f"the code of a dtype (0 .. {count - 1}), got {code},", self.at - 1)
        return layout.DTYPES[code]

    def raw(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        start, size = self.at, math.prod(shape) * dtype.itemsize
        source = np.frombuffer(self.take(size, f"{dtype} {list(shape)}"), np.uint8)
        if dtype == torch.bool and source.size and source.max() > 1:
            raise self.fail(f"booleans of 0 or 1, got {source.max()},", start)
        t = torch.empty(math.prod(shape), dtype=dtype)
        t.view(torch.uint8).numpy()[:] = source
        return t.view(shape)

    def narrow(self, shape: tuple[int, ...], low: int, high: int, what: str) -> Tensor:
        dtype, count, width = self.dtype(), math.prod(shape), layout.index_dtype(high - low)
        start = self.at
        if dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
            raise self.fail(f"the code of a signed integer dtype for {what}", start - 1)
        source = np.frombuffer(self.take(count * width, what), np.uint8).reshape(count, width)
        kind = np.dtype(layout.container_header(width))
        if width != kind.itemsize:
            source = np.pad(source, ((0, 0), (0, kind.itemsize - width)))
        numbers = np.frombuffer(source.tobytes(), kind)
        high = min(high, torch.iinfo(dtype).max + 1)
        if count and int(numbers.max()) + low >= high:
            most = int(numbers.max()) + low
            raise self.fail(f"{what} in {low} .. {high - 1}, got {most},", start)
        return torch.from_numpy(numbers.astype(np.int64)).add_(low).to(dtype).view(shape)

    def dense(self, tag: int) -> Tensor:
        if not layout.DENSE <= tag < layout.DENSE + len(layout.DTYPES):
            raise self.fail(f"the tag of a value, got {tag:#04x},", self.at - 1)
        return self.raw(layout.DTYPES[tag - layout.DENSE], self.dims())

    def value(self, depth: int) -> Tree:
        start, tag = self.at, self.byte("a value")
        self.values += 1
        if self.values > layout.MAX_VALUES:
            raise self.fail(f"at most {layout.MAX_VALUES} values", start)
        if tag in (layout.NONE, layout.FALSE, layout.TRUE):
            return (None, False, True)[tag]
        if tag == layout.INT:
            return struct.unpack("<q", self.take(8, "an integer"))[0]
        if tag == layout.FLOAT:
            return struct.unpack("<d", self.take(8, "a float"))[0]
        if tag == layout.STR:
            return self.text("text")
        if layout.SPARSE <= tag <= layout.TREES:
            new = self.structured(tag)
            problem = new.fault()
            if problem or (isinstance(new, Trees) and (problem := layout.disorder(new))):
                raise self.fail(f"a sound {type(new).__name__} ({problem})", start)
            return new
        if tag > layout.NODE:
            return self.dense(tag)
        if depth == layout.MAX_DEPTH:
            raise self.fail(f"nesting of at most {layout.MAX_DEPTH}", start)
        if tag in (layout.LIST, layout.TUPLE):
            items = [self.value(depth + 1) for _ in range(self.count("items", 1))]
            return items if tag == layout.LIST else tuple(items)
        if tag == layout.NODE:
            return self.node(depth)
        new = State() if tag == layout.STATE else {}
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
        if tag == layout.SPARSE:
            shape, stored = self.dims(), self.dims()
            indices = self.narrow(stored, 0, math.prod(shape), "indices")
            return Sparse(indices, self.raw(self.dtype(), stored), shape)
        if tag == layout.LOW_RANK:
            return LowRank(*(self.dense(self.byte("a factor")) for _ in range(2)))
        if tag == layout.SIGNS:
            shape, scale = self.dims(), self.dense(self.byte("a scale"))
            stored = (*scale.shape, -(-math.prod(shape) // 8))
            return Signs(self.raw(torch.uint8, stored), scale, shape)
        if tag == layout.QUANTISED:
            dtype, scale = self.dtype(), self.dense(self.byte("a scale"))
            codes = self.dense(self.byte("codes"))
            return Quantised(codes, scale, str(dtype).removeprefix("torch."))
        start, lead = self.at, self.dims()
        names = ("features", "nodes", "leaves", "outputs", "trees")
        sizes = [self.varint(f"the number of {name}") for name in names]
        features, nodes, leaves, outputs, trees = sizes
        for shape in ((features,), (*lead, nodes), (*lead, leaves, outputs), (*lead, trees)):
            if problem := layout.excess(shape):
                raise self.fail(problem + ",", start)
        feature = self.narrow((*lead, nodes), -1, features, "features")
        left, right = (self.narrow((*lead, nodes), -1, nodes, "children") for _ in range(2))
        roots = self.narrow((*lead, trees), 0, nodes, "roots")
        threshold = self.raw(torch.float32, (*lead, nodes))
        value = self.raw(torch.float32, (*lead, leaves, outputs))
        return Trees(feature, threshold, left, right, value, roots, features)
