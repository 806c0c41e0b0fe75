"""Readers of data files: LIBSVM text, IDX, CIFAR's binary version, npz, CSV, LEAF JSON.

Each reader returns a `Raw`: arrays as the file has them, neither scaled nor imputed. A malformed file raises `DataError` with
the file, the line or offset, and what was expected there; a size that a file claims is believed only as far as the file's own
length allows. Nothing is ever unpickled.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import re
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from foedus.errors import DataError, unknown

# Deflate shrinks at most 1032-fold; a file that claims more is damaged or hostile.
_RATIO = 1100
_SLACK = 1 << 20
_CIFAR_PIXELS = 3072
_DENSE_BYTES = 4 << 30


@dataclass
class Raw:
    """Arrays of a file: features, and labels as they are written (numbers or text); `None` where the file has no test part."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray | None = None
    y_test: np.ndarray | None = None
    class_names: Sequence[str] | None = None
    groups_train: np.ndarray | None = None
    groups_test: np.ndarray | None = None
    group_names: Sequence[str] | None = None
    feature_names: Sequence[str] | None = None
    tokens: bool = False  # features are character ids, which must not be scaled
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # other labels of the same rows, for the cache


def read(path: str | Path, *, format: str | None = None, label: str | int | None = None, group: str | None = None) -> Raw:
    """Read a file or folder; the format is told from its name and contents unless given."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"no file or folder {str(path)!r}; check the path")
    if format is None:
        format = _guess(path)
    if format not in READERS:
        raise DataError(unknown("format", format, READERS))
    if group is not None and format != "csv":
        raise DataError(f"group={group!r} names a column of a CSV file, and {path} is read as {format}; leave it out")
    if label is not None and format not in ("csv", "cifar", "npz"):
        raise DataError(f"label={label!r}: a {format} file says itself what the label is ({path}); leave it out")
    try:
        return READERS[format](path, label, group)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, MemoryError) as error:
        raise DataError(
            f"{path}: not a readable {format} file ({error or type(error).__name__}); fetch or write it again"
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
            f"{path}: a folder of no known format; expected IDX files, CIFAR's .bin files, or LEAF's train/ and test/"
        )
    name = path.name.lower()
    for endings, kind in (
        ((".npz",), "npz"), ((".csv", ".csv.gz"), "csv"), ((".json", ".json.gz"), "leaf"),
        ((".bin", ".tar.gz", ".tgz"), "cifar"), ((".idx", ".idx.gz"), "idx"), ((".svm", ".libsvm", ".svmlight"), "libsvm"),
    ):  # fmt: skip
        if name.endswith(endings):
            return kind
    return "idx" if re.search(r"idx\d.ubyte", name) else "libsvm"


def read_bytes(path: Path) -> bytes:
    """Contents of a file, decompressed if its name ends in .gz, .bz2 or .xz, up to what such a file can justify."""
    opener: Callable = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix.lower(), open)
    limit = path.stat().st_size * _RATIO + _SLACK
    chunks, total = [], 0
    with opener(path, "rb") as file:
        while chunk := file.read(1 << 22):
            chunks.append(chunk)
            total += len(chunk)
            if total > limit:
                raise DataError(
                    f"{path}: decompresses to more than {_RATIO} times its size; it is damaged or not meant to be read"
                )
    return b"".join(chunks)


# LIBSVM text


def read_libsvm(path: Path, label: object = None, group: object = None, features: int | None = None) -> Raw:
    """LIBSVM (svmlight) text: `label index:value ...` a line, indices from 1 and rising; plain, .gz, .bz2 or .xz.

    Comments after `#` are skipped. `features` widens the rows (a test file may lack the last features).
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
    if entries > 1000 * len(text) + _SLACK or entries * 4 > _DENSE_BYTES:
        raise DataError(
            f"{path}: {len(y)} rows of {width} features (the largest index) are too many to hold densely; select features first"
        )
    x = np.zeros((len(y), width), np.float32)
    x[row, index - 1] = value
    if np.isfinite(y).all() and (y == np.floor(y)).all() and np.abs(y).max() < 2**53:
        y = y.astype(np.int64)
    return Raw(x, y)


