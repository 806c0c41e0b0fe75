"""Charts of a page: what they show as plain values, and the <figure> that shows it.

A figure holds its data as JSON and a static SVG. Where JavaScript runs, `static/charts.js` draws
the data with Observable Plot and hides the SVG; without JavaScript, and in print, the SVG stays.
Observable Plot was chosen over uPlot, which is a tenth of its size, because SVG marks follow the
page's colors, can be printed and read by a test, and bars, dots and cells come with it.

Example:
    >>> line = Line("FedAvg", {"rounds": [0, 1, 2]}, {"accuracy": [0.1, 0.5, 0.7]})
    >>> chart = Lines("Accuracy", "", [line], {"rounds": "round", "accuracy": "accuracy"})
    >>> figure(chart).startswith('<figure class="chart"')
    True
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

Values = Mapping[str, Sequence[float]]
"""Numbers by the name of what they measure, NaN (or None) where there is none."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Args:
        name: What the legend calls it.
        x: Positions on each axis that the reader may choose: rounds, megabytes, seconds.
        y: Values by metric, as many as positions.
        low: Lower ends of the band around the line, for metrics that have one.
        high: Upper ends of the band.
        reference: Whether it is only a reference, such as pooled data: dark and thin.
        note: A remark for the legend, such as "diverged".
        remarks: For metrics that have some, what to show beside each value.
    """

    name: str
    x: Values
    y: Values
    low: Values = field(default_factory=dict)
    high: Values = field(default_factory=dict)
    reference: bool = False
    note: str = ""
    remarks: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lines:
    """Lines that the reader can hide, on axes that the reader can choose.

    A line whose positions are all the same, because it sends nothing or does not depend on x, is
    drawn as a level, unless `levels` is False.

    Args:
        title: A few words.
        caption: What is drawn, and how it was measured.
        lines: At least one.
        labels: What the axes are called, by names in `x` and `y`; the first are shown at first.
        target: A level of the first metric.
        close_up: Limits of the first metric, between which the reader may look closer.
        log: Names of axes that are logarithmic at first; "megabytes" is where it ranges widely.
        levels: Whether a line with a single position is drawn as a level.
    """

    title: str
    caption: str
    lines: Sequence[Line]
    labels: Mapping[str, str]
    target: float | None = None
    close_up: tuple[float, float] | None = None
    log: Sequence[str] = ()
    levels: bool = True

    @property
    def axes(self) -> tuple[list[str], list[str]]:
        """The names of x axes and of metrics that some line has."""
        x = {k for line in self.lines for k in line.x}
        y = {k for line in self.lines for k in line.y}
        return [k for k in self.labels if k in x], [k for k in self.labels if k in y]


@dataclass(frozen=True)
class Bar:
    """A bar of a chart; a note is a remark beside its value."""

    name: str
    value: float
    note: str = ""
    reference: bool = False


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, each with its value.

    Args:
        title: A few words.
        caption: What is drawn, and how it was measured.
        label: What the axis is called.
        bars: From top to bottom.
        log: Whether the axis is logarithmic at first.
        level: A value to compare all bars with, and its name.
    """

    title: str
    caption: str
    label: str
    bars: Sequence[Bar]
    log: bool = False
    level: tuple[str, float] | None = None


@dataclass(frozen=True)
class Dots:
    """A dot for each member of each group, with its 10 %, 50 % and 90 % quantiles.

    Args:
        title: A few words.
        caption: What is drawn, and how it was measured.
        label: What the axis is called.
        groups: Values of the members, such as clients, by group, such as algorithm.
        lowest: Whether the member of each group that is named is the lowest, not the highest.
        named: What that member is: "worst" or "best".
        references: Groups that are only references.
    """

    title: str
    caption: str
    label: str
    groups: Mapping[str, Mapping[str, float]]
    lowest: bool = True
    named: str = "worst"
    references: Sequence[str] = ()


@dataclass(frozen=True)
class Cells:
    """A table of numbers as colors: who holds how many rows of which label, who is like whom.

    Args:
        title: A few words.
        caption: What is drawn, and how it was measured.
        label: What the numbers are.
        rows: Names of the rows.
        columns: Names of the columns.
        values: A list for each row; NaN where there is none.
        axes: What rows and columns are, such as ("client", "label").
        limits: Values of the first and the last color; by default the least and the largest.
            Limits of both signs get colors that diverge from zero.
    """

    title: str
    caption: str
    label: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    axes: tuple[str, str]
    limits: tuple[float, float] | None = None


