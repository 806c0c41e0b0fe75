"""Metrics of predictions, for many groups of rows at once: all test rows, or each client's own.

A metric is a function of `Predictions` that gives one number for each group, NaN where it is
undefined there. With two classes, precision, recall, F1 and AUC are those of class 1; with more
they are macro averages, each class against the rest. The numbers are those of scikit-learn.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from foedus.base.steps import IGNORED
from foedus.errors import ConfigError, FoedusError, is_number, nearest, shown

_BINS = 15
"""Bins of the expected calibration error."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Rows, and what a model says of them.

    Args:
        y: Class numbers (n,), or targets (n, outputs).
        given: Probabilities (n, classes), or predictions (n, outputs), in double precision.
        weight: Of the rows; `None`: all count alike.
        group: Of each row, from 0, not decreasing; `None`: all rows are one group.
        groups: How many groups there are; some may have no rows.
        classes: How many; `None` for regression.
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
        """The same rows with predictions. Where rows have labels of the steps of a sequence, (n,
        t), these steps become rows that count together what their row did.
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


# -- classification --------------------------------------------------------------------------------


def _balanced_accuracy(p: Predictions) -> np.ndarray:
    hits, rows, _ = p.confusion
    recall = ratio(hits, rows)
    return ratio(np.nansum(recall, 1), (rows > 0).sum(1))


def _by_class(p: Predictions, kind: str) -> np.ndarray:
    """Precision, recall or F1 (groups, classes): 0 where it would be 0 / 0, NaN for a class that is
    neither in the labels nor predicted.
    """
    hits, rows, said = p.confusion
    below = {"precision": said, "recall": rows, "f1": (rows + said) / 2}[kind]
    scores = np.nan_to_num(ratio(hits, below))
    return np.where(rows + said > 0, scores, np.nan)


def _averaged(kind: str, average: str = "") -> Callable[[Predictions], np.ndarray]:
    def metric(p: Predictions) -> np.ndarray:
        scores = _by_class(p, kind)
        if p.classes == 2 and not average:
            return scores[:, 1]
        some = ~np.isnan(scores)
        share = p.confusion[1] * some if average == "weighted" else some
        return ratio((np.nan_to_num(scores) * share).sum(1), share.sum(1))

    return metric


def _ranked(p: Predictions, score: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """The area under the ROC curve: P(score of a positive > that of a negative), ties by half.

    One sort by group and score; the weight of negatives below each row is a running sum.
    """
    if not len(score):
        return np.full(p.groups, np.nan)
    order = np.lexsort((score, p.index)) if p.group is not None else np.argsort(score)
    group, score = p.index[order], score[order]
    up, down = p.w[order] * positive[order], p.w[order] * ~positive[order]
    below = np.concatenate(([0.0], np.cumsum(down)))
    new = np.concatenate(([True], (group[1:] != group[:-1]) | (score[1:] != score[:-1])))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(score))
    middle = (below[first] + below[last]) / 2 - below[p.offsets[group[first]]]
    won = np.bincount(group, up * middle[np.cumsum(new) - 1], p.groups)
    ups, downs = (np.bincount(group, v, p.groups) for v in (up, down))
    return ratio(won, ups * downs)


def _auc(p: Predictions) -> np.ndarray:
    if p.classes == 2:
        return _ranked(p, p.given[:, 1], p.y == 1)
    scores = [_ranked(p, p.given[:, c], p.y == c) for c in range(p.classes or 0)]
    some = np.sum([~np.isnan(s) for s in scores], 0)
    return ratio(np.nansum(scores, 0), some)


def _log_loss(p: Predictions) -> np.ndarray:
    least = np.finfo(np.float64).eps
    return p.mean(-np.log(p.of_label.clip(least, 1 - least)))


def _brier(p: Predictions) -> np.ndarray:
    """sum_c (p_c - [y = c])^2, halved for two classes: (p_1 - y)^2."""
    squares = (p.given**2).sum(1) - 2 * p.of_label + 1
    return p.mean(squares / 2 if p.classes == 2 else squares)


def _ece(p: Predictions) -> np.ndarray:
    """sum_b |hits of bin b - confidence of bin b| / rows, over bins ((b-1)/15, b/15] of the largest
    probability (Guo et al., 2017).
    """
    confidence = p.given.max(1)
    edge = np.ceil(confidence * _BINS).clip(1, _BINS).astype(np.int64) - 1
    gap = ((p.predicted == p.y) - confidence) * p.w
    of_bin = np.bincount(p.index * _BINS + edge, gap, p.groups * _BINS).reshape(-1, _BINS)
    return ratio(np.abs(of_bin).sum(1), p.total)


# -- regression ------------------------------------------------------------------------------------


def _columns(p: Predictions, f: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """The mean over outputs of a metric of one output."""
    return np.mean([f(p.y[:, j], p.given[:, j]) for j in range(p.y.shape[1])], 0)


def _mae(p: Predictions) -> np.ndarray:
    return _columns(p, lambda y, given: p.mean(np.abs(y - given)))


def _rmse(p: Predictions) -> np.ndarray:
    return _columns(p, lambda y, given: np.sqrt(p.mean((y - given) ** 2)))


def _r2(p: Predictions) -> np.ndarray:
    """1 - sum (y - f)^2 / sum (y - mean)^2; of a constant y 1 if f equals it, else 0; undefined for
    fewer than two rows.
    """

    def one(y: np.ndarray, given: np.ndarray) -> np.ndarray:
        error = p.sum((y - given) ** 2)
        spread = p.sum((y - p.mean(y)[p.index]) ** 2)
        constant = np.where(error > 0, 0.0, 1.0)
        score = 1 - np.divide(error, spread, out=np.zeros_like(error), where=spread > 0)
        return np.where(spread > 0, score, constant)

    return np.where(np.diff(p.offsets) < 2, np.nan, _columns(p, one))


# -- by name ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric: `of(predictions)` gives a number for each group.

    Args:
        name: Of its column in the history.
        of: The function.
        higher: Whether more is better.
        undefined: Where it is NaN.
    """

    name: str
    of: Callable[[Predictions], np.ndarray]
    higher: bool = True
    undefined: str = ""


