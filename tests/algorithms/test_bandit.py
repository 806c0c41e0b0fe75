"""Bandits: what is chosen, what is learned from it, and what it costs; against plain NumPy and
numbers by hand.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import foedus as fd
from foedus import testing
from foedus.algorithms.fedres.bandit import alone, exploration_period
from foedus.algorithms.fedres.play import inverse_gaps
from foedus.base import random


def small(rounds: int = 12, flat: bool = False, seed: int = 0) -> fd.Federation:
    """Three clients, three actions; contexts of 4 features."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(3):
        shape = (rounds, 4) if flat else (rounds, 3, 4)
        parts.append(
            (rng.normal(size=shape).astype(np.float32), rng.random((rounds, 3)).astype(np.float32))
        )
    return fd.rewards_federation(parts)


def draws(round: int, client: int) -> tuple[float, float]:
    """The two uniforms of a client's round, its first exchange."""
    return tuple(
        random.uniform(
            random.fold(random.key(0), round, 0, torch.tensor([client])), 2, torch.float64
        )[0].tolist()
    )


def reference(fed, rounds, every, eta, up, down, flat, bernoulli, shared, private):
    """Section 5.1 with the timeline of FedRes in explorations: n = 1, 2, ... in rounds every, 2
    every, ...
    """
    x, y = fed.data.x_train.astype(float), fed.data.y_train
    clients, actions = len(fed), y.shape[1]
    size = (lambda cols: (actions, len(cols))) if flat else (lambda cols: (len(cols),))
    score = lambda w, row: w @ row if flat else row @ w  # noqa: E731 - expected rewards of all actions
    w_of = {1: np.zeros(size(shared))}  # the global model of the n-th exploration
    local = [np.zeros(size(private)) for _ in range(clients)]
    broadcast = {}  # by round, of exploitations
    w_now = w_of[1]
    pending_local, pending_global = {}, {}
    regret, reward_total = np.zeros(clients), np.zeros(clients)
    for t in range(1, rounds + 1):
        n = t // every
        if t % every == 0 and n not in w_of:
            w_of[n] = w_now
        if t % every:
            broadcast[t] = w_now
        for i in range(clients):
            row = fed.client_rows(i)[(t - 1) % fed.sizes[i]]
            mean = y[row]
            a, u = draws(t, i)
            if t % every == 0:
                first = max(n - -(-down[i] // every), 1)
                w = w_of[first]
                action = int(a * actions)
                r = float(u < mean[action]) if bernoulli else float(mean[action])
                xg, xl = x[row][..., shared], x[row][..., private]
                error = score(w, xg)[action] + score(local[i], xl)[action] - r
                one = np.zeros(actions)
                one[action] = 2 * error
                gradient = lambda rows, one=one: np.outer(one, rows) if flat else one @ rows  # noqa: E731
                arrives = n + -(-up[i] // every)
                pending_global.setdefault(arrives, []).append(gradient(xg))
                pending_local.setdefault(
                    (i, n + -(-up[i] // every) + -(-down[i] // every)), []
                ).append(gradient(xl))
            else:
                seen = [s for s in broadcast if s <= t - down[i]]
                w = broadcast[max(seen) if seen else min(broadcast)]
                z = score(w, x[row][..., shared]) + score(local[i], x[row][..., private])
                action = int(z.argmax())
                r = float(u < mean[action]) if bernoulli else float(mean[action])
            regret[i] += mean.max() - mean[action]
            reward_total[i] += r
        if t % every == 0:
            for g in pending_global.pop(n, []):
                w_now = w_now - eta * g
            for i in range(clients):
                for g in pending_local.pop((i, n), []):
                    local[i] = local[i] - eta * g
    return w_now, local, regret.mean() / rounds, reward_total.mean() / rounds


@pytest.mark.parametrize("flat", [False, True], ids=["contexts of actions", "one context"])
@pytest.mark.parametrize("bernoulli", [False, True], ids=["mean", "bernoulli"])
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize(
    ("up", "down"),
    [((0, 0, 0), (0, 0, 0)), ((0, 2, 5), (1, 0, 4)), ((1, 3, 2), (2, 2, 2))],
    ids=["prompt", "late", "all late"],
)
@pytest.mark.parametrize("send", ["rows", "gradient"])
def test_epsilon_greedy_is_the_papers(flat, bernoulli, up, down, send, every):
    fed = small(rounds=13, flat=flat)
    shared, private = [0, 2], [1, 2, 3]
    algorithm = fd.FedResBandit(
        shared=shared, private=private, every=every, step=0.05, schedule="constant", send=send,
        reward="bernoulli" if bernoulli else "mean",
    )  # fmt: skip
    result = fd.run(algorithm, fed, 13, engine=fd.Delayed(up=up, down=down), evaluate_every=0)
    w, local, regret, reward = reference(
        fed, 13, every, 0.05, up, down, flat, bernoulli, shared, private
    )
    np.testing.assert_allclose(result.state.w["weight"].squeeze(0), w, atol=1e-5)
    for i in range(3):
        np.testing.assert_allclose(
            result.clients["states"]["states"]["local"]["weight"][i].squeeze(0), local[i], atol=1e-5
        )
    assert result.history.regret.iloc[-1] == pytest.approx(regret, abs=1e-6)
    assert result.history.reward.iloc[-1] == pytest.approx(reward, abs=1e-6)


def test_inverse_gaps_by_hand():
    """K = 3, gamma = 10, gaps 0, 0.1 and 0.2: 1/4, 1/5, and the rest."""
    p = inverse_gaps(torch.tensor([[0.5, 0.4, 0.3]], dtype=torch.float64), 10.0)
    np.testing.assert_allclose(p, [[1 - 1 / 4 - 1 / 5, 1 / 4, 1 / 5]])


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.floats(0.1, 1e4))
def test_inverse_gaps_are_probabilities_that_fall_with_the_gap(scores, gamma):
    z = torch.tensor([scores], dtype=torch.float64)
    p = inverse_gaps(z, gamma)[0]
    assert float(p.sum()) == pytest.approx(1) and bool((p >= -1e-12).all())
    best = int(z.argmax())
    assert float(p[best]) >= 1 / len(scores) - 1e-12
    rest = [i for i in range(len(scores)) if i != best]
    order = sorted(rest, key=lambda i: scores[i])
    assert all(float(p[a]) <= float(p[b]) + 1e-12 for a, b in itertools.pairwise(order))


def test_squarecb_draws_from_its_probabilities_and_learns_every_round():
    """One client; every action's expected reward is the bias of the model, so that one step is easy
    to follow.
    """
    rounds = 6
    fed = small(rounds)
    algorithm = fd.FedResBandit(
        explore="squarecb", gamma=3.0, step=0.1, schedule="constant", reward="mean"
    )
    result = fd.run(algorithm, fed, rounds, evaluate_every=0)
    x, y = fed.data.x_train.astype(float), fed.data.y_train
    w, local, regret = np.zeros(4), np.zeros((3, 4)), 0.0
    for t in range(1, rounds + 1):
        total = np.zeros(4)
        for i in range(3):
            row = fed.client_rows(i)[t - 1]
            z = x[row] @ (w + local[i])
            best = z.argmax()
            p = 1 / (3 + 3.0 * np.sqrt(t) * (z[best] - z))
            p[best] = 0
            p[best] = 1 - p.sum()
            action = int((np.cumsum(p) <= draws(t, i)[0]).sum())
            regret += y[row].max() - y[row][action]
            g = 2 * (z[action] - y[row][action]) * x[row][action]
            total += g
            local[i] -= 0.1 * g
        w = w - 0.1 * total
    np.testing.assert_allclose(result.state.w["weight"][0], w, atol=1e-5)
    assert result.history.regret.iloc[-1] == pytest.approx(regret / 3 / rounds, abs=1e-6)


class Known(fd.Linear):
    """A model that knows the truth from the start."""

    def init(self, spec, key):
        return {
            "weight": torch.tensor([[0.5, 0.1]]) if spec.features == 2 else torch.tensor([[0.4]])
        }


def test_who_knows_the_truth_regrets_explorations_alone():
    rng = np.random.default_rng(1)
    x = rng.random((40, 4, 3)).astype(np.float32)
    mean = x @ np.array([0.5, 0.1, 0.4], np.float32)
    fed = fd.rewards_federation([(x, mean)])
    algorithm = fd.FedResBandit(
        Known(bias=False), Known(bias=False), shared=(0, 1), private=(2,), every=40, reward="mean"
    )
    history = fd.run(algorithm, fed, 39, evaluate_every=0).history
    assert history.regret.iloc[-1] == pytest.approx(0, abs=1e-7)
    assert history.reward.iloc[-1] == pytest.approx(mean[:39].max(1).mean(), abs=1e-6)


def test_only_explorations_are_sent():
    history = fd.run(fd.FedResBandit(every=4), small(), 12, evaluate_every=0).history
    sends = history.bytes_up.diff().fillna(0) > 0
    assert history["round"][sends].tolist() == [4, 8, 12]
    gets = history.bytes_down.diff().fillna(0) > 0
    assert history["round"][gets].tolist() == [1, 4, 5, 8, 9, 12]
    assert (
        fd.run(
            alone(fd.FedResBandit(every=4), "local"), small(), 12, evaluate_every=0
        ).history.bytes_down.iloc[-1]
        == 0
    )


def test_both_models_beat_either_alone_and_inverse_gaps_beat_epsilon():
    rounds = 400
    fed = fd.linear_bandit(clients=10, actions=5, rounds=rounds, seed=1)
    base = fd.FedResBandit(
        shared=range(8),
        private=range(8, 12),
        explore="squarecb",
        gamma=20.0,
        step=0.1,
        measure_every=rounds,
    )
    end = lambda a: fd.run(a, fed, rounds, evaluate_every=0).history.regret.iloc[-1]  # noqa: E731
    both = end(base)
    assert both < end(alone(base, "global")) and both < end(alone(base, "local"))
    assert both < end(replace(base, explore="epsilon", every=6))


def test_exploration_period_is_theorem_3s():
    # P T = 10^6, K = 2: (10^6 / 16)^(1/5) = 9.1; T^(1/4) / 64^(1/8) = 10.6; T^(1/3) / 4^(1/3) =
    # 29.2 for T = 10^5.
    assert exploration_period(100_000, 10, 2) == 9
    assert exploration_period(100_000, 10**6, 2) == 10
    assert exploration_period(100, 1, 10) == 2


def test_the_linear_environment_is_realizable():
    fed = fd.linear_bandit(clients=4, actions=3, rounds=50, shared=5, private=2, seed=3)
    assert fed.data.x_train.shape == (200, 3, 7) and fed.data.y_train.shape == (200, 3)
    for i in range(4):
        x, y = fed.data.x_train[fed.client_rows(i)], fed.data.y_train[fed.client_rows(i)]
        w = np.concatenate((fed.settings["w_global"], fed.settings["w_local"][i]))
        np.testing.assert_allclose(y, x @ w, atol=1e-6)
        assert y.min() >= 0 and y.max() <= 1


def test_a_bandit_of_classes_rewards_the_right_class():
    fed = fd.split(fd.load("digits"), "iid", clients=4)
    bandit = fd.class_bandit(fed)
    assert (
        np.array_equal(bandit.data.y_train.argmax(1), fed.data.y_train)
        and (bandit.data.y_train.sum(1) == 1).all()
    )
    history = fd.run(
        fd.FedResBandit(fd.Linear(), fd.Linear(), explore="squarecb", step=0.03, gamma=20.0),
        bandit,
        300,
        evaluate_every=0,
    ).history
    assert history.reward.iloc[-1] > 0.45  # a guess has 0.1
    np.testing.assert_allclose(history.reward.iloc[-1], 1 - history.regret.iloc[-1])


@pytest.mark.parametrize("explore", ["epsilon", "squarecb"])
def test_conformance(explore, fed):
    testing.check_algorithm(fd.FedResBandit(every=2, explore=explore), fd.class_bandit(fed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "every=, the rounds between two explorations, or horizon="),
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"every": 2, "explore": "ucb"}, "explore 'ucb' is unknown"),
        ({"every": 2, "gamma": 0}, "gamma=0"),
        ({"every": 2, "reward": "coin"}, "reward 'coin' is unknown"),
        ({"every": 2, "loss": "logistic"}, "loss='squared'"),
        ({"every": 2, "batch_size": 2}, "batch_size=1"),
        ({"horizon": 0}, "horizon=0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.FedResBandit(**options)


def test_bad_models_and_rewards():
    import torch.nn as nn

    with pytest.raises(fd.ModelError, match="global_model"):
        fd.run(fd.FedResBandit(nn.Linear(4, 7), every=2), small(), 1)
    data = fd.Data.from_arrays(np.zeros((6, 2), np.float32), np.full((6, 3), 5.0, np.float32))
    fed = fd.Federation.from_owners(
        data, np.zeros(6, int), np.zeros(0, int), np.arange(1), "by hand", {}
    )
    with pytest.raises(fd.DataError, match=r"rewards are from 5 to 5; they must be in \[0, 1\]"):
        fd.run(fd.FedResBandit(every=2), fed, 1)
    data = fd.Data.from_arrays(
        np.zeros((2, 2), np.float32), np.array([[0, 0.5], [1, 1.5]], np.float32)
    )
    fed = fd.Federation.from_owners(
        data, np.zeros(2, int), np.zeros(0, int), np.arange(1), "by hand", {}
    )
    with pytest.raises(fd.DataError, match=r"rewards are from 0 to 1.5"):
        fd.run(fd.FedResBandit(every=2), fed, 1)
    images = fd.Data.from_arrays(np.zeros((6, 4, 4), np.float32), np.zeros((6, 3), np.float32))
    fed = fd.Federation.from_owners(
        images, np.zeros(6, int), np.zeros(0, int), np.arange(1), "by hand", {}
    )
    with pytest.raises(fd.DataError, match=r"contexts have shape \(4, 4\)"):
        fd.run(fd.FedResBandit(every=2), fed, 1)


def test_a_horizon_sets_the_period_and_either_model_alone_has_all_columns():
    fed = fd.linear_bandit(clients=10, actions=2, rounds=20)
    result = fd.run(fd.FedResBandit(horizon=100_000), fed, 1, evaluate_every=0)
    assert result.state.period == exploration_period(100_000, 10, 2) == 9
    base = fd.FedResBandit(every=2, shared=(0, 3), private=(1, 2))
    assert alone(base, "global").shared == alone(base, "local").private == (0, 1, 2, 3)


def test_bad_environments():
    x = np.zeros((5, 3, 2), np.float32)
    with pytest.raises(fd.DataError, match=r"rewards from 0 to 1.5; rewards must be in \[0, 1\]"):
        fd.rewards_federation([(x, np.linspace(0, 1.5, 15).reshape(5, 3))])
    with pytest.raises(fd.DataError, match="rewards of shape"):
        fd.rewards_federation([(x, np.zeros(5))])
    with pytest.raises(fd.DataError, match="expected rewards of at least 2 actions"):
        fd.run(fd.FedResBandit(every=2), fd.split(fd.load("digits"), "iid", clients=2), 1)
    with pytest.raises(fd.DataError, match="column 9 of shared"):
        fd.run(fd.FedResBandit(every=2, shared=(0, 9)), small(), 1)
    with pytest.raises(fd.ConfigError, match="actions=1"):
        fd.linear_bandit(actions=1)
    with pytest.raises(fd.ConfigError, match="local=2"):
        fd.linear_bandit(local=2)
    with pytest.raises(fd.ConfigError, match="sigma=0"):
        exploration_period(10, 1, 2, sigma=0)
