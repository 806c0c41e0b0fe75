"""LEAF's JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foedus.data.formats.raw import Raw, read_bytes
from foedus.errors import DataError


def read_leaf(path: Path, label: object = None, group: object = None) -> Raw:
    """LEAF JSON, a file or a folder with train/ and test/: `users`, `num_samples`, `user_data`.

    A user is a group. Text rows (LEAF's Shakespeare: windows of characters and the next one) become
    character ids; the alphabet is that of the data.
    """
    if path.is_file():
        train, test = [path], []
    else:
        train, test = (sorted((path / part).glob("*.json*")) for part in ("train", "test"))
        train = train or sorted(path.glob("*.json*"))
    if not train:
        raise DataError(f"{path}: no LEAF JSON; expected train/*.json and test/*.json")
    users: dict[str, int] = {}
    x, y, groups = _leaf_rows(train, users)
    x_test, y_test, groups_test = _leaf_rows(test, users)
    if not x:
        raise DataError(f"{train[0]}: no rows in any user's data")
    names: list[str] | None = None
    if isinstance(x[0], str):
        texts = [*x, *y, *x_test, *y_test]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{path}: some rows are text and some are numbers; expected one kind")
        names = sorted(set().union(*texts))

    def arrays(x: list, y: list) -> tuple[np.ndarray, np.ndarray]:
        if names is None:
            return _leaf_array(x, "x", path), _leaf_array(y, "y", path)
        return characters(x, names, path), characters(y, names, path)[:, 0].astype(np.int64)

    raw = Raw(*arrays(x, y), None, None, names, groups, None, list(users), tokens=bool(names))
    if x_test:
        raw.x_test, raw.y_test = arrays(x_test, y_test)
        raw.groups_test = groups_test
    return raw


def _leaf_rows(files: list[Path], users: dict[str, int]) -> tuple[list, list, np.ndarray]:
    x: list[Any] = []
    y: list[Any] = []
    groups = []
    for file in files:
        try:
            content = json.loads(read_bytes(file))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: not JSON ({error})") from None
        content = content if isinstance(content, dict) else {}
        names, data = content.get("users"), content.get("user_data")
        if not isinstance(names, list) or not isinstance(data, dict):
            raise DataError(
                f"{file}: not LEAF JSON; expected an object with 'users', 'num_samples' and "
                "'user_data'"
            )
        counts = content.get("num_samples")
        for position, user in enumerate(names):
            entry = data.get(user) if isinstance(user, str) else None
            entry = entry if isinstance(entry, dict) else {}
            rows, labels = entry.get("x", ()), entry.get("y", ())
            lists = isinstance(rows, list) and isinstance(labels, list)
            if not lists or len(rows) != len(labels):
                raise DataError(
                    f"{file}: user_data of user {user!r} has no lists 'x' and 'y' of equal length"
                )
            short = isinstance(counts, list) and position >= len(counts)
            if short or (isinstance(counts, list) and counts[position] != len(rows)):
                raise DataError(
                    f"{file}: num_samples of user {user!r} differs from its {len(rows)} rows"
                )
            x += rows
            y += labels
            groups.append(np.full(len(rows), users.setdefault(user, len(users))))
    return x, y, np.concatenate(groups) if groups else np.zeros(0, np.int64)


def _leaf_array(rows: list, field: str, path: Path) -> np.ndarray:
    try:
        array = np.array(rows)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"{path}: {field!r} is not a table of numbers; expected rows of equal length"
        )
    return array


def characters(texts: Sequence[str], alphabet: Sequence[str], where: object) -> np.ndarray:
    """Character ids of texts of equal length, int32 `[n, length]`."""
    if not len(texts):
        return np.zeros((0, 1), np.int32)
    length = len(texts[0])
    wrong = next((i for i, t in enumerate(texts) if len(t) != length), None)
    if wrong is not None or length == 0:
        raise DataError(
            f"{where}: text row {wrong or 0} has {len(texts[wrong or 0])} characters, the first "
            f"has {length}; expected equal lengths"
        )
    codes = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    # the alphabet is sorted, and so are its codes
    known = np.frombuffer("".join(alphabet).encode("utf-32-le"), np.uint32)
    return np.searchsorted(known, codes).astype(np.int32).reshape(len(texts), length)
