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
        found.append(np.floor(y * _PART) / _PART)
        y = (y - found[-1]) * _PART
    return torch.from_numpy(np.stack([*found, y], -1))


def coarse(parts: Tensor) -> np.ndarray:
    """The inverse of `fine`, also of averages."""
    return parts.double().numpy() @ _PART ** -np.arange(float(parts.shape[-1]))


def magnitude(x: np.ndarray) -> np.ndarray:
    """The bin of each number by its size: bin k holds |x| < `bound(k)`; NaN stays NaN."""
    exponent = np.frexp(x)[1] - SMALLEST
    bins = np.clip(exponent // OCTAVES, 0, MAGNITUDES - 1).astype(np.float64)
    bins[np.isnan(x)] = np.nan
    return bins


def bound(bins: np.ndarray) -> np.ndarray:
    """What the numbers in a bin of `magnitude` are below, in size."""
    return np.ldexp(1.0, OCTAVES * (bins + 1) + SMALLEST)


def histogram(cells: np.ndarray, bins: int) -> np.ndarray:
    """How many of the rows (..., rows, columns) of each column lie in [k, k + 1), k < bins; NaN and
    others lie nowhere.
    """
    *lead, rows, columns = cells.shape
    flat = cells.reshape(-1)
    with np.errstate(invalid="ignore"):
        inside = np.flatnonzero((flat >= 0) & (flat < bins))
    place = inside // (rows * columns) * columns + inside % columns
    place *= bins
    place += flat[inside].astype(np.int64)
    size = int(np.prod(lead, dtype=np.int64)) * columns * bins
    return np.bincount(place, minlength=size).reshape(*lead, columns, bins)
