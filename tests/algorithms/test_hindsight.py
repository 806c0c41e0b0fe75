"""Regret: against pairs that SciPy and NumPy find."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

import foedus as fd


def federation(classes: int | None, seed: int = 0) -> fd.Federation:
    rng = np.random.default_rng(seed)
    parts = []
    for n in (7, 9, 12):
        x = rng.normal(size=(n, 4)).astype(np.float32)
        y = rng.integers(classes, size=n) if classes else rng.normal(size=n).astype(np.float32)
        parts.append((x, y))
    return fd.Federation.from_clients(parts, **({"classes": classes} if classes else {}))


def times(n: int, rounds: int) -> np.ndarray:
    return np.bincount(np.arange(rounds) % n, minlength=n)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns", [((0, 1), (2, 3)), (None, None)], ids=["apart", "the same"])
def test_squared_loss_against_one_large_least_squares_problem(bias, columns):
    fed, rounds = federation(None), 25
    model = fd.Linear(bias=bias)
    run = fd.run(
        fd.FedRes(model, model, shared=columns[0], private=columns[1], step=0.05),
        fed,
        rounds,
        evaluate_every=0,
    )
    rows, right, owner = [], [], []
    for i in range(3):
        k = fed.client_rows(i)
        x = fed.data.x_train[k].astype(float)
        g, own = (x if c is None else x[:, c] for c in columns)
        if bias:
            g, own = (np.c_[a, np.ones(len(a))] for a in (g, own))
        blocks = [np.zeros_like(own) for _ in range(3)]
        blocks[i] = own
        weight = np.sqrt(times(len(k), rounds) / rounds)
        rows.append(weight[:, None] * np.c_[(g, *blocks)])
        right.append(weight * fed.data.y_train[k])
        owner += [i] * len(k)
    matrix, right = np.concatenate(rows), np.concatenate(right)
    best = (matrix @ np.linalg.lstsq(matrix, right, rcond=None)[0] - right) ** 2
    found = fd.regret(run)
    np.testing.assert_allclose(found.per_client.best, np.bincount(owner, best), atol=1e-8)
    assert found.best == pytest.approx(best.sum() / 3, abs=1e-8)
    assert found.loss == pytest.approx(run.history.online_loss.iloc[-1], abs=1e-6)
    assert found.regret == pytest.approx(found.loss - found.best)


def test_logistic_loss_against_scipy():
    fed, rounds = federation(2, seed=3), 30
    run = fd.run(
        fd.FedRes(shared=(0, 1), private=(2, 3), loss="logistic"), fed, rounds, evaluate_every=0
    )

    def average(w: np.ndarray) -> float:
        total = 0.0
        for i in range(3):
            k = fed.client_rows(i)
            x, y = fed.data.x_train[k].astype(float), 2.0 * fed.data.y_train[k] - 1
            z = (
                np.c_[x[:, :2], np.ones(len(x))] @ w[:3]
                + np.c_[x[:, 2:], np.ones(len(x))] @ w[3 + 3 * i : 6 + 3 * i]
            )
            total += times(len(k), rounds) @ np.logaddexp(0, -y * z) / rounds / 3
        return total

    best = scipy.optimize.minimize(average, np.zeros(12), method="BFGS", options={"gtol": 1e-9}).fun
    assert fd.regret(run).best == pytest.approx(best, abs=1e-6)


def test_alone_and_erm():
    fed = federation(None)
    alone = fd.regret(
        fd.run(fd.FedRes(shared=(0, 1), private=(2, 3)).independent(), fed, 20, evaluate_every=0)
    )
    both = fd.regret(
        fd.run(fd.FedResERM(shared=(0, 1), private=(2, 3), radius=5.0), fed, 20, evaluate_every=0)
    )
    # all features for everyone leave less than a global model for half of them
    assert alone.best <= both.best


def test_what_has_no_regret():
    fed = federation(None)
    with pytest.raises(fd.FoedusError, match="needs a run of FedRes"):
        fd.regret(fd.run(fd.FedAvg(fd.Linear()), fed, 1))
    with pytest.raises(fd.FoedusError, match="linear models"):
        fd.regret(fd.run(fd.FedRes(fd.MLP(2)), fed, 1, evaluate_every=0))
    with pytest.raises(fd.FoedusError, match="has made no prediction"):
        fd.regret(fd.run(fd.FedRes(), fed, 1, participation=0.3, evaluate_every=0))


def test_batches_and_clients_in_any_order():
    """Losses are means over a batch, added up once a round; clients are told by their ids."""
    fed = federation(None)
    algorithm = fd.FedRes(shared=(0, 1), private=(2, 3), step=0.05, batch_size=2)
    runs = [fd.run(algorithm, f, 7, evaluate_every=0) for f in (fed, fed.select([2, 0, 1]))]
    first, second = (fd.regret(run) for run in runs)
    assert first.loss == pytest.approx(runs[0].history.online_loss.iloc[-1], abs=1e-6)
    assert second.per_client.client.tolist() == [0, 1, 2]
    np.testing.assert_allclose(first.per_client.to_numpy(), second.per_client.to_numpy(), atol=1e-6)
