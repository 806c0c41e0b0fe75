"""Divide a data set among clients: every training row goes to one client, and no client is empty."""

from __future__ import annotations

from foedus.data.partition.labels import (
    SCHEMES,
    _natural,
    _tasks,
    apportion,
    deal_test_rows,
    scheme_options,
    split,
)

__all__ = [
    "SCHEMES",
    "_natural",
    "_tasks",
    "apportion",
    "deal_test_rows",
    "scheme_options",
    "split",
]
