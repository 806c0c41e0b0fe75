"""CSV tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from foedus.data.formats.raw import Raw
from foedus.errors import DataError, unknown


def read_csv(path: Path, label: str | int | None = None, group: str | None = None) -> Raw:
    """CSV with a header and a label column.

    label: its name or position; else a column named label, target, class or y.

    All other columns are features and must hold numbers: encode categories first (for instance with
    pandas.get_dummies). Text or integer labels mean classes, numbers with fractions
    regression. `group` names the column that says whose row it is.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path, skipinitialspace=True)
        # as it is written: above, pandas has made a.1 of a second a
        header = pd.read_csv(
            path, skipinitialspace=True, header=None, nrows=1, dtype=str, keep_default_na=False
        )
    except (ValueError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a CSV file with a header ({str(error).strip()})") from None
    columns = [str(c) for c in frame.columns]
    frame.columns = columns
    counts = Counter(header.iloc[0])
    if twice := [name for name, count in counts.items() if name and count > 1]:
        raise DataError(f"{path}: two columns have the name {twice[0]!r}; rename one")
    label = _label_column(path, columns, label)
    if group is not None and group not in columns:
        raise DataError(f"{path}: {unknown('group', group, columns)}")
    if len(frame) == 0:
        raise DataError(f"{path}: no rows below the header")
    y = frame.pop(label)
    if y.isna().any():
        line = int(np.flatnonzero(y.isna())[0]) + 2
        raise DataError(
            f"{path}, line {line}: column {label!r} (the label) is missing in "
            f"{int(y.isna().sum())} rows; remove those rows"
        )
    groups = names = None
    if group is not None and group != label:
        owners = frame.pop(group).astype(str).to_numpy(dtype=str)
        names, groups = np.unique(owners, return_inverse=True)
    for column, entries in frame.items():
        if not pd.api.types.is_numeric_dtype(entries):  # which bool is, too
            values = pd.to_numeric(entries, errors="coerce")
            wrong = np.flatnonzero(values.isna() & entries.notna())
            at = int(wrong[0]) if len(wrong) else 0
            raise DataError(
                f"{path}, line {at + 2}: column {column!r} holds text ({str(entries.iloc[at])!r}); "
                "encode it as numbers first, for instance with pandas.get_dummies"
            )
    if frame.shape[1] == 0:
        raise DataError(f"{path}: no feature columns beside the label {label!r}")
    whole = all(pd.api.types.is_integer_dtype(t) for t in frame.dtypes)
    x = frame.to_numpy(np.int64 if whole else np.float64)
    labels = y.to_numpy() if pd.api.types.is_numeric_dtype(y) else y.to_numpy(dtype=str)
    columns = list(frame.columns)
    return Raw(x, labels, groups_train=groups, group_names=names, feature_names=columns)


def _label_column(path: Path, columns: list[str], label: str | int | None) -> str:
    if isinstance(label, int) and not isinstance(label, bool):
        if not -len(columns) <= label < len(columns):
            raise DataError(f"{path}: label={label} is outside the {len(columns)} columns")
        return columns[label]
    if label is None:
        found = [c for c in columns if c.lower() in ("label", "target", "class", "y")]
        if len(found) != 1:
            raise DataError(
                f"{path}: pass label=, the column to predict (columns: {', '.join(columns)})"
            )
        return found[0]
    if label not in columns:
        raise DataError(f"{path}: {unknown('label', label, columns)}")
    return label
