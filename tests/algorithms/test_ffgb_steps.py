"""Step sizes of FFGB that follow the loss, and the line search over clients."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.tree import DecisionTreeRegressor

import foedus as fd
from foedus.algorithms.ffgb.steps import SHRINKAGE
from foedus.base import random
from foedus.core.participation import cohort
from tests.algorithms.test_ffgb import (
    STUMP,
    TREES,
    Ensemble,
    Quartic,
    Table,
    X,
    column,
    outputs,
    unequal,
    weak,
)

LEAVES = fd.Forest(trees=1, depth=None, extra=False, features=1.0)
"""Fits every row exactly, where rows differ."""


@pytest.mark.parametrize(
    ("loss", "classes", "want"),
    [
        ("auto", 3, 10.0),  # 5 / (1/2)
        ("logistic", 3, 20.0),  # 5 / (1/4)
        ("squared", 3, 0.4),
        ("auto", None, 0.4),
        ("huber", None, 0.4),
        ("bce", None, 20.0),  # one output: 5 / (1/4)
        ("poisson", None, 0.7),
    ],
)
def test_the_step_follows_the_loss(loss, classes, want):
    spec = unequal(classes).spec
    assert fd.FFGB(loss=loss).eta(3, 1, spec) == pytest.approx(want)
    assert not fd.FFGB(loss=loss).searches(spec)
    assert fd.FFGB(loss=loss, step=0.37).eta(3, 1, spec) == 0.37


@pytest.mark.parametrize("loss", ["quantile", lambda f, y: (f - y).pow(4).sum(-1), Quartic()])
def test_a_loss_of_unknown_smoothness_is_searched(loss):
    spec = unequal().spec
    assert fd.FFGB(loss=loss).searches(spec) and not fd.FFGB(loss=loss, step=0.5).searches(spec)
    with pytest.raises(fd.ConfigError, match="needs mu=0"):
        fd.run(fd.FFGB(loss=loss, mu=0.1), unequal(), 1)
    if isinstance(loss, Quartic):
        return  # distillation takes functions and names
    with pytest.raises(fd.ConfigError, match="no bound of the second derivative"):
        fd.run(fd.FFGBDistill(fd.MLP(2), np.zeros((3, 3), np.float32), loss=loss), unequal(), 1)


def test_poisson_without_bounded_functions_is_searched():
    """A network's values cannot be clipped."""
    algorithm = fd.FFGB(fd.Net(fd.MLP(2)), loss="poisson")
    assert algorithm.searches(unequal().spec)


def counts(n=60):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(n, 2)).astype(np.float32)
    y = rng.poisson(np.exp(0.5 + x[:, 0] + 0.3)).astype(np.float32)
    return x, y


def test_counts_against_numpy():
    """Three rounds with unequal clients: h = sum slope / sum exp(f + 0.7) in each leaf of a tree
    fitted to slope / exp(f + 0.7) with the weights exp(f + 0.7), clipped to 0.7 / 0.7 = 1; f moves
    by 0.7 times the average.
    """
    x, y = counts()
    parts = [slice(0, 12), slice(12, 40), slice(40, 60)]
    fed = fd.Federation.from_clients([(x[p], y[p]) for p in parts], test=(x, y))
    oracle = fd.Forest(trees=1, depth=2, extra=False, features=1.0)
    got = outputs(fd.FFGB(oracle, loss="poisson"), fed, 3, x)[:, 0]
    f, clipped = np.zeros(len(x)), 0
    for _ in range(3):
        moved = np.zeros(len(x))
        for p in parts:
            slope, bound = np.exp(f[p]) - y[p], np.exp(f[p] + 0.7)
            tree = DecisionTreeRegressor(max_depth=2).fit(x[p], slope / bound, bound)
            leaf = tree.apply(x[p])
            value = {j: slope[leaf == j].sum() / bound[leaf == j].sum() for j in set(leaf)}
            clipped += sum(abs(v) > 1 for v in value.values())
            moved += np.array([np.clip(value[j], -1, 1) for j in tree.apply(x)]) / 3
        f -= 0.7 * moved
    assert clipped > 0
    np.testing.assert_allclose(got, f, atol=2e-5)


def test_counts_go_down_in_every_round_even_from_far_away():
    """A count of 5,000 among small ones; a step of 0.4 on the bare slope would end in infinity."""
    x, y = counts(40)
    y[3] = 5000
    fed = fd.Federation.from_clients([(x[:15], y[:15]), (x[15:], y[15:])], test=(x, y))
    run = fd.run(fd.FFGB(LEAVES, loss="poisson"), fed, 15)
    # by client, as the objective counts them
    assert all(b < a for a, b in itertools.pairwise(run.history.loss))


