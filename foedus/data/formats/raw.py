"""The result of every reader (`Raw`), and bounded reading of compressed files."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foedus.errors import DataError

# Deflate shrinks at most 1032-fold; a file that claims more is damaged or hostile.
_RATIO = 1100
SLACK = 1 << 20


Names = Sequence[str] | np.ndarray


@dataclass
class Raw:
    """Arrays of a file: features, and labels as they are written.

    Those of a test part are `None` if there is none.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray | None = None
    y_test: np.ndarray | None = None
    class_names: Names | None = None
    groups_train: np.ndarray | None = None
    groups_test: np.ndarray | None = None
    group_names: Names | None = None
    feature_names: Names | None = None
    # for each column of texts, by name, the texts of its codes 0, 1, ...
    categories: dict[str, tuple[str, ...]] | None = None
    together: np.ndarray | None = None  # rows of equal value stay on one side of the test split
    weights_train: np.ndarray | None = None
    weights_test: np.ndarray | None = None
    left_out: Names = ()  # columns of the table that are not features
    label: str | None = None  # the column of a table to predict
    tokens: bool = False  # features are character ids, which must not be scaled
    # other labels of the same rows, for the cache
    extra: dict[str, np.ndarray] = field(default_factory=dict)


def read_bytes(path: Path) -> bytes:
    """Contents of a file, decompressed by its ending (.gz, .bz2, .xz) up to a bound."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opener = openers.get(path.suffix.lower(), open)
    limit = path.stat().st_size * _RATIO + SLACK
    chunks, total = [], 0
    with opener(path, "rb") as file:
        while chunk := file.read(1 << 22):
            chunks.append(chunk)
            total += len(chunk)
            if total > limit:
                raise DataError(
                    f"{path}: decompresses to more than {_RATIO} times its size; it is damaged or "
                    "not meant to be read"
                )
    return b"".join(chunks)


def shown_line(token: bytes) -> str:
    text = token.decode("utf-8", "replace")
    return repr(text if len(text) <= 40 else text[:40] + "...")
