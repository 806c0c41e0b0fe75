"""FedFW and NaiveFW against NumPy over three rounds: half of six unequal clients, all of them, and
late messages.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import foedus as fd
from foedus.base import random
from tests.aggregation.entropy import Counted

from . import twins_families as twins

SEED, ROUNDS = 3, 3
N = len(twins.SIZES)


# -- the sets --------------------------------------------------------------------------------------


def oracle(domain, g, shape):
    """argmin over s in the set of <g, s>, for vectors (matrices of `shape` for the nuclear
    ball).
    """
    r = domain.radius
    if isinstance(domain, fd.L1Ball):
        s = np.zeros_like(g)
        s[np.abs(g).argmax()] = -r * np.sign(g[np.abs(g).argmax()])
        return s
    if isinstance(domain, fd.L2Ball):
        return -r * g / np.linalg.norm(g)
    if isinstance(domain, fd.LInfBall):
        return -r * np.sign(g)
    u, _, v = np.linalg.svd(g.reshape(shape))
    return -r * np.outer(u[:, 0], v[0]).reshape(-1)


def diameter(domain, size):
    return 2 * domain.radius * (math.sqrt(size) if isinstance(domain, fd.LInfBall) else 1)


def gap(domain, g, x, shape):
    return g @ (x - oracle(domain, g, shape))


# -- Algorithm 1 and its variants ------------------------------------------------------------------


class Twin:
    """Every x_i, center and schedule value of every round, in float64."""

    def __init__(self, algorithm, clients, outputs, start, participation=1.0, delays=None):
        self.a, self.data, self.outputs = algorithm, twins.double(clients), outputs
        self.p, self.delays, self.bias = participation, delays, algorithm.model.bias
        self.shape = (outputs, self.data[0][0].shape[1])
        self.loss = "squared" if self.data[0][1].dtype.kind == "f" else "cross_entropy"
        self.x = [start.copy() for _ in range(N)]
        self.y, self.d = ([np.zeros_like(start) for _ in range(N)] for _ in range(2))
        self.center, self.known = start.copy(), [start.copy() for _ in range(N)]
        self.penalty = algorithm.penalty
        if self.penalty == "auto":
            gaps = [
                gap(algorithm.domain, self.slope(i, start), start, self.shape) for i in range(N)
            ]
            self.penalty = np.mean(gaps) / N / diameter(algorithm.domain, len(start)) ** 2
        self.sent, self.points, self.t = {}, {}, 0

    def slope(self, i, w, rows=None):
        x, y = self.data[i]
        rows = np.arange(len(x)) if rows is None else rows
        return twins.linear_gradient(self.loss, w, x[rows], y[rows], self.outputs, self.bias)

    def schedule(self, t):
        """eta_t, lambda_t and rho_t: Theorems 1 to 3 and Section 4.2."""
        tau = self.p * (t - 1) + 1
        kind = self.a.schedule or ("stochastic" if self.a.variant == "stochastic" else "convex")
        rho = 4 / (tau + 7) ** (2 / 3)
        if kind == "convex":
            return 2 / (tau + 1), self.penalty * math.sqrt(tau + 1), rho
        if kind == "stochastic":
            return 9 / (tau + 8), self.penalty * math.sqrt(tau + 8), rho
        T = self.a.horizon if self.p == 1 else self.p * self.a.horizon + 1
        return T ** (-2 / 3), self.penalty * T ** (1 / 3), rho

    def set_of(self, i):
        return dict(self.a.supersets).get(i, self.a.domain)

    def step(self, i, t, version):
        """One step of client i in round t with the center and the schedule of a broadcast."""
        eta, pull, rho = self.schedule(version)
        center = self.sent[version]
        rows = None
        if self.a.variant == "stochastic":
            key = random.fold(twins.client_key(SEED, t, i), 1)
            rows = random.integers(key, self.a.batch_size, len(self.data[i][0])).numpy()
        g = self.slope(i, self.x[i], rows) / N
        if self.a.variant == "stochastic":
            g = self.d[i] = (1 - rho) * self.d[i] + rho * g
        g = g + pull * (self.x[i] - center)
        if self.a.variant == "augmented":
            self.y[i] = self.y[i] + self.penalty * (self.x[i] - center)
            g = g + self.y[i]
        s = oracle(self.set_of(i), g, self.shape)
        self.x[i] = (1 - eta) * self.x[i] + eta * s
        self.points[i, t] = s

    def round(self):
        self.t += 1
        t = self.t
        self.sent[t] = self.center
        who = twins.cohort(SEED, t, N, self.p)
        for i in who:
            self.step(i, t, self.delays.version(t, i) if self.delays else t)
        came = self.delays.arriving(t) if self.delays else [(i, t, t) for i in who]
        for i, made, version in came:  # the center is the mean of the x_i that the server knows
            eta = self.schedule(version)[0]
            self.known[i] = (1 - eta) * self.known[i] + eta * self.points[i, made]
        self.center = sum(self.known) / N

    def measured(self):
        """Objective, gap and consensus at the center, over all clients."""
        g = sum(self.slope(i, self.center) for i in range(N)) / N
        f = [
            twins.linear_value(self.loss, self.center, *self.data[i], self.outputs, self.bias)
            for i in range(N)
        ]
        apart = [((x - self.center) ** 2).sum() for x in self.x]
        return np.mean(f), gap(self.a.domain, g, self.center, self.shape), np.mean(apart)


def compare(
    algorithm, clients, outputs=1, classes=None, participation=1.0, delays=None, rounds=ROUNDS
):
    first = algorithm.model.init(twins.federation(clients, classes).spec, twins.shared_key(SEED))
    start = twins.flat(first)
    if algorithm.begin == "projected" and isinstance(algorithm.domain, fd.L2Ball):
        # so that the projection has something to do
        assert np.linalg.norm(start) > algorithm.domain.radius
        start = start * algorithm.domain.radius / np.linalg.norm(start)
    twin = Twin(algorithm, clients, outputs, start, participation, delays)
    options = {"engine": delays.engine} if delays else {"participation": participation}
    for t in range(1, rounds + 1):
        twin.round()
        run = twins.run(algorithm, clients, t, classes, seed=SEED, **options)
        twins.near(run.state.penalty, twin.penalty, what="penalty")
        twins.near(twins.flat(run.state.center), twin.center, what=f"center after round {t}")
        states = twins.states_of(run)
        for i in range(N):
            twins.near(
                twins.flat(states[i]["x"]), twin.x[i], what=f"x of client {i} after round {t}"
            )
            if algorithm.variant == "augmented":
                twins.near(twins.flat(states[i]["y"]), twin.y[i], what=f"y of client {i}")
            if algorithm.variant == "stochastic":
                twins.near(twins.flat(states[i]["d"]), twin.d[i], what=f"d of client {i}")
            if run.state.copies is not None:
                known = {k: v[i] for k, v in run.state.copies.value.items()}
                twins.near(twins.flat(known), twin.known[i], what=f"the server's x of client {i}")
        row = run.records.rows[-1]
        got = [row[name] for name in ("objective", "fw_gap", "consensus")]
        twins.near(got, twin.measured(), 2e-5, what=f"history of round {t}")


ANYWHERE = fd.Linear(zero_start=False)
SETS = {
    "l1": fd.L1Ball(2.7),
    "l2": fd.L2Ball(1.3),
    "linf": fd.LInfBall(0.9),
    "nuclear": fd.NuclearBall(2.1),
}
VARIANTS = {
    "penalty": {"variant": "penalty", "penalty": 0.37},
    "auto": {"variant": "penalty", "penalty": "auto"},
    "augmented": {"variant": "augmented", "penalty": 0.37},
    "augmented auto": {"variant": "augmented", "penalty": "auto"},
    "stochastic": {"variant": "stochastic", "penalty": 0.37, "batch_size": 3},
    "convex batches": {
        "variant": "stochastic", "penalty": 0.23, "batch_size": 3, "schedule": "convex",
    },
    "nonconvex": {"variant": "penalty", "penalty": 0.37, "schedule": "nonconvex", "horizon": 7},
    "nonconvex batches": {
        "variant": "stochastic", "penalty": 0.37, "batch_size": 2, "schedule": "nonconvex",
        "horizon": 7,
    },
    "slow": {"variant": "augmented", "penalty": 0.37, "schedule": "stochastic"},
}  # fmt: skip


@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_and_schedules(variant, participation):
    """Each variant in two of the three sets."""
    name = ("l1", "l2", "linf")[(list(VARIANTS).index(variant) + int(participation)) % 3]
    algorithm = fd.FedFW(ANYWHERE, SETS[name], **VARIANTS[variant])
    compare(algorithm, twins.values(), participation=participation)


@pytest.mark.parametrize(
    ("variant", "participation"),
    [("auto", 0.5), ("augmented", 1.0), ("stochastic", 0.5), ("nonconvex", 1.0)],
)
def test_matrices_in_a_nuclear_ball(variant, participation):
    algorithm = fd.FedFW(
        fd.Linear(bias=False, zero_start=False), SETS["nuclear"], **VARIANTS[variant]
    )
    compare(algorithm, twins.labels(), outputs=3, classes=3, participation=participation)


def test_a_start_that_is_projected():
    algorithm = fd.FedFW(ANYWHERE, fd.L2Ball(0.29), begin="projected", **VARIANTS["augmented auto"])
    compare(algorithm, twins.labels(), outputs=3, classes=3, participation=0.5)


@pytest.mark.parametrize(
    ("variant", "participation"), [("auto", 0.5), ("penalty", 1.0), ("augmented", 1.0)]
)
def test_supersets(variant, participation):
    """Section 4.3: two clients with an L2 ball and one with a cube around the cross-polytope of the
    others.
    """
    outer = {1: fd.L2Ball(2.9), 3: fd.LInfBall(2.8), 4: fd.L2Ball(2.9)}
    algorithm = fd.FedFW(ANYWHERE, SETS["l1"], supersets=outer, **VARIANTS[variant])
    compare(algorithm, twins.values(), participation=participation)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "nonconvex"])
def test_late_messages(variant):
    """Each point moves the server's x_i by the eta of the round that it answers."""
    name = ("l1", "linf")[list(VARIANTS).index(variant) % 2]
    algorithm = fd.FedFW(ANYWHERE, SETS[name], **VARIANTS[variant])
    compare(algorithm, twins.values(), delays=twins.Delays(), rounds=4)


