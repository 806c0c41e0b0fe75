"""A trained model as scikit-learn sees it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.inspection import permutation_importance
from sklearn.metrics import (
    RocCurveDisplay,
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    classification_report,
    get_scorer,
    log_loss,
    r2_score,
    roc_auc_score,
)
from sklearn.utils.validation import check_is_fitted

import foedus as fd
from foedus.data.preprocess import Preprocessor
from foedus.export.forms import Parametric
from tests.export import tables
from tests.export.families import BINARY, ONE_VALUE, THREE, VALUES, X, Y, run

NAMES = ("low", "middle", "high")


def model(**names) -> fd.Predictor:
    made = run("fedavg-linear").model
    return fd.Predictor(made.form, made.spec, **names)


def test_it_is_a_fitted_classifier():
    made = model()
    check_is_fitted(made)
    assert is_classifier(made) and not is_regressor(made)
    assert made.classes_.tolist() == [0, 1, 2] and made.n_features_in_ == 6
    assert not hasattr(made, "feature_names_in_")
    assert clone(made) is made
    assert made.get_params() == {} and made.set_params() is made


def test_it_is_a_fitted_regressor():
    made = run("fedavg-linear-values").model
    check_is_fitted(made)
    assert is_regressor(made) and not is_classifier(made) and not hasattr(made, "classes_")
    expected = r2_score(ONE_VALUE.data.y_test, made.predict(ONE_VALUE.data.x_test))
    assert made.score(ONE_VALUE.data.x_test, ONE_VALUE.data.y_test) == expected
    several = run("fedavg-mlp-values").model
    assert several.score(X, VALUES) == r2_score(VALUES, several.predict(X))


def test_scores_count_rows_by_weight():
    made, weight = model(), np.arange(len(X))
    right = made.predict(X) == Y
    assert made.score(X, Y) == pytest.approx(right.mean())
    assert made.score(X, Y, weight) == pytest.approx((right * weight).sum() / weight.sum())
    assert right.mean() != pytest.approx((right * weight).sum() / weight.sum())


def test_names():
    """Of tables and of arrays, labels as they were written."""
    columns = tuple("abcdef")
    made = model(preprocess=Preprocessor(columns), class_values=NAMES)
    table = pd.DataFrame(X, columns=list(columns))[list("fcabde")]
    assert made.classes_.tolist() == list(NAMES)
    assert made.feature_names_in_.tolist() == list(columns) and made.n_features_in_ == 6
    numbers = model().predict(X)
    written = [NAMES[k] for k in numbers]
    assert len(set(numbers)) > 1 and made.prepared.predict(X).tolist() == numbers.tolist()
    assert made.predict(table).tolist() == made.predict(X).tolist() == written
    assert made.score(table, written) == made.score(X, written) == 1.0
    estimator = made.to_sklearn()
    assert estimator.classes_.tolist() == list(NAMES)
    assert estimator.feature_names_in_.tolist() == list(columns)
    assert estimator.predict(table).tolist() == written


@pytest.mark.parametrize("rows", ["table", "array"])
def test_tools_and_labels_as_they_were_written(rows):
    """Labels are texts; columns of the table, too."""
    fed = tables.federation()
    made, data = tables.run("ffgb-trees").model, fed.data
    if rows == "table":
        frame = tables.table(150, seed=8)
        x, y = frame.drop(columns=["outcome", "cost"]), frame.outcome.to_numpy()
    else:
        x, y = data.x_train, np.array(data.class_values)[data.y_train]
    said = made.predict(x)
    assert set(said) <= {"dead", "ill", "well"} and made.score(x, y) == (said == y).mean()
    assert made.score(x, y) == accuracy_score(y, said) > 0.6
    assert get_scorer("balanced_accuracy")(made, x, y) == balanced_accuracy_score(y, said)
    shares = made.predict_proba(x)
    want = roc_auc_score(y, shares, multi_class="ovr", labels=["dead", "ill", "well"])
    assert get_scorer("roc_auc_ovr")(made, x, y) == pytest.approx(want)
    assert log_loss(y, shares, labels=made.classes_) == -get_scorer("neg_log_loss")(made, x, y)
    assert set(classification_report(y, said, output_dict=True)) >= {"dead", "ill", "well"}

    found = permutation_importance(made, x, y, n_repeats=2, random_state=0).importances_mean
    assert len(found) == x.shape[1] and found.max() > 0.05
    calibrated = CalibratedClassifierCV(FrozenEstimator(made)).fit(x, y)
    assert calibrated.classes_.tolist() == ["dead", "ill", "well"]
    np.testing.assert_allclose(calibrated.predict_proba(x).sum(1), 1)
    assert (calibrated.predict(x) == y).mean() > 0.6


def test_permutation_importance_of_raw_columns():
    """A text that decides alone, and one that decides nothing."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.choice(["p", "q"], 60), "b": rng.choice(["u", "v"], 60)})
    y = np.where(frame.a == "p", "yes", "no")
    weight = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])  # a=p: the second class
    form = Parametric(fd.Linear(bias=False), {"weight": weight})
    preprocess = Preprocessor(("a", "b"), {"a": ("p", "q"), "b": ("u", "v")})
    made = fd.Predictor(
        form, fd.Spec((4,), 2, 2), preprocess=preprocess, class_values=("no", "yes")
    )
    assert made.score(frame, y) == 1.0
    found = permutation_importance(made, frame, y, n_repeats=5, random_state=0).importances_mean
    assert found[0] > 0.3 and found[1] == 0


