"""NumPy archives."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import IO, Literal

import numpy as np

from foedus.data.formats.raw import _RATIO, SLACK, Raw
from foedus.errors import DataError

MAPPED = 1 << 27
"""Arrays of at least this number of bytes stay on disk."""


def npz_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of each array from the headers, which must agree with the members' sizes."""
    shapes = {}
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            with archive.open(member) as file:
                shape, dtype, start = _npy_header(file, f"{path}:{member.filename}")
            needed = start + math.prod(shape) * dtype.itemsize
            if needed != member.file_size or needed > size * _RATIO + SLACK:
                raise DataError(
                    f"{path}: {member.filename} claims shape {shape}, which its {member.file_size} "
                    "bytes cannot hold"
                )
            shapes[member.filename.removesuffix(".npy")] = shape, dtype
    return shapes


def _npy_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype, int]:
    head = io.BytesIO(file.read(65536))
    try:
        first = np.lib.format.read_magic(head) == (1, 0)
        readers = (np.lib.format.read_array_header_2_0, np.lib.format.read_array_header_1_0)
        shape, _, dtype = readers[first](head)
    except ValueError as error:
        raise DataError(f"{where}, offset 0: not an array ({error})") from None
    if dtype.hasobject:
        raise DataError(
            f"{where}: holds Python objects, which are never loaded; save numbers or text"
        )
    return shape, dtype, head.tell()


def _mapped(path: Path, name: str) -> np.ndarray | None:
    """An array of the archive as a read-only memory map; `None` if it is compressed."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        member = archive.getinfo(name)
        if member.compress_type != zipfile.ZIP_STORED:
            return None
        file.seek(member.header_offset + 26)  # of the local header: lengths of name and extra field
        file.seek(sum(struct.unpack("<HH", file.read(4))), io.SEEK_CUR)
        first = np.lib.format.read_magic(file) == (1, 0)
        readers = (np.lib.format.read_array_header_2_0, np.lib.format.read_array_header_1_0)
        shape, columns_first, dtype = readers[first](file)
        order: Literal["F", "C"] = "F" if columns_first else "C"
        return np.memmap(path, dtype, "r", file.tell(), shape, order)


def read_npz(path: Path, label: str | None = None, group: object = None) -> Raw:
    """An .npz with `x_train y_train x_test y_test` (or `x y`).

    It may have `client_train client_test`, too.

    `label="coarse"` takes the labels of `y_train_coarse y_test_coarse`. Large arrays that are not
    compressed (`np.savez`) are memory-mapped, and read where they are used.
    """
    shapes = npz_shapes(path)
    with np.load(path, allow_pickle=False) as file:

        def get(*names: str) -> np.ndarray | None:
            found = next((name for name in names if name in shapes), None)
            if found is None:
                return None
            shape, dtype = shapes[found]
            large = math.prod(shape) * dtype.itemsize >= MAPPED
            mapped = _mapped(path, f"{found}.npy") if large else None
            return file[found] if mapped is None else mapped

        suffix = "" if label in (None, "fine") else f"_{label}"
        x, y = get("x_train", "x"), get(f"y_train{suffix}", f"y{suffix}")
        if x is None or y is None:
            wanted = "x_train" if x is None else f"y_train{suffix}"
            raise DataError(
                f"{path}: no array {wanted!r} (it holds {', '.join(shapes) or 'none'}); expected "
                "x_train, y_train, x_test and y_test"
            )
        names = get("coarse_names") if label == "coarse" else get("class_names", "fine_names")
        raw = Raw(
            x, y, get("x_test"), get(f"y_test{suffix}"), names,
            get("client_train", "groups_train"), get("client_test", "groups_test"),
            get("client_names", "group_names"), get("feature_names"),
        )  # fmt: skip
    if (raw.x_test is None) != (raw.y_test is None):
        raise DataError(
            f"{path}: only one of x_test and y_test{suffix} is there; expected both or neither"
        )
    return raw