_FEW = "they have no rows of a class, and none predicted"
_CLASSES = [
    Metric("auc", _auc, undefined="their rows have one class only"),
    Metric("balanced_accuracy", _balanced_accuracy),
    Metric("log_loss", _log_loss, higher=False),
    Metric("brier", _brier, higher=False),
    Metric("ece", _ece, higher=False),
    *(
        Metric(kind + (average and f"_{average}"), _averaged(kind, average), undefined=_FEW)
        for kind in ("precision", "recall", "f1")
        for average in ("", "macro", "weighted")
    ),
]
_VALUES = [
    Metric("mae", _mae, higher=False),
    Metric("rmse", _rmse, higher=False),
    Metric("r2", _r2, undefined="they have fewer than two rows"),
]
CLASSIFICATION = {m.name: m for m in _CLASSES}
REGRESSION = {m.name: m for m in _VALUES}
USUAL = ("loss", "accuracy", "mse")
"""What every history has."""

_STATISTICS = ("mean", "worst", "worst_client", "worst_decile", "spread")
"""Endings of columns over clients."""


@dataclass(frozen=True)
class OwnMetric(Metric):
    """A function `(y, given)` of the user's."""

    function: Callable[..., Any] = max
    weighs: bool = False
    """Whether it has a parameter `sample_weight`."""

    def call(self, p: Predictions, rows: slice, where: str) -> float:
        """Its value on some rows; `where` names them in errors."""
        y, given = p.y[rows], p.given[rows]
        if not p.classes and y.shape[1] == 1:
            y, given = y[:, 0], given[:, 0]
        weight = None if p.weight is None else p.w[rows]
        more = {"sample_weight": weight} if self.weighs else {}
        what = f"metric {self.name!r} on {where} ({len(y):,} rows)"
        try:
            value = self.function(y.copy(), given.copy(), **more)
        except FoedusError:
            raise
        except Exception as error:
            form = "(n, classes), probabilities" if p.classes else "(n,) or (n, outputs)"
            raise ConfigError(
                f"{what} failed: {error!r}; it is called with NumPy arrays (y, predictions), here "
                f"of shapes {y.shape} and {given.shape}, {form}"
            ) from error
        if isinstance(value, np.ndarray) or hasattr(value, "item"):
            if np.size(value) != 1:
                raise ConfigError(
                    f"{what} gave {np.size(value)} numbers; return one, such as their mean"
                )
            value = value.item()
        if not is_number(value):
            raise ConfigError(f"{what} gave {shown(value)}; return a number")
        return float(value)


