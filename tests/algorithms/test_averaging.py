"""The averaging methods against numbers worked out by hand: two clients, two local steps, two
rounds.

f_A'(w) = w - 2 (one row) and f_B'(w) = 4w - 2 (two rows), lr = 0.1, two full-batch steps from w =
0: A goes 0 -> 0.2 -> 0.38, B goes 0 -> 0.2 -> 0.32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus.base import random

HOW = {"model": fd.Linear(bias=False), "lr": 0.1, "steps": 2, "batch_size": None}


def weights(run: fd.Run) -> float:
    return float(run.state.w["weight"])


def after(algorithm: fd.Algorithm, fed: fd.Federation, rounds: int) -> fd.Run:
    return fd.run(algorithm, fed, rounds, evaluate_every=0)


def test_fedavg(two):
    assert weights(after(fd.FedAvg(**HOW), two, 1)) == pytest.approx((0.38 + 2 * 0.32) / 3)
    # From 0.34: A -> 0.506 -> 0.6554, B -> 0.404 -> 0.4424.
    assert weights(after(fd.FedAvg(**HOW), two, 2)) == pytest.approx((0.6554 + 2 * 0.4424) / 3)


def test_fedavg_uniform_weights(two):
    assert weights(after(fd.FedAvg(**HOW, weights="uniform"), two, 1)) == pytest.approx(0.35)


def test_fedavg_server_step_and_momentum(two):
    how = fd.FedAvg(**HOW, server_lr=0.5, server_momentum=0.9, weights="uniform")
    # v = 0.35, w = 0.175. Then A -> 0.3575 -> 0.52175, B -> 0.305 -> 0.383: mean move 0.277375.
    assert weights(after(how, two, 1)) == pytest.approx(0.175)
    assert weights(after(how, two, 2)) == pytest.approx(0.175 + 0.5 * (0.9 * 0.35 + 0.277375))


def test_client_momentum(two):
    # A: v = -2, w = 0.2; v = -1 - 1.8 = -2.8, w = 0.48. B: v = -2, w = 0.2; v = -1 - 1.2 = -2.2, w
    # = 0.42.
    assert weights(
        after(fd.FedAvg(**HOW, momentum=0.5, weights="uniform"), two, 1)
    ) == pytest.approx(0.45)


def test_weight_decay(two):
    # A: 0.2, then -1.8 + 0.2 = -1.6: 0.36. B: 0.2, then -1.2 + 0.2: 0.3.
    assert weights(
        after(fd.FedAvg(**HOW, weight_decay=1.0, weights="uniform"), two, 1)
    ) == pytest.approx(0.33)


def test_clipping(two):
    # Gradients of -2, -1.9 (A), -2, -1.6 (B) all exceed 1 in size: each step is 0.1.
    assert weights(after(fd.FedAvg(**HOW, clip=1.0), two, 1)) == pytest.approx(0.2)


def test_adam(two):
    # Adam's first step is lr * g / (|g| + eps); the second, with gradients g1, g2, by its
    # definition.
    def adam(g):
        w = m = s = 0.0
        for t in (1, 2):
            d = g(w)
            m, s = 0.9 * m + 0.1 * d, 0.999 * s + 0.001 * d * d
            w -= 0.1 * (m / (1 - 0.9**t)) / ((s / (1 - 0.999**t)) ** 0.5 + 1e-8)
        return w

    want = (adam(lambda w: w - 2) + 2 * adam(lambda w: 4 * w - 2)) / 3
    assert weights(after(fd.FedAvg(**HOW, optimizer="adam"), two, 1)) == pytest.approx(
        want, rel=1e-5
    )


def test_fedprox(two):
    # A: 0.2, then -1.8 + 0.2 = -1.6: 0.36. B: 0.2, then -1.2 + 0.2 = -1: 0.3.
    assert weights(after(fd.FedProx(**HOW, mu=1.0), two, 1)) == pytest.approx((0.36 + 2 * 0.3) / 3)
    # Round 2 from 0.32: A 0.32 -> 0.488 -> (-1.512 + 0.168) 0.6224; B -> 0.392 -> (-0.432 + 0.072)
    # 0.428.
    assert weights(after(fd.FedProx(**HOW, mu=1.0), two, 2)) == pytest.approx(
        (0.6224 + 2 * 0.428) / 3
    )


def test_scaffold_option_2(two):
    first, second = (after(fd.Scaffold(**HOW), two, r) for r in (1, 2))
    # c_A = (0 - 0.38) / 0.2, c_B = (0 - 0.32) / 0.2.
    assert weights(first) == pytest.approx(0.35)
    assert float(first.state.c["weight"]) == pytest.approx((-1.9 - 1.6) / 2)
    # A with c - c_A = 0.15: 0.35 -> 0.5 -> 0.635; B with -0.15: 0.35 -> 0.425 -> 0.47.
    assert weights(second) == pytest.approx((0.635 + 0.47) / 2)
    # c_A = -0.15 - 0.285 / 0.2 and c_B = 0.15 - 0.12 / 0.2.
    assert float(second.state.c["weight"]) == pytest.approx((-1.575 - 0.45) / 2)


def test_scaffold_option_1(two):
    first, second = (after(fd.Scaffold(**HOW, option=1), two, r) for r in (1, 2))
    # Both gradients at 0 are -2, so the corrections vanish in round 2: A -> 0.515 -> 0.6635, B ->
    # 0.41 -> 0.446.
    assert weights(first) == pytest.approx(0.35)
    assert float(first.state.c["weight"]) == pytest.approx(-2.0)
    assert weights(second) == pytest.approx((0.6635 + 0.446) / 2)
    assert float(second.state.c["weight"]) == pytest.approx((-1.65 - 0.6) / 2)


def test_scaffold_sends_the_difference_of_controls(two):
    """With one of two clients in the round, c moves by half of that client's change (|S| / N)."""
    run = next(
        r
        for s in range(20)
        if (r := fd.run(fd.Scaffold(**HOW), two, 1, seed=s, participation=0.5)).clients["states"][
            "slot"
        ][0]
        == 0
    )
    assert float(run.state.w["weight"]) == pytest.approx(0.38)
    assert float(run.state.c["weight"]) == pytest.approx(-1.9 / 2)


