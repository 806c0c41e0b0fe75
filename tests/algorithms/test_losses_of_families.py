"""Losses beyond the usual ones, in the families: against SciPy, scikit-learn and PyTorch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, PoissonRegressor, QuantileRegressor
from torch import nn

import foedus as fd
from foedus.base.spec import Spec
from foedus.models.convexity import above_its_chords
from foedus.models.losses import LOSSES, loss_for

TREES = fd.Forest(trees=1, depth=1, extra=False, features=1.0)
DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(240, 3)).astype(np.float32)
COUNTS = DRAWS.poisson(np.exp(X @ [0.5, -0.3, 0.2] + 0.4)).astype(np.float32)
LABELS = (X @ DRAWS.normal(size=(3, 2)) + DRAWS.logistic(size=(240, 2)) > 0).astype(np.float32)
CLASSES = np.argmax(X @ DRAWS.normal(size=(3, 3)) + DRAWS.gumbel(size=(240, 3)), 1)
AMOUNTS = DRAWS.gamma(2.0, size=240).astype(np.float32)


def federation(x: np.ndarray, y: np.ndarray, classes: int | None = None) -> fd.Federation:
    """Three clients of 120, 72 and 48 rows."""
    data = fd.Data.from_arrays(x, y, x[:20], y[:20], classes=classes)
    ends, whose = np.array([0, 120, 192, 240]), np.arange(20)
    return fd.Federation(data, np.arange(240), ends, whose, np.array([0, 20, 20, 20]), np.arange(3))


def constants(y: np.ndarray, classes: int | None = None) -> fd.Federation:
    """Features say nothing: a model is a constant, and the least loss is that of one."""
    return federation(np.zeros((240, 1), np.float32), y, classes)


def least(loss, y: np.ndarray, outputs: int) -> np.ndarray:
    """The constant outputs of least loss, by SciPy."""
    target = torch.from_numpy(y)

    def mean(f):
        rows = torch.from_numpy(f).float().expand(len(y), outputs)
        return float(loss(rows, target).double().mean())

    found = minimize(mean, np.zeros(outputs), method="Nelder-Mead", options={"xatol": 1e-6})
    return found.x


CONSTANT = {
    "poisson": (COUNTS, None, np.log(COUNTS.mean())),  # exp(f) is the mean
    "bce": (LABELS, None, np.log(LABELS.mean(0) / (1 - LABELS.mean(0)))),  # sigmoid(f) is
    "quantile": (AMOUNTS, None, np.quantile(AMOUNTS, 0.5)),
    "huber": (AMOUNTS, None, least(LOSSES["huber"].value, AMOUNTS, 1)),
    "focal": (CLASSES, 3, least(LOSSES["focal"].value, CLASSES, 3)),
}


@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize("family", ["FFGB", "FedAvg"])
def test_constants_are_those_of_least_loss(name, family):
    y, classes, want = CONSTANT[name]
    fed = constants(y, classes)
    if family == "FFGB":
        step = 0.2 if name == "quantile" else 0.5
        algorithm = fd.FFGB(TREES, loss=name, step=step, weights="rows")
    else:
        lr = 0.2 if name == "quantile" else 0.5
        algorithm = fd.FedAvg(loss=name, lr=lr, batch_size=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "loss='focal' is not convex")
        run = fd.run(algorithm, fed, 300, evaluate_every=0)
    found = run.model.outputs(torch.zeros(1, 1)).numpy().ravel()
    if classes:  # shares of classes are known, not a constant that is added to all outputs
        found, want = found - found.mean(), want - want.mean()
    np.testing.assert_allclose(found, np.ravel(want), atol=0.03 if name == "quantile" else 2e-3)


@pytest.mark.parametrize("family", ["FedAvg", "FedNewton"])
def test_counts_are_those_of_a_poisson_regression(family):
    fed = federation(X, COUNTS)
    if family == "FedAvg":
        algorithm, rounds = fd.FedAvg(loss="poisson", lr=0.3, batch_size=None), 300
    else:
        # scikit-learn halves neither: its penalty is alpha/2 |w|^2 beside the mean
        algorithm = fd.FedNewton(fd.Identity(intercept=True), reg=1e-9, loss="poisson")
        rounds = 12
    model = fd.run(algorithm, fed, rounds, evaluate_every=0).model
    known = PoissonRegressor(alpha=0.0, tol=1e-10, max_iter=1000).fit(X, COUNTS)
    np.testing.assert_allclose(
        model.outputs(torch.from_numpy(X)).numpy().ravel(), np.log(known.predict(X)), atol=2e-3
    )


@pytest.mark.parametrize("family", ["FedAvg", "FedNewton", "function", "module"])
def test_several_labels_are_as_many_logistic_regressions(family):
    """PyTorch's mean over labels has the same minimum."""
    fed = federation(X, LABELS)
    losses = {"function": F.binary_cross_entropy_with_logits, "module": nn.BCEWithLogitsLoss()}
    if family == "FedNewton":
        algorithm = fd.FedNewton(fd.Identity(intercept=True), reg=1e-9, loss="bce")
    else:
        algorithm = fd.FedAvg(loss=losses.get(family, "bce"), lr=2.0, batch_size=None)
    model = fd.run(algorithm, fed, 15 if family == "FedNewton" else 400, evaluate_every=0).model
    found = model.outputs(torch.from_numpy(X)).numpy()
    for k in range(2):
        known = LogisticRegression(C=np.inf, tol=1e-8).fit(X, LABELS[:, k])
        np.testing.assert_allclose(found[:, k], known.decision_function(X), atol=5e-3)


