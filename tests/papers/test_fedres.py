"""FedRes' experiments, small: what the pictures show."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.papers import fedres


def ends(name, rounds, rollouts):
    rows = fedres.appendix_c(0, name, rounds, rollouts, 1.0, "adagrad")
    last = [r for r in rows if r["round"] == rounds]
    return last[0]["average loss"], [
        next(r["w"] for r in last if r["component"] == k) for k in ("first", "second")
    ]


def test_appendix_c():
    found = {name: ends(name, 1500, 5) for name in ("FedRes.SGD", "FedRes.ERM", "fictitious play")}
    for name in ("FedRes.SGD", "FedRes.ERM"):
        np.testing.assert_allclose(found[name][1], [0, 1], atol=0.05)
    assert np.abs(np.subtract(found["fictitious play"][1], [0, 1])).max() > 0.3
    assert found["fictitious play"][0] > max(found[n][0] for n in ("FedRes.SGD", "FedRes.ERM"))


def test_the_batched_least_squares_play_is_a_run_of_the_algorithm():
    rounds = 60
    feds = fedres.locked(rounds, 2)
    for name, kind in (("FedRes.ERM", fd.FedResERM), ("fictitious play", fd.FictitiousPlay)):
        algorithm = kind((0, 1), (2, 3), bias=False, start_global=(1, 0), start_local=(1, 0))
        losses = [
            fd.run(algorithm, fed, rounds, evaluate_every=0).history.online_loss.iloc[-1]
            for fed in feds
        ]
        assert ends(name, rounds, 2)[0] == pytest.approx(np.mean(losses), rel=1e-4)


def test_example_2():
    (alone,), (both,) = (
        fedres.example2(0, m, 10, 800, 5) for m in ("global model alone", "FedRes")
    )
    v2 = alone["E (v.x)^2"]
    assert alone["loss in the last tenth"] == pytest.approx(v2, rel=0.15)
    assert both["loss in the last tenth"] < 0.01 * v2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("short", "long", "delay"), [(150, 600, 4), pytest.param(500, 2000, 8, marks=pytest.mark.slow)]
)
def test_delay_is_in_a_lower_order_term(short, long, delay):
    regret = {
        (T, d): fedres.theorem2(0, T, "aligned", d, 2, 0.5)[0]["regret"]
        for T in (short, long)
        for d in (0, delay)
    }
    slope = {
        d: np.log(regret[long, d] / regret[short, d]) / np.log(long / short) for d in (0, delay)
    }
    assert slope[0] == pytest.approx(slope[delay], abs=0.1)
    assert -0.8 < slope[0] < -0.4  # T^(-1/2) in theory
    assert regret[long, 0] < regret[long, delay] < 1.5 * regret[long, 0]


@pytest.fixture
def digits(monkeypatch):
    data = fd.load("digits")
    monkeypatch.setattr(fedres, "load", lambda name: data)


def test_accuracies_and_steps(digits):
    (row,) = fedres.accuracy(0, "digits", "FedRes", 5, 4, 0.1, rounds=100, rollouts=2)
    assert 60 < row["accuracy"] <= 100 and row["accuracy spread"] >= 0
    grid = fedres.steps(
        0, "digits", "Independent", 0, rounds=50, rollouts=2, clients=5, grid=[1e-4, 0.1]
    )
    assert grid[1]["accuracy"] > grid[0]["accuracy"] and [r["chosen"] for r in grid] == [0, 1]
    # more clients than rows
    assert fedres.accuracy(0, "digits", "FedRes", 10_000, 0, 0.1, rounds=1, rollouts=1) == []


def test_least_squares_without_steps(digits):
    """Both are far above chance on tasks of digits."""
    found = {
        r["scheme"]: r["accuracy"]
        for r in fedres.least_squares(0, "digits", clients=5, rollouts=2, ridge=0.03)
    }
    assert 85 < found["FedRes"] <= 100 and 85 < found["Independent"] <= 100


def test_a_bandit_cell():
    (row,) = fedres.bandit(0, 60, "squarecb", "both", 3)
    assert row["case"] == "squarecb, both" and 0 < row["regret"] < 1
