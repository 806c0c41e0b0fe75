"""Load a data set by name or from a file: find or fetch it, hold out a test part, fill in, scale.

A named set is looked for as `NAME.npz` (the text of shakespeare as JSON) in `$FOEDUS_DATA`, then in the user's cache; absent
there, it is downloaded from its canonical home, checked, parsed and written to the cache.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import http.client
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foedus.data import formats, speeches
from foedus.data.dataset import Data, first_not_finite
from foedus.data.formats import Raw
from foedus.errors import DataError, unknown

_TIMEOUT = 30  # seconds without an answer
_HELD_OUT = 0.25  # part of the rows that become the test part of a set without one
_SPEECHES = "shakespeare_by_speaker.json.gz"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_EMNIST = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
_GUTENBERG = "https://www.gutenberg.org/files/100/old/"


def load(
    name_or_path: str | os.PathLike,
    *,
    scale: str | None = "auto",
    impute: str | None = None,
    label: str | int | None = None,
    group: str | None = None,
    test: float | str | os.PathLike | None = None,
    seed: int = 0,
    regression: bool | None = None,
    format: str | None = None,
    window: int = 80,
    stride: int = 80,
) -> Data:
    """A data set by name (`foedus data list` shows them) or from a file or folder.

    Files may be LIBSVM text (plain, .bz2, .xz), IDX (.gz), CIFAR's binary version, npz, CSV or LEAF JSON, see
    `foedus.data.formats`. Labels become 0 .. classes - 1; text and other numbers are kept as `class_names`.

    Args:
        scale: "auto" divides images (whole numbers 0 .. 255 in at least 256 features, or in image shape) by 255, leaves
            features alone that fill [-1, 1] or half of it, and standardises others; "standard" (mean 0, variance 1),
            "minmax" ([0, 1]), "unit" (/ 255) or None. Fitted on training rows only; constant features are only shifted.
        impute: what replaces missing features: "median" or "mean" of the training rows, or "zero".
        label: the column to predict (CSV), or "coarse" for the twenty superclasses of CIFAR-100.
        group: the column that says whose row it is (CSV), for the natural split.
        test: a file with test rows, or the part of all rows to hold out (stratified by group or label, drawn with `seed`). By
            default the set's own test part, or a quarter of the rows where it has none; 0 holds out nothing.
        regression: whether to predict numbers; by default text and whole numbers are classes and other numbers are not.
        format: the format of the file, where its name does not tell.
        window, stride: for shakespeare, characters a row and between the beginnings of rows. Features are character ids, the
            label is the next character, the group is the speaker; the last fifth of each speaker's text (or `test`) is for
            testing. Speakers with too little text for one training row are left out.

    >>> load("digits").classes
    10
    """
    for name, value, allowed in (("scale", scale, SCALES), ("impute", impute, IMPUTES)):
        if value is not None and value not in allowed:
            raise DataError(unknown(name, value, [*allowed, None]))
    if isinstance(test, (int, float)) and not 0 <= test < 1:
        raise DataError(f"test={test!r} must be a part from 0 to below 1, or a file with test rows")
    name = str(name_or_path)
    path = path_of(name_or_path)
    if name == "shakespeare" and path is not None and path.is_file() and path.name == _SPEECHES:
        raw = _speech_windows(load_speeches(path), window, stride, 0.2 if test is None else _fraction(test))
        test = None
    elif path is None:
        raw = _BUNDLED[name]()
    else:
        raw = formats.read(path, format=format, label=label, group=group)
        name = path.name.split(".")[0] if name not in known_names() else name
    raw = _shaped(raw)
    if test is not None and not isinstance(test, (int, float)):
        raw = _joined(raw, _shaped(formats.read(test, format=format, label=label, group=group)), test)
    elif test is not None or raw.x_test is None:
        raw = hold_out(_pooled(raw), _HELD_OUT if test is None else float(test), seed, regression)
    return _finish(name, raw, scale, impute, regression)


def load_speeches(path: str | os.PathLike | None = None) -> list[dict]:
    """Shakespeare's speaking characters for language models: dictionaries with `id`, `play`, `speaker` and `speeches`."""
    path = path_of("shakespeare" if path is None else Path(path))
    if not path.is_file():
        raise DataError(_absent("shakespeare", "its speeches are not at hand"))
    try:
        users = json.loads(formats.read_bytes(path))["users"]
        if (
            not users
            or not all(isinstance(s, str) for user in users for s in user["speeches"])
            or not all("id" in u for u in users)
        ):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(
            f"{path}: not a JSON file of speeches ({error}); expected users with 'id' and a list 'speeches'"
        ) from None
    return users


