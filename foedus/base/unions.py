"""Unions of sets of short byte strings, from a list of each set, or from a sum only.

An invertible Bloom lookup table (Goodrich and Mitzenmacher, 2011) has rows of numbers. A string is
added to three rows that its hash selects: 1 to their count, its bytes to their bytes, and a
checksum to their checksum. Tables of several clients are added. A row that contains a single
string, of c clients, holds c times that string: the string is read, removed from its other two
rows, and so on until the table is empty. So a server that sees only sums of replies learns the
union, and how many clients have each string, but not which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from foedus.errors import ReplyError

LONGEST = 62
"""Bytes of a string that a table can hold."""

_BYTES, _CHECK = LONGEST + 1, 4
_UNIT = 1 / 1024
"""The unit of integers in a reply: small, so that sums of many strings in one row stay within the
fixed-point range."""

_HASHES = 3
TABLE_ROWS = (96, 768, 6144)
"""Sizes of tables, in rows; a table holds about four fifths as many strings."""


def listed(strings: Collection[bytes]) -> Tensor:
    """Strings one after the other, each preceded by its length in two bytes."""
    parts = [len(s).to_bytes(2, "little") + s for s in sorted(strings)]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) if parts else _NOTHING


_NOTHING = torch.zeros(0, dtype=torch.uint8)


def read_list(sent: Tensor) -> set[bytes]:
    """The inverse of `listed`, for bytes of an untrusted client."""
    if not isinstance(sent, Tensor) or sent.dtype != torch.uint8 or sent.dim() != 1:
        raise ReplyError("its list of texts is not a list of bytes")
    data, at, found = sent.numpy().tobytes(), 0, set()
    while at < len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        text = data[at + 2 : at + 2 + size]
        if len(data) - at < 2 or len(text) < size:
            raise ReplyError("its list of texts is cut off")
        found.add(text)
        at += 2 + size
    return found


def table(strings: Collection[bytes], rows: int) -> Tensor:
    """The invertible table of a client's strings, (rows, numbers); `rows` is a multiple of 3."""
    out = np.zeros((rows, 1 + _BYTES + _CHECK))
    for text in sorted(strings):
        if len(text) > LONGEST:
            raise ReplyError(
                f"a text is longer than the {LONGEST} bytes that a sum can hold; name the "
                "categories of this column in advance"
            )
        out[_places(text, rows)] += _numbers(text)
    return torch.from_numpy(out * _UNIT).float()


def peeled(total: Tensor) -> list[bytes] | None:
    """The strings of a sum of tables, sorted; `None` if it has too few rows for them."""
    left = np.rint(total.double().numpy() / _UNIT)
    rows, queue = len(left), list(range(len(left)))
    found: list[bytes] = []
    while queue and len(found) <= rows:  # an invalid table could make it loop forever
        row = queue.pop()
        text = _alone(left[row])
        if text is None or row not in (places := _places(text, rows)):
            continue
        found.append(text)
        left[places] -= left[row][0] * _numbers(text)
        queue += places
    return sorted(found) if not left.any() else None


def _alone(numbers: np.ndarray) -> bytes | None:
    """The string of a row that contains a single string, as often as its count."""
    count = numbers[0]
    if count < 1:
        return None
    one = numbers[1:] / count
    if (one != np.floor(one)).any() or one.min() < 0 or one.max() > 255 or one[0] > LONGEST:
        return None
    data = one[:_BYTES].astype(np.uint8).tobytes()
    text = data[1 : 1 + data[0]]
    return text if (one == _numbers(text)[1:]).all() else None


def _numbers(text: bytes) -> np.ndarray:
    """The numbers that a string adds to each of its rows: count, length and bytes, checksum."""
    data = bytes([len(text)]) + text + bytes(LONGEST - len(text))
    check = hashlib.blake2b(text, digest_size=_CHECK, person=b"check").digest()
    return np.array([1, *data, *check], np.float64)


def _places(text: bytes, rows: int) -> Sequence[int]:
    """One row in each third of the table."""
    third = rows // _HASHES
    words = np.frombuffer(hashlib.blake2b(text, digest_size=8 * _HASHES).digest(), "<u8")
    return [int(word % third) + k * third for k, word in enumerate(words)]
