"""LIBSVM's text format."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from foedus.data.formats.raw import SLACK, Raw, read_bytes, shown_line
from foedus.errors import DataError

_DENSE_BYTES = 4 << 30
_EXPECTED = "expected lines 'label index:value ...'"


def read_libsvm(path: Path, label: object = None, group: object = None) -> Raw:
    """LIBSVM (svmlight) text, plain, .gz, .bz2 or .xz: `label index:value ...`, indices from 1.

    Indices rise within a line; comments after `#` are skipped.
    """
    from sklearn.datasets import load_svmlight_file

    text = read_bytes(path)
    if b"\0" in text[:4096]:
        raise DataError(f"{path}: a binary file; {_EXPECTED}")
    try:
        x, y = load_svmlight_file(io.BytesIO(text), zero_based=False, dtype=np.float32)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}, {_first_fault(text) or error}") from None
    if len(y) == 0:
        raise DataError(f"{path}: no rows; {_EXPECTED}")
    entries, size = x.shape[0] * x.shape[1], f"{x.shape[0]} rows of {x.shape[1]} features"
    if entries > 1000 * len(text) + SLACK or entries * 4 > _DENSE_BYTES:
        raise DataError(
            f"{path}: {size} (the largest index) are too many to hold densely; select features "
            "first"
        )
    if np.isfinite(y).all() and (y == np.floor(y)).all() and np.abs(y).max() < 2**53:
        y = y.astype(np.int64)
    return Raw(x.toarray(), y)


def _first_fault(text: bytes) -> str | None:
    """The first malformed line, with the reason."""
    for number, line in enumerate(text.split(b"\n"), 1):
        label, *pairs = line.split(b"#", 1)[0].split() or [b"0"]
        try:
            float(label)
        except ValueError:
            return f"line {number}: label {shown_line(label)} is not a number; {_EXPECTED}"
        last = 0
        for pair in pairs:
            key, _, value = pair.partition(b":")
            if key == b"qid":
                continue
            try:
                index, _ = int(key), float(value)
            except ValueError:
                return f"line {number}: {shown_line(pair)} is not a pair index:value of numbers"
            if not last < index < 2**31:
                rule = "indices begin at 1 and rise within a line"
                return f"line {number}: index {index} after {last}; {rule}"
            last = index
    return None
