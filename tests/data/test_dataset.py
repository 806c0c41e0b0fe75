from __future__ import annotations

import numpy as np
import pytest
import torch

from foedus.base.spec import Spec
from foedus.data import Data
from foedus.errors import DataError

X = np.arange(12.0).reshape(4, 3)


def test_classification_from_arrays():
    data = Data.from_arrays(X, [0, 2, 1, 2], X[:1], [1], name="small")
    assert data.classes == 3
    assert data.spec == Spec((3,), 3, 3)
    assert data.x_train.dtype == np.float32
    assert data.x_train.flags.c_contiguous
    assert data.y_train.dtype == np.int64
    assert data.y_test.tolist() == [1]
    assert repr(data) == "Data(small: 4 + 1 rows, 3 features, 3 classes, scaling=None)"


def test_regression_from_arrays_and_tensors():
    one = Data.from_arrays(torch.tensor(X), torch.tensor([0.5, 1, 2, 3]))
    assert one.classes is None
    assert one.spec == Spec((3,), None, 1)
    assert one.y_train.dtype == np.float32
    assert one.x_test.shape == (0, 3)
    assert one.y_test.shape == (0,)
    two = Data.from_arrays(X, np.ones((4, 2)))
    assert two.spec.outputs == 2
    assert two.y_test.shape == (0, 2)


def test_images_keep_their_shape_and_fortran_order_is_undone():
    x = np.asfortranarray(np.zeros((2, 3, 8, 8)))
    data = Data.from_arrays(x, [0, 1])
    assert data.spec.shape == (3, 8, 8)
    assert data.spec.features == 192
    assert data.x_train.flags.c_contiguous


def test_float_labels_with_classes_are_labels():
    assert Data.from_arrays(X, [0.0, 1.0, 1.0, 0.0], classes=2).y_train.dtype == np.int64
    assert Data.from_arrays(X, [True, False, True, False]).classes == 2


def test_text_labels_are_classes():
    data = Data.from_arrays(X, ["no", "yes", "no", "maybe"], X[:2], ["yes", "no"])
    assert data.y_train.tolist() == [1, 2, 1, 0] and data.y_test.tolist() == [2, 1]
    assert data.class_values == ("maybe", "no", "yes")


def test_labels_that_look_like_classes_are_asked_about():
    with pytest.warns(UserWarning, match=r"is 0.0 and 1.0: .*for two classes give integers"):
        assert Data.from_arrays(X, [0.0, 1.0, 1.0, 0.0]).classes is None


def bad(value, at=(1, 2)):
    x = X.copy()
    x[at] = value
    return x


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((bad(np.nan), [0, 1, 0, 1]), ["x_train", "1 NaN", "row 1, column 2", "impute"]),
        (
            (bad(-np.inf, (slice(2, 4), 0)), [0, 1, 0, 1]),
            ["x_train", "2 NaN or infinite values", "-inf", "row 2, column 0"],
        ),
        ((bad(1e300), [0, 1, 0, 1]), ["infinite", "row 1, column 2"]),
        ((X, [0, 1, 0]), ["y_train", "3 rows", "4"]),
        ((X[:0], []), ["x_train", "no rows"]),
        ((X[:, 0], [0, 1, 0, 1]), ["x_train", "shape (4,)"]),
        ((np.array([[1, "a"], [2, "b"]], dtype=object), [0, 1]), ["x_train", "object"]),
        ((X, np.array(["a", "b", "a", "b"], object)), ["y_train", "dtype"]),
        ((X, [0.0, 1.0, np.nan, 1.0]), ["y_train", "row 2"]),
        ((X, [0, 1, 0, 1], X[:, :2], [0, 1, 0, 1]), ["x_test", "(2,)", "(3,)"]),
        ((X, [0, 1, 0, 1], X), ["y_test", "missing"]),
        ((X, [[0], [1], [0], [1]]), ["y_train", "shape"]),
    ],
)
def test_unusable_arrays_are_named(arguments, words):
    with pytest.raises(DataError) as error:
        Data.from_arrays(*arguments)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("y", "shown"),
    [
        ([0, 1, 5, 1], "label 5 in row 2"),
        ([0, 1, 2, 3], "label 3 in row 3"),
        ([0, -1, 1, 1], "label -1 in row 1"),
        ([0.5, 1, 1, 0], "label 0.5"),
    ],
)
def test_labels_out_of_range(y, shown):
    with pytest.raises(DataError, match=shown) as error:
        Data.from_arrays(X, y, classes=3)
    assert "3 classes" in str(error.value)
    assert "0 to 2" in str(error.value)


def test_groups_are_checked():
    assert Data.from_arrays(X, [0, 1, 0, 1], groups=[5, 5, 2, 2]).groups_train.dtype == np.int64
    for groups, word in (
        ([0, 1], "2 rows"),
        ([0, 1, -1, 1], "group -1"),
        ([0.5, 1, 1, 1], "dtype"),
    ):
        with pytest.raises(DataError, match=word):
            Data.from_arrays(X, [0, 1, 0, 1], groups=groups)
    with pytest.raises(DataError, match="class_names"):
        Data.from_arrays(X, [0, 1, 0, 1], classes=2, class_names=["only one"])
