"""Finished cells of an item, in a file: what was stopped goes on where it was, and what is known is
not run again.
"""

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
    """The settings and seed of a cell, and once it has run, its rows, the seconds it took and the
    versions it ran with.
    """

    settings: dict[str, Any]
    seed: int
    rows: list[dict[str, Any]] | None = None
    seconds: float | None = None
    versions: dict[str, str] | None = None

    @property
    def key(self) -> str:
        return json.dumps({**self.settings, "seed": self.seed}, sort_keys=True)


class Store:
    """The cells of one item at one scale: results/fedfw-table1.json,
    results/quick/fedfw-table1.json.

    fixed: `Item.fixed`. Cells that were stored with another are not found.
    """

    def __init__(
        self,
        folder: Path,
        paper: str,
        item: str,
        scale: Scale,
        fixed: Mapping[str, str] | None = None,
    ):
        self.paper, self.item, self.scale, self.fixed = paper, item, scale, dict(fixed or {})
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
                f"{self.path} is not a file of results ({error}); move it away to run its cells "
                "again"
            ) from error
        return {c.key: c for c in cells}

    def add(self, cell: Cell) -> None:
        """Keep a finished cell, beside those that another process has added; the file is whole at
        every moment.
        """
        cell = replace(cell, rows=_plain(cell.rows))  # as it will be read
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # no other process writes between our reading and writing
        with FileLock(self.path.parent / ".lock"):
            self.cells |= self._read() | {cell.key: cell}
            head = json.dumps(
                {"paper": self.paper, "item": self.item, "scale": self.scale, "fixed": self.fixed}
            )
            body = ",\n".join(_line(c) for c in self.cells.values())
            replace_file(self.path, [f'{head[:-1]}, "cells": [\n{body}\n]}}\n'.encode()])


def found_in(cells: Iterable[Cell]) -> Found:
    """The rows of cells that have run."""
    return Found(
        pd.DataFrame([{**c.settings, "seed": c.seed, **row} for c in cells for row in c.rows or []])
    )


def versions() -> dict[str, str]:
    """Of what a number may depend on."""
    found = {"foedus": __version__, "python": platform.python_version()}
    return found | {
        name: metadata.version(name) for name in ("torch", "numpy", "scipy", "scikit-learn")
    }


def _line(cell: Cell) -> str:
    return json.dumps(
        {
            "settings": cell.settings,
            "seed": cell.seed,
            "seconds": cell.seconds and round(cell.seconds, 1),
            "versions": cell.versions,
            "rows": _plain(cell.rows),
        }
    )


def _plain(value: Any) -> Any:
    """As JSON has it: seven digits, and numbers that are not finite as None (they are "not reached"
    or "diverged").
    """
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
