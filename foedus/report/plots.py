"""Figures as inline SVG: drawn through matplotlib's objects, so that no global state of the caller's plots is touched."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foedus.errors import ConfigError, FoedusError
from foedus.report.compare import Curve, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from foedus.data.federation import Federation
    from foedus.diagnosis.survey import Survey

# Okabe and Ito's colours without yellow (too pale on white); the dashes and markers tell the lines apart in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (2, 1)), (0, (8, 2)), (0, (1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_POOLED = "#333333"

_WIDTH = 4.3  # inches: text keeps its size on a phone
_MARKS = 7  # markers on a line, about
_BARS = 40  # more clients than this have no bar, tick or name of their own

_STYLE = {
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
        # After one turn of the colours the dashes move on, so that a pair of colour and dash comes again only after 36.
        dash = _DASHES[(i + i // len(_COLOURS)) % len(_DASHES)]
        found[name] = Style(_COLOURS[i % len(_COLOURS)], dash, _MARKERS[i % len(_MARKERS)])
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
    """The metric against "rounds", "megabytes" or "seconds": mean over seeds, with a band from the least to the largest."""
    with drawing():
        columns = max(1, min(3, len(series), 60 // (8 + max(len(_label(c, against)) for c in series))))
        figure, ax = _figure(3.5 + 0.19 * math.ceil(len(series) / columns))
        log = against == "megabytes" and _decades(series) > 1.5
        for i, curve in enumerate(series):
            _draw(ax, curve, i, against, style[curve.name], log)
        if log:
            log_axis(ax)
        elif against == "rounds":
            ax.xaxis.get_major_locator().set_params(integer=True)
        if target is not None:
            ax.axhline(target, color="#777777", linewidth=0.9, zorder=1)
            # Curves end on the good side of the target, so its name stands on the other.
            place = "top" if metric.endswith("accuracy") else "bottom"
            ax.text(
                0.995, target, "target", transform=ax.get_yaxis_transform(), va=place, ha="right", fontsize=8, color="#555555"
            )
        if limits:
            ax.set_ylim(*limits)
        xlabel = {"rounds": "round", "megabytes": "megabytes sent, up and down", "seconds": "seconds of computing"}[against]
        ax.set(xlabel=xlabel + (" (log scale)" if log else ""), ylabel=f"{words(metric)} on the test set")
        if metric.startswith("own_"):
            ax.set_ylabel(words(metric))
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.6,
            columnspacing=1.2, handletextpad=0.5, borderaxespad=0.2,
        )  # fmt: skip
        what = "close-up of " if limits else ""
        return inline(figure, f"{what}{words(metric)} against {against}" + ("-close" if limits else ""))


def _draw(ax: Axes, curve: Curve, i: int, against: str, style: Style, log: bool) -> None:
    x = getattr(curve, against)
    label = _label(curve, against)
    look = {"color": style.colour, "linestyle": style.dash, "label": label, "zorder": 3 if curve.pooled else 4}
    if against == "megabytes" and x[-1] == 0 and not curve.diverged:
        # It sends nothing, so it has no place on this axis: its last value is a level to compare with.
        ax.axhline(curve.mean[-1], **look, alpha=0.9)
        return
    keep = [k for k, v in enumerate(x) if v > 0] if log else range(len(x))
    x, mean = [x[k] for k in keep], [curve.mean[k] for k in keep]
    every = max(1, len(x) // _MARKS)
    # Markers start at different places, or lines that run together would hide each other's.
    ax.plot(x, mean, marker=style.marker, markevery=(i * every // 4 % every, every), **look)
    ax.fill_between(
        x, [curve.low[k] for k in keep], [curve.high[k] for k in keep], color=style.colour, alpha=0.15, linewidth=0, zorder=2
    )


def partition(fed: Federation) -> str:
    """Who holds what."""
    with drawing():
        figure, ax = _figure(4.0)
        fed.plot(ax)
        ax.set_title("")
        ax.grid(False)
        return inline(figure, "which client holds which labels" if fed.data.classes else "targets of each client")


def survey(found: Survey) -> list[tuple[str, str]]:
    """The panels of a survey, each as inline SVG with its caption."""
    drawn = []
    for name, caption, draw in _panels(found):
        with drawing():
            figure, ax = _figure(3.6)
            draw(ax)
            drawn.append((inline(figure, name), caption))
    return drawn


def survey_picture(found: Survey, path: Path) -> None:
    """The same panels as one file."""
    check_picture(path)
    with drawing():
        from matplotlib.figure import Figure

        panels = _panels(found)
        rows = math.ceil(len(panels) / 2)
        figure = Figure(figsize=(2.3 * _WIDTH, 3.7 * rows), layout="constrained")
        for i, (name, _, draw) in enumerate(panels):
            ax = figure.add_subplot(rows, 2, i + 1)
            draw(ax)
            ax.set_title(name, fontsize=10, loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _panels(found: Survey) -> list[tuple[str, str, Callable[[Axes], None]]]:
    """Name, caption and drawing of every panel that this federation has something to show in."""
    fed, labelled = found.fed, found.fed.data.classes is not None
    what = "Training rows of each client, by label." if labelled else "Targets of the training rows of each client."
    panels: list[tuple[str, str, Callable[[Axes], None]]] = [("who holds what", what, lambda ax: _holdings(ax, fed))]
    if not labelled or len(fed) > _BARS:
        panels.append(("sizes", "Training rows of each client.", lambda ax: _bars(ax, fed.ids, fed.sizes, "training rows")))
    if labelled:
        caption = "Total variation distance between each client's labels and those of all rows. The line is their mean with rows dealt out at random."
        panels.append(
            ("label TV", caption, lambda ax: _bars(ax, fed.ids, found.labels, "distance", found.facts["label_tv_by_chance"]))
        )
    w1 = found.distances.per_client
    caption = "Wasserstein-1 distance between each client's features and those of all. The line is their mean with rows dealt out at random."
    if not found.distances.exact:
        caption += " Sliced: a lower bound."
    panels.append(
        ("omega_W1", caption, lambda ax: _bars(ax, w1["client"], w1["w1"], "distance", found.facts["omega_w1_by_chance"]))
    )
    if len(found.part) > 1:
        caption = (
            "Cosine between what linear models of two clients predict; on the diagonal, of two halves of one client. Grey: the "
            "rows say nothing."
        )
        panels.append(("task similarity", caption, lambda ax: _similarity(ax, found)))
    score = "Accuracy" if labelled else "Share of the variance explained"
    caption = f"{score} on held-out rows: in blue linear models that clients share or have for themselves, in grey kinds of models with all rows in one place."
    return [*panels, (score.lower(), caption, lambda ax: _scores(ax, found))]


def _holdings(ax: Axes, fed: Federation) -> None:
    fed.plot(ax)
    ax.set_title("")
    ax.grid(False)


def _bars(ax: Axes, ids: Any, values: Any, ylabel: str, by_chance: float | None = None) -> None:
    """A bar a client, or where they are many a line of the values in rising order."""
    if len(values) <= _BARS:
        ax.bar(range(len(values)), values, color=_COLOURS[0], width=0.8)
        ax.set_xticks(range(len(values)), [str(i) for i in ids], fontsize=9 if len(values) <= 20 else 6)
        ax.set_xlabel("client")
    else:
        ax.step(range(len(values)), sorted(values), where="mid", color=_COLOURS[0])
        ax.set_xlabel("clients, in rising order")
    if by_chance is not None:
        ax.axhline(by_chance, color=_COLOURS[1], linestyle=_DASHES[1], linewidth=1.4, label="by chance")
        ax.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.12))
    ax.set_ylabel(ylabel)
    ax.set_ylim(0, 1.05 * max(*values, by_chance or 0.0, 1e-9))


def _similarity(ax: Axes, found: Survey) -> None:
    import matplotlib

    colours = matplotlib.colormaps["RdBu"].with_extremes(bad="#bbbbbb")
    n = len(found.part)
    image = ax.imshow(found.sharing.similarity, cmap=colours, vmin=-1, vmax=1, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="similarity", shrink=0.85)
    if n <= _BARS:
        for axis in ("x", "y"):
            ticks, names = range(n), [str(i) for i in found.part.ids]
            getattr(ax, f"set_{axis}ticks")(ticks, names, fontsize=9 if n <= 15 else 6)
    ax.grid(False)
    ax.set(xlabel="client", ylabel="client")


def _scores(ax: Axes, found: Survey) -> None:
    shares = found.sharing.accuracy or found.sharing.explained
    names = {"labels": "own average", "shared": "one for all", "private": "own model", "both": "both"}
    values = {names[k]: (shares[k], _COLOURS[0]) for k in names}
    kinds = {"linear": "linear", "features": "FedNewton's features", "trees": "trees"}
    values |= {kinds[k]: (v, "#999999") for k, v in found.fits.items()}
    place = range(len(values))
    ax.barh(place, [max(v, 0.0) for v, _ in values.values()], color=[c for _, c in values.values()], height=0.75)
    for i, (value, _) in enumerate(values.values()):
        ax.text(max(value, 0.0) + 0.01, i, f"{value:.3f}", va="center", fontsize=8)
    ax.set_yticks(place, list(values))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12)
    ax.grid(False, axis="y")


def sample(style: Style) -> str:
    """A short line in an algorithm's colour and dash, as HTML, to find it again in the figures."""
    dash = "" if style.dash == "-" else f' stroke-dasharray="{" ".join(f"{d * 2:g}" for d in style.dash[1])}"'
    return (
        f'<svg class="key" viewBox="0 0 24 8" width="24" height="8" aria-hidden="true">'
        f'<path d="M0 4H24" stroke="{style.colour}" stroke-width="3"{dash}/></svg>'
    )


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


def _figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def inline(figure: Figure, label: str) -> str:
    """Inline SVG: without prolog and metadata, and with ids that stay apart from those of the page's other figures."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    prefix = re.sub(r"\W+", "-", label)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace("xlink:href", "href")
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{label}">', text, count=1)
