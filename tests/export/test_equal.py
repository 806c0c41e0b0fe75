"""Every kind of model gives outside of foedus what it gives inside."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import foedus as fd
from tests.export.families import RUNS, models, rows

NOT_TORCH = {"ffgb-trees", "ffgb-trees-logistic", "ffgb-trees-values", "ffgb-trees-two-values"}
NOT_TORCH |= {"ffgb-trees-images", "fedboost-estimators", "ffgb-estimators"}
NOT_SKLEARN = {"fedavg-mlp", "fedavg-mlp-values", "fedavg-cnn", "fedavg-cnn-valid"}
NOT_SKLEARN |= {"fedavg-module", "ffgb-networks", "ffgb-modules", "ffgb-distill", "fedres-mlp"}
NOT_SKLEARN |= {"bandit", "ffgb-estimators"}
NOT_ONNX = {"fedboost-estimators", "ffgb-estimators"}


def onnx_outputs(model: fd.Predictor, x: np.ndarray, path) -> dict[str, np.ndarray]:
    runtime = pytest.importorskip("onnxruntime")
    model.to_onnx(path)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_pickled(name):
    for model in models(name):
        again = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(again.predict(rows(name)), model.predict(rows(name)))
        torch.testing.assert_close(
            again.outputs(rows(name)), model.outputs(rows(name)), rtol=0, atol=0
        )


@pytest.mark.parametrize("name", sorted(set(RUNS) - NOT_TORCH))
def test_torch(name):
    for model in models(name):
        with torch.no_grad():
            found = model.to_torch()(torch.from_numpy(rows(name)))
        torch.testing.assert_close(found, model.outputs(rows(name)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(RUNS) - NOT_SKLEARN))
def test_sklearn(name):
    for model in models(name):
        x, estimator = rows(name), model.to_sklearn()
        flat = x.reshape(len(x), -1)
        if model.spec.classes:
            found = estimator.predict_proba(flat)
            np.testing.assert_allclose(found, model.predict_proba(x), rtol=0, atol=1e-6)
            np.testing.assert_array_equal(estimator.classes_, model.classes_)
            np.testing.assert_array_equal(estimator.predict(flat), model.predict(x))
        else:
            np.testing.assert_allclose(estimator.predict(flat), model.predict(x), 1e-5, 1e-5)
        assert estimator.n_features_in_ == model.n_features_in_
        again = pickle.loads(pickle.dumps(estimator))
        np.testing.assert_array_equal(again.predict(flat), estimator.predict(flat))


@pytest.mark.parametrize("name", sorted(set(RUNS) - NOT_ONNX))
def test_onnx(name, tmp_path):
    for model in models(name):
        x = rows(name)
        for some in (x, x[:1]):
            found = onnx_outputs(model, some, tmp_path / "model.onnx")
            expected = model.outputs(some).numpy()
            assert found["outputs"].dtype == np.float32
            np.testing.assert_allclose(found["outputs"], expected, rtol=1e-5, atol=1e-5)
            if model.spec.classes:
                shares = model.predict_proba(some)
                np.testing.assert_allclose(found["probabilities"], shares, rtol=0, atol=1e-5)
            assert len(found) == 1 + bool(model.spec.classes)


REFUSED = [
    *(("to_torch", name) for name in sorted(NOT_TORCH)),
    *(("to_sklearn", name) for name in sorted(NOT_SKLEARN)),
    *(("to_onnx", name) for name in sorted(NOT_ONNX)),
]


@pytest.mark.parametrize(("method", "name"), REFUSED)
def test_what_a_kind_does_not_allow_is_refused_with_what_to_use(method, name, tmp_path):
    model, arguments = models(name)[0], [tmp_path / "m"] if method == "to_onnx" else []
    with pytest.raises(fd.ModelError, match=rf"this model is an? .*no {method}; use "):
        getattr(model, method)(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["to_torch", "to_sklearn", "to_onnx"])
def test_any_function_is_a_model_that_stays(method, tmp_path):
    model = fd.Predictor(lambda x: x[:, :1], fd.Spec((2,), None, 1))
    np.testing.assert_array_equal(model.predict([[3.0, 4.0]]), [3.0])
    with pytest.raises(fd.ModelError, match="a function that foedus cannot look into"):
        getattr(model, method)(*([tmp_path / "m"] if method == "to_onnx" else []))
