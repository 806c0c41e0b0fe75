"""CSV and Parquet tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from foedus.data.formats.frames import table
from foedus.data.formats.raw import Raw
from foedus.errors import DataError


def read_csv(
    path: Path, label: str | int | None = None, group: str | None = None,
    drop: Sequence[str] = (), together: str | None = None, only: Collection[str] | None = None,
    weight: str | None = None, texts: Collection[str] = (),
) -> Raw:  # fmt: skip
    """CSV with a header and a label column.

    All other columns are features: numbers, or categories if they hold text. Text or integer labels
    mean classes, numbers with fractions regression.

    Args:
        path: The file.
        label: The name or position of the label column; `None`: a column named label, target, class
            or y.
        group: The column with the client of each row.
        drop: Columns to leave out.
        together: The column whose rows of equal value stay on one side of the test split.
        only: The features to take; `None`: all.
        weight: The column with the weights of rows.
        texts: Features that hold text even if all of it looks like numbers: 01067 stays as it is.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path, skipinitialspace=True, dtype=dict.fromkeys(texts, str))
        # the header as written: above, pandas has renamed a second column a to a.1
        header = pd.read_csv(
            path, skipinitialspace=True, header=None, nrows=1, dtype=str, keep_default_na=False
        )
    except (ValueError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a CSV file with a header ({str(error).strip()})") from None
    counts = Counter(header.iloc[0])
    if twice := [name for name, count in counts.items() if name and count > 1]:
        raise DataError(f"{path}: two columns have the name {twice[0]!r}; rename one")
    return table(frame, str(path), label, group, drop, together, only, 2, weight, texts)


def read_parquet(
    path: Path, label: str | int | None = None, group: str | None = None,
    drop: Sequence[str] = (), together: str | None = None, only: Collection[str] | None = None,
    weight: str | None = None, texts: Collection[str] = (),
) -> Raw:  # fmt: skip
    """Parquet, as `read_csv`; needs pyarrow."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise DataError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from None
    except ValueError as error:
        raise DataError(f"{path}: not a Parquet file ({str(error).strip()[:200]})") from None
    frame = frame.reset_index(drop=True)
    return table(frame, str(path), label, group, drop, together, only, weight=weight,
                 texts=texts)  # fmt: skip
