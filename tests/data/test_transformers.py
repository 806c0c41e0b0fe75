"""What was fitted on training rows as transformers of scikit-learn: the same numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

import foedus as fd
from foedus.data.preprocess import Preprocessor
from tests.data.test_preprocess import raw_table


def later_rows() -> pd.DataFrame:
    frame = raw_table(90, seed=4)
    frame["place"] = frame["place"].astype(object)
    frame.loc[::6, "colour"] = "violet"
    frame.loc[::5, "place"] = None
    return frame[["flag", "place", "outcome", "dose", "colour", "age"]]


@pytest.mark.filterwarnings("ignore:column .* has categories that no training row has")
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("encode", ["onehot", "ordinal"])
@pytest.mark.parametrize("impute", ["mean", "median", "zero"])
@pytest.mark.parametrize("scale", ["standard", "minmax", "robust", "unit", None])
def test_the_same_numbers(scale, impute, encode, clip):
    how = {"scale": scale, "impute": impute, "encode": encode, "clip": clip}
    found = fd.load(raw_table(), label="outcome", test=0, **how).preprocess
    made = found.to_sklearn()
    for rows in (raw_table(), later_rows(), later_rows().head(1)):
        np.testing.assert_allclose(made.transform(rows), found.transform(rows), 1e-6, 1e-6)
    assert made.get_feature_names_out().tolist() == list(found.feature_names)
    assert made.feature_names_in_.tolist() == list(found.names)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.transform(later_rows()), made.transform(later_rows()))


def test_by_hand():
    """a: 3 where missing, (a - 3) / 2, clipped at 1.25; c: x, y, missing, and -1 for others."""
    found = Preprocessor(
        ("c", "a"), {"c": ("x", "y", None)}, np.array([3.0]), np.array([3.0]), np.array([2.0]),
        "standard", "ordinal", 1.25,
    )  # fmt: skip
    rows = pd.DataFrame({"a": ["4", None, "9", "-9"], "c": ["y", None, "x", "z"]})
    made = found.to_sklearn()
    assert made.transform(rows).tolist() == [[0.5, 1], [0, 2], [1.25, 0], [-1.25, -1]]
    steps = made.named_transformers_["numbers"].named_steps
    assert type(steps["impute"]) is SimpleImputer and steps["impute"].statistics_.tolist() == [3]
    assert type(steps["scale"]) is StandardScaler and steps["scale"].mean_.tolist() == [3]


def test_numbers_alone_and_texts_alone():
    frame = pd.DataFrame({"a": [1.0, 3], "c": ["x", "y"], "y": [0, 1]})
    numbers = fd.load(frame, test=0, drop=["c"], scale="minmax").preprocess.to_sklearn()
    assert numbers.transform(frame).tolist() == [[0], [1]]
    texts = fd.load(frame, test=0, drop=["a"]).preprocess.to_sklearn()
    assert texts.transform(frame).tolist() == [[1, 0], [0, 1]]


def test_what_is_refused():
    frame = pd.DataFrame({"a": [1.0, 3], "b": [1.0, 2], "y": [0, 1]})
    made = fd.load(frame, test=0).preprocess.to_sklearn()
    with pytest.raises(fd.DataError, match="row 1 has no value in column 'b', and no training row"):
        made.transform(frame.assign(b=[1, np.nan]))
    with pytest.raises(fd.DataError, match="row 0: column 'a' must hold numbers, not 'old'"):
        made.transform(frame.assign(a=["old", "1"]))
    with pytest.raises(ValueError, match=r"columns are missing: .'a'"):
        made.transform(frame.drop(columns="a"))
    with pytest.raises(fd.DataError, match="have no names, so there is no ColumnTransformer"):
        fd.load("digits").preprocess.to_sklearn()


def test_fitted_again_it_is_scikit_learns_own():
    """A clone has nothing of the training rows, and learns from others."""
    found = fd.load(raw_table(), label="outcome", test=0, impute="median").preprocess
    other = raw_table(120, seed=5).drop(columns="outcome")
    again = clone(found.to_sklearn()).fit(other)
    scaler = again.named_transformers_["numbers"].named_steps["scale"]
    filled = other.age.fillna(other.age.median())
    assert scaler.mean_[0] == pytest.approx(filled.mean())
    assert scaler.mean_[0] != pytest.approx(found.shift[0])
