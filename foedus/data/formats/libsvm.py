"""LIBSVM's text format."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from foedus.data.formats.raw import SLACK, Raw, read_bytes, shown_line
from foedus.errors import DataError

_DENSE_BYTES = 4 << 30


# LIBSVM text


def read_libsvm(
    path: Path, label: object = None, group: object = None, features: int | None = None
) -> Raw:
    """LIBSVM (svmlight) text: `label index:value ...` a line, indices from 1 and rising; plain,
    .gz, .bz2 or .xz.

    Comments after `#` are skipped. `features` widens the rows (a test file may lack the last
    features).
    """
    text = read_bytes(path)
    if b"\0" in text[:4096]:
        raise DataError(f"{path}: a binary file; expected lines 'label index:value ...'")
    parsed = _libsvm_fast(text)
    y, row, index, value = parsed if parsed is not None else _libsvm_lines(path, text)
    if len(y) == 0:
        raise DataError(f"{path}: no rows; expected lines 'label index:value ...'")
    width = max(int(index.max()) if len(index) else 1, features or 1)
    entries = len(y) * width
    if entries > 1000 * len(text) + SLACK or entries * 4 > _DENSE_BYTES:
        raise DataError(
            f"{path}: {len(y)} rows of {width} features (the largest index) are too many to hold "
            "densely; select features first"
        )
    x = np.zeros((len(y), width), np.float32)
    x[row, index - 1] = value
    if np.isfinite(y).all() and (y == np.floor(y)).all() and np.abs(y).max() < 2**53:
        y = y.astype(np.int64)
    return Raw(x, y)


def _libsvm_fast(text: bytes) -> tuple[np.ndarray, ...] | None:
    """Labels, rows, indices and values of a clean file in whole-array operations; `None` where a
    line needs a closer look.
    """
    if b"#" in text or b"qid" in text:
        return None
    text = text.rstrip() + b"\n"
    if text == b"\n":
        return np.zeros(0), *[np.zeros(0, np.int64)] * 2, np.zeros(0)
    byte = np.frombuffer(text, np.uint8)
    space = byte <= 32
    between = space | (byte == ord(":"))
    starts = np.flatnonzero(~between & np.concatenate(([True], between[:-1])))
    newlines = np.flatnonzero(byte == 10)
    line = np.searchsorted(newlines, starts)
    first = np.concatenate(([True], line[1:] != line[:-1]))
    place = np.arange(len(starts)) - np.maximum.accumulate(
        np.where(first, np.arange(len(starts)), 0)
    )
    colon = np.concatenate(([False], byte[starts[1:] - 1] == ord(":")))
    # label, then index:value pairs: every second token follows a colon, and colons stand nowhere
    # else.
    if (colon != ((place % 2 == 0) & (place > 0))).any() or colon.sum() != (byte == ord(":")).sum():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(
                text.replace(b":", b" ").decode("ascii"), sep=" ", dtype=np.float64
            )
        except (ValueError, DeprecationWarning, UnicodeDecodeError):
            return None
    if len(numbers) != len(starts):
        return None
    is_index = place % 2 == 1
    row = (np.cumsum(first) - 1)[is_index]
    index = numbers[is_index]
    rising = (np.diff(index) > 0) | (np.diff(row) > 0)
    if (
        len(row) != colon.sum()
        or not rising.all()
        or (index < 1).any()
        or (index > 2**31).any()
        or (index != np.floor(index)).any()
    ):
        return None
    return numbers[place == 0], row, index.astype(np.int64), numbers[colon]


def _libsvm_lines(path: Path, text: bytes) -> tuple[np.ndarray, ...]:
    """The same line by line, which handles comments and names the line that is wrong."""
    labels, rows, indices, values = [], [], [], []
    for number, line in enumerate(text.split(b"\n"), 1):
        tokens = line.split(b"#", 1)[0].split()
        if not tokens:
            continue
        try:
            labels.append(float(tokens[0]))
        except ValueError:
            raise DataError(
                f"{path}, line {number}: label {shown_line(tokens[0])} is not a number; expected "
                "'label index:value ...'"
            ) from None
        last = 0
        for token in tokens[1:]:
            key, _, entry = token.partition(b":")
            if key == b"qid":
                continue
            try:
                index, value = int(key), float(entry)
            except ValueError:
                raise DataError(
                    f"{path}, line {number}: {shown_line(token)} is not a pair index:value of "
                    "numbers"
                ) from None
            if not last < index <= 2**31:
                raise DataError(
                    f"{path}, line {number}: index {index} after {last}; indices begin at 1 and "
                    "rise within a line"
                )
            last = index
            rows.append(len(labels) - 1)
            indices.append(index)
            values.append(value)
    return np.array(labels), np.array(rows, np.int64), np.array(indices, np.int64), np.array(values)
