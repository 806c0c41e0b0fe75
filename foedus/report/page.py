"""The page of a comparison: one HTML file that needs nothing else, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from foedus.core.describe import flatten
from foedus.data.federation import Federation
from foedus.errors import FoedusError
from foedus.report import charts, curves, html, plots
from foedus.report.compare import Comparison, words

if TYPE_CHECKING:
    from foedus.core.result import Run


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
    drawn = (curves.chart(comparison), clients(comparison))
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
        looks={k: s.for_page() for k, s in plots.styles(names, pooled).items()},
        charts=[charts.figure(c, names) for c in drawn if c is not None],
        fed=fed,
        partition=fed and holdings(fed),
        division=_division(comparison),
        differing=differing,
        alike=[[row[0], row[1]] for row in settings if row not in differing],
        run_headings=headings_of_runs,
        runs=list(_runs(comparison, metrics)),
        versions=html.versions(),
    )


def _several(comparison: Comparison) -> bool:
    """Whether an algorithm has run with more than one seed."""
    return max(len(runs) for runs in comparison.runs.values()) > 1


# Clients


def clients(comparison: Comparison) -> charts.Dots | None:
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
    if _several(comparison):
        caption += " Of several seeds, the first."
    return charts.Dots("Clients", caption, label, groups, lowest=comparison.higher_is_better)


def _scores(run: Run, score: str) -> dict[str, float]:
    """By client; nothing where it was not kept and cannot be measured here."""
    if run.kept is None and not isinstance(run.fed, Federation):
        return {}
    try:
        frame = run.per_client()
    except FoedusError:
        return {}
    names = frame["name"] if "name" in frame else [f"client {i}" for i in frame["client"]]
    if score not in frame:
        return {}
    pairs = zip(names, frame[score].tolist(), strict=True)
    return {str(name): value for name, value in pairs if value == value}


# The data and its division


def holdings(fed: Federation) -> Markup:
    """Who holds what: rows by label, or the targets of each client."""
    if fed.data.classes is None:
        return html.macro("macros.html.j2", "picture")(plots.targets(fed), _TARGETS)
    counts = fed.label_counts()
    names = [*map(str, fed.data.class_names or range(fed.data.classes))]
    rows = [*map(str, fed.called)]
    kind = "steps" if fed.data.spec.steps else "rows"
    title, caption = "Who holds what", f"Training {kind} of each client, by label."
    chart = charts.Cells(title, caption, f"training {kind}", rows, names, counts.tolist(), _AXES)
    return charts.figure(chart)


_AXES = ("client", "label")
_TARGETS = "Targets of the training rows of each client."


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