def test_feddyn(two):
    first, second = (after(fd.FedDyn(**HOW, alpha=1.0), two, r) for r in (1, 2))
    # A -> 0.36, B -> 0.3 as in FedProx; h = -0.33, w = 0.33 + 0.33.
    assert weights(first) == pytest.approx(0.66)
    assert float(first.state.h["weight"]) == pytest.approx(-0.33)
    # A, grad -0.36: 0.66 -> 0.758 -> 0.8364. B, grad -0.3: 0.66 -> 0.566 -> 0.519. Mean move
    # 0.0177.
    assert float(second.state.h["weight"]) == pytest.approx(-0.3477)
    assert weights(second) == pytest.approx(0.66 + 0.0177 + 0.3477)


def test_independent(two):
    run = after(fd.Independent(**HOW), two, 1)
    assert float(run.model_of(0).predict(np.ones((1, 1), np.float32))[0]) == pytest.approx(0.38)
    assert float(run.model_of(1).predict(np.ones((1, 1), np.float32))[0]) == pytest.approx(0.32)
    assert run.history[["bytes_up", "bytes_down", "messages_up"]].to_numpy().sum() == 0


def test_independent_momentum_survives_rounds(two):
    once, twice = (
        after(fd.Independent(**HOW | {"steps": 4}, momentum=0.5), two, 1),
        after(fd.Independent(**HOW, momentum=0.5), two, 2),
    )
    x = np.ones((1, 1), np.float32)
    assert float(once.model_of(0).predict(x)[0]) == pytest.approx(
        float(twice.model_of(0).predict(x)[0])
    )


def test_central(two):
    # Mean over three rows: f' = ((w - 2) + 2 (4w - 2)) / 3 = 3w - 2: 0 -> 0.2 -> 0.34.
    run = after(fd.Central(**HOW), two, 1)
    assert weights(run) == pytest.approx(0.34)
    assert run.history[["bytes_up", "bytes_down"]].to_numpy().sum() == 0


