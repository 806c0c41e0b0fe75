"""The pages of audits: charts, tables, and for leakage the images."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foedus.report import charts, html
from foedus.report.charts import Line, Lines, written

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from foedus.audit.attack import Reconstruction
    from foedus.audit.hostility import HostileAudit
    from foedus.audit.leakage import Leakage

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def _page(
    title: str, subtitle: str, parts: Sequence[Mapping[str, Any]], command: str, text: Sequence[str]
) -> str:
    return html.render(
        "audit.html.j2", title=title, subtitle=subtitle, parts=parts, command=command, text=text,
        versions=html.versions(),
    )  # fmt: skip


def _part(title: str, chart: Lines, table: Table, **more: Any) -> dict[str, Any]:
    kinds = {"method": "value"}
    shown = {"title": title, "chart": charts.figure(chart), "table": table, "kinds": kinds}
    return {**shown, "shots": (), **more}


# -- leakage ---------------------------------------------------------------------------------------


def leakage(found: Leakage, title: str | None, command: str) -> str:
    """The page of one image and what each message told about it."""
    chart = Lines(
        "Reconstruction by iteration",
        "The higher the PSNR, the closer the guess is to the image: above about 20 dB one sees "
        "what it shows. Dark lines need no message, or the label alone. The mismatch is what an "
        "observer minimizes, who does not know the PSNR.",
        [*_attacks(found)],
        {"iteration": "iteration", "psnr": "PSNR, dB", "loss": "mismatch of the message"},
        log=["loss"] if all(v > 0 for r in found.messages.values() for v in r.loss) else [],
    )
    rows = []
    for name, r in found.messages.items():
        psnr = [written(v, "metric") for v in (r.psnr[0], r.psnr[-1], max(r.psnr))]
        right = "right" if r.label == found.label else "wrong"
        label = f"{r.label}, {right}, {'shown' if r.label_shown else 'searched'}"
        rows.append([name, f"{r.bytes:,}", *psnr, label, f"{r.twins:,} of {found.others:,}"])
    for name, sent, value in (
        ("none: average image", "0", found.average),
        ("label only: average of its class", "–", found.class_average),
    ):
        rows.append([name, sent, "–", written(value, "metric"), "–", "–", "–"])
    headings = ["message", "bytes", "PSNR,\nfirst", "last", "best", "label", "twins"]
    shots = [(name, [*_images(found, r)]) for name, r in found.messages.items()]
    text = [
        "Deep leakage from gradients: from one message about one image, an observer who knows the "
        "network and its parameters searches for an image that explains the message. A success "
        "proves that the message gives the image away; a failure proves nothing about other "
        "attacks. Twins are other training images that send the very same message."
    ]
    what = f"training image {found.index}, label {found.label}"
    part = _part("What a message shows", chart, (headings, rows), shots=shots)
    return _page(title or f"Leakage of {found.data}", what, [part], command, text)


def _attacks(found: Leakage) -> Iterator[Line]:
    for name, r in found.messages.items():
        x: dict[str, list[float]] = {"iteration": [*range(len(r.psnr))]}
        yield Line(name, x, {"psnr": r.psnr, "loss": r.loss})
    for name, value in (
        ("average image", found.average),
        ("average of class", found.class_average),
    ):
        if math.isfinite(value):
            yield Line(name, {"iteration": [0]}, {"psnr": [value]}, reference=True)


def _images(found: Leakage, r: Reconstruction) -> Iterator[tuple[str, str]]:
    """The image and some guesses, each with its caption."""
    yield "original", _png(found.original)
    for n, shot in r.shots.items():
        yield f"iteration {n}", _png(shot)


def _png(image: Tensor) -> str:
    """An image as an address that holds it."""
    from matplotlib.image import imsave

    out, pixels = io.BytesIO(), image.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy()
    look: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1, "metadata": {"Software": None}}
    imsave(out, pixels, format="png", **look)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


# -- hostile clients -------------------------------------------------------------------------------


def hostile(found: HostileAudit, title: str | None, command: str) -> str:
    """The page of accuracies under attacks."""
    parts = (0.0, *found.parts)

    def accuracy(attack: str, part: float, method: str) -> float:
        value = found.accuracy["" if part == 0 else attack, part, method]
        return math.nan if value is None else value

    lines = [
        Line(
            method, {"part": [*parts]},
            {a: [accuracy(a, part, method) for part in parts] for a in found.attacks},
        )
        for method in found.methods
    ]  # fmt: skip
    labels = {a: f"accuracy under the attack {a}" for a in found.attacks}
    chart = Lines(
        "Accuracy by hostile clients",
        "After the last round, on the test rows; one attack at a time. A line has no point where "
        "the run stops, because it diverges or too few replies are left.",
        lines,
        {"part": "part of the clients that are hostile", **labels},
    )
    rows = [
        [attack, method, *(_or_stops(accuracy(attack, part, method)) for part in parts)]
        for attack, method in itertools.product(found.attacks, found.methods)
    ]
    part = _part("Accuracy", chart, (found.headings, rows))
    subtitle = f"{found.rows:,} training rows; accuracy after the last round"
    return _page(title or f"Hostile clients on {found.data}", subtitle, [part], command, ())


def _or_stops(value: float) -> str:
    return "stops" if math.isnan(value) else written(value, "metric")


# -- privacy ---------------------------------------------------------------------------------------


def privacy(studies: Mapping[str, pd.DataFrame], title: str | None, command: str) -> str:
    """The page of studies by name, as `foedus.audit.privacy.study` returns them."""
    from foedus.audit.privacy import TITLES

    parts = []
    for name, frame in studies.items():
        about = TITLES[name].partition(": ")[2]
        x, y = {
            "utility": ("epsilon", "test accuracy"), "membership": ("epsilon", "value"),
            "leakage": ("noise", "PSNR, dB"),
        }[name]  # fmt: skip
        caption = f"{about[:1].upper()}{about[1:]}. The table also has the values without noise."
        lines = [*_study(frame, x)]
        chart = Lines(y[:1].upper() + y[1:], caption, lines, {x: x, "y": y}, log=[x], levels=False)
        body = frame.itertuples(index=False)
        rows = [[_first(first), *(written(v, "metric") for v in row)] for first, *row in body]
        parts.append(_part(name.capitalize(), chart, ([*frame.columns], rows)))
    subtitle = "What differential privacy costs, and what it buys."
    return _page(title or "Privacy, measured", subtitle, parts, command, ())


def _study(frame: pd.DataFrame, x: str) -> Iterator[Line]:
    """A line for each algorithm, or for each column beside x."""
    if x not in frame:
        frame = frame.set_index("algorithm").T.rename_axis(x).reset_index()
        frame[x] = [math.inf if v == "no noise" else float(v) for v in frame[x]]
    frame = frame[[math.isfinite(v) for v in frame[x]]]
    for name in frame.columns:
        if name != x:
            reference = name in ("chance", "average image")
            values = [float(v) for v in frame[name]]
            yield Line(name, {x: frame[x].tolist()}, {"y": values}, reference=reference)


def _first(value: Any) -> str:
    """The name of a row, or its epsilon or noise."""
    if isinstance(value, str):
        return value
    return "no noise" if value == math.inf else f"{value:g}"
