"""What a table or figure of a paper is: cells to run, how to show what they found, and the claims
that it supports.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

Scale = Literal["quick", "usual", "full"]
SCALES: tuple[Scale, ...] = ("quick", "usual", "full")
"""About a minute; the paper's, as far as the data at hand and two cores allow; the paper's own."""


class Missing(Exception):  # noqa: N818 - nothing went wrong
    """A claim about something that was not run."""


@dataclass(frozen=True)
class Found:
    """The rows that finished cells returned: one DataFrame, with the cells' settings and `seed` as
    columns.
    """

    frame: pd.DataFrame

    def where(self, **values: Any) -> Found:
        """The rows with these values, at least one; a list means any of its values."""
        frame = self.frame
        keep = np.ones(len(frame), bool)
        for name, value in values.items():
            if name not in frame:
                raise Missing(f"no {name}")
            accepted = value if isinstance(value, list | tuple) else [value]
            keep &= frame[name].isin(accepted).to_numpy()
        frame = frame[keep]
        if frame.empty:
            raise Missing(", ".join(f"{k} {v}" for k, v in values.items()))
        return Found(frame)

    def mean(self, value: str, **values: Any) -> float:
        """The average over everything that is not named."""
        frame = self.where(**values).frame
        if value not in frame or frame[value].dropna().empty:
            raise Missing(", ".join(f"{k} {v}" for k, v in values.items()) or value)
        return float(frame[value].mean())

    def line(self, x: str, value: str, **values: Any) -> pd.Series:
        """Averages by x."""
        frame = self.where(**values).frame
        if value not in frame or frame[value].dropna().empty:
            raise Missing(", ".join(f"{k} {v}" for k, v in values.items()))
        return frame.dropna(subset=[value]).groupby(x)[value].mean()

    def values(self, name: str) -> list[Any]:
        """The different values of a column, in order of appearance."""
        return list(dict.fromkeys(self.frame[name].dropna())) if name in self.frame else []


@dataclass(frozen=True)
class Claim:
    """A statement about our numbers. `test` returns whether it holds and the numbers that say so;
    Missing means not run.

    ours: it is not in the paper.
    """

    text: str
    test: Callable[[Found], tuple[bool, str]]
    ours: bool = False

    def judge(self, found: Found, whole: bool = True) -> tuple[str, str]:
        """("holds" | "does not hold" | "not measured", the numbers). whole: all cells have run, so
        that nothing it looks for may be missing.
        """
        expected = (Missing,) if whole else (Missing, LookupError, ValueError)
        try:
            holds, why = self.test(found)
        except expected as missing:
            return "not measured", str(missing)
        return ("holds" if holds else "does not hold"), why


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    return frame


@dataclass(frozen=True)
class Table:
    """Averages over seeds: a row for each combination of `rows`, a column for each of `columns` and
    each of `values`.

    published: the paper's number for a row (by its values of `rows`, or of `rows` and `columns`);
    it stands beside ours, and the difference in brackets behind those of ours that `compared` names
    (of `values`; all, if empty). never: what an infinite number of ours, and of the paper's, is
    called.
    """

    rows: tuple[str, ...]
    values: tuple[str, ...] = ("accuracy",)
    columns: tuple[str, ...] = ()
    published: Mapping[tuple, float | str] = field(default_factory=dict)
    compared: tuple[str, ...] = ()
    digits: int = 2
    never: tuple[str, str] = ("not reached", "not reached")
    select: Callable[[pd.DataFrame], pd.DataFrame] = _whole
    caption: str = ""


@dataclass(frozen=True)
class Lines:
    """Curves: y against x, one for each value of `line`, in a panel for each value of `panel`."""

    x: str
    y: str
    line: str
    panel: str | None = None
    log: str = ""
    columns: int = 4
    limits: Callable[[pd.DataFrame], tuple[float, float]] | None = None
    select: Callable[[pd.DataFrame], pd.DataFrame] = _whole
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars: groups by x, one bar for each value of `bar`."""

    x: str
    y: str
    bar: str
    low: float = 0.0
    select: Callable[[pd.DataFrame], pd.DataFrame] = _whole
    caption: str = ""


@dataclass(frozen=True)
class Circles:
    """Counts as circles: x against y, in a panel for each value of `panel`."""

    x: str
    y: str
    count: str
    panel: str
    caption: str = ""


@dataclass(frozen=True)
class Images:
    """Small pictures (nested lists, values from 0 to 1): `image` in a row for each value of `row`,
    named by `name`.
    """

    image: str
    row: str
    name: str
    caption: str = ""


View = Table | Lines | Bars | Circles | Images


@dataclass(frozen=True)
class Item:
    """One table or figure.

    cell: runs one cell, `cell(seed=..., **settings)`, and returns rows (a dict each) of numbers and
    names. cells: the settings of all cells of a scale, each a dict of plain values; after it, the
    rows of the items that it needs, for each of `needs`. fixed: settings that all cells share and
    that are no argument of `cell`, in words: shown beside the others, and stored: cells that ran
    with others are run again. seeds: how many at each scale, or a function of a cell's settings.
    minutes: about how long it takes on two cores. scale: in words, what was cut down here and what
    the paper has. notes: why ours may differ.
    """

    title: str
    cell: Callable[..., list[dict[str, Any]]]
    cells: Callable[..., Iterable[dict[str, Any]]]
    views: tuple[View, ...]
    claims: tuple[Claim, ...] = ()
    seeds: Mapping[str, int | Callable[[dict[str, Any]], int]] = field(
        default_factory=lambda: {"quick": 1, "usual": 3, "full": 10}
    )
    minutes: Mapping[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    scale: str = ""
    notes: str = ""
    extra: bool = False
    """Not in the paper; ours, to explain or to go on."""


@dataclass(frozen=True)
class Paper:
    """A paper: its items by name, in its order."""

    title: str
    family: str
    items: Mapping[str, Item]


def product(**axes: Iterable[Any] | Any) -> list[dict[str, Any]]:
    """All combinations of settings; a plain value stands for itself."""
    lists = [list(v) if isinstance(v, list | tuple | range) else [v] for v in axes.values()]
    return [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*lists)]


def slope(line: pd.Series, last: int = 4) -> float:
    """Of log y against log x over the last few points."""
    line = line.tail(last)
    if len(line) < 2:
        raise Missing("a second point")
    return float(np.polyfit(np.log(line.index.to_numpy(float)), np.log(line.to_numpy(float)), 1)[0])
