"""The charts of a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from foedus.report import charts, drawings, holdings
from foedus.report.charts import Bar, Bars, Cells, Chart, Dots
from foedus.report.plots import WIDTH, check_picture, drawing, styles

if TYPE_CHECKING:
    from foedus.diagnosis.diagnose import Diagnosis

_BARS = 40
"""More clients than this have dots, not bars."""

_CHANCE = "rows permuted at random"


def inline_panels(found: Diagnosis) -> list[Markup]:
    """The charts of a diagnosis, each as a figure of a page."""
    return [charts.figure(chart) for chart in panels(found)]


def write_picture(found: Diagnosis, path: Path) -> None:
    """The same charts as one file."""
    check_picture(path)
    with drawing():
        from matplotlib.figure import Figure

        shown = [*panels(found)]
        rows = math.ceil(len(shown) / 2)
        figure = Figure(figsize=(2.3 * WIDTH, 3.7 * rows), layout="constrained")
        looks = styles([_GROUP, _CHANCE], [_CHANCE])
        for i, chart in enumerate(shown):
            ax = figure.add_subplot(rows, 2, i + 1)
            drawings.panel(ax, chart, looks)
            ax.set_title(chart.title, fontsize=10, loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata: dict[str, Any] | None = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


_GROUP = "clients"


def panels(found: Diagnosis) -> Iterator[Chart]:
    """A chart of everything that this federation has something to show in."""
    fed, labelled = found.fed, found.fed.data.classes is not None
    yield holdings.chart(fed)
    if not labelled or len(fed) > _BARS:
        caption = "Training rows of each client."
        yield _by_client("Sizes", caption, "training rows", fed.called, fed.sizes.tolist())
    if labelled:
        caption = "Total variation distance between each client's labels and those of all rows."
        by_chance = found.labels_by_chance
        yield _by_client("Label TV", caption, "distance", fed.called, found.labels, by_chance)
    caption = "Wasserstein-1 distance between each client's features and those of all."
    caption += "" if found.distances.exact else " Sliced: a lower bound."
    w1, chance = (f.per_client["w1"] for f in (found.distances, found.by_chance))
    yield _by_client("omega_W1", caption, "distance", found.part.called, w1, chance)
    if len(found.part) > 1:
        caption = (
            "Cosine between what linear models of two clients predict; on the diagonal, of two "
            "halves of one client. Gray: the rows say nothing."
        )
        names, values = [*map(str, found.part.called)], found.sharing.similarity.tolist()
        axes, limits = ("client", "client"), (-1.0, 1.0)
        yield Cells("Task similarity", caption, "similarity", names, names, values, axes, limits)
    yield _scores(found, "Accuracy" if labelled else "Share of the variance explained")


def _by_client(
    title: str, caption: str, label: str, names: Sequence[Any], values: Any, chance: Any = None
) -> Chart:
    """A bar a client, or where they are many a dot; chance: the same of rows dealt out again."""
    clients = {str(name): v for name, v in zip(names, list(values), strict=True)}
    if len(clients) <= _BARS:
        level = None if chance is None else (_CHANCE, sum(chance) / len(chance))
        caption += "" if chance is None else f" The line is the mean with {_CHANCE}."
        return Bars(title, caption, label, [Bar(k, v) for k, v in clients.items()], level=level)
    groups = {_GROUP: clients}
    if chance is not None:
        groups[_CHANCE] = {str(i): v for i, v in enumerate(chance)}
    caption += " A dot is a client; the band reaches from the 10 % to the 90 % quantile."
    return Dots(title, caption, label, groups, False, "largest", [_CHANCE])


def _scores(found: Diagnosis, score: str) -> Bars:
    shares = found.sharing.accuracy or found.sharing.explained
    names = {"labels": "own average", "shared": "one for all", "private": "own model"}
    bars = [Bar(names.get(k, k), shares[k]) for k in (*names, "both")]
    kinds = {"features": "FedNewton's features"}
    bars += [Bar(kinds.get(k, k), v, reference=True) for k, v in found.fits.items()]
    caption = (
        f"{score} on held-out rows: in blue linear models that clients share or have for "
        "themselves, in gray kinds of models of the pooled data."
    )
    return Bars(score, caption, score.lower(), bars)
