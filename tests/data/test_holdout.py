"""Training and test parts by hand: two files joined, rows held out, labels numbered."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import foedus as fd
from foedus.data import holdout
from foedus.data.formats.raw import Raw


def rows(*values: float) -> np.ndarray:
    return np.array([[v] for v in values])


# -- a file of test rows ---------------------------------------------------------------------------


def test_sparse_text_that_lacks_the_last_features_is_widened():
    train, test = Raw(np.ones((2, 3)), np.zeros(2)), Raw(np.ones((1, 2)), np.ones(1))
    joined = holdout.join_parts(train, test, "t.libsvm")
    assert joined.x_test.tolist() == [[1, 1, 0]] and joined.y_test.tolist() == [1]
    joined = holdout.join_parts(test, train, "t.libsvm")
    assert joined.x_train.tolist() == [[1, 1, 0]] and joined.x_test.shape == (2, 3)


@pytest.mark.parametrize(
    ("train", "test", "why"),
    [
        (
            Raw(np.ones((2, 2)), np.zeros(2), feature_names=["a", "b"]),
            Raw(np.ones((2, 1)), np.zeros(2), feature_names=["a"]),
            "t.csv: there is no column 'b', which the training rows have; give both",
        ),
        (
            Raw(np.ones((2, 3)), np.zeros(2), tokens=True),
            Raw(np.ones((2, 4)), np.zeros(2), tokens=True),
            "t.csv: 4 features, the training file has 3; give both the same columns",
        ),
        (
            Raw(np.ones((2, 1)), np.zeros(2), feature_names=["a"]),
            Raw(np.ones((2, 1)), np.zeros(2), feature_names=["a"], categories={"a": ("x", "y")}),
            "t.csv: column 'a' holds text, in the training rows numbers; give both the same",
        ),
        (
            Raw(np.ones((2, 2)), np.zeros(2), feature_names=["a", "b"]),
            Raw(np.ones((2, 2)), np.zeros(2)),
            "t.csv: there is no column 'a', 'b', which the training rows have",
        ),
        (
            Raw(np.ones((2, 3)), np.zeros(2), tokens=True, class_names=["a", "b"]),
            Raw(np.ones((2, 3)), np.zeros(2), tokens=True, class_names=["a", "c"]),
            "t.csv: its alphabet differs from that of the training file; give one folder with "
            "train/ and test/",
        ),
    ],
    ids=["fewer columns", "longer windows", "another kind", "no names", "another alphabet"],
)
def test_files_that_do_not_fit_together(train, test, why):
    with pytest.raises(fd.DataError) as info:
        holdout.join_parts(train, test, "t.csv")
    assert str(info.value).startswith(why)


def test_columns_and_categories_of_the_test_file_are_found_by_name():
    """Each file has numbered its texts by itself; a new one comes behind the known."""
    train = Raw(
        np.array([[1.0, 0], [2, 1]]), np.zeros(2), feature_names=["a", "c"],
        categories={"c": ("blue", "red")},
    )  # fmt: skip
    test = Raw(
        np.array([[0.0, 9, 3], [1, 9, 4], [np.nan, 9, 5]]), np.zeros(3),
        feature_names=["c", "more", "a"], categories={"c": ("green", "red")},
    )  # fmt: skip
    joined = holdout.join_parts(train, test, "t.csv")
    np.testing.assert_array_equal(joined.x_test, [[3, 2], [4, 1], [5, np.nan]])
    assert joined.categories == {"c": ("blue", "red", "green")}


def test_groups_of_the_test_file_are_found_by_name():
    """Each file has numbered its groups by itself; a new one comes behind those of the training
    file.
    """
    train = Raw(rows(1, 2), np.zeros(2), groups_train=np.array([0, 1]), group_names=["ann", "bob"])
    test = Raw(
        rows(3, 4, 5), np.ones(3), groups_train=np.array([0, 1, 1]), group_names=["cy", "ann"]
    )
    joined = holdout.join_parts(train, test, "t.csv")
    assert joined.group_names == ["ann", "bob", "cy"]
    assert joined.groups_train.tolist() == [0, 1]
    assert joined.groups_test.tolist() == [2, 0, 0]


def test_groups_of_one_file_alone_are_kept():
    train = Raw(rows(1, 2), np.zeros(2), groups_train=np.array([0, 1]), group_names=["ann", "bob"])
    joined = holdout.join_parts(train, Raw(rows(3), np.ones(1)), "t.csv")
    assert joined.groups_test is None and joined.group_names == ["ann", "bob"]


# -- a part of the rows ----------------------------------------------------------------------------


def test_both_parts_are_pooled_where_another_is_drawn():
    raw = Raw(
        rows(1, 2), np.array([0, 1]), rows(3), np.array([1]),
        groups_train=np.array([0, 1]), groups_test=np.array([1]),
    )  # fmt: skip
    pooled = holdout.pool_parts(raw)
    assert pooled.x_train.tolist() == [[1], [2], [3]] and pooled.y_train.tolist() == [0, 1, 1]
    assert pooled.groups_train.tolist() == [0, 1, 1]
    assert pooled.x_test is pooled.y_test is pooled.groups_test is None
    raw.groups_test = None  # whose the test rows are is not known, so nobody's are
    assert holdout.pool_parts(raw).groups_train is None
    assert holdout.pool_parts(pooled) is pooled


def test_a_part_of_each_group_is_held_out():
    groups = np.array([0] * 4 + [1] * 8)
    raw = Raw(np.arange(12.0)[:, None], np.zeros(12), groups_train=groups)
    held = holdout.hold_out(raw, 0.25, 0, False)
    # a quarter of four and of eight
    assert np.bincount(held.groups_test).tolist() == [1, 2]
    assert np.bincount(held.groups_train).tolist() == [3, 6]
    assert sorted([*held.x_train[:, 0], *held.x_test[:, 0]]) == list(range(12))


def test_one_row_is_left_to_learn_from():
    """Half of a group of one is rounded up; of all three rows, one stays."""
    raw = Raw(rows(1, 2, 3), np.array([0, 1, 2]))
    held = holdout.hold_out(raw, 0.5, 0, False)
    assert (len(held.x_train), len(held.x_test)) == (1, 2)


@pytest.mark.parametrize("test", ["half", None, [0.5]])
def test_a_fraction_that_is_not_a_number_is_refused(test):
    with pytest.raises(fd.DataError) as info:
        holdout.test_fraction(test)
    assert str(info.value) == (
        f"test={test!r} must be a fraction of at least 0 and below 1 of each speaker's text"
    )
    assert holdout.test_fraction(0) == 0.0


def test_rows_that_belong_together_stay_together(tmp_path):
    """Patients of one to four rows each; the column is no feature."""
    rng = np.random.default_rng(0)
    patient = np.repeat(np.arange(100), rng.integers(1, 5, 100))
    frame = pd.DataFrame({"a": rng.normal(size=len(patient)), "who": [f"p{p}" for p in patient]})
    frame["y"] = patient % 2
    for source in (frame, tmp_path / "rows.csv"):
        frame.to_csv(tmp_path / "rows.csv", index=False)
        data = fd.load(source, group_holdout="who", scale=None, test=0.3)
        assert data.preprocess.names == ("a",)
        whose = dict(zip(np.float32(frame.a), frame.who, strict=True))
        train, test = ({whose[v] for v in x[:, 0]} for x in (data.x_train, data.x_test))
        assert not train & test and len(train | test) == 100
        assert len(data.x_test) / len(frame) == pytest.approx(0.3, abs=0.03)
    assert len(fd.load(frame, group_holdout="who", test=0).x_test) == 0
    with pytest.raises(fd.DataError, match="group_holdout 'whom' is unknown; did you mean 'who'"):
        fd.load(frame, group_holdout="whom")
    with pytest.raises(fd.DataError, match="group_holdout needs at least two groups"):
        fd.load(frame.assign(who="one"), group_holdout="who")
