"""Data sets by name: their files, their sources, and how to read them."""

from __future__ import annotations

import contextlib
import difflib
import gzip
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foedus.data import formats, speeches
from foedus.data.download import SPEECHES, Source, cache_dir, download, file_name, record_digest
from foedus.data.formats.raw import Raw
from foedus.data.holdout import HELD_OUT, hold_out, join_parts
from foedus.data.labels import encode_labels
from foedus.errors import DataError, unknown

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_EMNIST = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
_GUTENBERG = "https://www.gutenberg.org/files/100/old/"


def _folders() -> list[Path]:
    own = os.environ.get("FOEDUS_DATA")
    folders = [Path(own).expanduser()] if own else []
    with contextlib.suppress(RuntimeError):  # this user has no home, and so no cache
        folders.append(cache_dir())
    return folders


def locate(name: str) -> Path | None:
    """The file of a named set in `$FOEDUS_DATA` or the cache; `None` if it is in neither."""
    # A name is not a path: nothing outside the folders is found by name.
    if not name or Path(name).name != name or name in BUNDLED:
        return None
    wanted = [SPEECHES, "shakespeare"] if name == "shakespeare" else [f"{name}.npz"]
    places = (folder / file for folder in _folders() for file in wanted)
    return next((place for place in places if place.exists()), None)


def _at_hand() -> dict[str, Path]:
    """Every set in the folders, by name."""
    found: dict[str, Path] = {}
    for folder in _folders():
        for path in sorted(folder.glob("*.npz")) if folder.is_dir() else []:
            found.setdefault(path.stem, path)
    if (speeches := locate("shakespeare")) is not None:
        found["shakespeare"] = speeches
    return found


def known_names() -> list[str]:
    return [*BUNDLED, *_HOMES, *(n for n in _at_hand() if n not in _HOMES)]


@dataclass(frozen=True)
class Info:
    """One line of the list of sets; numbers that are unknown before reading a set are `None`."""

    name: str
    rows: int | None
    test_rows: int | None
    features: int | None
    classes: int | None
    where: str
    source: str


def names() -> list[Info]:
    """The sets that `load` knows: bundled, on disk, and to be downloaded."""
    return [info(name) for name in known_names()]


def info(name: str) -> Info:
    """What is known about a set without loading it."""
    if name not in known_names():
        raise DataError(unknown("data set", name, known_names()))
    if name in BUNDLED:
        return Info(name, *_BUNDLED_SIZES[name], "bundled", "scikit-learn")
    path, home = locate(name), _HOMES.get(name)
    source = home.sources[0].url if home else "file"
    if path is None:
        assert home is not None  # a known name is bundled, on disk, or has a source
        sizes = (home.rows, home.test_rows, home.features, home.classes)
        return Info(name, *sizes, "to download", source)
    if path.suffix != ".npz":
        return Info(name, None, None, 80, None, str(path), source)
    try:
        shapes = formats.npz_shapes(path)
        with np.load(path, allow_pickle=False) as file:
            classes = int(file["y_train"].max()) + 1 if shapes["y_train"][1].kind in "iu" else None
        x, x_test = shapes["x_train"][0], shapes["x_test"][0]
    except (DataError, KeyError, OSError, ValueError, zipfile.BadZipFile):
        return Info(name, None, None, None, None, str(path), "not readable")
    return Info(name, x[0], x_test[0], int(np.prod(x[1:])), classes, str(path), source)


def path_of(name_or_path: str | os.PathLike) -> Path | None:
    """The file to read, downloaded if necessary; `None` for a bundled set."""
    name = str(name_or_path)
    if isinstance(name_or_path, str):
        if name in BUNDLED:
            return None
        found = locate(name)
        if found is not None:
            return found
        if name in _HOMES:
            return _fetch(name)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if not isinstance(name_or_path, str) or path.suffix or len(path.parts) > 1:
        known = ", ".join(known_names())
        raise DataError(f"no file or folder {name!r}; check the path, or give one of {known}")
    text = unknown("data set", name, known_names())
    raise DataError(f"{text}; looked for {name}.npz in {_places()}")


def _places() -> str:
    own = "" if os.environ.get("FOEDUS_DATA") else " ($FOEDUS_DATA is not set)"
    return " and ".join(str(folder) for folder in _folders()) + own


