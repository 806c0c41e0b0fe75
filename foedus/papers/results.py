"""Stored results of an item, and their tables as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from foedus.papers.item import Circles, Found, Item, Lines, Scale, Table, View
from foedus.papers.runner import item_of, paper, wanted
from foedus.papers.store import Cell, Store, found_in

QUICK = "Scale: quick, with fewer rows, rounds and seeds; see the settings."


@dataclass(frozen=True)
class Result:
    """An item, the scale it ran at, and its results."""

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

    @cached_property
    def verdicts(self) -> list[tuple[str, str, str]]:
        """(claim, "holds" | "does not hold" | "not measured", numbers)."""
        part = "" if self.complete else f" (of {len(self.cells)} of {self.asked} cells)"
        found = []
        for c in self.item.claims:
            verdict, numbers = c.judge(self.found, self.complete)
            numbers += part if verdict != "not measured" else ""
            found.append((c.text + " (ours)" * c.ours, verdict, numbers))
        return found

    @property
    def complete(self) -> bool:
        return len(self.cells) >= self.asked

    @property
    def remarks(self) -> list[str]:
        """What is smaller than in the paper, and other reasons for differences."""
        scale = {"usual": self.item.scale and f"Scale: {self.item.scale}", "quick": QUICK}
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
        """Versions of packages over all cells; if they differ, all of them."""
        found: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for name, version in (cell.versions or {}).items():
                found.setdefault(name, {})[version] = None
        return {name: ", ".join(versions) for name, versions in found.items()}


def stored(
    folder: Path, name: str, key: str, scales: Sequence[Scale] = ("full", "usual", "quick")
) -> Result | None:
    """The largest complete scale of an item; if none is complete, the largest with any cell."""
    found = [r for scale in scales if (r := _stored(folder, name, key, scale)) is not None]
    return next((r for r in found if r.complete), found[0] if found else None)


def _stored(folder: Path, name: str, key: str, scale: Scale) -> Result | None:
    store = Store(folder, name, key, scale, item_of(name, key).fixed)
    if not store.cells:
        return None
    usual = wanted(name, key, scale, folder)
    more = wanted(name, key, scale, folder, seeds=max(c.seed for c in store.cells.values()) + 1)
    asked = {c.key: c for c in (*usual, *more)}
    # not those of settings that have changed since
    cells = [store.cells[k] for k in asked if k in store.cells]
    if not any(c.rows for c in cells):
        return None
    total = len(cells) + sum(c.key not in store.cells for c in usual)
    item = paper(name).items[key]
    return Result(name, key, item, scale, tuple(cells), total, found_in(cells))


# -- tables ----------------------------------------------------------------------------------------


def table_of(view: View, found: Found) -> tuple[list[str], list[list[str]]] | None:
    """Headings and rows of text; None if a view has nothing that a table could show."""
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
    headings += [
        ", ".join((*map(plain, c), *([v] if len(values) > 1 or not c else [])))
        for c in columns
        for v in values
    ]
    body = []
    for row in rows:
        known = view.published.get(row)
        line = [*map(plain, row)]
        if by_row:
            line.append(_number(known, max(2, view.digits), view.never[1]))
        for column in columns:
            group = groups.get((*row, *column))
            for value in values:
                text, mean = _mean(group, value, view.digits, view.never[0])
                beside = view.published.get((*row, *column)) if view.columns else None
                compared = not view.compared or value in view.compared
                if mean is not None and known is not None and compared:
                    if view.digits < 7:
                        text += f" ({mean - float(known):+.{min(view.digits, 2)}f})"
                elif beside is not None and text != "–":
                    text += f" ({_number(beside, view.digits, view.never[1])})"
                line.append(text)
        body.append(line)
    return headings, body


def _keys(frame: pd.DataFrame, names: Sequence[str]) -> list[tuple]:
    rows = frame[list(names)].itertuples(index=False, name=None)
    return [tuple(key_of(v) for v in row) for row in rows]


def key_of(value: Any) -> Any:
    """NaN is not equal to itself, and would never be found again."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _grouped(frame: pd.DataFrame, names: Sequence[str]) -> Iterable[tuple[tuple, pd.DataFrame]]:
    keys = pd.Series(_keys(frame, names), index=frame.index)
    groups = keys.groupby(keys, sort=False).groups
    return [(cast("tuple", key), frame.loc[index]) for key, index in groups.items()]


def _mean(
    group: pd.DataFrame | None, value: str, digits: int, never: str
) -> tuple[str, float | None]:
    """Mean and standard deviation: over seeds, or within the only cell where it says so.

    Seeds that diverged are counted.
    """
    if group is None or group[value].dropna().empty:
        return "–", None
    numbers = group[value].dropna().to_numpy(float)
    mean = float(numbers.mean())
    if not math.isfinite(mean):
        return _number(mean, digits, never), None
    text, inside = _number(mean, digits), f"{value} spread"
    if digits < 7 and (len(numbers) > 1 or inside in group):
        spread = numbers.std() if len(numbers) > 1 else group[inside].mean()
        text += f" ± {_number(float(spread), digits)}"
    if len(numbers) < len(group) and group["seed"].nunique() == len(group):
        text += f" ({len(numbers)} of {len(group)} seeds)"
    return text, mean


def _points(
    view: Lines, frame: pd.DataFrame, most: int = 7
) -> tuple[list[str], list[list[str]]] | None:
    """Some points of every curve."""
    if frame.empty:
        return None
    xs = sorted(frame[view.x].dropna().unique())
    if len(xs) > most:
        space = np.geomspace if "x" in view.log else np.linspace
        xs = [xs[i - 1] for i in sorted({round(v) for v in space(1, len(xs), most)})]
    names = ([view.panel] if view.panel else []) + [view.line]
    body = []
    for key, group in _grouped(frame, names):
        line = group.groupby(view.x)[view.y].mean()
        body.append([*map(plain, key), *(_significant(line.get(x, float("nan"))) for x in xs)])
    return [*names, *(f"{view.x} {plain(x)}" for x in xs)], body


def plain(value: Any) -> str:
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
    if math.isnan(value):
        return "–"
    return f"{value:.1f}" if 10 <= abs(value) < 1e5 else f"{value:.4g}"


def numeric(text: str) -> bool:
    return text == "–" or text.startswith("not reached") or text.lstrip("-+")[:1].isdigit()


# -- readable text ---------------------------------------------------------------------------------


def duration(minutes: float | None) -> str:
    """About how long."""
    if not minutes:
        return "–"
    if minutes < 1.5:
        return "1 min" if minutes > 0.7 else f"{max(5, round(60 * minutes / 5) * 5)} s"
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 2880 else f"{minutes / 1440:.0f} days"


def settings_of(result: Result) -> list[tuple[str, str]]:
    """Every setting of an item's cells: its one value, or all of its values."""
    found: dict[str, dict[str, None]] = {}
    for cell in result.cells:
        for name, value in cell.settings.items():
            found.setdefault(name, {})[_value(value)] = None
    rows = [(name, ", ".join(values)) for name, values in found.items()]
    seeds = ", ".join(str(s) for s in result.found.values("seed"))
    return [*rows, *result.item.fixed.items(), ("seeds", seeds)]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_value, value)) + ")"
    return "all" if value is None else plain(value)


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
