"""What labels are: classes or numbers, and which number a class has."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.data import labels
from foedus.data.formats.raw import Raw


def encoded(train: list, test: list, task: str | None = None, names: list | None = None):
    y, y_test = np.array(train), np.array(test)
    raw = Raw(np.zeros((len(y), 1)), y, np.zeros((len(y_test), 1)), y_test, class_names=names)
    regression = labels.task_of(y, task, "set", False) == "regression"
    y, y_test, about = labels.encode_labels(raw, regression, "set")
    found = [about.get(k) for k in ("classes", "class_names", "class_values")]
    return y.tolist(), y_test.tolist(), *found


def test_labels_become_numbers_from_zero():
    assert encoded([2, 0], [1]) == ([2, 0], [1], 3, None, None)
    assert encoded([7, 5], [7]) == ([1, 0], [1], 2, ("5", "7"), (5, 7))
    assert encoded([3, 7], [7]) == ([0, 1], [1], 2, ("3", "7"), (3, 7))
    assert encoded(["no", "yes"], ["no"]) == ([0, 1], [0], 2, ("no", "yes"), ("no", "yes"))
    assert encoded([True, False], [True]) == ([1, 0], [1], 2, ("False", "True"), (False, True))
    found = encoded([1.5, -1.0], [1.5], "classification")
    assert found == ([1, 0], [1], 2, ("-1", "1.5"), (-1.0, 1.5))
    found = encoded([1, 0], [1], names=["a", "b", "c"])
    assert found == ([1, 0], [1], 3, ("a", "b", "c"), None)
    assert encoded([0, 0], [0]) == ([0, 0], [0], 2, None, None)
    assert encoded([1.5, 2.0], [0.5]) == ([1.5, 2.0], [0.5], None, None, None)
    found = encoded([[1, 2]], [[3, 4]], "regression")
    assert found == ([[1.0, 2.0]], [[3.0, 4.0]], None, None, None)


def test_integers_of_steps_are_asked_about():
    with pytest.raises(fd.DataError, match="integers, 2 a row: pass task='classification' if they"):
        encoded([[1, 2]], [[3, 4]])
    found = encoded([[1, 2]], [[3, -100]], "classification")
    assert found == ([[1, 2]], [[3, -100]], 4, None, None)
    found = encoded([[1, 0]], [[1, 1]], "classification", ["a", "b", "c"])
    assert found == ([[1, 0]], [[1, 1]], 3, ("a", "b", "c"), None)


def test_labels_0_0_and_1_0_are_classes_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"'set' are 0\.0 and 1\.0: they are treated as two classes"
    ):
        assert encoded([0.0, 1.0], [1.0])[:3] == ([0, 1], [1], 2)
    assert encoded([0.0, 1.0], [1.0], "regression")[:3] == ([0.0, 1.0], [1.0], None)


def test_many_integers_of_a_table_are_asked_about():
    y = np.arange(21)
    with pytest.raises(fd.DataError, match="21 different integers: pass task='regression' if"):
        labels.task_of(y, None, "set", True)
    assert labels.task_of(y[:20], None, "set", True) == "classification"
    assert labels.task_of(y, None, "set", False) == "classification"
    assert labels.task_of(y, "regression", "set", True) == "regression"


@pytest.mark.parametrize(
    ("given", "task", "why"),
    [
        ([1j, 2j], None, "labels of 'set' have dtype complex128; expected numbers or text"),
        (["a", "b"], "regression", "labels of 'set' are text ('a'); regression needs numbers"),
        (
            [[1.5, 2.0], [3.0, 4.0]],
            "classification",
            "labels of 'set' have shape (2, 2) and dtype float64; labels of the steps of a "
            "sequence, (n, t), must be integers; for one label a row give shape (n,)",
        ),
        (
            ["same", "same"],
            None,
            "labels of 'set' are all 'same'; at least two classes are needed (for numbers, "
            "task='regression')",
        ),
        (
            [[0, 1], [1, 0]],
            None,
            "labels of 'set' have 2 columns, of which one is 1 in each row: if these are classes, "
            "give y.argmax(1); if they are numbers to predict, task='regression'",
        ),
    ],
    ids=["complex", "text", "two a row", "one class", "one-hot"],
)
def test_labels_that_cannot_be_used(given, task, why):
    with pytest.raises(fd.DataError) as info:
        encoded(given, given, task)
    assert str(info.value) == why


def test_labels_of_arrays():
    def found(y, **more):
        data = fd.Data.from_arrays(np.zeros((len(y), 1)), np.array(y), **more)
        return data.y_train.tolist(), data.classes, data.class_values

    assert found([0, 2]) == ([0, 2], 3, None)
    assert found([3, 7, 3]) == ([0, 1, 0], 2, (3, 7))
    assert found([1, 1]) == ([1, 1], 2, None)
    assert found([3, 7], classes=8) == ([3, 7], 8, None)
    assert found([True, False]) == ([1, 0], 2, (False, True))
    assert found([0.0, 1.0]) == ([0.0, 1.0], None, None)


def test_test_labels_of_another_kind():
    x, y = np.zeros((3, 1)), np.array([0, 1, 1])
    data = fd.Data.from_arrays(x, y, x, y.astype(float))
    assert data.y_test.tolist() == [0, 1, 1] and data.classes == 2
    with pytest.raises(fd.DataError, match="y_test of 'data' has shape"):
        fd.Data.from_arrays(x, y, x, y[:, None])
    with pytest.raises(fd.DataError, match=r"label 7\.0 in row 0"):
        fd.Data.from_arrays(x, y * 4 + 3, x, np.full(3, 7.0))
