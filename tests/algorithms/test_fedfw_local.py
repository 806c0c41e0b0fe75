"""FedFW's local steps, line search, pairwise directions, momentum and penalties, beside NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import testing
from foedus.algorithms.fedfw.local import average_point
from foedus.algorithms.fedfw.search import least, most_change
from foedus.wire.encoding import nbytes
from tests.algorithms.test_fedfw import SCALAR, own, quadratics, values

RADIUS, PENALTY, ROUNDS = 1.7, 0.37, 4


@pytest.fixture(scope="module")
def fed():
    """Three unequal clients whose own solutions are far apart."""
    return values()


def oracle(ball, g):
    if ball == "l2":
        return -RADIUS * g / np.linalg.norm(g)
    i = np.abs(g).argmax()
    return -RADIUS * np.sign(g[i]) * np.eye(len(g))[i]


def domain_of(ball):
    return fd.L1Ball(RADIUS) if ball == "l1" else fd.L2Ball(RADIUS)


# -- schedules -------------------------------------------------------------------------------------


def scheduled(fed, k, variant, begin, momentum):
    """Algorithm 1 with k steps a round, whose schedules count steps, in NumPy."""
    forms = quadratics(fed)
    n, d = len(forms), len(forms[0][1])
    x, y, m, c = np.zeros((n, d)), np.zeros((n, d)), np.zeros((n, d)), np.zeros(d)
    for t in range(ROUNDS):
        new = np.empty((n, d))
        for i, (a, b) in enumerate(forms):
            if variant == "augmented":
                y[i] += PENALTY * (x[i] - c)
            z = c if begin == "center" else x[i]
            for j in range(t * k + 1, t * k + k + 1):
                eta, lam = 2 / (j + 1), PENALTY * math.sqrt(j + 1)
                m[i] = momentum * m[i] + (1 - momentum) * (a @ z - b) / n
                z = (1 - eta) * z + eta * oracle("l1", m[i] + lam * (z - c) + y[i])
            new[i] = z
        x, c = new, new.mean(0)
    return x, c


@pytest.mark.parametrize("begin", ["own", "center"])
@pytest.mark.parametrize(
    ("variant", "momentum"), [("penalty", 0.0), ("augmented", 0.0), ("penalty", 0.6)]
)
def test_local_steps_by_numpy(begin, variant, momentum, fed):
    algorithm = fd.FedFW(
        SCALAR, fd.L1Ball(RADIUS), variant=variant, penalty=PENALTY, local_steps=3,
        begin_round=begin, momentum=momentum,
    )  # fmt: skip
    run = fd.run(algorithm, fed, ROUNDS, evaluate_every=0)
    x, c = scheduled(fed, 3, variant, begin, momentum)
    np.testing.assert_allclose(own(run)[:, 0], x, atol=2e-5)
    np.testing.assert_allclose(run.state.center["weight"][0], c, atol=2e-5)


@given(etas=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(deadline=None)
def test_the_average_of_points_ends_where_the_steps_do(etas, seed):
    """(1 - h) x + h u, h = 1 - prod (1 - eta), for sparse, low-rank and dense points."""
    rng = torch.Generator().manual_seed(seed)
    g = torch.randn(len(etas), 4, 3, generator=rng)
    start = torch.randn(4, 3, generator=rng)
    for domain in (fd.L1Ball(2.0), fd.NuclearBall(2.0), fd.LInfBall(2.0), fd.L2Ball(2.0)):
        points = [domain.lmo(each) for each in g]
        x = start
        for eta, point in zip(etas, points, strict=True):
            x = x + eta * ((point if isinstance(point, torch.Tensor) else point.dense()) - x)
        u = average_point([(torch.tensor(e), p) for e, p in zip(etas, points, strict=True)])
        u = u if isinstance(u, torch.Tensor) else u.dense()
        h = 1 - math.prod(1 - eta for eta in etas)
        assert torch.allclose((1 - h) * start + h * u, x, atol=1e-5)


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize(
    "more",
    [{"local_steps": 3}, {"local_steps": 2, "step_size": "line_search", "direction": "pairwise"}],
    ids=["schedule", "line search"],
)
def test_the_center_is_the_average_of_all_x(more, part, fed):
    algorithm = fd.FedFW(SCALAR, fd.L1Ball(RADIUS), **more)
    run = fd.run(algorithm, values((20, 30, 25, 9)), 7, participation=part, evaluate_every=0)
    order = run.clients["states"]["slot"]
    assert len(order) == 4
    mean = own(run).mean(0) if min(order) >= 0 else None
    if mean is not None:
        np.testing.assert_allclose(run.state.center["weight"], mean, atol=1e-5)


# -- line search -----------------------------------------------------------------------------------


def searched(fed, k, ball, variant, penalty, rounds=ROUNDS):
    """Local steps with exact line searches, which quadratics have, in NumPy; also lambda."""
    forms = quadratics(fed)
    n, d = len(forms), len(forms[0][1])
    x, y, c = np.zeros((n, d)), np.zeros((n, d)), np.zeros(d)
    # half the gaps at 0 over n and the squared diameter, for "auto"
    gaps = [-b @ -oracle(ball, -b) / n for _, b in forms]
    lam = np.mean(gaps) / (2 * RADIUS) ** 2 if penalty == "auto" else penalty
    last = 0.0
    for t in range(1, rounds + 1):
        pull = lam if variant == "augmented" else lam * math.sqrt(t + 1)
        slopes, far = np.empty(n), np.empty(n)
        for i, (a, b) in enumerate(forms):
            if variant == "augmented":
                y[i] += last / 2 * (x[i] - c)
            for _ in range(k):
                raw = (a @ x[i] - b) / n
                g = raw + pull * (x[i] - c) + y[i]
                s, v, most = oracle(ball, g), x[i], 1.0
                step = s - v
                bend = step @ (a @ step) / n + pull * step @ step
                gamma = min(max(-g @ step / bend, 0.0), most) if bend > 0 else 0.0
                x[i] = x[i] + gamma * step
            slopes[i], far[i] = raw @ raw, x[i] @ x[i]
        c, last = x.mean(0), pull
        if penalty == "auto":
            factor = math.exp(2 / t**1.5)
            lam = min(max(math.sqrt(slopes.sum() / far.sum()), lam / factor), factor * lam)
    return x, c, lam


@pytest.mark.parametrize("variant", ["penalty", "augmented"])
@pytest.mark.parametrize("ball", ["l1", "l2"])
@pytest.mark.parametrize("penalty", [PENALTY, "auto"])
def test_line_search_by_numpy(variant, ball, penalty, fed):
    algorithm = fd.FedFW(
        SCALAR, domain_of(ball), variant=variant, penalty=penalty, local_steps=3,
        step_size="line_search",
    )  # fmt: skip
    run = fd.run(algorithm, fed, ROUNDS, evaluate_every=0)
    x, c, lam = searched(fed, 3, ball, variant, penalty)
    np.testing.assert_allclose(own(run)[:, 0], x, atol=2e-4)
    np.testing.assert_allclose(run.state.center["weight"][0], c, atol=2e-4)
    assert run.state.penalty == pytest.approx(lam, rel=1e-3)


def test_pairwise_steps_by_hand():
    """f = |A x - b|^2 / (2 m), A^T A / m = diag(1, 2), A^T b / m = (3, 2), twice, on |x|_1 <= 1.

    At 0, g = -(3, 2) / 2: toward (1, 0) from zero, whose weight is 1; phi' = -1.5 + gamma / 2 < 0
    up to 1, so x = (1, 0). There g = ((1 - 3) / 2, -1): a tie, of which the first is taken, v = s:
    no move. With radius 1.5 likewise x = (1.5, 0), g = (-0.75, -1): toward (0, 1.5) from (1.5, 0),
    d = (-1.5, 1.5), <g, d> = -0.375, curvature (2.25 + 2 * 2.25) / 2 = 3.375, gamma = 1/9:
    x = (1.5 - 1/6, 1/6).
    """
    x = np.sqrt(2) * np.array([[1.0, 0.0], [0.0, np.sqrt(2)]], np.float32)
    y = np.array([3.0 * np.sqrt(2), 2.0], np.float32)  # A^T b / 2 = (3, 2)
    fed = fd.Federation.from_clients([(x, y), (x, y)])
    for radius, steps, want in ((1.0, 3, (1, 0)), (1.5, 1, (1.5, 0)), (1.5, 2, (4 / 3, 1 / 6))):
        algorithm = fd.FedFW(
            SCALAR, fd.L1Ball(radius), penalty=0.0, step_size="line_search", direction="pairwise",
            local_steps=steps,
        )  # fmt: skip
        run = fd.run(algorithm, fed, 1, evaluate_every=0)
        np.testing.assert_allclose(run.state.center["weight"][0], want, atol=1e-5)


def test_the_augmented_line_search_finds_the_solution(fed):
    """Projected gradients on the pooled problem find it too; FedFW's own schedule does not yet."""
    forms = quadratics(fed)
    a, b = np.mean([a for a, _ in forms], 0), np.mean([b for _, b in forms], 0)
    ball, x = fd.L1Ball(RADIUS), np.zeros(len(b))
    for _ in range(3000):
        x = ball.project(torch.from_numpy(x - 0.1 * (a @ x - b))).numpy()
    value = lambda w: float(w @ a @ w / 2 - b @ w)  # noqa: E731
    plain = fd.FedFW(SCALAR, ball)
    search = fd.FedFW(
        SCALAR, ball, variant="augmented", step_size="line_search", local_steps=10,
        direction="pairwise",
    )  # fmt: skip
    found = {
        name: value(fd.run(z, fed, 60, evaluate_every=0).state.center["weight"][0].double().numpy())
        for name, z in (("plain", plain), ("search", search))
    }
    assert value(x) <= found["search"] + 1e-6
    assert found["search"] - value(x) < 1e-3 * abs(value(x))
    assert found["plain"] - value(x) > 10 * (found["search"] - value(x))


