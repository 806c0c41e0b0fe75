"""Readers of data files: LIBSVM text, IDX, CIFAR's binary version, npz, CSV, Parquet, LEAF JSON.

Each reader returns a `Raw`: arrays as the file has them, neither scaled nor imputed. A malformed
file raises `DataError` with the file, the line or offset, and what was expected there; a size that
a file claims is believed only as far as the file's own length allows. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from foedus.data.formats.csv import read_csv, read_parquet
from foedus.data.formats.images import read_cifar, read_idx
from foedus.data.formats.leaf import read_leaf
from foedus.data.formats.libsvm import read_libsvm
from foedus.data.formats.npz import read_npz
from foedus.data.formats.raw import Raw
from foedus.errors import DataError, unknown

_UNREADABLE = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


def read(
    path: str | Path,
    *,
    format: str | None = None,
    label: str | int | None = None,
    group: str | None = None,
    drop: Sequence[str] = (),
    together: str | None = None,
    weight: str | None = None,
    texts: Collection[str] = (),
) -> Raw:
    """Read a file or folder.

    Args:
        path: The file or folder.
        format: The format; `None`: recognized by name and contents.
        label: The column of a table to predict, or the kind of CIFAR-100's labels.
        group: The column of a table with the client of each row.
        drop: Columns of a table to leave out.
        together: The column of a table whose rows of equal value stay on one side of the test
            split.
        weight: The column of a table with the weights of rows.
        texts: Columns of a table that hold text even if all of it looks like numbers.

    Raises:
        DataError: The file cannot be read, or an argument does not go with its format.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"no file or folder {str(path)!r}; check the path")
    if format is None:
        format = _guess(path)
    if format not in READERS and format not in TABLES:
        raise DataError(unknown("format", format, [*READERS, *TABLES]))
    columns = {"group": group, "drop": drop or None, "group_holdout": together, "weight": weight}
    for key, value in columns.items():
        if value is not None and format not in ("csv", "parquet"):
            raise DataError(
                f"{key}={value!r} names a column of a table, and {path} is read as {format}; leave "
                "it out"
            )
    if label is not None and format not in ("csv", "parquet", "cifar", "npz"):
        raise DataError(
            f"label={label!r}: a {format} file defines its label itself ({path}); leave it out"
        )
    with readable(path, format):
        if format in TABLES:
            return TABLES[format](path, label, group, drop, together, weight=weight, texts=texts)
        return READERS[format](path, label, group)


@contextlib.contextmanager
def readable(path: Path, format: str) -> Iterator[None]:
    """A context in which errors of reading a file become a `DataError` with a readable message."""
    try:
        yield
    except (*_UNREADABLE, OSError, EOFError, MemoryError) as error:
        reason = error or type(error).__name__
        raise DataError(
            f"{path}: not a readable {format} file ({reason}); fetch or write it again"
        ) from error


def _guess(path: Path) -> str:
    if path.is_dir():
        names = [p.name for p in path.iterdir()]
        if any(n.endswith(".bin") for n in names):
            return "cifar"
        if any(re.search(r"idx\d.ubyte", n) for n in names):
            return "idx"
        if "train" in names or any(n.endswith((".json", ".json.gz")) for n in names):
            return "leaf"
        raise DataError(
            f"{path}: a folder of no known format; expected IDX files, CIFAR's .bin files, or "
            "LEAF's train/ and test/"
        )
    name = path.name.lower()
    for endings, kind in (
        ((".npz",), "npz"), ((".csv", ".csv.gz"), "csv"), ((".json", ".json.gz"), "leaf"),
        ((".parquet",), "parquet"),
        ((".bin", ".tar.gz", ".tgz"), "cifar"), ((".idx", ".idx.gz"), "idx"),
        ((".svm", ".libsvm", ".svmlight"), "libsvm"),
    ):  # fmt: skip
        if name.endswith(endings):
            return kind
    return "idx" if re.search(r"idx\d.ubyte", name) else "libsvm"


READERS: dict[str, Callable[[Path, Any, Any], Raw]] = {
    "libsvm": read_libsvm,
    "idx": read_idx,
    "cifar": read_cifar,
    "npz": read_npz,
    "leaf": read_leaf,
}
TABLES: dict[str, Callable[..., Raw]] = {"csv": read_csv, "parquet": read_parquet}
