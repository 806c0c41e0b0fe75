"""Numbers of a fit as they are sent: fractions in parts, and histograms."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BINS, LEVELS = 128, 7
"""Of the search for an order statistic."""

OCTAVES, MAGNITUDES, SMALLEST = 8, 32, -126
"""Magnitudes are 2^SMALLEST, and 2^OCTAVES more in each of the bins."""

LONGEST_TEXT = 1000
"""Bytes of a category."""

_PART = 4096.0


def fine(y: np.ndarray, parts: int) -> Tensor:
    """Numbers of at most 1 in size as parts whose sum is sum_k part_k 4096^-k = y."""
    found = []
    for _ in range(parts - 1):
        found.append(np.trunc(y * _PART) / _PART)
        y = (y - found[-1]) * _PART
    return torch.from_numpy(np.stack([*found, y], -1))


def coarse(parts: Tensor) -> np.ndarray:
    """The inverse of `fine`, also of averages."""
    return parts.double().numpy() @ _PART ** -np.arange(float(parts.shape[-1]))


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
