"""Image files: IDX (MNIST) and CIFAR's binary version."""

from __future__ import annotations

import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from foedus.data.formats.raw import _RATIO, SLACK, Raw, read_bytes
from foedus.errors import DataError, unknown

_CIFAR_PIXELS = 3072
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def parse_idx(content: bytes, where: object) -> np.ndarray:
    """The array of an IDX file: 0, 0, a type, the number of dimensions, their sizes, numbers."""
    magic = content[:4]
    known = len(magic) == 4 and magic[:2] == b"\0\0" and magic[2] in _IDX_TYPES
    if not known or not 1 <= magic[3] <= 8:
        raise DataError(
            f"{where}, offset 0: magic number {content[:4].hex()!r}; expected IDX (0000, a type, "
            "the number of dimensions)"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(
            f"{where}, offset {len(content)}: the file ends within the header of {start} bytes"
        )
    shape = tuple(int(s) for s in np.frombuffer(content[4:start], ">u4"))
    dtype = np.dtype(_IDX_TYPES[content[2]])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataError(
            f"{where}, offset {min(len(content), expected)}: shape {shape} needs {expected} bytes, "
            f"the file has {len(content)}"
        )
    array = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def read_idx(path: Path, label: object = None, group: object = None) -> Raw:
    """IDX images and labels (MNIST): a folder, or the images beside their labels; flat rows.

    The test part is found by its name (`t10k-` or `-test-` in place of `train`).
    """
    if path.is_dir():
        ending = re.compile(r"images.idx3.ubyte(\.gz)?$")
        images = sorted(p for p in path.iterdir() if ending.search(p.name))
        train = [p for p in images if "train" in p.name]
        train = train or [p for p in images if not re.search(r"t10k|test", p.name)]
        if not train:
            raise DataError(
                f"{path}: no training images; expected a file such as train-images-idx3-ubyte.gz"
            )
        path = train[0]
    x, y = _idx_pair(path)
    names = {path.name.replace("train", other, 1) for other in ("t10k", "test")} - {path.name}
    test = next((p for name in sorted(names) for p in _either(path.with_name(name))), None)
    return Raw(x, y, *(_idx_pair(test) if test else (None, None)))


def _either(path: Path) -> list[Path]:
    """The file with or without .gz, if it exists."""
    stem = path.name.removesuffix(".gz")
    return [p for p in (path.with_name(stem), path.with_name(stem + ".gz")) if p.exists()]


def _idx_pair(path: Path) -> tuple[np.ndarray, np.ndarray]:
    name = re.sub(r"images(.)idx3", r"labels\1idx1", path.name)
    labels = _either(path.with_name(name)) if name != path.name else []
    if not labels:
        raise DataError(
            f"{path}: no labels file beside it; expected names such as train-images-idx3-ubyte and "
            "train-labels-idx1-ubyte"
        )
    x, y = parse_idx(read_bytes(path), path), parse_idx(read_bytes(labels[0]), labels[0])
    if y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{labels[0]}: labels of shape {y.shape} for {len(x)} images in {path.name}; expected "
            "one label an image"
        )
    return x.reshape(len(x), -1), y


# CIFAR, binary version


def parse_cifar(
    content: bytes, where: object, fine: bool | None, coarse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 3, 32, 32]` and labels of CIFAR records with one label, or two (`fine`)."""
    if fine is None:
        fine = len(content) % (_CIFAR_PIXELS + 1) != 0 and len(content) % (_CIFAR_PIXELS + 2) == 0
    head, classes = (2, 20 if coarse else 100) if fine else (1, 10)
    size = head + _CIFAR_PIXELS
    if len(content) == 0 or len(content) % size:
        raise DataError(
            f"{where}, offset {len(content) // size * size}: the file ends within a record; "
            f"expected records of {_CIFAR_PIXELS + 1} bytes (CIFAR-10) or {_CIFAR_PIXELS + 2} "
            f"bytes (CIFAR-100), not {len(content)} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels = records[:, 0 if coarse or not fine else 1].astype(np.int64)
    if labels.max() >= classes:
        bad = int(np.flatnonzero(labels >= classes)[0])
        raise DataError(
            f"{where}, offset {bad * size}: label {labels[bad]} in record {bad}; expected 0 to "
            f"{classes - 1}"
        )
    return records[:, head:].reshape(-1, 3, 32, 32), labels


def read_cifar(path: Path, label: str | None = None, group: object = None) -> Raw:
    """CIFAR-10 or CIFAR-100 in the binary version: one .bin file, a folder of them, or the .tar.gz.

    `label="coarse"` takes CIFAR-100's twenty superclasses instead of its hundred classes.
    """
    if label not in (None, "fine", "coarse"):
        raise DataError(unknown("label", label, ("fine", "coarse")))
    train: list[tuple[np.ndarray, np.ndarray]] = []
    test: list[tuple[np.ndarray, np.ndarray]] = []
    names: dict[str, list[str]] = {}
    for name, content in _cifar_files(path):
        if name.endswith(".txt"):
            lines = map(str.strip, content.decode("utf-8", "replace").splitlines())
            names[name] = [line for line in lines if line]
            continue
        fine = True if name in ("train.bin", "test.bin") else False if "batch" in name else None
        part = test if name.startswith("test") and path.suffix != ".bin" else train
        where = path / name if path.is_dir() else f"{path}:{name}"
        part.append(parse_cifar(content, where, fine, label == "coarse"))
    if not train:
        raise DataError(
            f"{path}: no training records; expected files such as data_batch_1.bin or train.bin"
        )
    x, y = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    raw = Raw(x, y)
    if test:
        raw.x_test, raw.y_test = (np.concatenate(arrays) for arrays in zip(*test, strict=True))
    called = names.get("batches.meta.txt") or names.get(f"{label or 'fine'}_label_names.txt")
    raw.class_names = called if called and len(called) > y.max() else None
    return raw


def _cifar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the .bin and label-name files, in order of name."""
    if path.is_dir():
        for entry in sorted(path.iterdir()):
            if entry.suffix in (".bin", ".txt"):
                yield entry.name, entry.read_bytes()
    elif path.suffix == ".bin":
        yield path.name, path.read_bytes()
    else:
        limit = path.stat().st_size * _RATIO + SLACK
        with tarfile.open(path) as archive:
            files = (m for m in archive.getmembers() if m.isfile())
            for member in sorted(files, key=lambda m: m.name):
                if not member.name.endswith((".bin", ".txt")):
                    continue
                if member.size > limit:
                    claim = f"{member.name} claims {member.size} bytes"
                    raise DataError(f"{path}: {claim}, more than the archive can hold")
                file = archive.extractfile(member)
                assert file is not None  # a regular file
                content = file.read()
                if len(content) != member.size:
                    end = f"{member.name} ends after {len(content)} of {member.size} bytes"
                    raise DataError(f"{path}: {end}; fetch it again")
                yield Path(member.name).name, content