# Where sets are


def cache_dir() -> Path:
    """The folder of downloaded sets."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "foedus"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "foedus" / "cache"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "foedus"


def _folders() -> list[Path]:
    own = os.environ.get("FOEDUS_DATA")
    return [*([Path(own).expanduser()] if own else []), cache_dir()]


def locate(name: str) -> Path | None:
    """The file of a named set in `$FOEDUS_DATA` or the cache; `None` where it must be downloaded or needs no file."""
    # A name is not a path: nothing outside the folders is found by name.
    if not name or Path(name).name != name or name in _BUNDLED:
        return None
    wanted = [_SPEECHES, "shakespeare"] if name == "shakespeare" else [f"{name}.npz"]
    return next((folder / file for folder in _folders() for file in wanted if (folder / file).exists()), None)


def _at_hand() -> dict[str, Path]:
    """Every set that lies in the folders, by name."""
    found: dict[str, Path] = {}
    for folder in _folders():
        for path in sorted(folder.glob("*.npz")) if folder.is_dir() else []:
            found.setdefault(path.stem, path)
    if (speeches := locate("shakespeare")) is not None:
        found["shakespeare"] = speeches
    return found


def known_names() -> list[str]:
    return [*_BUNDLED, *_HOMES, *(n for n in _at_hand() if n not in _HOMES)]


@dataclass(frozen=True)
class Info:
    """One line of the list of sets. Numbers are `None` where they are not known without reading the set."""

    name: str
    rows: int | None
    test_rows: int | None
    features: int | None
    classes: int | None
    where: str
    source: str


def names() -> list[Info]:
    """The sets that `load` knows: bundled, at hand, and to be downloaded."""
    return [info(name) for name in known_names()]


def info(name: str) -> Info:
    """What is known of a set without loading it."""
    if name not in known_names():
        raise DataError(unknown("data set", name, known_names()))
    if name in _BUNDLED:
        return Info(name, *_BUNDLED_SIZES[name], "bundled", "scikit-learn")
    path, home = locate(name), _HOMES.get(name)
    source = home.sources[0].url if home else "file"
    if path is None:
        return Info(name, home.rows, home.test_rows, home.features, home.classes, "to download", source)
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
    """The file to read, after a download where that is needed; `None` for a bundled set."""
    name = str(name_or_path)
    if isinstance(name_or_path, str):
        if name in _BUNDLED:
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
        raise DataError(f"no file or folder {name!r}; check the path, or give one of the names {', '.join(known_names())}")
    raise DataError(unknown("data set", name, known_names()) + f"; looked for {name}.npz in {_places()}")


def _places() -> str:
    own = "" if os.environ.get("FOEDUS_DATA") else " ($FOEDUS_DATA is not set)"
    return " and ".join(str(folder) for folder in _folders()) + own


def _absent(name: str, reason: str) -> str:
    """The sentence for a known set that is nowhere: where it was looked for, what is at hand, how to put it there."""
    file = _file(name)
    likeness = {other: difflib.SequenceMatcher(None, name, other).ratio() for other in _at_hand() if other.startswith(name)}
    close = sorted(likeness, key=likeness.get, reverse=True)
    subset = f" At hand, with a similar name: {', '.join(close)}." if close else ""
    content = (
        "users with 'id' and 'speeches'; or LEAF's folder as shakespeare/"
        if name == "shakespeare"
        else "x_train, y_train, x_test, y_test"
    )
    return (
        f"data set {name!r}: {reason}. Looked for {file} in {_places()}.{subset} "
        f"Put {file} (holding {content}) into one of these folders, or load a file by its path."
    )


# Download


@dataclass(frozen=True)
class Source:
    """One file of a set at its home, with the MD5 that is published for it, if there is one."""

    url: str
    md5: str | None = None
    keep: bool = False  # an archive of several sets stays in the cache
    former: str | None = None  # where the home had the same file before it moved it


@dataclass(frozen=True)
class Home:
    """Where a set comes from, what it holds, and how its files become arrays or, for shakespeare, speaking characters."""

    rows: int | None
    test_rows: int | None
    features: int
    classes: int | None
    sources: tuple[Source, ...]
    parse: Callable[[list[Path]], Raw | list[dict]]


def _fetch(name: str) -> Path:
    """Download, check, parse, write the file of the set to the cache."""
    home, cache = _HOMES[name], cache_dir()
    target = cache / _file(name)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
            files, digests = zip(*(_download(source, Path(folder)) for source in home.sources), strict=True)
            parsed = home.parse(list(files))
            # Not before it could be parsed: what answered may have been a login page.
            for source, sha256 in zip(home.sources, digests, strict=True):
                _record(source, sha256)
            draft = Path(folder) / f"draft-{target.name}"
            if isinstance(parsed, Raw):
                _write_arrays(name, parsed, draft)
            else:
                _write_speeches(parsed, draft)
            os.replace(draft, target)
    except (OSError, http.client.HTTPException) as error:  # urllib's errors are OSErrors
        reason = error if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", None) or error
        raise DataError(_absent(name, f"the download from {home.sources[0].url} failed ({reason})")) from error
    return target


def _file(name: str) -> str:
    return _SPEECHES if name == "shakespeare" else f"{name}.npz"


def _write_arrays(name: str, raw: Raw, path: Path) -> None:
    if raw.x_test is None:
        raw = hold_out(raw, _HELD_OUT, 0, None)
    y_train, y_test, _, names_ = _encode(raw, None, name)
    arrays = {"x_train": raw.x_train, "y_train": y_train, "x_test": raw.x_test, "y_test": y_test, **raw.extra}
    if names_ is not None:
        arrays["class_names"] = np.array(names_)
    np.savez_compressed(path, **arrays)


def _write_speeches(users: list[dict], path: Path) -> None:
    content = {
        "source": "Project Gutenberg, The Complete Works of William Shakespeare (ebook 100), edition of January 1994",
        "format": "one entry per speaking character per play; speeches in order, lines separated by newline; "
        "stage directions removed",
        "users": users,
    }
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file)


def _download(source: Source, folder: Path) -> tuple[Path, str]:
    """Fetch one file and check it; a file that fails the check is never kept. Also its SHA-256."""
    file = source.url.rsplit("/", 1)[-1]
    kept = cache_dir() / "downloads" / file
    if source.keep and kept.exists():
        digests = _digests(kept)
        _check(source, *digests)
        return kept, digests[1]
    target = folder / file
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with _answer(source) as answer, target.open("wb") as out:
        size = int(answer.headers.get("Content-Length") or 0)
        received = 0
        with _Progress(file, size) as advance:
            while chunk := answer.read(1 << 18):
                out.write(chunk)
                md5.update(chunk)
                sha256.update(chunk)
                received += len(chunk)
                advance(len(chunk))
    if size and received != size:
        raise OSError(f"{source.url} ended after {received} of {size} bytes")
    _check(source, md5.hexdigest(), sha256.hexdigest())
    if source.keep:
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(target, kept)
        target = kept
    return target, sha256.hexdigest()


def _answer(source: Source) -> http.client.HTTPResponse:
    """The answer for a file, from where it is or where it was."""

    def ask(url: str) -> http.client.HTTPResponse:
        return urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "foedus"}), timeout=_TIMEOUT)

    try:
        return ask(source.url)
    except urllib.error.HTTPError as error:
        if source.former is None or error.code not in (404, 410):
            raise
    return ask(source.former)


def _digests(path: Path) -> tuple[str, str]:
    with path.open("rb") as file:
        md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        file.seek(0)
        return md5, hashlib.file_digest(file, "sha256").hexdigest()


def _check(source: Source, md5: str, sha256: str) -> None:
    """Compare with the published MD5; where none is published, with the SHA-256 of the first download."""
    if source.md5 is not None:
        if md5 != source.md5:
            raise DataError(
                f"{source.url}: MD5 is {md5}, but {source.md5} is published; the file is damaged or was changed, "
                "so it was not kept. Try again later"
            )
        return
    record, known = _recorded()
    first = known.get(source.url, sha256)
    if first != sha256:
        raise DataError(
            f"{source.url}: SHA-256 is {sha256}, but the first download had {first}; the file is damaged or was changed. "
            f"If its publisher changed it, remove its line from {record} and load again"
        )


def _record(source: Source, sha256: str) -> None:
    """Record the SHA-256 of a first download, where no MD5 is published."""
    if source.md5 is not None:
        return
    record, known = _recorded()
    if source.url not in known:
        with tempfile.NamedTemporaryFile("w", dir=record.parent, prefix=".checksums-", delete=False) as draft:
            json.dump({**known, source.url: sha256}, draft, indent=1, sort_keys=True)
        os.replace(draft.name, record)


def _recorded() -> tuple[Path, dict[str, str]]:
    """The file of checksums of first downloads, and what it holds."""
    record = cache_dir() / "checksums.json"
    try:
        known = json.loads(record.read_text()) if record.exists() else {}
    except ValueError:
        known = None
    if not isinstance(known, dict):
        raise DataError(f"{record} is damaged: not a JSON object of checksums; remove it to record them anew")
    return record, known


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, file: str, size: int):
        self.file, self.size, self.bar = file, size, None

    def __enter__(self) -> Callable[[int], None]:
        if not sys.stderr.isatty():
            return lambda count: None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.bar.start()
        task = self.bar.add_task(self.file, total=self.size or None)
        return lambda count: self.bar.advance(task, count)

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.stop()


# Homes


def _parse_libsvm(paths: list[Path]) -> Raw:
    train = formats.read(paths[0], format="libsvm")
    return _joined(train, formats.read(paths[1], format="libsvm"), paths[1]) if len(paths) > 1 else train


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

            y, y_test = (array(f"{half}-labels-idx1-ubyte.gz").astype(np.int64) for half in ("train", "test"))
            codes = [line.split() for line in member("mapping.txt").decode("ascii").splitlines() if line.strip()]
            first = min(int(code[0]) for code in codes)  # the letters are numbered from 1
            return Raw(images("train"), y - first, images("test"), y_test - first, [chr(int(code[1])) for code in codes])

    return parse


def _parse_shakespeare(paths: list[Path], *, plays: int = 30, speakers: int = 500) -> list[dict]:
    try:
        return speeches.read_plays(paths[0], plays=plays, speakers=speakers)
    except DataError as error:
        raise DataError(_absent("shakespeare", str(error))) from None


def _libsvm(rows: int, test_rows: int, features: int, classes: int, *files: str) -> Home:
    return Home(rows, test_rows, features, classes, tuple(Source(_LIBSVM + file) for file in files), _parse_libsvm)


def _emnist(part: str, rows: int, test_rows: int, classes: int) -> Home:
    return Home(rows, test_rows, 784, classes, (Source(_EMNIST, keep=True),), _parse_emnist(part))


def _parse_cifar(paths: list[Path]) -> Raw:
    return formats.read(paths[0], format="cifar")


def _parse_cifar100(paths: list[Path]) -> Raw:
    fine, coarse = formats.read(paths[0], format="cifar"), formats.read(paths[0], format="cifar", label="coarse")
    extra = {"y_train_coarse": coarse.y_train, "y_test_coarse": coarse.y_test}
    if coarse.class_names is not None:
        extra["coarse_names"] = np.array(coarse.class_names)
    return replace(fine, extra=extra)


def _cifar(classes: int, file: str, md5: str) -> Home:
    return Home(50000, 10000, 3072, classes, (Source(_CIFAR + file, md5),), _parse_cifar if classes == 10 else _parse_cifar100)


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


_BUNDLED: dict[str, Callable[[], Raw]] = {name: _bundled(name) for name in ("digits", "breast_cancer", "wine", "diabetes")}
_BUNDLED_SIZES = {  # rows, test rows, features, classes
    "digits": (1346, 451, 64, 10),
    "breast_cancer": (427, 142, 30, 2),
    "wine": (133, 45, 13, 3),
    "diabetes": (331, 111, 10, None),
}


# From raw arrays to Data


def _shaped(raw: Raw) -> Raw:
    """Images of shape [n, height, width, channels] become [n, channels, height, width], as torch has them."""

    def channels_first(x: np.ndarray | None) -> np.ndarray | None:
        if x is not None and x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            return x.transpose(0, 3, 1, 2)
        return x

    return replace(raw, x_train=channels_first(raw.x_train), x_test=channels_first(raw.x_test))


def _joined(train: Raw, test: Raw, where: object) -> Raw:
    """The training rows of one file and, as test part, those of another."""
    x, x_test = train.x_train, test.x_train
    if x.ndim == x_test.ndim == 2 and x.shape[1] != x_test.shape[1]:
        if train.feature_names is not None or train.tokens:
            raise DataError(
                f"{where}: {x_test.shape[1]} features, the training file has {x.shape[1]}; give both the same columns"
            )
        # Sparse text does not write zeros, so the file that lacks the last features is the narrower one.
        width = max(x.shape[1], x_test.shape[1])
        x, x_test = (np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in (x, x_test))
    if train.feature_names is not None and list(train.feature_names) != list(test.feature_names or []):
        raise DataError(
            f"{where}: its columns differ from those of the training file; give both the same columns in the same order"
        )
    if train.tokens and list(train.class_names) != list(test.class_names):
        raise DataError(f"{where}: its alphabet differs from that of the training file; give one folder with train/ and test/")
    groups, groups_test, group_names = train.groups_train, test.groups_train, train.group_names
    if groups_test is not None and group_names is not None:
        place = {name: g for g, name in enumerate(group_names)}
        groups_test = np.array([place.setdefault(test.group_names[g], len(place)) for g in groups_test], np.int64)
        group_names = list(place)
    return replace(
        train,
        x_train=x,
        x_test=x_test,
        y_test=test.y_train,
        groups_test=groups_test,
        groups_train=groups,
        group_names=group_names,
    )


def _pooled(raw: Raw) -> Raw:
    """Training and test rows together, where the test part is to be drawn anew."""
    if raw.x_test is None:
        return raw
    groups = raw.groups_train
    if groups is not None:
        groups = None if raw.groups_test is None else np.concatenate([groups, raw.groups_test])
    x, y = np.concatenate([raw.x_train, raw.x_test]), np.concatenate([raw.y_train, raw.y_test])
    return replace(raw, x_train=x, y_train=y, x_test=None, y_test=None, groups_train=groups, groups_test=None)


def _fraction(test: object) -> float:
    if not isinstance(test, (int, float)):
        raise DataError(f"test={test!r} must be a part from 0 to below 1 of each speaker's text")
    return float(test)


def hold_out(raw: Raw, part: float, seed: int, regression: bool | None) -> Raw:
    """Move a random part of the rows to the test part: that part of each group, or of each label."""
    n = len(raw.y_train)
    rng = np.random.default_rng(seed)
    if raw.groups_train is not None:
        strata = raw.groups_train
    elif regression or (regression is None and raw.y_train.dtype.kind == "f") or raw.y_train.ndim > 1:
        strata = np.zeros(n, np.int64)
    else:
        strata = np.unique(raw.y_train, return_inverse=True)[1]
    shuffled = rng.permutation(n)
    order = shuffled[np.argsort(strata[shuffled], kind="stable")]
    sizes = np.bincount(strata)
    sizes = sizes[sizes > 0]
    height = np.arange(n) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = height < np.repeat(np.floor(sizes * part + 0.5), sizes)
    if chosen.all():
        chosen[:1] = False
    held = np.zeros(n, bool)
    held[order[chosen]] = True
    groups = raw.groups_train
    return replace(
        raw, x_train=raw.x_train[~held], y_train=raw.y_train[~held], x_test=raw.x_train[held], y_test=raw.y_train[held],
        groups_train=None if groups is None else groups[~held], groups_test=None if groups is None else groups[held],
    )  # fmt: skip


def _encode(raw: Raw, regression: bool | None, name: str) -> tuple[np.ndarray, np.ndarray, int | None, tuple[str, ...] | None]:
    """Labels of both parts as 0 .. classes - 1, the number of classes, and what they were called; targets are left alone."""
    y, cut = np.concatenate([raw.y_train, raw.y_test]), len(raw.y_train)
    if y.dtype.kind not in "iubfUS":
        raise DataError(f"labels of {name!r} have dtype {y.dtype}; expected numbers or text")
    if regression is None:
        regression = y.dtype.kind == "f" or y.ndim > 1
    if regression:
        if y.dtype.kind in "US":
            raise DataError(f"labels of {name!r} are text ({str(y[0])!r}); regression needs numbers")
        return y[:cut].astype(np.float32), y[cut:].astype(np.float32), None, None
    if y.ndim > 1:
        raise DataError(f"labels of {name!r} have shape {y.shape[1:]} a row; classification needs one label a row")
    if raw.class_names is not None and y.dtype.kind in "iub":
        y = y.astype(np.int64)
        return y[:cut], y[cut:], len(raw.class_names), tuple(str(n) for n in raw.class_names)
    values, codes = np.unique(y, return_inverse=True)
    if y.dtype.kind in "iub" and values[0] == 0 and values[-1] < 2 * len(values) + 10:
        y = y.astype(np.int64)
        return y[:cut], y[cut:], max(2, int(values[-1]) + 1), None
    names_ = [f"{v:g}" if y.dtype.kind == "f" else str(v) for v in values.tolist()]
    if len(names_) == 1:
        raise DataError(
            f"labels of {name!r} are all {names_[0]!r}; at least two classes are needed (for numbers, regression=True)"
        )
    return codes[:cut].astype(np.int64), codes[cut:].astype(np.int64), len(names_), tuple(names_)


IMPUTES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "median": lambda x: np.nanmedian(x, axis=0),
    "mean": lambda x: np.nanmean(x, axis=0, dtype=np.float64),
    "zero": lambda x: np.zeros(x.shape[1]),
}


def _imputed(raw: Raw, impute: str | None, name: str) -> Raw:
    """Replace NaN by a value of the training rows, or say where it is."""
    parts = {"x_train": raw.x_train, "x_test": raw.x_test}
    parts = {k: x for k, x in parts.items() if x.dtype.kind == "f" and first_not_finite(x) is not None and np.isnan(x).any()}
    if not parts:
        return raw
    if impute is None:
        part, x = next(iter(parts.items()))
        missing = np.isnan(x.reshape(len(x), -1))
        row, column = np.unravel_index(int(missing.argmax()), missing.shape)
        called = column if raw.feature_names is None else f"{str(raw.feature_names[column])!r}"
        raise DataError(
            f"{part} of {name!r} has {int(missing.sum())} missing values (NaN), first in row {row}, column {called}; "
            "pass impute='median' (of the training rows), 'mean' or 'zero'"
        )
    flat = raw.x_train.reshape(len(raw.x_train), -1)
    empty = np.isnan(flat).all(0)
    value = np.zeros(flat.shape[1])
    value[~empty] = IMPUTES[impute](flat[:, ~empty])

    def fill(x: np.ndarray) -> np.ndarray:
        f = x.reshape(len(x), -1)
        return np.where(np.isnan(f), value, f).reshape(x.shape)

    return replace(raw, x_train=fill(raw.x_train), x_test=fill(raw.x_test))


def _auto(x: np.ndarray) -> str | None:
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


def _finish(name: str, raw: Raw, scale: str | None, impute: str | None, regression: bool | None) -> Data:
    y_train, y_test, classes, class_names = _encode(raw, regression, name)
    for part, x in (("x_train", raw.x_train), ("x_test", raw.x_test)):
        if x.dtype.kind not in "fiub":
            raise DataError(f"{part} of {name!r} has dtype {x.dtype}; expected numbers")
    if raw.x_train.size == 0:
        raise DataError(f"x_train of {name!r} has no rows or no features")
    if raw.x_train.shape[1:] != raw.x_test.shape[1:]:
        raise DataError(
            f"x_test of {name!r} has rows of shape {raw.x_test.shape[1:]}, x_train of shape {raw.x_train.shape[1:]}"
        )
    raw = _imputed(raw, impute, name)
    if raw.tokens and scale not in (None, "auto"):
        raise DataError(f"scale={scale!r}: the features of {name!r} are character ids, which are not scaled; leave scale out")
    if raw.tokens:
        scale = None
    elif scale == "auto":
        scale = _auto(raw.x_train)
    x_train, x_test = raw.x_train, raw.x_test
    if scale is not None:
        shift, divisor = SCALES[scale](x_train)
        x_train, x_test = _scaled(x_train, shift, divisor), _scaled(x_test, shift, divisor)
    return Data(
        name, x_train, y_train, x_test, y_test, classes, class_names, raw.groups_train, raw.groups_test,
        None if raw.group_names is None else tuple(str(n) for n in raw.group_names), scale,
    )  # fmt: skip


def _scaled(x: np.ndarray, shift: np.ndarray | None, divisor: np.ndarray | float) -> np.ndarray:
    """(x - shift) / divisor in float32, a block of rows at a time: the difference is taken in float64."""
    out = np.empty(x.shape, np.float32)
    block = max(1, (1 << 22) // max(1, int(np.prod(x.shape[1:]))))
    for start in range(0, len(x), block):
        part = x[start : start + block]
        out[start : start + block] = part / np.float32(divisor) if shift is None else (part - shift) / divisor
    return out


def _speech_windows(users: list[dict], window: int, stride: int, part: float) -> Raw:
    """Rows of `window` characters and the next one, from each speaker's speeches; the last part of each text is for testing."""
    for name, value in (("window", window), ("stride", stride)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{name}={value!r} must be a whole number of at least 1")
    texts = ["\n".join(user["speeches"]) for user in users]
    alphabet = sorted(set().union(*texts))
    known = np.array([ord(c) for c in alphabet], np.uint32)
    rows: dict[str, list] = {"x_train": [], "y_train": [], "g_train": [], "x_test": [], "y_test": [], "g_test": []}
    group_names: list[str] = []
    for user, text in zip(users, texts, strict=True):
        ids = np.searchsorted(known, np.frombuffer(text.encode("utf-32-le"), np.uint32))
        cut = len(ids) - int(len(ids) * part)
        if cut <= window:
            continue
        for half, piece in (("train", ids[:cut]), ("test", ids[cut:])):
            if len(piece) <= window:
                continue
            starts = np.arange(0, len(piece) - window, stride)
            rows[f"x_{half}"].append(np.lib.stride_tricks.sliding_window_view(piece, window)[starts].astype(np.float32))
            rows[f"y_{half}"].append(piece[starts + window])
            rows[f"g_{half}"].append(np.full(len(starts), len(group_names)))
        group_names.append(str(user["id"]))
    if not group_names:
        raise DataError(f"window={window} is longer than every speaker's text; choose a shorter window")

    def joined(key: str) -> np.ndarray:
        empty = np.zeros((0, window), np.float32) if key[0] == "x" else np.zeros(0, np.int64)
        return np.concatenate([empty, *rows[key]]).astype(empty.dtype)

    return Raw(
        joined("x_train"), joined("y_train"), joined("x_test"), joined("y_test"), alphabet, joined("g_train"), joined("g_test"),
        group_names, tokens=True,
    )  # fmt: skip
