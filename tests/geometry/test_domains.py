"""Every set against an independent description of it: linear programmes, enumerated corners,
general-purpose solvers.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog, minimize
from torch import Tensor
from torch.func import vmap

from foedus import wire
from foedus.base import tree
from foedus.core import describe as config
from foedus.core.reduce import Accumulator
from foedus.errors import ConfigError
from foedus.geometry import (
    Birkhoff,
    Box,
    Corner,
    Domain,
    GroupBall,
    KSparse,
    L1Ball,
    L2Ball,
    LInfBall,
    ModelDomain,
    NuclearBall,
    PerLayer,
    Permutahedron,
    Simplex,
    Whole,
    dense,
    domain_of,
    inside,
)
from foedus.geometry import matrices as models
from foedus.wire.arrays import LowRank, Signs, Sparse

LABELS = (5, 0, 0, 5, 5, 2, 0, 5, 2, 5, 5, 0)  # groups of 6, 4 and 2 entries

POLYTOPES = {
    "l1": (L1Ball(1.5), (2, 3)),
    "linf": (LInfBall(1.5), (2, 3)),
    "simplex": (Simplex(1.5), (2, 3)),
    "box": (Box(-0.5, 0.5), (2, 3)),
    "corner": (Box(0.25, 1.5), (2, 3)),
    "broadcast box": (Box(((-1.0, -2.0, 0.0),), ((0.5,), (2.0,))), (2, 3)),
    "k-sparse": (KSparse(2, 1.5), (2, 3)),
    "all-sparse": (KSparse(6, 1.5), (2, 3)),
    "permutahedron": (Permutahedron((3.0, -1.0, 0.5, 3.0)), (2, 2)),
    "birkhoff": (Birkhoff(), (3, 3)),
}
ROUND = {
    "l2": (L2Ball(1.5), (3, 4)),
    "groups": (GroupBall(1.5, 4), (2, 6)),
    "rows": (GroupBall(1.5, "rows"), (3, 2, 2)),
    "labels": (GroupBall(1.5, LABELS), (12,)),
    "nuclear": (NuclearBall(1.5), (3, 4)),
    "tall nuclear": (NuclearBall(1.5), (4, 3)),
    "large nuclear": (NuclearBall(1.5), (65, 70)),
}
SETS = {**POLYTOPES, **ROUND}

every = pytest.mark.parametrize(("domain", "shape"), SETS.values(), ids=SETS.keys())
polytope = pytest.mark.parametrize(("domain", "shape"), POLYTOPES.values(), ids=POLYTOPES.keys())
number = st.one_of(st.integers(-3, 3).map(float), st.floats(-10, 10, width=32))


def vectors(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float64, shape, elements=number)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def corners(domain: Domain, shape: tuple[int, ...]) -> Tensor:
    """All corners of a polytope, by its definition."""
    p = math.prod(shape)
    match domain:
        case L1Ball(r):
            rows = [s * r * np.eye(p)[i] for i in range(p) for s in (1, -1)]
        case Simplex(r):
            rows = list(r * np.eye(p))
        case LInfBall(r):
            rows = list(itertools.product((-r, r), repeat=p))
        case Box(lo, hi):
            lo, hi = (np.broadcast_to(np.array(e), shape).ravel() for e in (lo, hi))
            rows = list(itertools.product(*zip(lo, hi, strict=True)))
        case KSparse(k, r):
            rows = []
            for where in itertools.combinations(range(p), k):
                for signs in itertools.product((-r, r), repeat=k):
                    rows.append(np.zeros(p))
                    rows[-1][list(where)] = signs
        case Permutahedron(w):
            rows = list(itertools.permutations(w))
        case Birkhoff():
            rows = [
                np.eye(shape[0])[list(order)].ravel()
                for order in itertools.permutations(range(shape[0]))
            ]
    return torch.tensor(np.array(rows), dtype=torch.float64).reshape(-1, *shape)


def linear_minimum(domain: Domain, g: np.ndarray) -> float:
    """min <g, s> by a linear program on the inequalities of the set."""
    shape, g = g.shape, g.ravel()
    p, both = len(g), np.concatenate((g, -g))  # x = positive part - negative part
    match domain:
        case L1Ball(r):
            problem = {"c": both, "A_ub": np.ones((1, 2 * p)), "b_ub": [r]}
        case KSparse(k, r):
            each = np.hstack((np.eye(p), np.eye(p)))
            problem = {
                "c": both,
                "A_ub": np.vstack((np.ones((1, 2 * p)), each)),
                "b_ub": [k * r] + [r] * p,
            }
        case LInfBall(r):
            problem = {"c": g, "bounds": (-r, r)}
        case Box(lo, hi):
            ends = [np.broadcast_to(np.array(e), shape).ravel() for e in (lo, hi)]
            problem = {"c": g, "bounds": np.stack(ends, 1)}
        case Simplex(r):
            problem = {"c": g, "A_eq": np.ones((1, p)), "b_eq": [r]}
        case Birkhoff():
            n = shape[0]
            rows = np.vstack((np.kron(np.eye(n), np.ones(n)), np.kron(np.ones(n), np.eye(n))))
            problem = {"c": g, "A_eq": rows, "b_eq": np.ones(2 * n)}
        # the k largest entries sum up to at most those of w, all of them to the same
        case Permutahedron(w):
            some = [list(c) for k in range(1, p) for c in itertools.combinations(range(p), k)]
            limits = [sum(sorted(w)[-len(c) :]) for c in some]
            sums = np.array([[i in c for i in range(p)] for c in some], float)
            problem = {
                "c": g,
                "A_ub": sums,
                "b_ub": limits,
                "A_eq": np.ones((1, p)),
                "b_eq": [sum(w)],
                "bounds": (None, None),
            }
    return linprog(**problem).fun


def dual_norm(domain: Domain, g: np.ndarray) -> float:
    """The largest <g, x> over a unit ball."""
    match domain:
        case L2Ball():
            return np.linalg.norm(g)
        case NuclearBall():
            return np.linalg.svd(g, compute_uv=False)[0]
        case GroupBall(_, groups):
            flat = g.ravel()
            labels = {"rows": np.arange(g.size) // (g.size // len(g)), 4: np.arange(g.size) // 4}
            labels = np.array(groups) if isinstance(groups, tuple) else labels[groups]
            return max(np.linalg.norm(flat[labels == label]) for label in set(labels.tolist()))


# The oracle


@polytope
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_lmo_solves_the_linear_programme(domain, shape, data):
    g = data.draw(vectors(shape))
    point, points = dense(domain.lmo(torch.tensor(g))), corners(domain, shape)
    value = dot(torch.tensor(g), point)
    # the solver's own tolerance is 1e-7 a constraint
    assert value == pytest.approx(linear_minimum(domain, g), abs=1e-5)
    assert value == pytest.approx(
        float((torch.tensor(g) * points).flatten(1).sum(1).min()), abs=1e-12
    )
    assert float((points - point).abs().flatten(1).amax(1).min()) < 1e-12, "not a corner"


@pytest.mark.parametrize(("domain", "shape"), ROUND.values(), ids=ROUND.keys())
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_lmo_reaches_the_dual_norm(domain, shape, data):
    g = (
        data.draw(vectors(shape))
        if math.prod(shape) < 20
        else noise(*shape, seed=data.draw(st.integers(0, 99))).numpy()
    )
    point = dense(domain.lmo(torch.tensor(g)))
    best = domain.radius * dual_norm(domain, g)
    assert dot(torch.tensor(g), point) == pytest.approx(-best, rel=1e-9, abs=1e-12)
    if best > 0:
        # extreme points of these are that long
        assert float(torch.linalg.vector_norm(point)) == pytest.approx(domain.radius)
    assert bool(domain.contains(point, tolerance=1e-9))


@every
def test_lmo_of_single_precision_is_in_the_set_and_optimal(domain, shape):
    for seed in range(5):
        g = noise(*shape, seed=seed, dtype=torch.float32)
        point = dense(domain.lmo(g))
        assert point.dtype == torch.float32
        assert bool(domain.contains(point))
        exact = dense(domain.lmo(g.double()))
        assert dot(g, point) == pytest.approx(dot(g, exact), rel=1e-6)


def test_lmo_forms():
    g = torch.tensor([[0.5, -2.0, 1.0], [0.0, 2.0, -1.5]])
    assert isinstance(L1Ball(1).lmo(g), Sparse)
    assert isinstance(Simplex(1).lmo(g), Sparse)
    assert isinstance(KSparse(2, 1).lmo(g), Sparse)
    assert isinstance(GroupBall(1, "rows").lmo(g), Sparse)
    assert isinstance(LInfBall(1).lmo(g), Signs)
    assert isinstance(Box(-2, 2).lmo(g), Signs)
    assert isinstance(Box(0, 2).lmo(g), Corner)
    assert isinstance(Box(0, (1.0, 2.0, 3.0)).lmo(g), Tensor)
    assert isinstance(NuclearBall(1).lmo(g), LowRank)
    assert isinstance(Birkhoff().lmo(g[:, :2]), Sparse)
    assert NuclearBall(1).lmo(g).left.shape == (2, 1)
    assert KSparse(4, 1).lmo(g).values.shape == (4,)
    assert Birkhoff().lmo(g[:, :2]).values.tolist() == [1, 1]


def test_lmo_by_hand():
    g = torch.tensor([[0.5, -2.0, 1.0], [0.0, 2.0, -1.5]])
    assert L1Ball(3.0).lmo(g).dense().tolist() == [[0, 3, 0], [0, 0, 0]]
    assert Simplex(3.0).lmo(g).dense().tolist() == [[0, 3, 0], [0, 0, 0]]
    assert KSparse(2, 3.0).lmo(g).dense().tolist() == [[0, 3, 0], [0, -3, 0]]
    assert LInfBall(3.0).lmo(g).dense().tolist() == [[-3, 3, -3], [3, -3, 3]]
    assert Box(0.0, 3.0).lmo(g).dense().tolist() == [[0, 3, 0], [3, 0, 3]]
    assert Permutahedron((1, 2, 3, 4, 5, 6)).lmo(g).tolist() == [[3, 6, 2], [4, 1, 5]]
    assert torch.allclose(
        GroupBall(2.5, "rows").lmo(g).dense(), torch.tensor([[0, 0, 0], [0, -2.0, 1.5]])
    )
    assert torch.allclose(
        NuclearBall(2.0).lmo(torch.diag(torch.tensor([1.0, -3.0]))).dense(),
        torch.tensor([[0, 0], [0, 2.0]]),
    )


@every
def test_ties_and_zeros_are_deterministic(domain, shape):
    zero = torch.zeros(shape)
    point = dense(domain.lmo(zero))
    assert bool(torch.isfinite(point).all())
    assert bool(domain.contains(point))
    assert torch.equal(point, dense(domain.lmo(-zero)))


def test_ties_go_to_the_lowest_index():
    flat = torch.tensor([1.0, 2.0, -2.0, 2.0, 0.0])
    assert L1Ball(1).lmo(flat).indices.tolist() == [1]
    assert Simplex(1).lmo(-flat.abs()).indices.tolist() == [1]
    assert KSparse(2, 1).lmo(flat).indices.tolist() == [1, 2]
    assert KSparse(2, 1).lmo(torch.ones(100, 1000), batch=1).indices.unique().tolist() == [0, 1]
    many = torch.tensor([3.0] + [1.0] * 400 + [2.0])
    assert KSparse(4, 1).lmo(many).indices.tolist() == [0, 1, 2, 401]
    assert GroupBall(1, 2).lmo(torch.tensor([0.0, 1.0, 3.0, 4.0, 4.0, 3.0])).indices.tolist() == [
        2,
        3,
    ]
    assert Permutahedron((1, 2, 3)).lmo(torch.tensor([7.0, 7.0, 7.0])).tolist() == [3, 2, 1]
    assert Birkhoff().lmo(torch.zeros(3, 3)).indices.tolist() == [0, 4, 8]


@pytest.mark.parametrize("scale", [1e-42, 1e-25, 1e25, 1e38])
@pytest.mark.parametrize("name", ["l2", "groups", "labels", "nuclear", "large nuclear"])
def test_lmo_does_not_depend_on_the_scale_of_the_gradient(name, scale):
    domain, shape = ROUND[name]
    # what single precision leaves of it
    g = (noise(*shape, dtype=torch.float32).clamp(-3, 3) * scale).double()
    assert dot(g / scale, dense(domain.lmo(g.float()))) == pytest.approx(
        -domain.radius * dual_norm(domain, g.numpy() / scale), 1e-5
    )


@every
def test_a_nan_stays_visible_and_in_its_own_client(domain, shape):
    g = noise(3, *shape, dtype=torch.float32)
    g[1].view(-1)[1] = torch.nan
    for result in (
        dense(domain.lmo(g, batch=1)),
        domain.project(g, batch=1),
        dense(vmap(domain.lmo)(g)),
    ):
        assert result.flatten(1).isnan().any(1).tolist() == [False, True, False]
    assert domain.contains(g, tolerance=1e6, batch=1)[1].item() is False


@every
def test_an_infinity_stays_in_its_own_client(domain, shape):
    g = noise(3, *shape)
    bad = g.clone()
    bad[1].view(-1)[1] = torch.inf
    for call in (lambda t: dense(domain.lmo(t, batch=1)), lambda t: domain.project(t, batch=1)):
        assert torch.allclose(call(bad)[::2], call(g)[::2], atol=1e-12)


def test_gradients_of_very_unequal_entries():
    g = torch.tensor([1e-38, 3e30, -4e30, 1e-42])
    expected = torch.tensor([0, -0.6, 0.8, 0])
    assert torch.allclose(L2Ball(1.0).lmo(g), expected)
    assert torch.allclose(GroupBall(1.0, 4).lmo(g).dense(), expected)
    assert torch.allclose(NuclearBall(1.0).lmo(g.reshape(1, 4)).dense(), expected.reshape(1, 4))


def test_groups_of_unequal_size_fill_up_with_zeros_elsewhere():
    g = torch.zeros(12)
    g[5], g[8] = 3.0, -4.0  # the group labeled 2, of two entries
    point = GroupBall(10.0, LABELS).lmo(g)
    assert len(point.indices) == 6 == len(set(point.indices.tolist()))
    assert {
        int(i): round(float(v), 5) for i, v in zip(point.indices, point.values, strict=True) if v
    } == {5: -6.0, 8: 8.0}
    assert set(point.indices.tolist()) <= set(range(12))


# The top singular pair of larger matrices


def spectrum(values: Tensor, m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values, and its right vectors."""
    left = torch.linalg.qr(noise(m, len(values), seed=seed))[0]
    right = torch.linalg.qr(noise(n, len(values), seed=seed + 1))[0]
    return (left * values) @ right.T, right


