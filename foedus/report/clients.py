"""The scores of single clients: after the last round, by round, and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foedus.core.result import Run
from foedus.data.federation import Federation
from foedus.errors import FoedusError
from foedus.report.charts import Dots, Line, Lines, written
from foedus.report.compare import Comparison, megabytes, words

if TYPE_CHECKING:
    import pandas as pd

_FIRST_SEED = " Of several seeds, the first."


def last(comparison: Comparison) -> Dots | None:
    """The score of each client on its own test rows, of the first run that finished."""
    score = comparison.metric.removeprefix("own_")
    competing = [n for n in comparison.runs if not comparison.is_pooled(n)]
    measured = {n: _scores(r, score) for n in competing for r in comparison.finished(n)[:1]}
    groups = {name: members for name, members in measured.items() if members}
    if not any(len(members) > 1 for members in groups.values()):
        return None
    label = f"{words(score)}, the client's own test rows"
    caption = (
        "A dot is a client: the model that it ends up with, on its own test rows. The band reaches "
        "from the 10 % to the 90 % quantile, the line is the median."
    )
    caption += _FIRST_SEED if comparison.several else ""
    return Dots("Clients", caption, label, groups, lowest=comparison.higher_is_better)


def by_round(comparison: Comparison) -> Lines | None:
    """The distribution over clients by round, of runs with `per_client=True`."""
    found = {name: comparison.finished(name)[:1] for name in comparison.runs}
    kept = [(name, r) for name, runs in found.items() for r in runs if r.kept is not None]
    drawn = [_line(name, run, comparison.is_pooled(name)) for name, run in kept]
    if not any(len(line.x["rounds"]) > 1 for line in drawn):
        return None
    score = comparison.metric.removeprefix("own_")
    names = [n for line in drawn for n in (score, *line.y) if n in line.y and " " not in n]
    labels: dict[str, str] = {}
    for name in dict.fromkeys(names):
        labels |= {name: f"{words(name)}, median client", _worst(name): f"{words(name)}, worst"}
    labels |= {"rounds": "round", "megabytes": "megabytes, up and down"}
    labels["seconds"] = "seconds of computing"
    caption = (
        "Each client on its own test rows. A line is the median client, in a band from the 10 % to "
        "the 90 % quantile, or the worst client, who is named beside the value."
    )
    caption += _FIRST_SEED if comparison.several else ""
    return Lines("Clients by round", caption, drawn, labels)


def _line(name: str, run: Run, pooled: bool) -> Line:
    """Quantiles over clients of every metric that was kept, and the worst client."""
    assert run.kept is not None
    kept, called = run.kept, _called(run)
    rows = [row for row in run.records.rows if row["round"] in kept.rounds]
    y: dict[str, list[float]] = {}
    low: dict[str, list[float]] = {}
    high: dict[str, list[float]] = {}
    remarks: dict[str, list[str]] = {}
    for row in rows:
        for metric, values in kept.rounds[row["round"]].items():
            fine = np.isfinite(values)
            three = np.quantile(values[fine], [0.1, 0.5, 0.9]) if fine.any() else [math.nan] * 3
            for of, value in zip((low, y, high), three, strict=True):
                of.setdefault(metric, []).append(float(value))
            value, client = _worst_of(row, metric)
            y.setdefault(_worst(metric), []).append(value)
            remarks.setdefault(_worst(metric), []).append(called.get(client, ""))
    x: dict[str, list[float]] = {
        "rounds": [int(row["round"]) for row in rows],
        "megabytes": [megabytes(row) for row in rows],
        "seconds": [row["seconds"] for row in rows],
    }
    return Line(name, x, y, low, high, pooled, remarks=remarks)


def _worst(metric: str) -> str:
    return f"worst {metric}"


def _worst_of(row: Mapping[str, Any], metric: str) -> tuple[float, int | None]:
    """The worst value and its client, as the history has them."""
    for name in (metric, f"own_{metric}"):
        if isinstance(client := row.get(f"{name}_worst_client"), int):
            return row[f"{name}_worst"], client
    return math.nan, None


def _called(run: Run) -> dict[int | None, str]:
    """What clients are called, by id."""
    assert run.kept is not None
    named: dict[int | None, str] = {i: f"client {i}" for i in run.kept.ids.tolist()}
    if isinstance(run.fed, Federation) and run.fed.names is not None:
        named |= dict(zip(run.fed.ids.tolist(), run.fed.names, strict=True))
    return named


def _scores(run: Run, score: str) -> dict[str, float]:
    """By client; nothing where it was not kept and cannot be measured here."""
    frame = _frame(run)
    if frame is None or score not in frame:
        return {}
    names = frame["name"] if "name" in frame else [f"client {i}" for i in frame["client"]]
    pairs = zip(names, frame[score].tolist(), strict=True)
    return {str(name): value for name, value in pairs if value == value}


def table(run: Run, most: int) -> tuple[list[str], list[list[str]]] | None:
    """The scores of the first clients after the last round, as headings and rows."""
    frame = _frame(run)
    if frame is None or frame.empty:
        return None
    rows = [[_cell(v) for v in row] for row in frame[:most].itertuples(index=False)]
    return [c.replace("_", " ") for c in frame.columns], rows


def _frame(run: Run) -> pd.DataFrame | None:
    if run.kept is None and not isinstance(run.fed, Federation):
        return None
    try:
        return run.per_client()
    except FoedusError:
        return None


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return written(value, "metric" if isinstance(value, float) else "count")
