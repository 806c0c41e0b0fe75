"""The experiments of the FedBoost paper, at a small scale: what they compare, and the orders that the paper claims."""

import numpy as np
import pytest

import foedus as fd
from foedus.data.datasets import locate
from foedus.papers import fedboost as paper


def test_point_masses_follow_the_power_law():
    fed = paper.point_masses(10, rows=2929)  # 1 + 1/2 + .. + 1/10 = 2.929
    assert fed.sizes.tolist() == [1000, 500, 333, 250, 200, 167, 143, 125, 111, 100]
    assert np.array_equal(fed.label_counts(), np.diag(fed.sizes))


def test_weighted_sampling_is_below_uniform_and_both_reach_all():
    """Figure 4 with 20 domains; the last row sends everything. With the correction the bias of uniform sampling goes away."""
    plain, corrected = (paper.figure4(20, rounds=200, corrected=c) for c in (False, True))
    few = plain[plain["C"].between(3, 19)]
    assert (few["weighted"] < few["uniform"]).all()
    assert plain["uniform"].iloc[-1] == pytest.approx(plain["all"].iloc[-1], abs=1e-6)
    assert (plain["all"] >= plain["best"] - 1e-6).all()
    half = corrected[corrected["C"] >= 6]
    assert (half[["uniform", "weighted"]].sub(half["all"], axis=0).abs() < 3e-3).all().all()
    assert (corrected["uniform"].iloc[:-1] < plain["uniform"].iloc[:-1]).all()


def test_curves_start_together():
    curves = paper.figure3(20, budget=6, rounds=50)
    assert {c["objective"].iloc[0] for c in curves.values()} == {curves["all"]["objective"].iloc[0]}
    assert all(c["objective"].iloc[-1] < c["objective"].iloc[0] for c in curves.values())


@pytest.mark.skipif(locate("satimage") is None, reason="needs satimage: set FOEDUS_DATA to the folder of data sets")
def test_learnt_weights_beat_the_uniform_average_and_aflboost_the_worst_domain():
    table = paper.classifiers("satimage", rounds=60).set_index("method")
    assert table.loc["FedBoost, all sent", "loss"] < table.loc["uniform average", "loss"]
    assert table.loc["AFLBoost, all sent", "worst domain"] < table.loc["FedBoost, all sent", "worst domain"]


@pytest.mark.skipif(locate("shakespeare") is None, reason="needs shakespeare: set FOEDUS_DATA to the folder of data sets")
def test_a_unigram_model_for_each_character():
    fed, members = paper.shakespeare(least=3000)
    assert len(fed) == len(members) > 10
    assert isinstance(members, fd.Densities)
    np.testing.assert_allclose(members.table.sum(1), 1, atol=1e-4)