@given(
    curve=st.floats(0.01, 10), first=st.floats(-5, 5), most=st.floats(0, 1), bend=st.floats(0, 3)
)
@settings(deadline=None)
def test_the_least_of_a_convex_function(curve, first, most, bend):
    """phi'(g) = first + curve g + bend g^3 increases; exact for bend = 0, else in the bracket."""
    slope = lambda g: first + curve * g + bend * g**3  # noqa: E731
    at = float(least(slope, *torch.tensor([first, most], dtype=torch.float64)))
    assert 0 <= at <= most
    if bend == 0:
        assert at == pytest.approx(min(max(-first / curve, 0), most), abs=1e-6)
    value = lambda g: first * g + curve * g**2 / 2 + bend * g**4 / 4  # noqa: E731
    assert value(at) <= 1e-12  # never above the start
    if slope(most) <= 0:
        assert at == pytest.approx(most)


def test_the_penalty_changes_by_a_finite_product():
    """After round t by a factor of exp(2 / t^1.5) at most, which some round needs: 7.39, 2.03, ...;
    the product of all is below exp(2 * 2.6124) = exp(2 zeta(3/2)).
    """
    assert [round(most_change(t), 2) for t in (1, 2, 3)] == [7.39, 2.03, 1.47]
    assert sum(math.log(most_change(t)) for t in range(1, 5000)) < 2 * 2.6124
    digits = fd.split(fd.load("digits"), "iid", clients=3)
    search = fd.FedFW(
        fd.Linear(), fd.L1Ball(10.0), variant="augmented", step_size="line_search", measure_every=0
    )
    penalties = fd.run(search, digits, 6, evaluate_every=0).history.penalty.to_numpy()
    changes = np.abs(np.diff(np.log(penalties)))
    bounds = 2 / np.arange(1, 7) ** 1.5
    assert (changes <= bounds + 1e-6).all()
    assert (changes[1:] > 0.99 * bounds[1:]).any()