Chart = Lines | Bars | Dots | Cells


def figure(
    chart: Chart, names: Sequence[str] = (), static: Sequence[str | None] | None = None
) -> Markup:
    """A chart as a <figure> for a page that extends base.html.j2.

    Args:
        chart: What to show.
        names: Lines or groups of the whole page, in order, so that each of them looks the same in
            all charts; by default those of this chart.
        static: SVG that shows the same without JavaScript; by default it is drawn here.
    """
    from foedus.report import drawings, html, plots

    looks = plots.styles(*_named(chart, names))
    data = as_json({**as_data(chart), "looks": {k: v.for_page() for k, v in looks.items()}})
    prefix = f"c{hashlib.sha256(data.encode()).hexdigest()[:8]}"
    drawn = drawings.draw(chart, looks, prefix) if static is None else static
    macro = html.macro("charts.html.j2", "figure")
    return Markup(macro(chart.title, chart.caption, Markup(data), [Markup(s) for s in drawn if s]))


def as_data(chart: Chart) -> dict[str, Any]:
    """What JavaScript draws from: the fields of the chart, what kind it is, how numbers look."""
    values: dict[str, list[Any]]
    if isinstance(chart, Lines):
        x, y = chart.axes
        values = {
            n: [v for line in chart.lines for v in {**line.x, **line.y}.get(n, ())]
            for n in (*x, *y)
        }
        log = [*chart.log, *(["megabytes"] if wide(values.get("megabytes", [])) else [])]
        axes = {"axes": {"x": x, "y": y}, "forms": _forms(values)}
        return {**asdict(chart), **axes, "kind": "lines", "log": log}
    if isinstance(chart, Bars):
        values = {"value": [b.value for b in chart.bars]}
    elif isinstance(chart, Dots):
        values = {"value": [v for group in chart.groups.values() for v in group.values()]}
        groups = [
            {"name": g, "members": [*map(str, of)], "values": [*of.values()], **summary(of, chart)}
            for g, of in chart.groups.items()
        ]
        found = {**asdict(chart), "groups": groups}
        return {**found, "kind": "dots", "forms": _forms(values)}
    else:
        values = {"value": [v for row in chart.values for v in row]}
    return {**asdict(chart), "kind": type(chart).__name__.lower(), "forms": _forms(values)}


def summary(members: Mapping[str, float], chart: Dots) -> dict[str, Any]:
    """Quantiles of a group, and its worst (or best) member; nothing where no value is finite."""
    finite = {str(k): float(v) for k, v in members.items() if v is not None and math.isfinite(v)}
    if not finite:
        return {"quantiles": [], "extreme": None}
    extreme = (min if chart.lowest else max)(finite, key=lambda k: finite[k])
    return {
        "quantiles": np.quantile([*finite.values()], [0.1, 0.5, 0.9]).tolist(),
        "extreme": extreme,
    }


def wide(values: Sequence[float]) -> bool:
    """Whether positive values range over more than one and a half powers of ten."""
    positive = [v for v in values if v is not None and v > 0 and math.isfinite(v)]
    return bool(positive) and math.log10(max(positive) / min(positive)) > 1.5


def _named(chart: Chart, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """All names that need a look, and which of them are references."""
    if isinstance(chart, Lines):
        own = [line.name for line in chart.lines]
        return [*dict.fromkeys([*names, *own])], [k.name for k in chart.lines if k.reference]
    if isinstance(chart, Dots):
        return [*dict.fromkeys([*names, *chart.groups])], list(chart.references)
    return ["bars", "reference"], ["reference"]


def _forms(values: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """How numbers of each name are written; see `written`."""
    return {name: _form(name, of) for name, of in values.items()}


def _form(name: str, values: Sequence[Any]) -> str:
    if name in ("megabytes", "seconds"):
        return "cost"
    integers = all(isinstance(v, int | np.integer) for v in values if v is not None)
    return "count" if integers else "metric"


def written(value: float, form: str) -> str:
    """A number as tables and tooltips write it; charts.js has the same function."""
    from foedus.report.text import digits, number

    if value is None or not math.isfinite(value):
        return "–"
    if form == "count":
        return f"{value:,.0f}"
    if form == "cost":
        return number(value)
    return digits(value, value) if value == 0 or abs(value) >= 0.00095 else f"{value:.2e}"


def as_json(data: Any) -> str:
    """JSON that may stand in a <script>: nothing in it can end the element or start another."""
    text = json.dumps(_plain(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    """Values that JSON knows; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
