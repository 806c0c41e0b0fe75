"""When a run ends before its last round, and which of its models is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from foedus.base.settings import Means, Settings, check_settings
from foedus.base.tree import State
from foedus.core.metrics import Metric, higher_is_better
from foedus.errors import ConfigError, nearest

GROWTH = 1000.0
"""A loss this many times that of round 0 causes a warning."""


class Stop(Exception):  # noqa: N818 - not an error
    """Raised by a callback's `start` or `row` to end the run after this round.

    The run ends as if this were its last round.

    Args:
        why: The reason, recorded in `run.notes`.

    Example:
        >>> class Budget(fd.Callback):
        ...     def row(self, row):
        ...         if row["bytes_up"] > 50_000:
        ...             raise fd.Stop("50 kB are enough")
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> fd.run(fd.FedAvg(), fed, rounds=20, callbacks=[Budget()]).notes
        ['stopped after round 2: 50 kB are enough']
    """

    def __init__(self, why: str = ""):
        super().__init__(why)


class GrowthWarning(UserWarning):
    """The loss has become more than 1,000 times that of the start: the run seems to diverge.

    Example:
        >>> issubclass(fd.GrowthWarning, UserWarning)
        True
    """


@dataclass(frozen=True)
class Patience(Settings):
    """Early stopping: end a run whose metric has not improved for a number of rounds.

    Pass it to `fd.run(..., stop=fd.Patience(5))`.

    Args:
        rounds: The number of rounds without improvement; rounds between two evaluations count.
        metric: A column of the history: "loss", "accuracy", "mse", one of `metrics=[...]`, one over
            clients such as "accuracy_worst", or "own_..." where clients have models of their own.
        minimum: An improvement by more than this counts.
        maximize: Whether larger is better; `None`: as known for the metric.

    Raises:
        ConfigError: A setting is out of range.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> stop = fd.Patience(3, "accuracy", minimum=0.01)
        >>> run = fd.run(fd.FedAvg(), fed, rounds=100, stop=stop)
        >>> len(run.history) < 100, run.best.round < 100
        (True, True)
    """

    rounds: Annotated[int, Ge(1)]
    metric: str = "loss"
    minimum: Annotated[float, Ge(0), Means("a finite number of at least 0")] = 0.0
    maximize: bool | None = None

    def __post_init__(self) -> None:
        check_settings(self)


class Watch:
    """Watches the course of a run: its best round, the end of patience, a growing loss.

    It depends on the rows of the history alone; a resumed run is given the earlier rows.
    """

    def __init__(
        self,
        stop: Patience | None,
        keep_best: str | None,
        metrics: Sequence[Metric],
        y_test: np.ndarray,
        classes: int | None,
        remedy: str,
    ):
        self.stop, self.remedy = stop, remedy
        self.stop_higher = stop is not None and _higher(stop.metric, metrics, stop.maximize)
        self.best_metric = keep_best
        same = stop is not None and stop.metric == keep_best
        maximize = stop.maximize if same and stop else None
        self.best_higher = keep_best is not None and _higher(keep_best, metrics, maximize)
        self.columns = ("loss", "own_loss") if classes else ("mse", "own_mse")
        self.y_test, self.classes = y_test, classes
        self.first: dict[str, float] = {}
        self.record, self.since = math.nan, 0
        self.best_value, self.best_round = math.nan, -1
        self.grown: str | None = None

    def see(self, row: dict[str, Any]) -> tuple[str | None, bool]:
        """Process a row; returns a reason to stop or `None`, and whether its model is the best."""
        round, why, better = row["round"], None, False
        if self.grown is None:
            self.grown = self._growth(row)
        if self.stop is not None:
            value = row.get(self.stop.metric, math.nan)
            gain = value - self.record if self.stop_higher else self.record - value
            if value == value and (self.record != self.record or gain > self.stop.minimum):
                self.record, self.since = value, round
            elif value == value and round - self.since >= self.stop.rounds:
                why = (
                    f"stopped after round {round}: {self.stop.metric} has not improved on "
                    f"{self.record:.6g} (round {self.since}) for {self.stop.rounds} rounds"
                )
        if self.best_metric is not None:
            value = row.get(self.best_metric, math.nan)
            gain = value - self.best_value if self.best_higher else self.best_value - value
            better = value == value and (self.best_round < 0 or gain > 0)
            if better:
                self.best_value, self.best_round = value, round
        return why, better

    @cached_property
    def naive(self) -> float:
        """The loss of equal class probabilities, or the mean squared error of predicting 0."""
        if self.classes:
            return math.log(self.classes)
        return float(np.square(self.y_test, dtype=np.float64).mean()) if len(self.y_test) else 0.0

    def _growth(self, row: dict[str, Any]) -> str | None:
        for name in self.columns:
            value = row.get(name, math.nan)
            if value != value:
                continue
            first = self.first.setdefault(name, value)
            # an almost perfect model, as after a warm start, makes every loss look large
            if value > GROWTH * first and value > GROWTH * self.naive:
                return (
                    f"round {row['round']}: {name} is {value:.3g}, after {first:.3g} at the start: "
                    f"the run seems to diverge; {self.remedy}"
                )
        return None


@dataclass(frozen=True, eq=False)
class Best:
    """The server's state after the best round."""

    state: State
    round: int
    metric: str
    value: float