@pytest.mark.parametrize(("m", "n"), [(80, 90), (90, 80), (200, 70)])
@pytest.mark.parametrize("ratio", [0.5, 0.99, 0.9999, 1.0])
def test_large_matrices_whatever_the_gap(m, n, ratio):
    values = torch.linspace(ratio, 0.01, 66, dtype=torch.float64)
    matrix, right = spectrum(torch.cat((torch.ones(1, dtype=torch.float64), values)), m, n)
    # the worst start: a singular vector that is not the top one
    right_vector_two = right[:, 1].clone()
    for warm in (None, right[:, 0], right_vector_two, torch.zeros(n, dtype=torch.float64)):
        point = NuclearBall(2.0, tolerance=1e-6).lmo(matrix, warm=warm)
        u, v = -point.left[:, 0] / 2, point.right[:, 0]
        value, cosine = float(u @ matrix @ v), float((right[:, 0] @ v).abs())
        assert float(torch.linalg.vector_norm(matrix.T @ u - value * v)) <= 1.01e-6
        assert value >= 1 / math.sqrt(1 + 1e-6 / cosine) - 1e-9
        if warm is not right_vector_two:
            assert value == pytest.approx(1.0, rel=1e-6)


def test_large_matrices_of_low_rank_and_single_precision():
    single = torch.zeros(70, 80)
    single[3, 4] = -5.0
    assert torch.allclose(NuclearBall(1.0).lmo(single).dense()[3, 4], torch.tensor(1.0))
    ones = torch.ones(4, 100, 100)
    assert torch.allclose(
        NuclearBall(1.0).lmo(ones, batch=1).dense(), torch.full((4, 100, 100), -0.01), atol=1e-7
    )
    eye = NuclearBall(1.0).lmo(torch.eye(100)).dense()
    assert float(eye.trace()) == pytest.approx(-1.0, rel=1e-5)
    # 60 fifty times; the largest row says nothing
    blocks = torch.block_diag(torch.ones(50, 50), 60 * torch.eye(50))
    assert dot(blocks, NuclearBall(1.0).lmo(blocks).dense()) == pytest.approx(-60, rel=1e-6)
    rows = torch.zeros(100, 70)
    # the largest row is orthogonal to the top vector, of value sqrt(99)
    rows[:99, 0], rows[99, 1] = 1.0, 5.0
    assert dot(rows, NuclearBall(1.0).lmo(rows).dense()) == pytest.approx(-math.sqrt(99), rel=1e-6)


