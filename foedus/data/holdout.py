"""Training and test parts: join what a file has, hold out test rows, number the labels."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from foedus.data.formats.raw import Raw
from foedus.errors import DataError

_FEW = 20  # different integers of a table that are taken for classes
HELD_OUT = 0.25  # part of the rows that become the test part of a set without one


def image_shaped(raw: Raw) -> Raw:
    """Images [n, height, width, channels] as [n, channels, height, width], as torch has them."""

    def channels_first(x: np.ndarray) -> np.ndarray:
        if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            return x.transpose(0, 3, 1, 2)
        return x

    test = None if raw.x_test is None else channels_first(raw.x_test)
    return replace(raw, x_train=channels_first(raw.x_train), x_test=test)


def join_parts(train: Raw, test: Raw, where: object) -> Raw:
    """The training rows of one file and, as test part, those of another."""
    test = _aligned(train, test, where)
    x, x_test = train.x_train, test.x_train
    if x.ndim == x_test.ndim == 2 and x.shape[1] != x_test.shape[1]:
        if train.tokens:
            raise DataError(
                f"{where}: {x_test.shape[1]} features, the training file has {x.shape[1]}; give "
                "both the same columns"
            )
        # sparse text does not write zeros, so a file may lack the last features
        width = max(x.shape[1], x_test.shape[1])
        x, x_test = (np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in (x, x_test))
    if train.tokens and list(train.class_names or ()) != list(test.class_names or ()):
        raise DataError(
            f"{where}: its alphabet differs from that of the training file; give one folder with "
            "train/ and test/"
        )
    groups, owners = test.groups_train, train.group_names
    if groups is not None and owners is not None:
        place = {name: g for g, name in enumerate(owners)}
        assert test.group_names is not None
        called = (test.group_names[g] for g in groups)
        groups = np.array([place.setdefault(name, len(place)) for name in called], np.int64)
        owners = list(place)
    joined = replace(train, x_train=x, x_test=x_test, y_test=test.y_train)
    return replace(joined, groups_test=groups, group_names=owners)


def _aligned(train: Raw, test: Raw, where: object) -> Raw:
    """The columns of another table in the order of this one, its categories by the same codes."""
    if train.feature_names is None:
        return test
    columns, found = list(train.feature_names), list(test.feature_names or [])
    if lacking := [c for c in columns if c not in found]:
        raise DataError(
            f"{where}: there is no column {', '.join(map(repr, lacking[:10]))}, which the training "
            "rows have; give both the same columns"
        )
    x = test.x_train[:, [found.index(c) for c in columns]].astype(np.float64)
    ours, theirs = train.categories or {}, test.categories or {}
    for place, name in enumerate(columns):
        if (name in ours) != (name in theirs):
            kinds = ["text" if name in side else "numbers" for side in (ours, theirs)]
            raise DataError(
                f"{where}: column {name!r} holds {kinds[1]}, in the training rows {kinds[0]}; give "
                "both the same"
            )
        if name in ours:  # those that are not known count as unseen
            known = list(ours[name])
            ours[name] = (*known, *(k for k in theirs[name] if k not in known))
            new = np.array([ours[name].index(k) for k in theirs[name]] or [0.0])
            codes = x[:, place]
            x[:, place] = np.where(np.isnan(codes), codes, new[np.nan_to_num(codes).astype(int)])
    return replace(test, x_train=x, feature_names=columns, categories=ours)


def pool_parts(raw: Raw) -> Raw:
    """Training and test rows together, where the test part is to be drawn anew."""
    if raw.x_test is None:
        return raw
    groups = raw.groups_train
    if groups is not None:
        groups = None if raw.groups_test is None else np.concatenate([groups, raw.groups_test])
    x, y = np.concatenate([raw.x_train, raw.x_test]), np.concatenate([raw.y_train, raw.y_test])
    return replace(
        raw, x_train=x, y_train=y, x_test=None, y_test=None, groups_train=groups, groups_test=None
    )


def test_fraction(test: object) -> float:
    if not isinstance(test, (int, float)):
        raise DataError(f"test={test!r} must be a part from 0 to below 1 of each speaker's text")
    return float(test)


def hold_out(raw: Raw, part: float, seed: int, regression: bool) -> Raw:
    """Move a random part of the rows of each group, or of each label, to the test part."""
    n, y = len(raw.y_train), raw.y_train
    rng = np.random.default_rng(seed)
    if raw.groups_train is not None:
        strata = raw.groups_train
    elif regression or y.ndim > 1:
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
        raw, x_train=raw.x_train[~held], y_train=raw.y_train[~held], x_test=raw.x_train[held],
        y_test=raw.y_train[held], groups_train=None if groups is None else groups[~held],
        groups_test=None if groups is None else groups[held],
    )  # fmt: skip


def task_of(
    y: np.ndarray, task: Literal["classification", "regression"] | None, name: str, table: bool
) -> Literal["classification", "regression"]:
    """What is to be learnt from such labels, where nobody has said it; doubtful cases are told.

    table: whether they are a column of a table, where many different integers may be amounts.
    """
    if y.dtype.kind not in "iubfUS":
        raise DataError(f"labels of {name!r} have dtype {y.dtype}; expected numbers or text")
    if task is not None:
        return task
    ones = y.ndim == 2 and y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all())
    if ones and bool((y.sum(1) == 1).all()):
        raise DataError(
            f"labels of {name!r} have {y.shape[1]} columns, of which one is 1 in each row: if "
            "these are classes, give y.argmax(1); if they are numbers to predict, task='regression'"
        )
    if y.dtype.kind == "f" and y.ndim == 1 and set(np.unique(y).tolist()) == {0.0, 1.0}:
        warnings.warn(
            f"labels of {name!r} are 0.0 and 1.0: they are taken for two classes; "
            "task='regression' predicts them as numbers",
            stacklevel=3,
        )
        return "classification"
    if table and y.dtype.kind in "iu" and (count := len(np.unique(y))) > _FEW:
        raise DataError(
            f"labels of {name!r} are {count} different integers: pass task='regression' if they "
            "are amounts, task='classification' if they are classes"
        )
    return "regression" if y.dtype.kind == "f" or y.ndim > 1 else "classification"


def encode_labels(
    raw: Raw, regression: bool, name: str
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Labels as 0 .. classes - 1 (targets stay), and `classes`, `class_names`, `class_values`."""
    y, cut = np.concatenate([raw.y_train, raw.y_test]), len(raw.y_train)
    if regression:
        if y.dtype.kind in "US":
            raise DataError(
                f"labels of {name!r} are text ({str(y[0])!r}); regression needs numbers"
            )
        return y[:cut].astype(np.float32), y[cut:].astype(np.float32), {"classes": None}
    if y.ndim > 1:
        needed = "classification needs one label a row"
        raise DataError(f"labels of {name!r} have shape {y.shape[1:]} a row; {needed}")
    if raw.class_names is not None and y.dtype.kind in "iub":
        names, y = tuple(str(n) for n in raw.class_names), y.astype(np.int64)
        return y[:cut], y[cut:], {"classes": len(names), "class_names": names}
    codes, about = numbered(y, name)
    return codes[:cut], codes[cut:], about


def numbered(y: np.ndarray, name: str) -> tuple[np.ndarray, dict[str, Any]]:
    """Labels as 0 .. classes - 1, and what they were unless they are such numbers already."""
    values, codes = np.unique(y, return_inverse=True)
    if y.dtype.kind in "iu" and values[0] == 0 and values[-1] < 2 * len(values) + 10:
        return y.astype(np.int64), {"classes": max(2, int(values[-1]) + 1)}
    names = tuple(f"{v:g}" if y.dtype.kind == "f" else str(v) for v in values.tolist())
    if len(names) == 1:
        raise DataError(
            f"labels of {name!r} are all {names[0]!r}; at least two classes are needed (for "
            "numbers, task='regression')"
        )
    about = {"classes": len(names), "class_names": names, "class_values": tuple(values.tolist())}
    return codes.astype(np.int64), about