def test_supersets_with_late_messages():
    algorithm = fd.FedFW(
        ANYWHERE, SETS["l1"], supersets={2: fd.L2Ball(2.9), 5: fd.L2Ball(3.1)}, penalty=0.37
    )
    compare(algorithm, twins.values(), delays=twins.Delays(), rounds=4)


@pytest.mark.parametrize("name", SETS)
def test_naive(name):
    """Equation 20: x <- (1 - eta) x + eta times the plain mean of those who came, eta = 2 / (t +
    1).
    """
    bias = name != "nuclear"
    clients = twins.double(rows := twins.labels())
    algorithm = fd.NaiveFW(fd.Linear(bias=bias, zero_start=False), SETS[name])
    x = twins.flat(algorithm.model.init(twins.federation(rows, 3).spec, twins.shared_key(SEED)))
    for t in range(1, ROUNDS + 1):
        points = []
        for i in twins.cohort(SEED, t, N, 0.5):
            g = twins.linear_gradient("cross_entropy", x, *clients[i], 3, bias)
            points.append(oracle(SETS[name], g, (3, 3)))
        eta = 2 / (t + 1)
        x = (1 - eta) * x + eta * np.mean(points, 0)
        run = twins.run(algorithm, rows, t, 3, seed=SEED, participation=0.5)
        twins.near(twins.flat(run.state.center), x, what=f"x after round {t}")
        f = np.mean([twins.linear_value("cross_entropy", x, *c, 3, bias) for c in clients])
        g = np.mean([twins.linear_gradient("cross_entropy", x, *c, 3, bias) for c in clients], 0)
        row = run.records.rows[-1]
        twins.near([row["objective"], row["fw_gap"]], [f, gap(SETS[name], g, x, (3, 3))], 2e-5)


