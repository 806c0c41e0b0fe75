"""FFGB: rounds by hand, a plain simulation of Algorithms 1 to 3, the theorems of Section 4,
oracles, bytes, and bad input.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import skops.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.tree import DecisionTreeRegressor

import foedus as fd
from foedus import wire
from foedus.base import random
from foedus.core.participation import cohort
from foedus.models.lipschitz import lipschitz_constant, lipschitz_extension
from foedus.models.oracles import Oracle, gamma, smooth_maximum

STUMP = fd.Forest(trees=1, depth=1, extra=False, features=1.0)


def column(*numbers) -> np.ndarray:
    return np.array(numbers, np.float32)[:, None]


def ends(algorithm, fed, rounds, **options):
    return fd.run(algorithm, fed, rounds, evaluate_every=0, **options)


def outputs(algorithm, fed, rounds, x, **options) -> np.ndarray:
    return ends(algorithm, fed, rounds, **options).model.outputs(x).double().numpy()


# -- by hand ---------------------------------------------------------------------------------------


def test_two_clients_two_rounds_two_steps_by_hand():
    """Stumps, squared loss, mu = 0.1, eta = 0.5: g <- 0.95 g - 0.5 h. A has x = 0, 1, 2 and y = 0,
    2, 6; B has x = 1, 3 and y = 4, -2.

    Round 1. A: target (0, -2, -6), h = -1 up to 1.5, -6 beyond; Delta = (1, -1, 0); g = (0.5, 0.5,
    3);
                target (0.5, -1.5, -3) + Delta = (1.5, -2.5, -3), h = 1.5 up to 0.5, -2.75 beyond; g
                = (-0.275, 1.85, 4.225).
             B: target (-4, 2) = h, split at 2; g = (2, -1); target (-2, 1) = h; g = (2.9, -1.45). f
             at 0, 1, 2, 3: averages of A's (-0.275, 1.85, 4.225, 4.225) and B's (2.9, 2.9, 2.9,
             -1.45).
    Round 2. A: target (1.3125, 0.375, -2.4375), h = 0.84375 up to 1.5, -2.4375 beyond; Delta =
    (0.46875, -0.46875, 0);
                g = (0.825, 1.834375, 4.603125); target (1.29375, -0.634375, -1.396875), h = 1.29375
                up to 0.5, -1.015625 beyond; g = (0.136875, 2.25046875, 4.88078125), and 0.9025 *
                1.3875 + 0.5 (0.95 * 2.4375 + 1.015625) = 2.91784375 at 3.
             B: h = (-1.625, 3.3875); g = (3.06875, -0.375625); h = (-0.93125, 1.624375); g =
             (3.3809375, -1.16903125),
                0.9025 * 1.3125 + 0.5 (0.95 * 1.625 + 0.93125) = 2.42203125 at 0 and 0.9025 * 3.5625
                + 1.2375 = 4.45265625 at 2.
    """
    a, b = (column(0, 1, 2), np.array([0, 2, 6.0])), (column(1, 3), np.array([4, -2.0]))
    fed = fd.Federation.from_clients([a, b])
    algorithm = fd.FFGB(STUMP, loss="squared", local_steps=2, mu=0.1, step=0.5)
    at = column(0, 1, 2, 3)
    np.testing.assert_allclose(
        outputs(algorithm, fed, 1, at)[:, 0], [1.3125, 2.375, 3.5625, 1.3875], rtol=1e-6
    )
    second = [
        (0.136875 + 2.42203125) / 2,
        (2.25046875 + 3.3809375) / 2,
        (4.88078125 + 4.45265625) / 2,
        (2.91784375 - 1.16903125) / 2,
    ]
    np.testing.assert_allclose(outputs(algorithm, fed, 2, at)[:, 0], second, rtol=1e-6)


def test_one_step_without_residual_by_hand():
    """As above, but the second target of A is (0.5, -1.5, -3) alone: h = 0.5 up to 0.5, -2.25
    beyond; g = (0.225, 1.6, 3.975).
    """
    fed = fd.Federation.from_clients([(column(0, 1, 2), np.array([0, 2, 6.0]))])
    algorithm = fd.FFGB(STUMP, local_steps=2, mu=0.1, step=0.5, residual=False)
    np.testing.assert_allclose(
        outputs(algorithm, fed, 1, column(0, 1, 2))[:, 0], [0.225, 1.6, 3.975], rtol=1e-6
    )


def test_the_steps_of_the_theorems():
    """4 / (mu (t K + k + 1)) and 2 / (mu (t K + k + 1)), t from 0 and k from 1."""
    first, third = (
        fd.FFGB(mu=0.5, local_steps=3, step=name) for name in ("theorem4.1", "theorem4.3")
    )
    assert first.eta(0, 1) == pytest.approx(4.0) and first.eta(2, 3) == pytest.approx(
        4 / (0.5 * 10)
    )
    assert third.eta(0, 1) == pytest.approx(2.0) and third.eta(1, 2) == pytest.approx(2 / (0.5 * 6))
    assert fd.FFGB(step=0.7).eta(5, 2) == 0.7
    net = fd.SobolevNet(fd.MLP(2))
    # mu = 1 by the squared loss
    assert fd.FFGBLipschitz(net, local_steps=2).eta(1, 1) == pytest.approx(4 / 4)
    assert fd.FFGBLipschitz(net, local_steps=2, mu=1.0).eta(1, 1) == pytest.approx(4 / 8)


# -- against a plain simulation --------------------------------------------------------------------


def softmax(f):
    e = np.exp(f - f.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def onehot(y, f):
    return np.eye(f.shape[1])[y] if y.dtype.kind == "i" else y.reshape(len(y), -1)


SLOPES = {
    "cross_entropy": lambda f, y: softmax(f) - onehot(y, f),
    "squared": lambda f, y: f - onehot(y, f),
    "logistic": lambda f, y: 1 / (1 + np.exp(-f)) - onehot(y, f),
    "huber": lambda f, y: np.clip(f - onehot(y, f), -1, 1),
}


class Ensemble:
    """A sum of functions: a coefficient for each, and nothing else."""

    def __init__(self, terms=()):
        self.terms = list(terms)

    def __call__(self, x, width):
        return sum((c * h(x) for c, h in self.terms), np.zeros((len(x), width)))

    def times(self, c):
        return Ensemble((c * a, h) for a, h in self.terms)

    def plus(self, other):
        return Ensemble(self.terms + other.terms)


def weak(oracle: fd.Forest, x, target, key):
    """scikit-learn's trees from the seed that a client would use, one after the other."""
    generator = np.random.RandomState(int(random.words(key, 1)[0]))
    kind = {
        "max_depth": oracle.depth,
        "min_samples_leaf": oracle.leaf,
        "max_features": oracle.features,
    }
    kind["splitter"] = "random" if oracle.extra else "best"
    trees = [
        DecisionTreeRegressor(random_state=generator, **kind).fit(x, target)
        for _ in range(oracle.trees)
    ]
    return lambda rows: (
        sum(t.tree_.predict(rows).reshape(len(rows), -1) for t in trees) / len(trees)
    )


