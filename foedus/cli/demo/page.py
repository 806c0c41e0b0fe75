"""What `foedus demo` prints while it works, and its page."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from foedus.cli.demo.sections import Section
from foedus.report import charts, clients, holdings, html
from foedus.report.text import Grid, number, plain

HEADINGS = ["method", "example", "accuracy", "rounds", "MB", "seconds"]
BY_HAND = (
    "The settings were chosen by hand, looking at the same test rows: this shows what each method "
    "does, not which is best."
)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A line with what is being computed and for how long; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(what)
        yield


def show(section: Section) -> None:
    """Print the sentence of a section, and the table of a comparison."""
    typer.secho(section.title, bold=True)
    _wrapped(section.claim.text, indent="  ", color=None if section.claim.holds else "red")
    if section.comparison is not None:
        typer.echo("")
        _print(section.comparison)
    typer.echo("")


def show_summary(sections: Sequence[Section]) -> None:
    """Print the summary of all sections."""
    options = {"padding": (0, 1, 0, 0), "show_edge": False}
    _print(Grid(HEADINGS, summary(sections), HEADINGS[:2], options))
    for note in notes(sections):
        _wrapped(note)


def _wrapped(text: str, indent: str = "", color: str | None = None) -> None:
    width = min(shutil.get_terminal_size().columns, 100)
    lines = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
    typer.secho(lines, fg=color)


def _print(table: Any) -> None:
    """A table for rich, which fits it to a terminal."""
    if sys.stdout.isatty():
        Console().print(table)
    else:
        typer.echo(plain(table))


def summary(sections: Sequence[Section]) -> list[list[str]]:
    """A row for each run: texts below `HEADINGS`."""
    return [
        [
            row.method, section.name, f"{row.score:.3f}", str(row.rounds), number(row.megabytes),
            number(row.seconds),
        ]
        for section in sections
        for row in section.rows
    ]  # fmt: skip


def notes(sections: Sequence[Section]) -> list[str]:
    """What one has to know about the summary."""
    own = [f"{s.name}: {s.score}." for s in sections if s.score != "accuracy"]
    return ["MB: 10^6 bytes as encoded, up and down. Seconds: of computing.", *own, BY_HAND]


def write(path: Path, sections: Sequence[Section], seed: int) -> Path:
    """Write the page."""
    text = html.render(
        "demo.html.j2",
        title="foedus demo: federated learning beyond averaging",
        subtitle="Each family at what averaging cannot do, on data that scikit-learn brings along; "
        f"seed {seed}.",
        sections=[(section, _figures(section)) for section in sections],
        own={section.name: _own_table(section) for section in sections},
        headings=HEADINGS,
        rows=summary(sections),
        notes=notes(sections),
        versions=html.versions(),
    )
    return html.write_page(path, text)


def write_numbers(path: Path, sections: Sequence[Section], seed: int) -> Path:
    """Write the sentences, pictures and rows of the page as JSON, for other programs."""
    numbers = {
        section.name: {
            "sentence": section.claim.text,
            "holds": section.claim.holds,
            "score": section.score,
            "picture": _finite(asdict(section.chart)),
            "rows": [_finite(asdict(row)) for row in section.rows],
        }
        for section in sections
    }
    return html.write_page(path, json.dumps({"seed": seed, "sections": numbers}) + "\n")


def _finite(value: Any) -> Any:
    """With `None` in place of NaN, for which JSON has no name, and six digits of other numbers."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _own_table(section: Section) -> tuple[list[str], list[list[str]]]:
    """The table beside the picture: that of a comparison, or the section's part of the summary."""
    if section.comparison is not None:
        return section.comparison.cells()
    headings = ["method", section.score, *HEADINGS[3:]]
    return headings, [[method, *rest] for method, _, *rest in summary([section])]


def _figures(section: Section) -> list[str]:
    """The picture of a section; of a comparison also its clients, and who holds what."""
    comparison = section.comparison
    if comparison is None or comparison.fed is None:
        return [charts.figure(section.chart)]
    names = list(comparison.runs)
    drawn = (section.chart, clients.last(comparison))
    shown = [charts.figure(chart, names) for chart in drawn if chart is not None]
    return [*shown, charts.figure(holdings.chart(comparison.fed))]