def _libsvm_fast(text: bytes) -> tuple[np.ndarray, ...] | None:
    """Labels, rows, indices and values of a clean file in whole-array operations; `None` where a line needs a closer look."""
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
    place = np.arange(len(starts)) - np.maximum.accumulate(np.where(first, np.arange(len(starts)), 0))
    colon = np.concatenate(([False], byte[starts[1:] - 1] == ord(":")))
    # label, then index:value pairs: every second token follows a colon, and colons stand nowhere else.
    if (colon != ((place % 2 == 0) & (place > 0))).any() or colon.sum() != (byte == ord(":")).sum():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(text.replace(b":", b" ").decode("ascii"), sep=" ", dtype=np.float64)
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
                f"{path}, line {number}: label {_shown(tokens[0])} is not a number; expected 'label index:value ...'"
            ) from None
        last = 0
        for token in tokens[1:]:
            key, _, entry = token.partition(b":")
            if key == b"qid":
                continue
            try:
                index, value = int(key), float(entry)
            except ValueError:
                raise DataError(f"{path}, line {number}: {_shown(token)} is not a pair index:value of numbers") from None
            if not last < index <= 2**31:
                raise DataError(f"{path}, line {number}: index {index} after {last}; indices begin at 1 and rise within a line")
            last = index
            rows.append(len(labels) - 1)
            indices.append(index)
            values.append(value)
    return np.array(labels), np.array(rows, np.int64), np.array(indices, np.int64), np.array(values)


def _shown(token: bytes) -> str:
    text = token.decode("utf-8", "replace")
    return repr(text if len(text) <= 40 else text[:40] + "...")