def simulate(algorithm: fd.FFGB, fed, rounds, *, slope, participation=1.0, seed=0) -> Ensemble:
    """Algorithms 1 and 2.

    A client's key holds the round, the number of the question in it (the first), and the client's
    number.
    """
    data, width, n = fed.data, fed.spec.outputs, len(fed)
    f, K = Ensemble(), algorithm.local_steps
    c = {"theorem4.1": 4.0, "theorem4.3": 2.0}.get(algorithm.step)
    for t in range(rounds):
        root = random.key(seed)
        who = cohort(participation, n, random.fold(root, t + 1, 0xFFFFFFFE)).tolist()
        if not who:
            continue
        rows = {i: len(fed.client_rows(i)) for i in who}
        share = {
            i: rows[i] / sum(rows.values()) if algorithm.weights == "rows" else 1 / len(who)
            for i in who
        }
        total = Ensemble()
        for i in who:
            x, y = data.x_train[fed.client_rows(i)], data.y_train[fed.client_rows(i)]
            key = random.fold(root, t + 1, 0, torch.tensor([i]))[0]
            g, delta = f, 0.0
            for k in range(1, K + 1):
                eta = algorithm.step if c is None else c / (algorithm.mu * (t * K + k + 1))
                target = delta + slope(g(x, width), y)
                h = weak(algorithm.oracle, x, target, random.fold(key, k))
                g = g.times(1 - eta * algorithm.mu).plus(Ensemble([(-eta, h)]))
                if algorithm.residual:
                    delta = target - h(x)
            total = total.plus(g.times(share[i]))
        f = total
    return f


def unequal(classes=None, outputs=1) -> fd.Federation:
    """Four clients of 9, 14, 20 and 27 rows of three features."""
    rng = np.random.default_rng(3)
    clients = []
    for i, n in enumerate((9, 14, 20, 27)):
        x = (rng.normal(size=(n, 3)) + 0.3 * i).astype(np.float32)
        if classes:
            y = np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)])
        else:
            y = (x[:, :outputs] * (i + 1) + rng.normal(size=(n, outputs))).astype(np.float32)
            y = y[:, 0] if outputs == 1 else y
        clients.append((x, y))
    test = clients[0]
    return fd.Federation.from_clients(clients, test=test, classes=classes)


X = np.random.default_rng(9).normal(size=(60, 3)).astype(np.float32)
# One feature for each split: there are no ties between features, which rounding would decide.
TREES = fd.Forest(trees=2, depth=3, features=0.34)


def close(algorithm, fed, rounds, slope, **options):
    want = simulate(algorithm, fed, rounds, slope=slope, **options)(X, fed.spec.outputs)
    got = outputs(algorithm, fed, rounds, X, **options)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * max(1.0, np.abs(want).max()))


STEPS = [
    (mu, step)
    for mu in (0.0, 0.3)
    for step in (0.4, 1.5, "theorem4.1", "theorem4.3")
    if mu or not isinstance(step, str)
]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("mu", "step"), STEPS)
@pytest.mark.parametrize("K", [1, 2, 3])
def test_the_sum_is_that_of_a_plain_simulation(K, mu, step, residual):
    """All clients in each round; weights in turn.

    1 - eta mu is -1, -1/3, 0, ... in the first steps of Theorem 4.1, 0 in 4.3's first.
    """
    weights = "rows" if K % 2 else "uniform"
    algorithm = fd.FFGB(TREES, local_steps=K, mu=mu, step=step, residual=residual, weights=weights)
    close(algorithm, unequal(), 3, SLOPES["squared"])


@pytest.mark.parametrize("weights", ["uniform", "rows"])
@pytest.mark.parametrize(
    ("mu", "step"), [(0.0, 0.5), (0.3, 0.5), (0.3, "theorem4.1"), (0.3, "theorem4.3")]
)
@pytest.mark.parametrize("K", [1, 3])
def test_clients_that_miss_rounds_catch_up(K, mu, step, weights):
    """Two of four clients in each of six rounds."""
    algorithm = fd.FFGB(TREES, local_steps=K, mu=mu, step=step, weights=weights)
    close(algorithm, unequal(), 6, SLOPES["squared"], participation=0.5, seed=2)


def test_clients_that_come_by_chance_catch_up():
    """With Poisson's participation there are rounds without anybody; they pass all the same."""
    algorithm, fed, took_part = (
        fd.FFGB(TREES, mu=0.3, step=0.5, local_steps=2),
        unequal(),
        fd.Poisson(0.25),
    )
    sizes = [
        len(cohort(took_part, 4, random.fold(random.key(1), t, 0xFFFFFFFE))) for t in range(1, 9)
    ]
    assert 0 in sizes[:-1]
    assert len(ends(algorithm, fed, 8, participation=took_part, seed=1).state.f.parts) == sum(
        s > 0 for s in sizes
    )
    close(algorithm, fed, 8, SLOPES["squared"], participation=took_part, seed=1)


