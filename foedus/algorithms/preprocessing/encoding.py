"""Numbers of a fit as they are sent: parts of sums, magnitudes, and histograms."""

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

DIGIT, LEVELS = 7, 9
BINS = 1 << DIGIT
"""The search for an order statistic: 63 of the 64 bits of a number, 7 at a time."""

OCTAVES, MAGNITUDES, SMALLEST = 8, 32, -126
"""Magnitudes are 2^SMALLEST, and 2^OCTAVES more in each of the bins."""

MOST_CELLS = 6
"""Searches of a column at a time: the two neighbors of three quantiles."""

LONGEST_TEXT = 1000
"""Bytes of a category."""

UNIT = 2.0**-28
"""The unit of integers in a sum under secure aggregation: a step of its fixed-point numbers."""

PARTS = 6
_SHIFT, _BLIND = 17, 1 << 14
_BASE = 2.0**_SHIFT


def blinded(values: np.ndarray, count: int = PARTS) -> Tensor:
    """Numbers of at most 2^31 in size as parts, (..., count), for an exact sum in fixed point.

    Part k is digit k to the base 2^17, times UNIT. Sums of digits could reveal digits of single
    numbers, so a random number below 2^14 is added to each part but the last, and subtracted again
    from the next: the parts then reveal the sum of the numbers, and sums of digits only with
    probability 2^-14 for each client.
    """
    rest, carry, found = np.asarray(values, np.float64), np.zeros(np.shape(values)), []
    for _ in range(count - 1):
        drawn = np.frombuffer(os.urandom(2 * rest.size), np.uint16).reshape(rest.shape)
        blind = (drawn & (2 * _BLIND - 1)).astype(np.float64) - _BLIND
        digit = np.rint(rest)
        found.append(digit + blind - carry)
        rest, carry = (rest - digit) * _BASE, blind * _BASE
    return torch.from_numpy(np.stack([*found, rest - carry], -1) * UNIT)


def joined(parts: Tensor) -> np.ndarray:
    """The numbers that sums of such parts stand for; a single part is the number itself.

    Exact, although the random terms that cancel are far larger than the result.
    """
    if parts.shape[-1] == 1:
        return parts[..., 0].double().numpy()
    numbers = [float(n) for n in exactly_joined(parts)]
    return np.array(numbers).reshape(parts.shape[:-1])


def exactly_joined(parts: Tensor) -> list[Fraction]:
    """The same, one number after the other, without rounding."""
    count = parts.shape[-1]
    steps = np.rint(parts.double().numpy() / UNIT).reshape(-1, count)
    whole = (
        sum(int(t) << (_SHIFT * (count - 1 - k)) for k, t in enumerate(row))
        for row in steps.tolist()
    )
    return [Fraction(n, 1 << (_SHIFT * (count - 1))) for n in whole]


def magnitudes(size: np.ndarray) -> Tensor:
    """One-hot-like codes of the magnitudes of non-negative numbers: a 1 for each power of 2^OCTAVES
    up to the number, so averages give the fraction that reach it, and medians the median magnitude.
    """
    size = np.nan_to_num(size)
    exponent = np.where(size > 0, np.frexp(size)[1] - SMALLEST, 0)
    reached = np.clip(exponent // OCTAVES, 0, MAGNITUDES - 1)[..., None]
    return torch.from_numpy((np.arange(MAGNITUDES) <= reached).astype(np.float32))


def bound(share: np.ndarray) -> np.ndarray:
    """A power of two above the numbers whose `magnitudes` are not only 0 in the average."""
    top = (share > 0).sum(-1) - 1
    return np.ldexp(1.0, OCTAVES * (np.maximum(top, 0) + 1) + SMALLEST)


def ordered(x: np.ndarray) -> np.ndarray:
    """Bits of numbers (uint64), which sort like the numbers; -0 is 0."""
    bits = (x + 0.0).view(np.int64)
    return (bits ^ ((bits >> 63) & np.int64(2**63 - 1))).view(np.uint64) ^ np.uint64(1 << 63)


def from_ordered(key: np.ndarray) -> np.ndarray:
    """The inverse of `ordered`."""
    bits = (key ^ np.uint64(1 << 63)).view(np.int64)
    return (bits ^ ((bits >> 63) & np.int64(2**63 - 1))).view(np.float64)


def histogram(key: np.ndarray, there: np.ndarray, prefix: np.ndarray, level: int) -> np.ndarray:
    """How many rows (..., rows, columns) of each column have a key that begins with `prefix`, the
    first `level` digits, by their next digit; those that are not `there` do not count.
    """
    *lead, rows, columns = key.shape
    size = int(np.prod(lead, dtype=np.int64)) * columns * BINS
    shift = np.uint64(64 - DIGIT * (level + 1))
    inside = np.array(there) if not level else key >> (shift + np.uint64(DIGIT)) == prefix
    if level:
        inside &= there
    where = np.flatnonzero(inside)
    digit = (key.reshape(-1)[where] >> shift).astype(np.int64) & (BINS - 1)
    place = where // (rows * columns) * columns + where % columns
    found = np.bincount(place * BINS + digit, minlength=size)
    return found.reshape(*lead, columns, BINS)


def known_bounds() -> np.ndarray:
    """All values that `bound` can return."""
    return np.ldexp(1.0, OCTAVES * np.arange(1, MAGNITUDES + 1) + SMALLEST)
