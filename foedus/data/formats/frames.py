"""Tables with named columns: which of them hold numbers and which text, and their conversion.

All tables (CSV, Parquet, a user's DataFrame) are read by `table`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foedus.data.formats.raw import Raw
from foedus.errors import DataError, unknown

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import TypeIs

MOST = 1000
"""The largest number of categories of a column; a column with more is probably an identifier."""


def is_frame(given: object) -> TypeIs[pd.DataFrame]:
    """Whether a value is a DataFrame, without importing pandas."""
    return "pandas" in sys.modules and isinstance(given, sys.modules["pandas"].DataFrame)


def table(
    frame: pd.DataFrame, where: str, label: str | int | None = None, group: str | None = None,
    drop: Sequence[str] = (), together: str | None = None, only: Collection[str] | None = None,
    line: int | None = None, weight: str | None = None, texts: Collection[str] = (),
) -> Raw:  # fmt: skip
    """Features, label, groups and weights of a table, unchanged.

    Args:
        frame: The table.
        where: The beginning of errors.
        label: The name or position of the label column.
        group: The column with the client of each row.
        drop: Columns to leave out.
        together: The column whose rows of equal value stay on one side of the test split.
        only: The features to take, if the table has them; `None`: all.
        line: The line of the first row, for a file of lines.
        weight: The column with the weights of rows.
        texts: Features that hold text, even if it looks like numbers.
    """
    import pandas as pd

    label = label_name(frame, where, label)
    frame = frame.set_axis([str(c) for c in frame.columns], axis=1)
    columns = list(frame.columns)
    if twice := [c for c in dict.fromkeys(columns) if columns.count(c) > 1]:
        raise DataError(f"{where}: two columns have the name {twice[0]!r}; rename one")
    leave = [str(c) for c in ([drop] if isinstance(drop, str) else drop)]
    for name in leave:
        if name not in columns:
            raise DataError(f"{where}: drop: {unknown('column', name, columns)}")
        if name in (label, group, together, weight):
            raise DataError(f"{where}: column {name!r} is needed, and drop= leaves it out")
    frame, columns = frame.drop(columns=leave), [c for c in columns if c not in leave]
    for key, column in (("group", group), ("group_holdout", together), ("weight", weight)):
        if column is not None and column not in columns:
            raise DataError(f"{where}: {unknown(key, column, columns)}")
        if column == label:
            raise DataError(f"{where}: {key}={column!r} is the label; name another column")
    if weight is not None and weight in (group, together):
        raise DataError(f"{where}: weight={weight!r} says whose row it is; name another column")
    if len(frame) == 0:
        raise DataError(f"{where}: no rows; give at least one row to learn from")
    y = frame.pop(label)
    if y.isna().any():
        raise DataError(
            f"{_at(where, y.isna(), line)}: column {label!r} (the label) is missing in "
            f"{int(y.isna().sum())} rows; remove those rows"
        )
    weights = None if weight is None else weights_of(frame.pop(weight), where, line)
    units = groups = names = None
    if together is not None:
        if (lacking := frame[together].isna()).any():
            raise DataError(
                f"{_at(where, lacking, line)}: column {together!r} (group_holdout) is missing in "
                f"{int(lacking.sum())} rows; fill it in, or leave those rows out"
            )
        units = frame[together].map(as_text).to_numpy(str)
        frame = frame if together == group else frame.drop(columns=together)
    if group is not None:
        names, groups = np.unique(frame.pop(group).map(as_text).to_numpy(str), return_inverse=True)
    others = [] if only is None else [c for c in frame.columns if c not in only]
    if only is not None:
        frame = frame.drop(columns=others)
    elif frame.shape[1] == 0:
        raise DataError(
            f"{where}: no feature columns beside the label {label!r}; give at least one column to "
            "predict it from"
        )
    categories: dict[str, tuple[str, ...]] = {}
    whole = all(pd.api.types.is_signed_integer_dtype(t) for t in frame.dtypes)
    whole &= not any(c in texts for c in frame.columns)
    if whole and not frame.isna().any(axis=None):
        x = frame.to_numpy(np.int64)
    else:
        x = np.empty(frame.shape)
        for place, (called, values) in enumerate(frame.items()):
            if called in texts:
                values = values.map(as_text, na_action="ignore").astype("category")
            if (found := texts_of(values, where, line)) is not None:
                known = sorted(set(found[1]))
                if len(known) > MOST:
                    raise DataError(
                        f"{where}: column {called!r} has {len(known)} different texts; leave it "
                        "out, or put them into a few groups first"
                    )
                categories[str(called)] = tuple(known)
                x[:, place] = _codes(*found, known)
            else:
                x[:, place] = numbers_of(values, where, line)
    return Raw(
        x, _labels(y, where, line), groups_train=groups, group_names=names,
        feature_names=list(frame.columns), categories=categories, left_out=others, together=units,
        weights_train=weights, label=label,
    )  # fmt: skip


def _labels(y: pd.Series, where: str, line: int | None) -> np.ndarray:
    """Numbers, booleans or texts."""
    import pandas as pd

    y = y.infer_objects()
    if isinstance(y.dtype, pd.CategoricalDtype) and y.cat.categories.dtype.kind in "iub":
        y = y.astype(y.cat.categories.dtype)  # labels are returned as they were written
    if pd.api.types.is_bool_dtype(y):
        return y.to_numpy(bool)
    if pd.api.types.is_numeric_dtype(y):
        return y.to_numpy() if y.dtype.kind in "iuf" else y.to_numpy(np.float64)
    mixed = y.dtype == object and not any(isinstance(v, str) for v in y.unique())
    if texts_of(y.astype("category") if not mixed else y, where, line) is None:
        return numbers_of(y, where, line)
    return y.map(as_text).to_numpy(str)


def _at(where: str, rows: pd.Series | np.ndarray, line: int | None) -> str:
    """The first of these rows."""
    first = int(np.flatnonzero(rows)[0])
    return f"{where}, row {first}" if line is None else f"{where}, line {first + line}"


def as_text(value: Any) -> str:
    """A label or category as text, however it was written: 1, 1.0 and "1" are equal."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, str) and value.endswith(".0") and value[:-2].lstrip("-").isdecimal():
        return value[:-2]  # pandas writes columns of integers with missing values so
    return str(value.item() if isinstance(value, np.generic) else value)


