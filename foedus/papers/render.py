"""What was found, as tables in a terminal and in Markdown, as SVG, and as one HTML page for each paper."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from foedus.papers.runner import PAPERS, item_of, paper, wanted
from foedus.papers.store import Cell, Store, found_in
from foedus.papers.study import SCALES, Bars, Circles, Found, Images, Item, Lines, Scale, Table, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_QUICK = "Scale: quick. Fewer rows, rounds and seeds, as the settings say."


@dataclass(frozen=True)
class Result:
    """An item, the scale it ran at, and what was found."""

    name: str
    key: str
    item: Item
    scale: Scale
    cells: tuple[Cell, ...]
    asked: int
    found: Found

    @property
    def command(self) -> str:
        flag = {"quick": " --quick", "full": " --full"}.get(self.scale, "")
        return f"foedus paper {self.name} {self.key}{flag}"

    @property
    def verdicts(self) -> list[tuple[str, str, str]]:
        """(claim, "holds" | "does not hold" | "not measured", numbers)."""
        found = [(c.text + " (ours)" * c.ours, *c.judge(self.found, self.complete)) for c in self.item.claims]
        if self.complete:
            return found
        return [(t, v, n if v == "not measured" else f"{n} (of {len(self.cells)} of {self.asked} cells)") for t, v, n in found]

    @property
    def complete(self) -> bool:
        return len(self.cells) >= self.asked

    @property
    def remarks(self) -> list[str]:
        """What was cut down, and why ours may differ."""
        scale = {"usual": self.item.scale and f"Scale: {self.item.scale}", "quick": _QUICK}
        part = "" if self.complete else f"Only {len(self.cells)} of {self.asked} cells have run."
        return [text for text in (scale.get(self.scale), part, self.item.notes) if text]

    @property
    def seeds(self) -> int:
        return len(self.found.values("seed"))

    @property
    def seconds(self) -> float:
        return sum(c.seconds or 0.0 for c in self.cells)

    @property
    def versions(self) -> dict[str, str]:
        """Of all cells; where they differ, all of them."""
        found: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for name, version in (cell.versions or {}).items():
                found.setdefault(name, {})[version] = None
        return {name: ", ".join(versions) for name, versions in found.items()}


def stored(folder: Path, name: str, key: str, scales: Sequence[Scale] = ("full", "usual", "quick")) -> Result | None:
    """What is kept of an item: at the largest scale that is complete, or else at the largest of which there is something."""
    found = [r for scale in scales if (r := _stored(folder, name, key, scale)) is not None]
    return next((r for r in found if r.complete), found[0] if found else None)


def _stored(folder: Path, name: str, key: str, scale: Scale) -> Result | None:
    store = Store(folder, name, key, scale, item_of(name, key).fixed)
    if not store.cells:
        return None
    usual = wanted(name, key, scale, folder)
    more = wanted(name, key, scale, folder, seeds=max(c.seed for c in store.cells.values()) + 1)
    asked = {c.key: c for c in (*usual, *more)}
    cells = [store.cells[k] for k in asked if k in store.cells]  # not those of settings that have changed since
    if not any(c.rows for c in cells):
        return None
    missing = sum(c.key not in store.cells for c in usual)
    return Result(name, key, paper(name).items[key], scale, tuple(cells), len(cells) + missing, found_in(cells))


# -- tables --------------------------------------------------------------------------------------------------------------------


def table_of(view: View, found: Found) -> tuple[list[str], list[list[str]]] | None:
    """Headings and rows of text; None where a view has nothing that a table could show."""
    if isinstance(view, Table):
        return _averages(view, view.select(found.frame))
    if isinstance(view, Lines):
        return _points(view, view.select(found.frame))
    if isinstance(view, Circles):
        frame = found.frame
        rows, columns = ([*dict.fromkeys(frame[c])] for c in (view.panel, view.y))
        sums = frame.groupby([view.panel, view.x, view.y])[view.count].sum()
        body = [
            [str(p), str(x), *(_number(sums.get((p, x, y), 0), 0) for y in columns)]
            for p in rows
            for x in dict.fromkeys(frame[view.x])
        ]
        return [view.panel, view.x, *(f"{view.y} {y}" for y in columns)], body
    return None


def _averages(view: Table, frame: pd.DataFrame) -> tuple[list[str], list[list[str]]] | None:
    if frame.empty:
        return None
    rows = list(dict.fromkeys(_keys(frame, view.rows)))
    columns = list(dict.fromkeys(_keys(frame, view.columns))) if view.columns else [()]
    values = [v for v in view.values if v in frame]
    by_row = any(len(k) == len(view.rows) for k in view.published)
    groups = dict(_grouped(frame, (*view.rows, *view.columns)))
    headings = [*view.rows, *(["paper"] if by_row else [])]
    headings += [", ".join((*map(_plain, c), *([v] if len(values) > 1 or not c else []))) for c in columns for v in values]
    body = []
    for row in rows:
        known = view.published.get(row)
        line = [*map(_plain, row), *([_number(known, max(2, view.digits), view.never[1])] if by_row else [])]
        for column in columns:
            group = groups.get((*row, *column))
            for value in values:
                text, mean = _mean(group, value, view.digits, view.never[0])
                beside = view.published.get((*row, *column)) if view.columns else None
                if mean is not None and known is not None and (not view.compared or value in view.compared):
                    text += f" ({mean - float(known):+.{min(view.digits, 2)}f})" if view.digits < 7 else ""
                elif beside is not None and text != "–":
                    text += f" ({_number(beside, view.digits, view.never[1])})"
                line.append(text)
        body.append(line)
    return headings, body


def _keys(frame: pd.DataFrame, names: Sequence[str]) -> list[tuple]:
    return [tuple(_key(v) for v in row) for row in frame[list(names)].itertuples(index=False, name=None)]


def _key(value: Any) -> Any:
    """NaN is not equal to itself, and would never be found again."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _grouped(frame: pd.DataFrame, names: Sequence[str]) -> Iterable[tuple[tuple, pd.DataFrame]]:
    keys = pd.Series(_keys(frame, names), index=frame.index)
    return [(key, frame.loc[index]) for key, index in keys.groupby(keys, sort=False).groups.items()]


