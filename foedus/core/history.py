"""The history of a run: one row per round with its scores and its costs so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

COSTS = ("round", "seconds", "bytes_up", "bytes_down", "messages_up", "clients")
"""The costs of a round; other columns are scores."""

FIRST = (*COSTS, "loss", "accuracy", "mse")


class History:
    """Rows of numbers.

    `seconds`, `bytes_up`, `bytes_down` and `messages_up` are cumulative; row 0 is after the start.
    """

    def __init__(self, rows: list[dict[str, Any]] | None = None):
        self.rows: list[dict[str, Any]] = []
        self.seen: dict[str, Any] = {}  # the latest value of each column
        for row in rows or []:
            self.append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.seen |= {
            k: v
            for k, v in row.items()
            if k not in self.seen or v == v  # not NaN
        }

    def extend(self, values: dict[str, Any]) -> None:
        """Add columns to the last row."""
        self.append(self.rows.pop() | values)

    @property
    def columns(self) -> list[str]:
        """The usual columns first, then what the algorithm adds, in order of appearance."""
        return [c for c in FIRST if c in self.seen] + [c for c in self.seen if c not in FIRST]

    @property
    def scores(self) -> list[str]:
        """The columns that are neither costs nor ids of clients."""
        return [c for c in self.columns if c not in COSTS and not c.endswith("_worst_client")]

    def values(self, column: str) -> list[float]:
        """One column; NaN in rounds without a value."""
        return [row.get(column, math.nan) for row in self.rows]

    def last(self, column: str) -> float:
        """The latest value of a column (NaN if there is none)."""
        return self.seen.get(column, math.nan)

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame({c: self.values(c) for c in self.columns}).astype(
            {
                c: int
                for c in ("round", "bytes_up", "bytes_down", "messages_up", "clients")
                if c in self.columns
            }
        )

    def to_json(self) -> list[dict[str, Any]]:
        return self.rows