@pytest.mark.parametrize("loss", ["squared", "huber", "poisson", "logistic", "cross_entropy"])
def test_one_client_goes_down_in_every_round(loss):
    """An exact oracle and a factor below 2; 5 fades as well from f = 0."""
    classes = 3 if loss in ("logistic", "cross_entropy") else None
    fed = unequal(classes).pool()
    if loss == "poisson":
        x, y = counts()
        fed = fd.Federation.from_clients([(x, y)], test=(x, y))
    train = fd.Federation.from_clients(
        [(fed.data.x_train, fed.data.y_train)],
        test=(fed.data.x_train, fed.data.y_train),
        classes=classes,
    )
    losses = fd.run(fd.FFGB(LEAVES, loss=loss), train, 12).history.loss.tolist()
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(losses))
    assert losses[-1] < losses[0]


# -- line search -----------------------------------------------------------------------------------


def test_a_line_search_by_hand():
    """A has y = 0 at x = 0 and B has y = 4 at x = 1 and y = 8 at x = 2: h_A = 0, h_B = -4 up to
    1.5, -8 beyond. d = -(h_A + h_B) / 2 = 2 at 0 and 1, 4 at 2. F(s d) = 1/2 ((2 s)^2 / 2) + 1/2
    ((4 - 2 s)^2 + (8 - 4 s)^2) / 4 = s^2 + 5/2 (2 - s)^2 is 4.75 at s = 3/2, and of powers of two
    3.5 at s = 1 and 4 at s = 2 (6.25 + ... at 1/2): s* = 1, half of it is taken.
    """
    values = {s: s**2 + 2.5 * (2 - s) ** 2 for s in (0.5, 1.0, 2.0)}
    assert min(values, key=values.get) == 1.0
    fed = fd.Federation.from_clients(
        [(column(0), np.array([0.0])), (column(1, 2), np.array([4.0, 8.0]))],
        test=(column(0), np.array([0.0])),
    )
    run = fd.run(fd.FFGB(STUMP, step="search"), fed, 1, evaluate_every=0)
    assert SHRINKAGE == 0.5 and run.state.step == 1.0
    np.testing.assert_allclose(run.model.outputs(column(0, 1, 2)), [[1], [1], [2]], rtol=1e-6)


def test_the_next_round_searches_around_the_last_step():
    """One client with y = 8 and -8: h = -+8 is exact, s* = 1. Scaled outputs of another loss,
    |f - y|^2 / 32, have slopes 16 times smaller: s* = 16, and then 1 around it.
    """
    fed = fd.Federation.from_clients(
        [(column(0, 1), np.array([8.0, -8.0]))], test=(column(0), np.array([8.0]))
    )
    flat = fd.FFGB(STUMP, loss=lambda f, y: ((f - y) ** 2).sum(-1) / 32)
    for rounds in (1, 2, 3):
        run = fd.run(flat, fed, rounds, evaluate_every=0)
        assert run.state.step == 16.0
        want = 8 * (1 - 0.5**rounds)  # half of what is left, each round
        np.testing.assert_allclose(run.model.outputs(column(0, 1))[:, 0], [want, -want], rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "classes"),
    [("squared", None), ("quantile", None), ("poisson", None), ("auto", 3), (Quartic(), None)],
)
@pytest.mark.parametrize("weights", ["uniform", "rows"])
def test_no_round_makes_the_training_loss_larger(loss, classes, weights):
    """F over all clients, computed from the model; forests of few rows contradict each other."""
    fed = unequal(classes)
    if loss == "poisson":
        fed = fd.Federation.from_clients(
            [(fed.data.x_train[fed.client_rows(i)], np.arange(len(fed.client_rows(i)), dtype=float))
             for i in range(4)], test=(fed.data.x_test, fed.data.y_test)
        )  # fmt: skip
    algorithm = fd.FFGB(TREES, loss=loss, step="search", weights=weights)
    size = np.array([len(fed.client_rows(i)) for i in range(4)])
    share = size / size.sum() if weights == "rows" else np.full(4, 0.25)

    def objective(f):
        rows = [algorithm.row_loss(f[fed.client_rows(i)], y[fed.client_rows(i)]) for i in range(4)]
        return sum(w * float(r.double().mean()) for w, r in zip(share, rows, strict=True))

    y = torch.from_numpy(fed.data.y_train)
    values = [objective(torch.zeros(len(y), fed.spec.outputs))]
    for rounds in range(1, 6):
        run = fd.run(algorithm, fed, rounds, evaluate_every=0)
        values.append(objective(run.model.outputs(fed.data.x_train)))
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(values))
    assert values[-1] < values[0]


