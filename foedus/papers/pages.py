"""Stored results as HTML pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foedus.papers.charts import charts_of
from foedus.papers.figures import pictures
from foedus.papers.item import Table
from foedus.papers.markdown import made_with, minutes
from foedus.papers.results import Result, count, numeric, settings_of, stored, table_of
from foedus.papers.runner import PAPERS, paper

_PLURAL = {"holds": "hold", "does not hold": "do not hold", "not measured": "not measured"}


def write_pages(folder: Path) -> list[Path]:
    """One self-contained page for each paper of which something is stored, and an index of them."""
    from foedus.report.html import render, write_page

    written, every = [], []
    for name in PAPERS:
        results = [r for key in paper(name).items if (r := stored(folder, name, key)) is not None]
        if not results:
            continue
        text = render(
            "paper.html.j2",
            title=f"{paper(name).family}: {paper(name).title}",
            subtitle="The paper's numbers and ours.",
            results=[(r, list(_views(r))) for r in results],
            numeric=numeric,
            settings_of=settings_of,
            made_with=made_with,
        )
        written.append(write_page(folder / f"{name}.html", text))
        every += results
    text = render(
        "papers.html.j2",
        title="Reproduction of the papers",
        subtitle="Every table and figure, and the claims that it supports.",
        results=every,
        plural=_PLURAL,
        minutes=minutes,
        count=count,
    )
    return [*written, write_page(folder / "index.html", text)]


def _views(r: Result) -> Iterator[dict[str, Any]]:
    """Of each view: its figure and table, if any, and its caption."""
    from foedus.report.charts import figure
    from foedus.report.plots import drawing, inline

    drawn = pictures(r)
    with drawing():
        for number, view in enumerate(r.item.views):
            picture = next((f for v, f in drawn if v is view), None)
            svg = None if picture is None else inline(picture, f"{r.name} {r.key} {number}")
            live = charts_of(view, r.found)
            yield {
                "svg": None if live else svg,
                "charts": [figure(c, static=[svg] * (i == 0)) for i, c in enumerate(live)],
                "table": table_of(view, r.found),
                "is_table": isinstance(view, Table),
                "caption": view.caption,
            }
