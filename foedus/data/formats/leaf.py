"""LEAF's JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foedus.data.formats.raw import Raw, read_bytes
from foedus.errors import DataError

# LEAF JSON


def read_leaf(path: Path, label: object = None, group: object = None) -> Raw:
    """LEAF JSON, a file or a folder with train/ and test/: `users`, `num_samples`, `user_data[u]`
    with `x` and `y`.

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
    x: Any
    y: Any
    x_test: Any
    y_test: Any
    groups_test: Any  # lists, then arrays or nothing
    x, y, groups = _leaf_rows(train, users)
    x_test, y_test, groups_test = (
        _leaf_rows(test, users) if test else ([], [], np.zeros(0, np.int64))
    )
    if not x:
        raise DataError(f"{train[0]}: no rows in any user's data")
    names: list[str] | None = None
    tokens = isinstance(x[0], str)
    if tokens:
        if not all(isinstance(r, str) for part in (x, y, x_test, y_test) for r in part):
            raise DataError(f"{path}: some rows are text and some are numbers; expected one kind")
        names = sorted(set().union(*x, *y, *x_test, *y_test))
        x, y, x_test, y_test = (characters(part, names, path) for part in (x, y, x_test, y_test))
        y, y_test = (
            y[:, 0].astype(np.int64),
            y_test[:, 0].astype(np.int64) if len(y_test) else np.zeros(0, np.int64),
        )
    else:
        x, y = _leaf_array(x, "x", path), _leaf_array(y, "y", path)
        if test:
            x_test, y_test = _leaf_array(x_test, "x", path), _leaf_array(y_test, "y", path)
    if not len(x_test):
        x_test = y_test = groups_test = None
    return Raw(x, y, x_test, y_test, names, groups, groups_test, list(users), tokens=tokens)


def _leaf_rows(files: list[Path], users: dict[str, int]) -> tuple[list, list, np.ndarray]:
    x, y, groups = [], [], []
    for file in files:
        try:
            content = json.loads(read_bytes(file))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: not JSON ({error})") from None
        data = content.get("user_data") if isinstance(content, dict) else None
        if (
            not isinstance(content, dict)
            or not isinstance(content.get("users"), list)
            or not isinstance(data, dict)
        ):
            raise DataError(
                f"{file}: not LEAF JSON; expected an object with 'users', 'num_samples' and "
                "'user_data'"
            )
        counts = content.get("num_samples")
        for position, user in enumerate(content["users"]):
            entry = data.get(user) if isinstance(user, str) else None
            rows, labels = (
                (entry.get("x"), entry.get("y")) if isinstance(entry, dict) else (None, None)
            )
            if (
                not isinstance(rows, list)
                or not isinstance(labels, list)
                or len(rows) != len(labels)
            ):
                raise DataError(
                    f"{file}: user_data of user {user!r} has no lists 'x' and 'y' of equal length"
                )
            if isinstance(counts, list) and (
                position >= len(counts) or counts[position] != len(rows)
            ):
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
    """Character ids of texts of equal length, float32 `[n, length]`: exact below 2^24, and the type
    of every feature.
    """
    if not len(texts):
        return np.zeros((0, 1), np.float32)
    length = len(texts[0])
    wrong = next((i for i, t in enumerate(texts) if len(t) != length), None)
    if wrong is not None or length == 0:
        raise DataError(
            f"{where}: text row {wrong or 0} has {len(texts[wrong or 0])} characters, the first "
            f"has {length}; "
            "expected equal lengths"
        )
    codes = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    # sorted, as its characters are
    known = np.frombuffer("".join(alphabet).encode("utf-32-le"), np.uint32)
    return np.searchsorted(known, codes).astype(np.float32).reshape(len(texts), length)
