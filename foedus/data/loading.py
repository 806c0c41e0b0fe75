"""Load a data set by name, from a file or a DataFrame: hold out rows, fill in, encode, scale.

A named set is looked for as `NAME.npz` (the text of shakespeare as JSON) in `$FOEDUS_DATA`, then in
the user's cache; absent there, it is downloaded from its canonical home, checked, parsed and
written to the cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt

from foedus.base.settings import check_value
from foedus.data import formats
from foedus.data.catalog import BUNDLED, absent, known_names, path_of
from foedus.data.dataset import Data
from foedus.data.download import SPEECHES
from foedus.data.formats.frames import is_frame, table
from foedus.data.formats.raw import Raw
from foedus.data.holdout import (
    HELD_OUT,
    hold_out,
    image_shaped,
    join_parts,
    pool_parts,
    test_fraction,
)
from foedus.data.labels import encode_labels, task_of
from foedus.data.preprocess import ENCODINGS, IMPUTES, SCALES
from foedus.data.preprocess import fit as fitted
from foedus.data.unprepared import Recipe, unprepared
from foedus.errors import DataError, unknown

if TYPE_CHECKING:
    from pandas import DataFrame
else:
    DataFrame = Any  # type hints are resolved without importing pandas

Task = Literal["classification", "regression"]


def load(
    source: str | os.PathLike | DataFrame,
    *,
    scale: str | None = "auto",
    impute: str | None = None,
    encode: str = "onehot",
    clip: float | None = None,
    label: str | int | None = None,
    group: str | None = None,
    group_holdout: str | None = None,
    weight: str | None = None,
    drop: Sequence[str] = (),
    test: float | str | os.PathLike | DataFrame | None = None,
    seed: int = 0,
    task: Task | None = None,
    format: str | None = None,
    name: str | None = None,
    fit: bool = True,
    window: int = 80,
    stride: int = 80,
    sequence: bool = False,
) -> Data:
    """Load a data set by name, from a file or folder, or from a DataFrame.

    `foedus data list` shows the names. Files may be LIBSVM text (plain, .bz2, .xz), IDX (.gz),
    CIFAR's binary version, npz, CSV, Parquet or LEAF JSON (`foedus.data.formats`). Text columns of
    a table are categories. Labels become 0 .. classes - 1; their original values are kept in
    `class_values`, and `run.model.predict` returns those. The fitted preprocessing
    (`data.preprocess`) is part of the data, the run and the model.

    Args:
        source: The name of a data set, the path of a file or folder, or a DataFrame.
        scale: "auto" divides images (integers 0 .. 255 in at least 256 features, or in image shape)
            by 255, leaves features alone that lie in [-1, 1] and reach half of it, and standardizes
            others; "standard" (mean 0, variance 1), "minmax" ([0, 1]), "robust" (median and
            interquartile range), "unit" (/ 255) or `None`. Fitted on training rows only; constant
            features are only shifted, and categories are not scaled.
        impute: What replaces a missing number: "median" or "mean" of the training rows, or "zero".
            A missing category is a category of its own.
        encode: How categories become numbers: one column of 0 and 1 per category ("onehot"), or the
            index of the category ("ordinal").
        clip: The largest absolute value of a scaled number.
        label: The column of a table to predict; or "coarse" for the twenty superclasses of
            CIFAR-100.
        group: The column of a table that says which client a row belongs to, for the natural split.
        group_holdout: The column of rows that belong together (of one patient, for example): either
            all of them are held out, or none. It is not used as a feature.
        weight: The column of row weights, not negative: the objective is sum_i w_i loss_i / sum_i
            w_i, and evaluation is weighted likewise. It is not used as a feature, and neither
            scaling nor imputation depends on it.
        drop: Columns of a table to leave out.
        test: A file or DataFrame of test rows, or the fraction of all rows to hold out (stratified
            by group or label). By default the set's own test part or, without one, a quarter of the
            rows; 0 holds out nothing.
        seed: The seed of the rows that are held out.
        task: "classification" or "regression"; by default text, booleans, integers and 0.0 / 1.0
            are classes and other numbers are not. Must be given for a column of more than twenty
            distinct integers.
        format: The format of the file, if its name does not show it.
        name: The name of the set; by default the name of the file, or "table".
        fit: `False` leaves the rows of a table raw; `fd.prepare` then fits the preprocessing among
            the clients, by exchanges that are counted and can be secure.
        window: For shakespeare, characters per row. Features are character ids, the label is the
            next character, and the group is the speaker; the last fifth (or `test`) of each
            speaker's text is the test part. Speakers with too little text for one training row are
            left out.
        stride: For shakespeare, characters between the beginnings of rows.
        sequence: For shakespeare, a label at each of the `window` characters, the one after it.

    Returns:
        The data set.

    Raises:
        DataError: The set is unknown, or the file or table cannot be used; the message says why.

    Example:
        >>> fd.load("digits").classes
        10
        >>> frame = pd.DataFrame({"age": [30, 41, 52], "sex": ["f", "m", "f"], "ill": [0, 1, 0]})
        >>> fd.load(frame, label="ill", test=0).preprocess.feature_names
        ('age', 'sex=f', 'sex=m')
    """
    given = dict(locals())
    if not is_frame(source) and not isinstance(source, str | os.PathLike):
        raise DataError(
            f"source is a {type(source).__name__}; give the name of a data set, a file or a "
            "DataFrame; arrays are fd.Data.from_arrays(x, y)"
        )
    for key, value, allowed in (
        ("scale", scale, [*SCALES, None]),
        ("impute", impute, [*IMPUTES, None]),
        ("encode", encode, [*ENCODINGS]),
        ("task", task, ["classification", "regression", None]),
    ):
        if value not in allowed:
            raise DataError(unknown(key, value, allowed))
    if clip is not None:
        check_value("clip", clip, Annotated[float, Gt(0)], DataError)
    check_value("seed", seed, Annotated[int, Ge(0)], DataError)
    test = float(test) if isinstance(test, Real) else test
    if isinstance(test, (int, float)) and not 0 <= test < 1:
        raise DataError(
            f"test={test!r} must be a fraction of at least 0 and below 1, or a file with test rows"
        )

    def read(source: str | os.PathLike | DataFrame, what: str, texts: Collection[str] = ()) -> Raw:
        if is_frame(source):
            return table(
                source, what, label, group, drop, group_holdout, weight=weight, texts=texts
            )
        found = formats.read(
            Path(source), format=format, label=label, group=group, drop=drop,
            together=group_holdout, weight=weight, texts=texts,
        )  # fmt: skip
        return image_shaped(found)

    if is_frame(source):
        raw, called = read(source, "the table"), "table"
    else:
        called, path = str(source), path_of(source)
        if weight is not None and (path is None or path.name == SPEECHES):
            raise DataError(f"weight={weight!r} names a column of a table, which {called!r} is not")
        if called == "shakespeare" and path is not None and path.name == SPEECHES:
            part = 0.2 if test is None else test_fraction(test)
            raw, test = _speech_windows(load_speeches(path), window, stride, part, sequence), None
            task = task or "classification"
        elif path is None:
            raw = image_shaped(BUNDLED[called]())
        else:
            raw = read(path, called)
            called = path.name.split(".")[0] if called not in known_names() else called
    called = called if name is None else name
    if test is not None and not isinstance(test, (int, float)):
        where = "test" if is_frame(test) else str(test)
        raw = join_parts(raw, read(test, where, raw.categories or ()), where)
    task = task_of(raw.y_train, task, called, raw.feature_names is not None)
    if isinstance(test, (int, float)) or raw.x_test is None:
        part = HELD_OUT if test is None else float(test)  # type: ignore[arg-type]
        raw = hold_out(pool_parts(raw), part, seed, task == "regression")
    found = _finish(called, raw, scale, impute, encode, clip, task, fit)
    object.__setattr__(found, "origin", _origin(**given))
    return found


def _origin(source: Any, name: str | None, test: Any, **options: Any) -> dict[str, Any] | None:
    """The arguments of `load` as the section [data] of a file, if a file can hold them."""
    if is_frame(source) or is_frame(test) or name is not None:
        return None
    key = "name" if isinstance(source, str) and source in known_names() else "path"
    test = _shown(test) if isinstance(test, str | os.PathLike) else test
    defaults = load.__kwdefaults__ or {}
    chosen = {k: v for k, v in {"test": test, **options}.items() if v != defaults[k]}
    return {key: str(source) if key == "name" else _shown(source), **chosen}


def _shown(path: str | os.PathLike) -> str:
    """A path as it may stand in a page: relative to this folder, or else the file's name alone."""
    here, there = Path.cwd(), Path(path).absolute()
    return str(there.relative_to(here)) if there.is_relative_to(here) else there.name


