"""The wire: trees of tensors as bytes, with a length that is known before anything is encoded.

`encode` and `decode` are inverse to each other; `nbytes` is `len(encode(...))` from shapes alone, which is how a simulation
charges every byte without encoding any. The form is described byte for byte in `docs/wire.md`. Decoding trusts nothing:
a malformed message raises `WireError` with the offset, and no length is believed before that many bytes are there.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
import zlib

import numpy as np
import torch
from torch import Tensor

from foedus.core.arrays import STRUCTURED, LowRank, Quantised, Signs, Sparse, Trees
from foedus.core.arrays import densify as densify
from foedus.core.arrays import dequantise as dequantise
from foedus.core.arrays import quantise as quantise
from foedus.core.tree import NODES, State, Tree
from foedus.errors import ReplyError, WireError

if sys.byteorder != "little":  # tensors are copied to the wire as they lie in memory
    raise ImportError("foedus runs on little-endian machines only")

MAGIC, VERSION = b"fd", 1
HEADER, TRAILER = 3, 4
MAX_DEPTH, MAX_NDIM, MAX_DIM, MAX_SIZE = 64, 32, 1 << 31, 1 << 48
MAX_VALUES = 1 << 20  # the smallest takes a byte of the message, but an object of its own in memory

NONE, FALSE, TRUE, INT, FLOAT, STR, LIST, TUPLE, DICT, STATE, NODE = range(11)
SPARSE, LOW_RANK, SIGNS, QUANTISED, TREES = range(0x10, 0x15)
DENSE = 0x20  # plus the code of the dtype
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES += (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INNER = {Sparse: 1, LowRank: 2, Trees: 1}  # dimensions of the first field that belong to one message
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def encode(tree: Tree) -> bytes:
    """The message of a tree. An empty tree (`{}`, `[]`, `()`, `None`) is the empty message, of no bytes."""
    if _empty(tree):
        return b""
    writer = _write(tree, 0, keep=True)
    crc = 0
    for chunk in writer.chunks:
        crc = zlib.crc32(chunk, crc)
    return b"".join((*writer.chunks, struct.pack("<I", crc)))


def nbytes(tree: Tree, batched: bool = False) -> int:
    """`len(encode(tree))`, from the shapes alone.

    With `batched`, every tensor has a leading dimension of clients and the result is the length of one client's message.
    """
    if _empty(tree):
        return 0
    return _write(tree, int(batched), keep=False).size + TRAILER


def decode(data: bytes | bytearray | memoryview, max_bytes: int = 1 << 31) -> Tree:
    """The tree of a message; the empty message gives `{}`. Raises `WireError` on anything that `encode` did not write."""
    view = memoryview(data).cast("B")
    if not len(view):
        return {}
    if len(view) > max_bytes:
        raise WireError(f"the message has {len(view)} bytes; expected at most {max_bytes}")
    if len(view) < HEADER + 1 + TRAILER:
        raise WireError(f"the message is truncated: expected at least {HEADER + 1 + TRAILER} bytes, got {len(view)}")
    if view[:2] != MAGIC:
        raise WireError(f"expected {MAGIC!r} at byte 0, where a message starts, got {bytes(view[:2])!r}")
    if view[2] != VERSION:
        raise WireError(f"expected version {VERSION} of the wire form at byte 2, got {view[2]}")
    body, (crc,) = view[:-TRAILER], struct.unpack("<I", view[-TRAILER:])
    if zlib.crc32(body) != crc:
        raise WireError(f"the checksum at byte {len(body)} does not match: the message is truncated or damaged")
    reader = _Reader(body)
    tree = reader.value(0)
    if reader.at != len(body):
        raise WireError(f"expected the end of the message at byte {reader.at}, got {len(body) - reader.at} more bytes")
    if _empty(tree):
        raise WireError(f"expected a value that is not empty at byte {HEADER}: an empty tree is a message of no bytes")
    return tree


def _empty(tree: Tree) -> bool:
    return tree is None or (isinstance(tree, dict | list | tuple) and not tree)


@functools.lru_cache(maxsize=4096)
def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _excess(shape: tuple[int, ...]) -> str | None:
    """Why a shape is refused, if it is. Zeros do not hide absurd dimensions next to them."""
    if len(shape) > MAX_NDIM:
        return f"at most {MAX_NDIM} dimensions, got {len(shape)}"
    if max(shape, default=0) > MAX_DIM or math.prod(d or 1 for d in shape) > MAX_SIZE:
        return f"a shape within {MAX_DIM} a dimension and {MAX_SIZE} in all, got {list(shape)}"
    return None


@functools.lru_cache(maxsize=4096)
def _dims(shape: tuple[int, ...]) -> bytes:
    if problem := _excess(shape):
        raise WireError(f"expected {problem}")
    return b"".join(map(_varint, (len(shape), *shape)))


@functools.lru_cache(maxsize=4096)
def _dense(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """What stands before the numbers of a dense tensor, and how many bytes they take."""
    if dtype not in CODES:
        raise WireError(f"expected a tensor of {', '.join(NAMES)}, got {dtype}")
    return bytes((DENSE + CODES[dtype],)) + _dims(shape), math.prod(shape) * dtype.itemsize


def _text(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"expected valid Unicode, got {text!r}") from error
    return _varint(len(data)) + data


_key = functools.lru_cache(maxsize=4096)(_text)


def _width(values: int) -> int:
    """Bytes that the integers 0 .. values - 1 take."""
    return max(1, ((values - 1).bit_length() + 7) // 8)


def _container(width: int) -> str:
    return "<u1" if width == 1 else "<u2" if width == 2 else "<u4" if width <= 4 else "<u8"


def _write(tree: Tree, skip: int, keep: bool) -> _Writer:
    writer = _Writer(keep)
    try:
        writer.value(tree, skip, 0)
    except WireError as error:
        raise WireError(f"cannot encode {'.'.join(map(str, writer.path)) or 'the tree'}: {error}") from None
    return writer


class _Writer:
    """Walks a tree and adds up its length; with `keep`, also collects the pieces of the message, tensors uncopied."""

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
            if size:  # an empty tensor from NumPy may have a stride of 0, which has no view as bytes
                self.chunks.append(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def narrow(self, t: Tensor, count: int, low: int, high: int, what: str) -> None:
        """A dtype and integers in `low .. high - 1`, each minus `low` and in as few bytes as that range needs."""
        width = _width(high - low)
        self.put(bytes([CODES[t.dtype]]))
        self.size += count * width
        if self.keep:
            numbers = t.detach().cpu().contiguous().view(-1).numpy()
            if numbers.size and not (low <= numbers.min() and numbers.max() < high):
                raise WireError(f"expected {what} in {low} .. {high - 1}, got {numbers.min()} .. {numbers.max()}")
            kind = np.dtype(_container(width))
            numbers = (numbers.astype(np.int64) - low).astype(kind)
            if width != kind.itemsize:
                numbers = np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, kind.itemsize)[:, :width])
            self.chunks.append(numbers.view(np.uint8).reshape(-1))

    def dense(self, t: Tensor, skip: int) -> None:
        if t.dim() < skip:
            raise WireError("expected a leading dimension of clients, got a single number")
        head, size = _dense(t.dtype, t.shape[skip:] if skip else t.shape)
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
            self.put(bytes((STR,)) + _text(t))
        elif isinstance(t, STRUCTURED):
            if problem := t.fault():
                raise WireError(f"a {type(t).__name__} cannot be sent: {problem}")
            self.structured(t, skip)
        elif depth == MAX_DEPTH:
            raise WireError(f"expected nesting of at most {MAX_DEPTH}")
        elif isinstance(t, dict):
            self.put(bytes((STATE if isinstance(t, State) else DICT,)) + _varint(len(t)))
            for name, child in t.items():
                if not isinstance(name, str):
                    raise WireError(f"expected keys that are strings, got {name!r}")
                self.put(_key(name))
                self.child(name, child, skip, depth)
        elif isinstance(t, list | tuple):
            self.put(bytes((LIST if isinstance(t, list) else TUPLE,)) + _varint(len(t)))
            for i, child in enumerate(t):
                self.child(i, child, skip, depth)
        elif NODES.get(type(t).__name__) is type(t):
            self.put(bytes((NODE,)) + _text(type(t).__name__))
            for names, batch in ((t.tree_children, skip), (t.tree_static, 0)):
                for name in names:
                    self.child(name, getattr(t, name), batch, depth)
        else:
            raise WireError(f"expected tensors, scalars, text and trees of them, got a {type(t).__name__}")

    def child(self, name: str | int, t: Tree, skip: int, depth: int) -> None:
        self.path.append(name)  # stays as it is when something fails, and so says where
        self.value(t, skip, depth + 1)
        self.path.pop()

    def structured(self, t: Tree, skip: int) -> None:
        if getattr(t, t.tree_children[0]).dim() - INNER.get(type(t), 0) < skip:
            raise WireError(f"expected a leading dimension of clients, got a single {type(t).__name__}")
        if isinstance(t, Sparse):
            shape = tuple(t.values.shape)[skip:]
            count = math.prod(shape)
            self.put(bytes((SPARSE,)) + _dims(tuple(t.shape)) + _dims(shape))
            self.narrow(t.indices, count, 0, math.prod(t.shape), "indices")
            self.put(bytes((CODES[t.values.dtype],)))
            self.raw(t.values, count * t.values.itemsize)
        elif isinstance(t, LowRank):
            self.put(bytes((LOW_RANK,)))
            self.dense(t.left, skip)
            self.dense(t.right, skip)
        elif isinstance(t, Signs):
            self.put(bytes((SIGNS,)) + _dims(tuple(t.shape)))
            self.dense(t.scale, skip)
            self.raw(t.bits, math.prod(tuple(t.bits.shape)[skip:]))
        elif isinstance(t, Quantised):
            self.put(bytes((QUANTISED, CODES[NAMES[t.dtype]])))
            self.dense(t.scale, skip)
            self.dense(t.codes, skip)
        else:
            lead, nodes = tuple(t.feature.shape)[skip:-1], t.feature.shape[-1]
            (leaves, outputs), trees, batch = t.value.shape[-2:], t.roots.shape[-1], math.prod(lead)
            if self.keep and (problem := _disorder(t)):
                raise WireError(problem)
            sizes = (t.features, nodes, leaves, outputs, trees)
            self.put(bytes((TREES,)) + _dims(lead) + b"".join(_dims((d,))[1:] for d in sizes))
            self.narrow(t.feature, batch * nodes, -1, t.features, "feature")
            self.narrow(t.left, batch * nodes, -1, nodes, "left")
            self.narrow(t.right, batch * nodes, -1, nodes, "right")
            self.narrow(t.roots, batch * trees, 0, nodes, "roots")
            self.raw(t.threshold, 4 * batch * nodes)
            self.raw(t.value, 4 * batch * leaves * outputs)


def _disorder(t: Trees) -> str | None:
    """Children of inner nodes come after their parent, so that no walk down a tree goes in circles; each leaf has its values."""
    if t.feature.numel():  # of no trees, the nodes may be any number
        own = torch.arange(t.feature.shape[-1], device=t.feature.device)
        if bool(((t.feature >= 0) & ((t.left <= own) | (t.right <= own))).any()):
            return "the children of every node of Trees must have a higher index than the node itself"
    if bool(((t.feature < 0).sum(-1) != t.value.shape[-2]).any()):
        return f"Trees with {t.value.shape[-2]} rows of values must have as many leaves"
    return None


class _Reader:
    """Reads a message from `at` on. Checks every length against what is left before it allocates anything."""

    def __init__(self, data: memoryview):
        self.data = data
        self.at = HEADER
        self.values = 0

    def fail(self, expected: str, at: int | None = None) -> WireError:
        return WireError(f"expected {expected} at byte {self.at if at is None else at} of the message")

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
        if problem := _excess(shape):
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
            raise self.fail(f"the code of a dtype (0 .. {len(DTYPES) - 1}), got {code},", self.at - 1)
        return DTYPES[code]

    def raw(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        start = self.at
        source = np.frombuffer(self.take(math.prod(shape) * dtype.itemsize, f"{dtype} {list(shape)}"), np.uint8)
        if dtype == torch.bool and source.size and source.max() > 1:
            raise self.fail(f"booleans of 0 or 1, got {source.max()},", start)
        t = torch.empty(math.prod(shape), dtype=dtype)
        t.view(torch.uint8).numpy()[:] = source
        return t.view(shape)

    def narrow(self, shape: tuple[int, ...], low: int, high: int, what: str) -> Tensor:
        dtype, start, count, width = self.dtype(), self.at, math.prod(shape), _width(high - low)
        if dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
            raise self.fail(f"the code of a signed integer dtype for {what}", start - 1)
        source = np.frombuffer(self.take(count * width, what), np.uint8).reshape(count, width)
        kind = np.dtype(_container(width))
        if width != kind.itemsize:
            source = np.pad(source, ((0, 0), (0, kind.itemsize - width)))
        numbers = np.frombuffer(source.tobytes(), kind)
        high = min(high, torch.iinfo(dtype).max + 1)
        if count and int(numbers.max()) + low >= high:
            raise self.fail(f"{what} in {low} .. {high - 1}, got {int(numbers.max()) + low},", start)
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
            if problem or (isinstance(new, Trees) and (problem := _disorder(new))):
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
        if cls is None or issubclass(cls, STRUCTURED):  # structured arrays have tags of their own, with their own checks
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
            return Signs(self.raw(torch.uint8, (*scale.shape, -(-math.prod(shape) // 8))), scale, shape)
        if tag == QUANTISED:
            dtype, scale = self.dtype(), self.dense(self.byte("a scale"))
            return Quantised(self.dense(self.byte("codes")), scale, str(dtype).removeprefix("torch."))
        start, lead = self.at, self.dims()
        names = ("features", "nodes", "leaves", "outputs", "trees")
        features, nodes, leaves, outputs, trees = (self.varint(f"the number of {name}") for name in names)
        for shape in ((features,), (*lead, nodes), (*lead, leaves, outputs), (*lead, trees)):
            if problem := _excess(shape):
                raise self.fail(problem + ",", start)
        feature = self.narrow((*lead, nodes), -1, features, "features")
        left, right = (self.narrow((*lead, nodes), -1, nodes, "children") for _ in range(2))
        roots = self.narrow((*lead, trees), 0, nodes, "roots")
        threshold = self.raw(torch.float32, (*lead, nodes))
        return Trees(feature, threshold, left, right, self.raw(torch.float32, (*lead, leaves, outputs)), roots, features)


def validate_like(tree: Tree, expected: Tree, what: str) -> None:
    """Raise `ReplyError` unless `tree` has the structure, shapes and dtypes of `expected`; numbers and text may differ.

    Only shapes are looked at, so `expected` may hold tensors on the meta device. Names of keys count in their order.
    """

    def differ(path: str, got: str, want: str) -> ReplyError:
        return ReplyError(f"{what}: at {path or 'the top'} got {got}, expected {want}")

    def walk(t: Tree, e: Tree, path: str) -> None:
        if isinstance(e, Tensor):
            if not isinstance(t, Tensor) or t.shape != e.shape or t.dtype != e.dtype:
                raise differ(path, _describe(t), _describe(e))
            return
        if type(t) is not type(e):
            raise differ(path, _describe(t), _describe(e))
        if isinstance(e, dict):
            if list(t) != list(e):
                raise differ(path, f"the keys {list(t)}", f"{list(e)}")
            pairs = [(name, t[name], e[name]) for name in e]
        elif isinstance(e, list | tuple):
            if len(t) != len(e):
                raise differ(path, f"{len(t)} items", f"{len(e)}")
            pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(t, e, strict=True))]
        elif hasattr(e, "tree_children"):
            for name in e.tree_static:
                if getattr(t, name) != getattr(e, name):
                    raise differ(f"{path}.{name}".lstrip("."), f"{getattr(t, name)!r}", f"{getattr(e, name)!r}")
            pairs = [(name, getattr(t, name), getattr(e, name)) for name in e.tree_children]
        else:
            return
        for name, a, b in pairs:
            walk(a, b, f"{path}.{name}".lstrip("."))

    walk(tree, expected, "")


def _describe(t: Tree) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
