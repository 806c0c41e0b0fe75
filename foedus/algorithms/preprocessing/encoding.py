"""Numbers of a fit as they are sent: parts of sums, magnitudes, and histograms."""

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

BINS, LEVELS = 128, 7
"""Of the search for an order statistic."""

OCTAVES, MAGNITUDES, SMALLEST = 8, 32, -126
"""Magnitudes are 2^SMALLEST, and 2^OCTAVES more in each of the bins."""

MOST_CELLS = 6
"""Of a column at a time: the neighbors of three quantiles."""

LONGEST_TEXT = 1000
"""Bytes of a category."""

UNIT = 2.0**-28
"""What 1 is in a sum under secure aggregation: a step of its fixed-point numbers."""

PARTS = 6
_SHIFT, _BLIND = 17, 1 << 14
_BASE = 2.0**_SHIFT


def blinded(values: np.ndarray) -> Tensor:
    """Numbers of at most 2^31 in size as parts, (..., PARTS), for an exact sum in fixed point.

    Part k is digit k to the base 2^17, times UNIT. Digits of single numbers could be found from
    sums of digits, so that a random number of up to 2^14 is added to each but the last, and taken
    off again from the next: the sums of the parts tell the sum of the numbers, and of sums of
    digits nothing but with a chance of one in 2^14 for each client.
    """
    rest, carry, found = np.asarray(values, np.float64), np.zeros(np.shape(values)), []
    for _ in range(PARTS - 1):
        drawn = np.frombuffer(os.urandom(2 * rest.size), np.uint16).reshape(rest.shape)
        blind = (drawn & (2 * _BLIND - 1)).astype(np.float64) - _BLIND
        digit = np.rint(rest)
        found.append(digit + blind - carry)
        rest, carry = (rest - digit) * _BASE, blind * _BASE
    return torch.from_numpy(np.stack([*found, rest - carry], -1) * UNIT)


def joined(parts: Tensor) -> np.ndarray:
    """The numbers of sums of such parts; of a single part, itself.

    Exact: what was added at random is far larger than what is left when it cancels.
    """
    if parts.shape[-1] == 1:
        return parts[..., 0].double().numpy()
    steps = np.rint(parts.double().numpy() / UNIT)
    whole = [
        sum(int(t) << (_SHIFT * (PARTS - 1 - k)) for k, t in enumerate(row))
        for row in steps.reshape(-1, PARTS).tolist()
    ]
    numbers = [float(Fraction(n, 1 << (_SHIFT * (PARTS - 1)))) for n in whole]
    return np.array(numbers).reshape(steps.shape[:-1])


def magnitudes(size: np.ndarray) -> Tensor:
    """Numbers that are not negative, by their magnitude: a 1 for each power of 2^OCTAVES up to
    theirs, so that averages tell how many have reached it, and medians which one the middle has.
    """
    size = np.nan_to_num(size)
    exponent = np.where(size > 0, np.frexp(size)[1] - SMALLEST, 0)
    reached = np.clip(exponent // OCTAVES, 0, MAGNITUDES - 1)[..., None]
    return torch.from_numpy((np.arange(MAGNITUDES) <= reached).astype(np.float32))


def bound(share: np.ndarray) -> np.ndarray:
    """A power of two above the numbers whose `magnitudes` are not only 0 in the average."""
    top = (share > 0).sum(-1) - 1
    return np.ldexp(1.0, OCTAVES * (np.maximum(top, 0) + 1) + SMALLEST)


def histogram(x: np.ndarray, low: np.ndarray, width: np.ndarray, bins: int) -> np.ndarray:
    """How many of the rows (..., rows, columns) of each column lie in each bin of its cell
    [low, low + width); NaN and others lie in none.
    """
    *lead, rows, columns = x.shape
    size = int(np.prod(lead, dtype=np.int64)) * columns * bins
    inside = x >= low
    inside &= x < low + width
    scale = bins / width
    if 4 * np.count_nonzero(inside) < x.size:
        where = np.flatnonzero(inside)
        column = where % columns
        place = where // (rows * columns) * columns + column
        bin_ = ((x.reshape(-1)[where] - low[column]) * scale[column]).astype(np.int64)
        place = place * bins + np.minimum(bin_, bins - 1)
        return np.bincount(place, minlength=size).reshape(*lead, columns, bins)
    bin_ = (x - low) * scale
    bin_[~inside] = bins  # one more, for those
    np.minimum(bin_, bins, out=bin_)
    first = np.arange(size // bins).reshape(*lead, 1, columns) * (bins + 1)
    place = bin_.astype(np.int64) + first
    found = np.bincount(place.reshape(-1), minlength=size + size // bins)
    return found.reshape(*lead, columns, bins + 1)[..., :bins]


def known_bounds() -> np.ndarray:
    """All that `bound` can give."""
    return np.ldexp(1.0, OCTAVES * np.arange(1, MAGNITUDES + 1) + SMALLEST)
