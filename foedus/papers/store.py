"""Finished cells of an item in a file, so that they are not run again."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from foedus.errors import FoedusError
from foedus.papers.item import Found, Scale
from foedus.storage.checkpoint import replace as replace_file
from foedus.version import __version__


@dataclass(frozen=True)
class Cell:
    """Settings and seed of a cell; once it has run also its rows, seconds and versions."""

    settings: dict[str, Any]
    seed: int
    rows: list[dict[str, Any]] | None = None
    seconds: float | None = None
    versions: dict[str, str] | None = None

    @property
    def key(self) -> str:
        return json.dumps({**self.settings, "seed": self.seed}, sort_keys=True)


class Store:
    """The cells of one item at one scale: FOLDER/fedfw-table1.json or FOLDER/quick/fedfw-....json.

    fixed: `Item.fixed`. Cells that were stored with another are not found.
    """

    def __init__(
        self, folder: Path, paper: str, item: str, scale: Scale, fixed: Mapping[str, str] = {}
    ):
        self.fixed = dict(fixed)
        self.head = {"paper": paper, "item": item, "scale": scale, "fixed": self.fixed}
        self.path = (folder if scale == "usual" else folder / scale) / f"{paper}-{item}.json"
        self.cells = self._read()

    def _read(self) -> dict[str, Cell]:
        if not self.path.exists():
            return {}
        try:
            kept = json.loads(self.path.read_text())
            cells = [
                Cell(**c) for c in kept["cells"] if kept.get("fixed", self.fixed) == self.fixed
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FoedusError(
                f"{self.path} is not a file of results ({error}); rename it to run its cells again"
            ) from error
        return {c.key: c for c in cells}

    def add(self, cell: Cell) -> None:
        """Keep a finished cell beside those that other processes have added, atomically."""
        cell = replace(cell, rows=_plain(cell.rows))  # as it will be read
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # no other process writes between our reading and writing
        with FileLock(self.path.parent / ".lock"):
            self.cells |= self._read() | {cell.key: cell}
            head = json.dumps(self.head)[:-1]
            body = ",\n".join(_line(c) for c in self.cells.values())
            replace_file(self.path, [f'{head}, "cells": [\n{body}\n]}}\n'.encode()])


def found_in(cells: Iterable[Cell]) -> Found:
    """The rows of cells that have run."""
    rows = [{**c.settings, "seed": c.seed, **row} for c in cells for row in c.rows or []]
    return Found(pd.DataFrame(rows))


def versions() -> dict[str, str]:
    """Of what a number may depend on."""
    packages = ("torch", "numpy", "scipy", "scikit-learn")
    found = {"foedus": __version__, "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in packages}


def _line(cell: Cell) -> str:
    seconds = cell.seconds and round(cell.seconds, 1)
    fields = {"settings": cell.settings, "seed": cell.seed, "seconds": seconds}
    return json.dumps(fields | {"versions": cell.versions, "rows": _plain(cell.rows)})


def _plain(value: Any) -> Any:
    """As JSON has it: seven digits, and None for NaN and infinity."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