def test_tolerance_and_iterations_bound_the_work(monkeypatch):
    products = []
    original = models._rows
    monkeypatch.setattr(models, "_rows", lambda v, a: products.append(a.shape) or original(v, a))

    def cost(domain: NuclearBall, **options) -> int:
        products.clear()
        domain.lmo(matrix, **options)
        return sum(s[-2:] in ((100, 120), (120, 100)) for s in products)

    values = torch.cat((torch.tensor([1.0]), torch.linspace(0.98, 0.01, 99))).double()
    matrix, right = spectrum(values, 100, 120)
    assert cost(NuclearBall(1.0, iterations=1)) == 2 + 2
    assert cost(NuclearBall(1.0, iterations=3)) == 2 * 3 + 2
    assert cost(NuclearBall(1.0, tolerance=1e-2)) < cost(NuclearBall(1.0, tolerance=1e-8))
    assert cost(NuclearBall(1.0), warm=right[:, 0] + 1e-3 * noise(120)) < cost(NuclearBall(1.0))
    assert cost(NuclearBall(1.0, tolerance=1e-15, iterations=50)) == 2 * 50 + 2
    best = NuclearBall(1.0, iterations=1).lmo(matrix, warm=right[:, 0]).dense()
    assert -dot(matrix, best) > 0.98


def test_large_matrices_do_not_depend_on_the_batch_or_the_random_state():
    matrices = torch.stack(
        [
            spectrum(torch.linspace(1, ratio, 68).double() ** 8, 70, 80, seed=i)[0]
            for i, ratio in enumerate((0.1, 0.9))
        ]
    )
    before = torch.get_rng_state()
    alone = NuclearBall(1.0, tolerance=0.1).lmo(matrices[0])
    together = NuclearBall(1.0, tolerance=0.1).lmo(matrices, batch=1)
    assert torch.allclose(alone.dense(), together.dense()[0], atol=1e-12)
    assert torch.equal(before, torch.get_rng_state())


def test_a_warm_start_must_fit():
    with pytest.raises(ConfigError, match=r"warm has shape \(3,\).*has shape \(2, 4\)"):
        NuclearBall(1.0).lmo(torch.ones(2, 3, 4), batch=1, warm=torch.ones(3))


# Projections


@every
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_projection_inequality(domain, shape, data):
    """P x is in the set, and <x - P x, z - P x> <= 0 for all z in it, which makes it the closest
    point.
    """
    scale = data.draw(st.sampled_from([0.01, 0.3, 1.0, 30.0]))
    small = math.prod(shape) < 20
    x = (
        torch.tensor(data.draw(vectors(shape)))
        if small
        else noise(*shape, seed=data.draw(st.integers(0, 99)))
    )
    x = x * scale
    near = domain.project(x)
    assert bool(domain.contains(near, tolerance=1e-9))
    slack = 1e-8 * (1 + float(x.abs().max()))
    best = dense(domain.lmo(near - x))  # the worst z of all; those of the polytopes are exact
    assert dot(x - near, best - near) <= slack
    weights = torch.softmax(noise(4, seed=1), 0)
    z = sum(w * dense(domain.lmo(noise(*shape, seed=i))) for i, w in enumerate(weights))
    assert dot(x - near, z - near) <= slack
    assert torch.allclose(domain.project(near), near, atol=1e-10)
    assert torch.allclose(domain.project(z), z, atol=1e-10)


# what SLSQP needs to know; norms without slopes at zero are written with the square
CONSTRAINTS = {
    L1Ball(1.5): [
        {"type": "ineq", "fun": lambda x, s=s: 1.5 - np.dot(s, x)}
        for s in itertools.product((-1, 1), repeat=4)
    ],
    L2Ball(1.5): [{"type": "ineq", "fun": lambda x: 2.25 - x @ x}],
    LInfBall(1.5): [{"type": "ineq", "fun": lambda x: np.concatenate((1.5 - x, 1.5 + x))}],
    Simplex(1.5): [
        {"type": "ineq", "fun": lambda x: x},
        {"type": "eq", "fun": lambda x: x.sum() - 1.5},
    ],
    Box((0.0, 0.0, -1.0, 0.5), 1.0): [
        {"type": "ineq", "fun": lambda x: np.concatenate((x - np.array([0, 0, -1, 0.5]), 1 - x))}
    ],
    KSparse(2, 0.7): [
        {"type": "ineq", "fun": lambda x: np.concatenate((0.7 - x, 0.7 + x))},
        *(
            {"type": "ineq", "fun": lambda x, s=s: 1.4 - np.dot(s, x)}
            for s in itertools.product((-1, 1), repeat=4)
        ),
    ],
    GroupBall(1.5, 2): [
        {"type": "ineq", "fun": lambda x: 1.5 - np.hypot(x[0], x[1]) - np.hypot(x[2], x[3])}
    ],
    Permutahedron((2.0, -1.0, 0.5, 1.0)): [
        {"type": "eq", "fun": lambda x: x.sum() - 2.5},
        *(
            {
                "type": "ineq",
                "fun": lambda x, c=c: (
                    sum(sorted((2.0, -1.0, 0.5, 1.0))[-len(c) :]) - x[list(c)].sum()
                ),
            }
            for k in (1, 2, 3)
            for c in itertools.combinations(range(4), k)
        ),
    ],
}


