"""FedRes, its ERM variants and its bandit against NumPy over three rounds and more: half of six
unequal clients, and delays.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch

import foedus as fd
from foedus.base import random

from . import twins_families as twins

SEED, ROUNDS = 11, 3
N = len(twins.SIZES)
SHARED, PRIVATE = (0, 2), (1, 2, 3)
"""Columns of global and local features: one of them is both."""


def targets(y, classes):
    """+-1 for labels, one column for two classes."""
    if not classes:
        return y.reshape(len(y), -1)
    signs = 2 * np.eye(classes)[y] - 1
    return signs[:, 1:] if classes == 2 else signs


def with_one(x):
    return np.hstack([x, np.ones((len(x), 1))])


def parts_of(clients, classes=None, bias=True):
    """(global features, local features, targets) of each client."""
    own = with_one if bias else (lambda x: x)
    return [
        (own(x[:, SHARED]), own(x[:, PRIVATE]), targets(y, classes))
        for x, y in twins.double(clients)
    ]


def grid(params):
    """A linear model's parameters as a matrix (outputs, features + 1)."""
    return np.hstack([params["weight"].double().numpy(), params["bias"].double().numpy()[:, None]])


def slope(loss, z, y):
    return 2 * (z - y) if loss == "squared" else -y / (1 + np.exp(y * z))


def value(loss, z, y):
    return ((z - y) ** 2 if loss == "squared" else np.log1p(np.exp(-y * z))).sum(1).mean()


def theorem_step(c):
    """The eta of Appendix B."""
    first = math.sqrt(c.norm**2 / (c.rounds * c.clients * c.deviation**2))
    late = c.smoothness * c.clients**3 * c.gradient**2 * c.delay**2 * c.rounds
    return min(first, (c.norm**2 / late) ** (1 / 3)) if c.delay else first


class Learner:
    """Parameters that move by a schedule and stay in a ball."""

    def __init__(self, shape, eta, schedule, radius, forget=1.0):
        self.w, self.squares = np.zeros(shape), np.zeros(shape)
        self.eta, self.schedule, self.radius, self.forget = eta, schedule, radius, forget

    def move(self, g, t):
        """One step, the t-th, t from 1."""
        if self.schedule == "adagrad":
            self.squares = self.forget * self.squares + g**2
            step = self.eta * g / np.sqrt(np.where(self.squares > 0, self.squares, 1))
        else:
            rounds = sum(self.forget**s for s in range(t))
            step = self.eta * g / (math.sqrt(rounds) if self.schedule == "sqrt" else 1)
        self.w = self.w - step
        norm = np.sqrt((self.w**2).sum())
        if self.radius is not None and norm > self.radius:
            self.w = self.w * self.radius / norm


# -- Algorithms 3 and 4 ----------------------------------------------------------------------------


