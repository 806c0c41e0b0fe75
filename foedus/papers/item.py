"""A table or figure of a paper: the cells to run, the views of their rows, and the claims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import pandas as pd

Scale = Literal["quick", "usual", "full"]
SCALES: tuple[Scale, ...] = ("quick", "usual", "full")
"""About a minute; the paper's as far as the available data and two cores allow; the paper's own."""


class Missing(Exception):  # noqa: N818 - nothing went wrong
    """A claim about cells that were not run."""


@dataclass(frozen=True)
class Found:
    """The rows that finished cells returned, with the cells' settings and `seed` as columns."""

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
            raise Missing(words(values, ""))
        return Found(frame)

    def numbers(self, value: str, **values: Any) -> pd.DataFrame:
        """The rows with these values that have a number in the column `value`, at least one."""
        frame = self.where(**values).frame
        if value not in frame or frame[value].dropna().empty:
            raise Missing(words(values, "") or value)
        return frame.dropna(subset=[value])

    def mean(self, value: str, **values: Any) -> float:
        """The average over everything that is not named."""
        return float(self.numbers(value, **values)[value].mean())

    def line(self, x: str, value: str, **values: Any) -> pd.Series:
        """Averages by x."""
        return self.numbers(value, **values).groupby(x)[value].mean()

    def gaps(
        self, value: str, by: str, one: dict, other: dict, among: Iterable[Any] | None = None
    ) -> dict[Any, float]:
        """The mean of `value` where `one` holds, minus that where `other` holds, for each `by`."""
        return {
            k: self.mean(value, **{by: k, **one}) - self.mean(value, **{by: k, **other})
            for k in (self.values(by) if among is None else among)
        }

    def values(self, name: str) -> list[Any]:
        """The different values of a column, in order of appearance."""
        return list(dict.fromkeys(self.frame[name].dropna())) if name in self.frame else []


Test = Callable[[Found], tuple[bool, str]]
"""Whether a claim holds, and the numbers that say so; raises Missing where they were not run."""
Select = Callable[[pd.DataFrame], pd.DataFrame]


@dataclass(frozen=True)
class Claim:
    """A statement about our numbers, and its test. ours: it is not in the paper."""

    text: str
    test: Test
    ours: bool = False

    def judge(self, found: Found, whole: bool = True) -> tuple[str, str]:
        """("holds" | "does not hold" | "not measured", the numbers).

        whole: all cells have run, so that nothing it looks for may be missing.
        """
        expected = (Missing,) if whole else (Missing, LookupError, ValueError)
        try:
            holds, why = self.test(found)
        except expected as missing:
            return "not measured", str(missing)
        return ("holds" if holds else "does not hold"), why


def claim(text: str, ours: bool = False) -> Callable[[Test], Claim]:
    """Decorator that makes a claim of its test."""
    return lambda test: Claim(text, test, ours)


def words(values: Mapping[Any, Any], form: str) -> str:
    """The items of a dictionary as "key value", separated by commas; form: of the values."""
    return ", ".join(f"{k} {v:{form}}" if form else f"{k} {v}" for k, v in values.items())


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    return frame


def having(column: str) -> Select:
    """The rows that have a value in this column; all where there is no such column."""
    return lambda frame: frame.dropna(subset=[column]) if column in frame else frame


@dataclass(frozen=True)
class Table:
    """Averages over seeds: a row for each of `rows`, a column for each of `columns` and `values`.

    published: the paper's number for a row (by its values of `rows`, or of `rows` and `columns`);
    it stands beside ours, and the difference in brackets behind those of ours that `compared` names
    (of `values`; all, if empty). never: the text for an infinite number, ours and the paper's.
    """

    rows: tuple[str, ...]
    values: tuple[str, ...] = ("accuracy",)
    columns: tuple[str, ...] = ()
    published: Mapping[tuple, float | str] = field(default_factory=dict)
    compared: tuple[str, ...] = ()
    digits: int = 2
    never: tuple[str, str] = ("not reached", "not reached")
    select: Select = _whole
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
    select: Select = _whole
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars: groups by x, one bar for each value of `bar`."""

    x: str
    y: str
    bar: str
    low: float = 0.0
    select: Select = _whole
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
    """Small pictures (nested lists, values from 0 to 1) named by `name`, in rows by `row`."""

    image: str
    row: str
    name: str
    caption: str = ""


View = Table | Lines | Bars | Circles | Images


@dataclass(frozen=True)
class Item:
    """One table or figure.

    cell: runs one cell, `cell(seed=..., **settings)`, and returns rows (a dict each).
    cells: the settings of all cells of a scale; called with the scale and the rows of each of
        `needs`.
    fixed: settings of all cells that are no argument of `cell`: shown, and stored; cells that ran
        with others are run again.
    seeds: how many at each scale, or a function of a cell's settings.
    minutes: about how long it takes on two cores.
    scale: what is smaller here than in the paper. notes: other reasons for differences.
    extra: it is not in the paper.
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


def records(frame: pd.DataFrame, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """These columns of the rows under their new names, a dictionary for each row."""
    rows = frame[list(columns)].rename(columns=columns).to_dict("records")
    return cast("list[dict[str, Any]]", rows)


def slope(line: pd.Series, last: int = 4) -> float:
    """Of log y against log x over the last few points."""
    line = line.tail(last)
    if len(line) < 2:
        raise Missing("a second point")
    return float(np.polyfit(np.log(line.index.to_numpy(float)), np.log(line.to_numpy(float)), 1)[0])