def test_a_scale_that_vanishes_is_taken_up():
    """eta mu = 0.99 leaves 1 / 100 of what was: after four rounds 1e-8, and still exact."""
    algorithm = fd.FFGB(TREES, mu=0.99, step=1.0, local_steps=1)
    close(algorithm, unequal(), 6, SLOPES["squared"], participation=0.5)


def test_targets_of_several_columns():
    close(fd.FFGB(TREES, mu=0.3, step=0.5, local_steps=2), unequal(outputs=2), 3, SLOPES["squared"])


class Quartic:
    """(f - y)^4 / 4 + (f - y)^2 / 2, summed over outputs."""

    def value(self, outputs, y):
        r = outputs - y.reshape(len(y), -1)
        return (r**4 / 4 + r**2 / 2).sum(-1)

    def slope(self, outputs, y, weight):
        r = outputs - y.reshape(len(y), -1)
        return (r**3 + r) * weight.unsqueeze(-1)


@pytest.mark.parametrize("name", ["auto", "cross_entropy", "squared", "logistic", "huber"])
def test_losses_on_classes(name):
    slope = SLOPES["cross_entropy" if name == "auto" else name]
    close(fd.FFGB(TREES, loss=name, step=0.8, mu=0.05, local_steps=2), unequal(classes=3), 3, slope)


@pytest.mark.parametrize("name", ["auto", "squared", "huber"])
def test_losses_on_values(name):
    close(
        fd.FFGB(TREES, loss=name, step=0.4, local_steps=2),
        unequal(),
        3,
        SLOPES["squared" if name == "auto" else name],
    )


def test_a_custom_loss():
    rng = np.random.default_rng(0)
    clients = [
        (rng.normal(size=(12, 3)).astype(np.float32), rng.uniform(-1, 1, 12).astype(np.float32))
        for _ in range(2)
    ]
    fed = fd.Federation.from_clients(clients, test=clients[0])

    def slope(f, y):
        r = f - y[:, None]
        return r**3 + r

    algorithm = fd.FFGB(TREES, loss=Quartic(), step=0.3, local_steps=2)
    close(algorithm, fed, 3, slope)
    run = fd.run(algorithm, fed, 2)
    r = run.model.predict(clients[0][0]) - clients[0][1]
    assert run.records.last("loss") == pytest.approx(np.mean(r**4 / 4 + r**2 / 2), rel=1e-4)


def test_the_losses_reported_are_those_of_the_name():
    """At f = 0: log 3, 1/2, 3 log 2, and 1/2 (one output off by 1)."""
    fed = unequal(classes=3)
    for name, want in (
        ("cross_entropy", math.log(3)),
        ("squared", 0.5),
        ("logistic", 3 * math.log(2)),
        ("huber", 0.5),
    ):
        first = fd.run(fd.FFGB(TREES, loss=name), fed, 1).records.rows[0]
        assert first["loss"] == pytest.approx(want, rel=1e-5)


def test_with_one_client_it_is_gradient_boosting():
    """mu = 0, K = 1: f <- f - eta h, prediction for prediction, for classes and for values."""
    for classes, slope in ((3, SLOPES["cross_entropy"]), (None, SLOPES["squared"])):
        fed = unequal(classes=classes).pool()
        x, y = fed.data.x_train, fed.data.y_train
        algorithm = fd.FFGB(fd.Forest(trees=1, depth=3, features=1.0), step=0.5)
        run = ends(algorithm, fed, 8)
        f, test = np.zeros((len(x), fed.spec.outputs)), np.zeros((len(X), fed.spec.outputs))
        for t in range(8):
            key = random.fold(random.fold(random.key(0), t + 1, 0, torch.tensor([0]))[0], 1)
            tree = DecisionTreeRegressor(
                max_depth=3,
                splitter="random",
                max_features=1.0,
                random_state=np.random.RandomState(int(random.words(key, 1)[0])),
            ).fit(x, slope(f, y))
            f -= 0.5 * tree.predict(x).reshape(f.shape)
            test -= 0.5 * tree.predict(X).reshape(test.shape)
        np.testing.assert_allclose(run.model.outputs(X), test, atol=2e-5)
        if classes:
            assert (run.model.predict(X) == test.argmax(1)).all()


# -- the theorems ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table(Oracle):
    """Functions on finitely many points of a line: `part` times phi on the client's own rows;
    elsewhere what `elsewhere` says, or 0.
    """

    part: float = 1.0
    elsewhere: tuple = ()

    def fit(self, x, target, key, spec):
        """Equal rows get the mean of their targets, the least squares fit."""
        points, place = torch.unique(x[:, 0], return_inverse=True)
        total = torch.zeros(len(points), target.shape[1]).index_add(0, place, target)
        values = self.part * total / torch.bincount(place).unsqueeze(1)
        for at, value in self.elsewhere:
            if at not in points.tolist():
                points, values = (
                    torch.cat([points, torch.tensor([at])]),
                    torch.cat([values, torch.tensor([value])]),
                )
        return {"at": points, "values": values}

    def join(self, functions):
        return {"functions": [g for f in functions for g in f.get("functions", [f])]}

    def values(self, functions, weights, x, spec):
        out = torch.zeros(len(x), spec.outputs)
        for f, w in zip(functions["functions"], weights.tolist(), strict=True):
            out += w * ((x[:, :1] == f["at"]).float() @ f["values"])
        return out


