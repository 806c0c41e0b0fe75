"""FedBoost and AFLBoost against NumPy over three rounds: half of six unequal clients, all of them,
and late messages.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import foedus as fd
from foedus.base import random

from . import twins_families as twins

SEED, ROUNDS, CLASSES, Q = 4, 3, 4, 5
N = len(twins.SIZES)
ALPHA = (0.31, 0.13, 0.22, 0.08, 0.26)

TABLE = np.random.default_rng(2).dirichlet(np.full(CLASSES, 0.8), Q)
DENSITIES = fd.Densities(TABLE)


def network(k):
    layer = nn.Linear(3, CLASSES)
    numbers = np.random.default_rng(30 + k)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(numbers.normal(size=(CLASSES, 3))))
        layer.bias.copy_(torch.from_numpy(numbers.normal(size=CLASSES)))
    return layer


NETWORKS = [network(k) for k in range(Q)]
CLASSIFIERS = fd.Classifiers(NETWORKS, classes=CLASSES)


def said(predictors, x):
    """h_k of each row: (q, n, classes)."""
    if isinstance(predictors, fd.Densities):
        return np.repeat(TABLE[:, None], len(x), 1)
    each = [
        (layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy())
        for layer in NETWORKS
    ]
    return np.stack([twins.softmax(x @ w.T + b) for w, b in each])


# -- mirror maps -----------------------------------------------------------------------------------


def nearest(point, low, high):
    """The x = clip(point(theta), low, high) of sum 1, for a point that grows with theta."""
    a, b = -60.0, 60.0
    for _ in range(300):
        theta = (a + b) / 2
        a, b = (theta, b) if np.clip(point(theta), low, high).sum() < 1 else (a, theta)
    return np.clip(point(b), low, high)


def mirror_step(mirror, x, g, eta, low=0.0, high=1.0):
    """Line 5 of Figure 1: v = [grad F]^-1(grad F(x) - eta g), and its Bregman projection."""
    if isinstance(mirror, fd.Entropy):
        v = x * np.exp(-eta * g)
        return nearest(lambda theta: v * np.exp(theta), low, high)
    v = x - eta * g
    return nearest(lambda theta: v + theta, low, high)


def length(mirror, g):
    """The norm of gradients, dual to that in which F is 1-strongly convex."""
    return np.abs(g).max() if isinstance(mirror, fd.Entropy) else np.sqrt((g**2).sum())


def reach(mirror, n):
    """The largest divergence from the uniform vector: at a corner, log n or ((1 - 1/n)^2 + (n -
    1)/n^2) / 2.
    """
    return (
        math.log(n) if isinstance(mirror, fd.Entropy) else ((1 - 1 / n) ** 2 + (n - 1) / n**2) / 2
    )


class Pace:
    """eta of Theorem 2: sqrt(2 r / T) / G, with the largest gradient so far for G, or T G^2 the sum
    of squares so far.
    """

    def __init__(self, mirror, n, step, horizon):
        self.mirror, self.n, self.step, self.horizon = mirror, n, step, horizon
        self.steepest = self.squares = 0.0

    def __call__(self, g):
        size = length(self.mirror, g)
        self.steepest, self.squares = max(self.steepest, size), self.squares + size**2
        if self.step is not None:
            return self.step
        bound = self.horizon * self.steepest**2 if self.horizon else self.squares
        return math.sqrt(2 * reach(self.mirror, self.n) / bound)


# -- Figures 1 and 2 -------------------------------------------------------------------------------


class Twin:
    def __init__(self, algorithm, clients, participation=1.0, delays=None):
        self.a, self.p, self.delays = algorithm, participation, delays
        self.data = [
            (said(algorithm.predictors, x), np.eye(CLASSES)[y]) for x, y in twins.double(clients)
        ]
        self.rows = np.array([len(y) for _, y in clients], float)
        self.alpha = (
            np.full(Q, 1 / Q)
            if algorithm.start_weights is None
            else np.array(algorithm.start_weights)
        )
        self.total, self.t, self.past = np.zeros(Q), 0, {}
        self.pace = Pace(algorithm.mirror, Q, algorithm.step, algorithm.horizon)
        self.agnostic = isinstance(algorithm, fd.AFLBoost)
        if self.agnostic:
            self.domains = algorithm.domains or tuple((i,) for i in range(N))
            d = len(self.domains)
            self.lam, self.lam_total = np.full(d, 1 / d), np.zeros(d)
            self.latest = np.full(d, np.inf)
            steps = algorithm.step_domains or algorithm.step
            self.lam_pace = Pace(algorithm.mirror_domains, d, steps, algorithm.horizon)

    def probabilities(self):
        a = self.a
        if a.sampling == "all":
            return np.ones(Q)
        budget = min(a.budget * a.repeats, Q)
        if a.sampling == "uniform":
            return np.full(Q, budget / Q)
        gamma = (1 - a.explore) * np.minimum(1, budget * self.alpha) + a.explore * budget / Q
        return np.minimum(1, gamma)

    def at(self, i, sent, gamma, alpha):
        """The loss of client i's rows at a = alpha 1 / gamma, and its gradient in a, 0 where
        nothing was sent.
        """
        h, y = self.data[i]
        a = np.where(sent, alpha / gamma, 0)
        mixed = np.einsum("q,qnk->nk", a, h)
        if self.a.loss == "log":
            inside = (mixed * y).sum(1) + self.a.floor
            return -np.log(inside).mean(), np.where(sent, -((h * y).sum(2) / inside).mean(1), 0)
        value = ((mixed - y) ** 2).sum(1).mean()
        slope = 2 * np.einsum("nk,qnk->q", mixed - y, h) / len(y)
        if self.a.bias_correction:
            squares = (h**2).sum(2).mean(1)
            value -= (sent * alpha / gamma * alpha * (1 / gamma - 1) * squares).sum()
            slope = slope - 2 * alpha * (1 / gamma - 1) * squares
        return value, np.where(sent, slope, 0)

    def round(self):
        self.t += 1
        t, a = self.t, self.a
        gamma = self.probabilities()
        draws = random.uniform(random.fold(twins.server_key(SEED, t), 1), Q, torch.float64).numpy()
        sent = draws < gamma
        # what has no chance is not sent: its probability divides nothing
        gamma = np.where(gamma > 0, gamma, 1)
        assert sent.any(), "choose a seed with which something is sent"
        self.past[t] = sent, gamma, self.alpha
        self.total = self.total + self.alpha
        if self.agnostic:
            self.lam_total = self.lam_total + self.lam
        came = (
            self.delays.arriving(t)
            if self.delays
            else [(i, t, t) for i in twins.cohort(SEED, t, N, self.p)]
        )
        if not came:
            return
        who = [i for i, _, _ in came]
        found = [self.at(i, *self.past[v]) for i, _, v in came]
        rescale = [1 / self.past[v][1] if a.reweigh else np.ones(Q) for _, _, v in came]
        slopes = np.array([r * g for r, (_, g) in zip(rescale, found, strict=True)])
        losses = np.array([value for value, _ in found])
        if not self.agnostic:
            g = self.rows[who] / self.rows[who].sum() @ slopes
        else:
            share = np.zeros((len(self.domains), len(who)))
            for d, group in enumerate(self.domains):
                for j, i in enumerate(who):
                    if i in group:
                        share[d, j] = self.rows[i] / self.rows[list(group)].sum() / self.p
            g = self.lam @ share @ slopes
            by_domain, parts = share @ losses, share.sum(1)
            some = parts > 0
            self.latest[some] = by_domain[some] / parts[some]
            eta = self.lam_pace(by_domain)
            self.lam = mirror_step(a.mirror_domains, self.lam, -by_domain, eta, a.low, a.high)
        self.alpha = mirror_step(a.mirror, self.alpha, g, self.pace(g))

    def result(self):
        return self.total / self.t if self.a.average else self.alpha

    def losses(self, alpha):
        """Of a mixture of all predictors, at each client."""
        return np.array([self.at(i, np.ones(Q, bool), np.ones(Q), alpha)[0] for i in range(N)])


def compare(algorithm, participation=1.0, delays=None, rounds=ROUNDS):
    clients = twins.labels(CLASSES)
    twin = Twin(algorithm, clients, participation, delays)
    options = {"engine": delays.engine} if delays else {"participation": participation}
    moved = []
    for t in range(1, rounds + 1):
        before = twin.alpha
        twin.round()
        moved.append(np.abs(twin.alpha - before).max())
        run = twins.run(algorithm, clients, t, CLASSES, seed=SEED, **options)
        state = run.state
        twins.near(state.alpha, twin.alpha, what=f"alpha after round {t}")
        twins.near(state.total, twin.total, what=f"the sum of alpha after round {t}")
        assert state.rounds == t
        twins.near(state.steepest, twin.pace.steepest, what="the largest gradient")
        twins.near(state.squares, twin.pace.squares, what="the sum of squared gradients")
        twins.near(algorithm.result(state), twin.result(), what="result")
        row, weight = run.records.rows[-1], twin.rows / twin.rows.sum()
        plain = {"objective": twin.result(), "objective_last": twin.alpha}
        for name, alpha in plain.items():
            twins.near(row[name], weight @ twin.losses(alpha), what=name)
        if twin.agnostic:
            for name in ("lam", "lam_total", "latest"):
                twins.near(
                    getattr(state, name), getattr(twin, name), what=f"{name} after round {t}"
                )
            twins.near(state.lam_steepest, twin.lam_pace.steepest, what="the largest loss")
            twins.near(state.lam_squares, twin.lam_pace.squares, what="the sum of squared losses")
            each = twin.losses(twin.result())
            worst = [
                twin.rows[list(g)] @ each[list(g)] / twin.rows[list(g)].sum() for g in twin.domains
            ]
            twins.near(row["worst"], max(worst), what="worst")
        x = clients[3][0]
        mixed = np.einsum("q,qnk->nk", twin.result(), said(algorithm.predictors, x.astype(float)))
        twins.near(run.model.outputs(x), mixed, what="the mixture")
    assert max(moved) > 1e-3, "the weights must move for the comparison to mean anything"


VARIANTS = {
    "uniform": {"sampling": "uniform", "budget": 3, "step": 0.37},
    "weighted": {"sampling": "weighted", "budget": 2.6, "step": 0.37},
    "all": {"sampling": "all", "step": 0.37},
    "theorem": {"sampling": "uniform", "budget": 3},
    "horizon": {"sampling": "weighted", "budget": 2.6, "horizon": 7},
    "squared": {"sampling": "weighted", "budget": 2.6, "step": 0.37, "loss": "squared"},
    "correction": {
        "sampling": "uniform",
        "budget": 3,
        "step": 0.17,
        "loss": "squared",
        "bias_correction": True,
    },
    "weighted correction": {
        "sampling": "weighted",
        "budget": 2.2,
        "loss": "squared",
        "bias_correction": True,
    },
    "no rescaling": {"sampling": "weighted", "budget": 2.6, "step": 0.37, "reweigh": False},
    "repeats": {"sampling": "weighted", "budget": 1.4, "step": 0.37, "repeats": 2},
    "explore": {"sampling": "weighted", "budget": 2.6, "step": 0.37, "explore": 0.3},
    "last": {"sampling": "weighted", "budget": 2.6, "step": 0.37, "average": False, "floor": 0.02},
    "cache": {"sampling": "weighted", "budget": 2.6, "step": 0.37, "cache": True},
}
MIRRORS = {"entropy": fd.Entropy(), "euclidean": fd.Euclidean()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_of_the_clients(variant):
    algorithm = fd.FedBoost(DENSITIES, start_weights=ALPHA, **VARIANTS[variant])
    compare(algorithm, participation=0.5)


@pytest.mark.parametrize("variant", ["uniform", "theorem", "horizon", "correction", "explore"])
def test_euclidean_mirror(variant):
    more = {**VARIANTS[variant]}
    if "step" in more:
        more["step"] = 0.11  # the projection takes some weights to 0, but not all
    algorithm = fd.FedBoost(DENSITIES, start_weights=ALPHA, mirror=fd.Euclidean(), **more)
    compare(algorithm, participation=0.5)


@pytest.mark.parametrize("variant", ["weighted", "squared", "correction", "repeats"])
def test_predictors_that_look_at_the_features(variant):
    algorithm = fd.FedBoost(CLASSIFIERS, start_weights=ALPHA, **VARIANTS[variant])
    compare(algorithm, participation=0.5)


@pytest.mark.parametrize(
    "variant", ["uniform", "weighted", "theorem", "weighted correction", "no rescaling"]
)
def test_late_messages(variant):
    """A reply counts for the predictors and probabilities of the round that it answers."""
    algorithm = fd.FedBoost(DENSITIES, start_weights=ALPHA, **VARIANTS[variant])
    compare(algorithm, delays=twins.Delays(), rounds=4)


DOMAINS = {"north": [0, 3], "south": [1, 4, 5], "east": [2]}
AGNOSTIC = {
    "two steps": {"budget": 2.6, "step": 0.37, "step_domains": 0.19, "domains": DOMAINS},
    "one step": {
        "budget": 2.6, "step": 0.17, "sampling": "uniform", "domains": DOMAINS, "average": False,
    },
    "bounds": {
        "budget": 2.6, "step": 0.37, "step_domains": 0.53, "domains": DOMAINS, "low": 0.22,
        "high": 0.41,
    },
    "theorem": {"budget": 2.6, "domains": DOMAINS},
    "horizon": {"budget": 2.6, "horizon": 9, "domains": DOMAINS, "low": 0.1},
    "clients": {"budget": 2.6, "step": 0.37, "step_domains": 0.19},
    "correction": {
        "budget": 2.6, "step": 0.17, "domains": DOMAINS, "loss": "squared", "bias_correction": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("variant", AGNOSTIC)
def test_domains(variant, participation):
    """Half of the clients: each counts in inverse proportion to its chance."""
    algorithm = fd.AFLBoost(DENSITIES, start_weights=ALPHA, **AGNOSTIC[variant])
    compare(algorithm, participation=participation)


@pytest.mark.parametrize(
    ("mirror", "mirror_domains"), [("euclidean", None), ("entropy", "euclidean")]
)
def test_mirrors_of_domains(mirror, mirror_domains):
    more = {
        "mirror_domains": MIRRORS.get(mirror_domains),
        "low": 0.15,
        "high": 0.6,
        "domains": DOMAINS,
    }
    algorithm = fd.AFLBoost(
        DENSITIES,
        2.6,
        start_weights=ALPHA,
        mirror=MIRRORS[mirror],
        step=0.11,
        step_domains=0.07,
        **more,
    )
    compare(algorithm, participation=0.5)


def test_domains_with_late_messages():
    algorithm = fd.AFLBoost(DENSITIES, start_weights=ALPHA, **AGNOSTIC["two steps"])
    compare(algorithm, delays=twins.Delays(), rounds=4)