@pytest.mark.parametrize("variant", ["penalty", "slow"])
def test_averages_alone_are_seen(variant):
    """Differential privacy hides the points: center <- (1 - p eta) center + p eta mean, with p n
    clients expected.

    Who came is known to nobody but the clients, whose x_i move. The least noise that is allowed has
    0.01 of the clip as its standard deviation: 0.014 / 3 in the mean, times p eta of at most 1/2,
    is 0.0023 in the center. A p or eta that is forgotten makes ten times as much. The twin goes on
    from the noisy center.
    """
    rows, domain = twins.values(), SETS["l2"]
    algorithm = fd.FedFW(ANYWHERE, domain, measure_every=0, **VARIANTS[variant])
    start = twins.flat(ANYWHERE.init(twins.federation(rows).spec, twins.shared_key(SEED)))
    twin, cohorts = Twin(algorithm, rows, 1, start, 0.5), []
    for t in range(1, ROUNDS + 1):
        private = fd.DifferentialPrivacy(
            clip=1.4, noise=0.01, delta=1e-3, accountant="rdp", entropy=Counted(b"twins")
        )
        run = twins.run(
            algorithm, rows, t, seed=SEED, participation=fd.Poisson(0.5), aggregation=private
        )
        states = twins.states_of(run)
        where = [twins.flat(states[i]["x"]) if i in states else start for i in range(N)]
        who = [i for i in range(N) if np.abs(where[i] - twin.x[i]).max() > 1e-3]
        cohorts.append(who)
        twin.sent[t], rate = twin.center, 0.5 * twin.schedule(t)[0]
        for i in who:
            twin.step(i, t, t)
        mean = sum((twin.points[i, t] for i in who), np.zeros_like(start)) / (0.5 * N)
        twin.center = (1 - rate) * twin.center + rate * mean
        np.testing.assert_allclose(twins.flat(run.state.center), twin.center, rtol=0, atol=0.01)
        twin.center = twins.flat(run.state.center)
        for i in range(N):
            twins.near(where[i], twin.x[i], what=f"x of client {i} after round {t}")
    assert {len(who) for who in cohorts} != {N // 2}  # not as many as are expected
