"""Metrics from sums over rows, which clients can send: the server sees a few numbers and no row.

Sums of different clients are added entry by entry, and the metric is computed from the total. All
are exact except AUC, which is computed from binned scores: two rows of one bin count as a tie, and
others keep their order, so that the exact AUC lies within

    (1/2) sum_b positives_b negatives_b / (positives negatives)

of the binned one (`auc_bin_error`). Bins are at most 1/512 wide in probability, and 0.0705 in log
odds between -18 and 18; with more than 64 classes they are fewer and wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache

import numpy as np

from foedus.core.predictions import Predictions, ratio

Sums = Mapping[str, np.ndarray]
"""Sums by name, (groups, ...); "rows" is the number of rows, or their total weight."""

_CALIBRATION = 15
"""Bins of the expected calibration error."""

_SCORES, _FEWEST, _MOST = 1024, 32, 1 << 17
"""Bins of scores; the least number, with many classes; the numbers that all classes should have."""


# -- sums of the rows of each group ----------------------------------------------------------------


def _log_loss(p: Predictions) -> np.ndarray:
    least = np.finfo(np.float64).eps
    return p.sum(-np.log(p.of_label.clip(least, 1 - least)))


def _brier(p: Predictions) -> np.ndarray:
    """sum_c (p_c - [y = c])^2, halved for two classes: (p_1 - y)^2."""
    squares = (p.given**2).sum(1) - 2 * p.of_label + 1
    return p.sum(squares / 2 if p.classes == 2 else squares)


def _gaps(p: Predictions) -> np.ndarray:
    """Hits minus confidence, over bins ((b-1)/15, b/15] of the largest probability."""
    confidence = p.given.max(1)
    sure = np.nan_to_num(confidence)  # NaN, after divergence, has no bin
    edge = np.ceil(sure * _CALIBRATION).clip(1, _CALIBRATION).astype(np.int64) - 1
    gap = ((p.predicted == p.y) - confidence) * p.w
    at = p.index * _CALIBRATION + edge
    return np.bincount(at, gap, p.groups * _CALIBRATION).reshape(-1, _CALIBRATION)


def score_bins(classes: int) -> int:
    """The number of bins for the scores of each class."""
    most = _MOST // (2 * classes) // 2 * 2
    return min(_SCORES, max(_FEWEST, most))


@cache
def _edges(bins: int) -> np.ndarray:
    """The edges of the bins of probabilities: half of them equally spaced, half in log odds."""
    odds = np.linspace(-18, 18, bins // 2)
    return np.sort(np.append(np.arange(1, bins // 2) / (bins // 2), 1 / (1 + np.exp(-odds))))


def _scores(p: Predictions) -> np.ndarray:
    """Negatives and positives of each class by bins of its probability, (groups, classes, 2, bins).

    With two classes there is only class 1.
    """
    assert p.classes is not None
    bins = score_bins(p.classes)
    found = []
    for c in [1] if p.classes == 2 else range(p.classes):
        place = np.searchsorted(_edges(bins), p.given[:, c], "right")
        at = (p.index * 2 + (p.y == c)) * bins + place
        found.append(np.bincount(at, p.w, p.groups * 2 * bins).reshape(-1, 2, bins))
    return np.stack(found, 1)


def _columns(p: Predictions, values: np.ndarray) -> np.ndarray:
    """Sums of each output, (groups, outputs)."""
    return np.stack([p.sum(values[:, j]) for j in range(values.shape[1])], 1)


def pair(values: list[float]) -> tuple[float, float]:
    """A sum of doubles, twice as precise as a double: the nearest double, and the remainder."""
    high = math.fsum(values)
    return high, math.fsum([*values, -high]) if math.isfinite(high) else 0.0


def _moments(p: Predictions) -> np.ndarray:
    """The sums of y and of y^2, each as a pair, (groups, outputs, 4).

    Pairs, because the variance is a small difference of large numbers if the mean is far from 0.
    The squares of labels in single precision, as data has them, are exact.
    """
    found = np.zeros((p.groups, p.y.shape[1], 4))
    for g in range(p.groups):
        rows = slice(p.offsets[g], p.offsets[g + 1])
        for j, y in enumerate(p.y[rows].T):
            weighted = p.w[rows] * y
            found[g, j] = *pair(weighted.tolist()), *pair((weighted * y).tolist())
    return found


SUMS: dict[str, Callable[[Predictions], np.ndarray]] = {
    "confusion": lambda p: np.stack(p.confusion, 1),
    "scores": _scores,
    "gaps": _gaps,
    "log_loss": _log_loss,
    "brier": _brier,
    "absolute": lambda p: _columns(p, np.abs(p.y - p.given)),
    "squares": lambda p: _columns(p, (p.y - p.given) ** 2),
    "moments": _moments,
}


# -- metrics of sums -------------------------------------------------------------------------------


def mean(name: str) -> Callable[[Sums], np.ndarray]:
    return lambda s: ratio(s[name], s["rows"])


def balanced_accuracy(s: Sums) -> np.ndarray:
    hits, rows, _ = np.moveaxis(s["confusion"], 1, 0)
    return over_classes(ratio(hits, rows))


def over_classes(values: np.ndarray) -> np.ndarray:
    """The mean over the classes for which the value is defined."""
    return ratio(np.nansum(values, 1), (~np.isnan(values)).sum(1))


def averaged(kind: str, average: str) -> Callable[[Sums], np.ndarray]:
    """Precision, recall or F1 of class 1, or averaged over classes."""

    def finish(s: Sums) -> np.ndarray:
        scores, rows = _by_class(s, kind), s["confusion"][:, 1]
        if scores.shape[1] == 2 and not average:
            return scores[:, 1]
        some = ~np.isnan(scores)
        share = rows * some if average == "weighted" else some
        return ratio((np.nan_to_num(scores) * share).sum(1), share.sum(1))

    return finish


def _by_class(s: Sums, kind: str) -> np.ndarray:
    """Precision, recall or F1, (groups, classes).

    It is 0 instead of 0 / 0, and NaN for a class that is neither in the labels nor predicted.
    """
    hits, rows, said = np.moveaxis(s["confusion"], 1, 0)
    below = {"precision": said, "recall": rows, "f1": (rows + said) / 2}[kind]
    scores = np.nan_to_num(ratio(hits, below))
    return np.where(rows + said > 0, scores, np.nan)


def auc(s: Sums) -> np.ndarray:
    """The area under the ROC curve of binned scores; macro, one against the rest."""
    down, up = np.moveaxis(s["scores"], 2, 0)
    won = (up * (np.cumsum(down, -1) - down / 2)).sum(-1)
    return over_classes(ratio(won, up.sum(-1) * down.sum(-1)))


def auc_bin_error(s: Sums) -> np.ndarray:
    """The largest possible error of `auc`."""
    down, up = np.moveaxis(s["scores"], 2, 0)
    return over_classes(ratio((up * down).sum(-1) / 2, up.sum(-1) * down.sum(-1)))


def ece(s: Sums) -> np.ndarray:
    """sum_b |hits of bin b - confidence of bin b| / rows (Guo et al., 2017)."""
    return ratio(np.abs(s["gaps"]).sum(1), s["rows"])


def mae(s: Sums) -> np.ndarray:
    return ratio(s["absolute"], s["rows"][:, None]).mean(1)


def rmse(s: Sums) -> np.ndarray:
    return np.sqrt(ratio(s["squares"], s["rows"][:, None])).mean(1)


def r2(s: Sums) -> np.ndarray:
    """1 - sum (y - f)^2 / (sum y^2 - (sum y)^2 / n), with a difference that is not rounded.

    For constant y it is 1 if f equals y, else 0; it is undefined for fewer than two rows.
    """
    found = np.full(len(s["rows"]), np.nan)
    for g, n in enumerate(s["rows"].tolist()):
        if n < 2 or not np.isfinite(s["moments"][g]).all():
            continue
        scores = []
        for error, (a, b, c, d) in zip(s["squares"][g], s["moments"][g].tolist(), strict=True):
            first, second = Fraction(a) + Fraction(b), Fraction(c) + Fraction(d)
            spread = float(second - first**2 / Fraction(n))
            scores.append(1 - error / spread if spread > 0 else float(error == 0))
        found[g] = np.mean(scores)
    return found