class Twin:
    """(7) and (8): `seen[i]` lists what client i predicted with, in the order of its own rounds."""

    def __init__(self, a, parts, participation=1.0, delays=None):
        self.a, self.parts, self.p, self.delays = a, parts, participation, delays
        m = parts[0][2].shape[1]
        how, same = (a.schedule, a.radius, a.forget), a.theorem and theorem_step(a.theorem)
        eta = a.step if a.local_step is None else a.local_step
        self.server = Learner((m, parts[0][0].shape[1]), same or a.step, *how)
        self.local = [Learner((m, part[1].shape[1]), same or eta, *how) for part in parts]
        self.range = [(np.zeros(m), np.zeros(m)) for _ in parts]
        self.global_learns, self.local_learns = (
            a.global_model is not None,
            a.local_model is not None,
        )
        self.pairs = [[] for _ in range(N)]  # (w, w_i, rows) of each of a client's rounds
        self.at = [{} for _ in range(N)]  # the number of a client's round, by round of the run
        self.loss, self.t, self.sent = np.zeros(N), 0, {}

    def gradients(self, i, w, own, rows, seen):
        x_g, x_l, y = (v[rows] for v in self.parts[i])
        z = self.global_learns * x_g @ w.T + self.local_learns * x_l @ own.T
        s = slope(self.a.loss, self.clipped(z, seen), y) / len(rows)
        return s.T @ x_g, s.T @ x_l

    def clipped(self, z, seen):
        return np.clip(z, *seen) if self.a.clip_predictions else z

    def round(self):
        self.t += 1
        t, a, b = self.t, self.a, self.a.batch_size
        self.sent[t] = self.server.w
        who = twins.cohort(SEED, t, N, self.p)
        for i in who:
            n = len(self.pairs[i])
            rows = [(n * b + k) % len(self.parts[i][2]) for k in range(b)]
            w = self.sent[self.delays.version(t, i) if self.delays else t]
            labels, (low, high) = self.parts[i][2][rows], self.range[i]
            self.range[i] = np.minimum(low, labels.min(0)), np.maximum(high, labels.max(0))
            self.pairs[i].append((w, self.local[i].w, rows, self.range[i]))
            self.at[i][t] = n
            x_g, x_l, y = (v[rows] for v in self.parts[i])
            z = self.global_learns * x_g @ w.T + self.local_learns * x_l @ self.local[i].w.T
            self.loss[i] += value(a.loss, self.clipped(z, self.range[i]), y)
            trip = self.delays.up[i] + self.delays.down[i] if self.delays else 0
            late = n - trip if a.rule == "aligned" and self.global_learns else n
            g = (
                self.gradients(i, *self.pairs[i][late])[1]
                if late >= 0
                else np.zeros_like(self.local[i].w)
            )
            if self.local_learns:
                self.local[i].move(g, n + 1)
        came = self.delays.arriving(t) if self.delays else [(i, t, t) for i in who]
        if not came or not self.global_learns:
            return
        total = 0
        for i, made, _ in came:
            w, *rest = self.pairs[i][self.at[i][made]]
            total = (
                total + self.gradients(i, self.server.w if a.rule == "misaligned" else w, *rest)[0]
            )
        self.server.move(total, t)


def compare(algorithm, clients, classes=None, participation=1.0, delays=None, rounds=ROUNDS):
    parts = parts_of(clients, classes)
    twin = Twin(algorithm, parts, participation, delays)
    options = {"engine": delays.engine} if delays else {"participation": participation}
    for t in range(1, rounds + 1):
        twin.round()
        run = twins.run(algorithm, clients, t, classes, seed=SEED, **options)
        if twin.global_learns:
            twins.near(grid(run.state.w), twin.server.w, what=f"w after round {t}")
            if algorithm.schedule == "adagrad":
                twins.near(
                    grid(run.state.squares), twin.server.squares, what="the server's squares"
                )
        states = twins.states_of(run)
        for i in range(N):
            count = len(twin.pairs[i])
            if not count:
                assert i not in states or int(states[i]["t"]) == 0
                continue
            assert int(states[i]["t"]) == count
            twins.near(states[i]["loss"], twin.loss[i], what=f"losses of client {i}")
            if twin.local_learns:
                twins.near(
                    grid(states[i]["local"]),
                    twin.local[i].w,
                    what=f"local model {i} after round {t}",
                )
                if algorithm.schedule == "adagrad":
                    twins.near(
                        grid(states[i]["squares"]),
                        twin.local[i].squares,
                        what=f"squares of client {i}",
                    )
            x = clients[3][0]
            z = 0.0
            if twin.global_learns:
                z = z + with_one(x[:, SHARED]) @ twin.pairs[i][-1][0].T
            if twin.local_learns:
                z = z + with_one(x[:, PRIVATE]) @ twin.local[i].w.T
            want = np.hstack([-z / 2, z / 2]) if classes == 2 else z
            twins.near(run.model_of(i).outputs(x), want, what=f"the pair that client {i} holds")
        everyone = sum(len(pairs) for pairs in twin.pairs)
        twins.near(
            run.records.rows[-1]["online_loss"], twin.loss.sum() / everyone, what="online_loss"
        )


