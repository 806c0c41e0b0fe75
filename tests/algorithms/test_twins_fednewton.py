"""FedNewton, DKRR, KRR and the ridge baselines against NumPy over three iterations: all or half of
six unequal clients, and delays.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import foedus as fd

from . import twins_families as twins

SEED, ROUNDS, REG = 7, 3, 0.37
N = len(twins.SIZES)
CLOSE = 1e-9
"""Everything is in double precision."""

pytestmark = pytest.mark.filterwarnings("ignore:.*diverges on this federation")

MAPS = {
    "linear": fd.Identity(intercept=True),
    "waves": fd.RandomFourier(6, bandwidth=1.3, seed=5),
    "monomials": fd.Polynomial(2),
}
DATA = {
    None: (twins.values(outputs=2), 2),
    3: (twins.labels(3), 3),
    2: (twins.labels(2), 2),
}


def prepared(name, classes):
    """Features and targets of each client; labels stay labels."""
    clients, outputs = DATA[classes]
    phi = [MAPS[name](torch.from_numpy(x)).numpy() for x, _ in clients]
    return clients, outputs, phi, [y for _, y in twins.double(clients)]


class Systems:
    """H_j and b_j of each client, and averages by rows."""

    def __init__(self, phi, y, outputs, reg):
        self.rows = np.array([len(p) for p in phi], float)
        eye = np.eye(phi[0].shape[1])
        self.H = [p.T @ p / len(p) + reg * eye for p in phi]
        self.b = [p.T @ twins.hot(t, outputs) / len(p) for p, t in zip(phi, y, strict=True)]
        self.local = [np.linalg.solve(H, b) for H, b in zip(self.H, self.b, strict=True)]

    def mean(self, f, who):
        """sum_j n_j f(j) / sum_j n_j, over pairs (client, argument) or clients."""
        pairs = [j if isinstance(j, tuple) else (j,) for j in who]
        rows = self.rows[[j[0] for j in pairs]]
        return sum(n * f(*j) for n, j in zip(rows, pairs, strict=True)) / rows.sum()


EVERYBODY = list(range(N))


# -- the squared loss ------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [None, 3])
@pytest.mark.parametrize("name", MAPS)
def test_the_start_and_the_reference(name, classes):
    """DKRR: sum_j p_j H_j^-1 b_j.

    KRR: H^-1 b of all rows. Neither moves, whoever takes part later.
    """
    clients, outputs, phi, y = prepared(name, classes)
    s = Systems(phi, y, outputs, REG)
    run = twins.run(fd.DKRR(MAPS[name], REG), clients, 3, classes, seed=SEED, participation=0.5)
    twins.near(run.state.w, s.mean(lambda j: s.local[j], EVERYBODY), CLOSE)
    all_rows = Systems([np.vstack(phi)], [np.concatenate(y)], outputs, REG)
    run = twins.run(fd.KRR(MAPS[name], REG), clients, 3, classes, seed=SEED, participation=0.5)
    twins.near(run.state.w, all_rows.local[0], CLOSE)


HOW = {
    "all": {},
    "half": {"participation": 0.5},
    "late": {"delays": twins.Delays()},
    "half, late": {"participation": 0.5, "delays": twins.Delays()},
}
"""Averages are over all clients, so that these change the rounds, and nothing else."""


def after_iterations(algorithm, clients, classes, how, passes=2, iterations=ROUNDS):
    """The results of runs that end with each iteration, and a check of the round before it."""
    options = {"engine": how["delays"].engine} if "delays" in how else {}
    options["participation"] = how.get("participation", 1.0)
    before = 0
    for end in twins.iterations_end(iterations, passes, SEED, N, **how):
        run = twins.run(algorithm, clients, end, classes, seed=SEED, **options)
        rows = run.records.rows[before + 1 : end]
        assert all(0 <= row["waiting"] <= N for row in rows)
        assert all(row.keys() & {"gradient", "residual", "objective"} == set() for row in rows)
        if end > before + 1:  # w stays until all have answered
            early = twins.run(algorithm, clients, end - 1, classes, seed=SEED, **options).state
            last = twins.run(algorithm, clients, before, classes, seed=SEED, **options).state
            assert torch.equal(early.w, last.w)
        assert "passes" not in run.state
        before = end
        yield run


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "classes"), [("linear", None), ("waves", 3), ("monomials", None)])
def test_newton(name, classes, how):
    """Algorithm 1, with averages over all clients."""
    clients, outputs, phi, y = prepared(name, classes)
    s = Systems(phi, y, outputs, REG)
    w, past, warned = s.mean(lambda j: s.local[j], EVERYBODY), None, False
    for run in after_iterations(fd.FedNewton(MAPS[name], REG), clients, classes, HOW[how]):
        g = s.mean(lambda j, w=w: s.H[j] @ w - s.b[j], EVERYBODY)
        d = s.mean(lambda j, g=g: np.linalg.solve(s.H[j], g), EVERYBODY)
        w = w - d
        for what, got, want in (
            ("w", run.state.w, w),
            ("g", run.state.g, g),
            ("d", run.state.d, d),
        ):
            twins.near(got, want, CLOSE, what)
        row = run.records.rows[-1]
        twins.near(row["gradient"], np.linalg.norm(g), CLOSE)
        if past is not None:  # d^T H d / g^T d - 1 of the iteration before
            g_before, d_before = past
            quotients = [
                a @ (b - c) / (b @ a)
                for a, b, c in zip(d_before.T, g_before.T, g.T, strict=True)
                if b @ a > 0
            ]
            if not warned:  # having warned, a run does not look any more
                twins.near(row["radius"], max(max(quotients) - 1, 0), 1e-7)
            warned = warned or max(quotients) > 2
            assert run.state.warned == warned
        past = g, d


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "classes"), [("linear", None), ("waves", 3), ("monomials", 3)])
def test_conjugate_gradients(name, classes, how):
    """Preconditioned by P, with averages over all clients."""
    clients, outputs, phi, y = prepared(name, classes)
    s = Systems(phi, y, outputs, REG)
    b = s.mean(lambda j: s.b[j], EVERYBODY)
    w = s.mean(lambda j: s.local[j], EVERYBODY)
    r = b - s.mean(lambda j, w=w: s.H[j] @ w, EVERYBODY)
    scale = np.maximum(np.linalg.norm(b, axis=0), np.linalg.norm(r, axis=0))
    p, rz = np.zeros_like(w), np.zeros(outputs)
    algorithm = fd.FedNewton(MAPS[name], REG, solver="cg")
    for run in after_iterations(algorithm, clients, classes, HOW[how]):
        z = s.mean(lambda j, r=r: np.linalg.solve(s.H[j], r), EVERYBODY)
        new = (r * z).sum(0)
        p = z + np.where(rz > 0, new / np.where(rz > 0, rz, 1), 0) * p
        q = s.mean(lambda j, p=p: s.H[j] @ p, EVERYBODY)
        alpha = new / (p * q).sum(0)
        w, r, rz = w + alpha * p, r - alpha * q, new
        for what, want in (("w", w), ("p", p), ("rz", rz), ("scale", scale)):
            twins.near(run.state[what], want, 1e-8, what)
        np.testing.assert_allclose(run.state.r.numpy(), r, rtol=1e-8, atol=1e-10 * scale.max())
        row = run.records.rows[-1]
        twins.near(row["residual"], (np.linalg.norm(r, axis=0) / scale).max(), 1e-6)


# -- other losses (Remark 4) -----------------------------------------------------------------------

DELTA = 0.37
STEPS = (0.0, 4.0, 2.0, 1.0, 0.5, 0.25, 2**-4, 2**-6, 2**-9, 2**-12, 2**-16, 2**-20)


class Objective:
    """F_j, its gradient and its Hessian in the vector of w's columns, one after the other."""

    def __init__(self, loss, phi, y, outputs, reg=REG):
        self.loss, self.phi, self.y, self.k, self.reg = loss, phi, y, outputs, reg

    def value(self, w):
        f, n = self.phi @ w, len(self.phi)
        if self.loss == "huber":
            r = np.abs(f - twins.hot(self.y, self.k))
            rows = np.where(r <= DELTA, r**2 / 2, DELTA * r - DELTA**2 / 2).sum(1)
        else:
            rows = twins.value_of(self.loss, f, self.y)
        return rows.sum() / n + self.reg / 2 * (w**2).sum()

    def gradient(self, w):
        f = self.phi @ w
        if self.loss == "huber":
            slope = np.clip(f - twins.hot(self.y, self.k), -DELTA, DELTA)
        else:
            slope = twins.slope_of(self.loss, f, self.y)
        return self.phi.T @ slope / len(self.phi) + self.reg * w

    def curvature(self, w):
        """The second derivative of each row in its outputs: (n, k, k)."""
        f = self.phi @ w
        if self.loss == "cross_entropy":
            p = twins.softmax(f)
            return np.einsum("na,ab->nab", p, np.eye(self.k)) - np.einsum("na,nb->nab", p, p)
        if self.loss == "logistic":
            p = twins.sigmoid(f)
            return np.einsum("na,ab->nab", p * (1 - p), np.eye(self.k))
        r = np.abs(f - twins.hot(self.y, self.k))
        return np.einsum("na,ab->nab", np.minimum(1, DELTA / np.maximum(r, 1e-300)), np.eye(self.k))

    def hessian(self, w):
        size = self.phi.shape[1] * self.k
        H = np.einsum("nab,nm,nl->ambl", self.curvature(w), self.phi, self.phi).reshape(
            size, size
        ) / len(self.phi)
        return H + self.reg * np.eye(size)

    def solve(self, w, g, steps=None):
        """H^-1 g, or its approximation by `steps` steps of conjugate gradients from 0 (for each
        column separately, if the columns do not interact).
        """
        H, right = self.hessian(w), g.T.reshape(-1)
        if steps is None:
            return np.linalg.solve(H, right).reshape(self.k, -1).T
        m = self.phi.shape[1]
        if self.loss == "cross_entropy":
            return conjugate(H, right, steps).reshape(self.k, -1).T
        blocks = [slice(c * m, (c + 1) * m) for c in range(self.k)]
        return np.stack([conjugate(H[b, b], right[b], steps) for b in blocks], 1)