def test_quantiles_are_those_of_scikit_learn():
    """Up to what is left of a constant step: the pinball loss is that of the linear program."""
    fed = federation(X, AMOUNTS)
    loss = fd.losses.Quantile(0.8)
    run = fd.run(fd.FedAvg(loss=loss, lr=0.02, batch_size=None), fed, 800, evaluate_every=0)
    known = QuantileRegressor(quantile=0.8, alpha=0.0).fit(X, AMOUNTS)
    mean = lambda f: float(loss.value(f.view(-1, 1), torch.from_numpy(AMOUNTS)).mean())  # noqa: E731
    least = mean(torch.from_numpy(known.predict(X)).float())
    assert least <= mean(run.model.outputs(torch.from_numpy(X))) <= 1.002 * least


@pytest.mark.parametrize("family", ["FedAvg", "FedNewton"])
def test_class_weights_are_those_of_scikit_learn(family):
    """Its mean is divided by the sum of the weights, which moves no minimum."""
    fed, weights = federation(X, CLASSES, 3), (0.5, 1.0, 3.0)
    loss = fd.losses.WeightedCrossEntropy(weights)
    if family == "FedAvg":
        algorithm, rounds = fd.FedAvg(loss=loss, lr=1.0, batch_size=None), 300
    else:
        algorithm = fd.FedNewton(fd.Identity(intercept=True), reg=1e-9, loss=loss)
        rounds = 12
    model = fd.run(algorithm, fed, rounds, evaluate_every=0).model
    known = LogisticRegression(C=np.inf, tol=1e-8, class_weight=dict(enumerate(weights)))
    shares = model.predict_proba(X)
    np.testing.assert_allclose(shares, known.fit(X, CLASSES).predict_proba(X), atol=2e-3)


# -- FFGB: any function, if it is convex -----------------------------------------------------------


@pytest.mark.parametrize(
    "own",
    [F.cross_entropy, nn.CrossEntropyLoss(), fd.losses.CrossEntropy()],
    ids=lambda loss: getattr(loss, "__name__", str(loss)),
)
def test_ffgb_takes_an_own_loss(own):
    fed = federation(X, CLASSES, 3)
    named = fd.run(fd.FFGB(TREES, step=2.0), fed, 5)
    found = fd.run(fd.FFGB(TREES, loss=own, step=2.0), fed, 5)
    rows = torch.from_numpy(X)
    torch.testing.assert_close(found.model.outputs(rows), named.model.outputs(rows))
    assert found.records.last("loss") == pytest.approx(named.records.last("loss"), rel=1e-5)


