"""Histograms of gradients by binned features, and the splits that follow from them.

Feature j has ascending edges; bin b holds the values x with edges[b - 1] < x <= edges[b]. The bins
of all features lie side by side: feature j has the places offsets[j] .. offsets[j + 1] - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foedus import kernels

MOST_BINS = 256
"""Of a feature: a bin is a byte."""

LEAST_H = 1e-3
"""Of the sum of second derivatives in a leaf; noise and rounding that leave less are cut off."""


def offsets_of(widths: np.ndarray) -> np.ndarray:
    """Where each feature's bins begin, one more than it has edges, and the number of all bins."""
    return np.concatenate([[0], np.cumsum(np.asarray(widths, np.int64) + 1)])


def binned(x: np.ndarray, edges: list[np.ndarray]) -> np.ndarray:
    """The bin of each value: (d, n) in uint8, of rows (n, d)."""
    columns = zip(edges, x.T, strict=True)
    return np.stack([np.searchsorted(e, column, "left") for e, column in columns]).astype(np.uint8)


def sum_histograms(
    bins: np.ndarray, offsets: np.ndarray, node: np.ndarray, values: np.ndarray, nodes: int
) -> np.ndarray:
    """Sums of values (n, channels) by node, feature and bin: (nodes, offsets[-1], channels).

    Args:
        bins: The bin of each feature and row, (d, n).
        offsets: See `offsets_of`.
        node: The node of each row, (n,); -1 for rows that do not count.
        values: What is added up.
        nodes: The number of nodes.
    """
    bins, node = np.ascontiguousarray(bins), np.ascontiguousarray(node, np.int32)
    values = np.ascontiguousarray(values, np.float64)
    if kernels.ready:
        return kernels.sum_histograms(bins, offsets, node, values, nodes)
    return summed_plainly(bins, offsets, node, values, nodes)


def summed_plainly(
    bins: np.ndarray, offsets: np.ndarray, node: np.ndarray, values: np.ndarray, nodes: int
) -> np.ndarray:
    """`sum_histograms` without compiled code."""
    total, there = int(offsets[-1]), node >= 0
    out = np.zeros((nodes, total, values.shape[1]))
    base = node[there].astype(np.int64) * total
    for j, column in enumerate(bins[:, there]):
        place = base + offsets[j] + column
        for c, value in enumerate(values[there].T):
            out.reshape(-1, values.shape[1])[:, c] += np.bincount(place, value, nodes * total)
    return out


@dataclass(frozen=True)
class SplitRule:
    """Which splits are allowed, and what they gain.

    Args:
        leaf: The least number of rows in a leaf.
        l2: lambda.
        gain: The least gain.
    """

    leaf: int = 20
    l2: float = 1.0
    gain: float = 0.0

    def splits(
        self, histograms: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The feature (-1: none), bin and left sums of the best split of each node.

            gain = G_L^2 / (H_L + lambda) + G_R^2 / (H_R + lambda) - G^2 / (H + lambda)

        Of splits whose gains are equal up to 1e-6 of the largest, the first is taken, so that two
        features that divide the rows alike are not told apart by rounding.

        Args:
            histograms: Sums of gradients, second derivatives and rows, (nodes, bins, 3).
            offsets: See `offsets_of`.
        """
        nodes = len(histograms)
        upto = np.cumsum(histograms, 1)
        before = np.concatenate([np.zeros((nodes, 1, 3)), upto], 1)[:, offsets[:-1]]
        widths = np.diff(offsets)
        left = upto - np.repeat(before, widths, 1)
        whole = histograms[:, : widths[0]].sum(1)[:, None]
        right = whole - left
        gain = self._score(left) + self._score(right) - self._score(whole)
        allowed = (np.minimum(left[..., 2], right[..., 2]) >= self.leaf - 0.5) & (
            np.minimum(left[..., 1], right[..., 1]) > LEAST_H
        )
        allowed[:, offsets[1:] - 1] = False  # nothing is right of a feature's last bin
        gain = np.where(allowed & (gain > max(self.gain, 1e-9)), gain, -np.inf)
        best = gain.max(1, keepdims=True)
        place = (gain >= best - 1e-6 * np.abs(best)).argmax(1)
        feature = np.searchsorted(offsets, place, "right") - 1
        found = np.isfinite(best[:, 0])
        return (
            np.where(found, feature, -1),
            place - offsets[feature],
            left[np.arange(nodes), place],
        )

    def _score(self, sums: np.ndarray) -> np.ndarray:
        return sums[..., 0] ** 2 / (np.maximum(sums[..., 1], LEAST_H) + self.l2)

    def value(self, sums: np.ndarray) -> np.ndarray:
        """-G / (H + lambda)."""
        return -sums[..., 0] / (np.maximum(sums[..., 1], LEAST_H) + self.l2)
