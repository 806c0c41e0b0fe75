"""FFGB, FFGBLipschitz and the distilled methods against NumPy over three rounds: half of six
unequal clients, and delays.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.tree import DecisionTreeRegressor

import foedus as fd
from foedus.base import random

from . import twins_families as twins

SEED, ROUNDS = 9, 3
N = len(twins.SIZES)
PROBES = np.random.default_rng(1).normal(size=(11, 3)).astype(np.float32)
WEAK = 0.37
"""The ridge of the oracles: what they miss of a target is not orthogonal to what they can say."""


def ridge(x, target):
    """Coefficients (d + 1, k), the constant last."""
    rows = np.hstack([x, np.ones((len(x), 1))])
    return np.linalg.solve(rows.T @ rows + WEAK * np.eye(rows.shape[1]), rows.T @ target)


def line(coefficients, x):
    return np.hstack([x, np.ones((len(x), 1))]) @ coefficients


def params(coefficients):
    found = torch.from_numpy(coefficients).float()
    return {"weight": found[:-1].T.contiguous(), "bias": found[-1]}


class Line(fd.Net):
    """An oracle in closed form: ridge regression."""

    def fit(self, x, target, key, spec):
        return params(ridge(x.double().numpy(), target.double().numpy()))


class Slope(fd.SobolevNet):
    """Ridge regression to a function, on the client's rows and on points between them and 0.37."""

    def fit_function(self, x, phi, key, spec):
        at = torch.cat([x, 0.5 * x + 0.37])
        return params(ridge(at.double().numpy(), phi(at).double().numpy()))


def fit_line(x, target):
    found = ridge(x, target)
    return lambda rows: line(found, rows)


def fit_tree(x, target):
    found = DecisionTreeRegressor(max_depth=2).fit(x, target)
    return lambda rows: found.predict(rows).reshape(len(rows), -1)


# -- Algorithms 1 to 3 -----------------------------------------------------------------------------


class Ensemble:
    """A sum of functions, each with its coefficient."""

    def __init__(self, terms=()):
        self.terms = list(terms)

    def __call__(self, x, width):
        return sum((c * h(x) for c, h in self.terms), np.zeros((len(x), width)))

    def plus(self, scale, other):
        return Ensemble(self.terms + [(scale * c, h) for c, h in other.terms])

    def times(self, scale):
        return Ensemble([(scale * c, h) for c, h in self.terms])


class Twin:
    def __init__(
        self,
        algorithm,
        clients,
        outputs,
        loss="squared",
        fit=fit_line,
        participation=1.0,
        delays=None,
    ):
        self.a, self.outputs, self.loss, self.fit = algorithm, outputs, loss, fit
        self.data, self.p, self.delays = twins.double(clients), participation, delays
        self.f, self.sent, self.made, self.t = Ensemble(), {}, {}, 0
        self.rows = np.array([len(y) for _, y in clients], float)

    def eta(self, t, k, strength):
        """Rounds t from 0, steps k from 1."""
        c = {"theorem4.1": 4.0, "theorem4.3": 2.0}.get(self.a.step)
        return self.a.step if c is None else c / (strength * (t * self.a.local_steps + k + 1))

    def boost(self, i, f, t):
        """Algorithm 2: g_{K+1}."""
        x, y = self.data[i]
        g, delta = f, 0.0
        for k in range(1, self.a.local_steps + 1):
            slope = twins.slope_of(self.loss, g(x, self.outputs), y)
            h = self.fit(x, delta + slope)
            if self.a.residual:
                delta = delta + slope - h(x)
            eta = self.eta(t, k, self.a.mu)
            g = g.times(1 - eta * self.a.mu).plus(-eta, Ensemble([(1.0, h)]))
        return g

    def extend(self, i, f, t):
        """Algorithm 3, with the sign of line 4 and the index of line 7 put right."""
        x, y = self.data[i]
        L = self.a.constant
        if L is None:
            pairs = [(a, b) for a in range(len(x)) for b in range(a)]
            L = max(np.linalg.norm(y[a] - y[b]) / np.linalg.norm(x[a] - x[b]) for a, b in pairs)
        at = np.vstack([x, 0.5 * x + 0.37])
        u = (y[None] + L * np.linalg.norm(at[:, None] - x[None], axis=2)[..., None]).min(1)
        g, delta = f, 0.0
        for k in range(1, self.a.local_steps + 1):
            found = ridge(at, u - delta)
            h = lambda rows, found=found: line(found, rows)  # noqa: E731
            if self.a.residual:
                delta = delta - u + h(at)
            eta = self.eta(t, k, 1 + self.a.mu)
            g = g.times(1 - eta * (1 + self.a.mu)).plus(eta, Ensemble([(1.0, h)]))
        return g

    def round(self):
        self.t += 1
        t = self.t
        self.sent[t] = self.f
        learn = self.extend if isinstance(self.a, fd.FFGBLipschitz) else self.boost
        who = twins.cohort(SEED, t, N, self.p)
        for i in who:
            version = self.delays.version(t, i) if self.delays else t
            self.made[i, t] = version
        came = [(i, t, t) for i in who]
        if self.delays:
            came = [c for c in self.delays.arriving(t) if c[:2] in self.made]
        if not came:
            return
        weight = (
            self.rows[[i for i, _, _ in came]] if self.a.weights == "rows" else np.ones(len(came))
        )
        total = Ensemble()
        for (i, _, version), share in zip(came, weight / weight.sum(), strict=True):
            # What a client has found, as a change of f by the steps of the round that it answers.
            total = total.plus(share, self.changed(learn, i, version))
        self.f = total

    def changed(self, learn, i, version):
        """The client's steps from the f that it was sent, made on the f of now: the same factor,
        the same functions.
        """
        then = self.sent[version]
        g = learn(i, then, version - 1)
        new = Ensemble(g.terms[len(then.terms) :])
        factor, strength = 1.0, 1 + self.a.mu if isinstance(self.a, fd.FFGBLipschitz) else self.a.mu
        for k in range(1, self.a.local_steps + 1):
            factor *= 1 - self.eta(version - 1, k, strength) * strength
        return self.f.times(factor).plus(1.0, new)


