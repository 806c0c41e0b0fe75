"""Missing values and scales of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from foedus.data.dataset import first_not_finite
from foedus.data.formats.raw import Raw
from foedus.errors import DataError

IMPUTES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "median": lambda x: np.nanmedian(x, axis=0),
    "mean": lambda x: np.asarray(np.nanmean(x, axis=0, dtype=np.float64)),
    "zero": lambda x: np.zeros(x.shape[1]),
}


def imputed(raw: Raw, impute: str | None, name: str) -> Raw:
    """Replace NaN by a value of the training rows, or say where it is."""
    test = raw.x_test
    assert test is not None  # held out before

    def missing(x: np.ndarray) -> bool:
        return x.dtype.kind == "f" and first_not_finite(x) is not None and bool(np.isnan(x).any())

    parts = {"x_train": raw.x_train, "x_test": test}
    parts = {k: x for k, x in parts.items() if missing(x)}
    if not parts:
        return raw
    if impute is None:
        part, x = next(iter(parts.items()))
        nan = np.isnan(x.reshape(len(x), -1))
        row, column = np.unravel_index(int(nan.argmax()), nan.shape)
        called = column if raw.feature_names is None else f"{str(raw.feature_names[int(column)])!r}"
        raise DataError(
            f"{part} of {name!r} has {int(nan.sum())} missing values (NaN), first in row "
            f"{row}, column {called}; pass impute='median' (of the training rows), 'mean' or 'zero'"
        )
    flat = raw.x_train.reshape(len(raw.x_train), -1)
    empty = np.isnan(flat).all(0)
    value = np.zeros(flat.shape[1])
    value[~empty] = IMPUTES[impute](flat[:, ~empty])

    def fill(x: np.ndarray) -> np.ndarray:
        f = x.reshape(len(x), -1)
        return np.where(np.isnan(f), value, f).reshape(x.shape)

    return replace(raw, x_train=fill(raw.x_train), x_test=fill(test))


def auto_scale(x: np.ndarray) -> str | None:
    low, high = float(x.min()), float(x.max())
    if low >= -1 and 0.5 <= max(-low, high) <= 1:
        return None
    image = x.dtype.kind in "iu" and low >= 0 and high <= 255 and (x.ndim > 2 or x.shape[1] >= 256)
    return "unit" if image else "standard"


def _standard(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shift = x.mean(0, dtype=np.float64)
    spread = x.std(0, dtype=np.float64)
    # A constant column has a spread of rounding errors, which must not be divided by.
    return shift, np.where(spread > 1e-7 * np.maximum(np.abs(shift), 1e-30), spread, 1.0)


def _minmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = x.min(0).astype(np.float64), x.max(0).astype(np.float64)
    return low, np.where(high > low, high - low, 1.0)


# What to subtract and by what to divide, from the training rows.
SCALES: dict[str, Callable[[np.ndarray], tuple] | None] = {
    "auto": None,
    "standard": _standard,
    "minmax": _minmax,
    "unit": lambda x: (None, 255.0),
}


def scaled(x: np.ndarray, shift: np.ndarray | None, divisor: np.ndarray | float) -> np.ndarray:
    """(x - shift) / divisor in float32 by blocks of rows; the difference is taken in float64."""
    out = np.empty(x.shape, np.float32)
    block = max(1, (1 << 22) // max(1, int(np.prod(x.shape[1:]))))
    for start in range(0, len(x), block):
        part = x[start : start + block]
        result = part / np.float32(divisor) if shift is None else (part - shift) / divisor
        out[start : start + block] = result
    return out