# IDX

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def parse_idx(content: bytes, where: object) -> np.ndarray:
    """The array of an IDX file: two zero bytes, a type, the number of dimensions, their sizes (big endian), the numbers."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or not 1 <= content[3] <= 8:
        raise DataError(
            f"{where}, offset 0: magic number {content[:4].hex()!r}; expected IDX (0000, a type, the number of dimensions)"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{where}, offset {len(content)}: the file ends within the header of {start} bytes")
    shape = tuple(int(s) for s in np.frombuffer(content[4:start], ">u4"))
    dtype = np.dtype(_IDX_TYPES[content[2]])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataError(
            f"{where}, offset {min(len(content), expected)}: shape {shape} needs {expected} bytes, the file has {len(content)}"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def read_idx(path: Path, label: object = None, group: object = None) -> Raw:
    """IDX images and labels as of MNIST: a folder, or the images file beside its labels file. Images become flat rows.

    The test part is found by its name (`t10k-` or `-test-` for `train`).
    """
    if path.is_dir():
        images = sorted(p for p in path.iterdir() if re.search(r"images.idx3.ubyte(\.gz)?$", p.name))
        train = [p for p in images if "train" in p.name] or [p for p in images if not re.search(r"t10k|test", p.name)]
        if not train:
            raise DataError(f"{path}: no training images; expected a file such as train-images-idx3-ubyte.gz")
        path = train[0]
    x, y = _idx_pair(path)
    names = {path.name.replace("train", other, 1) for other in ("t10k", "test")} - {path.name}
    test = next((p for name in sorted(names) for p in _either(path.with_name(name))), None)
    return Raw(x, y, *(_idx_pair(test) if test else (None, None)))


def _either(path: Path) -> list[Path]:
    """The file, with or without .gz, where it exists."""
    stem = path.name.removesuffix(".gz")
    return [p for p in (path.with_name(stem), path.with_name(stem + ".gz")) if p.exists()]


def _idx_pair(path: Path) -> tuple[np.ndarray, np.ndarray]:
    name = re.sub(r"images(.)idx3", r"labels\1idx1", path.name)
    labels = _either(path.with_name(name)) if name != path.name else []
    if not labels:
        raise DataError(
            f"{path}: no labels file beside it; expected names such as train-images-idx3-ubyte and train-labels-idx1-ubyte"
        )
    x, y = parse_idx(read_bytes(path), path), parse_idx(read_bytes(labels[0]), labels[0])
    if y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{labels[0]}: labels of shape {y.shape} for {len(x)} images in {path.name}; expected one label an image"
        )
    return x.reshape(len(x), -1), y


# CIFAR, binary version


def parse_cifar(content: bytes, where: object, fine: bool | None, coarse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 3, 32, 32]` and labels of CIFAR records, which begin with one label (CIFAR-10) or two (`fine`, CIFAR-100)."""
    if fine is None:
        fine = len(content) % (_CIFAR_PIXELS + 1) != 0 and len(content) % (_CIFAR_PIXELS + 2) == 0
    head, classes = (2, 20 if coarse else 100) if fine else (1, 10)
    size = head + _CIFAR_PIXELS
    if len(content) == 0 or len(content) % size:
        raise DataError(
            f"{where}, offset {len(content) // size * size}: the file ends within a record; expected records of "
            f"{_CIFAR_PIXELS + 1} bytes (CIFAR-10) or {_CIFAR_PIXELS + 2} bytes (CIFAR-100), not {len(content)} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels = records[:, 0 if coarse or not fine else 1].astype(np.int64)
    if labels.max() >= classes:
        bad = int(np.flatnonzero(labels >= classes)[0])
        raise DataError(f"{where}, offset {bad * size}: label {labels[bad]} in record {bad}; expected 0 to {classes - 1}")
    return records[:, head:].reshape(-1, 3, 32, 32), labels


def read_cifar(path: Path, label: str | None = None, group: object = None) -> Raw:
    """CIFAR-10 or CIFAR-100 in the binary version: one .bin file, a folder of them, or the .tar.gz.

    `label="coarse"` takes CIFAR-100's twenty superclasses instead of its hundred classes.
    """
    if label not in (None, "fine", "coarse"):
        raise DataError(unknown("label", label, ("fine", "coarse")))
    train, test, names = [], [], {}
    for name, content in _cifar_files(path):
        if name.endswith(".txt"):
            names[name] = [line.strip() for line in content.decode("utf-8", "replace").splitlines() if line.strip()]
            continue
        fine = True if name in ("train.bin", "test.bin") else False if "batch" in name else None
        part = test if name.startswith("test") and path.suffix != ".bin" else train
        part.append(parse_cifar(content, path / name if path.is_dir() else f"{path}:{name}", fine, label == "coarse"))
    if not train:
        raise DataError(f"{path}: no training records; expected files such as data_batch_1.bin or train.bin")
    x, y = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    x_test, y_test = (np.concatenate(arrays) for arrays in zip(*test, strict=True)) if test else (None, None)
    called = names.get("batches.meta.txt") or names.get(f"{label or 'fine'}_label_names.txt")
    return Raw(x, y, x_test, y_test, called if called and len(called) > y.max() else None)


def _cifar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the .bin and label-name files, in order of name."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in (".bin", ".txt"):
                yield file.name, file.read_bytes()
    elif path.suffix == ".bin":
        yield path.name, path.read_bytes()
    else:
        limit = path.stat().st_size * _RATIO + _SLACK
        with tarfile.open(path) as archive:
            members = [m for m in archive.getmembers() if m.isfile() and m.name.endswith((".bin", ".txt"))]
            for member in sorted(members, key=lambda m: m.name):
                if member.size > limit:
                    raise DataError(f"{path}: {member.name} claims {member.size} bytes, more than the archive can hold")
                content = archive.extractfile(member).read()
                if len(content) != member.size:
                    raise DataError(f"{path}: {member.name} ends after {len(content)} of {member.size} bytes; fetch it again")
                yield Path(member.name).name, content


# npz


def npz_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of each array of an .npz, from the headers alone; a header must agree with the size of its member."""
    shapes = {}
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            with archive.open(member) as file:
                shape, dtype, start = _npy_header(file, f"{path}:{member.filename}")
            needed = start + math.prod(shape) * dtype.itemsize
            if needed != member.file_size or needed > size * _RATIO + _SLACK:
                raise DataError(
                    f"{path}: {member.filename} claims shape {shape}, which its {member.file_size} bytes cannot hold"
                )
            shapes[member.filename.removesuffix(".npy")] = shape, dtype
    return shapes


def _npy_header(file: BinaryIO, where: str) -> tuple[tuple[int, ...], np.dtype, int]:
    head = io.BytesIO(file.read(65536))
    try:
        version = np.lib.format.read_magic(head)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(head)
    except ValueError as error:
        raise DataError(f"{where}, offset 0: not an array ({error})") from None
    if dtype.hasobject:
        raise DataError(f"{where}: holds Python objects, which are never loaded; save numbers or text")
    return shape, dtype, head.tell()


def read_npz(path: Path, label: str | None = None, group: object = None) -> Raw:
    """An .npz with `x_train y_train x_test y_test` (or `x y`); groups in `client_train client_test`, names in `class_names`.

    `label="coarse"` takes the labels of `y_train_coarse y_test_coarse`.
    """
    shapes = npz_shapes(path)
    with np.load(path, allow_pickle=False) as file:

        def get(*names: str) -> np.ndarray | None:
            return next((file[name] for name in names if name in shapes), None)

        suffix = "" if label in (None, "fine") else f"_{label}"
        x, y = get("x_train", "x"), get(f"y_train{suffix}", f"y{suffix}")
        if x is None or y is None:
            wanted = "x_train" if x is None else f"y_train{suffix}"
            raise DataError(
                f"{path}: no array {wanted!r} (it holds {', '.join(shapes) or 'none'}); expected x_train, y_train, x_test "
                "and y_test"
            )
        names = get("coarse_names") if label == "coarse" else get("class_names", "fine_names")
        raw = Raw(
            x, y, get("x_test"), get(f"y_test{suffix}"), names,
            get("client_train", "groups_train"), get("client_test", "groups_test"),
            get("client_names", "group_names"), get("feature_names"),
        )  # fmt: skip
    if (raw.x_test is None) != (raw.y_test is None):
        raise DataError(f"{path}: only one of x_test and y_test{suffix} is there; expected both or neither")
    return raw


# CSV


def read_csv(path: Path, label: str | int | None = None, group: str | None = None) -> Raw:
    """CSV with a header and a label column (`label`: its name or position; else a column named label, target, class or y).

    All other columns are features and must hold numbers: encode categories first (for instance with pandas.get_dummies). Text
    or whole-number labels mean classes, numbers with fractions regression. `group` names the column that says whose row it is.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path, skipinitialspace=True)
    except (ValueError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a CSV file with a header ({str(error).strip()})") from None
    columns = [str(c) for c in frame.columns]
    frame.columns = columns
    if len(set(columns)) < len(columns):
        raise DataError(f"{path}, line 1: two columns have the same name; rename one")
    label = _label_column(path, columns, label)
    if group is not None and group not in columns:
        raise DataError(f"{path}: {unknown('group', group, columns)}")
    if len(frame) == 0:
        raise DataError(f"{path}: no rows below the header")
    y = frame.pop(label)
    if y.isna().any():
        line = int(np.flatnonzero(y.isna())[0]) + 2
        raise DataError(
            f"{path}, line {line}: column {label!r} (the label) is missing in {int(y.isna().sum())} rows; remove those rows"
        )
    groups = names = None
    if group is not None and group != label:
        names, groups = np.unique(frame.pop(group).astype(str).to_numpy(dtype=str), return_inverse=True)
    for column in frame.columns:
        if not (pd.api.types.is_numeric_dtype(frame[column]) or pd.api.types.is_bool_dtype(frame[column])):
            values = pd.to_numeric(frame[column], errors="coerce")
            wrong = np.flatnonzero(values.isna() & frame[column].notna())
            at = int(wrong[0]) if len(wrong) else 0
            raise DataError(
                f"{path}, line {at + 2}: column {column!r} holds text ({str(frame[column].iloc[at])!r}); "
                "encode it as numbers first, for instance with pandas.get_dummies"
            )
    if frame.shape[1] == 0:
        raise DataError(f"{path}: no feature columns beside the label {label!r}")
    whole = all(pd.api.types.is_integer_dtype(t) for t in frame.dtypes)
    x = frame.to_numpy(np.int64 if whole else np.float64)
    numeric = pd.api.types.is_numeric_dtype(y) or pd.api.types.is_bool_dtype(y)
    return Raw(
        x,
        y.to_numpy() if numeric else y.to_numpy(dtype=str),
        groups_train=groups,
        group_names=names,
        feature_names=list(frame.columns),
    )


def _label_column(path: Path, columns: list[str], label: str | int | None) -> str:
    if isinstance(label, int) and not isinstance(label, bool):
        if not -len(columns) <= label < len(columns):
            raise DataError(f"{path}: label={label} is outside the {len(columns)} columns")
        return columns[label]
    if label is None:
        found = [c for c in columns if c.lower() in ("label", "target", "class", "y")]
        if len(found) != 1:
            raise DataError(f"{path}: pass label=, the column to predict (columns: {', '.join(columns)})")
        return found[0]
    if label not in columns:
        raise DataError(f"{path}: {unknown('label', label, columns)}")
    return label


# LEAF JSON


def read_leaf(path: Path, label: object = None, group: object = None) -> Raw:
    """LEAF JSON, a file or a folder with train/ and test/: `users`, `num_samples`, `user_data[u]` with `x` and `y`.

    A user is a group. Text rows (LEAF's Shakespeare: windows of characters and the next one) become character ids; the
    alphabet is that of the data.
    """
    if path.is_file():
        train, test = [path], []
    else:
        train, test = (sorted((path / part).glob("*.json*")) for part in ("train", "test"))
        train = train or sorted(path.glob("*.json*"))
    if not train:
        raise DataError(f"{path}: no LEAF JSON; expected train/*.json and test/*.json")
    users: dict[str, int] = {}
    x, y, groups = _leaf_rows(train, users)
    x_test, y_test, groups_test = _leaf_rows(test, users) if test else ([], [], np.zeros(0, np.int64))
    if not x:
        raise DataError(f"{train[0]}: no rows in any user's data")
    names: list[str] | None = None
    tokens = isinstance(x[0], str)
    if tokens:
        if not all(isinstance(r, str) for part in (x, y, x_test, y_test) for r in part):
            raise DataError(f"{path}: some rows are text and some are numbers; expected one kind")
        names = sorted(set().union(*x, *y, *x_test, *y_test))
        x, y, x_test, y_test = (characters(part, names, path) for part in (x, y, x_test, y_test))
        y, y_test = y[:, 0].astype(np.int64), y_test[:, 0].astype(np.int64) if len(y_test) else np.zeros(0, np.int64)
    else:
        x, y = _leaf_array(x, "x", path), _leaf_array(y, "y", path)
        if test:
            x_test, y_test = _leaf_array(x_test, "x", path), _leaf_array(y_test, "y", path)
    parts = (x_test, y_test) if len(x_test) else (None, None)
    return Raw(x, y, *parts, names, groups, groups_test if len(x_test) else None, list(users), tokens=tokens)


def _leaf_rows(files: list[Path], users: dict[str, int]) -> tuple[list, list, np.ndarray]:
    x, y, groups = [], [], []
    for file in files:
        try:
            content = json.loads(read_bytes(file))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: not JSON ({error})") from None
        data = content.get("user_data") if isinstance(content, dict) else None
        if not isinstance(content, dict) or not isinstance(content.get("users"), list) or not isinstance(data, dict):
            raise DataError(f"{file}: not LEAF JSON; expected an object with 'users', 'num_samples' and 'user_data'")
        counts = content.get("num_samples")
        for position, user in enumerate(content["users"]):
            entry = data.get(user) if isinstance(user, str) else None
            rows, labels = (entry.get("x"), entry.get("y")) if isinstance(entry, dict) else (None, None)
            if not isinstance(rows, list) or not isinstance(labels, list) or len(rows) != len(labels):
                raise DataError(f"{file}: user_data of user {user!r} has no lists 'x' and 'y' of equal length")
            if isinstance(counts, list) and (position >= len(counts) or counts[position] != len(rows)):
                raise DataError(f"{file}: num_samples of user {user!r} differs from its {len(rows)} rows")
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
        raise DataError(f"{path}: {field!r} is not a table of numbers; expected rows of equal length")
    return array


def characters(texts: Sequence[str], alphabet: Sequence[str], where: object) -> np.ndarray:
    """Character ids of texts of equal length, float32 `[n, length]`: exact below 2^24, and the type of every feature."""
    if not len(texts):
        return np.zeros((0, 1), np.float32)
    length = len(texts[0])
    wrong = next((i for i, t in enumerate(texts) if len(t) != length), None)
    if wrong is not None or length == 0:
        raise DataError(
            f"{where}: text row {wrong or 0} has {len(texts[wrong or 0])} characters, the first has {length}; "
            "expected equal lengths"
        )
    codes = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    known = np.frombuffer("".join(alphabet).encode("utf-32-le"), np.uint32)  # sorted, as its characters are
    return np.searchsorted(known, codes).astype(np.float32).reshape(len(texts), length)


READERS: dict[str, Callable[[Path, object, object], Raw]] = {
    "libsvm": read_libsvm,
    "idx": read_idx,
    "cifar": read_cifar,
    "npz": read_npz,
    "csv": read_csv,
    "leaf": read_leaf,
}
