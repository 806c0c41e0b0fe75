"""Models of raw tables give outside of foedus what they give inside, from raw columns."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import is_classifier
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

import foedus as fd
from foedus.data.preprocess import Preprocessor
from foedus.export import forms
from tests.export.tables import FAMILIES, READING, federation, models, net, new_rows, run

NOT_ONNX = {"fedboost-estimators", "ffgb-estimators"}
NOT_SKLEARN = {"fedavg-mlp", "fedavg-module", "ffgb-nets", "ffgb-estimators"}

pytestmark = pytest.mark.filterwarnings("ignore:column .* has categories that no training row has")


def onnx_session(path):
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def asked(session, frame: pd.DataFrame, columns) -> dict[str, np.ndarray]:
    """What a file says of raw rows; inputs are in the order of the columns."""
    given = {}
    for put, column in zip(session.get_inputs(), columns, strict=True):
        assert put.shape == ["rows", 1]
        if put.type == "tensor(string)":
            given[put.name] = frame[[column]].astype(object).fillna("").astype(str).to_numpy()
        else:
            assert put.type == "tensor(double)"
            given[put.name] = frame[[column]].to_numpy(np.float64)
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def exported(model: fd.Predictor, frame: pd.DataFrame, path) -> dict[str, np.ndarray]:
    model.to_onnx(path)
    return asked(onnx_session(path), frame, model.preprocess.names)


# -- ONNX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - NOT_ONNX))
def test_onnx(name, reading, tmp_path):
    for model in models(name, reading):
        for frame in (new_rows(reading), new_rows(reading).head(1)):
            found = exported(model, frame, tmp_path / "m.onnx")
            expected = model.outputs(frame).numpy()
            np.testing.assert_allclose(found["outputs"], expected, rtol=1e-6, atol=1e-5)
            if model.spec.classes:
                shares = model.predict_proba(frame)
                np.testing.assert_allclose(found["probabilities"], shares, rtol=0, atol=1e-5)
                assert found["label"].tolist() == model.predict(frame).tolist()
            else:
                assert list(found) == ["outputs"]


def two_columns(encode: str, fill=None, clip=None) -> fd.Predictor:
    """A linear model of a number, (a - 1000000) / 0.25, and the categories x, y and missing."""
    preprocess = Preprocessor(
        ("c", "a"), {"c": ("x", "y", None)}, fill, np.array([1e6]), np.array([0.25]), "standard",
        encode, clip,
    )  # fmt: skip
    weight = [[1.0, 10, 20, 30]] if encode == "onehot" else [[1.0, 10]]
    form = forms.Parametric(fd.Linear(bias=False), {"weight": torch.tensor(weight)})
    return fd.Predictor(form, fd.Spec((len(weight[0]),), None, 1), preprocess=preprocess)


ROWS = pd.DataFrame({"a": [1e6 + 0.1, 1e6 - 5, np.nan, 1e6], "c": ["x", "y", None, "z"]})


@pytest.mark.parametrize(
    ("encode", "clip", "expected"),
    [
        # numbers (0.4, -20, 2 where 1000000.5 is filled in, 0), and 10, 20, 30 or none for c
        ("onehot", None, [10.4, 0.0, 32.0, 0.0]),
        ("onehot", 1.5, [10.4, 18.5, 31.5, 0.0]),
        # the place of c: 0, 1, 2 and -1
        ("ordinal", None, [0.4, -10.0, 22.0, -10.0]),
    ],
)
def test_onnx_by_hand(encode, clip, expected, tmp_path):
    """In single precision, 1000000.1 is 1000000.125, and the first number 0.5."""
    model = two_columns(encode, np.array([1e6 + 0.5]), clip)
    found = exported(model, ROWS, tmp_path / "m.onnx")
    np.testing.assert_allclose(found["outputs"][:, 0], expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(model.predict(ROWS), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("fill", "rows", "why"),
    [
        (None, ROWS, "a number is missing or infinite, which the model does not take"),
        (np.array([1.0]), ROWS.assign(a=-np.inf), "a number is infinite, which the model does"),
        (None, ROWS.assign(a=[1, 1, np.inf, 1]), "a number is missing or infinite"),
    ],
)
def test_onnx_refuses_the_rows_that_the_model_refuses(fill, rows, why, tmp_path):
    model = two_columns("onehot", fill)
    model.to_onnx(tmp_path / "m.onnx")
    session = onnx_session(tmp_path / "m.onnx")
    with pytest.raises(Exception, match=why):
        asked(session, rows, ["c", "a"])
    with pytest.raises(fd.DataError):
        model.predict(rows)
    good = asked(session, ROWS.dropna(), ["c", "a"])["outputs"]
    assert good.shape == (3, 1) and np.isfinite(good).all()
    assert asked(session, ROWS.head(0), ["c", "a"])["outputs"].shape == (0, 1)


def test_onnx_of_a_column_of_empty_texts_is_refused(tmp_path):
    preprocess = Preprocessor(("c",), {"c": ("", "x")})
    form = forms.Parametric(fd.Linear(bias=False), {"weight": torch.ones(1, 2)})
    model = fd.Predictor(form, fd.Spec((2,), None, 1), preprocess=preprocess)
    with pytest.raises(fd.ModelError, match=r"column 'c' has the empty text among its categories"):
        model.to_onnx(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (("no", "yes"), "tensor(string)"),
        ((3, 7), "tensor(int64)"),
        ((False, True), "tensor(bool)"),
        ((0.5, 1.5), "tensor(double)"),
        (None, "tensor(int64)"),
    ],
)
def test_onnx_says_labels_as_they_were_written(values, kind, tmp_path):
    """Outputs (a, 0): the first class where a >= 0."""
    weight = torch.tensor([[1.0], [0.0]])
    model = fd.Predictor(
        forms.Parametric(fd.Linear(bias=False), {"weight": weight}),
        fd.Spec((1,), 2, 2),
        preprocess=Preprocessor(("a",)),
        class_values=values,
    )
    frame = pd.DataFrame({"a": [2.0, -1.0, 0.0]})
    found = exported(model, frame, tmp_path / "m.onnx")["label"]
    first, second = (0, 1) if values is None else values
    assert found.tolist() == [first, second, first] == model.predict(frame).tolist()
    assert onnx_session(tmp_path / "m.onnx").get_outputs()[2].type == kind


def test_onnx_names(tmp_path):
    """Inputs are named as columns, but for those that have the name of an output."""
    onnx = pytest.importorskip("onnx")
    run("fedavg-linear").model.to_onnx(tmp_path / "m.onnx")
    saved = onnx.load(tmp_path / "m.onnx")
    names = [put.name for put in saved.graph.input]
    assert names == ["age", "colour", "input_label", "v1", "grade", "flag"]
    assert [out.name for out in saved.graph.output] == ["outputs", "probabilities", "label"]
    meta = {p.key: json.loads(p.value) for p in saved.metadata_props}
    assert meta["columns"] == ["age", "colour", "label", "v1", "grade", "flag"]
    assert meta["classes"] == ["dead", "ill", "well"]
    assert meta["features"] == list(run("fedavg-linear").preprocess.feature_names)


def test_onnx_of_prepared_rows(tmp_path):
    made = run("fedavg-linear")
    made.model.prepared.to_onnx(tmp_path / "m.onnx")
    session = onnx_session(tmp_path / "m.onnx")
    assert [o.name for o in session.get_outputs()] == ["outputs", "probabilities"]
    x = federation().data.x_test
    found = session.run(["probabilities"], {"x": x})[0]
    np.testing.assert_allclose(found, made.model.predict_proba(x), rtol=0, atol=1e-6)


def test_onnx_of_arrays_with_a_scale(tmp_path):
    """Digits have no names of columns: rows are those of data.x_test."""
    data = fd.load("digits")
    model = fd.run(fd.FedAvg(fd.Linear()), fd.split(data, clients=3), 1).model
    model.to_onnx(tmp_path / "m.onnx")
    found = onnx_session(tmp_path / "m.onnx").run(["outputs"], {"x": data.x_test})[0]
    np.testing.assert_allclose(found, model.outputs(data.x_test), rtol=1e-5, atol=1e-5)


# -- scikit-learn ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - NOT_SKLEARN))
def test_sklearn(name, reading):
    for model in models(name, reading):
        made, frame = model.to_sklearn(), new_rows(reading)
        check_is_fitted(made)
        assert isinstance(made, Pipeline) and is_classifier(made) == bool(model.spec.classes)
        assert made.feature_names_in_.tolist() == list(model.preprocess.names)
        again = pickle.loads(pickle.dumps(made))
        if model.spec.classes:
            assert made.classes_.tolist() == ["dead", "ill", "well"]
            assert again.predict(frame).tolist() == model.predict(frame).tolist()
            shares = model.predict_proba(frame)
            np.testing.assert_allclose(made.predict_proba(frame), shares, rtol=0, atol=1e-6)
        else:
            np.testing.assert_allclose(again.predict(frame), model.predict(frame), 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["fedavg-linear", "ffgb-trees", "fednewton"])
def test_sklearn_of_prepared_rows(name):
    """Class numbers of arrays."""
    made, data = run(name).model.prepared.to_sklearn(), federation().data
    assert made.classes_.tolist() == [0, 1, 2]
    want = np.array(["dead", "ill", "well"])[made.predict(data.x_test)]
    assert want.tolist() == run(name).model.predict(data.x_test).tolist()
    assert made.n_features_in_ == data.spec.features


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(("to_sklearn", name) for name in sorted(NOT_SKLEARN)),
        *(("to_onnx", name) for name in sorted(NOT_ONNX)),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_use(method, name, tmp_path):
    model, arguments = run(name).model, [tmp_path / "m"] if method == "to_onnx" else []
    with pytest.raises(fd.ModelError, match=rf"this model is an? .*no {method}; use "):
        getattr(model, method)(*arguments)
    assert not list(tmp_path.iterdir())


def test_to_torch_takes_prepared_rows():
    made = run("fedavg-module")
    x = torch.from_numpy(federation().data.x_test)
    module = made.model.to_torch()
    assert type(module) is type(net(x.shape[1]))
    torch.testing.assert_close(module(x).detach(), made.model.outputs(x))