def texts_of(
    column: pd.Series, where: str, line: int | None = None
) -> tuple[np.ndarray, list[str]] | None:
    """The indices of a column's texts (-1: missing), and the texts; `None` if it holds numbers.

    Raises:
        DataError: The column holds dates or objects, or text that is a number in most rows and
            something else in a few.
    """
    import pandas as pd

    kind, category = pd.api.types, isinstance(column.dtype, pd.CategoricalDtype)
    if not category and kind.is_numeric_dtype(column):  # bool is numeric, too
        if kind.is_complex_dtype(column):
            raise DataError(f"{where}: column {column.name!r} holds complex numbers")
        return None
    if not category and not (kind.is_object_dtype(column) or kind.is_string_dtype(column)):
        raise DataError(
            f"{where}: column {column.name!r} holds {column.dtype}; convert it to numbers or "
            "texts, or leave it out"
        )
    try:
        places, values = pd.factorize(column)
    except TypeError as error:  # unhashable values such as lists
        raise DataError(
            f"{where}: column {column.name!r} must hold numbers or texts ({error}); make a column "
            "of each part, or leave it out with drop="
        ) from None
    odd = next((v for v in values if not isinstance(v, str | int | float | np.generic)), None)
    if odd is not None:
        raise DataError(
            f"{where}: column {column.name!r} holds a {type(odd).__name__}; give numbers or texts"
        )
    if not category:
        numbers = (
            _to_numeric(pd.Series(values, dtype=object), column.name, where).notna().to_numpy()
        )
        rows = np.bincount(places[places >= 0], minlength=len(values))
        if numbers.all():
            return None
        if rows[numbers].sum() > 0.5 * rows.sum():
            wrong = pd.Series(np.isin(places, np.flatnonzero(~numbers)))
            raise DataError(
                f"{_at(where, wrong, line)}: column {column.name!r} holds numbers, and here "
                f"{str(column[wrong.to_numpy()].iloc[0])!r}; correct it, leave it empty if the "
                "value is missing, or make a pandas categorical of the column if these are "
                "categories"
            )
    return places, [as_text(v) for v in values]


