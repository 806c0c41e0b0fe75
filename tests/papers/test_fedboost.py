"""The experiments of the FedBoost paper, at a small scale: what they compare, and the orders that
the paper claims.
"""

import numpy as np
import pytest

import foedus as fd
from foedus.data.catalog import locate
from foedus.papers import fedboost as paper


def test_point_masses_follow_the_power_law():
    fed = paper.point_masses(10, rows=2929)  # 1 + 1/2 + .. + 1/10 = 2.929
    assert fed.sizes.tolist() == [1000, 500, 333, 250, 200, 167, 143, 125, 111, 100]
    assert np.array_equal(fed.label_counts(), np.diag(fed.sizes))


def end(sampling, budget, corrected=False, domains=20, rounds=100):
    rows = paper.losses(0, domains, sampling, budget, rounds, corrected, measured=1)
    assert [r["round"] for r in rows] == [0, rounds]
    return rows[-1]["loss value"]


def test_weighted_sampling_is_below_uniform_and_both_reach_all():
    """Figure 4 with 20 domains. With the correction the bias of uniform sampling goes away."""
    everything, best = end("all", 20), paper.losses(0, 20, "all", 20, 2)[0]["best"]
    sizes = np.round(20_000 * (1 / np.arange(1, 21)) / (1 / np.arange(1, 21)).sum())
    assert best == pytest.approx(1 - ((sizes / sizes.sum()) ** 2).sum(), abs=1e-12)
    assert everything >= best - 1e-6
    assert end("uniform", 20) == pytest.approx(everything, abs=1e-6)
    for budget in (3, 12):
        assert end("weighted", budget) < end("uniform", budget)
        assert end("uniform", budget, corrected=True) < end("uniform", budget)
    assert (
        abs(end("uniform", 6, corrected=True) - everything)
        < 3e-3
        > abs(end("weighted", 6, corrected=True) - everything)
    )


def test_curves_start_together():
    curves = {s: paper.losses(0, 20, s, 6, 50) for s in paper.SAMPLINGS}
    assert len({c[0]["loss value"] for c in curves.values()}) == 1
    assert all(c[-1]["loss value"] < c[0]["loss value"] for c in curves.values())


@pytest.mark.skipif(
    locate("satimage") is None, reason="needs satimage: set FOEDUS_DATA to the folder of data sets"
)
def test_learnt_weights_beat_the_uniform_average_and_aflboost_the_worst_domain():
    table = {r["method"]: r for r in paper.classifiers(0, "satimage", 12, 60)}
    assert table["FedBoost, all sent"]["loss"] < table["uniform average"]["loss"]
    assert table["AFLBoost, all sent"]["worst domain"] < table["FedBoost, all sent"]["worst domain"]


@pytest.mark.skipif(
    locate("shakespeare") is None,
    reason="needs shakespeare: set FOEDUS_DATA to the folder of data sets",
)
def test_a_unigram_model_for_each_character():
    fed, members = paper.shakespeare(least=3000)
    assert len(fed) == len(members) > 10
    assert isinstance(members, fd.Densities)
    np.testing.assert_allclose(members.table.sum(1), 1, atol=1e-4)
