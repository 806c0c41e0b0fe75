"""Metrics of predictions, for many groups of rows at once: all test rows, or each client's own.

A metric is a function of `Predictions` that returns one number for each group, NaN where it is
undefined. With two classes, precision, recall, F1 and AUC are those of class 1; with more classes
they are macro averages, each class against the rest. The values equal those of scikit-learn.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foedus.core import metric_sums as by_sums
from foedus.core.metric_sums import SUMS, Sums
from foedus.core.predictions import Predictions, ratio
from foedus.errors import ConfigError, FoedusError, is_number, nearest, shown

# -- of all rows at once, where sums are not enough ------------------------------------------------


def _ranked(p: Predictions, score: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """The area under the ROC curve: P(score of a positive > score of a negative), ties count half.

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
    classes = [1] if p.classes == 2 else range(p.classes or 0)
    return by_sums.over_classes(np.stack([_ranked(p, p.given[:, c], p.y == c) for c in classes], 1))


def _r2(p: Predictions) -> np.ndarray:
    """1 - sum (y - f)^2 / sum (y - mean)^2.

    For constant y it is 1 if f equals y, else 0; it is undefined for fewer than two rows.
    """

    def one(y: np.ndarray, given: np.ndarray) -> np.ndarray:
        error = p.sum((y - given) ** 2)
        spread = p.sum((y - p.mean(y)[p.index]) ** 2)
        constant = np.where(error > 0, 0.0, 1.0)
        score = 1 - np.divide(error, spread, out=np.zeros_like(error), where=spread > 0)
        return np.where(spread > 0, score, constant)

    scores = [one(p.y[:, j], p.given[:, j]) for j in range(p.y.shape[1])]
    return np.where(np.diff(p.offsets) < 2, np.nan, np.mean(scores, 0))


# -- by name ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric: `of(predictions)` returns a number for each group.

    Args:
        name: The name of its column in the history.
        of: The function.
        higher: Whether larger is better.
        undefined: The reason why it may be NaN.
        sums: The sums over rows (`foedus.core.metric_sums.SUMS`) that `finish` needs.
        finish: The metric from sums by group; `None`: it cannot be computed from sums.
    """

    name: str
    of: Callable[[Predictions], np.ndarray]
    higher: bool = True
    undefined: str = ""
    sums: tuple[str, ...] = ()
    finish: Callable[[Sums], np.ndarray] | None = None


def _summed(
    name: str, needs: str, finish: Callable[[Sums], np.ndarray], higher: bool = True,
    undefined: str = "",
) -> Metric:  # fmt: skip
    """A metric that is the same from sums as from rows."""

    def of(p: Predictions) -> np.ndarray:
        return finish({"rows": p.total, needs: SUMS[needs](p)})

    return Metric(name, of, higher, undefined, (needs,), finish)


_FEW = "they have no rows of a class, and none predicted"
_CLASSES = [
    Metric("auc", _auc, True, "their rows have one class only", ("scores",), by_sums.auc),
    _summed("balanced_accuracy", "confusion", by_sums.balanced_accuracy),
    _summed("log_loss", "log_loss", by_sums.mean("log_loss"), higher=False),
    _summed("brier", "brier", by_sums.mean("brier"), higher=False),
    _summed("ece", "gaps", by_sums.ece, higher=False),
    *(
        _summed(
            kind + (average and f"_{average}"), "confusion", by_sums.averaged(kind, average),
            undefined=_FEW,
        )
        for kind in ("precision", "recall", "f1")
        for average in ("", "macro", "weighted")
    ),
]  # fmt: skip
_VALUES = [
    _summed("mae", "absolute", by_sums.mae, higher=False),
    _summed("rmse", "squares", by_sums.rmse, higher=False),
    Metric("r2", _r2, True, "they have fewer than two rows", ("squares", "moments"), by_sums.r2),
]
CLASSIFICATION = {m.name: m for m in _CLASSES}
REGRESSION = {m.name: m for m in _VALUES}
USUAL = ("loss", "accuracy", "mse")
"""Columns of every history."""

STATISTICS = ("mean", "worst", "worst_client", "worst_decile", "spread")
"""Endings of columns over clients."""


@dataclass(frozen=True)
class OwnMetric(Metric):
    """A user's function `(y, predictions)`."""

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
    """The metrics of `fd.run(..., metrics=given)`.

    Args:
        given: Names of metrics and functions.
        classes: The number of classes; `None` for regression.

    Raises:
        ConfigError: A metric is unknown, or not for this kind of data.
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
    except (TypeError, ValueError):  # some functions implemented in C have no signature
        weighs = False
    higher = bool(getattr(function, "greater_is_better", True))

    def alone(p: Predictions) -> np.ndarray:
        raise NotImplementedError(name)  # see `measured`

    return OwnMetric(name, alone, higher, "it gave NaN", function=function, weighs=weighs)


def measured(metric: Metric, p: Predictions, where: Callable[[int], str]) -> np.ndarray:
    """A metric of each group; `where` returns the name of a group, for errors."""
    if not isinstance(metric, OwnMetric):
        return metric.of(p)
    values = np.full(p.groups, np.nan)
    for g in np.flatnonzero(np.diff(p.offsets)).tolist():
        rows = slice(int(p.offsets[g]), int(p.offsets[g + 1]))
        values[g] = metric.call(p, rows, where(g))
    return values


def higher_is_better(column: str, metrics: Sequence[Metric] = ()) -> bool | None:
    """Whether larger is better in a column of the history; `None`: unknown."""
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
    """Statistics of a metric over the clients for which it is not NaN."""
    some = ~np.isnan(values)
    if not some.any():
        return {f"{name}_{ending}": math.nan for ending in STATISTICS}
    values, ids = values[some], ids[some]
    worst = int(values.argmin() if higher else values.argmax())
    found = (
        float(values.mean()),
        float(values[worst]),
        int(ids[worst]),
        float(np.quantile(values, 0.1 if higher else 0.9)),
        float(values.std()),
    )
    return {f"{name}_{ending}": v for ending, v in zip(STATISTICS, found, strict=True)}