def conjugate(H, right, steps):
    x, r = np.zeros_like(right), right.copy()
    p = r
    for _ in range(steps):
        alpha = r @ r / (p @ H @ p)
        x, new = x + alpha * p, r - alpha * H @ p
        p, r = new + new @ new / (r @ r) * p, new
    return x


def newton(algorithm, clients, classes, objectives, rows, how, steps=None):
    w, last = np.zeros((objectives[0].phi.shape[1], objectives[0].k)), 1.0
    weight = rows / rows.sum()
    for run in after_iterations(algorithm, clients, classes, how, passes=3):
        g = sum(p * f.gradient(w) for p, f in zip(weight, objectives, strict=True))
        d = sum(p * f.solve(w, g, steps) for p, f in zip(weight, objectives, strict=True))
        tried = [last * size for size in STEPS]
        found = [
            sum(p * f.value(w - size * d) for p, f in zip(weight, objectives, strict=True))
            for size in tried
        ]
        best = int(np.argmin(found))
        assert best > 0
        w, last = w - tried[best] * d, tried[best]
        twins.near(run.state.w, w, 1e-8, "w")
        assert run.state.step == tried[best]
        row = run.records.rows[-1]
        twins.near(
            [row["gradient"], row["objective"], row["step"]],
            [np.linalg.norm(g), found[best], tried[best]],
            1e-8,
        )


