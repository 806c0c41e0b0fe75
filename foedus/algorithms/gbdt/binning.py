"""Bins of a federation's features, from sums over clients.

The server sends thresholds and gets the number of rows between them. It begins with all powers of
two and quarters between them, and divides the cells that hold many rows again and again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

REFINEMENTS = 8
"""How often cells are divided, each time into `PARTS`."""
PARTS = 4
_FAR = np.finfo(np.float32).max


def first_thresholds() -> np.ndarray:
    """Powers of two, quarters between them, their negatives, and 0."""
    up = np.ldexp(1 + np.arange(4) / 4, np.arange(-126, 128)[:, None]).ravel()
    up = up.astype(np.float32)
    return np.concatenate([-up[::-1], np.zeros(1, np.float32), up])


def counted(x: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """How many rows (n, d) have t[i - 1] < x <= t[i], by feature: thresholds (d, m), (d, m)."""
    m = thresholds.shape[1]
    columns = zip(thresholds, x.T, strict=True)
    return np.stack([np.bincount(np.searchsorted(t, v), minlength=m + 1)[:m] for t, v in columns])


def find_edges(
    count: Callable[[np.ndarray], np.ndarray], features: int, bins: int
) -> list[np.ndarray]:
    """Edges of at most `bins` bins for each feature, with about as many rows in each.

    A value that many rows have is alone in its bin, and a feature with few values has a bin for
    each, up to the resolution: a part in 2^18 of the value.

    Args:
        count: The numbers of rows of all clients for thresholds (d, m), as `counted`.
        features: d.
        bins: The largest number of bins.
    """
    cells = [first_thresholds()] * features
    for step in range(REFINEMENTS + 1):
        rows = count(_padded(cells))
        for j, upper in enumerate(cells):
            mass = rows[j, : len(upper)]
            # no more than can be of use: noise has rows in every cell
            there, last = _largest(mass, 0.5, 8 * bins), step == REFINEMENTS
            if last:
                cells[j] = _chosen(upper[there], mass[there], bins)
                continue
            heavy = _largest(mass, mass.sum() / (2 * bins), 2 * bins)
            lower = np.concatenate([upper[:1], upper[:-1]]).astype(np.float64)
            parts = np.arange(1, PARTS)[:, None] / PARTS
            inner = lower[heavy] + parts * (upper[heavy] - lower[heavy])
            # cells without rows go: what lies between two others is counted with the upper one
            edges = [upper[there], lower[there].astype(np.float32), inner.ravel()]
            cells[j] = np.unique(np.concatenate(edges).astype(np.float32))
    return cells


def _largest(mass: np.ndarray, least: float, most: int) -> np.ndarray:
    """The places of at most `most` cells with more than `least` rows, in order."""
    found = np.argsort(-mass, kind="stable")[:most]
    return np.sort(found[mass[found] > max(least, 0.5)])


def _padded(cells: list[np.ndarray]) -> np.ndarray:
    most = max(map(len, cells))
    return np.stack([np.pad(cell, (0, most - len(cell)), constant_values=_FAR) for cell in cells])


def _chosen(upper: np.ndarray, mass: np.ndarray, bins: int) -> np.ndarray:
    """Upper ends of cells, without the last, where the rows below reach the next part of all."""
    if len(upper) <= bins:
        return upper[:-1]
    part = np.floor(np.cumsum(mass) * bins / mass.sum() * (1 - 1e-12)).astype(np.int64)
    return upper[np.flatnonzero(np.diff(part) > 0)][: bins - 1]