def absent(name: str, reason: str) -> str:
    """The message for a known set that is missing: the folders, similar sets, and the remedy."""
    file, similar = file_name(name), [other for other in _at_hand() if other.startswith(name)]
    close = difflib.get_close_matches(name, similar, max(1, len(similar)), 0.0)
    subset = f" At hand, with a similar name: {', '.join(close)}." if close else ""
    content = "x_train, y_train, x_test, y_test"
    if name == "shakespeare":
        content = "users with 'id' and 'speeches'; or LEAF's folder as shakespeare/"
    return (
        f"data set {name!r}: {reason}. Looked for {file} in {_places()}.{subset} "
        f"Put {file} (holding {content}) into one of these folders, or load a file by its path."
    )


@dataclass(frozen=True)
class Home:
    """The source of a set, its sizes, and the parser of its files."""

    rows: int | None
    test_rows: int | None
    features: int
    classes: int | None
    sources: tuple[Source, ...]
    parse: Callable[[list[Path]], Raw | list[dict]]


def _fetch(name: str) -> Path:
    """Download, check, parse, write the file of the set to the cache."""
    home, cache = _HOMES[name], cache_dir()
    target = cache / file_name(name)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
            fetched = [download(source, Path(folder)) for source in home.sources]
            files, digests = zip(*fetched, strict=True)
            parsed = home.parse(list(files))
            # Only after it was parsed: the answer may have been a login page.
            for source, sha256 in zip(home.sources, digests, strict=True):
                record_digest(source, sha256)
            draft = Path(folder) / f"draft-{target.name}"
            if isinstance(parsed, Raw):
                _write_arrays(name, parsed, draft)
            else:
                _write_speeches(parsed, draft)
            os.replace(draft, target)
    except OSError as error:  # so are errors of requests; the innermost gives the reason
        reason: BaseException = error
        while reason.__context__ is not None:
            reason = reason.__context__
        failed = f"the download from {home.sources[0].url} failed ({reason})"
        raise DataError(absent(name, failed)) from error
    return target


def _write_arrays(name: str, raw: Raw, path: Path) -> None:
    if raw.x_test is None:
        raw = hold_out(raw, HELD_OUT, 0, raw.y_train.dtype.kind == "f")
    y_train, y_test, about = encode_labels(raw, raw.y_train.dtype.kind == "f", name)
    arrays: dict[str, Any] = {"x_train": raw.x_train, "y_train": y_train, "x_test": raw.x_test}
    arrays |= {"y_test": y_test, **raw.extra}
    if "class_names" in about:
        arrays["class_names"] = np.array(about["class_names"])
    np.savez_compressed(path, **arrays)


def _write_speeches(users: list[dict], path: Path) -> None:
    content = {
        "source": "Project Gutenberg, The Complete Works of William Shakespeare (ebook 100), "
        "edition of January 1994",
        "format": "one entry per speaking character per play; speeches in order, lines separated "
        "by newline; stage directions removed",
        "users": users,
    }
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file)


# Sources


def _parse_libsvm(paths: list[Path]) -> Raw:
    train, *test = (formats.read(path, format="libsvm") for path in paths)
    return join_parts(train, test[0], paths[1]) if test else train


def _parse_mnist(paths: list[Path]) -> Raw:
    x, y, x_test, y_test = (formats.parse_idx(formats.read_bytes(path), path) for path in paths)
    return Raw(x.reshape(len(x), -1), y, x_test.reshape(len(x_test), -1), y_test)


def _parse_emnist(part: str) -> Callable[[list[Path]], Raw]:
    def parse(paths: list[Path]) -> Raw:
        with zipfile.ZipFile(paths[0]) as archive:

            def member(ending: str) -> bytes:
                return archive.read(f"gzip/emnist-{part}-{ending}")

            def array(ending: str) -> np.ndarray:
                return formats.parse_idx(gzip.decompress(member(ending)), f"{paths[0]}:{ending}")

            def images(half: str) -> np.ndarray:  # the files hold columns where MNIST has rows
                x = array(f"{half}-images-idx3-ubyte.gz")
                return np.ascontiguousarray(x.transpose(0, 2, 1)).reshape(len(x), -1)

            def labels(half: str) -> np.ndarray:
                return array(f"{half}-labels-idx1-ubyte.gz").astype(np.int64) - first

            lines = filter(str.strip, member("mapping.txt").decode("ascii").splitlines())
            codes = [[int(v) for v in line.split()[:2]] for line in lines]
            first = min(code for code, _ in codes)  # the letters are numbered from 1
            names = [chr(letter) for _, letter in codes]
            return Raw(images("train"), labels("train"), images("test"), labels("test"), names)

    return parse


