"""Preprocessing: missing values, categories and scales of raw rows.

What is fitted on training rows is a `Preprocessor`. It is part of the data, the run and the model,
so that a model accepts raw rows: `run.model.predict(frame)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foedus.data.finite import first_not_finite
from foedus.data.formats.frames import codes_of, numbers_of
from foedus.data.formats.raw import Raw
from foedus.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.compose import ColumnTransformer

IMPUTES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "median": lambda x: np.nanmedian(x, axis=0),
    "mean": lambda x: np.asarray(np.nanmean(x, axis=0, dtype=np.float64)),
    "zero": lambda x: np.zeros(x.shape[1]),
}
ENCODINGS = ("onehot", "ordinal")
_SOME, _FAR_OFF, _RAW = 10, 3.0, 20.0
"""The least rows of a table for medians to be meaningful; the sizes of scaled medians that are
suspicious, of a table and of an array.
"""
_BLOCK = 1 << 14
"""Rows of a table that are transformed at a time."""
UNSEEN = -1.0
"""The code of a category that no training row has."""


def auto_scale(x: np.ndarray) -> str | None:
    """The scaling that suits these numbers, see `foedus.load`."""
    low, high = float(x.min()), float(x.max())
    if low >= -1 and 0.5 <= max(-low, high) <= 1:
        return None
    image = x.dtype.kind in "iu" and low >= 0 and high <= 255 and (x.ndim > 2 or x.shape[1] >= 256)
    return "unit" if image else "standard"


def _standard(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shift = x.mean(0, dtype=np.float64)
    spread = x.std(0, dtype=np.float64)
    # The spread of a constant column is a rounding error, by which nothing must be divided.
    return shift, np.where(spread > 1e-7 * np.maximum(np.abs(shift), 1e-30), spread, 1.0)


def _minmax(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = x.min(0).astype(np.float64), x.max(0).astype(np.float64)
    return low, np.where(high > low, high - low, 1.0)


def _robust(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, middle, high = np.quantile(x.astype(np.float64), (0.25, 0.5, 0.75), axis=0)
    return middle, np.where(high > low, high - low, 1.0)


# The shift to subtract and the divisor, from the training rows.
SCALES: dict[str, Callable[[np.ndarray], tuple] | None] = {
    "auto": None,
    "standard": _standard,
    "minmax": _minmax,
    "robust": _robust,
    "unit": lambda x: (None, 255.0),
}


def no_value(row: int, column: int | str) -> DataError:
    """The error for a missing number that is not imputed."""
    return DataError(
        f"row {row} has no value in column {column!r}, and no training row lacks a value there; "
        "fill it in"
    )


def category_name(column: str, category: str | None) -> str:
    """The name of the column of 0 and 1 of a category."""
    return f"{column}={'missing' if category is None else category}"


def scaled(x: np.ndarray, shift: np.ndarray | None, divisor: np.ndarray | float) -> np.ndarray:
    """(x - shift) / divisor in float32, by blocks of rows; the difference is taken in float64."""
    out = np.empty(x.shape, np.float32)
    block = max(1, (1 << 22) // max(1, int(np.prod(x.shape[1:]))))
    for start in range(0, len(x), block):
        part = x[start : start + block]
        result = part / np.float32(divisor) if shift is None else (part - shift) / divisor
        out[start : start + block] = result
    return out


@dataclass(frozen=True, eq=False)
class Preprocessor:
    """Preprocessing that was fitted on training rows.

    A category that no training row has counts as unknown: zeros, or -1 if `encode="ordinal"`. So
    does a missing category, unless some training rows lacked it, too.

    Args:
        names: The columns of a raw table, in order; `None` for arrays without column names.
        categories: For each column of texts, by name, its texts, sorted; the last is `None` if
            training rows lack one. All other columns hold numbers.
        fill: The value of a missing number, by column of numbers; `None`: missing numbers are
            refused.
        shift: What is subtracted, by column of numbers; `None`: nothing.
        divisor: What the difference is divided by, by column of numbers; `None`: numbers are not
            scaled.
        scaling: The name of the scaling.
        encode: "onehot": a column of 0 and 1 for each category; "ordinal": the index of the
            category.
        clip: The largest absolute value of a scaled number, if any.
    """

    names: tuple[str, ...] | None = None
    categories: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    fill: np.ndarray | None = None
    shift: np.ndarray | None = None
    divisor: np.ndarray | float | None = None
    scaling: str | None = None
    encode: str = "onehot"
    clip: float | None = None

    # -- transforming rows -------------------------------------------------------------------------

    def transform(self, rows: pd.DataFrame | Mapping[str, Sequence]) -> np.ndarray:
        """Raw rows as a model receives them (float32).

        Args:
            rows: A table with columns by name, in any order.
        """
        made = self.apply(self.encoded(rows))
        if len(made) >= _SOME and self._far(made, _FAR_OFF):
            warnings.warn(
                "most columns of this table are far from those of the training rows; give raw "
                "rows (if these are scaled already, give them as an array)",
                stacklevel=4,
            )
        return made

    def encoded(self, rows: pd.DataFrame | Mapping[str, Sequence]) -> np.ndarray:
        """Raw rows as numbers, in the order of `names`; texts become indices of `categories`."""
        import pandas as pd

        if self.names is None:
            raise DataError(
                "the columns of this model's data have no names; give an array of rows as "
                "data.x_test has them"
            )
        if isinstance(rows, Mapping):
            rows = {k: v if np.ndim(v) else [v] for k, v in rows.items()}
        try:
            frame = pd.DataFrame(rows)
        except ValueError as error:
            raise DataError(f"these are not rows of a table: {error}") from None
        frame.columns = [str(c) for c in frame.columns]
        lacking = [c for c in self.names if c not in frame.columns]
        if lacking:
            more = [c for c in frame.columns if c not in self.names]
            unused = f"; the table has {', '.join(map(repr, more[:10]))} instead" if more else ""
            raise DataError(
                f"the table has no column{'s' * (len(lacking) > 1)} "
                f"{', '.join(map(repr, lacking[:10]))}{unused}"
            )
        out = np.empty((len(frame), len(self.names)))
        for place, name in enumerate(self.names):
            column = frame[name]
            if isinstance(column, pd.DataFrame):
                raise DataError(f"two columns of the table have the name {name!r}; rename one")
            if (known := self.categories.get(name)) is None:
                out[:, place] = numbers_of(column, "the table")
                continue
            codes, strange = codes_of(column, [k for k in known if k is not None])
            if strange:
                warnings.warn(
                    f"column {name!r} has categories that no training row has ("
                    f"{', '.join(map(repr, strange[:5]))}): they are treated as unknown",
                    stacklevel=4,
                )
            out[:, place] = codes
        return out

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Rows as a model receives them, from `encoded` ones or an array without names."""
        if self.names is None or x.dtype.kind != "f" or len(x) <= _BLOCK:
            return self._applied(x)
        out = np.empty((len(x), len(self.feature_names or ())), np.float32)
        for first in range(0, len(x), _BLOCK):  # temporary arrays stay in the cache
            out[first : first + _BLOCK] = self._applied(x[first : first + _BLOCK], first)
        return out

    def _applied(self, x: np.ndarray, first: int = 0) -> np.ndarray:
        """The same for rows from number `first` on."""
        if not self.categories:
            columns = range(x.shape[1] if x.ndim == 2 else 0)
            return self._scaled(self._filled(x, columns, first))
        assert self.names is not None
        which = [i for i, name in enumerate(self.names) if name not in self.categories]
        parts = [self._scaled(self._filled(x[:, which], which, first))] if which else []
        for place, name in enumerate(self.names):
            if name in self.categories:
                parts.append(self._category(x[:, place], self.categories[name]))
        return np.concatenate(parts, 1)

    def _category(self, codes: np.ndarray, known: tuple[str | None, ...]) -> np.ndarray:
        missing = len(known) - 1 if known and known[-1] is None else UNSEEN
        place = np.where(np.isnan(codes), missing, codes)
        if self.encode == "ordinal":
            return place[:, None].astype(np.float32)
        out = np.zeros((len(codes), len(known)), np.float32)
        there = np.flatnonzero(place >= 0)
        out[there, place[there].astype(np.int64)] = 1
        return out

    def _filled(self, x: np.ndarray, which: Sequence[int], first: int = 0) -> np.ndarray:
        if x.dtype.kind != "f" or first_not_finite(x) is None or not np.isnan(x).any():
            return x
        flat = x.reshape(len(x), -1)
        if self.fill is None:
            row, column = np.argwhere(np.isnan(flat))[0].tolist()
            raise no_value(first + row, column if self.names is None else self.names[which[column]])
        return np.where(np.isnan(flat), self.fill, flat).reshape(x.shape)

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        if self.divisor is not None:
            x = scaled(x, self.shift, self.divisor)
        return x if self.clip is None else np.clip(x, -self.clip, self.clip)

    def to_sklearn(self) -> ColumnTransformer:
        """A fitted scikit-learn `ColumnTransformer` that does the same with raw DataFrames.

        Unknown categories are encoded as unknown, without a warning.
        """
        from foedus.data.transformers import column_transformer

        return column_transformer(self)

    # -- names and files ---------------------------------------------------------------------------

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The names of the model's inputs: numbers first, then categories."""
        if self.names is None:
            return None
        found = [name for name in self.names if name not in self.categories]
        for name in self.names:
            if (known := self.categories.get(name)) is not None:
                one = self.encode == "ordinal"
                found += [name] if one else [category_name(name, k) for k in known]
        return tuple(found)

    def looks_raw(self, x: np.ndarray) -> bool:
        """Whether more than half of an array's columns are far from what `apply` returns."""
        return x.ndim == 2 and bool(len(x)) and self._far(x, _RAW)

    def _far(self, x: np.ndarray, most: float) -> bool:
        """Whether the medians of more than half of the columns of numbers exceed `most`."""
        if self.scaling not in ("standard", "robust"):
            return False
        width = x.shape[1] if not self.categories else len(self.names or ()) - len(self.categories)
        numbers = np.abs(np.median(x[:, :width], 0))
        return bool(width and (numbers > most).mean() > 0.5)

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers are exact."""
        plain = {k: getattr(self, k) for k in ("scaling", "encode", "clip")}
        for key in ("fill", "shift", "divisor"):
            value = getattr(self, key)
            if isinstance(value, np.ndarray):
                value = {"shape": list(value.shape), "values": value.ravel().tolist()}
            plain[key] = value
        names = None if self.names is None else list(self.names)
        categories = {name: list(known) for name, known in self.categories.items()}
        return {"names": names, "categories": categories, **plain}

    @classmethod
    def from_json(cls, about: dict[str, Any]) -> Preprocessor:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        values: dict[str, Any] = {k: about[k] for k in ("scaling", "encode", "clip")}
        if values["clip"] is not None and not 0 < float(values["clip"]) < np.inf:
            raise ValueError(f"clip={values['clip']!r}")
        if values["scaling"] is not None and values["scaling"] not in SCALES:
            raise ValueError(f"scaling={values['scaling']!r}")
        for key in ("fill", "shift", "divisor"):
            value = about[key]
            if isinstance(value, dict):
                numbers = np.array(value["values"], np.float64)
                value = numbers.reshape([int(n) for n in value["shape"]])
            elif value is not None:
                value = float(value)
            if value is not None and not np.isfinite(value).all():
                raise ValueError(f"{key} is not finite")
            values[key] = value
        if values["divisor"] is not None and not (np.asarray(values["divisor"]) > 0).all():
            raise ValueError("divisor must be above 0")
        if values["encode"] not in ENCODINGS:
            raise ValueError(f"encode={values['encode']!r}")
        if not isinstance(about["names"], list | type(None)) or (
            about["categories"] and not about["names"]
        ):
            raise ValueError("names")
        names = None if about["names"] is None else tuple(map(str, about["names"]))
        categories = {
            str(name): tuple(None if k is None else str(k) for k in known)
            for name, known in about["categories"].items()
        }
        for known in categories.values():
            if len(set(known)) != len(known) or None in known[:-1]:
                raise ValueError("categories")
        if names is not None and (len(set(names)) != len(names) or not set(categories) <= {*names}):
            raise ValueError("categories of unknown columns")
        wide = None if names is None else (len(names) - len(categories),)
        for key in ("fill", "shift", "divisor"):
            if wide and isinstance(values[key], np.ndarray) and values[key].shape != wide:
                raise ValueError(f"{key} of {values[key].shape} columns")
            if key != "divisor" and isinstance(values[key], float):
                raise ValueError(f"{key} must have a number for each column")
        return cls(names, categories, **values)


def fit(
    raw: Raw, scale: str | None, impute: str | None, name: str, encode: str = "onehot",
    clip: float | None = None,
) -> tuple[Preprocessor, np.ndarray, np.ndarray]:  # fmt: skip
    """The preprocessing fitted on training rows, with the transformed training and test rows."""
    x, test = raw.x_train, raw.x_test
    assert test is not None  # held out before
    names = None if raw.feature_names is None else tuple(map(str, raw.feature_names))
    categories: dict[str, tuple[str | None, ...]] = {}
    which = list(range(x.shape[1]))
    for column, known in (raw.categories or {}).items():
        assert names is not None
        place = names.index(column)
        which.remove(place)
        kept, x, test = _seen(x, test, place, known)
        categories[column] = kept
    numbers = x[:, which] if categories else x
    fill = _fill(numbers, test[:, which] if categories else test, impute, names, which, name)
    made = Preprocessor(names, categories, fill, encode=encode, clip=clip)
    if numbers.size:
        filled = made._filled(numbers, which)
        if raw.tokens:
            scale = None
        elif scale == "auto":
            scale = auto_scale(filled)
        measure = None if scale is None else SCALES[scale]
        if measure is not None:
            shift, divisor = measure(filled)
            made = replace(made, shift=shift, divisor=divisor)
        made = replace(made, scaling=scale)
    return made, made.apply(x), made.apply(test)


def _seen(
    x: np.ndarray, test: np.ndarray, place: int, known: Sequence[str]
) -> tuple[tuple[str | None, ...], np.ndarray, np.ndarray]:
    """The categories of the training rows, and both parts with codes among these only."""
    codes = x[:, place]
    lacking = np.isnan(codes)
    there = np.unique(codes[~lacking]).astype(np.int64)
    kept: tuple[str | None, ...] = tuple(known[k] for k in there)
    if len(there) < len(known):
        new = np.full(len(known), UNSEEN)
        new[there] = np.arange(len(there))
        parts = []
        for part in (x, test):
            part, old = part.copy(), part[:, place]
            part[:, place] = np.where(np.isnan(old), old, new[np.nan_to_num(old).astype(np.int64)])
            parts.append(part)
        x, test = parts
    return (*kept, None) if lacking.any() else kept, x, test


def _fill(
    x: np.ndarray, test: np.ndarray, impute: str | None, names: tuple[str, ...] | None,
    which: list[int], name: str,
) -> np.ndarray | None:  # fmt: skip
    """The values of missing numbers; raises `DataError` for one that is not to be imputed."""

    def missing(x: np.ndarray) -> bool:
        return x.dtype.kind == "f" and first_not_finite(x) is not None and bool(np.isnan(x).any())

    parts = {"x_train": x, "x_test": test}
    parts = {k: part for k, part in parts.items() if missing(part)}
    if parts and impute is None:
        part, x = next(iter(parts.items()))
        nan = np.isnan(x.reshape(len(x), -1))
        row, column = np.unravel_index(int(nan.argmax()), nan.shape)
        called = column if names is None else repr(names[which[int(column)]])
        raise DataError(
            f"{part} of {name!r} has {int(nan.sum())} missing values (NaN), first in row "
            f"{row}, column {called}; pass impute='median' (of the training rows), 'mean' or 'zero'"
        )
    if impute is None or (not parts and names is None):
        return None
    flat = x.reshape(len(x), -1)
    empty = np.isnan(flat).all(0) if flat.dtype.kind == "f" else np.zeros(flat.shape[1], bool)
    value = np.zeros(flat.shape[1])
    value[~empty] = IMPUTES[impute](flat[:, ~empty])
    return value
