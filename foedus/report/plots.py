"""Figures as inline SVG, through matplotlib's objects: its global state is not touched."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foedus.errors import ConfigError, FoedusError
from foedus.report.compare import Curve, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from foedus.data.federation import Federation

# Okabe and Ito's colours without yellow (too pale on white); dashes and markers differ in grey, too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GAPS = ((5, 1.5), (5, 1.5, 1, 1.5), (2, 1), (8, 2), (1, 1))
DASHES: tuple[Any, ...] = ("-", *((0, gaps) for gaps in _GAPS))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_POOLED = "#333333"

WIDTH = 4.3  # inches: text keeps its size on a phone
_MARKS = 7  # markers on a line, about

_STYLE: dict[Any, Any] = {  # keys are of a long Literal in matplotlib
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.which": "major",
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "path",
    "svg.hashsalt": "foedus",
    "text.usetex": False,
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Style:
    """How one algorithm looks in every figure."""

    colour: str
    dash: Any
    marker: str


def styles(names: Sequence[str], pooled: Sequence[str] = ()) -> dict[str, Style]:
    """A style for each name; those that see pooled data are references, dark and thin."""
    found, i = {}, 0
    for name in names:
        if name in pooled:
            found[name] = Style(_POOLED, (0, (1, 1.2)), "*")
            continue
        # after one turn of the colours the dashes move on: a pair comes again only after 36
        dash = DASHES[(i + i // len(COLORS)) % len(DASHES)]
        found[name] = Style(COLORS[i % len(COLORS)], dash, _MARKERS[i % len(_MARKERS)])
        i += 1
    return found


def curves(
    series: Sequence[Curve],
    against: str,
    metric: str,
    style: dict[str, Style],
    *,
    target: float | None = None,
    limits: tuple[float, float] | None = None,
) -> str:
    """The metric against "rounds", "megabytes" or "seconds": mean over seeds in a band of all."""
    with drawing():
        longest = max(len(_label(c, against)) for c in series)
        columns = max(1, min(3, len(series), 60 // (8 + longest)))
        figure, ax = blank(3.5 + 0.19 * math.ceil(len(series) / columns))
        log = against == "megabytes" and _decades(series) > 1.5
        for i, curve in enumerate(series):
            _draw(ax, curve, i, against, style[curve.name], log)
        if log:
            log_axis(ax)
        elif against == "rounds":
            from matplotlib.ticker import MaxNLocator

            locator = ax.xaxis.get_major_locator()
            assert isinstance(locator, MaxNLocator)  # of a linear axis
            locator.set_params(integer=True)
        if target is not None:
            ax.axhline(target, color="#777777", linewidth=0.9, zorder=1)
            # Curves end on the good side of the target, so its name stands on the other.
            place = "top" if metric.endswith("accuracy") else "bottom"
            look: dict[str, Any] = {"va": place, "ha": "right", "fontsize": 8, "color": "#555555"}
            ax.text(0.995, target, "target", transform=ax.get_yaxis_transform(), **look)
        if limits:
            ax.set_ylim(*limits)
        xlabel = {"rounds": "round", "megabytes": "megabytes sent, up and down"}
        ax.set_xlabel(xlabel.get(against, "seconds of computing") + (" (log scale)" if log else ""))
        rows = "" if metric.startswith("own_") else " on the test set"
        ax.set_ylabel(f"{words(metric)}{rows}")
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False,
            handlelength=2.6, columnspacing=1.2, handletextpad=0.5, borderaxespad=0.2,
        )  # fmt: skip
        label = f"{words(metric)} against {against}"
        return inline(figure, f"close-up of {label}-close" if limits else label)


def _draw(ax: Axes, curve: Curve, i: int, against: str, style: Style, log: bool) -> None:
    x = getattr(curve, against)
    look: dict[str, Any] = {"color": style.colour, "linestyle": style.dash}
    look |= {"label": _label(curve, against), "zorder": 3 if curve.pooled else 4}
    if against == "megabytes" and x[-1] == 0 and not curve.diverged:
        # it sends nothing, so it has no place on this axis: its last value is a level
        ax.axhline(curve.mean[-1], **look, alpha=0.9)
        return
    keep = [k for k, v in enumerate(x) if v > 0] if log else range(len(x))
    x, mean = [x[k] for k in keep], [curve.mean[k] for k in keep]
    every = max(1, len(x) // _MARKS)
    # Markers start at different places, or lines that run together would hide each other's.
    ax.plot(x, mean, marker=style.marker, markevery=(i * every // 4 % every, every), **look)
    low, high = ([values[k] for k in keep] for values in (curve.low, curve.high))
    ax.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0, zorder=2)


def partition(fed: Federation) -> str:
    """Who holds what."""
    with drawing():
        figure, ax = blank(4.0)
        holdings(ax, fed)
        labels, targets = "which client holds which labels", "targets of each client"
        return inline(figure, labels if fed.data.classes else targets)


def holdings(ax: Axes, fed: Federation) -> None:
    fed.plot(ax)
    ax.set_title("")
    ax.grid(False)


def _decades(series: Sequence[Curve]) -> float:
    """Over how many powers of ten the megabytes range, from the first round to the last."""
    sent = [m for c in series for m in c.megabytes if m > 0]
    return math.log10(max(sent) / min(sent)) if sent else 0.0


def log_axis(ax: Axes, which: str = "x") -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    low, high = (math.log10(v) for v in (ax.get_xlim() if which == "x" else ax.get_ylim()))
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high - low < 2.5 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _label(curve: Curve, against: str) -> str:
    silent = " (0 MB)" if against == "megabytes" and curve.megabytes[-1] == 0 else ""
    return _short(curve.name) + (" (diverged)" if curve.diverged else silent)


def _short(name: str, limit: int = 28) -> str:
    name = " ".join(name.split())
    return name if len(name) <= limit else name[: limit - 1] + "…"


def check_picture(path: Path) -> None:
    """Refuse a name of a picture that is neither SVG nor PNG."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"a picture must be named .svg or .png, not {str(path)!r}")


def require_matplotlib() -> None:
    """Say what is missing before long work, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FoedusError("the report needs matplotlib: pip install 'foedus[report]'") from error


def drawing() -> Any:
    """The style of all figures, for as long as the context lasts."""
    require_matplotlib()
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def blank(height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, as wide as all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def inline(figure: Figure, label: str) -> str:
    """Inline SVG without prolog and metadata; its ids differ from those of other figures."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    prefix = re.sub(r"\W+", "-", label)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace("xlink:href", "href")
    tag = rf'<svg \1 role="img" aria-label="{html.escape(label)}">'
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", tag, text, count=1)