def test_secure_aggregation_sees_the_same_moves(fed):
    search = fd.FedFW(
        SCALAR, fd.L1Ball(RADIUS), variant="augmented", step_size="line_search",
        direction="pairwise",
    )  # fmt: skip
    plain, secure = (
        fd.run(search, fed, 5, evaluate_every=0, aggregation=aggregation).state.center["weight"]
        for aggregation in (None, fd.SecureAggregation())
    )
    assert torch.allclose(plain, secure, atol=1e-4)


def test_moves_beyond_the_set_are_refused(fed):
    search = fd.FedFW(SCALAR, fd.L2Ball(RADIUS), penalty=PENALTY, step_size="line_search")
    hostile = fd.Hostile(clients=[1], attack="scale", strength=100.0)
    run = fd.run(search, fed, 3, engine=hostile, evaluate_every=0)
    assert "1: its x moves further than the set is wide" in run.history.left_out.iloc[1]
    assert run.state.center["weight"].norm() <= RADIUS


def test_moves_are_as_sparse_as_their_vertices():
    """Four steps on an L1 ball over 650 parameters: 8 entries in place of 650."""
    fed = fd.split(fd.load("digits"), "iid", clients=3)
    search = fd.FedFW(
        fd.Linear(), fd.L1Ball(5.0), penalty=PENALTY, local_steps=4, step_size="line_search",
        direction="pairwise", measure_every=0,
    )  # fmt: skip
    last = fd.run(search, fed, 2, evaluate_every=0).history.iloc[-1]
    sparse = fd.wire.Sparse(torch.zeros(8, dtype=torch.int64), torch.zeros(8), (650,))
    assert last.bytes_up / last.messages_up == nbytes({"move": sparse})