@pytest.mark.parametrize("domain", CONSTRAINTS, ids=lambda d: type(d).__name__)
def test_projection_against_a_general_solver(domain):
    for seed in range(6):
        x = (noise(4, seed=seed) * (0.5 + seed)).numpy()
        start = domain.start((4,), torch.float64).numpy() + 1e-3
        found = minimize(
            lambda y, x=x: ((y - x) ** 2).sum() / 2, start, jac=lambda y, x=x: y - x,
            method="SLSQP", constraints=CONSTRAINTS[domain],
            options={"ftol": 1e-11, "maxiter": 500},
        )  # fmt: skip
        assert np.allclose(domain.project(torch.tensor(x)).numpy(), found.x, atol=2e-5)


def dykstra(x: Tensor, rounds: int) -> Tensor:
    """Alternating projections onto row and column simplices, with Dykstra's corrections."""
    rows = columns = torch.zeros_like(x)
    for _ in range(rounds):
        y = Simplex(1.0).project(x + rows, batch=2)
        rows = x + rows - y
        x = Simplex(1.0).project((y + columns).mT, batch=2).mT
        columns = y + columns - x
    return x


def test_birkhoff_against_alternating_projections():
    x = torch.cat([noise(2, 4, 4, seed=i) * scale for i, scale in enumerate((0.1, 1.0, 5.0))])
    assert torch.allclose(Birkhoff().project(x, batch=1), dykstra(x, 600), atol=1e-8)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e3, 1e6, 1e9])
def test_birkhoff_far_away_and_with_ties(scale):
    ties = torch.randint(0, 3, (3, 8, 8), generator=torch.Generator().manual_seed(0)).double()
    lonely = torch.zeros(1, 8, 8, dtype=torch.float64)
    lonely[0, 2, 5] = 1.0
    x = scale * torch.cat((noise(3, 8, 8), ties, lonely))
    near = Birkhoff().project(x, batch=1)
    assert bool((near >= 0).all())
    sums = torch.cat((near.sum(-1), near.sum(-2)), -1)
    assert float((sums - 1).abs().max()) < 1e-12 + 1e-13 * scale
    assert Birkhoff().project(torch.full((1, 1), -7.0)).tolist() == [[1.0]]


def test_projection_by_hand():
    assert L1Ball(1.0).project(torch.tensor([1.0, -0.5, 0.0])).tolist() == [0.75, -0.25, 0.0]
    assert Simplex(1.0).project(torch.tensor([0.5, 1.0, -3.0])).tolist() == [0.25, 0.75, 0.0]
    assert L2Ball(1.0).project(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.6, 0.8])
    assert KSparse(2, 1.0).project(torch.tensor([5.0, -1.0, 0.5])).tolist() == [1.0, -0.75, 0.25]
    assert KSparse(2, 1.0).project(torch.tensor([5.0, -3.0, 0.5])).tolist() == [1.0, -1.0, 0.0]
    assert KSparse(2, 1.0).project(torch.tensor([5.0, -0.5, 0.25])).tolist() == [1.0, -0.5, 0.25]
    assert GroupBall(1.0, 2).project(torch.tensor([3.0, 4.0, 0.0, 0.0])).tolist() == pytest.approx(
        [0.6, 0.8, 0.0, 0.0]
    )
    assert Permutahedron((1.0, 2.0, 3.0)).project(torch.tensor([9.0, 0.0, 0.0])).tolist() == [
        3.0,
        1.5,
        1.5,
    ]
    assert torch.allclose(
        NuclearBall(1.0).project(torch.diag(torch.tensor([1.0, -0.5]))),
        torch.diag(torch.tensor([0.75, -0.25])),
    )
    assert torch.allclose(
        Birkhoff().project(torch.tensor([[1.0, 0.0], [0.0, 0.0]])),
        torch.tensor([[0.75, 0.25], [0.25, 0.75]]),
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e12])
def test_projections_keep_their_digits(scale):
    """Sums of a million numbers, or next to huge ones, lose nothing: the point is on the boundary
    in single precision.
    """
    x = noise(20_000, dtype=torch.float32) * scale + scale
    for domain in (L1Ball(0.5), Simplex(0.5), L2Ball(0.5), GroupBall(0.5, 20), KSparse(100, 0.01)):
        near = domain.project(x)
        assert bool(domain.contains(near)), domain
        if scale >= 1:
            assert not bool(domain.contains(near * 1.0001)), domain


@every
def test_projection_leaves_the_inside_alone(domain, shape):
    inner = (
        sum(domain.bounds(shape)).float() / 2 if isinstance(domain, Box) else domain.start(shape)
    )
    if not (isinstance(domain, Simplex | Permutahedron | Birkhoff)):
        inner = inner + 1e-3 * noise(*shape, dtype=torch.float32)
        assert torch.equal(domain.project(inner), inner)
    assert torch.allclose(domain.project(inner), inner, atol=1e-7)


# Membership, start, diameter


@every
def test_contains_knows_the_boundary(domain, shape):
    assert bool(domain.contains(domain.start(shape)))
    center = domain.start(shape, torch.float64)
    assert center.dtype == torch.float64
    for seed in range(4):
        corner = dense(domain.lmo(noise(*shape, seed=seed)))
        for share, expected in ((0.5, True), (0.999, True), (1.0, True), (1.001, False)):
            found = domain.contains(center + share * (corner - center), tolerance=1e-6)
            assert found.dtype == torch.bool
            assert found.shape == ()
            assert bool(found) == expected


@pytest.mark.parametrize(
    ("domain", "x"),
    [
        (Simplex(1.0), [0.5, 0.6, -0.1]),  # the sum is right, a sign is not
        (Simplex(1.0), [0.5, 0.4, 0.0]),  # inside the hull of the simplex and zero
        (Simplex(1.0), [0.5, 0.6, 0.0]),
        (Box(0.0, 1.0), [0.5, 0.5, 1.1]),
        (Box(0.0, 1.0), [0.5, -0.1, 1.0]),
        (Box(0.0, (1.0, 2.0, 3.0)), [1.5, 1.0, 1.0]),
        (KSparse(2, 1.0), [0.9, 0.9, 0.3]),  # no entry too large, but the sum
        (KSparse(2, 1.0), [1.1, 0.0, 0.0]),  # the sum is fine, an entry is not
        # the sum of all is right, that of two is not
        (Permutahedron((3.0, 2.0, 1.0)), [3.0, 2.5, 0.5]),
        # all partial sums are fine, the last is too small
        (Permutahedron((3.0, 2.0, 1.0)), [2.0, 2.0, 1.9]),
        (GroupBall(1.0, (0, 0, 1)), [0.6, 0.6, 0.2]),
    ],
)
def test_contains_checks_every_constraint(domain, x):
    x = torch.tensor(x)
    assert not bool(domain.contains(x))
    assert bool(domain.contains(x, tolerance=0.5))
    assert bool(domain.contains(domain.project(x)))


def test_birkhoff_contains_checks_rows_columns_and_signs():
    good = torch.full((3, 3), 1 / 3)
    assert bool(Birkhoff().contains(good))
    rows, columns, signs = good.clone(), good.clone(), torch.eye(3)
    rows[0, 0] += 0.1
    rows[1, 0] -= 0.1  # column sums stay
    columns[0, 0] += 0.1
    columns[0, 1] -= 0.1
    signs[:2, :2] += torch.tensor([[0.1, -0.1], [-0.1, 0.1]])
    assert Birkhoff().contains(torch.stack((rows, columns, signs)), batch=1).tolist() == [False] * 3