def load_speeches(path: str | os.PathLike | None = None) -> list[dict]:
    """Shakespeare's characters, as dictionaries with `id`, `play`, `speaker` and `speeches`.

    Args:
        path: A JSON file of speeches; `None`: the set "shakespeare" of `$FOEDUS_DATA` or the cache,
            downloaded if it is in neither.

    Raises:
        DataError: The file is missing or not a file of speeches.

    Example:
        >>> import json, pathlib, tempfile
        >>> hamlet = {"id": "HAMLET", "play": "HAMLET", "speaker": "HAM", "speeches": ["Words."]}
        >>> path = pathlib.Path(tempfile.mkdtemp(), "plays.json")
        >>> written = path.write_text(json.dumps({"users": [hamlet]}))
        >>> fd.load_speeches(path)[0]["speeches"]
        ['Words.']
    """
    path = path_of("shakespeare" if path is None else Path(path))
    if path is None or not path.is_file():
        raise DataError(absent("shakespeare", "its speeches are not on this machine"))
    try:
        users = json.loads(formats.read_bytes(path))["users"]
        texts = all(isinstance(s, str) for user in users for s in user["speeches"])
        if not users or not texts or not all("id" in user for user in users):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(
            f"{path}: not a JSON file of speeches ({error}); expected users with 'id' and a list "
            "'speeches'"
        ) from None
    return users


