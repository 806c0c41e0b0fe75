"""From raw rows to a model's and back: against scikit-learn on the pooled training rows."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
)

import foedus as fd
from foedus.data.formats.raw import Raw
from foedus.data.preprocess import Preprocessor, fit
from foedus.storage import checkpoint as files

NUMBERS, TEXTS = ["age", "dose", "flag"], ["colour", "place"]


def raw_table(rows: int = 200, seed: int = 0) -> pd.DataFrame:
    """Numbers of very different sizes, booleans, texts, all with holes; the label follows them."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows).astype(float),
            "colour": rng.choice(["red", "green", "blue"], rows),
            "dose": rng.normal(1e6, 10, rows),
            "place": pd.Categorical(rng.choice(["here", "there"], rows)),
            "flag": rng.random(rows) < 0.3,
        }
    )
    frame["outcome"] = np.where(frame.age + 40 * (frame.colour == "red") > 70, "ill", "well")
    frame.loc[rng.random(rows) < 0.1, "age"] = np.nan
    frame.loc[rng.random(rows) < 0.1, "colour"] = None
    return frame


SCALERS = {"standard": StandardScaler(), "minmax": MinMaxScaler(), "robust": RobustScaler()}


@pytest.mark.parametrize("scale", list(SCALERS))
@pytest.mark.parametrize("impute", ["mean", "median"])
@pytest.mark.parametrize("encode", ["onehot", "ordinal"])
def test_the_same_as_scikit_learn_on_the_training_rows(scale, impute, encode):
    train, test = raw_table(), raw_table(80, seed=1)
    data = fd.load(
        train, label="outcome", test=test, scale=scale, impute=impute, encode=encode, name="people"
    )
    numbers = make_pipeline(SimpleImputer(strategy=impute), SCALERS[scale])
    kinds = {
        "onehot": OneHotEncoder(handle_unknown="ignore"),
        "ordinal": OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
    }
    pooled = ColumnTransformer(
        [("numbers", numbers, NUMBERS), ("texts", kinds[encode], TEXTS)], sparse_threshold=0
    )
    x, x_test = (part.drop(columns="outcome").astype({"flag": float}) for part in (train, test))
    want = pooled.fit_transform(x)
    if encode == "ordinal":  # there, a missing text stays missing; here it is the last category
        want[:, 3] = np.where(np.isnan(want[:, 3]), 3, want[:, 3])
    np.testing.assert_allclose(data.x_train, want, rtol=1e-6, atol=1e-6)
    want = pooled.transform(x_test)
    if encode == "ordinal":
        want[:, 3] = np.where(np.isnan(want[:, 3]), 3, want[:, 3])
    np.testing.assert_allclose(data.x_test, want, rtol=1e-6, atol=1e-6)
    assert data.name == "people" and data.scaling == scale