def test_epochs_use_every_row_once():
    """One epoch of batches of one row, lr so small that order does not matter: the sum of all row
    gradients.
    """
    x = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]], np.float32)
    fed = fd.Federation.from_clients([(x, x[:, 0])])
    run = after(fd.FedAvg(fd.Linear(bias=False), lr=1e-6, batch_size=1, epochs=2), fed, 1)
    assert weights(run) == pytest.approx(2e-6 * np.sum(x**2), rel=1e-4)


def test_last_batch_is_the_mean_of_the_rows_left():
    """Five equal rows in batches of two: three steps an epoch, all with the same mean gradient."""
    x = np.ones((5, 1), np.float32)
    fed = fd.Federation.from_clients([(x, 2 * x[:, 0])])
    run = after(fd.FedAvg(fd.Linear(bias=False), lr=0.1, batch_size=2), fed, 1)
    assert weights(run) == pytest.approx(2 * (1 - 0.9**3))


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_drift_free_methods_reach_the_global_optimum(seed, clients):
    """On unequal quadratics, Scaffold and FedDyn converge to the minimizer of the average; FedAvg
    does not, in general.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(clients):
        x = rng.normal(size=(8, 2)).astype(np.float32) * rng.uniform(0.5, 1.0, size=2).astype(
            np.float32
        )
        parts.append((x, (x @ rng.normal(size=2) * 2).astype(np.float32)))
    H = np.mean([x.T @ x / len(x) for x, _ in parts], axis=0)
    b = np.mean([x.T @ y / len(x) for x, y in parts], axis=0)
    best = np.linalg.solve(H, b)
    fed = fd.Federation.from_clients(parts)
    how = {"model": fd.Linear(bias=False), "lr": 0.1, "steps": 10, "batch_size": None}
    for algorithm in (fd.Scaffold(**how), fd.FedDyn(**how, alpha=1.0)):
        got = after(algorithm, fed, 100).state.w["weight"][0].numpy()
        gap = (got - best) @ H @ (got - best) / max(best @ H @ best, 1e-6)
        assert gap < 5e-3**2, algorithm


def test_fedavg_is_biased_where_scaffold_is_not(two):
    """The two clients pull to 2 and to 1/2; the minimizer of the average of f_A and f_B is 4/5."""
    fedavg, scaffold = (
        after(fd.FedAvg(**HOW | {"steps": 20}, weights="uniform"), two, 60),
        after(fd.Scaffold(**HOW | {"steps": 20}), two, 60),
    )
    assert weights(scaffold) == pytest.approx(0.8, abs=1e-3)
    assert abs(weights(fedavg) - 0.8) > 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fd.FedAvg(lr=0), r"lr=0 must be a positive finite number"),
        (lambda: fd.FedAvg(lr="0.1"), r"lr='0.1'"),
        (lambda: fd.FedAvg(epochs=0), r"epochs=0"),
        (lambda: fd.FedAvg(batch_size=-1), r"batch_size=-1"),
        (lambda: fd.FedAvg(optimizer="adm"), r"did you mean 'adam'"),
        (lambda: fd.FedAvg(momentum=1.0), r"momentum=1.0"),
        (lambda: fd.FedAvg(weight_decay=-1), r"weight_decay=-1"),
        (lambda: fd.FedAvg(server_lr=0), r"server_lr=0"),
        (lambda: fd.FedAvg(server_momentum=1), r"server_momentum=1"),
        (lambda: fd.FedAvg(weights="row"), r"did you mean 'rows'"),
        (lambda: fd.FedProx(mu=-0.1), r"mu=-0.1"),
        (lambda: fd.Scaffold(option=3), r"option=3"),
        (lambda: fd.Scaffold(momentum=0.9), r"option 2 needs plain SGD"),
        (lambda: fd.FedDyn(alpha=0), r"alpha=0"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(fd.ConfigError, match=message):
        make()


def test_the_start_is_that_of_the_seed(two):
    """Key 0 of the seed, which every client has too: a client alone starts from the same model as
    all together.
    """
    net = fd.MLP((3,))
    want = net.init(two.spec, random.fold(random.key(5), 0))
    start = fd.run(fd.FedAvg(net), two, 0, seed=5, evaluate_every=0).state.w
    assert all(torch.equal(start[k], v) for k, v in want.items())