def test_start_is_zero_or_the_center():
    for domain in (
        L1Ball(1),
        L2Ball(1),
        LInfBall(1),
        KSparse(2, 1),
        GroupBall(1, 2),
        NuclearBall(1),
        Box(0, 1),
        Box(-1, (0.0, 3.0)),
    ):
        assert domain.start((3, 2)).tolist() == [[0, 0]] * 3
    assert Simplex(3.0).start((3, 2)).tolist() == [[0.5, 0.5]] * 3
    assert Box((1.0, -1.0), 3.0).start((2, 2)).tolist() == [[2, 1]] * 2
    assert Permutahedron((1.0, 2.0, 6.0)).start((3,)).tolist() == [3, 3, 3]
    assert Birkhoff().start((2, 2)).tolist() == [[0.5, 0.5]] * 2


@polytope
def test_diameter_is_that_of_the_corners(domain, shape):
    points = corners(domain, shape).flatten(1)
    assert domain.diameter_of(shape) == pytest.approx(
        float(torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").max())
    )


@pytest.mark.parametrize(("domain", "shape"), ROUND.values(), ids=ROUND.keys())
def test_diameter_of_the_round_sets(domain, shape):
    points = torch.cat(
        [
            dense(domain.lmo(s * noise(*shape, seed=i))).flatten()[None]
            for i in range(5)
            for s in (1, -1)
        ]
    )
    assert (
        domain.diameter
        == domain.diameter_of(shape)
        == pytest.approx(float(torch.cdist(points, points).max()))
    )


def test_diameter_where_the_shape_matters():
    assert LInfBall(1.5).diameter_of((2, 8)) == 12
    assert Simplex(2.0).diameter == pytest.approx(2 * math.sqrt(2))
    assert Simplex(2.0).diameter_of((1,)) == 0
    assert [Birkhoff().diameter_of((n, n)) for n in (1, 2, 8)] == [0, 2, 4]
    assert KSparse(4, 1.5).diameter == 6
    for domain in (LInfBall(1.0), Box(0, 1), Birkhoff()):
        with pytest.raises(ConfigError, match=r"depends on the shape.*diameter_of"):
            _ = domain.diameter


# Batches and messages


@every
def test_batched_equals_looped(domain, shape):
    g = noise(3, 2, *shape, dtype=torch.float32)
    loop = [[dense(domain.lmo(one)) for one in row] for row in g]
    expected = torch.stack([torch.stack(row) for row in loop])
    batched, mapped = domain.lmo(g, batch=2), vmap(lambda t: domain.lmo(t, batch=1))(g)
    for point in (batched, mapped):
        assert dense(point).shape == g.shape
        assert torch.allclose(dense(point), expected, atol=2e-6)
    near = torch.stack([torch.stack([domain.project(one) for one in row]) for row in g])
    assert torch.allclose(domain.project(g, batch=2), near, atol=1e-6)
    assert torch.allclose(vmap(lambda t: domain.project(t, batch=1))(g), near, atol=1e-6)
    some = torch.where(
        torch.tensor([[True, False], [False, True], [True, True]])[(...,) + (None,) * len(shape)],
        near,
        near + 10,
    )
    expected = [[bool(domain.contains(one)) for one in row] for row in some]
    assert expected == [[True, False], [False, True], [True, True]]
    assert domain.contains(some, batch=2).tolist() == expected
    assert vmap(lambda t: domain.contains(t, batch=1))(some).tolist() == expected
    assert vmap(lambda t: domain.contains(t, 1e-6))(some[0]).tolist() == expected[0]


def test_a_warm_start_for_each_client():
    g = noise(3, 70, 80)
    warm = noise(3, 80, seed=1)
    expected = torch.stack(
        [NuclearBall(1.0).lmo(a, warm=v).dense() for a, v in zip(g, warm, strict=True)]
    )
    assert torch.allclose(NuclearBall(1.0).lmo(g, batch=1, warm=warm).dense(), expected, atol=1e-9)
    assert torch.allclose(
        vmap(lambda a, v: NuclearBall(1.0).lmo(a, warm=v))(g, warm).dense(), expected, atol=1e-9
    )


@every
def test_points_travel_and_average(domain, shape):
    g = noise(4, *shape, dtype=torch.float32)
    stacked = domain.lmo(g, batch=1)
    for i in range(4):
        one = domain.lmo(g[i])
        message = wire.encode({"s": one})
        assert len(message) == wire.nbytes({"s": one}) == wire.nbytes({"s": stacked}, batched=True)
        assert torch.equal(dense(wire.decode(message)["s"]), dense(one))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    total = Accumulator()
    total.add({"s": stacked}, weights, 0, torch.arange(4))
    expected = (weights.reshape(-1, *[1] * len(shape)) * dense(stacked)).sum(0)
    assert torch.allclose(total.result()["s"].double(), expected, atol=1e-6)


def test_points_are_short_messages():
    g = noise(100, 1000, dtype=torch.float32)
    full = wire.nbytes(g)
    assert wire.nbytes(L1Ball(1).lmo(g)) <= 24 < full / 10_000
    assert wire.nbytes(KSparse(50, 1).lmo(g)) <= 24 + 50 * (3 + 4)
    assert wire.nbytes(LInfBall(1).lmo(g)) <= 24 + 100_000 // 8
    assert wire.nbytes(Box(0, 1).lmo(g)) <= 60 + 100_000 // 8
    assert wire.nbytes(NuclearBall(1, tolerance=0.1).lmo(g)) <= 32 + 4 * 1100
    assert wire.nbytes(GroupBall(1, "rows").lmo(g)) <= 24 + 1000 * (3 + 4)
    assert wire.nbytes(Birkhoff().lmo(g[:, :100])) <= 24 + 100 * (2 + 4)


def test_a_corner_is_exact_in_both_precisions():
    for dtype in (torch.float32, torch.float64):
        point = Box(0.1, 0.7).lmo(torch.tensor([1.0, -1.0], dtype=dtype)).dense()
        assert torch.equal(point, torch.tensor([0.1, 0.7], dtype=dtype))


# Bad input


@pytest.mark.parametrize(
    "make",
    [
        L1Ball,
        L2Ball,
        LInfBall,
        Simplex,
        NuclearBall,
        lambda r: KSparse(1, r),
        lambda r: GroupBall(r, 1),
    ],
)
@pytest.mark.parametrize("radius", [0, -1.0, math.nan, math.inf, "1", True, None])
def test_a_radius_must_be_positive(make, radius):
    with pytest.raises(ConfigError, match=r"radius=.* must be a positive finite number"):
        make(radius)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box(1, 0), "lo=1 must not be above hi=0"),
        (lambda: Box((0, 2), (1, 1)), r"lo=\(0, 2\) must not be above"),
        (lambda: Box(0, math.inf), "hi=inf must be finite"),
        (lambda: Box(math.nan, 0), "lo=nan must be finite"),
        (lambda: Box("a", 0), "lo='a' must be a number"),
        (lambda: Box((0, (1, 2)), 3), "lo=.* must be a number or a tuple"),
        (lambda: Box((0, 0), (1, 1, 1)), r"\(2,\) and \(3,\), which do not broadcast"),
        (lambda: KSparse(0, 1.0), "k=0 must be an integer of at least 1"),
        (lambda: KSparse(1.5, 1.0), "k=1.5 must be an integer"),
        (lambda: GroupBall(1.0, 0), "groups=0 must be the size of the groups, 'rows' or a tuple"),
        (lambda: GroupBall(1.0, "columns"), "groups='columns' must be the size"),
        (
            lambda: GroupBall(1.0, (0.5, 1)),
            "groups=.* must be .* or a tuple with a label, an integer, for each entry",
        ),
        (
            lambda: GroupBall(1.0, ()),
            "groups=.* must be .* or a tuple with a label, an integer, for each entry",
        ),
        (lambda: Permutahedron(()), "weights=.* must be a tuple of finite numbers"),
        (lambda: Permutahedron(3.0), "weights=3.0 must be a tuple"),
        (lambda: Permutahedron(((1.0, 2.0),)), "weights=.* must be a tuple of finite numbers"),
        (lambda: Permutahedron((1.0, math.nan)), "weights=.* must be a tuple of finite numbers"),
        (lambda: NuclearBall(1.0, tolerance=0), "tolerance=0 must be a positive"),
        (lambda: NuclearBall(1.0, iterations=0), "iterations=0 must be an integer of at least 1"),
        (lambda: Whole(3), "domain=3 must be a set such as"),
        (lambda: PerLayer({"w": 3}), "domains=.* must be a set such as"),
        (lambda: PerLayer({}), "domains=.* must be a set"),
        (lambda: domain_of(L1Ball), r"L1Ball \(the class: add parentheses\)"),
        (lambda: domain_of(1.0), "domain must be a set such as"),
        (
            lambda: L1Ball(1).lmo(torch.ones(2, dtype=torch.int64)),
            r"floating tensors, not torch.int64: convert",
        ),
        (lambda: L1Ball(1).reach("l3", (2,)), "norm 'l3' is unknown"),
        (lambda: L1Ball(1).reach("nuclear", (2,)), "nuclear norm needs a matrix"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("domain", "shape", "message"),
    [
        (L1Ball(1), (0,), r"needs a tensor with entries, not one of shape \(0,\)"),
        (
            NuclearBall(1),
            (3,),
            r"NuclearBall needs a matrix, not a tensor of shape \(3,\).*PerLayer",
        ),
        (NuclearBall(1), (3, 2, 2), "needs a matrix"),
        (Birkhoff(), (4,), "Birkhoff needs a matrix"),
        (Birkhoff(), (2, 3), r"square matrix, not one of shape \(2, 3\)"),
        (KSparse(5, 1), (2, 2), r"k=5 is more than the 4 entries of \(2, 2\).*LInfBall"),
        (
            Box((0, 0), 1),
            (2, 3),
            r"lo has shape \(2,\), which does not broadcast to the tensor's \(2, 3\)",
        ),
        (Box(0, ((1, 1),)), (2,), r"hi has shape \(1, 2\)"),
        (GroupBall(1, 3), (2, 2), "groups=3 does not divide the 4 entries"),
        (GroupBall(1, "rows"), (4,), "groups='rows' needs a matrix"),
        (GroupBall(1, (0, 1)), (3,), r"groups has 2 labels, but a tensor of shape \(3,\) has 3"),
        (Permutahedron((1, 2)), (3,), r"weights has 2 entries, a tensor of shape \(3,\) 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_everywhere(domain, shape, message):
    tensor = torch.ones(shape)
    calls = (
        domain.check, domain.diameter_of, domain.start, domain.bounds,
        lambda s: domain.reach("l2", s), lambda s: domain.lmo(tensor),
        lambda s: domain.project(tensor), lambda s: domain.contains(tensor),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ConfigError, match=message):
            call(shape)


def test_sets_are_plain_settings():
    sets = [
        *(d for d, _ in SETS.values()),
        Whole(L1Ball(1.0)),
        PerLayer({"w": NuclearBall(2.0), "b": Box(0, (1.0, 2.0))}),
    ]
    known = config.subclasses(Domain, ModelDomain)
    for domain in sets:
        assert config.from_config(config.to_config(domain), known) == domain
        for name in config.to_config(domain):
            with pytest.raises(AttributeError):
                setattr(domain, name, None)
    assert Box(torch.zeros(2), np.ones(2)) == Box((0.0, 0.0), (1.0, 1.0))
    assert GroupBall(1.0, torch.tensor([0, 1])) == GroupBall(1.0, [0, 1]) == GroupBall(1.0, (0, 1))
    assert Permutahedron(torch.tensor([1.0, 2.0])) == Permutahedron([1.0, 2.0])
    assert hash(Box(torch.zeros(2), 1)) == hash(Box((0.0, 0.0), 1))


# Which set contains which


def norm_of(kind: str, x: Tensor) -> float:
    if kind == "nuclear":
        return float(torch.linalg.svdvals(x).sum())
    return float(torch.linalg.vector_norm(x, {"l1": 1, "l2": 2, "linf": math.inf}[kind]))


@polytope
@pytest.mark.parametrize("kind", ["l1", "l2", "linf", "nuclear"])
def test_reach_is_the_largest_norm_of_a_corner(domain, shape, kind):
    largest = max(norm_of(kind, corner) for corner in corners(domain, shape))
    reach = domain.reach(kind, shape)
    if reach is None:
        assert kind == "nuclear"
    else:
        assert reach == pytest.approx(largest)
    assert (
        domain.reach("nuclear", (1, math.prod(shape))) == domain.reach("l2", shape)
        if not domain.matrix and "Box" not in repr(domain)
        else True
    )
    lo, hi = domain.bounds(shape)
    assert torch.allclose(lo.expand(shape), corners(domain, shape).amin(0))
    assert torch.allclose(hi.expand(shape), corners(domain, shape).amax(0))


@pytest.mark.parametrize(
    ("domain", "shape", "farthest"),
    [  # the reach in each norm, and a point of the set that attains it
        (L2Ball(2.0), (2, 3), {
            "l1": torch.full((2, 3), 2 / math.sqrt(6)), "l2": None, "linf": None,
            "nuclear": math.sqrt(2) * torch.eye(2, 3),
        }),
        (NuclearBall(2.0), (2, 3), {
            "l1": torch.full((2, 3), 2 / math.sqrt(6)), "l2": None, "linf": None, "nuclear": None,
        }),
        (GroupBall(2.0, "rows"), (2, 3), {
            "l1": torch.tensor([[2.0] * 3, [0.0] * 3]) / math.sqrt(3), "l2": None, "linf": None,
            "nuclear": None,
        }),
        (GroupBall(2.0, 4), (4, 2), {
            "l1": torch.tensor([[1.0, 1], [1, 1], [0, 0], [0, 0]]),
            "nuclear": torch.eye(4, 2) * math.sqrt(2),
        }),
        (GroupBall(2.0, (0, 1, 0, 1, 0, 1)), (2, 3), {
            "nuclear": torch.tensor([[math.sqrt(2), 0, 0], [0, math.sqrt(2), 0]]).flip(1),
        }),
    ],
)  # fmt: skip
def test_reach_of_the_round_sets(domain, shape, farthest):
    axis = torch.zeros(shape)
    axis[0, 0] = 2.0  # an entry alone may be as large as the radius
    for kind, point in farthest.items():
        point = axis if point is None else point
        if kind == "nuclear" and isinstance(
            domain.groups if isinstance(domain, GroupBall) else None, tuple
        ):
            point = torch.tensor([[math.sqrt(2), 0, 0], [0, 0, 0]])
            # entries 0 and 4, of one group, in different rows and columns
            point[1, 1] = math.sqrt(2)
        assert bool(domain.contains(point))
        assert domain.reach(kind, shape) == pytest.approx(norm_of(kind, point), rel=1e-6)
        for seed in range(20):
            assert norm_of(kind, dense(domain.lmo(noise(*shape, seed=seed)))) <= domain.reach(
                kind, shape
            ) * (1 + 1e-9)


OUTER = {
    "l1": lambda r: L1Ball(r),
    "l2": lambda r: L2Ball(r),
    "linf": lambda r: LInfBall(r),
    "box": lambda r: Box(-r, r),
    "shifted box": lambda r: Box(-0.5 * r, r),
    "nuclear": lambda r: NuclearBall(r),
    "k-sparse": lambda r: KSparse(2, r),
    "simplex": lambda r: Simplex(r),
    "groups": lambda r: GroupBall(r, "rows"),
}


@polytope
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER.keys())
def test_inside_agrees_with_the_corners(domain, shape, outer):
    """A convex set contains a polytope exactly if it contains the corners."""
    points, undecided = corners(domain, shape), []
    for radius in (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 11.0, 20.0):
        truth = bool(outer(radius).contains(points, tolerance=1e-9, batch=1).all())
        try:
            answer = inside(outer(radius), domain, shape)
        except ConfigError:
            undecided.append(radius)
            continue
        assert answer == truth, radius
    assert len(undecided) <= (4 if isinstance(outer(1.0), NuclearBall | GroupBall) else 0)


@pytest.mark.parametrize(
    "inner", [L2Ball(1.0), NuclearBall(1.0), GroupBall(1.0, "rows"), GroupBall(1.0, 2), L1Ball(1.0)]
)
@pytest.mark.parametrize("kind", ["l1", "l2", "linf", "nuclear"])
def test_inside_turns_at_the_reach(inner, kind):
    shape = (4, 6)
    reach = inner.reach(kind, shape)
    assert inside(OUTER[kind](reach), inner, shape)
    assert inside(OUTER[kind](reach * (1 + 1e-6)), inner, shape)
    assert not inside(OUTER[kind](reach * (1 - 1e-6)), inner, shape)


def test_inside_names_what_it_cannot_decide():
    with pytest.raises(
        ConfigError, match=r"whether Birkhoff contains Simplex cannot be decided: use an L1Ball"
    ):
        inside(Birkhoff(), Simplex(2.0), (2, 2))
    with pytest.raises(
        ConfigError, match=r"whether NuclearBall contains LInfBall cannot be decided"
    ):
        inside(NuclearBall(3.0), LInfBall(1.0), (2, 3))
    assert inside(Birkhoff(), Birkhoff(), (2, 2))
    assert inside(Permutahedron((1.0, 2.0)), Permutahedron((1.0, 2.0)), (2,))
    assert inside(Simplex(1.0), Simplex(1.0), (1,))
    assert not inside(Simplex(1.0), L1Ball(1.0), (3,))
    assert inside(Simplex(3.0), Birkhoff(), (3, 3))
    assert inside(Simplex(3.0), Permutahedron((1.0, 2.0, 0.0)), (3,))
    assert not inside(Simplex(3.0), Permutahedron((1.0, 3.0, -1.0)), (3,))
    with pytest.raises(ConfigError, match="Birkhoff needs a square"):
        inside(L2Ball(3.0), Birkhoff(), (2, 3))


# Models


SHAPES = {"weight": (3, 4), "bias": (3,), "scale": ()}


def params(
    seed: int = 0, lead: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    return {
        name: noise(*lead, *shape, seed=seed + i, dtype=dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def joined(x: dict[str, Tensor], batch: int = 0) -> Tensor:
    return torch.cat([t.reshape(*t.shape[:batch], -1) for t in x.values()], -1)


WHOLE = [
    L1Ball(1.5), L2Ball(1.5), LInfBall(1.5), Simplex(1.5), Box(0, 1), Box(tuple(range(16)), 20),
    KSparse(3, 1.5), GroupBall(1.5, 4), Permutahedron(tuple(range(16))),
]  # fmt: skip


@pytest.mark.parametrize("domain", WHOLE, ids=lambda d: type(d).__name__)
def test_whole_is_the_set_of_the_joined_vector(domain):
    whole, x = Whole(domain), params()
    whole.check(SHAPES)
    whole.check(x)
    point = whole.lmo(x)
    assert torch.equal(dense(point), dense(domain.lmo(joined(x))))
    parts = whole.dense(point, SHAPES)
    assert {name: tuple(t.shape) for name, t in parts.items()} == SHAPES
    assert torch.equal(joined(parts), dense(point))
    assert torch.equal(joined(whole.dense(dense(point), x)), dense(point))
    assert torch.equal(joined(whole.project(x)), domain.project(joined(x)))
    assert bool(whole.contains(whole.project(x)))
    assert not bool(whole.contains({name: t + 30 for name, t in x.items()}))
    assert whole.diameter_of(SHAPES) == domain.diameter_of((16,))
    assert torch.equal(
        joined(whole.start(SHAPES, torch.float64)), domain.start((16,), torch.float64)
    )
    batch = params(lead=(2, 5))
    assert torch.allclose(dense(whole.lmo(batch, batch=2)), dense(vmap(vmap(whole.lmo))(batch)))
    assert torch.allclose(
        joined(whole.dense(whole.lmo(batch, batch=2), SHAPES), 2),
        dense(domain.lmo(joined(batch, 2), 2)),
    )
    assert torch.allclose(
        joined(whole.project(batch, batch=2), 2), domain.project(joined(batch, 2), 2)
    )
    assert torch.equal(whole.contains(batch, batch=2), domain.contains(joined(batch, 2), batch=2))
    assert wire.nbytes(whole.lmo(batch, batch=2), batched=False) > 0


def test_whole_of_one_tensor_keeps_its_shape():
    only = {"weight": noise(70, 80)}
    whole = Whole(NuclearBall(1.5))
    point = whole.lmo(only)
    assert isinstance(point, LowRank)
    assert torch.equal(whole.dense(point, only)["weight"], point.dense())
    assert torch.allclose(
        whole.lmo(only, warm={"weight": point.right[:, 0]}).dense(), point.dense(), atol=1e-6
    )
    assert whole.project(only)["weight"].shape == (70, 80)
    assert bool(whole.contains(whole.project(only)))
    assert whole.start(only)["weight"].shape == (70, 80)
    batch = {"weight": noise(3, 4, 5)}
    assert whole.dense(whole.lmo(batch, batch=1), {"weight": (4, 5)})["weight"].shape == (3, 4, 5)
    assert Whole(L2Ball(1.0)).project({"w": torch.tensor(3.0)})["w"].item() == pytest.approx(1.0)


def test_whole_names_the_remedy_for_matrices():
    for call in (
        Whole(NuclearBall(1)).check,
        Whole(Birkhoff()).diameter_of,
        Whole(NuclearBall(1)).start,
    ):
        with pytest.raises(
            ConfigError,
            match=r"needs a matrix, which 3 tensors \(weight, bias, scale\) laid end to end are "
            r"not: use PerLayer",
        ):
            call(SHAPES)
    with pytest.raises(ConfigError, match=r"NuclearBall needs a matrix.*PerLayer"):
        Whole(NuclearBall(1)).lmo(params())


PER_LAYER = PerLayer({"bias": L1Ball(0.5), "weight": NuclearBall(1.5), "scale": Box(-1, 1)})


def test_per_layer_is_one_set_for_each_tensor():
    x = params()
    sets = {"weight": NuclearBall(1.5), "bias": L1Ball(0.5), "scale": Box(-1, 1)}
    PER_LAYER.check(SHAPES)
    point = PER_LAYER.lmo(x)
    assert [type(p) for p in point.values()] == [LowRank, Sparse, Signs]
    assert list(point) == list(SHAPES)
    parts = PER_LAYER.dense(point, SHAPES)
    near = PER_LAYER.project(x)
    for name, domain in sets.items():
        assert torch.equal(parts[name], dense(domain.lmo(x[name])))
        assert torch.equal(near[name], domain.project(x[name]))
        outside = {**near, name: near[name] + 9}
        assert not bool(PER_LAYER.contains(outside))
        assert bool(PER_LAYER.contains(outside, tolerance=100.0))
    assert bool(PER_LAYER.contains(near))
    assert PER_LAYER.diameter_of(SHAPES) == pytest.approx(math.sqrt(3**2 + 1**2 + 2**2))
    assert {
        name: t.dtype for name, t in PER_LAYER.start(x, torch.float64).items()
    } == dict.fromkeys(SHAPES, torch.float64)
    batch = params(lead=(4,))
    mapped = vmap(PER_LAYER.lmo)(batch)
    stacked = PER_LAYER.lmo(batch, batch=1)
    for name in SHAPES:
        assert torch.allclose(dense(mapped[name]), dense(stacked[name]), atol=1e-6)
        assert dense(stacked[name]).shape == batch[name].shape
    assert PER_LAYER.contains(batch, batch=1).shape == (4,)
    assert PER_LAYER.contains(PER_LAYER.project(batch, batch=1), batch=1).tolist() == [True] * 4
    message = wire.decode(wire.encode(point))
    assert torch.equal(message["weight"].dense(), point["weight"].dense())
    same = PerLayer(L2Ball(2.0))
    assert [round(float(torch.linalg.vector_norm(t)), 5) for t in same.lmo(x).values()] == [
        2.0,
        2.0,
        2.0,
    ]


def test_per_layer_passes_warm_starts_on():
    g = {"a": noise(70, 80), "b": noise(5)}
    domain = PerLayer({"a": NuclearBall(1.0, tolerance=1e-15, iterations=1), "b": L2Ball(1.0)})
    top = NuclearBall(1.0).lmo(g["a"])
    cold, warm = domain.lmo(g)["a"].dense(), domain.lmo(g, warm={"a": top.right[:, 0]})["a"].dense()
    assert dot(g["a"], warm) < dot(g["a"], cold)


def test_per_layer_names_tensors_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"tensor 'bias': NuclearBall needs a matrix"):
        PerLayer(NuclearBall(1.0)).check(SHAPES)
    with pytest.raises(ConfigError, match="PerLayer has no set for bias, scale"):
        PerLayer({"weight": L1Ball(1.0)}).lmo(params())
    with pytest.raises(ConfigError, match="tensor 'wieght' is unknown; did you mean 'weight'"):
        PerLayer({"wieght": L1Ball(1.0), **dict.fromkeys(SHAPES, L1Ball(1.0))}).check(SHAPES)


def test_plain_sets_go_over_the_whole_model():
    assert domain_of(L1Ball(1.0)) == Whole(L1Ball(1.0))
    assert domain_of(PER_LAYER) is PER_LAYER
    assert domain_of(Whole(L1Ball(1.0))) == Whole(L1Ball(1.0))


def test_inside_of_models():
    shapes = {"w": (2, 3), "b": (2,)}
    assert inside(Whole(L2Ball(1.0)), Whole(L1Ball(1.0)), shapes)
    assert inside(L2Ball(1.0), Whole(L1Ball(1.0)), params())
    assert not inside(Whole(L1Ball(2.8)), Whole(L2Ball(1.0)), shapes)
    assert inside(Whole(L1Ball(math.sqrt(8))), Whole(L2Ball(1.0)), shapes)
    # A product of sets in one ball: norms add up, squares add up, or the largest counts.
    pair = PerLayer({"w": NuclearBall(3.0), "b": L2Ball(4.0)})
    l1 = 3 * math.sqrt(6) + 4 * math.sqrt(2)
    for make, turn in (
        (L2Ball, 5.0),
        (L1Ball, l1),
        (LInfBall, 4.0),
        (lambda r: Box(-r, r), 4.0),
        (lambda r: KSparse(8, r), 4.0),
    ):
        assert inside(Whole(make(turn)), pair, shapes)
        assert not inside(Whole(make(turn * 0.999)), pair, shapes)
    assert inside(Whole(Simplex(3.0)), PerLayer({"w": Simplex(1.0), "b": Simplex(2.0)}), shapes)
    assert not inside(Whole(Simplex(2.0)), PerLayer({"w": Simplex(1.0), "b": Simplex(2.0)}), shapes)
    assert inside(
        Whole(Box((0, 0, 0, 0, 0, 0, 1, 1), 1)), PerLayer({"w": Box(0, 1), "b": Box(1, 1)}), shapes
    )
    # One set over everything within sets of the tensors: what each tensor alone can be.
    assert inside(
        PerLayer({"w": NuclearBall(math.sqrt(2)), "b": L2Ball(1.0)}), Whole(L2Ball(1.0)), shapes
    )
    assert not inside(
        PerLayer({"w": NuclearBall(1.4), "b": L2Ball(1.0)}), Whole(L2Ball(1.0)), shapes
    )
    assert not inside(
        PerLayer({"w": NuclearBall(2.0), "b": L2Ball(0.9)}), Whole(L2Ball(1.0)), shapes
    )
    assert inside(PerLayer({"w": L1Ball(3.0), "b": L1Ball(2.0)}), Whole(KSparse(3, 1.0)), shapes)
    assert not inside(
        PerLayer({"w": L1Ball(2.9), "b": L1Ball(2.0)}), Whole(KSparse(3, 1.0)), shapes
    )
    assert inside(PerLayer(LInfBall(2.0)), Whole(Box(-1, 2)), shapes)
    assert not inside(PerLayer(LInfBall(2.0)), Whole(Box(-3, 2)), shapes)
    # Tensor by tensor.
    assert inside(PerLayer(L2Ball(4.0)), pair, shapes)
    assert not inside(PerLayer({"w": L2Ball(2.9), "b": L2Ball(4.0)}), pair, shapes)
    # A model of one tensor: the same set either way.
    assert inside(Whole(L2Ball(3.0)), PerLayer(NuclearBall(3.0)), {"w": (2, 3)})
    assert inside(PerLayer(NuclearBall(3.0)), NuclearBall(3.0), {"w": (2, 3)})
    assert not inside(Whole(NuclearBall(2.9)), PerLayer(NuclearBall(3.0)), {"w": (2, 3)})
    for undecided in (Simplex(1.0), Box((0.0,) * 8, 1.0), Box(0.0, (1.0,) * 8)):
        with pytest.raises(ConfigError, match="cannot be decided: use Whole as the outer set"):
            inside(PerLayer(L2Ball(9.0)), Whole(undecided), shapes)
    with pytest.raises(ConfigError, match="a dict of shapes"):
        inside(Whole(L2Ball(1.0)), L1Ball(1.0), (3,))
    with pytest.raises(ConfigError, match="tensor 'b'"):
        inside(PerLayer(NuclearBall(1.0)), L1Ball(1.0), shapes)


def test_points_are_trees():
    """Stacking and slicing messages field by field is what the engines do."""
    point = Box(0, 1).lmo(noise(3, 5), batch=1)
    one = tree.map(lambda t: t[1], point)
    assert torch.equal(one.dense(), point.dense()[1])
