"""Metrics: the numbers of scikit-learn, by group, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn import metrics as sk

import foedus as fd
from foedus.core.metrics import (
    CLASSIFICATION,
    REGRESSION,
    Predictions,
    higher_is_better,
    measured,
    metrics_of,
    over_clients,
)

SIZES = (40, 0, 7, 25, 1)


def classified(classes, weighted, seed=0):
    """Rows in groups of unequal size; scores are rounded, so that many are tied."""
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    given = np.round(rng.dirichlet(np.ones(classes), n), 1) + 0.05
    given /= given.sum(1, keepdims=True)
    y = rng.integers(0, classes, n)
    weight = rng.integers(0, 4, n) + 0.37 if weighted else None
    return Predictions(y, given, weight, np.repeat(np.arange(5), SIZES), 5, classes)


def valued(outputs, weighted, seed=0):
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    y = rng.standard_normal((n, outputs))
    weight = rng.integers(0, 4, n) + 0.37 if weighted else None
    return Predictions(
        y, y + rng.standard_normal((n, outputs)), weight, np.repeat(np.arange(5), SIZES), 5, None
    )


def parts(p):
    """The rows of each group as predictions of their own."""
    for a, b in zip(p.offsets[:-1], p.offsets[1:], strict=True):
        weight = None if p.weight is None else p.weight[a:b]
        yield Predictions(p.y[a:b], p.given[a:b], weight, None, 1, p.classes)


def one_against_rest(p):
    """The mean of binary AUCs over the classes that are some, but not all, of the rows."""
    found = []
    for c in [1] if p.classes == 2 else range(p.classes):
        if 0 < (p.y == c).sum() < len(p.y):
            found.append(sk.roc_auc_score(p.y == c, p.given[:, c], sample_weight=p.weight))
    return np.mean(found) if found else np.nan


def calibration_error(p):
    """Bin by bin, with the definition as it is written."""
    confidence, hit = p.given.max(1), p.given.argmax(1) == p.y
    w, total = p.w, 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            share = w[inside] / w[inside].sum()
            total += w[inside].sum() * abs(share @ hit[inside] - share @ confidence[inside])
    return total / w.sum()


def reference(name, p):
    """What scikit-learn gives for one group."""
    labels = np.arange(p.classes or 0)
    said = p.given.argmax(1)
    w = {"sample_weight": p.weight}
    kind, _, average = name.partition("_")
    if kind in ("precision", "recall", "f1"):
        score = getattr(sk, f"{kind}_score")
        if p.classes == 2 and not average:
            return score(p.y, said, pos_label=1, average="binary", zero_division=0, **w)
        return score(p.y, said, average=average or "macro", zero_division=0, **w)
    if name == "brier":
        return sk.brier_score_loss(p.y, p.given, labels=labels, **w)
    if name == "log_loss":
        return sk.log_loss(p.y, p.given, labels=labels, **w)
    return {
        "auc": lambda: one_against_rest(p),
        "ece": lambda: calibration_error(p),
        "balanced_accuracy": lambda: sk.balanced_accuracy_score(p.y, said, **w),
        "mae": lambda: sk.mean_absolute_error(p.y, p.given, **w),
        "rmse": lambda: sk.root_mean_squared_error(p.y, p.given, **w),
        "r2": lambda: sk.r2_score(p.y, p.given, **w),
    }[name]()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", CLASSIFICATION)
def test_metrics_of_classes_are_those_of_scikit_learn(name, classes, weighted):
    p = classified(classes, weighted)
    given = CLASSIFICATION[name].of(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        due = [reference(name, part) if len(part.y) else np.nan for part in parts(p)]
        whole = reference(name, Predictions(p.y, p.given, p.weight, classes=classes))
    if name.partition("_")[0] in ("precision", "recall", "f1") and classes == 2:
        last = next(q for q in list(parts(p))[-1:])
        if 1 not in (last.y[0], last.given[0].argmax()) and "_" not in name:
            due[-1] = np.nan  # class 1 is neither there nor predicted; scikit-learn says 0
    np.testing.assert_allclose(given, due, rtol=1e-12, atol=1e-14)
    alone = CLASSIFICATION[name].of(Predictions(p.y, p.given, p.weight, classes=classes))
    np.testing.assert_allclose(alone, [whole], rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", REGRESSION)
def test_metrics_of_values_are_those_of_scikit_learn(name, outputs, weighted):
    p = valued(outputs, weighted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        due = [reference(name, part) if len(part.y) else np.nan for part in parts(p)]
    np.testing.assert_allclose(REGRESSION[name].of(p), due, rtol=1e-12)


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_r2_of_a_constant_is_that_of_scikit_learn(off):
    y = np.full((4, 1), 3.0)
    p = Predictions(y, y + off)
    assert REGRESSION["r2"].of(p) == sk.r2_score(y, y + off)


def test_auc_of_all_classes_is_one_against_the_rest():
    p = classified(4, weighted=False)
    whole = Predictions(p.y, p.given, classes=4)
    assert CLASSIFICATION["auc"].of(whole) == pytest.approx(
        sk.roc_auc_score(p.y, p.given, multi_class="ovr", average="macro"), rel=1e-12
    )


def test_auc_by_hand():
    # positives 0.8, 0.5; negatives 0.5, 0.2: wins 1, 1, 1/2, 1 of four pairs
    given = np.array([0.8, 0.5, 0.5, 0.2])
    p = Predictions(np.array([1, 1, 0, 0]), np.stack([1 - given, given], 1), classes=2)
    assert CLASSIFICATION["auc"].of(p).tolist() == [3.5 / 4]


def test_probabilities_of_zero_give_a_finite_log_loss():
    p = Predictions(np.array([0]), np.array([[0.0, 1.0]]), classes=2)
    assert CLASSIFICATION["log_loss"].of(p)[0] == pytest.approx(-np.log(np.finfo(float).eps))


def test_metrics_of_many_groups():
    """Two hundred thousand rows of fifty thousand clients: a loop over clients would be noticed."""
    n = 200_000
    rng = np.random.default_rng(0)
    score, y = rng.random(n), rng.integers(0, 2, n)
    group = np.sort(rng.integers(0, 50_000, n))
    p = Predictions(y, np.stack([1 - score, score], 1), None, group, 50_000, 2)
    for metric in CLASSIFICATION.values():
        assert metric.of(p).shape == (50_000,)


def test_columns_over_clients_by_hand():
    values, ids = np.array([0.5, np.nan, 0.9, 1.0]), np.array([3, 5, 8, 9])
    found = over_clients("auc", values, ids, higher=True)
    # 10 % of the way through 0.5, 0.9, 1.0: a fifth of the way from the first to the second
    due = {
        "auc_mean": 0.8, "auc_worst": 0.5, "auc_worst_client": 3, "auc_worst_decile": 0.58,
        "auc_spread": np.sqrt((0.09 + 0.01 + 0.04) / 3),
    }  # fmt: skip
    assert found == pytest.approx(due)
    loss = over_clients("loss", values, ids, higher=False)
    assert (loss["loss_worst"], loss["loss_worst_client"]) == (1.0, 9)
    assert loss["loss_worst_decile"] == pytest.approx(0.98)
    assert all(np.isnan(v) for v in over_clients("auc", np.array([np.nan]), ids[:1], True).values())


@pytest.mark.parametrize(
    ("column", "higher"),
    [
        ("loss", False), ("own_loss", False), ("accuracy", True), ("own_auc_worst", True),
        ("mae_mean", False), ("f1_weighted", True), ("accuracy_spread", False),
        ("ece_worst_decile", False), ("residual", None), ("auc_worst_client", None),
    ],
)  # fmt: skip
def test_what_is_better(column, higher):
    assert higher_is_better(column) is higher


# -- what is refused -------------------------------------------------------------------------------


def anything(y, p):
    return 1.0


@pytest.mark.parametrize(
    ("given", "classes", "message"),
    [
        ("auc", 2, r"metrics='auc' must be a list, such as metrics=\['auc', my_function\]"),
        (["aucc"], 2, r"metrics\[0\]='aucc' is unknown; did you mean 'auc'\? \(allowed: auc, "),
        (["auc", "Balanced accuracy"], 2, r"metrics\[1\].*did you mean 'balanced_accuracy'"),
        (["auc"], None, r"'auc' is for classification, and this data has numbers.*mae, rmse, r2"),
        (["accuracy"], None, r"'accuracy' is for classification"),
        (["r2"], 3, r"'r2' is for regression, and this data has classes to predict; use some of"),
        (["mse"], 3, r"'mse' is for regression"),
        ([3], 2, r"metrics\[0\]=3 must be a name, such as 'auc', or a function"),
        ([lambda y, p: 0.0], 2, "has no name for a column of the history; define it with def"),
        ([anything, anything], 2, "there are two metrics 'anything'; give one another __name__"),
        ([sum, max, dict], 2, r"metrics\[2\]=<class 'dict'> must be a name"),
    ],
)
def test_what_is_no_metric(given, classes, message):
    with pytest.raises(fd.ConfigError, match=message):
        metrics_of(given, classes)


def test_a_function_must_not_take_the_name_of_a_column():
    def accuracy(y, p):
        return 0.0

    with pytest.raises(fd.ConfigError, match="must not be called 'accuracy'"):
        metrics_of([accuracy], 2)


def test_usual_and_repeated_names_are_one():
    assert [m.name for m in metrics_of(["loss", "accuracy", "auc", "auc"], 2)] == ["auc"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3), "metric 'own' on client 7 .* gave 3 numbers; return one"),
        ("0.5", "gave '0.5'; return a number"),
        (None, "gave None; return a number"),
        (ZeroDivisionError("by zero"), r"failed: ZeroDivisionError.*of shapes \(1,\) and \(1, 2\)"),
    ],
)
def test_functions_that_do_not_return_a_number_are_refused(value, message):
    def own(y, p):
        if isinstance(value, Exception):
            raise value
        return value

    (metric,) = metrics_of([own], 2)
    p = Predictions(np.array([1]), np.array([[0.2, 0.8]]), None, np.array([1]), 2, 2)
    with pytest.raises(fd.ConfigError, match=message):
        measured(metric, p, ["client 3", "client 7"].__getitem__)


def test_functions_are_given_weights_if_they_take_them():
    def weighed(y, p, sample_weight=None):
        return 0.0 if sample_weight is None else sample_weight.sum()

    (metric,) = metrics_of([weighed], None)
    p = Predictions(np.zeros((3, 1)), np.zeros((3, 1)), np.array([1.0, 2.0, 4.0]))
    assert measured(metric, p, str).tolist() == [7.0]
    assert measured(metric, Predictions(p.y, p.given), str).tolist() == [0.0]
