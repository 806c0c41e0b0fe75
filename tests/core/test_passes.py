"""Full passes: each client is asked once, in any cohorts and with any delays, and the average is
that of all.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import testing
from foedus.aggregation.secure.aggregator import SecureAggregator
from foedus.base import random, tree
from foedus.core.passes import iterate

from ..algorithms import twins_families as twins

SEED = 3


def federation(sizes):
    """Client i has rows of its own value, 1.5^i."""
    parts = [(np.full((n, 1), 1.5**i, np.float32), np.zeros(n, np.float32)) for i, n in sizes]
    return fd.Federation.from_clients(parts)


def of_sizes(sizes):
    return federation(list(enumerate(sizes)))


@dataclass(frozen=True)
class TwoPasses(fd.Algorithm):
    """u <- the mean of u + x_i, then of 0.037 u x_i: other for other clients, or an older u."""

    def moved(self, client, u):
        x = (client.data.weight * client.data.x[:, 0].double()).sum() / client.data.count
        return u + x, None

    def scaled(self, client, u):
        x = (client.data.weight * client.data.x[:, 0].double()).sum() / client.data.count
        return 0.037 * u * x, None

    def start(self, clients):
        return fd.State(u=torch.ones((), dtype=torch.float64), ends=[])

    def round(self, clients, state):
        return iterate(self.iteration, clients, state)

    def iteration(self, passes, state):
        u = passes.mean(self.moved, u=state.u)
        u = passes.mean(self.scaled, u=u)
        ends = [*state.ends, [passes.began, passes.clients.round, passes.everyone]]
        return state.replace(u=u, ends=ends)


def expected(sizes, iterations):
    """By hand: u <- 0.037 (u + m) m with m = sum_i n_i 1.5^i / sum_i n_i."""
    m, u = np.average([1.5**i for i in range(len(sizes))], weights=sizes), 1.0
    for _ in range(iterations):
        u = 0.037 * (u + m) * m
    return u


CLIENTS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 4)), min_size=2, max_size=7
)


@settings(max_examples=60, deadline=None)
@given(clients=CLIENTS, share=st.sampled_from([0.2, 0.5, 0.8, 1.0]), seed=st.integers(0, 20))
def test_a_pass_is_the_average_of_all_whoever_comes_and_however_late(clients, share, seed):
    """And it ends in the round of the last answer to it, with one message of each client."""
    sizes, up, down = zip(*clients, strict=True)
    late, n = twins.Delays(up, down), len(sizes)
    ends = twins.iterations_end(3, 2, seed, n, share, late)
    options = {"participation": share, "engine": late.engine, "seed": seed, "evaluate_every": 0}
    fed = of_sizes(sizes)
    run = fd.run(TwoPasses(), fed, ends[-1], **options)
    assert [end for _, end, _ in run.state.ends] == ends
    assert [began for began, _, _ in run.state.ends] == [1, *(end + 1 for end in ends[:-1])]
    assert all(everyone for *_, everyone in run.state.ends)
    assert float(run.state.u) == pytest.approx(expected(sizes, 3), rel=1e-12)
    sent = run.history.messages_up
    assert [sent[end] for end in ends] == [2 * n, 4 * n, 6 * n]
    waiting = run.history.get("waiting")
    assert waiting is None or waiting.isna()[[0, *ends]].all()


def test_punctual_replies_of_all_take_one_round():
    run = fd.run(TwoPasses(), of_sizes([1, 3, 2]), 4, evaluate_every=0)
    assert run.state.ends == [[t, t, True] for t in (1, 2, 3, 4)]
    assert "waiting" not in run.history and "passes" not in run.state
    assert float(run.state.u) == pytest.approx(expected([1, 3, 2], 4), rel=1e-12)


def test_a_run_that_is_resumed_within_a_pass_is_the_same(tmp_path):
    sizes, late = [1, 3, 2, 2, 5, 1], twins.Delays((3, 0, 1, 0, 2, 0), (0, 2, 0, 1, 0, 3))
    options = {"participation": 0.5, "engine": late.engine, "seed": 4, "evaluate_every": 0}
    fed = of_sizes(sizes)
    whole = fd.run(TwoPasses(), fed, 40, **options)
    first = whole.state.ends[0][1]
    assert first > 8
    for stop in range(1, first + 1):
        path = tmp_path / f"{stop}.safetensors"
        begun = fd.run(TwoPasses(), fed, stop, checkpoint=path, **options)
        assert ("passes" in begun.state) == (stop < first)
        resumed = fd.run(TwoPasses(), fed, 40, checkpoint=path, resume=True, **options)
        assert torch.equal(resumed.state.u, whole.state.u)
        assert resumed.history.bytes_up.tolist() == whole.history.bytes_up.tolist()


@settings(max_examples=25, deadline=None)
@given(n=st.integers(4, 9), share=st.sampled_from([0.5, 0.6, 0.8]), seed=st.integers(0, 9))
def test_secure_sums_are_over_disjoint_groups_of_two_or_more(n, share, seed):
    """So nobody's reply is alone in a sum, nor the difference of two sums."""
    sizes, groups, real = [1 + i % 3 for i in range(n)], [], SecureAggregator._summed

    def noted(self, trip, weights):
        groups.append((trip.step, trip.ids.tolist()))
        return real(self, trip, weights)

    fed = of_sizes(sizes)
    about = {"seed": seed, "participation": share, "evaluate_every": 0}
    with mock.patch.object(SecureAggregator, "_summed", noted):
        run = fd.run(
            TwoPasses(), fed, 100, aggregation=fd.SecureAggregation(bits=40, range=1e4), **about
        )
    done = len(run.state.ends)
    assert done > 0
    assert float(run.state.u) == pytest.approx(expected(sizes, done), rel=1e-4)
    assert all(len(ids) >= 2 for _, ids in groups)
    for step in ("moved", "scaled"):
        asked = [i for name, ids in groups if name == step for i in ids]
        for k in range(done):  # each pass has asked each client once
            assert sorted(asked[k * n : (k + 1) * n]) == list(range(n))


