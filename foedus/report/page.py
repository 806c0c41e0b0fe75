"""The page of a comparison: one HTML file that needs nothing else, on a desk and on a phone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from foedus.core.describe import flatten
from foedus.report import html, plots
from foedus.report.compare import Comparison, Curve, words


def render(comparison: Comparison, title: str | None = None) -> str:
    """The page as text."""
    fed = comparison.fed
    pooled = [n for n in comparison.runs if comparison.is_pooled(n)]
    style = plots.styles(list(comparison.runs), pooled)
    (headings, rows), settings = comparison.cells(), _settings(comparison)
    metrics = [c for c in (comparison.metric, comparison.own_metric, "loss") if c]
    data = comparison.federation_settings().get("data", "saved runs")
    headings_of_runs = ["algorithm", "seed", "rounds", *map(words, metrics)]
    headings_of_runs += ["MB up", "MB down", "seconds", "end"]
    return html.render(
        "comparison.html.j2",
        title=title or f"Comparison on {data}",
        subtitle=comparison.title(),
        comparison=comparison,
        several=_several(comparison),
        words=words,
        headings=headings,
        rows=rows,
        best=comparison.best,
        style=style,
        curves=list(_curves(comparison, comparison.curves(), style)),
        fed=fed,
        partition=fed and plots.partition(fed),
        division=_division(comparison),
        settings=settings,
        differing=[key for key, *values in settings if len(set(values)) > 1 and key != "type"],
        run_headings=headings_of_runs,
        runs=list(_runs(comparison, metrics)),
        versions=html.versions(),
    )


def _several(comparison: Comparison) -> bool:
    """Whether an algorithm has run with more than one seed."""
    return max(len(runs) for runs in comparison.runs.values()) > 1


def _curves(
    comparison: Comparison, series: Sequence[Curve], style: dict[str, plots.Style]
) -> Iterator[tuple[str, str]]:
    """The figures, each with its caption."""
    if not series:
        return
    metric, target = comparison.metric, comparison.target
    name = words(metric)[:1].upper() + words(metric)[1:]

    def drawn(against: str, **options: Any) -> str:
        return plots.curves(series, against, metric, style, target=target, **options)

    band = " Lines are means over seeds, bands reach from the least to the largest seed."
    band = band if _several(comparison) else ""
    yield drawn("rounds"), f"{name} after each round.{band}"
    if (limits := _close_up(comparison, series)) is not None:
        yield drawn("rounds", limits=limits), "The same, close up around the target and the best."
    if any(c.megabytes[-1] > 0 for c in series):
        silent = any(c.megabytes[-1] == 0 for c in series)
        level = " A level line shows the last value of what sends nothing." if silent else ""
        caption = f"{name} for what has been sent, by all clients and to them.{level}"
        yield drawn("megabytes"), caption
    if any(c.seconds[-1] > 0 for c in series):
        yield drawn("seconds"), f"{name} for the time spent computing, evaluation left out."


def _close_up(comparison: Comparison, series: Sequence[Curve]) -> tuple[float, float] | None:
    """Limits that show the end of the race, where the whole range hides it."""
    whole = [v for c in series for v in (*c.low, *c.high)]
    ends = [c.mean[-1] for c in series]
    best = max(ends) if comparison.higher_is_better else min(ends)
    if comparison.target is None or not math.isfinite(comparison.target):
        return None
    margin = best - comparison.target
    if (margin <= 0) == comparison.higher_is_better or abs(margin) * 5 > max(whole) - min(whole):
        return None
    limits = (comparison.target - margin, best + 0.5 * margin)
    return (min(limits), min(max(limits), 1.0) if comparison.higher_is_better else max(limits))


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