def best_metric(keep_best: Any, stop: Patience | None) -> str | None:
    """The metric that decides which model is kept, if any."""
    if keep_best is None:
        return None if stop is None else stop.metric
    return None if keep_best is False else keep_best


def _higher(metric: str, metrics: Sequence[Metric], maximize: bool | None) -> bool:
    higher = higher_is_better(metric, metrics) if maximize is None else maximize
    assert higher is not None  # checked before
    return higher


def check_steering(
    stop: Any,
    keep_best: Any,
    metrics: Sequence[Metric],
    per_client: bool,
    personal: bool,
    classes: int | None,
    evaluated: bool,
) -> None:
    """Raise `ConfigError` for a metric by which a run cannot be stopped or judged."""
    if stop is not None and not isinstance(stop, Patience):
        raise ConfigError(
            f"stop={stop!r} must be fd.Patience(rounds, metric), such as fd.Patience(5)"
        )
    if keep_best is not None and keep_best is not False and not isinstance(keep_best, str):
        usual = "accuracy" if classes else "mse"
        raise ConfigError(f"keep_best={keep_best!r} must be a metric, such as {usual!r}, or False")
    asked = [] if stop is None else [("stop", stop.metric, stop.maximize)]
    best = best_metric(keep_best, stop)
    if best is not None:
        same = stop is not None and best == stop.metric
        asked.append(("keep_best", best, stop.maximize if same and stop else None))
    for argument, metric, maximize in asked:
        if not evaluated:
            raise ConfigError(
                f"{argument}: {metric!r} needs evaluation: test rows, and evaluate_every of at "
                "least 1"
            )
        known = columns(metrics, per_client, personal, classes)
        if metric not in known and maximize is None:
            own = "" if per_client else "; columns over clients need per_client=True"
            raise ConfigError(
                f"{argument}: metric {metric!r} is not measured{nearest(metric, known)} (measured: "
                f"{', '.join(known[:12])}{', ...' if len(known) > 12 else ''}{own}; others need "
                "metrics=[...], or, for a column of the algorithm's own, fd.Patience(..., "
                "maximize=True or False))"
            )


def columns(
    metrics: Sequence[Metric], per_client: bool, personal: bool, classes: int | None
) -> list[str]:
    """The names of the score columns that a history will have."""
    names = ["loss", "accuracy" if classes else "mse", *(m.name for m in metrics)]
    if per_client:
        endings = ("mean", "worst", "worst_decile", "spread")
        names += [f"{n}_{ending}" for n in names for ending in endings]
    return [*(f"own_{n}" for n in names), *names] if personal else names