def test_pairs_of_an_odd_number_are_refused():
    fed = of_sizes([1, 2, 3, 1, 2])
    with pytest.raises(fd.ConfigError, match="2 of 5 clients a round: pairs of an odd number"):
        fd.run(TwoPasses(), fed, 3, participation=0.4, aggregation=fd.SecureAggregation())


def test_a_robust_mean_is_that_of_the_round_and_not_of_late_replies():
    """Three of five clients: their median, and not everyone's."""
    fed = of_sizes([2, 2, 2, 2, 2])
    about = {"participation": 0.6, "seed": SEED, "evaluate_every": 0}
    run = fd.run(TwoPasses(), fed, 1, aggregation=fd.Median(), **about)
    middle = 1.5 ** sorted(twins.cohort(SEED, 1, 5, 0.6))[1]
    assert float(run.state.u) == pytest.approx(0.037 * (1 + middle) * middle, rel=1e-12)
    assert run.state.ends == [[1, 1, False]]
    with pytest.raises(fd.ConfigError, match="TwoPasses with late replies cannot use a robust"):
        fd.run(TwoPasses(), fed, 3, aggregation=fd.Median(), engine=fd.Delayed(up=1))


class Flaky(testing.EncodingSession):
    """Untrusted clients, of whom client 1 fails to answer in round 2."""

    def __init__(self, *args):
        super().__init__(*args)
        self.conditions = replace(self.conditions, trusted=False)
        self.faults = {}

    def exchange(self, ask):
        away = ask.round == 2
        self.faults = {1: "no answer"} if away and 1 in ask.ids.tolist() else {}
        for ids, reply, stacked in super().exchange(ask):
            keep = ids != 1 if away else torch.ones_like(ids, dtype=torch.bool)
            if stacked:
                yield ids[keep], tree.map(lambda t, keep=keep: t[keep], reply), True
            elif bool(keep.all()):
                yield ids, reply, False


class FlakyOnce(Flaky):
    """Untrusted clients, of whom client 1 fails to answer the first exchange of round 2 and of
    later ones.
    """

    def exchange(self, ask):
        away = ask.round >= 2 and ask.step == "gradient"
        self.faults = {1: "no answer"} if away and 1 in ask.ids.tolist() else {}
        for ids, reply, stacked in testing.EncodingSession.exchange(self, ask):
            if not away or 1 not in ids.tolist():
                yield ids, reply, stacked


