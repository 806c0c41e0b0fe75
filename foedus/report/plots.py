"""Figures as inline SVG, through matplotlib's objects: its global state is not touched.

The colors of text, axes and references become `currentColor` and those of grids a class, so that a
figure follows the colors of its page.
"""

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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours without yellow (too pale on white); dashes and markers differ in grey, too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GAPS = ((5, 1.5), (5, 1.5, 1, 1.5), (2, 1), (8, 2), (1, 1))
DASHES: tuple[Any, ...] = ("-", *((0, gaps) for gaps in _GAPS))
_MARKERS = ("o", "s", "^", "D", "v", "P", "h")
_SYMBOLS = ("circle", "square", "triangle", "diamond", "wye", "cross", "hexagon")  # of d3
_POOLED = "#333333"
_GRID = "#e3e3e3"
_ATTRIBUTES = (
    "fill", "fill-opacity", "fill-rule", "image-rendering", "opacity", "stroke", "stroke-dasharray",
    "stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "stroke-miterlimit",
    "stroke-opacity", "stroke-width",
)  # fmt: skip
"""What matplotlib writes into style="", which the policy of our pages forbids; the same names are
attributes of SVG."""

WIDTH = 4.3  # inches: text keeps its size on a phone

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
    "grid.color": _GRID,
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

    def for_page(self) -> dict[str, str]:
        """The same for SVG that the page draws: a color, a dash pattern, a symbol of d3."""
        reference = self.colour == _POOLED
        gaps = () if self.dash == "-" else self.dash[1]
        return {
            "color": "currentColor" if reference else self.colour,
            "dash": " ".join(f"{2 * g:g}" for g in gaps),
            "symbol": "star" if reference else _SYMBOLS[_MARKERS.index(self.marker)],
        }


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


def log_axis(ax: Axes, which: str = "x") -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    low, high = (math.log10(v) for v in (ax.get_xlim() if which == "x" else ax.get_ylim()))
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high - low < 2.5 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


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


def inline(figure: Figure, label: str, prefix: str = "") -> str:
    """Inline SVG without prolog, metadata and styles; its ids begin with `prefix`, or the label."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(?<=[ "])style="([^"]*)"', _attributes, text)
    prefix = re.sub(r"\W+", "-", prefix or label)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace("xlink:href", "href")
    (box,) = re.findall(r'<svg [^>]*?(viewBox="[^"]*")', text)
    look = 'fill="currentColor" stroke-linejoin="round"'
    tag = f'<svg {box} role="img" aria-label="{html.escape(label)}" {look}>'
    return tag + text[text.index(">") + 1 :]


def _attributes(style: re.Match[str]) -> str:
    """A style="" as attributes of SVG."""
    pairs = [part.split(":", 1) for part in style[1].split(";") if part.strip()]
    found = {k.strip(): v.strip() for k, v in pairs if k.strip() in _ATTRIBUTES}
    grid = ' class="grid"' if found.get("stroke") == _GRID else ""
    ink = ("#000000", _POOLED)
    shown = {k: "currentColor" if v in ink else v for k, v in found.items()}
    return " ".join(f'{k}="{v}"' for k, v in shown.items()) + grid