def _mean(group: pd.DataFrame | None, value: str, digits: int, never: str) -> tuple[str, float | None]:
    """Mean and standard deviation: over seeds, or within the only cell where it says so. Seeds that diverged are counted."""
    if group is None or group[value].dropna().empty:
        return "–", None
    numbers = group[value].dropna().to_numpy(float)
    mean = float(numbers.mean())
    if not math.isfinite(mean):
        return _number(mean, digits, never), None
    lost = (
        f" ({len(numbers)} of {len(group)} seeds)"
        if len(numbers) < len(group) and group["seed"].nunique() == len(group)
        else ""
    )
    inside = f"{value} spread"
    spread = float(group[inside].mean()) if inside in group and len(numbers) == 1 else float(numbers.std())
    several = len(numbers) > 1 or inside in group
    return _number(mean, digits) + (f" ± {_number(spread, digits)}" if several and digits < 7 else "") + lost, mean


def _points(view: Lines, frame: pd.DataFrame, most: int = 7) -> tuple[list[str], list[list[str]]] | None:
    """Some points of every curve."""
    if frame.empty:
        return None
    xs = sorted(frame[view.x].dropna().unique())
    if len(xs) > most:
        chosen = np.geomspace(1, len(xs), most) if "x" in view.log else np.linspace(1, len(xs), most)
        xs = [xs[i - 1] for i in sorted({round(v) for v in chosen})]
    names = ([view.panel] if view.panel else []) + [view.line]
    body = []
    for key, group in _grouped(frame, names):
        line = group.groupby(view.x)[view.y].mean()
        body.append([*map(_plain, key), *(_significant(line.get(x, float("nan"))) for x in xs)])
    return [*names, *(f"{view.x} {_plain(x)}" for x in xs)], body


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _number(value: Any, digits: int, never: str = "not reached") -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return never
    return f"{value:.7g}" if digits >= 7 else f"{value:,.{digits}f}"