def test_half_of_the_clients_against_a_plain_simulation():
    """Functions of rounds that a client has missed come with the step that was settled."""
    fed, oracle, rounds, seed = unequal(), TREES, 7, 3
    algorithm = fd.FFGB(oracle, step="search")
    f, eta, root = Ensemble(), 1.0, random.key(seed)
    for t in range(rounds):
        who = cohort(0.5, 4, random.fold(root, t + 1, 0xFFFFFFFE)).tolist()
        rows = {i: fed.client_rows(i) for i in who}
        x = {i: fed.data.x_train[rows[i]] for i in who}
        y = {i: fed.data.y_train[rows[i]][:, None] for i in who}
        keys = {i: random.fold(random.fold(root, t + 1, 0, torch.tensor([i]))[0], 1) for i in who}
        h = [(-eta / len(who), weak(oracle, x[i], f(x[i], 1) - y[i], keys[i])) for i in who]
        d = Ensemble(h)
        grid = [0.0, *(2.0**j for j in range(-12, 13))]
        losses = [
            np.mean([0.5 * ((f(x[i], 1) + s * d(x[i], 1) - y[i]) ** 2).mean() for i in who])
            for s in grid
        ]
        best = grid[int(np.argmin(losses))]
        f, eta = f.plus(d.times(0.5 * best)), eta * best
    got = outputs(algorithm, fed, rounds, X, participation=0.5, seed=seed)
    np.testing.assert_allclose(got, f(X, 1), atol=2e-4)


def test_a_search_that_finds_nothing_stays():
    """A has y = 1 at x = 1 and B y = -1 at x = 2. The functions are exact at home and 3 and -3 at
    the other's row: d = -(-1 + 3) / 2 = -1 at 1, and 1 at 2, away from both: s* = 0.
    """
    fed = fd.Federation.from_clients(
        [(column(1), np.array([1.0])), (column(2), np.array([-1.0]))],
        test=(column(1, 2), np.array([1.0, -1.0])),
    )
    oracle = Table(elsewhere=((1.0, (3.0,)), (2.0, (-3.0,))))
    run = fd.run(fd.FFGB(oracle, step="search"), fed, 3)
    assert run.model.outputs(column(1, 2)).tolist() == [[0.0], [0.0]]
    assert run.history.mse.tolist() == [1.0] * 4


def test_a_search_needs_answers_at_once_and_no_mu():
    with pytest.raises(fd.ConfigError, match="step= a number where messages are late"):
        fd.run(fd.FFGB(STUMP, step="search"), unequal(), 2, engine=fd.Delayed(up=1))
    with pytest.raises(fd.ConfigError, match="needs mu=0"):
        fd.FFGB(step="search", mu=0.1)


def test_the_search_costs_a_few_numbers():
    """Up, beside the functions: 26 losses and the receipt, in float32."""
    fed = unequal()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = fd.run(fd.FFGB(TREES), fed, 1, evaluate_every=0).records.last("bytes_up")
        search = fd.run(fd.FFGB(TREES, step="search"), fed, 1, evaluate_every=0)
    assert 4 * 4 * 27 < search.records.last("bytes_up") - plain < 4 * (4 * 27 + 150)
    assert search.records.last("messages_up") == 12


def test_trees_on_a_part_of_the_rows():
    """A tree with a leaf for each of half of 20 rows; all of them over many trees."""
    x = np.arange(20, dtype=np.float32)[:, None]
    oracle = fd.Forest(trees=50, depth=None, extra=False, features=1.0, rows=0.5)
    spec = fd.Data.from_arrays(x, x[:, 0], x, x[:, 0]).spec
    trees = oracle.fit(torch.from_numpy(x), torch.from_numpy(x), torch.tensor([0, 7]), spec)
    each = np.split(trees.value.numpy()[:, 0], 50)
    assert all(len(leaves) == 10 for leaves in each)
    assert set(np.concatenate(each).astype(int).tolist()) == set(range(20))
    assert len({tuple(leaves) for leaves in each}) > 40
    assert math.isclose(float(np.mean(np.concatenate(each))), 9.5, abs_tol=1.0)
