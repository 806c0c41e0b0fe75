"""Small models whose exports are worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.export import forms, probabilities
from foedus.models import features
from foedus.wire.arrays import Trees
from tests.export.families import Net, models, rows, run, seeded
from tests.export.test_equal import onnx_outputs

TWO = fd.Spec((2,), 2, 2)
VALUE = fd.Spec((2,), None, 1)


def linear(weight, bias=None) -> forms.Parametric:
    params = {"weight": torch.tensor(weight)}
    if bias is not None:
        params["bias"] = torch.tensor(bias)
    return forms.Parametric(fd.Linear(bias=bias is not None), params)


def stump() -> Trees:
    """x_1 <= 0.1 (as float32): 1, else x_0 <= -2: 10, else 100."""
    return Trees(
        torch.tensor([1, -1, 0, -1, -1], dtype=torch.int32),
        torch.tensor([0.1, 0.0, -2.0, 0.0, 0.0]),
        torch.tensor([1, -1, 3, -1, -1], dtype=torch.int32),
        torch.tensor([2, -1, 4, -1, -1], dtype=torch.int32),
        torch.tensor([[1.0], [10.0], [100.0]]),
        torch.tensor([0], dtype=torch.int32),
        2,
    )


# -- torch -----------------------------------------------------------------------------------------


def test_a_users_module_comes_back_as_its_own_class_and_loads_into_a_new_one():
    made = run("fedavg-module")
    module = made.model.to_torch()
    assert type(module) is Net
    assert list(module.state_dict()) == list(Net().state_dict())
    torch.testing.assert_close(module.last[1].weight.data, made.state.w["last/1/weight"])
    torch.testing.assert_close(module.first.bias.data, seeded().first.bias.data)  # is not trained
    fresh, x = Net(), torch.from_numpy(rows("fedavg-module"))
    fresh.load_state_dict(module.state_dict())
    torch.testing.assert_close(fresh(x), made.model.outputs(x))


def test_a_module_is_a_copy():
    made = run("fedavg-module")
    before = made.model.outputs(rows("fedavg-module"))
    for p in made.model.to_torch().parameters():
        p.data.zero_()
    for p in run("fedavg-linear").model.to_torch().parameters():
        p.data.zero_()
    torch.testing.assert_close(made.model.outputs(rows("fedavg-module")), before)
    assert bool(run("fedavg-linear").state.w["weight"].any())


def test_a_linear_model_is_one_layer_with_the_same_names():
    layer = fd.Predictor(linear([[1.0, 2.0]], [3.0]), VALUE).to_torch()
    assert type(layer) is torch.nn.Linear
    assert {k: v.tolist() for k, v in layer.state_dict().items()} == {
        "weight": [[1.0, 2.0]],
        "bias": [3.0],
    }


def test_a_model_class_of_the_user_is_wrapped(tmp_path):
    """f(x) = a x_0, a = 3."""
    form = forms.Parametric(Slope(), {"a": torch.tensor(3.0)})
    model = fd.Predictor(form, VALUE)
    module = model.to_torch()
    assert list(module.state_dict()) == ["a"]
    assert module(torch.tensor([[2.0, 9.0]])).tolist() == [[6.0]]
    found = onnx_outputs(model, np.array([[2.0, 9.0]], np.float32), tmp_path / "m")
    assert found["outputs"].tolist() == [[6.0]]


@dataclass(frozen=True)
class Doubled(fd.Linear):
    """Computes something else than the model that it is derived from."""

    def apply(self, params, x):
        return 2 * super().apply(params, x)


def test_a_subclass_of_a_model_is_not_taken_for_the_model(tmp_path):
    model = fd.Predictor(forms.Parametric(Doubled(False), {"weight": torch.ones(1, 2)}), VALUE)
    x = np.array([[2.0, 1.0]], np.float32)
    assert model.predict(x).tolist() == [6.0]
    assert model.to_torch()(torch.from_numpy(x)).tolist() == [[6.0]]
    assert onnx_outputs(model, x, tmp_path / "m")["outputs"].tolist() == [[6.0]]
    with pytest.raises(fd.ModelError, match=r"a model with parameters \(Doubled\)"):
        model.to_sklearn()


class Slope(fd.Model):
    def apply(self, params, x):
        return params["a"] * x[:, :1]


# -- scikit-learn ----------------------------------------------------------------------------------


def test_coefficients_of_two_classes_are_the_difference():
    """Logits x_0 + 1 and 3 x_0 - x_1 - 2: their difference is 2 x_0 - x_1 - 3."""
    made = fd.Predictor(linear([[1.0, 0.0], [3.0, -1.0]], [1.0, -2.0]), TWO).to_sklearn()
    assert type(made).__name__ == "LogisticRegression"
    assert made.coef_.tolist() == [[2.0, -1.0]] and made.intercept_.tolist() == [-3.0]
    # at (1, 0): sigmoid(-1)
    assert made.predict_proba([[1.0, 0.0]])[0, 1] == pytest.approx(1 / (1 + np.e))


def test_coefficients_of_values():
    made = fd.Predictor(linear([[1.0, 2.0]], [3.0]), VALUE).to_sklearn()
    assert type(made).__name__ == "LinearRegression"
    assert made.coef_.tolist() == [1.0, 2.0] and made.intercept_ == 3.0
    assert made.predict([[1.0, 1.0]]).tolist() == [6.0]


def test_coefficients_of_some_columns_of_one_output_for_two_classes():
    """z = 4 x_2 - 2 x_0 + 1 of columns (2, 0): logits -z/2 and z/2, whose difference is z."""
    form = forms.TwoClasses(forms.SomeColumns(linear([[4.0, -2.0]], [1.0]), (2, 0)))
    made = fd.Predictor(form, fd.Spec((3,), 2, 2)).to_sklearn()
    assert made.coef_.tolist() == [[-2.0, 0.0, 4.0]] and made.intercept_.tolist() == [1.0]


def test_coefficients_of_a_sum():
    form = forms.Total((linear([[1.0, 2.0]], [3.0]), forms.SomeColumns(linear([[5.0]]), (1,))))
    made = fd.Predictor(form, VALUE).to_sklearn()
    assert made.coef_.tolist() == [1.0, 7.0] and made.intercept_ == 3.0


def test_fednewton_is_a_pipeline_of_features_and_a_linear_model():
    pipeline, state = run("fednewton-squared").model.to_sklearn(), run("fednewton-squared").state
    assert [name for name, _ in pipeline.steps] == ["features", "linear"]
    # the map has 1 / sqrt(M) where scikit-learn has sqrt(2 / M)
    np.testing.assert_allclose(pipeline[-1].coef_.T * np.sqrt(2), state.w.numpy())
    unbiased = run("fednewton-softmax").model.to_sklearn()
    weights = run("fednewton-softmax").state.w.numpy()
    np.testing.assert_allclose(unbiased[-1].coef_[0], weights[:, 1] - weights[:, 0])
    constant = run("fednewton-logistic").model.to_sklearn()
    np.testing.assert_allclose(constant[-1].intercept_, run("fednewton-logistic").state.w[-1])


def test_trees_one_by_one():
    made = run("ffgb-trees").model.to_sklearn()
    x = rows("ffgb-trees")
    # 3 rounds of 3 clients, 4 trees in each function
    assert len(made.estimators_) == len(made.estimator_weights_) == 36
    parts = zip(made.estimator_weights_, made.estimators_, strict=True)
    total = sum(w * tree.predict(x) for w, tree in parts)
    np.testing.assert_allclose(total, made.decision_function(x), rtol=1e-5, atol=1e-5)


def test_votes_are_the_given_estimators():
    made = run("fedboost-estimators")
    voting = made.model.to_sklearn()
    given = made.algorithm.predictors.members
    assert voting.estimators_[0] is given[0]
    assert voting.estimators_[1] is not given[1]  # it has seen two of three classes
    np.testing.assert_allclose(sum(voting.weights), 1, rtol=1e-6)


def test_estimators_of_a_run_are_not_fitted_again():
    from sklearn.base import clone, is_classifier, is_regressor

    for name in ("ffgb-trees", "ffgb-trees-values"):
        made = run(name).model.to_sklearn()
        assert clone(made) is made
        assert is_classifier(made) == (name == "ffgb-trees") != is_regressor(made)
        with pytest.raises(fd.ModelError, match="trained by a run"):
            made.fit(rows(name), None)
        with pytest.raises(fd.DataError, match=r"x has shape \(2, 3\).*\(n, 6\)"):
            made.predict(np.zeros((2, 3)))


# -- ONNX ------------------------------------------------------------------------------------------


def tree_model(weight: float = 0.5) -> fd.Predictor:
    weights = torch.tensor([weight], dtype=torch.float64)
    form = forms.Ensemble(fd.Forest(trees=1), stump(), weights, VALUE)
    return fd.Predictor(form, VALUE)


def test_rows_on_a_threshold_go_left(tmp_path):
    tenth = np.float32(0.1)
    above, below = np.nextafter(tenth, np.float32(1)), np.nextafter(tenth, np.float32(0))
    x = np.array([[5, tenth], [5, below], [5, above], [-2, 1], [-1.9999999, 1], [np.nan, 1]])
    x = x.astype(np.float32)
    expected = [0.5, 0.5, 50, 5, 50, 50]  # half of the leaves; what is not a number goes right
    model = tree_model()
    assert model.predict(x).tolist() == expected
    assert model.to_sklearn().predict(x).tolist() == expected
    assert onnx_outputs(model, x, tmp_path / "m")["outputs"][:, 0].tolist() == expected


@pytest.mark.parametrize("name", ["ffgb-trees", "ffgb-trees-values"])
def test_rows_on_all_thresholds_of_a_run(name, tmp_path):
    model = models(name)[0]
    trees = model.form.functions
    inner = (trees.feature >= 0).nonzero().flatten()
    x = np.resize(rows(name), (3 * len(inner), 6))
    at, on = trees.feature[inner].numpy(), trees.threshold[inner].numpy()
    for k, values in enumerate((on, np.nextafter(on, np.inf), np.nextafter(on, -np.inf))):
        x[np.arange(len(inner)) + k * len(inner), at] = values
    assert len({*model.outputs(x)[:, 0].tolist()}) > 20
    found = onnx_outputs(model, x, tmp_path / "m")["outputs"]
    np.testing.assert_allclose(found, model.outputs(x), rtol=1e-6, atol=1e-6)


def test_the_graph_of_a_small_network(tmp_path):
    """relu(2 x_0 - 1) = 3 at x_0 = 2 and 0 at x_0 = 0; times (1, -1) plus (0, 5)."""
    onnx = pytest.importorskip("onnx")
    params = {
        "weight0": torch.tensor([[2.0, 0.0]]),
        "bias0": torch.tensor([-1.0]),
        "weight1": torch.tensor([[1.0], [-1.0]]),
        "bias1": torch.tensor([0.0, 5.0]),
    }
    model = fd.Predictor(forms.Parametric(fd.MLP((1,)), params), TWO, class_values=("no", "yes"))
    x = np.array([[2.0, 7.0], [0.0, 7.0]], np.float32)
    found = onnx_outputs(model, x, tmp_path / "m")
    assert found["outputs"].tolist() == [[3.0, 2.0], [0.0, 5.0]]
    # softmax of a difference of 1 and of -5
    expected = [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(5))]
    np.testing.assert_allclose(found["probabilities"][:, 0], expected, rtol=1e-5)
    saved = onnx.load(tmp_path / "m")
    assert [n.op_type for n in saved.graph.node][:4] == ["Cast", "Gemm", "Relu", "Gemm"]
    shape = saved.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in shape] == ["rows", 2]
    meta = {p.key: json.loads(p.value) for p in saved.metadata_props}
    assert meta == {"classes": ["no", "yes"]} and found["label"].tolist() == ["no", "yes"]


OUTPUTS = np.array([[0.2, 0.5, 0.1], [3.0, 0.0, -1.0], [1.0, 1.0, 1.0], [-9.0, -8.5, -80.0]])


@pytest.mark.parametrize(
    ("shares", "first"),
    [
        # of (0.2, 0.5, 0.1), which sum to 0.8: each gets 0.2 / 3 more
        (probabilities.simplex_shares, [0.2 + 0.2 / 3, 0.5 + 0.2 / 3, 0.1 + 0.2 / 3]),
        (probabilities.softmax, np.exp([0.2, 0.5, 0.1]) / np.exp([0.2, 0.5, 0.1]).sum()),
        (
            probabilities.sigmoid_shares,
            np.array([0.549834, 0.622459, 0.524979]) / (0.549834 + 0.622459 + 0.524979),
        ),
        (probabilities.as_they_are, [0.2, 0.5, 0.1]),
    ],
)
def test_probabilities(shares, first, tmp_path):
    """Outputs are the rows themselves."""
    model = fd.Predictor(linear(np.eye(3, dtype=np.float32).tolist()), fd.Spec((3,), 3, 3), shares)
    x = OUTPUTS.astype(np.float32)
    np.testing.assert_allclose(model.predict_proba(x)[0], first, rtol=1e-5)
    found = onnx_outputs(model, x, tmp_path / "m")["probabilities"]
    np.testing.assert_allclose(found, model.predict_proba(x), rtol=1e-5, atol=1e-7)
    estimator = model.to_sklearn()
    if shares is not probabilities.as_they_are:
        np.testing.assert_allclose(estimator.predict_proba(x), model.predict_proba(x), atol=1e-6)


def test_custom_probabilities_cannot_be_exported(tmp_path):
    model = fd.Predictor(linear([[1.0, 0.0], [0.0, 1.0]]), TWO, lambda z: z / z.sum())
    with pytest.raises(fd.ModelError, match="the model's own"):
        model.to_onnx(tmp_path / "m")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (fd.Identity(), [2, 3]),
        (fd.Identity(intercept=True), [2, 3, 1]),
        (fd.Polynomial(2), [1, 2, 3, 4, 6, 9]),
        (fd.Polynomial(3), [1, 2, 3, 4, 6, 9, 8, 12, 18, 27]),
    ],
)
def test_features(given, expected, tmp_path):
    """Of (2, 3), through weights that pick each of them."""
    size = given.size(VALUE)
    spec = fd.Spec((2,), None, size)
    model = fd.Predictor(forms.OnFeatures(given, torch.eye(size, dtype=torch.float64)), spec)
    x = np.array([[2.0, 3.0]], np.float32)
    assert model.predict(x).tolist() == [expected]
    assert model.to_torch()(torch.from_numpy(x)).tolist() == [expected]
    assert model.to_sklearn().predict(x).tolist() == [expected]
    assert onnx_outputs(model, x, tmp_path / "m")["outputs"].tolist() == [expected]


class Odd(features.Identity):
    """Not the map that it is derived from."""

    def size(self, spec):
        return 1

    def __call__(self, x, dtype=torch.float64, out=None):
        return x[:, :1].to(dtype)


def test_custom_feature_maps_cannot_be_exported(tmp_path):
    model = fd.Predictor(forms.OnFeatures(Odd(), torch.ones(1, 1)), VALUE)
    for method, arguments in (("to_torch", ()), ("to_sklearn", ()), ("to_onnx", (tmp_path / "m",))):
        with pytest.raises(fd.ModelError, match="the feature map Odd has no"):
            getattr(model, method)(*arguments)


class Unexportable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(2, 1))

    def forward(self, x):
        return torch.special.i1e(x @ self.a)


def test_a_module_that_pytorch_cannot_export(tmp_path):
    model = fd.Predictor(
        forms.Parametric(fd.models.Module(Unexportable()), {"a": torch.ones(2, 1)}), VALUE
    )
    with pytest.raises(fd.ModelError, match="no ONNX export of Unexportable"):
        model.to_onnx(tmp_path / "m")


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(fd.ModelError, match="cannot be written"):
        tree_model().to_onnx(tmp_path / "no" / "folder" / "m.onnx")


def test_without_the_package():
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "import foedus as fd, torch\n"
        "from foedus.export.forms import Parametric\n"
        "form = Parametric(fd.Linear(bias=False), {'weight': torch.ones(1, 2)})\n"
        "try: fd.Predictor(form, fd.Spec((2,), None, 1)).to_onnx('never')\n"
        "except fd.ModelError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "to_onnx needs the package onnx: pip install 'foedus[onnx]'"


def test_before_the_first_round_the_sum_of_trees_is_zero(tmp_path):
    form = forms.Ensemble(fd.Forest(), None, torch.zeros(0), TWO)
    model = fd.Predictor(form, TWO)
    x = np.ones((3, 2), np.float32)
    assert not model.outputs(x).any()
    assert not model.to_torch()(torch.from_numpy(x)).any()
    assert onnx_outputs(model, x, tmp_path / "m")["outputs"].tolist() == [[0.0, 0.0]] * 3