def _significant(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}" if 10 <= abs(value) < 1e5 else f"{value:.4g}"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of numbers to the right."""
    rows = [list(r) for r in rows]
    right = [all(_numeric(r[i]) for r in rows) for i in range(len(headings))]
    lines = [headings, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def _numeric(text: str) -> bool:
    return text == "–" or text.startswith("not reached") or text.lstrip("-+")[:1].isdigit()


# -- figures -------------------------------------------------------------------------------------------------------------------


def figure_of(view: View, found: Found) -> Figure | None:
    """A picture in the style of the paper's; None for tables."""
    frame = view.select(found.frame) if isinstance(view, Lines | Bars) else found.frame
    if isinstance(view, Table) or frame.empty:
        return None
    draw = {Lines: _lines, Bars: _bars, Circles: _circles, Images: _images}[type(view)]
    return draw(view, frame)


def _panels(count: int, columns: int, width: float = 3.4, height: float = 2.7) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.6, width * columns), height * rows + 0.5), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for place in places[count:]:
        place.set_visible(False)
    return figure, places


def _names(frame: pd.DataFrame, column: str) -> list[Any]:
    return [_key(v) for v in dict.fromkeys(frame[column])]


def _label(column: str, value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return f"{column}: {_plain(value)}"
    return f"{column} = {_plain(value)}" if isinstance(value, int | float | np.number) else _plain(value)


def _lines(view: Lines, frame: pd.DataFrame) -> Figure:
    from foedus.report.plots import log_axis, styles

    panels = _names(frame, view.panel) if view.panel else [None]
    lines = _names(frame, view.line)
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
            if len(mean) == 1 and part[view.x].nunique() > 1:  # it does not depend on x
                place.axhline(
                    mean.iloc[0], color=style.colour, linestyle=style.dash, linewidth=1.4, label=_label(view.line, line)
                )
                continue
            marker = {"marker": style.marker, "markersize": 3.5} if len(mean) <= 12 else {}
            place.plot(
                mean.index,
                mean,
                color=style.colour,
                linestyle=style.dash,
                linewidth=1.4,
                label=_label(view.line, line),
                **marker,
            )
            if own["seed"].nunique() > 1:
                place.fill_between(mean.index, grouped.min(), grouped.max(), color=style.colour, alpha=0.12, linewidth=0)
            elif (inside := f"{view.y} spread") in own:
                error = own.groupby(view.x)[inside].mean()
                place.fill_between(mean.index, mean - error, mean + error, color=style.colour, alpha=0.12, linewidth=0)
        place.set(xlabel=view.x, ylabel=view.y, title=_label(view.panel, panel) if view.panel else "")
        for axis in view.log:
            log_axis(place, axis)
        if view.limits:
            place.set_ylim(*view.limits(part))
    handles: dict[str, Any] = {}
    for place in places:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(6, max(2, 2 * len(panels))),
        frameon=False,
        fontsize=8,
    )
    return figure


def _bars(view: Bars, frame: pd.DataFrame) -> Figure:
    from foedus.report.plots import styles

    groups, bars = _names(frame, view.x), _names(frame, view.bar)
    look = styles([str(b) for b in bars])
    figure, (place,) = _panels(1, 1, width=9.0, height=3.2)
    means, width = frame.groupby([view.x, view.bar])[view.y].mean(), 0.8 / len(bars)
    for k, bar in enumerate(bars):
        heights = [means.get((g, bar), np.nan) for g in groups]
        place.bar(
            np.arange(len(groups)) + width * (k - (len(bars) - 1) / 2),
            heights,
            width,
            color=look[str(bar)].colour,
            label=str(bar),
        )
    place.set_xticks(range(len(groups)), [str(g) for g in groups])
    place.set(ylabel=view.y, ylim=(view.low, None))
    figure.legend(loc="outside lower center", ncols=len(bars), frameon=False, fontsize=8)
    return figure


