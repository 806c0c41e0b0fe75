"""Labels: whether they are classes or numbers, and classes as numbers from 0."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from foedus.base.steps import labels_of
from foedus.data.formats.frames import as_text
from foedus.data.formats.raw import Raw
from foedus.errors import DataError

_FEW = 20  # a column of a table with more distinct integers may hold amounts


def task_of(
    y: np.ndarray, task: Literal["classification", "regression"] | None, name: str, table: bool
) -> Literal["classification", "regression"]:
    """Whether labels are classes or numbers; doubtful cases cause a warning or an error.

    Args:
        y: The labels.
        task: The user's choice, or `None`.
        name: The name of the set, for errors.
        table: Whether they are a column of a table, in which many distinct integers may be amounts.
    """
    if y.dtype.kind not in "iubfUS":
        raise DataError(f"labels of {name!r} have dtype {y.dtype}; expected numbers or text")
    if task is not None:
        return task
    if one_hot(y):
        raise DataError(
            f"labels of {name!r} have {y.shape[1]} columns, of which one is 1 in each row: if "
            "these are classes, give y.argmax(1); if they are numbers to predict, task='regression'"
        )
    if y.dtype.kind == "f" and y.ndim == 1 and set(np.unique(y).tolist()) == {0.0, 1.0}:
        warnings.warn(
            f"labels of {name!r} are 0.0 and 1.0: they are treated as two classes; "
            "task='regression' predicts them as numbers",
            stacklevel=3,
        )
        return "classification"
    if table and y.dtype.kind in "iu" and (count := len(np.unique(y))) > _FEW:
        raise DataError(
            f"labels of {name!r} are {count} different integers: pass task='regression' if they "
            "are amounts, task='classification' if they are classes"
        )
    if y.ndim == 2 and y.dtype.kind in "iu":
        raise DataError(
            f"labels of {name!r} are integers, {y.shape[1]} a row: pass task='classification' if "
            "they are classes, one for each step of a sequence, task='regression' if they are "
            "numbers to predict"
        )
    return "regression" if y.dtype.kind == "f" or y.ndim > 1 else "classification"


def one_hot(y: np.ndarray) -> bool:
    """Whether each row has a single 1 among zeros, in several columns of numbers."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y) or y.dtype.kind not in "fiub":
        return False
    return bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())


def refuse_one_hot(y: np.ndarray, what: str, name: str) -> None:
    """Raise `DataError` for one-hot rows of integers, which look like labels of steps of sequences.

    It is called for whole sets: in few rows, such as those of one client, it may be chance.
    """
    if y.dtype.kind in "iub" and one_hot(y):
        raise DataError(
            f"{what} of {name!r} has shape {y.shape}; give one label a row, shape [n] (argmax of "
            "one-hot rows)"
        )


def step_classes(parts: list[np.ndarray], name: str) -> int:
    """The number of classes of integer labels (n, t) of the steps of sequences."""
    if any(y.dtype.kind not in "iu" for y in parts):
        raise DataError(
            f"labels of {name!r} have shape {parts[0].shape} and dtype {parts[0].dtype}; labels of "
            "the steps of a sequence, (n, t), must be integers; for one label a row give shape (n,)"
        )
    refuse_one_hot(parts[0], "labels", name)
    return max(2, *(int(labels_of(y).max(initial=0)) + 1 for y in parts))


def encode_labels(
    raw: Raw, regression: bool, name: str
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Labels as 0 .. classes - 1 (targets unchanged), and what `Data` records of the classes."""
    if raw.y_train.ndim == 2 and not regression and raw.y_test is not None:
        names, count = raw.class_names, None if raw.class_names is None else len(raw.class_names)
        about: dict[str, Any] = {"classes": count or step_classes([raw.y_train, raw.y_test], name)}
        about |= {} if names is None else {"class_names": tuple(str(n) for n in names)}
        return raw.y_train, raw.y_test, about
    parts, cut = [_decoded(y, name) for y in (raw.y_train, raw.y_test)], len(raw.y_train)
    if len({y.dtype.kind == "U" for y in parts if y.size}) > 1:  # 1.0 and "1" are one class
        parts = [np.array([as_text(v) for v in y], str) for y in parts]
    y = np.concatenate([y for y in parts if y.size] or parts)
    if regression:
        if y.dtype.kind == "U":
            try:
                y = y.astype(np.float64)
            except ValueError:
                raise DataError(
                    f"labels of {name!r} are text ({str(y[0])!r}); regression needs numbers"
                ) from None
        return y[:cut].astype(np.float32), y[cut:].astype(np.float32), {"classes": None}
    if y.ndim > 1:
        needed = "classification needs one label a row, or integers (n, t) for the steps"
        raise DataError(f"labels of {name!r} have shape {y.shape[1:]} a row; {needed}")
    if raw.class_names is not None and y.dtype.kind in "iub":
        names, y = tuple(str(n) for n in raw.class_names), y.astype(np.int64)
        return y[:cut], y[cut:], {"classes": len(names), "class_names": names}
    codes, about = numbered(y, name)
    if raw.feature_names is not None and len(y) and (y == y[0]).all():
        warnings.warn(
            f"labels of {name!r} are all {as_text(y[0])}: there is only one class; is "
            "label= the right column? (for numbers, task='regression')",
            stacklevel=4,
        )
    return codes[:cut], codes[cut:], about


def _decoded(y: np.ndarray | None, name: str) -> np.ndarray:
    assert y is not None  # held out before
    if y.dtype.kind != "S":
        return y
    try:
        return np.char.decode(y, "utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"labels of {name!r} are bytes that are not UTF-8 text; give texts"
        ) from None


def numbered(y: np.ndarray, name: str) -> tuple[np.ndarray, dict[str, Any]]:
    """Labels as 0 .. classes - 1, with their original values unless these are such numbers."""
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataError(f"labels of {name!r} hold NaN or infinity; remove those rows")
    values, codes = np.unique(y, return_inverse=True)
    if y.dtype.kind in "iu" and values[0] == 0 and values[-1] < 2 * len(values) + 10:
        return y.astype(np.int64), {"classes": max(2, int(values[-1]) + 1)}
    if y.dtype.kind in "iu" and len(values) == 1 and values[0] > 0:  # may be one of several
        return y.astype(np.int64), {"classes": int(values[0]) + 1}
    names = tuple(f"{v:g}" if y.dtype.kind == "f" else str(v) for v in values.tolist())
    if len(names) == 1:
        raise DataError(
            f"labels of {name!r} are all {names[0]!r}; at least two classes are needed (for "
            "numbers, task='regression')"
        )
    about = {"classes": len(names), "class_names": names, "class_values": tuple(values.tolist())}
    return codes.astype(np.int64), about