def compare(
    algorithm,
    clients,
    outputs=1,
    classes=None,
    rounds=ROUNDS,
    probes=PROBES,
    tolerance=1e-5,
    **more,
):
    twin = Twin(algorithm, clients, outputs, **more)
    options = {"engine": twin.delays.engine} if twin.delays else {}
    for t in range(1, rounds + 1):
        twin.round()
        run = twins.run(algorithm, clients, t, classes, seed=SEED, participation=twin.p, **options)
        want = twin.f(probes.astype(float), outputs)
        twins.near(run.model.outputs(probes), want, tolerance, f"f after round {t}")
        _, weights = run.algorithm.ensemble(run.state)
        # The twin counts a function once for each client of later rounds: their shares add up.
        kept = {}
        for c, h in twin.f.terms:
            kept[id(h)] = kept.get(id(h), 0.0) + c
        twins.near(
            np.sort(weights.double().numpy()),
            np.sort(list(kept.values())),
            what=f"weights after round {t}",
        )
    assert np.abs(want).max() > 1e-2


VARIANTS = {
    "plain": {"step": 0.37},
    "two steps": {"step": 0.37, "local_steps": 2},
    "no residual": {"step": 0.37, "local_steps": 2, "residual": False},
    "by rows": {"step": 0.37, "local_steps": 2, "weights": "rows", "mu": 0.23},
    "three steps": {"step": 0.53, "local_steps": 3, "mu": 0.23},
    "theorem 4.1": {"step": "theorem4.1", "local_steps": 2, "mu": 0.53},
    "theorem 4.3": {"step": "theorem4.3", "local_steps": 2, "mu": 0.53, "weights": "rows"},
    "theorem alone": {"step": "theorem4.3", "local_steps": 3, "mu": 0.53, "residual": False},
}


@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds(variant, participation):
    algorithm = fd.FFGB(Line(fd.Linear()), **VARIANTS[variant])
    compare(
        algorithm,
        twins.values(outputs=2),
        2,
        rounds=4 if participation < 1 else 3,
        participation=participation,
    )


@pytest.mark.parametrize("loss", ["cross_entropy", "logistic", "huber"])
def test_losses(loss):
    algorithm = fd.FFGB(Line(fd.Linear()), loss=loss, step=1.37, local_steps=2, mu=0.053)
    compare(algorithm, twins.labels(3), 3, 3, loss=loss, participation=0.5)


@pytest.mark.parametrize("variant", ["two steps", "no residual", "by rows", "theorem 4.3"])
def test_trees(variant):
    """One feature, so that no two splits are the same."""
    clients = twins.values(outputs=2, features=1)
    oracle = fd.Forest(trees=1, depth=2, extra=False, features=1.0)
    compare(
        fd.FFGB(oracle, **VARIANTS[variant]),
        clients,
        2,
        probes=PROBES[:, :1],
        fit=fit_tree,
        participation=0.5,
    )


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("variant", ["two steps", "by rows", "theorem 4.1", "theorem 4.3"])
def test_late_messages(variant, participation):
    """f shrinks and grows by the steps that the functions which arrive were made with."""
    algorithm = fd.FFGB(Line(fd.Linear()), **VARIANTS[variant])
    more = {"delays": twins.Delays(), "participation": participation}
    compare(algorithm, twins.values(outputs=2), 2, rounds=5, **more)