COLUMNS = {"shared": SHARED, "private": PRIVATE}
VARIANTS = {
    "constant": {"schedule": "constant", "step": 0.037, "local_step": 0.073},
    "sqrt": {"schedule": "sqrt", "step": 0.037, "local_step": 0.073},
    "adagrad": {"schedule": "adagrad", "step": 0.37, "local_step": 0.23},
    "one step": {"schedule": "sqrt", "step": 0.053},
    "gradient": {"schedule": "sqrt", "step": 0.037, "local_step": 0.073, "send": "gradient"},
    "batches": {"schedule": "adagrad", "step": 0.37, "local_step": 0.23, "batch_size": 2},
    "batches gradient": {
        "schedule": "constant",
        "step": 0.037,
        "batch_size": 2,
        "send": "gradient",
    },
    "ball": {"schedule": "constant", "step": 0.37, "local_step": 0.29, "radius": 0.61},
    "clip": {"schedule": "adagrad", "step": 1.37, "local_step": 2.3, "clip_predictions": True},
    "clip gradient": {
        "schedule": "constant",
        "step": 0.037,
        "local_step": 0.11,
        "clip_predictions": True,
        "send": "gradient",
        "batch_size": 2,
    },
    "forget": {"schedule": "adagrad", "step": 0.37, "local_step": 0.23, "forget": 0.83},
    "forget sqrt": {"schedule": "sqrt", "step": 0.037, "local_step": 0.073, "forget": 0.61},
    "theorem": {
        "schedule": "theorem2",
        "theorem": fd.fedres.Theorem2(7, 3, 0.83, 3.1, 1.7, 0.9),
    },
    "theorem, late": {
        "schedule": "theorem2",
        "theorem": fd.fedres.Theorem2(7, 3, 0.83, 0.9, 1.7, 0.9, 2),
    },
    "ball adagrad": {
        "schedule": "adagrad",
        "step": 0.37,
        "local_step": 0.53,
        "radius": 0.61,
        "batch_size": 2,
    },
}
DATA = {
    None: twins.values(features=4),
    "two outputs": twins.values(outputs=2, features=4),
    2: twins.labels(2, features=4),
    3: twins.labels(3, features=4),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_of_the_clients(variant):
    """A client's t counts the rounds that it takes part in; the server's are those of the run."""
    compare(fd.FedRes(**COLUMNS, **VARIANTS[variant]), DATA[None], participation=0.5)


@pytest.mark.parametrize(
    ("kind", "loss", "variant"),
    [
        (2, "logistic", "sqrt"),
        (3, "logistic", "batches"),
        (2, "squared", "batches gradient"),
        (3, "squared", "ball"),
        (3, "squared", "clip"),
        (2, "squared", "clip gradient"),
    ],
)
def test_losses_of_labels(kind, loss, variant):
    compare(
        fd.FedRes(**COLUMNS, loss=loss, **VARIANTS[variant]), DATA[kind], kind, participation=0.5
    )


def test_several_outputs():
    compare(fd.FedRes(**COLUMNS, **VARIANTS["batches"]), DATA["two outputs"], participation=0.5)


@pytest.mark.parametrize("missing", ["global_model", "local_model"])
def test_one_model_alone(missing):
    compare(
        fd.FedRes(**COLUMNS, **{missing: None}, **VARIANTS["sqrt"]), DATA[None], participation=0.5
    )


@pytest.mark.parametrize("rule", ["aligned", "asymmetric", "misaligned"])
@pytest.mark.parametrize("variant", ["constant", "adagrad", "ball", "batches", "clip", "forget"])
def test_rules_under_delay(variant, rule):
    algorithm = fd.FedRes(**COLUMNS, rule=rule, **VARIANTS[variant])
    compare(algorithm, DATA[None], delays=twins.Delays(), rounds=5)


@pytest.mark.parametrize("rule", ["aligned", "asymmetric"])
@pytest.mark.parametrize("variant", ["gradient", "sqrt"])
def test_gradients_and_rows_under_delay(variant, rule):
    algorithm = fd.FedRes(**COLUMNS, rule=rule, loss="logistic", **VARIANTS[variant])
    compare(algorithm, DATA[2], 2, delays=twins.Delays(), rounds=4)


def test_nothing_arrives_in_the_first_round():
    delays = twins.Delays(up=(1, 2, 1, 3, 2, 1))
    compare(fd.FedRes(**COLUMNS, **VARIANTS["sqrt"]), DATA[None], delays=delays, rounds=4)


# -- Algorithms 1 and 2, and fictitious play -------------------------------------------------------


def fitted(x, y, radius):
    """argmin over |w| <= radius of |x w - y|^2, the shortest of several."""
    w = np.linalg.lstsq(x, y, rcond=1e-8)[0]
    if radius is None or np.linalg.norm(w) <= radius:
        return w

    def at(mu):
        return np.linalg.solve(x.T @ x + mu * np.eye(x.shape[1]), x.T @ y)

    most = np.linalg.norm(x.T @ y) / radius
    return at(
        scipy.optimize.brentq(
            lambda mu: np.linalg.norm(at(mu)) - radius, 1e-12, most, xtol=1e-15, rtol=1e-14
        )
    )


class ErmTwin:
    """(2) and (3), or (5) and (6): every model fitted again from all rows."""

    def __init__(self, a, parts, participation=1.0, delays=None):
        self.a, self.parts, self.p, self.delays = a, parts, participation, delays
        self.play = isinstance(a, fd.FictitiousPlay)
        m = parts[0][2].shape[1]
        start = lambda given, size: (  # noqa: E731
            np.zeros((size, m)) if given is None else np.array(given)[:, None]
        )
        self.w = start(a.start_global, parts[0][0].shape[1])
        self.local = [start(a.start_local, part[1].shape[1]) for part in parts]
        # of each client: (rows, w^g, w_i) in the order of its own rounds
        self.rounds = [[] for _ in range(N)]
        self.at = [{} for _ in range(N)]
        self.known = [0] * N  # how many of a client's rounds the server has
        self.loss, self.t, self.sent = np.zeros(N), 0, {}

    def rows(self, i, count):
        """All rows of a client's first rounds."""
        at = [r for rows, _, _ in self.rounds[i][:count] for r in rows]
        return (v[at] for v in self.parts[i])

    def said(self, i, count, which):
        """What the model of its own round said of each row: `which` is 1 for the global, 2 for the
        local model.
        """
        return np.vstack(
            [self.parts[i][which - 1][r[0]] @ r[which] for r in self.rounds[i][:count]]
        )

    def round(self):
        self.t += 1
        t, b = self.t, self.a.batch_size
        self.sent[t] = self.w
        who = twins.cohort(SEED, t, N, self.p)
        for i in who:
            n = len(self.rounds[i])
            w = self.sent[self.delays.version(t, i) if self.delays else t]
            if n:
                x_g, x_l, y = self.rows(i, n)
                others = self.said(i, n, 1) if self.play else x_g @ w
                self.local[i] = fitted(x_l, y - others, self.a.radius)
            rows = [(n * b + k) % len(self.parts[i][2]) for k in range(b)]
            self.rounds[i].append((rows, w, self.local[i]))
            self.at[i][t] = n
            x_g, x_l, y = (v[rows] for v in self.parts[i])
            self.loss[i] += value("squared", x_g @ w + x_l @ self.local[i], y)
        came = self.delays.arriving(t) if self.delays else [(i, t, t) for i in who]
        if not came:
            return
        for i, made, _ in came:
            self.known[i] = self.at[i][made] + 1
        X, R = [], []
        for i in range(N):
            if self.known[i]:
                x_g, x_l, y = self.rows(i, self.known[i])
                newest = self.rounds[i][self.known[i] - 1][2]
                X.append(x_g)
                R.append(y - (self.said(i, self.known[i], 2) if self.play else x_l @ newest))
        self.w = fitted(np.vstack(X), np.vstack(R), self.a.radius)


def compare_erm(algorithm, clients, classes=None, participation=1.0, delays=None, rounds=4):
    twin = ErmTwin(algorithm, parts_of(clients, classes, algorithm.bias), participation, delays)
    options = {"engine": delays.engine} if delays else {"participation": participation}
    for t in range(1, rounds + 1):
        twin.round()
        run = twins.run(algorithm, clients, t, classes, seed=SEED, **options)
        twins.near(run.state.w, twin.w, what=f"w after round {t}")
        states = twins.states_of(run)
        for i in range(N):
            if twin.rounds[i]:
                twins.near(
                    states[i]["local"], twin.local[i], what=f"local model {i} after round {t}"
                )
                twins.near(states[i]["loss"], twin.loss[i], what=f"losses of client {i}")
                assert int(states[i]["t"]) == len(twin.rounds[i])
        everyone = sum(len(rounds) for rounds in twin.rounds)
        twins.near(
            run.records.rows[-1]["online_loss"], twin.loss.sum() / everyone, what="online_loss"
        )


ERM = {
    "plain": {},
    "batches": {"batch_size": 2},
    "ball": {"radius": 0.61, "batch_size": 2},
    "start": {"bias": False, "start_global": (0.37, -0.21), "start_local": (0.13, 0.29, -0.41)},
}


@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
@pytest.mark.parametrize("variant", ERM)
def test_erm_with_half_of_the_clients(kind, variant):
    compare_erm(kind(**COLUMNS, **ERM[variant]), DATA[None], participation=0.5)


@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
def test_erm_on_labels(kind):
    compare_erm(kind(**COLUMNS, batch_size=2), DATA[3], 3, participation=0.5)


@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
@pytest.mark.parametrize("variant", ["batches", "ball", "start"])
def test_erm_under_delay(kind, variant):
    compare_erm(kind(**COLUMNS, **ERM[variant]), DATA[None], delays=twins.Delays())


# -- the bandit ------------------------------------------------------------------------------------


ACTIONS = 3


def bandit(actionwise, seed=8):
    """Contexts (3, 4), one for each action, or (4,) for all; targets are expected rewards in [0,
    1].
    """
    rng = np.random.default_rng(seed)
    clients = []
    for n in twins.SIZES:
        x = rng.normal(size=(n, ACTIONS, 4) if actionwise else (n, 4)).astype(np.float32)
        clients.append((x, rng.uniform(0.05, 0.95, size=(n, ACTIONS)).astype(np.float32)))
    return clients


class BanditTwin:
    """Section 5.1 and inverse-gap weighting, without delay; models are (d,) of an action's context
    or (3, d) of the row's.
    """

    def __init__(self, a, clients, participation):
        self.a, self.p, self.data = a, participation, twins.double(clients)
        self.actionwise = self.data[0][0].ndim == 3
        shape = lambda columns: (len(columns),) if self.actionwise else (ACTIONS, len(columns))  # noqa: E731
        self.server = Learner(shape(SHARED), a.step, a.schedule, a.radius)
        eta = a.step if a.local_step is None else a.local_step
        self.local = [Learner(shape(PRIVATE), eta, a.schedule, a.radius) for _ in range(N)]
        self.seen, self.t = [None] * N, 0
        self.count, self.explored = np.zeros(N, int), np.zeros(N, int)
        self.loss, self.regret, self.reward = np.zeros(N), np.zeros(N), np.zeros(N)

    def expected(self, w, x):
        """f(x(a)) of each action."""
        return x @ w if self.actionwise else w @ x

    def gradient(self, x, action, slope):
        if self.actionwise:
            return slope * x[action]
        g = np.zeros((ACTIONS, len(x)))
        g[action] = slope * x
        return g

    def choose(self, how, z, u, n):
        if how == "uniform":
            return int(u * ACTIONS)
        best = int(z.argmax())
        if how == "greedy":
            return best
        p = 1 / (ACTIONS + self.a.gamma * math.sqrt(n) * (z[best] - z))
        p[best] = 1 - np.delete(p, best).sum()
        return int((np.cumsum(p) <= u).sum())

    def round(self):
        self.t += 1
        t, a = self.t, self.a
        every = 1 if a.explore == "squarecb" else a.every
        learns = t % every == 0
        how = "squarecb" if a.explore == "squarecb" else "uniform" if learns else "greedy"
        w, total = self.server.w, 0
        for i in twins.cohort(SEED, t, N, self.p):
            x, mean = (v[self.count[i] % len(v)] for v in self.data[i])
            self.count[i] += 1
            x_g, x_l = x[..., list(SHARED)], x[..., list(PRIVATE)]
            z = self.expected(w, x_g) + self.expected(self.local[i].w, x_l)
            self.seen[i] = w
            u = random.uniform(twins.client_key(SEED, t, i), 2, torch.float64).numpy()
            action = self.choose(how, z, u[0], self.explored[i] + 1)
            self.regret[i] += mean.max() - mean[action]
            reward = float(u[1] < mean[action]) if a.reward == "bernoulli" else mean[action]
            self.reward[i] += reward
            if not learns:
                continue
            error = z[action] - reward
            self.loss[i] += error**2
            self.explored[i] += 1
            total = total + self.gradient(x_g, action, 2 * error)
            self.local[i].move(self.gradient(x_l, action, 2 * error), self.explored[i])
        if learns:
            self.server.move(total, t // every)


BANDITS = {
    "epsilon": {"every": 2, "schedule": "sqrt", "step": 0.037, "local_step": 0.073},
    "epsilon mean": {
        "every": 2, "schedule": "adagrad", "step": 0.37, "local_step": 0.23, "reward": "mean",
    },
    "squarecb": {
        "explore": "squarecb", "gamma": 3.7, "schedule": "sqrt", "step": 0.37, "local_step": 0.23,
    },
    "squarecb gradient": {
        "explore": "squarecb", "gamma": 3.7, "schedule": "constant", "step": 0.37,
        "send": "gradient", "reward": "mean",
    },
    "ball": {
        "explore": "squarecb", "gamma": 9.1, "schedule": "adagrad", "step": 0.37, "radius": 0.53,
    },
}  # fmt: skip


@pytest.mark.parametrize("actionwise", [False, True])
@pytest.mark.parametrize("variant", BANDITS)
def test_bandits(variant, actionwise):
    clients = bandit(actionwise)
    algorithm = fd.FedResBandit(**COLUMNS, **BANDITS[variant])
    twin = BanditTwin(algorithm, clients, 0.5)
    for t in range(1, 13):
        twin.round()
        # after eleven rounds, a gamma_t of the wrong t would have taken another action
        if t not in (2, 3, 12):
            continue
        run = twins.run(algorithm, clients, t, seed=SEED, participation=0.5)
        twins.near(run.state.w["weight"], twin.server.w, what=f"w after round {t}")
        if algorithm.schedule == "adagrad":
            twins.near(run.state.squares["weight"], twin.server.squares, what="squares")
        states = twins.states_of(run)
        for i in range(N):
            if not twin.count[i]:
                continue
            twins.near(
                states[i]["local"]["weight"],
                twin.local[i].w,
                what=f"local model {i} after round {t}",
            )
            for name in ("regret", "reward", "loss"):
                twins.near(states[i][name], getattr(twin, name)[i], what=f"{name} of client {i}")
            assert (int(states[i]["t"]), int(states[i]["n"])) == (twin.count[i], twin.explored[i])
        row = run.records.rows[-1]
        for name in ("regret", "reward"):
            twins.near(
                row[name], getattr(twin, name).sum() / twin.count.sum(), what=f"history's {name}"
            )