def _finish(
    name: str, raw: Raw, scale: str | None, impute: str | None, encode: str, clip: float | None,
    task: Task, fit: bool,
) -> Data:  # fmt: skip
    y_train, y_test, values = encode_labels(raw, task == "regression", name)
    assert raw.x_test is not None  # held out before
    for part, x in (("x_train", raw.x_train), ("x_test", raw.x_test)):
        if x.dtype.kind not in "fiub":
            raise DataError(f"{part} of {name!r} has dtype {x.dtype}; expected numbers")
    if raw.x_train.size == 0:
        raise DataError(f"x_train of {name!r} has no rows or no features")
    if raw.x_train.shape[1:] != raw.x_test.shape[1:]:
        raise DataError(
            f"x_test of {name!r} has rows of shape {raw.x_test.shape[1:]}, x_train of shape "
            f"{raw.x_train.shape[1:]}"
        )
    if raw.tokens and scale not in (None, "auto"):
        raise DataError(
            f"scale={scale!r}: the features of {name!r} are character ids, which are not scaled; "
            "leave scale out"
        )
    about: dict[str, Any] = {}
    if fit:
        made, x_train, x_test = fitted(raw, scale, impute, name, encode, clip)
        about = {"scaling": made.scaling, "preprocess": made}
    else:
        x_train, x_test = raw.x_train, raw.x_test
        about["raw"] = unprepared(raw, Recipe(scale, impute, encode, clip), name)  # type: ignore[arg-type]
    return Data(
        name, x_train, y_train, x_test, y_test, **values, groups_train=raw.groups_train,
        groups_test=raw.groups_test,
        group_names=None if raw.group_names is None else tuple(str(n) for n in raw.group_names),
        label=raw.label, weights_train=raw.weights_train, weights_test=raw.weights_test, **about,
    )  # fmt: skip


def _speech_windows(
    users: list[dict], window: int, stride: int, part: float, sequence: bool
) -> Raw:
    """Rows of `window` characters and the next one, or the next one of each; the last part of each
    text is for testing.
    """
    check_value("sequence", sequence, bool, DataError)
    for name, value in (("window", window), ("stride", stride)):
        check_value(name, value, Annotated[int, Ge(1)], DataError)
    texts = ["\n".join(user["speeches"]) for user in users]
    alphabet = sorted(set().union(*texts))
    known = np.array([ord(c) for c in alphabet], np.uint32)
    rows: dict[str, list] = {f"{k}_{part}": [] for k in "xyg" for part in ("train", "test")}
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
            windows = np.lib.stride_tricks.sliding_window_view(piece, window)
            rows[f"x_{half}"].append(windows[starts].astype(np.int32))
            labels = windows[starts + 1] if sequence else piece[starts + window]
            rows[f"y_{half}"].append(labels)
            rows[f"g_{half}"].append(np.full(len(starts), len(group_names)))
        group_names.append(str(user["id"]))
    if not group_names:
        raise DataError(
            f"window={window} is longer than every speaker's text; choose a shorter window"
        )

    def joined(key: str) -> np.ndarray:
        wide = key[0] == "x" or (sequence and key[0] == "y")
        kind = np.int32 if key[0] == "x" else np.int64
        empty = np.zeros((0, window) if wide else 0, kind)
        return np.concatenate([empty, *rows[key]]).astype(kind)

    return Raw(
        joined("x_train"), joined("y_train"), joined("x_test"), joined("y_test"), alphabet,
        joined("g_train"), joined("g_test"), group_names, tokens=True,
    )  # fmt: skip