def metrics_of(given: Any, classes: int | None) -> tuple[Metric, ...]:
    """The metrics that `fd.run(..., metrics=given)` asks for.

    Raises:
        ConfigError: There is no such metric, or it is not for this kind of data.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ConfigError(f"metrics={given!r} must be a list, such as metrics=['auc', my_function]")
    here, other = (CLASSIFICATION, REGRESSION) if classes else (REGRESSION, CLASSIFICATION)
    found: dict[str, Metric] = {}
    for i, entry in enumerate(given):
        if isinstance(entry, str):
            if entry in USUAL and entry != ("mse" if classes else "accuracy"):
                continue  # measured anyway
            if entry in other or entry in USUAL:
                kind, this = ("regression", "classes") if classes else ("classification", "numbers")
                raise ConfigError(
                    f"metrics[{i}]={entry!r} is for {kind}, and this data has {this} to predict; "
                    f"use some of {', '.join(here)}"
                )
            if entry not in here:
                names = ", ".join(here)
                raise ConfigError(
                    f"metrics[{i}]={shown(entry)} is unknown{nearest(entry, here)} (allowed: "
                    f"{names}, or a function of labels and predictions)"
                )
            metric = here[entry]
        else:
            metric = _own(entry, i)
        if metric.name in found and not isinstance(entry, str):
            raise ConfigError(
                f"metrics[{i}]: there are two metrics {metric.name!r}; give one another __name__"
            )
        found.setdefault(metric.name, metric)
    return tuple(found.values())


def _own(function: Any, i: int) -> Metric:
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            f"metrics[{i}]={shown(function)} must be a name, such as 'auc', or a function of "
            "labels and predictions that returns a number"
        )
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"metrics[{i}]={shown(function)} has no name for a column of the history; define it "
            "with def, or set its __name__"
        )
    if name in {*USUAL, *CLASSIFICATION, *REGRESSION, "round", "seconds", "clients"}:
        raise ConfigError(
            f"metrics[{i}]: a function must not be called {name!r}, the name of another column; "
            "give it another __name__"
        )
    try:
        weighs = "sample_weight" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of C have no signature
        weighs = False
    higher = bool(getattr(function, "greater_is_better", True))

    def alone(p: Predictions) -> np.ndarray:
        raise NotImplementedError(name)  # see `measured`

    return OwnMetric(name, alone, higher, "it gave NaN", function, weighs)


def measured(metric: Metric, p: Predictions, where: Callable[[int], str]) -> np.ndarray:
    """A metric of each group; `where` gives the name of a group, for errors."""
    if not isinstance(metric, OwnMetric):
        return metric.of(p)
    values = np.full(p.groups, np.nan)
    for g in np.flatnonzero(np.diff(p.offsets)).tolist():
        rows = slice(int(p.offsets[g]), int(p.offsets[g + 1]))
        values[g] = metric.call(p, rows, where(g))
    return values


def higher_is_better(column: str, metrics: Sequence[Metric] = ()) -> bool | None:
    """Whether more is better in a column of the history; `None`: it is not known."""
    name = column.removeprefix("own_")
    known = {m.name: m.higher for m in (*_CLASSES, *_VALUES, *metrics)}
    known |= {"loss": False, "accuracy": True, "mse": False}
    if name in known:
        return known[name]
    for ending in ("mean", "worst", "worst_decile"):
        if name.removesuffix(f"_{ending}") in known:
            return known[name.removesuffix(f"_{ending}")]
    return False if name.removesuffix("_spread") in known else None


def over_clients(name: str, values: np.ndarray, ids: np.ndarray, higher: bool) -> dict[str, Any]:
    """The columns of a metric over clients; those where it is NaN are left out."""
    some = ~np.isnan(values)
    if not some.any():
        return {f"{name}_{ending}": math.nan for ending in _STATISTICS}
    values, ids = values[some], ids[some]
    worst = int(values.argmin() if higher else values.argmax())
    found = (
        float(values.mean()),
        float(values[worst]),
        int(ids[worst]),
        float(np.quantile(values, 0.1 if higher else 0.9)),
        float(values.std()),
    )
    return {f"{name}_{ending}": v for ending, v in zip(_STATISTICS, found, strict=True)}
