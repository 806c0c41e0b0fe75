"""The page of a comparison or a run: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from foedus.core.describe import flatten
from foedus.core.history import COSTS
from foedus.report import charts, clients, curves, holdings, html, plots, reproduction
from foedus.report.compare import Comparison, words

if TYPE_CHECKING:
    from foedus.core.result import Run

_MOST = 1000
"""Rounds, or clients, that are listed."""


def render(comparison: Comparison, title: str | None = None) -> str:
    """The page as text."""
    fed, names = comparison.fed, list(comparison.runs)
    pooled = [n for n in names if comparison.is_pooled(n)]
    (headings, rows), settings = comparison.cells(), _settings(comparison)
    metrics = [c for c in (comparison.metric, comparison.own_metric, "loss") if c]
    data = comparison.federation_settings().get("data", "saved runs")
    headings_of_runs = ["algorithm", "seed", "rounds", *map(words, metrics)]
    headings_of_runs += ["MB up", "MB down", "seconds", "end"]
    differing = [row for row in settings if len(set(row[1:])) > 1 and row[0] != "type"]
    drawn = (curves.chart(comparison), clients.by_round(comparison), clients.last(comparison))
    single = comparison.single
    return html.render(
        "comparison.html.j2",
        title=title or f"{f'{names[0]} on' if single else 'Comparison on'} {data}",
        subtitle=comparison.title(),
        comparison=comparison,
        several=comparison.several,
        words=words,
        headings=headings,
        rows=rows,
        best=comparison.best,
        looks={k: s.for_page() for k, s in plots.styles(names, pooled).items()},
        charts=[charts.figure(c, names) for c in drawn if c is not None],
        fed=fed,
        partition=fed and charts.figure(holdings.chart(fed)),
        division=_division(comparison),
        differing=differing,
        alike=[[row[0], row[1]] for row in settings if row not in differing],
        run_headings=headings_of_runs,
        runs=list(_runs(comparison, metrics)),
        history=single and _history(single),
        scores=single and clients.table(single, _MOST),
        notes=_notes(comparison),
        again=reproduction.of_comparison(comparison),
        versions=html.versions(),
    )


# The data and its division


def _division(comparison: Comparison) -> list[tuple[str, str]]:
    """How the data was divided: names and values."""
    fed, recorded = comparison.fed, flatten(comparison.federation_settings())
    plain = {k: v for k, v in recorded.items() if k and not k.startswith("fingerprint.")}
    found = {k.removeprefix("settings."): v for k, v in plain.items()}
    if fed is not None:
        found |= {
            "features": " x ".join(map(str, fed.spec.shape)),
            "classes": fed.data.classes if fed.data.classes else "none (regression)",
            "test rows": len(fed.data.x_test),
            "scaling": fed.data.scaling,
            "rows of a client": f"{fed.sizes.min()} to {fed.sizes.max()}",
        }
    return [(k, _value(v)) for k, v in found.items()]


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


# Settings and runs


def _settings(comparison: Comparison) -> list[list[str]]:
    """A row a setting: its name, and its value of every algorithm."""
    columns = []
    for runs in comparison.runs.values():
        recorded = runs[0].settings
        shared = {k: v for k, v in recorded.items() if k not in ("algorithm", "federation", "seed")}
        rounds = max(len(r.records) - 1 for r in runs)
        seeds = [r.settings.get("seed") for r in runs]
        named = flatten(recorded.get("algorithm", {})) | flatten(shared)
        columns.append(named | {"rounds": rounds, "seeds": seeds})
    keys = dict.fromkeys(k for c in columns for k in c if k)
    return [[key, *(_value(c[key]) if key in c else "–" for c in columns)] for key in keys]


def _history(run: Run) -> tuple[list[str], list[list[str]]]:
    """Every round as headings and rows; of very many rounds the last."""
    columns, rows = run.records.columns, run.records.rows[-_MOST:]
    counted = {c: "count" for c in COSTS if c != "seconds"} | {"seconds": "cost"}
    forms = {c: counted.get(c, "count" if c.endswith("_client") else "metric") for c in columns}
    body = [[_shown(row.get(c), forms[c]) for c in columns] for row in rows]
    return [c.replace("_", " ") for c in columns], body


def _shown(value: Any, form: str) -> str:
    """A value of a history; a loaded one may hold texts."""
    return charts.written(value, form) if isinstance(value, int | float) else str(value or "–")


def _notes(comparison: Comparison) -> list[str]:
    """What the runs noted, each with who did."""
    found: dict[str, list[str]] = {}
    for name, runs in comparison.runs.items():
        for run in runs:
            for note in run.notes:
                who = found.setdefault(note, [])
                who += [] if name in who else [name]
    every = len(comparison.runs)
    return [note if len(w) == every else f"{', '.join(w)}: {note}" for note, w in found.items()]


def _runs(comparison: Comparison, metrics: Sequence[str]) -> Iterator[list[Any]]:
    """A row a run."""
    for name, runs in comparison.runs.items():
        for i, run in enumerate(runs):
            last = run.records.last
            cells = [name, run.settings.get("seed"), len(run.records) - 1]
            cells += [f"{last(c):.4f}" for c in metrics]
            cells += [f"{last(c) / 1e6:,.3f}" for c in ("bytes_up", "bytes_down")]
            end = "diverged" if i in comparison.diverged.get(name, {}) else "finished"
            cells += [f"{last('seconds'):.2f}", end]
            yield ["–" if c == "nan" else c for c in cells]
