"""The experiments of the FedBoost paper, at a small scale: what they compare, and the orders that
the paper claims.
"""

import functools

import numpy as np
import pandas as pd
import pytest

import foedus as fd
from foedus.data.catalog import locate
from foedus.papers import fedboost as paper
from foedus.papers.item import Found, Missing


def test_point_masses_follow_the_power_law():
    fed = paper.point_masses(10, rows=2929)  # 1 + 1/2 + .. + 1/10 = 2.929
    assert fed.sizes.tolist() == [1000, 500, 333, 250, 200, 167, 143, 125, 111, 100]
    assert np.array_equal(fed.label_counts(), np.diag(fed.sizes))


@functools.cache
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
def test_learned_weights_beat_the_uniform_average_and_aflboost_the_worst_domain():
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


# -- Figure 5 and claims, by hand ------------------------------------------------------------------


@pytest.fixture
def play(monkeypatch):
    """Three characters with words of their own, and one in common."""
    lines = {"ann": ["yes yes no"] * 12, "bob": ["no"] * 20, "cy": ["well no yes"] * 8}
    users = [{"id": k, "speeches": v} for k, v in lines.items()]
    monkeypatch.setattr(fd, "load_speeches", lambda: users)


def test_mixtures_that_need_no_learning(play):
    found = {r["mixture"]: r["perplexity"] for r in paper.unigrams(0, "none", 0, 0.01, 10)}
    fed, members = paper.shakespeare(10)
    table, test = members.table.double().numpy(), fed.data.y_test
    uniform = np.exp(-np.log(table.mean(0)[test]).mean())
    assert found["uniform mixture"] == pytest.approx(uniform, rel=1e-6)
    # 0.9 of a character's words and 0.1 of any: weighted by their numbers, that is the same of all
    assert found["mixture by numbers of words"] == pytest.approx(
        found["one model of all text"], rel=1e-6
    )
    assert found["one model of all text"] < found["uniform mixture"]


@pytest.mark.parametrize(("sampling", "budget"), [("all", {}), ("weighted", {"budget": 1.5})])
def test_unigrams_have_a_curve_and_the_perplexity_of_words_held_out(play, sampling, budget):
    """C is half of the three characters."""
    rows = paper.unigrams(0, sampling, 40, 0.1, 10)
    curve = [r for r in rows if "round" in r]
    assert [r["round"] for r in curve] == [0, *range(2, 41, 2)]
    if sampling == "all":
        assert curve[-1]["last"] < curve[0]["last"] == curve[0]["average"]
    fed, members = paper.shakespeare(10)
    algorithm = fd.FedBoost(members, sampling=sampling, step=0.1, measure_every=2, **budget)
    run = fd.run(algorithm, fed, 40, evaluate_every=0)
    last = run.state.alpha.double() @ members.table.double()
    [average, end] = [r for r in rows if "mixture" in r]
    assert end["mixture"] == f"{sampling}, last weights"
    assert end["perplexity"] == pytest.approx(
        float(last[fed.data.y_test].log().neg().mean().exp()), rel=1e-5
    )
    assert average["mixture"] == f"{sampling}, average weights"
    assert average["perplexity"] != pytest.approx(end["perplexity"], rel=1e-5)


def budgets(weighted: dict[int, float], uniform: dict[int, float]) -> Found:
    rows = [("weighted", c, v) for c, v in weighted.items()]
    rows += [("uniform", c, v) for c, v in uniform.items()] + [("all", 100, 0.2)]
    return Found(
        pd.DataFrame(
            {"sampling": s, "budget": c, "loss value": v, "round": r, "domains": 100, "seed": 0}
            for s, c, v in rows
            for r in (0, 5)
        )
    )


def test_the_worst_budget_from_a_share_on_counts():
    found = budgets({60: 0.2, 80: 0.21}, {60: 0.203, 80: 0.2})
    # against 0.2 with all sent: 0.01 and 0.003
    assert paper._as_all(0.6, 0.01 + 1e-9)(found) == (True, "uniform +0.00300, weighted +0.01000")
    assert paper._as_all(0.6, 0.009)(found)[0] is False
    assert paper._as_all(0.8, 0.0101)(found) == (True, "uniform +0.00000, weighted +0.01000")
    with pytest.raises(Missing, match="C = 70"):
        paper._as_all(0.7, 1.0)(found)