class FlakyEngine(testing.Encoding):
    kind: ClassVar = Flaky

    def open(self, algorithm, fed, seed_key):
        session = super().open(algorithm, fed, seed_key)
        return self.kind(self, algorithm, session.inner, fed.spec, random.fold(seed_key, 0))


SIZES = [1, 2, 3, 1]


class FlakyOnceEngine(FlakyEngine):
    kind: ClassVar = FlakyOnce


def flaky(rounds, **about):
    engine = FlakyEngine(fd.Local(batch=False))
    return fd.run(TwoPasses(), of_sizes(SIZES), rounds, engine=engine, evaluate_every=0, **about)


def mean_of(who):
    return np.average(1.5 ** np.array(who), weights=np.array(SIZES)[who])


def test_a_client_that_fails_is_left_out_of_the_pass():
    """Of both passes of round 2, and of no other."""
    run, m, others = flaky(3), mean_of([0, 1, 2, 3]), mean_of([0, 2, 3])
    u = 0.037 * (1 + m) * m
    u = 0.037 * (u + others) * others
    u = 0.037 * (u + m) * m
    assert float(run.state.u) == pytest.approx(u, rel=1e-12)
    assert [everyone for *_, everyone in run.state.ends] == [True, False, True]


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_client_that_fails_is_asked_again_while_others_are_missing(comes_again):
    """Half of the clients: 1 is asked in round 2 and fails. If it was the last one, or with the
    last one, the pass is that of the others; if another one is missing and comes in round 3 with
    it, it is that of all.
    """

    def fits(seed):
        first, second, third = (set(twins.cohort(seed, t, 4, 0.5)) for t in (1, 2, 3))
        if comes_again:
            return 1 not in first and 1 in second and second - {1} < first and third | first == all4
        return 1 not in first and 1 in second and first | second == all4

    all4 = {0, 1, 2, 3}
    seed = next(s for s in range(9999) if fits(s))
    run = flaky(3 if comes_again else 2, participation=0.5, seed=seed)
    u = 1 + mean_of([0, 1, 2, 3] if comes_again else [0, 2, 3])
    assert float(run.state.passes["done"]["moved"]) == pytest.approx(u, rel=1e-12)


def test_conjugate_gradients_begin_anew_after_a_failure():
    """Rounds 2 and 3 have another system than those before them: a third exchange asks for the
    gradient in the round after a failure, and then they are at the solution of all rows.
    """
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=n)) for n in (4, 6, 5)]
    fed = fd.Federation.from_clients([(x, y.astype(np.float32)) for x, y in parts])
    algorithm = fd.FedNewton(fd.Identity(), reg=0.1, solver="cg")
    engine = FlakyEngine(fd.Local(batch=False))
    run = fd.run(algorithm, fed, 7, engine=engine, evaluate_every=0)
    assert run.history.messages_up.diff().tolist()[1:5] == [6, 4, 9, 6]
    assert run.history.cohort_residual.notna().tolist() == [t == 2 for t in range(8)]
    x, y = fed.data.x_train.astype(float), fed.data.y_train.astype(float)
    want = np.linalg.solve(x.T @ x / 15 + 0.1 * np.eye(3), x.T @ y / 15)
    np.testing.assert_allclose(run.state.w[:, 0], want, rtol=1e-8)