def _parse_shakespeare(paths: list[Path], *, plays: int = 30, speakers: int = 500) -> list[dict]:
    try:
        return speeches.read_plays(paths[0], plays=plays, speakers=speakers)
    except DataError as error:
        raise DataError(absent("shakespeare", str(error))) from None


def _libsvm(rows: int, test_rows: int, features: int, classes: int, *files: str) -> Home:
    sources = tuple(Source(_LIBSVM + file) for file in files)
    return Home(rows, test_rows, features, classes, sources, _parse_libsvm)


def _emnist(part: str, rows: int, test_rows: int, classes: int) -> Home:
    return Home(rows, test_rows, 784, classes, (Source(_EMNIST, keep=True),), _parse_emnist(part))


def _parse_cifar(paths: list[Path]) -> Raw:
    return formats.read(paths[0], format="cifar")


def _parse_cifar100(paths: list[Path]) -> Raw:
    fine, coarse = (formats.read(paths[0], format="cifar", label=k) for k in ("fine", "coarse"))
    assert coarse.y_test is not None
    extra = {"y_train_coarse": coarse.y_train, "y_test_coarse": coarse.y_test}
    if coarse.class_names is not None:
        extra["coarse_names"] = np.array(coarse.class_names)
    return replace(fine, extra=extra)


def _cifar(classes: int, file: str, md5: str) -> Home:
    parse = _parse_cifar if classes == 10 else _parse_cifar100
    return Home(50000, 10000, 3072, classes, (Source(_CIFAR + file, md5),), parse)


_HOMES: dict[str, Home] = {
    "letter": _libsvm(15000, 5000, 16, 26, "letter.scale", "letter.scale.t"),
    "pendigits": _libsvm(7494, 3498, 16, 10, "pendigits", "pendigits.t"),
    "satimage": _libsvm(4435, 2000, 36, 6, "satimage.scale", "satimage.scale.t"),
    "dna": _libsvm(2000, 1186, 180, 3, "dna.scale", "dna.scale.t"),
    "usps": _libsvm(7291, 2007, 256, 10, "usps.bz2", "usps.t.bz2"),
    "shuttle": _libsvm(43500, 14500, 9, 7, "shuttle.scale", "shuttle.scale.t"),
    "sensorless": _libsvm(43882, 14627, 48, 11, "Sensorless"),
    "covtype": _libsvm(435759, 145253, 54, 7, "covtype.bz2"),
    "mnist": Home(
        60000, 10000, 784, 10,
        (
            Source(_MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            Source(_MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            Source(_MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            Source(_MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        _parse_mnist,
    ),
    "emnist": _emnist("balanced", 112800, 18800, 47),
    "emnist_letters": _emnist("letters", 124800, 20800, 26),
    "emnist_digits": _emnist("digits", 240000, 40000, 10),
    "emnist_byclass": _emnist("byclass", 697932, 116323, 62),
    "cifar10": _cifar(10, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar100": _cifar(100, "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    "shakespeare": Home(
        None, None, 80, None,
        (Source(_GUTENBERG + "old/1994-01-100.zip", former=_GUTENBERG + "1994-01-100.zip"),),
        _parse_shakespeare,
    ),
}  # fmt: skip


def _bundled(name: str) -> Callable[[], Raw]:
    def read() -> Raw:
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")()
        classes = [str(n) for n in bunch.target_names] if "target_names" in bunch else None
        return Raw(bunch.data, bunch.target, class_names=classes)

    return read


BUNDLED: dict[str, Callable[[], Raw]] = {
    name: _bundled(name) for name in ("digits", "breast_cancer", "wine", "diabetes")
}
_BUNDLED_SIZES = {  # rows, test rows, features, classes
    "digits": (1346, 451, 64, 10),
    "breast_cancer": (427, 142, 30, 2),
    "wine": (133, 45, 13, 3),
    "diabetes": (331, 111, 10, None),
}