def test_theorem_4_2_an_adversarial_oracle_keeps_f_at_zero():
    """Two clients with one row each.

    Every function is exact at its own row, and minus the other's gradient at the other.
    """
    fed = fd.Federation.from_clients(
        [(column(1), np.array([0])), (column(2), np.array([1]))], classes=2
    )
    # softmax(0) = (1/2, 1/2): gradients (-1/2, 1/2) at x = 1 and (1/2, -1/2) at x = 2.
    adversary = Table(elsewhere=((1.0, (0.5, -0.5)), (2.0, (-0.5, 0.5))))
    at = column(1, 2)
    for step, mu in ((1.0, 0.0), (0.5, 0.1), ("theorem4.1", 0.1)):
        algorithm = fd.FFGB(adversary, step=step, mu=mu)
        for rounds in (1, 2, 20):
            assert (outputs(algorithm, fed, rounds, at) == 0).all()
    # It is an oracle with gamma = 1: on the client's support it is exact.
    function = adversary.fit(
        torch.tensor([[1.0]]), torch.tensor([[-0.5, 0.5]]), random.key(0), fed.spec
    )
    assert (
        gamma(adversary, function, torch.tensor([[1.0]]), torch.tensor([[-0.5, 0.5]]), fed.spec)
        == 1
    )
    # One that says 0 elsewhere does learn: f(1) = -1/2 (-1/2, 1/2).
    np.testing.assert_allclose(
        outputs(fd.FFGB(Table(), step=1.0), fed, 1, at), [[0.25, -0.25], [-0.25, 0.25]]
    )
    assert (outputs(fd.FFGB(Table(), step=1.0), fed, 20, at).argmax(1) == [0, 1]).all()


POINTS = column(0, 1, 2)
LABELS = [
    np.array([3.0, -1, 2], np.float32),
    np.array([1.0, 5, -4], np.float32),
    np.array([2.0, -1, 8], np.float32),
]
MEAN = np.array([2.0, 1.0, 2.0])


def alike() -> fd.Federation:
    """The same inputs at every client, other labels."""
    return fd.Federation.from_clients([(POINTS, y) for y in LABELS])


def test_theorem_4_3_with_the_residual_f_goes_to_the_minimizer():
    """f* = mean label / (1 + mu).

    An oracle that gives a third of phi: error falls with T where K grows like sqrt(T).
    """
    mu, errors = 0.5, []
    for K, T in ((2, 4), (5, 25), (10, 100)):
        algorithm = fd.FFGB(
            Table(part=1 / 3), loss="squared", local_steps=K, mu=mu, step="theorem4.3"
        )
        errors.append(np.abs(outputs(algorithm, alike(), T, POINTS)[:, 0] - MEAN / (1 + mu)).max())
    assert errors[0] > 1.7 * errors[1] > 3 * errors[2] and errors[2] < 0.12, errors


def test_theorem_4_3_without_the_residual_f_goes_elsewhere():
    """0 = part (f - mean) + mu f: f = part mean / (part + mu)."""
    part, mu = 1 / 3, 0.5
    algorithm = fd.FFGB(
        Table(part=part), loss="squared", local_steps=10, mu=mu, step="theorem4.3", residual=False
    )
    got = outputs(algorithm, alike(), 60, POINTS)[:, 0]
    np.testing.assert_allclose(got, part * MEAN / (part + mu), atol=0.02)
    assert np.abs(got - MEAN / (1 + mu)).max() > 0.3


def test_theorem_4_3_with_stumps():
    """A stump cannot say three values; the residual makes up for it. It does not without."""
    mu, far = 0.5, {}
    for residual in (True, False):
        algorithm = fd.FFGB(
            STUMP, loss="squared", local_steps=10, mu=mu, step="theorem4.3", residual=residual
        )
        far[residual] = np.abs(
            outputs(algorithm, alike(), 25, POINTS)[:, 0] - MEAN / (1 + mu)
        ).max()
    assert far[True] < 0.13 < 0.26 < far[False], far


# -- bytes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched(fd.FFGB):
    """FFGB that writes down what clients get and send."""

    seen: ClassVar[list] = []
    got: ClassVar[dict] = {}

    def absorb(self, client, f):
        self.got[int(client.id)] = f
        return super().absorb(client, f=f)

    def boost(self, client, t):
        reply, state = super().boost(client, t)
        news = self.got.pop(int(client.id), None)
        self.seen.append(
            (t, int(client.id), {"t": t, **({} if news is None else {"f": news})}, reply)
        )
        return reply, state


def test_bytes_are_those_of_the_functions():
    Watched.seen.clear()
    fed = unequal(classes=3)
    run = fd.run(Watched(TREES, local_steps=2, mu=0.1, step=0.5), fed, 3)
    up = down = 0
    for t in range(3):
        here = [s for s in Watched.seen if s[0] == t]
        assert [i for _, i, _, _ in here] == [0, 1, 2, 3]
        for _, _, payload, reply in here:
            assert set(reply) == {"functions"} and len(reply["functions"]) == 2
            up += len(wire.encode(reply))
            down += len(wire.encode(payload))
            # Only what is new: the functions of the round before, 4 clients x 2 steps x 2 trees.
            assert ("f" in payload) == (t > 0)
            if t:
                before = [h for u, _, _, r in Watched.seen if u == t - 1 for h in r["functions"]]
                _, parts, weights = payload["f"]
                assert len(parts) == 1 and len(parts[0].roots) == 16
                assert torch.equal(parts[0].value, torch.cat([h.value for h in before]))
                assert weights[0].shape == (8,)
        assert (
            run.records.rows[t + 1]["bytes_up"] == up
            and run.records.rows[t + 1]["bytes_down"] == down
        )
        assert run.records.rows[t + 1]["messages_up"] == 4 * (t + 1)


def test_those_who_were_away_are_sent_all_they_missed():
    Watched.seen.clear()
    run = fd.run(Watched(TREES, step=0.5), unequal(), 6, participation=0.5, seed=2)
    last = dict.fromkeys(range(4), 0)
    for t, i, payload, _ in Watched.seen:
        assert len(payload["f"][1] if "f" in payload else []) == t - last[i]
        last[i] = t
    assert max(len(p["f"][1]) for _, _, p, _ in Watched.seen if "f" in p) > 1
    assert run.records.last("bytes_down") == sum(len(wire.encode(p)) for _, _, p, _ in Watched.seen)


