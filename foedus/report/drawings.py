"""Charts as static pictures, by matplotlib: for print, and where JavaScript does not run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foedus.report.charts import Bars, Cells, Chart, Dots, Line, Lines, as_data, summary, written
from foedus.report.plots import COLORS, DASHES, Style, blank, drawing, inline, log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Looks = Mapping[str, Style]

_MARKS = 7  # markers on a line, about
_MANY = 40  # more rows than this have no name of their own
_GREY = "#999999"


def draw(chart: Chart, looks: Looks, prefix: str) -> list[str]:
    """Inline SVG: of lines one for each x axis and one close up, otherwise one."""
    if not isinstance(chart, Lines):
        return [_picture(chart, looks, chart.title, prefix)]
    drawn, (xs, (metric, *_)) = [], chart.axes
    for i, x in enumerate(xs):
        label = f"{chart.labels[metric]} against {chart.labels[x]}"
        drawn.append(_picture(chart, looks, label, f"{prefix}-{i}", x=x))
        if i == 0 and chart.close_up is not None:
            close: dict[str, Any] = {"x": x, "limits": chart.close_up}
            drawn.append(_picture(chart, looks, f"close-up of {label}", f"{prefix}-c", **close))
    return drawn


def _picture(chart: Chart, looks: Looks, label: str, prefix: str, **options: Any) -> str:
    with drawing():
        figure, ax = blank(_height(chart))
        panel(ax, chart, looks, **options)
        if isinstance(chart, Lines) and (len(chart.lines) > 1 or chart.lines[0].name):
            longest = max(len(_label(line)) for line in chart.lines)
            figure.legend(
                *ax.get_legend_handles_labels(), loc="outside lower center",
                ncols=max(1, min(3, len(chart.lines), 60 // (8 + longest))), frameon=False,
                handlelength=2.6, columnspacing=1.2, handletextpad=0.5, borderaxespad=0.2,
            )  # fmt: skip
        return inline(figure, label, prefix)


def _height(chart: Chart) -> float:
    if isinstance(chart, Lines):
        return 3.5 + 0.19 * math.ceil(len(chart.lines) / 3)
    rows = {Bars: "bars", Dots: "groups", Cells: "rows"}[type(chart)]
    count = len(getattr(chart, rows))
    return 1.0 + min(6.0, (0.5 if isinstance(chart, Dots) else 0.26) * max(count, 3))


def panel(ax: Axes, chart: Chart, looks: Looks, **options: Any) -> None:
    """Draw a chart on a pair of axes. Options of lines: the x axis, and limits of the metric."""
    if isinstance(chart, Lines):
        _lines(ax, chart, looks, **options)
    elif isinstance(chart, Bars):
        _bars(ax, chart)
    elif isinstance(chart, Dots):
        _dots(ax, chart, looks)
    else:
        _cells(ax, chart)


def _lines(
    ax: Axes, chart: Lines, looks: Looks, x: str, limits: tuple[float, float] | None = None
) -> None:
    metric, data = chart.axes[1][0], as_data(chart)
    widest = max((np.ptp(line.x[x]) for line in chart.lines if x in line.x), default=0.0)
    log_x, log_y = x in data["log"], metric in data["log"]
    for i, line in enumerate(chart.lines):
        if x in line.x and metric in line.y:
            _line(
                ax,
                line,
                i,
                looks[line.name],
                x,
                metric,
                level=chart.levels and widest > 0,
                log=(log_x, log_y),
            )
    for which, log in (("x", log_x), ("y", log_y)):
        if log:
            log_axis(ax, which)
    if data["forms"][x] == "count" and not log_x:
        ax.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    if chart.target is not None:
        ax.axhline(chart.target, color="#777777", linewidth=0.9, zorder=1)
        look: dict[str, Any] = {"va": "bottom", "ha": "right", "fontsize": 8, "color": "#777777"}
        ax.text(0.995, chart.target, "target", transform=ax.get_yaxis_transform(), **look)
    if limits:
        ax.set_ylim(*limits)
    ax.set_xlabel(short(chart.labels[x], 60) + (" (log scale)" if log_x else ""))
    ax.set_ylabel(short(chart.labels[metric], 40))


def _line(
    ax: Axes, line: Line, i: int, style: Style, x: str, metric: str, *, level: bool,
    log: tuple[bool, bool],
) -> None:  # fmt: skip
    places, values = np.asarray(line.x[x], float), np.asarray(line.y[metric], float)
    look: dict[str, Any] = {"color": style.colour, "linestyle": style.dash}
    look |= {"label": _label(line), "zorder": 3 if line.reference else 4}
    look["linewidth"] = 1.2 if line.reference else 1.8
    keep = np.isfinite(places) & np.isfinite(values)
    if keep.any() and level and not np.ptp(places[keep]):
        ax.axhline(values[keep][-1], **look)  # it sends nothing, or does not depend on x
        return
    keep &= (places > 0) | (not log[0])
    keep &= (values > 0) | (not log[1])
    places, values = places[keep], values[keep]
    every = max(1, len(places) // _MARKS)
    # Markers start at different places, or lines that run together would hide each other's.
    ax.plot(places, values, marker=style.marker, markevery=(i * every // 4 % every, every), **look)
    if metric in line.low and metric in line.high:
        low, high = (np.asarray(ends[metric], float)[keep] for ends in (line.low, line.high))
        ax.fill_between(
            places, low, high, color=style.colour, alpha=0.15, linewidth=0, zorder=2
        )  # fmt: skip


def _label(line: Line) -> str:
    return short(line.name) + (f" ({line.note})" if line.note else "")


def short(name: str, limit: int = 28) -> str:
    """A name of at most so many characters, on one line."""
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _bars(ax: Axes, chart: Bars) -> None:
    form, places = as_data(chart)["forms"]["value"], range(len(chart.bars))
    values = [b.value if math.isfinite(b.value) else 0.0 for b in chart.bars]
    ax.barh(places, values, color=[_GREY if b.reference else COLORS[0] for b in chart.bars])
    if chart.log:
        log_axis(ax)
    for i, bar in enumerate(chart.bars):
        note = f" ({short(bar.note)})" if bar.note else ""
        ax.annotate(
            written(bar.value, form) + note, (values[i], i), (3, 0), va="center", fontsize=8,
            textcoords="offset points", ha="left",
        )  # fmt: skip
    if chart.level is not None:
        ax.axvline(chart.level[1], color=COLORS[1], linestyle=DASHES[1], linewidth=1.4)
        ax.set_title(f"dashed: {chart.level[0]}", fontsize=8, loc="right", color=COLORS[1])
    ax.margins(x=0.18)
    _rows(ax, [b.name for b in chart.bars])
    ax.grid(False, axis="y")
    ax.set_xlabel(short(chart.label, 60))


def _rows(ax: Axes, names: Sequence[str]) -> None:
    """Names at the left, from top to bottom."""
    if len(names) <= _MANY:
        size = 9 if len(names) <= 20 else 6
        ax.set_yticks(range(len(names)), [short(n, 24) for n in names], fontsize=size)
    ax.set_ylim(len(names) - 0.5, -0.5)


def _dots(ax: Axes, chart: Dots, looks: Looks) -> None:
    for i, (name, members) in enumerate(chart.groups.items()):
        about = summary(members, chart)
        if about["extreme"] is None:
            continue
        low, middle, high = about["quantiles"]
        ax.plot([low, high], [i, i], color=looks[name].colour, linewidth=7, alpha=0.18)
        ax.plot([middle, middle], [i - 0.2, i + 0.2], color=looks[name].colour, linewidth=2)
        values = np.asarray([*members.values()], float)
        spread = 0.24 * np.sin(2.4 * np.arange(len(values)))  # so that equal values do not hide
        ax.plot(values, i + spread, "o", color=looks[name].colour, markersize=3, alpha=0.7)
        extreme = members[about["extreme"]]
        ax.annotate(
            short(about["extreme"], 16), (extreme, i), (0, 9), textcoords="offset points",
            fontsize=7, ha="left" if chart.lowest else "right",
        )  # fmt: skip
    _rows(ax, [*chart.groups])
    ax.set_xlabel(short(chart.label, 60))


def _cells(ax: Axes, chart: Cells) -> None:
    import matplotlib

    values = np.asarray(chart.values, float)
    finite = values[np.isfinite(values)]
    low, high = chart.limits or (finite.min(initial=0.0), finite.max(initial=0.0))
    colors = matplotlib.colormaps["RdBu" if low < 0 < high else "Blues"]
    image = ax.imshow(
        values, cmap=colors.with_extremes(bad="#bbbbbb"), vmin=low, vmax=high, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    ax.figure.colorbar(image, ax=ax, label=short(chart.label, 40), shrink=0.85)
    _rows(ax, chart.rows)
    if len(chart.columns) <= _MANY:
        upright = len(chart.columns) * max(map(len, chart.columns)) > 60
        look: dict[str, Any] = {"fontsize": 9 if len(chart.columns) <= 20 else 6}
        look["rotation"] = 90 if upright else 0
        ax.set_xticks(range(len(chart.columns)), [short(n, 24) for n in chart.columns], **look)
    ax.grid(False)
    ax.set(ylabel=short(chart.axes[0]), xlabel=short(chart.axes[1]))
