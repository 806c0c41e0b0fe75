"""The layout of a message: tags, limits, what both sides share; see `docs/reference/wire.md`."""

from __future__ import annotations

import functools
import math
import sys

import torch

from foedus.base.tree import Tree
from foedus.errors import WireError
from foedus.wire.arrays import LowRank, Sparse, Trees

if sys.byteorder != "little":  # tensors are copied to the wire as they lie in memory
    raise ImportError("foedus runs on little-endian machines only")


MAGIC, VERSION = b"fd", 1
HEADER, TRAILER = 3, 4
MAX_DEPTH, MAX_NDIM, MAX_DIM, MAX_SIZE = 64, 32, 1 << 31, 1 << 48
MAX_VALUES = 1 << 20  # the smallest takes a byte of the message, but an object of its own in memory

NONE, FALSE, TRUE, INT, FLOAT, STR, LIST, TUPLE, DICT, STATE, NODE = range(11)
SPARSE, LOW_RANK, SIGNS, QUANTISED, TREES = range(0x10, 0x15)
DENSE = 0x20  # plus the code of the dtype
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES: tuple[torch.dtype, ...] = (torch.bool, torch.uint8, *INTEGERS, *FLOATS)
# dimensions of the first field that belong to one message
INNER = {Sparse: 1, LowRank: 2, Trees: 1}
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def is_empty(tree: Tree) -> bool:
    return tree is None or (isinstance(tree, dict | list | tuple) and not tree)


@functools.lru_cache(maxsize=4096)
def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def excess(shape: tuple[int, ...]) -> str | None:
    """Why a shape is refused, if it is. Zeros do not hide absurd dimensions next to them."""
    if len(shape) > MAX_NDIM:
        return f"at most {MAX_NDIM} dimensions, got {len(shape)}"
    if max(shape, default=0) > MAX_DIM or math.prod(d or 1 for d in shape) > MAX_SIZE:
        return f"a shape within {MAX_DIM} a dimension and {MAX_SIZE} in all, got {list(shape)}"
    return None


@functools.lru_cache(maxsize=4096)
def encoded_dims(shape: tuple[int, ...]) -> bytes:
    if problem := excess(shape):
        raise WireError(f"expected {problem}")
    return b"".join(map(varint, (len(shape), *shape)))


@functools.lru_cache(maxsize=4096)
def dense_header(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """What stands before the numbers of a dense tensor, and how many bytes they take."""
    if dtype not in CODES:
        raise WireError(f"expected a tensor of {', '.join(NAMES)}, got {dtype}")
    return bytes((DENSE + CODES[dtype],)) + encoded_dims(shape), math.prod(shape) * dtype.itemsize


def encoded_text(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"expected valid Unicode, got {text!r}") from error
    return varint(len(data)) + data


encoded_key = functools.lru_cache(maxsize=4096)(encoded_text)


def index_dtype(values: int) -> int:
    """Bytes that the integers 0 .. values - 1 take."""
    return max(1, ((values - 1).bit_length() + 7) // 8)


def container_header(width: int) -> str:
    return "<u1" if width == 1 else "<u2" if width == 2 else "<u4" if width <= 4 else "<u8"


def disorder(t: Trees) -> str | None:
    """What is wrong: a child that is not after its parent (cycles), or leaves without values."""
    misfit = f"Trees with {t.value.shape[-2]} rows of values must have as many leaves"
    if not t.feature.numel():  # of no trees, the nodes may be any number
        return misfit if t.value.shape[-2] and 0 not in t.feature.shape[:-1] else None
    own = torch.arange(t.feature.shape[-1], device=t.feature.device)
    if bool(((t.feature >= 0) & ((t.left <= own) | (t.right <= own))).any()):
        return "children of a node of Trees must have a higher index than the node itself"
    return misfit if bool(((t.feature < 0).sum(-1) != t.value.shape[-2]).any()) else None