def test_replies_that_are_no_functions_are_refused():
    @dataclass(frozen=True)
    class Spoilt(fd.FFGB):
        kind: str = ""

        def boost(self, client, **payload):
            reply, state = super().boost(client, **payload)
            h = reply["functions"][0]
            made = {
                "few": [h],
                "none": [],
                "text": [h, {"a": torch.zeros(1)}],
                "trees": [h, self.oracle.join([h, h])],
            }
            return {"functions": made[self.kind]} if self.kind != "list" else [h, h], state

    for kind in ("few", "none", "text", "trees", "list"):
        with pytest.raises(fd.ReplyError):
            ends(Spoilt(TREES, local_steps=2, kind=kind), unequal(), 1)


def test_saved_and_loaded(tmp_path):
    run = ends(fd.FFGB(TREES, step=0.5), unequal(), 2)
    run.save(tmp_path / "run.safetensors")
    back = fd.Run.load(tmp_path / "run.safetensors", algorithm=fd.FFGB(TREES, step=0.5))
    np.testing.assert_array_equal(run.model.predict(X), back.model.predict(X))


def test_loaded_from_its_own_settings(tmp_path):
    run = ends(fd.FFGB(TREES, step=0.5), unequal(), 2)
    run.save(tmp_path / "run.safetensors")
    np.testing.assert_array_equal(
        fd.Run.load(tmp_path / "run.safetensors").model.predict(X), run.model.predict(X)
    )


def test_probabilities_of_the_logistic_loss():
    """Every class against the rest: sigmoids, brought to sum 1, as those of FedNewton."""
    model = ends(fd.FFGB(TREES, loss="logistic", step=1.0), unequal(classes=3), 3).model
    p = 1 / (1 + np.exp(-model.outputs(X).double().numpy()))
    np.testing.assert_allclose(model.predict_proba(X), p / p.sum(1, keepdims=True), atol=1e-5)


def test_an_archive_that_cannot_be_read_is_refused():
    @dataclass(frozen=True)
    class Junk(fd.FFGB):
        def boost(self, client, **payload):
            state = super().boost(client, **payload)[1]
            return {"functions": [{"archive": torch.zeros(4, dtype=torch.uint8)}]}, state

    with pytest.raises(fd.ReplyError):
        fd.run(Junk(fd.Sklearn(Ridge())), unequal(), 1)


# -- oracles ---------------------------------------------------------------------------------------


def spec(features=1, width=1) -> fd.Spec:
    return fd.Spec((features,), None, width)


def test_gamma_by_hand():
    """phi = (3, 4), h = (3, 2): 1 - 2 / 5 in L2; 1 - 2 / 4 in the maximum norm."""
    x, phi = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    function = {"at": torch.tensor([1.0, 2.0]), "values": torch.tensor([[3.0], [2.0]])}

    class Largest(Table):
        norm = "linf"

    assert gamma(Table(), function, x, phi, spec()) == pytest.approx(1 - 2 / 5)
    assert gamma(Largest(), function, x, phi, spec()) == pytest.approx(0.5)
    # Rows of two outputs: |(3, 4)| = 5 and 0; errors |(0, 4)| = 4 and |(1, 0)| = 1.
    phi, values = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    function = {"at": torch.tensor([1.0, 2.0]), "values": values}
    assert gamma(Table(), function, x, phi, spec(width=2)) == pytest.approx(1 - math.sqrt(17) / 5)
    assert gamma(Largest(), function, x, phi, spec(width=2)) == pytest.approx(1 - 4 / 5)


def wave(n=64):
    x = torch.linspace(-1, 1, n).unsqueeze(1)
    return x, torch.sin(3 * x)


def test_a_network_fits():
    x, y = wave()
    far = []
    for epochs in (1, 10, 100):
        net = fd.Net(
            fd.MLP(16), fd.Training(lr=1e-2, optimizer="adam", epochs=epochs, batch_size=16)
        )
        h = net.fit(x, y, random.key(0), spec())
        far.append(float((net.values(net.join([h]), torch.ones(1), x, spec()) - y).square().mean()))
    assert far[0] > far[1] > far[2] and far[2] < 0.05, far


def test_sums_of_networks():
    """values is sum_j w_j h_j, and joins of joins keep the order."""
    net, x = fd.Net(fd.MLP(3)), wave(7)[0]
    hs = [net.model.init(spec(), random.key(s)) for s in range(3)]

    def apply(h):
        w0, b0, w1, b1 = (h[k].double().numpy() for k in ("weight0", "bias0", "weight1", "bias1"))
        return np.maximum(x.numpy() @ w0.T + b0, 0) @ w1.T + b1

    weights = [0.5, -2.0, 3.0]
    joined = net.concat([net.join(hs[:1]), net.join(hs[1:])])
    got = net.values(joined, torch.tensor(weights), x, spec())
    np.testing.assert_allclose(
        got, sum(w * apply(h) for w, h in zip(weights, hs, strict=True)), atol=1e-5
    )
    assert all(len(v) == 3 for v in joined.values())


def test_a_network_for_the_maximum_is_nowhere_far_off():
    """A spike in a flat function: least squares leaves it out, the largest error cannot."""
    x = torch.linspace(-1, 1, 41).unsqueeze(1)
    phi = torch.where(x.abs() < 0.03, 4.0, 0.0)
    model, steps = fd.MLP(8), 300
    mean = fd.Net(model, fd.Training(lr=1e-2, optimizer="adam", epochs=steps, batch_size=None))
    most = fd.MaxNet(model, steps=steps, lr=1e-2)
    far = {}
    for name, oracle in (("mean", mean), ("most", most)):
        h = oracle.fit(x, phi, random.key(1), spec())
        far[name] = (oracle.values(oracle.join([h]), torch.ones(1), x, spec()) - phi).abs()
    assert far["most"].max() < 0.8 * far["mean"].max(), (far["most"].max(), far["mean"].max())
    assert far["mean"].mean() < far["most"].mean()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20), st.floats(1e-3, 100))
