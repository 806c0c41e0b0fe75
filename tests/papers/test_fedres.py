"""FedRes' experiments, small: what the pictures show."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.papers import fedres


def test_appendix_c():
    curves = fedres.appendix_c(rounds=1500, rollouts=5)
    for name in ("FedRes.SGD", "FedRes.ERM"):
        np.testing.assert_allclose(curves[name]["w"][-1], [0, 1], atol=0.05)
    assert np.abs(curves["fictitious play"]["w"][-1] - [0, 1]).max() > 0.3
    assert curves["fictitious play"]["loss"][-1] > max(curves[n]["loss"][-1] for n in ("FedRes.SGD", "FedRes.ERM"))


def test_the_batched_least_squares_play_is_a_run_of_the_algorithm():
    rounds = 60
    feds = fedres.locked(rounds, 2)
    curves = fedres.appendix_c(rounds, 2)
    for name, kind in (("FedRes.ERM", fd.FedResERM), ("fictitious play", fd.FictitiousPlay)):
        algorithm = kind((0, 1), (2, 3), bias=False, start_global=(1, 0), start_local=(1, 0))
        losses = [fd.run(algorithm, fed, rounds, evaluate_every=0).history.online_loss.iloc[-1] for fed in feds]
        assert curves[name]["loss"][-1] == pytest.approx(np.mean(losses), rel=1e-4)


def test_example_2():
    table = fedres.example2(rounds=800)
    left, v2 = table.set_index("method")["loss in the last tenth"], table["E (v.x)^2"].iloc[0]
    assert left["global model alone"] == pytest.approx(v2, rel=0.15)
    assert left["FedRes"] < 0.01 * v2


def test_delay_is_in_a_lower_order_term():
    table = fedres.theorem2(horizons=(800, 3200), delay=8, rollouts=2, scales=(1.0,), rules=("aligned",))
    slope = fedres.slopes(table, last=2)
    assert slope[("aligned", 0)] == pytest.approx(slope[("aligned", 8)], abs=0.1)
    assert -0.8 < slope[("aligned", 0)] < -0.4  # T^(-1/2) in theory
    last = table[table["T"] == 3200].set_index(["rule", "delay"]).regret
    assert last[("aligned", 0)] < last[("aligned", 8)] < 1.5 * last[("aligned", 0)]


def test_a_study_goes_on_from_finished_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(fedres, "STEPS", (0.1,))
    monkeypatch.setattr(fedres, "TUNING", 1)
    monkeypatch.setattr(fedres, "load", lambda name: fd.load("digits"))
    keep = tmp_path / "cells.json"
    monkeypatch.setattr(fedres, "tuned", lambda data, names, late: dict.fromkeys(names, 0.1))
    first = fedres.study(("Independent", "FedRes"), ["digits"], [(5, 0), (5, 4)], keep, rollouts=2)
    assert first.accuracy.between(60, 100).all()
    alone = first[first.scheme == "Independent"].accuracy
    assert alone.iloc[0] == alone.iloc[1]  # never delayed

    def fail(*_):
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr(fedres, "accuracy", fail)
    assert fedres.study(("Independent", "FedRes"), ["digits"], [(5, 0), (5, 4)], keep, rollouts=2).equals(first)


def test_least_squares_without_steps(monkeypatch):
    """Both are far above chance on tasks of digits."""
    data = fd.load("digits")
    monkeypatch.setattr(fedres, "load", lambda name: data)
    table = fedres.least_squares(["digits"], clients=5, rollouts=2).iloc[0]
    assert 85 < table.FedRes <= 100 and 85 < table.Independent <= 100