def test_class_numbers_where_labels_are_expected_are_noticed():
    """Labels 3 and 7 are classes 0 and 1: no row of y_test would be right."""
    made = replace(run("fedavg-linear-two-classes").model, class_values=(3, 7))
    x, y = BINARY.data.x_test, BINARY.data.y_test
    with pytest.warns(UserWarning, match=r"such as 0; for class numbers.*use model.prepared.score"):
        assert made.score(x, y) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.score(x, np.array([3, 7])[y]) == made.prepared.score(x, y) > 0.5


@pytest.mark.parametrize("name", ["ffgb-trees", "fednewton-squared", "fedboost-estimators"])
def test_exported_estimators_answer_arrays_as_the_model_does(name):
    made = run(name).model
    made = fd.Predictor(made.form, made.spec, made.probabilities, class_values=NAMES)
    assert made.to_sklearn().predict(X).tolist() == made.predict(X).tolist()


def test_the_same_model_for_arrays_alone():
    """Labels 1 and 2 are classes 0 and 1 of the arrays: tools must not mix them up."""
    made = run("fedavg-linear-two-classes").model
    named = replace(made, class_values=(1, 2), preprocess=Preprocessor(tuple("abcdef")))
    assert named.classes_.tolist() == [1, 2] and named.prepared.classes_.tolist() == [0, 1]
    x, y = BINARY.data.x_test, BINARY.data.y_test
    want = average_precision_score(y, made.predict_proba(x)[:, 1])
    assert get_scorer("average_precision")(named.prepared, x, y) == pytest.approx(want)
    assert named.prepared.score(x, y) == made.score(x, y)


def test_it_is_not_fitted_again():
    made = model()
    with pytest.raises(fd.ModelError, match=r"trained by a federated run.*FrozenEstimator"):
        made.fit(X, Y)
    with pytest.raises(fd.ModelError, match="no settings; it was given \\['lr'\\]"):
        made.set_params(lr=1)


def test_permutation_importance_finds_the_columns_that_matter():
    """f = 3 x_0 - x_2: the other columns change nothing."""
    form = Parametric(fd.Linear(bias=False), {"weight": torch.tensor([[3.0, 0.0, -1.0]])})
    made = fd.Predictor(form, fd.Spec((3,), None, 1))
    y = X[:, :3] @ np.array([3.0, 0.0, -1.0])
    found = permutation_importance(made, X[:, :3], y, n_repeats=3, random_state=0).importances_mean
    assert found[0] > found[2] > 0.05 and found[1] == 0


def test_calibration_of_a_frozen_model():
    made = run("ffgb-trees").model
    calibrated = CalibratedClassifierCV(FrozenEstimator(made)).fit(X, Y)
    shares = calibrated.predict_proba(THREE.data.x_test)
    assert shares.shape == (40, 3)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert calibrated.classes_.tolist() == [0, 1, 2]


def test_metrics_take_it():
    made, data = run("fedavg-linear-two-classes").model, BINARY.data
    x, y = data.x_test, data.y_test
    assert get_scorer("accuracy")(made, x, y) == accuracy_score(y, made.predict(x))
    assert 0.5 < get_scorer("roc_auc")(made, x, y) <= 1
    assert RocCurveDisplay.from_estimator(made, x, y).roc_auc > 0.5


def test_a_clients_own_model_is_made_of_the_same_parts():
    """The global and the local model of FedRes, of their columns."""
    made = run("fedres")
    local = made.model_of(1)
    assert not torch.equal(local.outputs(X), made.model.outputs(X))
    x, state = torch.from_numpy(X), made.client_states().get(1)
    expected = x[:, [4, 0, 2]] @ state["seen"]["weight"].mT + state["seen"]["bias"]
    expected = expected + x[:, [1, 3]] @ state["local"]["weight"].mT + state["local"]["bias"]
    torch.testing.assert_close(local.outputs(X), expected)