def test_the_smooth_maximum_is_between_mean_and_maximum(numbers, beta):
    v = torch.tensor(numbers, dtype=torch.float64)
    got = float(smooth_maximum(v, beta))
    assert v.mean() - 1e-9 <= got <= v.max() + 1e-9
    assert float(smooth_maximum(v, 2 * beta)) >= got - 1e-9
    # By hand: off the maximum by log(n) / beta at most.
    assert v.max() - got <= math.log(len(v)) / beta + 1e-9


def test_the_smooth_maximum_by_hand():
    """1 / 2 log((e^0 + e^2) / 2); the mean and the maximum in the limits."""
    v = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert float(smooth_maximum(v, 2.0)) == pytest.approx(0.5 * math.log((1 + math.exp(2)) / 2))
    assert float(smooth_maximum(v, 1e-6)) == pytest.approx(0.5, abs=1e-5)
    assert float(smooth_maximum(v, 1e6)) == pytest.approx(1.0, abs=1e-5)


def test_lipschitz_constant_by_hand():
    """(0, 0) -> 0, (3, 4) -> 10, (3, 0) -> 1: slopes 2, 1/3 and 9/4."""
    x, y = torch.tensor([[0.0, 0], [3, 4], [3, 0]]), torch.tensor([0.0, 10, 1])
    assert lipschitz_constant(x, y) == pytest.approx(9 / 4)
    assert lipschitz_constant(x[:1], y[:1]) == 0
    # Two outputs: the length of the difference. Equal rows do not count.
    assert lipschitz_constant(
        torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([[0.0, 0], [3, 4], [3, 4]])
    ) == pytest.approx(5)


def test_lipschitz_constant_of_many_rows_far_from_0():
    """A slope of 1/2 between 40 rows from 1000 to 1000.01."""
    x = torch.linspace(1000, 1000.01, 40, dtype=torch.float64).unsqueeze(1)
    assert lipschitz_constant(x, 1000 + x / 2) == pytest.approx(1 / 2, rel=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-18])
def test_a_network_for_the_maximum_of_next_to_nothing(size):
    """Where phi is 0 the network must come to be so, too, and not stay where it was drawn."""
    x, oracle = torch.linspace(-1, 1, 21).unsqueeze(1), fd.MaxNet(fd.MLP(8), steps=300)
    first = (
        oracle.model.apply(oracle.model.init(spec(), random.fold(random.key(0), 0)), x).abs().max()
    )
    h = oracle.fit(x, torch.full((21, 1), size), random.key(0), spec())
    assert oracle.model.apply(h, x).abs().max() < 0.1 * first


def test_lipschitz_extension_by_hand():
    """Rows 0 -> 1 and 2 -> 2, L = 3: u(1) = min(4, 5), u(-1) = min(4, 11), u(1.8) = min(6.4,
    2.6).
    """
    got = lipschitz_extension(
        torch.tensor([[0.0], [2.0]]),
        torch.tensor([1.0, 2.0]),
        3.0,
        torch.tensor([[1.0], [-1.0], [1.8], [0.0]]),
    )
    np.testing.assert_allclose(got[:, 0], [4, 4, 2.6, 1], rtol=1e-6)
    with pytest.raises(fd.ConfigError, match="constant"):
        lipschitz_extension(torch.zeros(1, 1), torch.zeros(1), 0.0, torch.zeros(1, 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 3))
def test_lipschitz_extension_goes_through_the_data(seed, n, d):
    rng = np.random.default_rng(seed)
    x, y = torch.from_numpy(rng.normal(size=(n, d))), torch.from_numpy(rng.normal(size=n))
    L = max(lipschitz_constant(x, y), 0.1)
    np.testing.assert_allclose(lipschitz_extension(x, y, L, x)[:, 0], y, atol=1e-9)
    a, b = (torch.from_numpy(rng.normal(size=(20, d)) * 3) for _ in range(2))
    rise = (lipschitz_extension(x, y, L, a) - lipschitz_extension(x, y, L, b)).abs()[:, 0]
    assert (rise <= L * (a - b).norm(dim=1) + 1e-9).all()
    # A brute force over the rows.
    want = min(float(y[j]) + L * float(np.linalg.norm(a[0] - x[j])) for j in range(n))
    assert float(lipschitz_extension(x, y, L, a[:1])) == pytest.approx(want)


def halves() -> fd.Federation:
    """A sine on [-1, 1]: one client has the left half, the other the right."""
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    test = np.linspace(-0.97, 0.97, 41, dtype=np.float32)
    clients = [(part[:, None], np.sin(3 * part)) for part in (x[:16], x[16:])]
    return fd.Federation.from_clients(clients, test=(test[:, None], np.sin(3 * test)))


SOBOLEV = fd.SobolevNet(fd.MLP(8), steps=60, lr=2e-2, points=16)


@pytest.mark.parametrize(("mu", "step"), [(0.0, "theorem4.1"), (0.2, 0.4)])
def test_algorithm_3_by_its_recursion(mu, step):
    """g <- g - eta (g - h + mu g), averaged, from the functions in the state: two clients, three
    rounds, K = 2.
    """
    fed, K = halves(), 2
    run = fd.run(fd.FFGBLipschitz(SOBOLEV, local_steps=K, mu=mu, step=step), fed, 3)
    x = np.linspace(-1.2, 1.2, 30, dtype=np.float32)[:, None]
    f = np.zeros((30, 1))
    for t, part in enumerate(run.state.f.parts):
        h = [
            fd.MLP(8)
            .apply({k: v[j] for k, v in part.items()}, torch.from_numpy(x))
            .double()
            .numpy()
            for j in range(2 * K)
        ]
        ends_ = []
        for client in range(2):
            g = f
            for k in range(1, K + 1):
                eta = step if isinstance(step, float) else 4 / ((1 + mu) * (t * K + k + 1))
                g = g - eta * (g - h[client * K + k - 1] + mu * g)
            ends_.append(g)
        f = sum(ends_) / 2
    np.testing.assert_allclose(run.model.outputs(x), f, atol=1e-4)