def _circles(view: Circles, frame: pd.DataFrame) -> Figure:
    panels = _names(frame, view.panel)
    figure, places = _panels(len(panels), 2, width=4.4)
    for place, panel in zip(places, panels, strict=True):
        part = frame[(frame[view.panel] == panel) & (frame["seed"] == frame["seed"].min())]
        place.scatter(
            part[view.x], part[view.y], s=400 * part[view.count] / frame[view.count].max(), color="#0072B2", alpha=0.8
        )
        place.set(xlabel=view.x, ylabel=view.y, title=str(panel))
        place.set_xticks(sorted(part[view.x].unique()))
        place.set_yticks(sorted(part[view.y].unique()))
        place.margins(0.12)
    return figure


def _images(view: Images, frame: pd.DataFrame) -> Figure:
    shown = frame[frame[view.image].notna()]
    rows, names = _names(shown, view.row), _names(shown, view.name)
    figure, places = _panels(len(rows) * len(names), len(names), width=1.6, height=1.6)
    for place, (row, name) in zip(places, [(r, n) for r in rows for n in names], strict=True):
        cell = shown[(shown[view.row] == row) & (shown[view.name] == name)]
        place.imshow(
            np.asarray(cell[view.image].iloc[0], dtype=float).squeeze() / 255,
            cmap="gray",
            vmin=0,
            vmax=1,
            interpolation="nearest",
        )
        place.set(xticks=[], yticks=[])
        place.set_title(str(name), fontsize=8)
        place.grid(visible=False)
    return figure


def pictures(result: Result) -> list[tuple[View, Figure]]:
    """The pictures of an item, each with what it is of."""
    from foedus.report.plots import drawing

    with drawing():
        drawn = [(view, figure_of(view, result.found)) for view in _drawn(result)]
    return [(view, figure) for view, figure in drawn if figure is not None]


def _drawn(result: Result) -> list[View]:
    return [
        v
        for v in result.item.views
        if not isinstance(v, Table)
        and not (v.select(result.found.frame) if isinstance(v, Lines | Bars) else result.found.frame).empty
    ]


def _file(result: Result, number: int) -> str:
    """fedfw-figure2.svg, fedfw-figure2-2.svg, ..."""
    return f"{result.name}-{result.key}{f'-{number}' if number > 1 else ''}.svg"


def write_pictures(result: Result, folder: Path) -> None:
    """As SVG files."""
    from foedus.report.plots import drawing

    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        for number, (_, figure) in enumerate(pictures(result), start=1):
            figure.savefig(folder / _file(result, number), metadata={"Date": None})


# -- in words ------------------------------------------------------------------------------------------------------------------


def duration(minutes: float | None) -> str:
    """About how long."""
    if not minutes:
        return "–"
    if minutes < 1.5:
        return "1 min" if minutes > 0.7 else f"{max(5, round(60 * minutes / 5) * 5)} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h" if minutes < 2880 else f"{minutes / 1440:.0f} days"


def settings_of(result: Result) -> list[tuple[str, str]]:
    """Every setting of an item's cells: its one value, or all of its values."""
    found: dict[str, dict[str, None]] = {}
    for cell in result.cells:
        for name, value in cell.settings.items():
            found.setdefault(name, {})[_value(value)] = None
    rows = [(name, ", ".join(values)) for name, values in found.items()]
    return [*rows, *result.item.fixed.items(), ("seeds", ", ".join(str(s) for s in result.found.values("seed")))]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_value, value)) + ")"
    return "all" if value is None else _plain(value)


def count(verdicts: Iterable[tuple[str, str, str]]) -> dict[str, int]:
    """How many claims hold, do not hold, and were not measured."""
    found = {"holds": 0, "does not hold": 0, "not measured": 0}
    for _, verdict, _ in verdicts:
        found[verdict] += 1
    return found


def in_words(counts: dict[str, int]) -> str:
    measured = counts["holds"] + counts["does not hold"]
    rest = f", {counts['not measured']} not measured" if counts["not measured"] else ""
    return (f"{counts['holds']} of {measured} hold" if measured else "none measured") + rest


# -- Markdown ------------------------------------------------------------------------------------------------------------------