LIPSCHITZ = {
    "theorem": {"local_steps": 2},
    "constant": {"local_steps": 2, "constant": 0.73, "mu": 0.23},
    "step": {"local_steps": 3, "step": 0.37, "weights": "rows"},
    "theorem 4.3": {"local_steps": 2, "step": "theorem4.3", "mu": 0.23, "weights": "rows"},
    "no residual": {"local_steps": 2, "step": 0.37, "residual": False, "constant": 0.73},
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("variant", LIPSCHITZ)
def test_lipschitz(variant, outputs):
    algorithm = fd.FFGBLipschitz(Slope(fd.Linear()), **LIPSCHITZ[variant])
    compare(algorithm, twins.values(outputs=outputs), outputs, participation=0.5)


def test_lipschitz_with_late_messages():
    algorithm = fd.FFGBLipschitz(Slope(fd.Linear()), **LIPSCHITZ["constant"])
    compare(algorithm, twins.values(), delays=twins.Delays(), rounds=4)


# -- distillation ----------------------------------------------------------------------------------


def descend(how, loss, w, x, target, outputs):
    """Gradient descent on all rows at once, from w."""
    for _ in range(how.epochs):
        g = twins.linear_gradient(loss, w, x, target, outputs)
        w = w - how.lr * (g + how.weight_decay * w)
    return w


def outputs_of(w, x, outputs):
    return np.hstack([x, np.ones((len(x), 1))]) @ twins.matrix(w, x.shape[1], outputs).T


FIT = fd.Training(lr=0.17, epochs=3, batch_size=None)
STUDENT = fd.Training(lr=0.13, epochs=4, batch_size=None, weight_decay=0.037)
DISTILLED = {
    "plain": {"local_steps": 2, "step": 0.37, "mu": 0.23},
    "by rows": {"local_steps": 3, "step": 0.37, "mu": 0.23, "weights": "rows"},
    "no residual": {"local_steps": 2, "step": 0.37, "mu": 0.23, "residual": False},
}


@pytest.mark.parametrize("classes", [None, 3])
@pytest.mark.parametrize("variant", DISTILLED)
def test_functions_distilled(variant, classes):
    """Equation 17.

    Clients' networks start from one draw a round and step; the student goes on from where it was.
    """
    clients = twins.labels(3) if classes else twins.values(outputs=3)
    data, k, loss = twins.double(clients), 3, "cross_entropy" if classes else "squared"
    weak = fd.Linear(zero_start=False)
    algorithm = fd.FFGBDistill(
        fd.Linear(), PROBES, weak=weak, oracle=FIT, student=STUDENT, **DISTILLED[variant]
    )
    eta, mu, K = algorithm.step, algorithm.mu, algorithm.local_steps
    spec, theta, public = (
        twins.federation(clients, classes).spec,
        np.zeros(k * 4),
        PROBES.astype(float),
    )
    for t in range(1, ROUNDS + 1):
        who = twins.cohort(SEED, t, N, 0.5)
        weight = np.array([len(data[i][0]) if algorithm.weights == "rows" else 1.0 for i in who])
        teacher = 0.0
        for i, share in zip(who, weight / weight.sum(), strict=True):
            x, y = data[i]
            g, at_public, delta = outputs_of(theta, x, k), outputs_of(theta, public, k), 0.0
            for step in range(1, K + 1):
                target = delta + twins.slope_of(loss, g, y)
                start = twins.flat(weak.init(spec, random.fold(twins.shared_key(SEED), t, step)))
                h = descend(FIT, "squared", start, x, target, k)
                g = g - eta * (outputs_of(h, x, k) + mu * g)
                at_public = at_public - eta * (outputs_of(h, public, k) + mu * at_public)
                if algorithm.residual:
                    delta = target - outputs_of(h, x, k)
            teacher = teacher + share * at_public
        theta = descend(STUDENT, "squared", theta, public, teacher, k)
        run = twins.run(algorithm, clients, t, classes, seed=SEED, participation=0.5)
        twins.near(twins.flat(run.state.w), theta, what=f"theta after round {t}")


@pytest.mark.parametrize("classes", [None, 3])
@pytest.mark.parametrize("weights", ["rows", "uniform"])
def test_averages_distilled(weights, classes):
    """FedDF: from the average of the clients' weights towards the plain mean of their outputs,
    through a softmax for classes.
    """
    clients = twins.labels(3) if classes else twins.values(outputs=3)
    data, k, loss = twins.double(clients), 3, "cross_entropy" if classes else "squared"
    algorithm = fd.FedAvgDistill(
        lr=0.17,
        epochs=3,
        batch_size=None,
        weights=weights,
        model=fd.Linear(),
        public=PROBES,
        student=STUDENT,
    )
    w, public = np.zeros(k * 4), PROBES.astype(float)
    for t in range(1, ROUNDS + 1):
        who = twins.cohort(SEED, t, N, 0.5)
        trained = [descend(FIT, loss, w, *data[i], k) for i in who]
        rows = (
            np.array([len(data[i][0]) for i in who], float)
            if weights == "rows"
            else np.ones(len(who))
        )
        teacher = np.mean([outputs_of(v, public, k) for v in trained], 0)
        if classes:
            teacher = twins.softmax(teacher)
        w = descend(STUDENT, loss, rows / rows.sum() @ np.array(trained), public, teacher, k)
        run = twins.run(algorithm, clients, t, classes, seed=SEED, participation=0.5)
        twins.near(twins.flat(run.state.w), w, what=f"w after round {t}")