def test_lipschitz_boosting_learns_a_sine():
    """Both clients have rows all over the line."""
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    fed = fd.Federation.from_clients(
        [(p[:, None], np.sin(3 * p)) for p in (x[::2], x[1::2])], test=(x[:, None], np.sin(3 * x))
    )
    oracle = fd.SobolevNet(fd.MLP(16), steps=120, lr=2e-2, points=8, slopes=1e-3)
    run = fd.run(fd.FFGBLipschitz(oracle, local_steps=2, step=0.4), fed, 4)
    mse = [row["mse"] for row in run.records.rows]
    assert mse[0] > 0.4 and mse[1] < 0.3 * mse[0] and mse[-1] < 0.5 * mse[1] and mse[-1] < 0.03, mse


@dataclass(frozen=True)
class Asked(fd.SobolevNet):
    """Writes down what it was asked for on the client's rows, and what it said there."""

    seen: ClassVar[list] = []

    def fit_function(self, x, phi, key, spec):
        h = super().fit_function(x, phi, key, spec)
        self.seen.append(
            (phi(x).detach().double().numpy(), self.model.apply(h, x).double().numpy())
        )
        return h


@pytest.mark.parametrize("residual", [True, False])
def test_what_algorithm_3_asks_its_oracle(residual):
    """u - Delta_{k-1}, Delta_k = Delta_{k-1} - u + h_k; on the rows u is y.

    It is u alone without the residual.
    """
    Asked.seen.clear()
    fed, K = halves(), 3
    ends(
        fd.FFGBLipschitz(Asked(fd.MLP(4), steps=10, points=4), local_steps=K, residual=residual),
        fed,
        1,
    )
    assert len(Asked.seen) == 2 * K
    for client in range(2):
        y, delta = fed.data.y_train[fed.client_rows(client)][:, None].astype(float), 0.0
        for asked, said in Asked.seen[client * K : (client + 1) * K]:
            np.testing.assert_allclose(asked, y - delta, atol=1e-5)
            delta = delta - y + said if residual else 0.0


@pytest.mark.parametrize("constant", [None, 7.0])
def test_the_lipschitz_constant_of_algorithm_3(constant):
    """Two rows, 0 -> 0 and 1 -> 2: the largest slope is 2. u(1/2) = min(L / 2, 2 + L / 2)."""
    fed = fd.Federation.from_clients([(column(0, 1), np.array([0.0, 2.0]))])
    between = []

    @dataclass(frozen=True)
    class Between(fd.SobolevNet):
        def fit_function(self, x, phi, key, spec):
            between.append(float(phi(torch.tensor([[0.5]]))))
            return self.model.init(spec, key)

    ends(fd.FFGBLipschitz(Between(fd.MLP(2)), constant=constant), fed, 1)
    assert between == [pytest.approx((constant or 2.0) / 2)]


def test_slopes_are_learned_too():
    """Of two points only the values are known, but phi = x^2 has slopes: the network with them is
    closer between.
    """
    x = torch.tensor([[-1.0], [1.0]])
    between = torch.linspace(-0.9, 0.9, 19).unsqueeze(1)
    far = {}
    for slopes in (1e-9, 1.0):
        oracle = fd.SobolevNet(fd.MLP(16), steps=300, lr=1e-2, points=32, slopes=slopes)
        h = oracle.fit_function(x, lambda z: z.square(), random.key(0), spec())
        far[slopes] = float((oracle.model.apply(h, between) - between.square()).abs().max())
    assert far[1.0] < 0.15 and far[1.0] < 0.5 * far[1e-9], far


RIDGE = fd.Sklearn(Ridge(alpha=2.0))


def ridge(x, y, a=2.0):
    """Ridge regression with a free intercept: centered normal equations."""
    mx, my = x.mean(0), y.mean(0)
    w = np.linalg.solve((x - mx).T @ (x - mx) + a * np.eye(x.shape[1]), (x - mx).T @ (y - my))
    return lambda z: (z - mx) @ w + my


@pytest.mark.parametrize("width", [1, 2])
def test_any_regressor_against_numpy(width):
    fed = unequal(outputs=width)
    got = outputs(fd.FFGB(RIDGE, step=0.5, local_steps=2, mu=0.1), fed, 2, X)
    f = [lambda z: np.zeros((len(z), width))]
    for _ in range(2):
        before, after = f[-1], []
        for i in range(4):
            rows = fed.client_rows(i)
            x, y = (
                fed.data.x_train[rows].astype(float),
                fed.data.y_train[rows].reshape(len(rows), -1).astype(float),
            )
            h1 = ridge(x, before(x) - y)
            g2 = lambda z, h1=h1, before=before: 0.95 * before(z) - 0.5 * h1(z)  # noqa: E731
            delta = before(x) - y - h1(x)
            h2 = ridge(x, delta + g2(x) - y)
            after.append(lambda z, g2=g2, h2=h2: 0.95 * g2(z) - 0.5 * h2(z))
        f.append(lambda z, after=after: sum(g(z) for g in after) / 4)
    np.testing.assert_allclose(got, f[-1](X.astype(float)), atol=1e-4)


class OneOutput(Ridge):
    """Says one number a row, whatever it was asked."""

    def predict(self, X):
        return super().predict(X).reshape(len(X), -1)[:, 0]


def test_a_regressor_of_one_output_is_refused_where_two_are_due():
    with pytest.raises(fd.ModelError, match="returns 1 outputs; the data needs 2"):
        ends(fd.FFGB(fd.Sklearn(OneOutput())), unequal(outputs=2), 1)


def archive(thing) -> dict:
    return {"archive": torch.from_numpy(np.frombuffer(skops.io.dumps(thing), np.uint8).copy())}