def write_docs(folder: Path, docs: Path, draw: bool = True) -> list[Path]:
    """docs/reproduction.md and a page for each paper, with its pictures, from what is stored. draw: write the pictures, too."""
    target = docs / "papers"
    target.mkdir(parents=True, exist_ok=True)
    written, lines, totals = [], [], {(whose, scale): count(()) for whose in ("the papers'", "ours") for scale in SCALES}
    for name in PAPERS:
        results = [r for key in paper(name).items if (r := stored(folder, name, key)) is not None]
        if not results:
            continue
        page = target / f"{name}.md"
        page.write_text(_paper_markdown(name, results))
        written.append(page)
        for result in results if draw else ():
            write_pictures(result, target)
        lines.append(f"\n## {paper(name).family}: {paper(name).title}\n\n[All numbers and pictures](papers/{name}.md)\n")
        rows, notes = [], []
        for r in results:
            counts = count(r.verdicts)
            for claim, (_, verdict, _) in zip(r.item.claims, r.verdicts, strict=True):
                totals["ours" if claim.ours else "the papers'", r.scale][verdict] += 1
            rows.append(
                [
                    f"[{r.key}](papers/{name}.md#{_anchor(r)})",
                    r.item.title + (" (ours)" if r.item.extra else ""),
                    r.scale,
                    str(r.seeds),
                    _minutes(r),
                    in_words(counts) if r.item.claims else "–",
                ]
            )
            for text, verdict, numbers in r.verdicts:
                if verdict == "does not hold":
                    notes.append(f"- **{r.key}**: {text}. *Does not hold*: {numbers}.")
            why = [text for text in r.remarks if text != _QUICK]
            if why:
                notes.append(f"- **{r.key}**, why ours may differ: {' '.join(why)}")
        lines.append(markdown(["item", "what it is", "scale", "seeds", "minutes", "claims"], rows))
        lines.append("\n" + "\n".join(notes) if notes else "")
    said = (f"of {whose}, at {scale} scale {in_words(c)}" for (whose, scale), c in totals.items() if sum(c.values()))
    head = _HEAD.format("; ".join(said))
    (docs / "reproduction.md").write_text(head + "\n".join(lines).rstrip() + "\n")
    return [docs / "reproduction.md", *written]


_HEAD = """# The papers, reproduced

Every table and figure of the five papers is one command, `foedus paper NAME ITEM`; `foedus paper` lists them. This page and those behind
its links are written by `foedus paper --docs docs` from the numbers in `results/`, which hold every cell with its settings, seed and versions, and
the seconds that it took where they were taken. Claims are checked by code on our numbers: **{}**. Many stand for one sentence of a paper, tested
on each set, split and protocol; "(ours)" stands behind those that no paper makes.

*Scale*: "usual" is the paper's, as far as the data at hand and two cores allow (what was cut down is said below); "quick" takes about a
minute; `--full` is the paper's own, where the whole sets are at hand; there, `--device cuda` trains the networks on a GPU. *Minutes* are those of one core that was shared with other work.
"""


def _anchor(result: Result) -> str:
    title = "".join(c for c in result.item.title.lower() if c.isalnum() or c in " -_")
    return title.replace(" ", "-")


def _minutes(result: Result) -> str:
    seconds = result.seconds
    return f"{seconds / 60:.1f}" if seconds else "–"


def _paper_markdown(name: str, results: list[Result]) -> str:
    lines = [
        f"# {paper(name).family}: {paper(name).title}\n",
        "Written by `foedus paper --docs docs`; see [the summary](../reproduction.md).\n",
    ]
    for r in results:
        lines += [f"## {r.item.title}\n", f"`{r.command}`" + (" (ours, not in the paper)" if r.item.extra else "") + "\n"]
        lines += [text + "\n" for text in r.remarks]
        drawn = _drawn(r)
        for view in r.item.views:
            table = table_of(view, r.found)
            if view in drawn:
                lines.append(f"![{view.caption or r.item.title}]({_file(r, drawn.index(view) + 1)})\n")
            if view.caption and (table or view in drawn):
                lines.append(f"{view.caption}\n")
            if table and (isinstance(view, Table) or not any(isinstance(v, Table) for v in r.item.views)):
                lines.append(markdown(*table) + "\n")
        if r.verdicts:
            lines.append(markdown(["claim", "", "our numbers"], r.verdicts) + "\n")
        settings = "; ".join(f"{k}: {v}" for k, v in settings_of(r))
        lines.append(f"<details><summary>Settings</summary>\n\n{html.escape(settings)}\n\n{_made_with(r)}\n\n</details>\n")
    return "\n".join(lines)