def test_constants_by_hand():
    frame = pd.DataFrame({"a": [1.0, 3, np.nan, 5], "b": ["x", None, "y", "x"], "y": [0, 1, 0, 1]})
    data = fd.load(frame, test=0, impute="mean", scale="standard", clip=1.0)
    # a: mean 3, filled (1, 3, 3, 5), standard deviation sqrt(2); clipped at 1
    assert data.x_train.tolist() == [[-1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [1, 1, 0, 0]]
    found = data.preprocess
    assert found.feature_names == ("a", "b=x", "b=y", "b=missing")
    assert (found.fill.tolist(), found.shift.tolist()) == ([3], [3])
    assert found.divisor.tolist() == pytest.approx([2**0.5])


@pytest.mark.parametrize("encode", ["onehot", "ordinal"])
def test_raw_rows_become_what_the_training_rows_became(encode):
    """Whatever the order of columns, with more of them, as a DataFrame or a dictionary."""
    frame = raw_table()
    data = fd.load(frame, label="outcome", test=0, impute="median", encode=encode)
    found = data.preprocess
    other = frame[["place", "outcome", "flag", "colour", "dose", "age"]].assign(more="?")
    np.testing.assert_array_equal(found.transform(other), data.x_train)
    np.testing.assert_array_equal(found.transform(frame.to_dict("list")), data.x_train)
    again = Preprocessor.from_json(json.loads(json.dumps(found.to_json())))
    np.testing.assert_array_equal(again.transform(other), data.x_train)
    assert len(found.feature_names) == data.x_train.shape[1]


def test_texts_that_no_training_row_has():
    """In held-out rows, and in rows that come later: none of those that are known."""
    frame = pd.DataFrame({"a": ["x", "y", "x", "y"], "b": [1.0, 2, 3, 4], "y": [0, 1, 0, 1]})
    test = pd.DataFrame({"a": ["z", "y", None], "b": [1.0, 2, 3], "y": [0, 1, 0]})
    data = fd.load(frame, test=test, scale=None)
    assert data.x_test.tolist() == [[1, 0, 0], [2, 0, 1], [3, 0, 0]]
    with pytest.warns(
        UserWarning, match=r"column 'a' has categories that no training row has \('z'"
    ):
        assert data.preprocess.transform(test).tolist() == data.x_test.tolist()


def test_categories_that_only_test_rows_have():
    """Held out of one table: codes are those of the training rows alone."""
    frame = pd.DataFrame({"a": ["z", "b", "c", "z"], "b": [1.0, 2, 3, 4], "y": [0, 1, 0, 1]})
    test = pd.DataFrame({"a": ["a", "z"], "b": [5.0, 6], "y": [0, 1]})
    data = fd.load(frame, test=test, scale=None)
    assert data.preprocess.categories == {"a": ("b", "c", "z")}
    assert data.x_test.tolist() == [[5, 0, 0, 0], [6, 0, 0, 1]]
    raw = Raw(
        np.array([[1.0], [3], [1]]), np.zeros(3), np.array([[0.0], [2], [3]]), np.zeros(3),
        feature_names=["a"], categories={"a": ("p", "q", "r", "s")},
    )  # fmt: skip
    found, x, x_test = fit(raw, None, None, "set")
    assert found.categories == {"a": ("q", "s")}
    assert x.tolist() == [[1, 0], [0, 1], [1, 0]] and x_test.tolist() == [[0, 0], [0, 0], [0, 1]]


def test_numbers_written_as_text_and_texts_that_are_numbers():
    frame = pd.DataFrame({"a": ["1", "2", None, "4"], "y": [0, 1, 0, 1]})
    frame["c"] = pd.Categorical([10, 20, 10, 20])
    data = fd.load(frame, test=0, scale=None, impute="zero")
    assert data.x_train.tolist() == [[1, 1, 0], [2, 0, 1], [0, 1, 0], [4, 0, 1]]
    assert data.preprocess.categories == {"c": ("10", "20")}
    later = pd.DataFrame({"a": [3], "c": [20.0]})
    assert data.preprocess.transform(later).tolist() == [[3, 0, 1]]


def test_missing_numbers_are_imputed_later_only_if_impute_was_given():
    frame = pd.DataFrame({"a": [1.0, 3, 2, 2], "y": [0, 1, 0, 1]})
    later = pd.DataFrame({"a": [np.nan, 1]})
    filled = fd.load(frame, test=0, scale=None, impute="mean").preprocess
    assert filled.transform(later).tolist() == [[2], [1]]
    with pytest.raises(fd.DataError, match="row 0 has no value in column 'a', and no training row"):
        fd.load(frame, test=0, scale=None).preprocess.transform(later)


BAD = {
    "no column": (lambda f: f.drop(columns=["age", "dose"]), "no columns 'age', 'dose'"),
    "renamed": (lambda f: f.rename(columns={"age": "Age"}), "the table has 'Age', 'outcome' inst"),
    "twice": (
        lambda f: pd.concat([f, f[["age"]]], axis=1),
        "two columns of the table have the name",
    ),
    "text": (
        lambda f: f.assign(age=["old", *f.age[1:]]),
        "the table, row 0: column 'age' must hold numbers, not 'old'",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_tables_that_do_not_fit(name):
    frame, (change, why) = raw_table(), BAD[name]
    found = fd.load(frame, label="outcome", impute="median").preprocess
    with pytest.raises(fd.DataError, match=why):
        found.transform(change(frame))


def test_arrays_keep_their_constants():
    """Images and named sets: no names, and what was subtracted and divided by."""
    digits = fd.load("digits")
    assert digits.preprocess.names is None and digits.preprocess.scaling == digits.scaling
    raw = Raw(np.array([[1.0, 10], [3, 30]]), np.array([0, 1]), np.array([[5.0, 0]]), np.array([1]))
    found, x, test = fit(raw, "standard", None, "set")
    assert (x.tolist(), test.tolist()) == ([[-1, -1], [1, 1]], [[3, -2]])
    assert found.apply(np.array([[2.0, 20]])).tolist() == [[0, 0]]
    again = Preprocessor.from_json(found.to_json())
    assert again.apply(raw.x_train).tolist() == x.tolist()


# -- in the model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    frame = raw_table(400)
    data = fd.load(frame, label="outcome", impute="median")
    run = fd.run(fd.FedAvg(fd.Linear(), lr=0.5), fd.split(data, clients=4), 20)
    return frame, data, run


def test_a_model_is_asked_about_raw_rows_and_says_what_was_written(trained):
    _, data, run = trained
    new = raw_table(300, seed=7)
    said = run.model.predict(new)
    assert set(said) == {"ill", "well"}
    assert (said == new.outcome).mean() == pytest.approx(run.history.accuracy.iloc[-1], abs=0.05)
    prepared = data.preprocess.transform(new)
    assert run.model.predict(prepared).tolist() == said.tolist()
    # class numbers, as the data has them
    numbers = run.model.prepared.predict(prepared)
    assert np.array(["ill", "well"])[numbers].tolist() == said.tolist()
    hits = (run.model.prepared.predict(data.x_test) == data.y_test).mean()
    assert hits == pytest.approx(run.history.accuracy.iloc[-1])
    np.testing.assert_allclose(run.model.predict_proba(new), run.model.predict_proba(prepared))
    assert (said == "ill").tolist() == (run.model.outputs(new).argmax(1) == 0).tolist()


def test_raw_numbers_in_an_array_are_noticed(trained):
    frame, data, run = trained
    raw = np.full((5, data.x_train.shape[1]), 1000.0)
    with pytest.warns(UserWarning, match="do not seem to be scaled"):
        run.model.predict(raw)
    arrays = fd.Data.from_arrays(data.x_train, data.y_train, data.x_test, data.y_test)
    plain = fd.run(fd.FedAvg(fd.Linear()), fd.split(arrays, clients=2), 1)
    with pytest.raises(fd.DataError, match="has no column names"):
        plain.model.predict(frame)


def test_a_table_that_was_scaled_before_is_noticed():
    frame = pd.DataFrame({"a": np.linspace(90, 110, 40), "b": np.linspace(4, 6, 40)})
    found = fd.load(frame.assign(y=[0, 1] * 20), test=0, scale="standard").preprocess
    scaled = (frame - frame.mean()) / frame.std()
    with pytest.warns(UserWarning, match="most columns of this table are far from those"):
        found.transform(scaled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.transform(frame)
        found.transform(scaled.head(3))  # too few rows to say


@pytest.mark.parametrize("labels", [[False, True], [3, 7], ["b", "a"], [0.5, 1.5], [0, 1]])
def test_labels_come_back_as_they_were_written(labels):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": np.repeat([-1.0, 1.0], 20) + 0.1 * rng.normal(size=40)})
    frame["y"] = np.repeat(labels, 20)
    data = fd.load(frame, label="y", test=0, task="classification")
    run = fd.run(fd.FedAvg(fd.Linear(), lr=1.0), fd.split(data, clients=2), 20)
    said = run.model.predict(frame)
    assert (
        said.tolist() == frame.y.tolist()
        and said.dtype.kind
        == frame.y.to_numpy(dtype=str if isinstance(labels[0], str) else None).dtype.kind
    )


def test_a_personal_model_takes_raw_rows_too(trained):
    frame, data, _ = trained
    run = fd.run(fd.Independent(fd.Linear(), lr=0.5), fd.split(data, clients=3), 3)
    assert set(run.model_of(1).predict(frame)) <= {"ill", "well"}


FRESH = """
import sys, pandas as pd, foedus as fd
run = fd.Run.load(sys.argv[1])
rows = pd.read_csv(sys.argv[2])
print((run.model.predict(rows) == rows.outcome).mean())
"""


def test_from_a_raw_table_to_a_model_in_another_process(trained, tmp_path):
    """Saved, loaded where nothing is known of the data, and asked about rows of a new site."""
    _, _, run = trained
    new = raw_table(300, seed=9)[["outcome", "flag", "place", "dose", "colour", "age"]]
    run.save(tmp_path / "run.safetensors")
    new.to_csv(tmp_path / "new.csv", index=False)
    command = [sys.executable, "-c", FRESH, tmp_path / "run.safetensors", tmp_path / "new.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx((run.model.predict(new) == new.outcome).mean())
    assert float(done.stdout) == pytest.approx(run.history.accuracy.iloc[-1], abs=0.05)


@pytest.mark.parametrize(
    "change",
    [
        {"encode": "hash"},
        {"names": ["a", "a"]},
        {"names": ["a"], "categories": {"b": ["x"]}},
        {"fill": {"shape": [2], "values": [1.0]}},
        {"shift": {"shape": [1], "values": "text"}},
        {"divisor": []},
        {"shift": {"shape": [1], "values": [1.0]}},
        {"divisor": 10**400},
        {"divisor": {"shape": [3], "values": [1.0, 0.0, 1.0]}},
        {"shift": {"shape": [3], "values": [1.0, float("nan"), 1.0]}},
        {"fill": {"shape": [float("inf")], "values": [1.0]}},
        {"clip": "x"},
        {"clip": -1},
        {"scaling": "other"},
        {"names": None},
        {"names": "ac"},
        {"categories": {"colour": ["blue", None, "red"]}},
        {"categories": {"colour": ["blue", "blue"]}},
    ],
)
def test_damaged_descriptions_are_noticed(change, trained, tmp_path, monkeypatch):
    _, _, run = trained
    about = run.preprocess.to_json() | change
    monkeypatch.setattr(Preprocessor, "to_json", lambda self: about)
    run.save(tmp_path / "run.safetensors")
    with pytest.raises(fd.CheckpointError, match="is damaged"):
        fd.Run.load(tmp_path / "run.safetensors")


@pytest.mark.parametrize("values", [[[1], [1, 2]], "ab", {"a": 1, "b": 2}, ["a"], [None, None]])
def test_damaged_labels_are_noticed(values, trained, tmp_path, monkeypatch):
    _, _, run = trained
    write = files.write

    def written(path, trees, meta, *more):
        return write(path, trees, {**meta, "class_values": values}, *more)

    monkeypatch.setattr(files, "write", written)
    run.save(tmp_path / "run.safetensors")
    with pytest.raises(fd.CheckpointError, match="is damaged"):
        fd.Run.load(tmp_path / "run.safetensors")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ({"age": [1.0, 2.0], "dose": [1.0]}, "these are not rows of a table"),
        ([[1.0, "u"]], "an array must hold numbers"),
        (raw_table(3).to_numpy(), "an array must hold numbers"),
    ],
)
def test_rows_that_are_none(rows, why, trained):
    with pytest.raises(fd.DataError, match=why):
        trained[2].model.predict(rows)


def test_one_row_as_a_dictionary(trained):
    frame, _, run = trained
    row = frame.iloc[0].drop("outcome").to_dict()
    row["age"] = 50.0
    assert run.model.predict(row).shape == (1,)
    with pytest.raises(fd.DataError, match="row 0: column 'dose' is infinite"):
        run.model.predict({**row, "dose": np.inf})


def test_a_label_by_its_place_or_by_a_number_that_is_its_name():
    """Places count in the table as it was given."""
    frame = pd.DataFrame({"id": range(8), "a": 1.0, "t": ["a", "b"] * 4, "z": ["p", "q"] * 4})
    assert fd.load(frame, label=2, drop=["id"]).class_values == ("a", "b")
    frame = pd.DataFrame({1: np.arange(8.0), 2: ["a", "b"] * 4, 3: ["p", "q"] * 4})
    assert fd.load(frame, label=2, drop=[3]).class_values == ("a", "b")


def test_test_rows_are_read_as_the_training_rows():
    frame = pd.DataFrame({"c": ["1", "A", "B", "C"], "a": [1.0, 2, 3, 4], "y": [0.0, 1, 0, 1]})
    test = pd.DataFrame({"c": ["1", None], "a": [1.0, 2], "y": ["0", "1"]})
    with pytest.warns(UserWarning, match="treated as two classes"):
        data = fd.load(frame, test=test, scale=None)
    assert data.class_values == ("0", "1") and data.y_test.tolist() == [0, 1]
    assert data.x_test.tolist() == [[1, 1, 0, 0, 0], [2, 0, 0, 0, 0]]


def test_numbers_among_objects_are_numbers():
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "y": pd.Series([0.5, 1.5, 2.5, 3], dtype=object)})
    assert fd.load(frame, test=0).classes is None
    frame["y"] = ["0.5", "1.5", "2.5", "3"]
    data = fd.load(frame, test=0, task="regression")
    assert data.y_train.tolist() == [0.5, 1.5, 2.5, 3]
    large = pd.DataFrame({"a": np.array([2**63 + 2**12, 1], np.uint64), "y": ["a", "b"]})
    assert fd.load(large, test=0, scale=None).x_train.tolist() == [[2.0**63], [1]]


def test_a_patient_on_both_sides_is_refused():
    frame = pd.DataFrame({"a": range(6), "p": list("aabbcc"), "y": [0, 1] * 3})
    with pytest.raises(fd.DataError, match=r"test: 'a' \(group_holdout\) has rows in both parts"):
        fd.load(frame, group_holdout="p", test=frame.head(2))


def test_labels_as_bytes(tmp_path):
    np.savez(tmp_path / "b.npz", x=np.eye(4), y=np.array([b"cat", b"dog"] * 2))
    data = fd.load(tmp_path / "b.npz", test=0)
    assert data.class_values == ("cat", "dog")


def test_files_of_test_rows_have_the_same_texts(tmp_path):
    """Texts that look like numbers, or booleans, in one file alone are the same texts."""
    (tmp_path / "tr.csv").write_text("flag,code,y\nTrue,01,0\nFalse,2B,1\nunknown,03X,0\n")
    (tmp_path / "te.csv").write_text("flag,code,y\nTrue,01,0\nFalse,01,1\n")
    data = fd.load(tmp_path / "tr.csv", test=tmp_path / "te.csv", label="y")
    names = data.preprocess.feature_names
    assert data.x_test[:, names.index("code=01")].tolist() == [1, 1]
    assert data.x_test[:, names.index("flag=True")].tolist() == [1, 0]


def test_categorical_labels_come_back_as_they_were():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=40), "y": pd.Categorical(rng.choice([5, 9], 40))})
    data = fd.load(frame, label="y")
    run = fd.run(fd.FedAvg(fd.Linear()), fd.split(data, clients=2), 1)
    assert set(run.model.predict(frame)) <= {5, 9} and run.model.score(frame, frame.y) >= 0