@pytest.mark.parametrize(
    "thing",
    [
        {"a": 1},
        Ridge(),
        Ridge().fit(np.eye(4), np.ones(4)),
        Ridge().fit(np.eye(3), np.ones((3, 2))),
    ],
    ids=["no regressor", "one that is not fitted", "one for four features", "one of two outputs"],
)
def test_archives_of_anything_else_are_refused(thing):
    """When they come, and not when somebody applies them."""
    RIDGE.accept(archive(Ridge().fit(np.eye(3), np.ones(3))), spec(3))
    with pytest.raises(fd.ReplyError, match="does not hold a regressor"):
        RIDGE.accept(archive(thing), spec(3))


def test_a_regressor_draws_from_the_clients_key():
    tree = fd.Sklearn(
        DecisionTreeRegressor(splitter="random", max_depth=2), trusted=("sklearn.tree._tree.Tree",)
    )
    x, y = torch.from_numpy(X), torch.from_numpy(X[:, :1] ** 2)
    a, b, c = (
        tree.values(tree.join([tree.fit(x, y, random.key(s), spec(3))]), torch.ones(1), x, spec(3))
        for s in (0, 0, 1)
    )
    assert torch.equal(a, b) and not torch.equal(a, c)


# -- bad input -------------------------------------------------------------------------------------

BAD = [
    ({"local_steps": 0}, "local_steps=0"),
    ({"local_steps": 1.5}, "local_steps=1.5"),
    ({"mu": -0.1}, "mu=-0.1"),
    ({"mu": float("nan")}, "mu=nan"),
    ({"mu": "big"}, "mu='big'"),
    ({"step": 0}, "step=0"),
    ({"step": -1.0}, "step=-1.0"),
    ({"step": True}, "step=True"),
    ({"step": "theorem5", "mu": 0.1}, "step='theorem5' must be .* 'theorem4.1' or 'theorem4.3'"),
    ({"step": "theorem4.1"}, "needs mu above 0"),
    ({"step": "theorem4.3"}, "needs mu above 0"),
    ({"oracle": DecisionTreeRegressor()}, "must be an oracle"),
    ({"oracle": fd.MLP(3)}, "must be an oracle"),
    ({"oracle": fd.Forest}, "must be an oracle"),
    ({"weights": "even"}, "'even' is unknown"),
    ({"loss": object()}, "a function .* or have value"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.FFGB(**changes)


def test_losses_that_do_not_fit_are_refused():
    class Valued:
        def value(self, outputs, y):
            return outputs[:, 0]

    with pytest.raises(fd.ConfigError, match="slope"):
        fd.FFGB(loss=Valued())
    with pytest.raises(fd.ConfigError, match="'hinge' is unknown"):
        fd.run(fd.FFGB(loss="hinge"), unequal(), 1)
    for name in ("cross_entropy", "logistic"):
        with pytest.raises(fd.ConfigError, match="needs class labels"):
            fd.run(fd.FFGB(loss=name), unequal(), 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"trees": 0},
        {"leaf": 0},
        {"depth": 0},
        {"features": 0.0},
        {"features": 1.5},
        {"features": True},
    ],
    ids=str,
)
def test_bad_forests_are_refused(changes):
    with pytest.raises(fd.ConfigError, match=next(iter(changes))):
        fd.Forest(**changes)


def test_bad_networks_are_refused():
    with pytest.raises(fd.ConfigError, match="training"):
        fd.Net(fd.MLP(3), training=3)
    with pytest.raises(fd.ModelError, match="model must be"):
        fd.Net(3)
    for changes in ({"steps": 0}, {"lr": 0.0}, {"sharpness": 0.5}):
        with pytest.raises(fd.ConfigError, match=next(iter(changes))):
            fd.MaxNet(fd.MLP(3), **changes)
    for changes in ({"slopes": 0.0}, {"points": 0}):
        with pytest.raises(fd.ConfigError, match=next(iter(changes))):
            fd.SobolevNet(fd.MLP(3), **changes)


def test_a_network_with_the_wrong_number_of_outputs_is_refused():
    with pytest.raises(fd.ModelError, match="3 outputs"):
        fd.run(fd.FFGB(fd.Net(torch.nn.Linear(3, 2))), unequal(classes=3), 1)

    @dataclass(frozen=True)
    class Wide(fd.MLP):
        def apply(self, params, x):
            return torch.cat([super().apply(params, x)] * 2, 1)

    with pytest.raises(fd.ModelError, match="must return 3 a row"):
        fd.run(fd.FFGB(fd.Net(Wide(4))), unequal(classes=3), 1)


def test_bad_settings_of_the_lipschitz_form():
    for oracle in (None, fd.Forest(), fd.Net(fd.MLP(3)), fd.MaxNet(fd.MLP(3))):
        with pytest.raises(fd.ConfigError, match="SobolevNet"):
            fd.FFGBLipschitz(oracle)
    for changes, message in (
        ({"loss": "huber"}, "squared loss"),
        ({"constant": 0.0}, "constant"),
        ({"step": "theorem5"}, "theorem4.1"),
        ({"step": 0.0}, "step"),
        ({"local_steps": 0}, "local_steps"),
        ({"mu": -1.0}, "mu"),
        ({"weights": "even"}, "unknown"),
    ):
        with pytest.raises(fd.ConfigError, match=message):
            fd.FFGBLipschitz(SOBOLEV, **changes)
    with pytest.raises(fd.ConfigError, match="real targets"):
        fd.run(fd.FFGBLipschitz(SOBOLEV), unequal(classes=3), 1)


def test_classes_of_nobody_are_warned_of():
    clients = [(column(0, 1), np.array([0, 2])), (column(2, 3), np.array([2, 0]))]
    fed = fd.Federation.from_clients(clients, classes=4)
    with pytest.warns(UserWarning, match=r"classes \[1, 3\] appear at no client"):
        run = ends(fd.FFGB(STUMP, step=0.5), fed, 2)
    assert (run.model.outputs(column(0, 1, 2, 3))[:, [1, 3]] < 0).all()
    assert set(itertools.chain(run.model.predict(column(0, 1, 2, 3)).tolist())) <= {0, 2}
    assert run.records.last("messages_up") == 4