def _made_with(result: Result) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result.versions.items())
    return f"{len(result.cells)} cells, {_minutes(result)} minutes of one core; {versions}."


# -- HTML ----------------------------------------------------------------------------------------------------------------------


def write_pages(folder: Path) -> list[Path]:
    """One self-contained page for each paper of which something is stored, and an index of them."""
    from foedus.report.page import document

    written, rows = [], []
    for name in PAPERS:
        results = [r for key in paper(name).items if (r := stored(folder, name, key)) is not None]
        if not results:
            continue
        body = "".join(_item_html(r) for r in results)
        title = f"{paper(name).family}: {paper(name).title}"
        written.append(folder / f"{name}.html")
        written[-1].write_text(
            document(title, "The paper's numbers beside ours.", '<p><a href="index.html">All papers</a></p>' + body)
        )
        for r in results:
            cells = [
                f'<a href="{name}.html#{r.key}">{name} {r.key}</a>',
                html.escape(r.item.title),
                r.scale,
                _minutes(r),
                _badges(r),
            ]
            rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{h}</th>" for h in ("item", "what it is", "scale", "minutes", "claims"))
    body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    written.append(folder / "index.html")
    written[-1].write_text(
        document("The papers, reproduced", "Every table and figure, with the claims that it supports.", body)
    )
    return written


_COLOURS = {"holds": "#1a7f37", "does not hold": "#b3261e", "not measured": "#57606a"}


def _badges(result: Result) -> str:
    counts = count(result.verdicts)
    parts = [
        f'<span style="color:{_COLOURS[k]}">{n} {k if n == 1 else {"holds": "hold", "does not hold": "do not hold"}.get(k, k)}</span>'
        for k, n in counts.items()
        if n
    ]
    return ", ".join(parts) or "–"


def _item_html(r: Result) -> str:
    from foedus.report.plots import drawing, inline

    parts = [
        f'<section id="{r.key}">\n<h2>{html.escape(r.item.title)}{" (ours)" if r.item.extra else ""}</h2>',
        f"<pre>{html.escape(r.command)}</pre>",
    ]
    parts += [f"<p>{html.escape(text)}</p>" for text in r.remarks]
    drawn = pictures(r)
    with drawing():
        for number, view in enumerate(r.item.views):
            if (figure := next((f for v, f in drawn if v is view), None)) is not None:
                caption = view.caption or r.item.title
                svg = inline(figure, f"{r.name} {r.key} {number}")
                width = figure.get_figwidth() * 100
                parts.append(
                    f'<figure class="wide" style="max-width:{width:.0f}px">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'
                )
            table = table_of(view, r.found)
            if table:
                shown = _table_html(*table)
                caption = f'<p class="soft">{html.escape(view.caption)}</p>' if isinstance(view, Table) and view.caption else ""
                parts.append(
                    shown + caption
                    if isinstance(view, Table)
                    else f"<details><summary>Some of its points</summary>{shown}</details>"
                )
    if r.verdicts:
        rows = "".join(
            f'<tr><td class="remark">{html.escape(text)}</td><td style="color:{_COLOURS[verdict]};font-weight:600">{verdict}</td>'
            f'<td class="remark wide">{html.escape(numbers)}</td></tr>'
            for text, verdict, numbers in r.verdicts
        )
        parts.append(
            f'<div class="scroll"><table><thead><tr><th>claim</th><th></th><th>our numbers</th></tr></thead><tbody>{rows}</tbody></table></div>'
        )
    settings = "".join(f"<tr><th>{html.escape(k)}</th><td class='value'>{html.escape(v)}</td></tr>" for k, v in settings_of(r))
    parts.append(
        f"<details><summary>Settings</summary><div class='scroll'><table><tbody>{settings}</tbody></table></div>"
        f'<p class="soft">{html.escape(_made_with(r))}</p></details></section>'
    )
    return "\n".join(parts)


def _table_html(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=number' if _numeric(c) else ''}>{html.escape(c)}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