LOSSES = [("logistic", 3), ("cross_entropy", 3), ("huber", None), ("huber", 3), ("logistic", 2)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("loss", "classes"), LOSSES)
def test_other_losses(loss, classes, how):
    """With so little regularization that the steps taken are 1/8 to 1/2, each relative to the one
    before.
    """
    clients, outputs, phi, y = prepared("linear", classes)
    objectives = [Objective(loss, p, t, outputs, 0.02) for p, t in zip(phi, y, strict=True)]
    algorithm = fd.FedNewton(MAPS["linear"], 0.02, loss=loss, delta=DELTA)
    newton(algorithm, clients, classes, objectives, np.array(twins.SIZES, float), HOW[how])


@pytest.mark.parametrize(("loss", "classes"), LOSSES[:3])
def test_directions_that_are_not_exact(loss, classes):
    """Ten features and at most eight rows: local systems are solved by two steps of conjugate
    gradients.
    """
    clients, outputs, phi, y = prepared("monomials", classes)
    objectives = [Objective(loss, p, t, outputs) for p, t in zip(phi, y, strict=True)]
    algorithm = fd.FedNewton(MAPS["monomials"], REG, loss=loss, delta=DELTA, inner=2)
    rows = np.array(twins.SIZES, float)
    newton(algorithm, clients, classes, objectives, rows, HOW["half"], steps=2)


def test_steps_follow_the_docstring():
    """Twelve steps from 0 to 4 times the last one."""
    assert (
        fd.FedNewton.steps == STEPS
        and len(STEPS) == 12
        and max(STEPS) == 4
        and math.log2(STEPS[-1]) == -20
    )


# -- baselines on the same objective ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "monomials"])
@pytest.mark.parametrize("kind", ["average", "proximal"])
def test_baselines(kind, name):
    clients, outputs, phi, y = prepared(name, None)
    s = Systems(phi, y, outputs, REG)
    w, lr, mu = s.mean(lambda j: s.local[j], EVERYBODY), 0.037, 0.53

    def train(j, w):
        if kind == "proximal":
            return np.linalg.solve(s.H[j] + mu * np.eye(len(w)), s.b[j] + mu * w)
        for _ in range(3):
            w = w - lr * (s.H[j] @ w - s.b[j])
        return w

    algorithm = fd.RidgeFedAvg(MAPS[name], REG, lr=lr, steps=3)
    if kind == "proximal":
        algorithm = fd.RidgeFedProx(MAPS[name], REG, mu=mu)
    for t in range(1, ROUNDS + 1):
        w = s.mean(lambda j, w=w: train(j, w), twins.cohort(SEED, t, N, 0.5))
        run = twins.run(algorithm, clients, t, seed=SEED, participation=0.5)
        twins.near(run.state.w, w, CLOSE, f"w after round {t}")