def test_ffgb_checks_a_loss_before_the_run():
    fed = federation(X, CLASSES, 3)
    for loss, message in (
        (fd.losses.WeightedCrossEntropy((1.0, 2.0)), "weights for 2 classes, the data has 3"),
        (lambda f, y: f.sum(), "is not a mean of the losses of single rows"),
        (lambda f, y: f.argmax(-1) == y, "which has no gradient"),
        ("poisson", "needs real targets"),
    ):
        with pytest.raises(fd.ConfigError, match=message):
            fd.run(fd.FFGB(TREES, loss=loss), fed, 1)


def not_convex(outputs, y):
    """-cos of the residual, which is 0 at 0 and curved downwards from pi / 2 on."""
    return 1 - torch.cos(outputs[:, 0] - y.flatten())


@pytest.mark.parametrize(
    ("loss", "y", "classes", "convex"),
    [
        ("cross_entropy", CLASSES, 3, True), ("logistic", CLASSES, 3, True),
        ("focal", CLASSES, 3, False), (fd.losses.Focal(0.0), CLASSES, 3, True),
        (fd.losses.WeightedCrossEntropy((1.0, 0.0, 5.0)), CLASSES, 3, True),
        ("squared", AMOUNTS, None, True), ("huber", AMOUNTS, None, True),
        ("quantile", AMOUNTS, None, True), ("poisson", COUNTS, None, True),
        ("bce", LABELS, None, True), (not_convex, AMOUNTS, None, False),
        (lambda f, y: (f[:, 0] - y.flatten()).abs().sqrt(), AMOUNTS, None, False),
        (lambda f, y: (f[:, 0] - y.flatten()) ** 4, AMOUNTS, None, True),
    ],
)  # fmt: skip
def test_a_loss_that_is_not_convex_is_warned_about(loss, y, classes, convex):
    spec = Spec((3,), classes, classes or (y.shape[1] if y.ndim > 1 else 1))
    assert above_its_chords(loss_for(loss, classes), spec) is not convex


@pytest.mark.parametrize("family", ["FFGB", "FFGBDistill"])
def test_the_warning_about_a_loss_that_is_not_convex(family):
    fed = federation(X, AMOUNTS)
    more = {"step": 0.5, "loss": not_convex}
    algorithm = fd.FFGB(TREES, **more)
    if family == "FFGBDistill":
        how = fd.Training(lr=0.01, batch_size=32)
        algorithm = fd.FFGBDistill(fd.MLP(4), X[:40], oracle=how, student=how, **more)
    with pytest.warns(UserWarning, match=f"loss=not_convex is not convex .* {family} runs, but"):
        fd.run(algorithm, fed, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd.run(fd.FFGB(TREES, loss="huber", step=0.5), fed, 1)


# -- FedNewton: a known second derivative ----------------------------------------------------------


@pytest.mark.parametrize(
    "loss", ["focal", "quantile", F.cross_entropy, nn.CrossEntropyLoss(), fd.losses.Focal(1.0)],
    ids=lambda loss: getattr(loss, "__name__", str(loss)),
)  # fmt: skip
def test_newton_says_that_it_does_not_know_the_curvature(loss):
    with pytest.raises(fd.ConfigError, match=r"its second derivative is not known.*'poisson'"):
        fd.FedNewton(fd.Identity(), loss=loss)


def test_newton_names_the_losses_it_knows():
    with pytest.raises(fd.ConfigError, match=r"did you mean 'logistic'.*bce, poisson"):
        fd.FedNewton(fd.Identity(), loss="logistics")
    with pytest.raises(fd.ConfigError, match="must be the name of a loss"):
        fd.FedNewton(fd.Identity(), loss=3)
    weights = fd.losses.WeightedCrossEntropy((1.0, 2.0))
    with pytest.raises(fd.ConfigError, match="weights for 2 classes"):
        fd.run(fd.FedNewton(fd.Identity(), loss=weights), federation(X, CLASSES, 3), 1)


def test_an_object_of_the_squared_loss_is_the_squared_loss():
    fed = federation(X, AMOUNTS)
    runs = [
        fd.run(fd.FedNewton(fd.Identity(), reg=0.1, loss=loss, solver="cg"), fed, 3)
        for loss in ("squared", fd.losses.Squared())
    ]
    assert torch.equal(runs[0].state.w, runs[1].state.w)
