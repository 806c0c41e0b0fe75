"""Training and test parts: join those of a file, or hold out test rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foedus.data.formats.frames import as_text
from foedus.data.formats.raw import Raw
from foedus.data.grouped import held_out_groups
from foedus.errors import DataError

HELD_OUT = 0.25  # fraction of the rows that is held out from a set without a test part


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
    if train.together is not None and test.together is not None:
        both = np.intersect1d(train.together, test.together)
        if len(both):
            raise DataError(
                f"{where}: {str(both[0])!r} (group_holdout) has rows in both parts, and so have "
                f"{len(both) - 1} others; leave them out of one"
            )
    groups, owners = test.groups_train, train.group_names
    if groups is not None and owners is not None:
        place = {name: g for g, name in enumerate(owners)}
        assert test.group_names is not None
        called = (test.group_names[g] for g in groups)
        groups = np.array([place.setdefault(name, len(place)) for name in called], np.int64)
        owners = list(place)
    joined = replace(train, x_train=x, x_test=x_test, y_test=test.y_train)
    weights = test.weights_train
    return replace(joined, groups_test=groups, group_names=owners, weights_test=weights)


def _aligned(train: Raw, test: Raw, where: object) -> Raw:
    """A test table in the column order and category codes of the training table."""
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
        if name in theirs and name not in ours:
            raise DataError(
                f"{where}: column {name!r} holds text, in the training rows numbers; give both the "
                "same"
            )
        if name in ours:  # categories without training rows are treated as unknown
            codes, given = x[:, place], theirs.get(name)
            if given is None:  # all texts are numbers, or all values are missing
                values, places = np.unique(codes, return_inverse=True)
                given = tuple(as_text(v) for v in values[~np.isnan(values)])
                codes = np.where(places < len(given), places, np.nan)
            known = list(ours[name])
            ours[name] = (*known, *(k for k in given if k not in known))
            new = np.array([ours[name].index(k) for k in given] or [0], np.float64)
            x[:, place] = np.where(np.isnan(codes), codes, new[np.nan_to_num(codes).astype(int)])
    return replace(test, x_train=x, feature_names=columns, categories=ours)


def pool_parts(raw: Raw) -> Raw:
    """Training and test rows together, if the test part is to be drawn anew."""
    if raw.x_test is None:
        return raw
    groups = raw.groups_train
    if groups is not None:
        groups = None if raw.groups_test is None else np.concatenate([groups, raw.groups_test])
    x, y = np.concatenate([raw.x_train, raw.x_test]), np.concatenate([raw.y_train, raw.y_test])
    weights = raw.weights_train
    if weights is not None and raw.weights_test is not None:
        weights = np.concatenate([weights, raw.weights_test])
    return replace(
        raw, x_train=x, y_train=y, x_test=None, y_test=None, groups_train=groups, groups_test=None,
        weights_train=weights, weights_test=None,
    )  # fmt: skip


def test_fraction(test: object) -> float:
    """The fraction of each speaker's text that is held out; `DataError` for anything else."""
    if not isinstance(test, (int, float)):
        raise DataError(
            f"test={test!r} must be a fraction of at least 0 and below 1 of each speaker's text"
        )
    return float(test)


def hold_out(raw: Raw, part: float, seed: int, regression: bool) -> Raw:
    """Move a random fraction of the rows of each group, or of each label, to the test part.

    Rows that belong together move together.
    """
    n, y = len(raw.y_train), raw.y_train
    if raw.groups_train is not None:
        strata = raw.groups_train
    elif regression or y.ndim > 1:
        strata = np.zeros(n, np.int64)
    else:
        strata = np.unique(raw.y_train, return_inverse=True)[1]
    if raw.together is not None and part:
        held = held_out_groups(raw.together, part, seed, strata)
    else:
        held = _drawn(strata, part, np.random.default_rng(seed))
    groups, weights = raw.groups_train, raw.weights_train
    return replace(
        raw, x_train=raw.x_train[~held], y_train=raw.y_train[~held], x_test=raw.x_train[held],
        y_test=raw.y_train[held], groups_train=None if groups is None else groups[~held],
        groups_test=None if groups is None else groups[held],
        weights_train=None if weights is None else weights[~held],
        weights_test=None if weights is None else weights[held],
    )  # fmt: skip


def _drawn(strata: np.ndarray, part: float, rng: np.random.Generator) -> np.ndarray:
    """Which rows are held out: a fraction of each stratum, so that at least one row is left."""
    n = len(strata)
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
    return held
