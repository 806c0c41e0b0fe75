"""Figures of the papers as charts of a page, with the values of each point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from foedus.papers.figures import label_of, names_of, rows_of
from foedus.papers.item import Bars, Circles, Found, Lines, View
from foedus.report import charts


def charts_of(view: View, found: Found) -> list[charts.Chart]:
    """The charts of a view; none of a table and of images."""
    frame = rows_of(view, found)
    if frame.empty:
        return []
    if isinstance(view, Lines):
        return [_lines(view, frame)]
    if isinstance(view, Bars):
        means = frame.groupby([view.x, view.bar])[view.y].mean()
        groups, bars = names_of(frame, view.x), names_of(frame, view.bar)
        title = view.caption or view.y
        return [_cells(title, view.y, groups, bars, means, (view.x, view.bar))]
    if isinstance(view, Circles):
        return [*_circles(view, frame)]
    return []


def _lines(view: Lines, frame: pd.DataFrame) -> charts.Lines:
    """All panels in one chart, of which the reader chooses one."""
    panels = names_of(frame, view.panel) if view.panel else [None]
    keys = {panel: f"y{i}" for i, panel in enumerate(panels)}
    labels = {"x": view.x}
    for panel, key in keys.items():
        where = "" if panel is None else f", {label_of(str(view.panel), panel)}"
        labels[key] = f"{view.y}{where}"
    drawn = [
        _line(view, frame[frame[view.line] == line], label_of(view.line, line), keys)
        for line in names_of(frame, view.line)
    ]
    log = ["x"] * ("x" in view.log) + [*keys.values()] * ("y" in view.log)
    title = view.caption or f"{view.y} by {view.x}"
    return charts.Lines(title, "", [line for line in drawn if line.y], labels, log=log)


def _line(view: Lines, own: pd.DataFrame, name: str, keys: dict[Any, str]) -> charts.Line:
    """Means over seeds, with the least and the largest."""
    own = own.dropna(subset=[view.y])
    places = [*np.sort(own[view.x].unique())]
    y: dict[str, list[float]] = {}
    low: dict[str, list[float]] = {}
    high: dict[str, list[float]] = {}
    for panel, key in keys.items():
        part = own if panel is None else own[own[view.panel] == panel]
        if part.empty:
            continue
        values = part.groupby(view.x)[view.y].agg(["mean", "min", "max"]).reindex(places)
        y[key] = values["mean"].tolist()
        if part["seed"].nunique() > 1:
            low[key], high[key] = values["min"].tolist(), values["max"].tolist()
    return charts.Line(name, {"x": [p.item() for p in places]}, y, low, high)


def _cells(
    title: str, label: str, rows: list[Any], columns: list[Any], values: pd.Series,
    axes: tuple[str, str],
) -> charts.Cells:  # fmt: skip
    table = [[float(values.get((r, c), np.nan)) for c in columns] for r in rows]
    limits = (float(np.nanmin(table)), float(np.nanmax(table)))
    names = [str(r) for r in rows], [str(c) for c in columns]
    return charts.Cells(title, "", label, *names, table, axes, limits)


def _circles(view: Circles, frame: pd.DataFrame) -> Iterator[charts.Chart]:
    frame = frame[frame["seed"] == frame["seed"].min()]
    rows, columns = ([*np.sort(frame[c].unique())] for c in (view.x, view.y))
    for panel in names_of(frame, view.panel):
        sums = frame[frame[view.panel] == panel].groupby([view.x, view.y])[view.count].sum()
        table = [[int(sums.get((r, c), 0)) for c in columns] for r in rows]
        names, axes = ([str(r) for r in rows], [str(c) for c in columns]), (view.x, view.y)
        yield charts.Cells(str(panel), "", view.count, *names, table, axes)
