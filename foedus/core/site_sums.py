"""Sums over test rows that stay with their clients, from which the server computes metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foedus.core.metric_sums import SUMS, Sums, auc_bin_error, pair, score_bins
from foedus.core.metrics import CLASSIFICATION, REGRESSION, Metric
from foedus.core.predictions import Predictions, ratio
from foedus.errors import ReplyError

LARGEST = 2.0**100
"""Larger sums are clipped to it, so that they can be added in fixed point; from half of it on
they are taken as infinite.
"""

_HAIR = 1 + 1e-9
_LOG_LOSS = 37.0  # of one row, at most: -log of the rounding error of a double
_COUNTS = ("rows", "hits", "confusion", "scores")


@dataclass(frozen=True)
class SiteSums:
    """The sums that some metrics need, with those of the loss and of accuracy or squared error.

    Args:
        metrics: Names of metrics; functions cannot be computed from sums.
        classes: The number of classes; `None` for regression.
        outputs: The number of outputs of a model.
    """

    metrics: tuple[str, ...]
    classes: int | None
    outputs: int = 1

    @classmethod
    def of_spec(cls, metrics: Sequence[str], classes: int | None, outputs: int) -> SiteSums:
        """The sums of those of these metrics that can be computed from sums."""
        known = CLASSIFICATION if classes else REGRESSION
        return cls(tuple(name for name in metrics if name in known), classes, outputs)

    def __post_init__(self) -> None:
        known = CLASSIFICATION if self.classes else REGRESSION
        if strange := [name for name in self.metrics if name not in known]:
            raise ReplyError(
                f"metrics: {strange[0][:100]!r} cannot be made of sums over rows (can be: "
                f"{', '.join(known)})"
            )
        if len(set(self.metrics)) < len(self.metrics):
            raise ReplyError("metrics names something twice")

    @cached_property
    def known(self) -> list[Metric]:
        known = CLASSIFICATION if self.classes else REGRESSION
        return [known[name] for name in self.metrics]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each sum of one client."""
        k = self.classes or 0
        shapes: dict[str, tuple[int, ...]] = {
            "confusion": (3, k),
            "scores": (1 if k == 2 else k, 2, score_bins(k) if k else 0),
            "gaps": (15,),
            "log_loss": (),
            "brier": (),
            "absolute": (self.outputs,),
            "squares": (self.outputs,),
            "moments": (self.outputs, 4),
        }
        asked = {name for metric in self.known for name in metric.sums}
        usual = ["rows", "loss", "hits" if self.classes else "error"]
        return dict.fromkeys(usual, ()) | {k: v for k, v in shapes.items() if k in asked}

    @staticmethod
    def counts(name: str) -> bool:
        """Whether a sum is of integers."""
        return name in _COUNTS

    def of(self, p: Predictions, usual: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The sums of each group of rows.

        Args:
            p: Predictions.
            usual: The sums of the loss, and of hits or errors.
        """
        found = {"rows": p.total, **usual}
        return {k: _bounded(found[k] if k in found else SUMS[k](p)) for k in self.shapes}

    def wrong(self, sums: Sums, rows: int | None = None) -> str | None:
        """The reason why sums of one client, or of all, are invalid; `None`: they are valid.

        Args:
            sums: The sums.
            rows: The number of test rows, if it is known.
        """
        for name, shape in self.shapes.items():
            values = sums.get(name)
            if values is None or values.shape != shape or values.dtype != np.float64:
                return f"{name} must have shape {shape} in double precision"
            if not (np.abs(values) <= LARGEST * 2**20).all():  # also true for NaN
                return f"{name} must be finite"
            if self.counts(name) and ((values < 0) | (values != np.rint(values))).any():
                return f"{name} must be counts of rows"
        if strange := set(sums) - set(self.shapes):
            return f"{str(min(strange, key=str))[:100]!r} was not asked for"
        n = float(sums["rows"])
        if rows is not None and n != rows:
            return f"they are of {n:.0f} rows, and there are {rows}"
        return self._contradiction(sums, n)

    def _contradiction(self, s: Sums, n: float) -> str | None:
        """The first sum that cannot belong to the same n rows as the others, if any."""
        fine = {"hits": s.get("hits", np.float64(0)) <= n, "error": s.get("error", n) >= 0}
        if "confusion" in s:
            hits, rows, said = s["confusion"]
            fine["confusion"] = bool(
                rows.sum() == said.sum() == n and (hits <= np.minimum(rows, said)).all()
            )
        if "scores" in s:
            up = s["scores"][:, 1].sum(-1)
            totals = s["scores"].sum((1, 2))
            fine["scores"] = bool(
                (totals == n).all()
                and (len(up) == 1 or up.sum() == n)
                and ("confusion" not in s or (up == s["confusion"][1][-len(up) :]).all())
            )
        if abs(float(s["loss"])) >= LARGEST / 2:  # diverged: the model's outputs are not finite
            return next((f"{k} cannot be of {n:.0f} rows" for k, v in fine.items() if not v), None)
        limits = {"gaps": n, "log_loss": _LOG_LOSS * n, "brier": n if self.classes == 2 else 2 * n}
        for name, most in limits.items():
            if name in s:
                low = 0 if name != "gaps" else -most
                fine[name] = bool((s[name] >= low).all() and np.abs(s[name]).sum() <= most * _HAIR)
        for name in ("absolute", "squares"):
            if name in s:
                fine[name] = bool((s[name] >= 0).all())
        if "moments" in s:
            first, second = s["moments"][:, 0], s["moments"][:, 2]
            finite = np.abs(s["moments"]).max(initial=0) < LARGEST / 2
            fine["moments"] = not finite or bool((first**2 <= n * second * _HAIR).all())
        return next((f"{k} cannot be of {n:.0f} rows" for k, v in fine.items() if not v), None)

    def added(self, sums: Sums) -> dict[str, np.ndarray]:
        """The sums of all groups together, as one group."""
        found = {name: values.sum(0, keepdims=True) for name, values in sums.items()}
        if "moments" in found:
            moments = sums["moments"]
            for j in range(moments.shape[1]):
                for k in (0, 2):
                    total = pair(moments[:, j, k : k + 2].ravel().tolist())
                    found["moments"][0, j, k : k + 2] = total
        return found

    def finish(self, sums: Sums) -> dict[str, np.ndarray]:
        """The loss, accuracy or mean squared error, and all metrics, of each group."""
        s = {name: np.where(np.abs(v) < LARGEST / 2, v, np.inf) for name, v in sums.items()}
        usual, key = ("accuracy", "hits") if self.classes else ("mse", "error")
        found = {"loss": ratio(s["loss"], s["rows"]), usual: ratio(s[key], s["rows"])}
        for metric in self.known:
            assert metric.finish is not None
            found[metric.name] = metric.finish(s)
        if "auc" in found:
            found["auc_bin_error"] = auc_bin_error(s)
        return found


def _bounded(values: np.ndarray) -> np.ndarray:
    """Finite numbers, clipped to the largest."""
    finite = np.nan_to_num(values, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)
    return np.clip(finite, -LARGEST, LARGEST)
