"""Figures of the papers, drawn from stored results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from foedus.papers.item import Bars, Circles, Found, Images, Lines, Table, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from foedus.papers.results import Result, key_of, plain

BANDS = 4
"""The largest number of lines that have bands; more bands would cover the lines."""


def figure_of(view: View, found: Found) -> Figure | None:
    """A figure in the style of the paper's; None for tables."""
    frame = rows_of(view, found)
    if frame.empty:
        return None
    draw: dict[type, Callable[[Any, pd.DataFrame], Figure]]
    draw = {Lines: _lines, Bars: _bars, Circles: _circles, Images: _images}
    return draw[type(view)](view, frame)


def rows_of(view: View, found: Found) -> pd.DataFrame:
    """The rows that a view draws: none for a table."""
    if isinstance(view, Table):
        return pd.DataFrame()
    return view.select(found.frame) if isinstance(view, Lines | Bars) else found.frame


def _panels(
    count: int, columns: int, width: float = 3.4, height: float = 2.7
) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.6, width * columns), height * rows + 0.5), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for place in places[count:]:
        place.set_visible(False)
    return figure, places


def names_of(frame: pd.DataFrame, column: str) -> list[Any]:
    return [key_of(v) for v in dict.fromkeys(frame[column])]


def label_of(column: str, value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return f"{column}: {plain(value)}"
    number = isinstance(value, int | float | np.number)
    return f"{column} = {plain(value)}" if number else plain(value)


def _lines(view: Lines, frame: pd.DataFrame) -> Figure:
    from foedus.report.plots import log_axis, styles

    panels = names_of(frame, view.panel) if view.panel else [None]
    lines = names_of(frame, view.line)
    look = styles([str(v) for v in lines], pooled=["KRR", "auto"])
    figure, places = _panels(len(panels), view.columns)
    for place, panel in zip(places, panels, strict=False):
        part = frame if panel is None else frame[frame[view.panel] == panel]
        for line in lines:
            own = part[part[view.line] == line].dropna(subset=[view.y])
            own = own[own[view.x] > 0] if "x" in view.log else own
            if own.empty:
                continue
            grouped = own.groupby(view.x)[view.y]
            mean, style = grouped.mean(), look[str(line)]
            drawn = {"color": style.colour, "linestyle": style.dash, "linewidth": 1.4}
            drawn["label"] = label_of(view.line, line)
            if len(mean) == 1 and part[view.x].nunique() > 1:  # it does not depend on x
                place.axhline(mean.iloc[0], **drawn)
                continue
            marker = {"marker": style.marker, "markersize": 3.5} if len(mean) <= 12 else {}
            place.plot(mean.index, mean, **drawn, **marker)
            if len(lines) > BANDS:
                continue
            if own["seed"].nunique() > 1:
                low, high = grouped.min(), grouped.max()
            elif (inside := f"{view.y} spread") in own:
                error = own.groupby(view.x)[inside].mean()
                low, high = mean - error, mean + error
            else:
                continue
            place.fill_between(mean.index, low, high, color=style.colour, alpha=0.12, linewidth=0)
        title = label_of(view.panel, panel) if view.panel else ""
        place.set(xlabel=view.x, ylabel=view.y, title=title)
        for axis in view.log:
            log_axis(place, axis)
        if view.limits:
            place.set_ylim(*view.limits(part))
    handles: dict[str, Any] = {}
    for place in places:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    _legend(figure, min(6, max(2, 2 * len(panels))), handles.values(), handles)
    return figure


def _legend(figure: Figure, columns: int, *entries: Iterable[Any]) -> None:
    where = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 8}
    figure.legend(*map(list, entries), **where)


def _bars(view: Bars, frame: pd.DataFrame) -> Figure:
    from foedus.report.plots import styles

    groups, bars = names_of(frame, view.x), names_of(frame, view.bar)
    look = styles([str(b) for b in bars])
    figure, (place,) = _panels(1, 1, width=9.0, height=3.2)
    means, width = frame.groupby([view.x, view.bar])[view.y].mean(), 0.8 / len(bars)
    for k, bar in enumerate(bars):
        heights = [means.get((g, bar), np.nan) for g in groups]
        middle = np.arange(len(groups)) + width * (k - (len(bars) - 1) / 2)
        place.bar(middle, heights, width, color=look[str(bar)].colour, label=str(bar))
    place.set_xticks(range(len(groups)), [str(g) for g in groups])
    place.set(ylabel=view.y, ylim=(view.low, None))
    _legend(figure, len(bars))
    return figure


def _circles(view: Circles, frame: pd.DataFrame) -> Figure:
    panels = names_of(frame, view.panel)
    figure, places = _panels(len(panels), 2, width=4.4)
    for place, panel in zip(places, panels, strict=True):
        part = frame[(frame[view.panel] == panel) & (frame["seed"] == frame["seed"].min())]
        size = 400 * part[view.count] / frame[view.count].max()
        place.scatter(part[view.x], part[view.y], s=size, color="#0072B2", alpha=0.8)
        place.set(xlabel=view.x, ylabel=view.y, title=str(panel))
        place.set_xticks(sorted(part[view.x].unique()))
        place.set_yticks(sorted(part[view.y].unique()))
        place.margins(0.12)
    return figure


def _images(view: Images, frame: pd.DataFrame) -> Figure:
    shown = frame[frame[view.image].notna()]
    rows, names = names_of(shown, view.row), names_of(shown, view.name)
    figure, places = _panels(len(rows) * len(names), len(names), width=1.6, height=1.6)
    for place, (row, name) in zip(places, [(r, n) for r in rows for n in names], strict=True):
        cell = shown[(shown[view.row] == row) & (shown[view.name] == name)]
        image = np.asarray(cell[view.image].iloc[0], dtype=float).squeeze() / 255
        place.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        place.set(xticks=[], yticks=[])
        place.set_title(str(name), fontsize=8)
        place.grid(visible=False)
    return figure


def pictures(result: Result) -> list[tuple[View, Figure]]:
    """The pictures of an item, each with what it is of."""
    from foedus.report.plots import drawing

    with drawing():
        drawn = [(view, figure_of(view, result.found)) for view in drawn_views(result)]
    return [(view, figure) for view, figure in drawn if figure is not None]


def drawn_views(result: Result) -> list[View]:
    return [v for v in result.item.views if not rows_of(v, result.found).empty]


def file_of(result: Result, number: int) -> str:
    """fedfw-figure2.svg, fedfw-figure2-2.svg, ..."""
    return f"{result.name}-{result.key}{f'-{number}' if number > 1 else ''}.svg"


def write_pictures(result: Result, folder: Path) -> None:
    """As SVG files."""
    from foedus.report.plots import drawing

    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        for number, (_, figure) in enumerate(pictures(result), start=1):
            figure.savefig(folder / file_of(result, number), metadata={"Date": None})
