"""Rows with a model's predictions, for many groups of rows at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from foedus.base.steps import IGNORED


@dataclass(frozen=True, eq=False)
class Predictions:
    """Rows with a model's predictions.

    Args:
        y: Class numbers (n,), or targets (n, outputs).
        given: Probabilities (n, classes), or predictions (n, outputs), in double precision.
        weight: The weight of each row; `None`: all equal.
        group: The group of each row, from 0, not decreasing; `None`: all rows are one group.
        groups: The number of groups; some may have no rows.
        classes: The number of classes; `None` for regression.
    """

    y: np.ndarray
    given: np.ndarray
    weight: np.ndarray | None = None
    group: np.ndarray | None = None
    groups: int = 1
    classes: int | None = None

    @cached_property
    def index(self) -> np.ndarray:
        return np.zeros(len(self.y), np.int64) if self.group is None else self.group

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where the rows of each group begin, and the end."""
        return np.searchsorted(self.index, np.arange(self.groups + 1))

    @cached_property
    def w(self) -> np.ndarray:
        return np.ones(len(self.y)) if self.weight is None else self.weight.astype(np.float64)

    def of(self, given: np.ndarray) -> Predictions:
        """The same rows with predictions.

        If rows have labels (n, t) of the steps of a sequence, the steps become rows, which together
        have the weight of their row.

        Args:
            given: Probabilities or predictions.
        """
        if not self.classes or self.y.ndim == 1:
            return replace(self, given=given)
        real = self.y != IGNORED
        length = real.sum(1)
        each = None if self.group is None else np.repeat(self.group, length)
        weight = None
        if self.weight is not None or (length != length[:1]).any():
            weight = np.repeat(self.w / length, length)
        return replace(self, y=self.y[real], given=given[real], weight=weight, group=each)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Weighted sums over the rows of each group."""
        return np.bincount(self.index, values * self.w, self.groups)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Weighted means over the rows of each group."""
        return ratio(self.sum(values), self.total)

    @cached_property
    def total(self) -> np.ndarray:
        return np.bincount(self.index, self.w, self.groups)

    @cached_property
    def predicted(self) -> np.ndarray:
        return self.given.argmax(1)

    @cached_property
    def confusion(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights of hits, of rows and of predictions, by group and class."""
        assert self.classes is not None
        k, n = self.classes, self.groups * self.classes
        at, hit = self.index * k, self.predicted == self.y
        hits, rows, said = (
            np.bincount(at + label, weight, n).reshape(-1, k)
            for label, weight in (
                (self.y, self.w * hit),
                (self.y, self.w),
                (self.predicted, self.w),
            )
        )
        return hits, rows, said

    @cached_property
    def of_label(self) -> np.ndarray:
        """The probability of each row's own class."""
        return self.given[np.arange(len(self.y)), self.y]


def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, NaN where b is 0."""
    return np.divide(a, b, out=np.full(np.shape(a), np.nan), where=b != 0)
