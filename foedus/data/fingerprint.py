"""Checksums of arrays, by which federations with different rows or owners are told apart."""

from __future__ import annotations

import zlib
from functools import reduce

import numpy as np

WHOLE = 1 << 28
"""Arrays of up to this number of bytes are read completely."""

_BLOCK, _BLOCKS = 1 << 16, 1 << 10


def checksum(*arrays: np.ndarray, start: int = 0) -> int:
    """CRC-32 of the bytes of arrays, one after the other: about 0.25 ms per megabyte.

    Of an array of more than `WHOLE` bytes, 1024 blocks of 64 KiB are read, evenly spaced from the
    first to the last: a change between them goes unnoticed.
    """
    return reduce(_add, arrays, start)


def _add(value: int, array: np.ndarray) -> int:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if not sampled(array):
        return zlib.crc32(flat.data, value)
    for at in np.linspace(0, len(flat) - _BLOCK, _BLOCKS).astype(np.int64).tolist():
        value = zlib.crc32(flat[at : at + _BLOCK].data, value)
    return value


def sampled(array: np.ndarray) -> bool:
    """Whether `checksum` reads only part of an array."""
    return array.nbytes > WHOLE


def form(*arrays: np.ndarray) -> int:
    """A checksum of the types and shapes of arrays: equal bytes may have different ones."""
    return zlib.crc32(repr([(a.dtype.str, a.shape) for a in arrays]).encode())
