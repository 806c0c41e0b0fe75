"""The lines of a comparison: every metric of its runs by round, by what was sent, by time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from foedus.core.history import FIRST
from foedus.core.metrics import STATISTICS
from foedus.core.result import Run
from foedus.report.charts import Line, Lines
from foedus.report.compare import Comparison, megabytes, words

_COSTS = tuple(c for c in FIRST if c not in ("loss", "accuracy", "mse"))


def chart(comparison: Comparison) -> Lines | None:
    """All runs as one chart; None where nothing was evaluated."""
    drawn = lines(comparison)
    if not drawn:
        return None
    shown = metrics(comparison)
    labels = {m: words(m) + (", test rows" if m in FIRST else "") for m in shown}
    labels |= {"rounds": "round", "megabytes": "megabytes, up and down"}
    labels["seconds"] = "seconds of computing"
    caption = f"{labels[comparison.metric]} by round, by megabytes sent by clients and to them, and"
    caption = caption[:1].upper() + caption[1:] + " by seconds of computing, without evaluation."
    if comparison.several:
        caption += " Lines are means over seeds, bands reach from the least to the largest seed."
    if any(not line.x["megabytes"][-1] for line in drawn):
        caption += " By megabytes, a level shows the last value of what sends nothing."
    title = f"{labels[comparison.metric][:1].upper()}{labels[comparison.metric][1:]}"
    limits = close_up(comparison, drawn)
    return Lines(title, caption, drawn, labels, comparison.target, limits)


def metrics(comparison: Comparison) -> list[str]:
    """Columns of the histories that are not costs, that of the table first."""
    columns = dict.fromkeys([comparison.metric, comparison.own_metric, "loss"])
    left_out = (*_COSTS, *_not_drawn(comparison))
    records = [r.records for runs in comparison.runs.values() for r in runs]
    columns |= dict.fromkeys(c for r in records for c in r.columns if c not in left_out)
    known = {c for r in records for c in r.columns if not math.isnan(_number(r.last(c)))}
    return [c for c in columns if c in known]


def _not_drawn(comparison: Comparison) -> set[str]:
    """Columns about single clients, which have a chart of their own."""
    kept = [r.kept.rounds.values() for runs in comparison.runs.values() for r in runs if r.kept]
    names = {name for rounds in kept for scores in rounds for name in scores}
    return {f"{own}{n}_{end}" for own in ("", "own_") for n in names for end in STATISTICS}


def lines(comparison: Comparison) -> list[Line]:
    """A line for each algorithm that was evaluated: means over seeds, by each metric.

    Of an algorithm none of whose runs finished, the rounds before the end are shown.
    """
    found = (_line(comparison, name, metrics(comparison)) for name in comparison.runs)
    return [line for line in found if line is not None]


def _line(comparison: Comparison, name: str, shown: Sequence[str]) -> Line | None:
    finished = comparison.finished(name)
    runs = finished or comparison.runs[name]
    rows = [{row["round"]: row for row in run.records.rows} for run in runs]
    rounds = sorted(set.intersection(*(_evaluated(run, shown) for run in runs)))
    if not rounds:
        return None
    y: dict[str, list[float]] = {}
    low, high = {}, {}
    for metric in shown:
        values = [[_number(of[t].get(metric, math.nan)) for of in rows] for t in rounds]
        if all(math.isnan(sum(v)) for v in values):
            continue
        y[metric] = [statistics.fmean(v) for v in values]
        if len(runs) > 1:
            low[metric], high[metric] = [min(v) for v in values], [max(v) for v in values]
    x: dict[str, list[float]] = {
        "rounds": [int(t) for t in rounds],
        "megabytes": [statistics.fmean(megabytes(of[t]) for of in rows) for t in rounds],
        "seconds": [statistics.fmean(of[t]["seconds"] for of in rows) for t in rounds],
    }
    note = "" if finished else "diverged"
    return Line(name, x, y, low, high, comparison.is_pooled(name), note)


def _evaluated(run: Run, shown: Sequence[str]) -> set[float]:
    """Rounds with a finite value of one of the metrics."""
    rows = run.records.rows
    return {v["round"] for v in rows if not all(math.isnan(_number(v.get(m))) for m in shown)}


def _number(value: object) -> float:
    """A value of a history that can be drawn, else NaN; files may have texts there."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def close_up(comparison: Comparison, drawn: Sequence[Line]) -> tuple[float, float] | None:
    """Limits that show the end of the race, where the whole range hides it."""
    metric = comparison.metric
    curves = [line.y[metric] for line in drawn if metric in line.y]
    whole = [v for c in curves for v in c if math.isfinite(v)]
    ends = [c[-1] for c in curves if math.isfinite(c[-1])]
    if not ends or comparison.target is None or not math.isfinite(comparison.target):
        return None
    best = max(ends) if comparison.higher_is_better else min(ends)
    margin = best - comparison.target
    if (margin <= 0) == comparison.higher_is_better or abs(margin) * 5 > max(whole) - min(whole):
        return None
    limits = (comparison.target - margin, best + 0.5 * margin)
    return (min(limits), min(max(limits), 1.0) if comparison.higher_is_better else max(limits))