@pytest.mark.parametrize("solver", ["newton", "other loss"])
def test_who_fails_in_a_pass_is_not_asked_in_those_that_follow(solver):
    """Client 1 never answers a gradient after round 1, and would answer the rest. With another loss
    it remembers the w of round 1, whose objective is none of the iteration. The others' solution
    is found.
    """
    rng = np.random.default_rng(0)
    parts = []
    for n in (24, 30, 26):
        x = rng.normal(size=(n, 3)).astype(np.float32)
        y = (x.sum(1) + 2 * rng.normal(size=n) > 0).astype(int)
        parts.append((x, y if solver == "other loss" else y.astype(np.float32)))
    fed = fd.Federation.from_clients(parts)
    settings = {"loss": "logistic"} if solver == "other loss" else {}
    algorithm = fd.FedNewton(fd.Identity(), reg=0.1, **settings)
    engine = FlakyOnceEngine(fd.Local(batch=False))
    run = fd.run(algorithm, fed, 12, engine=engine, evaluate_every=0)
    others = fd.run(
        algorithm, fd.Federation.from_clients([parts[0], parts[2]]), 30, evaluate_every=0
    )
    np.testing.assert_allclose(run.state.w, others.state.w, atol=1e-6)
    sent = run.history.messages_up.diff().tolist()
    passes = 3 if solver == "other loss" else 2
    assert sent[1:] == [3 * passes] + [2 * passes] * 11


SECURE = fd.SecureAggregation(bits=40, range=1e4)


def told(*args, **about):
    """The run and the warnings about passes, which must be its notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fd.run(*args, evaluate_every=0, **about)
    said = [str(w.message) for w in caught if "TwoPasses" in str(w.message)]
    assert list(run.notes) == said
    return said


def test_a_run_too_short_for_a_pass_says_so_at_its_start_and_at_its_end():
    """Two of 20 clients: (1 + 1/2 + ... + 1/20) / -ln(0.9) = 34.1 rounds a pass."""
    start, end = told(TwoPasses(), of_sizes([1] * 20), 3, participation=0.1, seed=SEED)
    assert start.startswith(
        "TwoPasses: a pass over all 20 clients takes about 34.1 rounds with 10% of them in a "
        "round, and the run has 3"
    )
    come = set().union(*(twins.cohort(SEED, t, 20, 0.1) for t in (1, 2, 3)))
    missing = [i for i in range(20) if i not in come]
    names = ", ".join(map(str, missing[:10]))
    assert end.startswith("round 3: TwoPasses has completed no iteration")
    assert f"{len(missing)} of 20 clients have not answered ({names} ...). Use a larger" in end


def test_a_pass_under_secure_aggregation_takes_longer():
    """4 of 20: two given clients meet with 4 x 3 / (20 x 19), and 2 ln(2) times 31.67 are 43.9."""
    about = {"participation": 0.2, "seed": SEED, "aggregation": SECURE}
    start, *_ = told(TwoPasses(), of_sizes([1] * 20), 3, **about)
    assert "takes about 43.9 rounds with 20% of them" in start


def test_a_run_of_enough_rounds_says_nothing():
    assert told(TwoPasses(), of_sizes([1, 2, 3, 1]), 60, participation=0.5, seed=SEED) == []
    assert told(TwoPasses(), of_sizes([1, 2, 3, 1]), 9, engine=fd.Delayed(up=3)) == []


def test_a_slow_pass_is_reported_once_with_those_who_are_missing():
    """Clients 1 and 2 are never drawn. (1 + 1/2 + 1/3 + 1/4) / -ln(0.5) = 3.01 rounds; 5 times
    that are 15.03.
    """

    def others(participation, total, key):
        return torch.tensor([0, 3])

    with mock.patch("foedus.core.loop.cohort", others):
        slow, end = told(TwoPasses(), of_sizes([1, 2, 3, 1]), 40, participation=0.5)
    assert slow == (
        "round 16: TwoPasses waits too long: since round 1 2 of 4 clients have not answered "
        "(1, 2), and a pass takes about 3.01 rounds. Check these clients, or use a larger "
        "participation"
    )
    assert end.startswith("round 40: TwoPasses has completed no iteration")


def test_secure_passes_do_not_leave_three_to_come_together():
    """Of 7 clients 4 come, and 3 are asked: 4 remain, who can come in pairs, and not 3."""
    groups, real = [], SecureAggregator._summed

    def noted(self, trip, weights):
        groups.append(len(trip.ids))
        return real(self, trip, weights)

    about = {"participation": 4 / 7, "seed": SEED, "evaluate_every": 0}
    with mock.patch.object(SecureAggregator, "_summed", noted):
        fd.run(TwoPasses(), of_sizes([1] * 7), 1, aggregation=fd.SecureAggregation(), **about)
    assert groups == [3]
