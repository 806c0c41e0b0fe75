from __future__ import annotations

import numpy as np
import pytest

from foedus.data import synthetic_leaf, synthetic_piecewise
from foedus.errors import DataError


def test_leaf_shapes_and_sizes():
    fed = synthetic_leaf(1, 1, clients=20, seed=3)
    assert fed.spec.shape == (60,)
    assert fed.spec.classes == 10
    assert len(fed) == 20
    total = fed.sizes + fed.test_sizes
    assert total.min() >= 50
    assert np.array_equal(fed.test_sizes, np.round(total * 0.1))
    again, other = (
        synthetic_leaf(1, 1, clients=20, seed=3),
        synthetic_leaf(1, 1, clients=20, seed=4),
    )
    assert np.array_equal(fed.data.x_train, again.data.x_train)
    assert np.array_equal(fed.data.y_train, again.data.y_train)
    assert fed.data.x_train.shape != other.data.x_train.shape


def test_leaf_sizes_are_lognormal():
    total = np.log(synthetic_leaf(clients=2000, features=2, classes=2, test=0).sizes - 50 + 0.5)
    assert abs(np.median(total) - 4) < 0.2
    assert abs(total.std() - 2) < 0.2


def test_leaf_rows_and_covariance():
    fed = synthetic_leaf(clients=10, rows=20000, iid=True, test=0)
    assert len(fed.rows) == 20000
    assert fed.sizes.min() >= 2
    x = fed.data.x_train
    assert np.allclose(x.mean(0), 0, atol=0.05)
    assert np.allclose(x.var(0), np.arange(1, 61) ** -1.2, rtol=0.06)
    assert np.abs(np.corrcoef(x[:, :5].T) - np.eye(5)).max() < 0.05


def test_leaf_beta_moves_features_and_alpha_moves_models():
    def centers(beta):
        fed = synthetic_leaf(0, beta, clients=300, rows=30000, test=0, features=30)
        return np.stack([fed.data.x_train[fed.client_rows(k)].mean(0) for k in range(300)])

    # The mean of client k has variance beta^2 between clients (over all features alike) and 1
    # within.
    assert abs(centers(0).mean(1).std() - 1 / np.sqrt(30)) < 0.1
    assert abs(centers(3).mean(1).std() - 3) < 0.4
    assert abs(centers(3).std(1).mean() - 1) < 0.1


def test_leaf_labels_are_linear_where_all_share_a_model():
    from sklearn.linear_model import LogisticRegression

    def accuracy(**options):
        fed = synthetic_leaf(clients=10, rows=3000, features=10, classes=4, **options)
        d = fed.data
        return LogisticRegression(max_iter=500).fit(d.x_train, d.y_train).score(d.x_test, d.y_test)

    assert accuracy(iid=True) > 0.9 > accuracy(alpha=1, beta=1)


def test_leaf_labels_per_client():
    fed = synthetic_leaf(1, 1, clients=15, rows=6000, per_client=3)
    assert ((fed.label_counts() > 0).sum(1) == 3).all()
    assert len(fed.rows) + len(fed.test_rows) == 6000


def test_piecewise_homogeneous():
    fed = synthetic_piecewise(seed=1)
    d = fed.data
    assert len(fed) == 20
    assert set(fed.sizes) == {500}
    assert d.x_train.shape == (10000, 10)
    assert d.x_test.shape == (2500, 10)
    for x, y in ((d.x_train, d.y_train), (d.x_test, d.y_test)):
        residual = y - np.minimum(-x.sum(1), x.sum(1))
        assert abs(residual.mean()) < 0.03
        assert abs(residual.var() - 0.2) < 0.02
    assert fed.test_sizes.sum() == 2500
    exact = synthetic_piecewise(test_noise=0).data
    assert np.allclose(exact.y_test, -np.abs(exact.x_test.sum(1)), atol=1e-4)


def test_piecewise_shifts_have_variance_alpha_and_beta():
    fed = synthetic_piecewise(alpha=4, beta=0.25, clients=400, rows=40000, noise=0.01, seed=2)
    x, y = fed.data.x_train, fed.data.y_train
    centers = np.stack([x[fed.client_rows(k)].mean(0) for k in range(400)])
    assert abs(centers.var() - (4 + 1 / 100)) < 0.25
    weights = []
    for k in range(400):
        xk, yk = x[fed.client_rows(k)], y[fed.client_rows(k)]
        side = np.sign(xk @ np.ones(10))
        for _ in range(50):  # alternate between the sign of w'x and least squares: y = -|w'x|
            w = np.linalg.lstsq(xk * -side[:, None], yk, rcond=None)[0]
            side = np.sign(xk @ w)
        if np.abs(np.abs(xk @ w) + yk).mean() < 0.2:
            weights.append(w if w.sum() > 0 else -w)
    weights = np.array(weights)
    assert len(weights) > 200
    assert abs(weights.mean() - 1) < 0.05
    assert abs(weights.var() - 0.25) < 0.04
    d = fed.data  # the test part knows neither shift
    assert abs(d.x_test.mean()) < 0.05
    assert np.abs(d.y_test + np.abs(d.x_test.sum(1))).mean() < 0.1


@pytest.mark.parametrize(
    ("make", "options", "word"),
    [
        (synthetic_leaf, {"alpha": -1}, "alpha=-1"),
        (synthetic_leaf, {"clients": 0}, "clients=0"),
        (synthetic_leaf, {"per_client": 11}, "per_client=11"),
        (synthetic_leaf, {"rows": 10}, "rows=10"),
        (synthetic_leaf, {"test": 1}, "test=1"),
        (synthetic_piecewise, {"beta": float("nan")}, "beta=nan"),
        (synthetic_piecewise, {"rows": 5}, "rows=5"),
    ],
)
def test_settings_out_of_range(make, options, word):
    with pytest.raises(DataError, match=word):
        make(**options)