# -- geometry --------------------------------------------------------------------------------------


@given(seed=st.integers(0, 500), full=st.booleans(), simplex=st.booleans())
@settings(deadline=None)
def test_pairwise_steps_stay_in_the_set(seed, full, simplex):
    """At the longest step too; the vertex that loses its weight is one of x, and the worst."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(4)) * (1.0 if full or simplex else 0.8)
    x = np.zeros(7)
    x[rng.choice(7, 4, replace=False)] = (
        RADIUS * weights * (1 if simplex else rng.choice([-1, 1], 4))
    )
    g = rng.normal(size=7)
    domain = fd.Simplex(RADIUS) if simplex else fd.L1Ball(RADIUS)
    point, slope = torch.from_numpy(x), torch.from_numpy(g)
    toward, away, most = domain.pairwise(slope, point)
    assert torch.equal(toward.dense(), domain.lmo(slope).dense())
    moved = point + most * (toward.dense() - away.dense())
    assert bool(domain.contains(moved, 1e-9))
    scores = [g[j] * np.sign(x[j]) * RADIUS for j in np.flatnonzero(x)]
    scores += [] if full or simplex else [0.0]
    assert float((slope * away.dense()).sum()) == pytest.approx(max(scores))
    same = bool((toward.dense() == away.dense()).all())
    if not same:  # no further: the vertex has lost all of its weight, or zero has
        further = point + 1.01 * most * (toward.dense() - away.dense())
        assert simplex is False or not bool(domain.contains(further, 1e-9))


def test_sets_without_vertices_of_one_entry_have_no_pairwise_steps(fed):
    search = fd.FedFW(
        SCALAR, fd.L2Ball(1.0), step_size="line_search", direction="pairwise", penalty=1.0
    )
    with pytest.raises(fd.ConfigError, match=r"L2Ball has no pairwise directions.*frank_wolfe"):
        fd.run(search, fed, 1, evaluate_every=0)


# -- penalties and gaps ----------------------------------------------------------------------------


def test_the_balanced_penalty_by_numpy(fed):
    """lambda_0 changes at the start of round 4, by sqrt(e / q) within [1/2, 2]."""
    plain = fd.FedFW(SCALAR, fd.L1Ball(RADIUS), penalty="balanced")
    before = fd.run(plain, fed, 3, evaluate_every=0)
    after = fd.run(plain, fed, 4, evaluate_every=0)
    x, c, lam0 = own(before)[:, 0], before.state.center["weight"][0].numpy(), before.state.penalty
    lam, hidden, added, n = lam0 * math.sqrt(5), 0.0, 0.0, len(fed)
    for x_i, (a, b) in zip(x, quadratics(fed), strict=True):
        g = (a @ x_i - b) / n
        s = oracle("l1", g + lam * (x_i - c))
        hidden += g @ (c - x_i)
        added += lam * (x_i - c) @ (x_i - s)
    factor = min(max(math.sqrt(max(hidden, 1e-38) / max(added, 1e-38)), 0.5), 2.0)
    assert after.state.penalty == pytest.approx(lam0 * factor, rel=1e-3)
    assert 0.5 < factor < 2  # or nothing but the bounds was seen
    assert fd.run(plain, fed, 7, evaluate_every=0).state.penalty == after.state.penalty


def test_the_surrogate_gap_by_numpy(fed):
    """Equation 45, with the lambda of the next step: 3 rounds are made, so sqrt(4 + 1)."""
    algorithm = fd.FedFW(SCALAR, fd.L1Ball(RADIUS), penalty=PENALTY, surrogate_gap=True)
    run = fd.run(algorithm, fed, 3, evaluate_every=0)
    x, c = own(run)[:, 0], run.state.center["weight"][0].numpy()
    total = 0.0
    for x_i, (a, b) in zip(x, quadratics(fed), strict=True):
        g = (a @ x_i - b) / len(fed) + PENALTY * math.sqrt(5) * (x_i - c)
        total += g @ x_i + RADIUS * np.abs(g).max()
    assert run.history.surrogate_gap.iloc[-1] == pytest.approx(total, rel=1e-3)


def test_a_warm_oracle_finds_the_same_points():
    """Sides of 70 are above those whose spectrum is computed whole."""
    rng = np.random.default_rng(0)
    parts = [
        (rng.normal(size=(80, 70)).astype(np.float32), rng.normal(size=(80, 70)).astype(np.float32))
        for _ in range(2)
    ]
    fed = fd.Federation.from_clients(parts)
    cold, warm = (
        fd.run(
            fd.FedFW(SCALAR, fd.NuclearBall(3.0), penalty=PENALTY, warm=warm), fed, 4,
            evaluate_every=0,
        )
        for warm in (False, True)
    )  # fmt: skip
    value = lambda run: run.history.objective.iloc[-1]  # noqa: E731
    assert value(warm) == pytest.approx(value(cold), rel=1e-3)
    vectors = warm.clients["states"]["states"]["v"]["weight"]
    assert vectors.shape[-1] == 70
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(len(vectors)), atol=1e-4)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step_size": "line_search", "variant": "stochastic"}, "draws mini-batches"),
        ({"step_size": "line_search", "noise": 0.1}, "noise would decide"),
        ({"step_size": "line_search", "momentum": 0.5}, "momentum averages"),
        ({"step_size": "line_search", "supersets": {0: fd.L2Ball(2.0)}}, "supersets need"),
        ({"direction": "pairwise"}, "use step_size='line_search'"),
        ({"momentum": 0.5, "variant": "stochastic"}, "leave momentum out"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"local_steps": 0}, "local_steps=0"),
        ({"penalty": "balanced", "variant": "augmented"}, "use penalty='auto'"),
        ({"penalty": "balanced", "step_size": "line_search"}, "use penalty='auto'"),
    ],
)
def test_settings_that_do_not_go_together(options, says):
    with pytest.raises(fd.ConfigError, match=says):
        fd.FedFW(SCALAR, **{"domain": fd.L1Ball(1.0), **options})


def test_warm_is_for_nuclear_balls(fed):
    with pytest.raises(fd.ConfigError, match=r"warm=True is for fd.NuclearBall"):
        fd.run(fd.FedFW(SCALAR, fd.L1Ball(1.0), warm=True), fed, 1, evaluate_every=0)


CHECKED = {
    "warm": fd.FedFW(fd.Linear(bias=False), fd.NuclearBall(5.0), warm=True),
    "center": fd.FedFW(
        fd.Linear(), fd.L1Ball(5.0), local_steps=3, begin_round="center", momentum=0.3
    ),
    "balanced": fd.FedFW(fd.Linear(), fd.L2Ball(5.0), penalty="balanced"),
    "search": fd.FedFW(
        fd.Linear(), fd.L2Ball(5.0), variant="augmented", step_size="line_search", local_steps=2
    ),
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda c: c.__name__)
def test_the_options_pass_every_check(check, name):
    fed = fd.split(fd.load("digits"), "dirichlet", clients=5, alpha=0.5, seed=1)
    check(CHECKED[name], fed, fd.Local())
