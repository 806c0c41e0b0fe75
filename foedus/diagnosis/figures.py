"""The figures of a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foedus.report.plots import (
    COLORS,
    DASHES,
    WIDTH,
    blank,
    check_picture,
    drawing,
    inline,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from foedus.data.federation import Federation
    from foedus.diagnosis.diagnose import Diagnosis

_BARS = 40  # up to this number of clients, each has a bar, tick and name


def inline_panels(found: Diagnosis) -> list[tuple[str, str]]:
    """The panels of a diagnosis, each as inline SVG with its caption."""
    drawn = []
    for name, caption, draw in _panels(found):
        with drawing():
            figure, ax = blank(3.6)
            draw(ax)
            drawn.append((inline(figure, name), caption))
    return drawn


def write_picture(found: Diagnosis, path: Path) -> None:
    """The same panels as one file."""
    check_picture(path)
    with drawing():
        from matplotlib.figure import Figure

        panels = _panels(found)
        rows = math.ceil(len(panels) / 2)
        figure = Figure(figsize=(2.3 * WIDTH, 3.7 * rows), layout="constrained")
        for i, (name, _, draw) in enumerate(panels):
            ax = figure.add_subplot(rows, 2, i + 1)
            draw(ax)
            ax.set_title(name, fontsize=10, loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata: dict[str, Any] | None = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def holdings(ax: Axes, fed: Federation) -> None:
    fed.plot(ax)
    ax.set_title("")
    ax.grid(False)


def _panels(found: Diagnosis) -> list[tuple[str, str, Callable[[Axes], None]]]:
    """Name, caption and drawing of every panel that applies to this federation."""
    fed, labelled = found.fed, found.fed.data.classes is not None
    panels: list[tuple[str, str, Callable[[Axes], None]]] = []

    def add(name: str, caption: str, draw: Callable[..., None], *values: Any) -> None:
        panels.append((name, caption, lambda ax: draw(ax, *values)))

    targets = "Targets of the training rows of each client."
    rows = "Training rows of each client, by label." if labelled else targets
    add("who holds what", rows, holdings, fed)
    if not labelled or len(fed) > _BARS:
        add("sizes", "Training rows of each client.", _bars, fed.called, fed.sizes, "training rows")
    line = "The line is their mean with rows permuted at random."
    if labelled:
        caption = "Total variation distance between each client's labels and those of all rows."
        chance = found.facts["label_tv_by_chance"]
        add("label TV", f"{caption} {line}", _bars, fed.called, found.labels, "distance", chance)
    w1, chance = found.distances.per_client, found.facts["omega_w1_by_chance"]
    caption = "Wasserstein-1 distance between each client's features and those of all."
    caption += f" {line}" + ("" if found.distances.exact else " Sliced: a lower bound.")
    add("omega_W1", caption, _bars, found.part.called, w1["w1"], "distance", chance)
    if len(found.part) > 1:
        caption = (
            "Cosine between what linear models of two clients predict; on the diagonal, of two "
            "halves of one client. Grey: the rows say nothing."
        )
        add("task similarity", caption, _similarity, found)
    score = "Accuracy" if labelled else "Share of the variance explained"
    caption = (
        f"{score} on held-out rows: in blue linear models that clients share or have for "
        "themselves, in gray kinds of models of the pooled data."
    )
    add(score.lower(), caption, _scores, found)
    return panels


def _bars(ax: Axes, names: Any, values: Any, ylabel: str, by_chance: float | None = None) -> None:
    """A bar for each client, or for many clients a line of the sorted values."""
    places = range(len(values))
    if len(values) <= _BARS:
        ax.bar(places, values, color=COLORS[0], width=0.8)
        ax.set_xticks(places, names, **_written(names))
        ax.set_xlabel("client")
    else:
        ax.step(places, sorted(values), where="mid", color=COLORS[0])
        ax.set_xlabel("clients, in rising order")
    if by_chance is not None:
        look: dict[str, Any] = {"color": COLORS[1], "linestyle": DASHES[1], "linewidth": 1.4}
        ax.axhline(by_chance, label="by chance", **look)
        ax.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.12))
    ax.set_ylabel(ylabel)
    ax.set_ylim(0, 1.05 * max(*values, by_chance or 0.0, 1e-9))


def _written(names: Sequence[str]) -> dict[str, Any]:
    """Rotation of the names of clients below an axis: long ones are vertical, so that all are
    readable."""
    look: dict[str, Any] = {"fontsize": 9 if len(names) <= 20 else 6}
    return {**look, "rotation": 90} if len(names) * max(map(len, names)) > 60 else look


def _similarity(ax: Axes, found: Diagnosis) -> None:
    import matplotlib

    colours = matplotlib.colormaps["RdBu"].with_extremes(bad="#bbbbbb")
    n, values = len(found.part), found.sharing.similarity
    image = ax.imshow(values, cmap=colours, vmin=-1, vmax=1, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label="similarity", shrink=0.85)
    if n <= _BARS:
        for axis in ("x", "y"):
            look = _written(found.part.called) if axis == "x" else {"fontsize": 9 if n <= 15 else 6}
            getattr(ax, f"set_{axis}ticks")(range(n), found.part.called, **look)
    ax.grid(False)
    ax.set(xlabel="client", ylabel="client")


def _scores(ax: Axes, found: Diagnosis) -> None:
    shares = found.sharing.accuracy or found.sharing.explained
    names = {"labels": "own average", "shared": "one for all", "private": "own model"}
    values = {names.get(k, k): (shares[k], COLORS[0]) for k in (*names, "both")}
    kinds = {"features": "FedNewton's features"}
    values |= {kinds.get(k, k): (v, "#999999") for k, v in found.fits.items()}
    place, (heights, colours) = range(len(values)), zip(*values.values(), strict=True)
    ax.barh(place, [max(v, 0.0) for v in heights], color=colours, height=0.75)
    for i, value in enumerate(heights):
        ax.text(max(value, 0.0) + 0.01, i, f"{value:.3f}", va="center", fontsize=8)
    ax.set_yticks(place, list(values))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12)
    ax.grid(False, axis="y")