def weights_of(column: pd.Series, where: str, line: int | None = None) -> np.ndarray:
    """The weights of rows; raises `DataError` unless all are present, finite and not negative."""
    remedy = "correct it, or leave the row out; without weight= all rows count alike"
    if (lacking := column.isna()).any():
        raise DataError(
            f"{_at(where, lacking, line)}: column {column.name!r} (weight) is missing in "
            f"{int(lacking.sum())} rows; {remedy}"
        )
    found = _to_numeric(column.astype(object), column.name, where).to_numpy(np.float64)
    if (wrong := ~(np.isfinite(found) & (found >= 0))).any():
        raise DataError(
            f"{_at(where, wrong, line)}: column {column.name!r} (weight) is "
            f"{str(column[wrong].iloc[0])!r}; a weight is a finite number, not negative: {remedy}"
        )
    if not found.any():
        raise DataError(
            f"{where}: column {column.name!r} (weight) is 0 in all rows; leave weight= out"
        )
    return found


def numbers_of(column: pd.Series, where: str, line: int | None = None) -> np.ndarray:
    """The numbers of a column, NaN where a value is missing."""
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column):
        numbers = _to_numeric(column.astype(object), column.name, where)
        wrong = numbers.isna() & column.notna()
        if wrong.any():
            raise DataError(
                f"{_at(where, wrong, line)}: column {column.name!r} must hold numbers, not "
                f"{str(column[wrong].iloc[0])!r}"
            )
        column = numbers
    found = column.to_numpy(np.float64, na_value=np.nan)
    if (infinite := np.isinf(found)).any():
        raise DataError(
            f"{_at(where, pd.Series(infinite), line)}: column {column.name!r} is infinite; correct "
            "it, or leave it empty and pass impute='median'"
        )
    return found


def _to_numeric(values: pd.Series, name: Any, where: str) -> pd.Series:
    import pandas as pd

    try:
        return pd.to_numeric(values, errors="coerce")
    except OverflowError as error:
        raise DataError(f"{where}: column {name!r} holds a number that is too large") from error


def codes_of(column: pd.Series, known: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """The index of each text among the known ones, and a list of unknown texts.

    The index is NaN where a text is missing and -1 where it is unknown.
    """
    import pandas as pd

    places, values = pd.factorize(column)
    texts = [as_text(v) for v in values]
    return _codes(places, texts, known), [text for text in texts if text not in known]


def _codes(places: np.ndarray, texts: Sequence[str], known: Sequence[str]) -> np.ndarray:
    place = {text: float(i) for i, text in enumerate(known)}
    return np.array([place.get(text, -1.0) for text in texts] + [np.nan])[places]


def label_name(frame: pd.DataFrame, where: str, label: str | int | None) -> str:
    """The name of the column to predict, which is given by name or position."""
    columns = [str(c) for c in frame.columns]
    if not isinstance(label, str | int | None):
        raise DataError(
            f"{where}: label is a {type(label).__name__}; give the name or the place of the column "
            f"to predict (columns: {', '.join(columns)})"
        )
    if isinstance(label, int) and not isinstance(label, bool):
        if label in list(frame.columns):
            return str(label)
        if not -len(columns) <= label < len(columns):
            raise DataError(f"{where}: label={label} is outside the {len(columns)} columns")
        return columns[label]
    if label is None:
        found = [c for c in columns if c.lower() in ("label", "target", "class", "y")]
        if len(found) != 1:
            raise DataError(
                f"{where}: pass label=, the column to predict (columns: {', '.join(columns)})"
            )
        return found[0]
    if label not in columns:
        raise DataError(f"{where}: {unknown('label', label, columns)}")
    return label
