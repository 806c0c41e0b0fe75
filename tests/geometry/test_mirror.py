"""Mirror maps against numbers worked out by hand, a general-purpose solver, and the inequalities
that define them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

import foedus as fd
from foedus.errors import ConfigError
from foedus.geometry import Entropy, Euclidean, Mirror, PNorm, best_step

MAPS = (Entropy(), Euclidean(), PNorm(1.5), PNorm(1.1))

every = pytest.mark.parametrize("mirror", MAPS, ids=str)
seeds = st.integers(0, 2**32 - 1)


def vector(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def weights(random: np.random.Generator, n: int) -> Tensor:
    return torch.tensor(random.dirichlet(np.ones(n)))


def point(mirror: Mirror, random: np.random.Generator, n: int) -> Tensor:
    """A point of the domain of F, away from the simplex."""
    x = torch.tensor(random.normal(size=n) * 10.0 ** random.integers(-1, 2))
    return x.exp() if isinstance(mirror, Entropy) else x


def box(random: np.random.Generator, n: int) -> tuple[Tensor, Tensor, float]:
    """Bounds and a radius; a third of them make the plain simplex, and some bounds meet."""
    if random.integers(3) == 0:
        return torch.zeros(n).double(), torch.ones(n).double(), 1.0
    low = random.uniform(0, 0.5, n) * random.integers(0, 2, n)
    high = low + random.uniform(0, 1, n) * (random.uniform(size=n) < 0.9)
    radius = float(low.sum() + random.uniform(0.01, 0.99) * (high - low).sum()) or 1.0
    if high.sum() < radius:
        high[0] += radius
    return torch.tensor(low), torch.tensor(high), radius


def inside(random: np.random.Generator, low: Tensor, high: Tensor, radius: float) -> Tensor:
    """A point of the set, on the segment between low and high, moved along pairs of entries."""
    x = low + (high - low) * (radius - low.sum()) / (high - low).sum().clamp(min=1e-300)
    for _ in range(3 * len(x)):
        i, j = random.integers(0, len(x), 2)
        move = torch.minimum(high[i] - x[i], x[j] - low[j]) * random.uniform()
        if i != j:
            x[i], x[j] = x[i] + move, x[j] - move
    return x


def objective(mirror: Mirror, x: np.ndarray, z: np.ndarray) -> tuple[float, np.ndarray]:
    """F(x) - <z, x> and its gradient, from the definitions of F."""
    if isinstance(mirror, Entropy):
        return float((x * np.log(np.maximum(x, 1e-300))).sum() - z @ x), np.log(
            np.maximum(x, 1e-300)
        ) + 1 - z
    p = mirror.norm
    norm = (np.abs(x) ** p).sum() ** (1 / p)
    return float(norm**2 / 2 - z @ x), np.sign(x) * np.abs(x) ** (p - 1) * norm ** (2 - p) - z


# Numbers by hand


def test_exponentiated_gradient_by_hand():
    # weights 1/2 and 1/2; gradient (log 3, 0); eta 1: proportions 1/3 : 1
    new = Entropy().step(vector(0.5, 0.5), vector(math.log(3), 0.0), 1.0)
    torch.testing.assert_close(new, vector(0.25, 0.75))
    new = Entropy().step(vector(0.2, 0.8), vector(0.0, math.log(2)), 2.0)  # 0.2 : 0.8 / 4
    torch.testing.assert_close(new, vector(0.5, 0.5))


def test_projected_gradient_by_hand():
    # (0.5, 0.5) - 0.1 (1, 0) = (0.4, 0.5); both gain 0.05
    torch.testing.assert_close(
        Euclidean().step(vector(0.5, 0.5), vector(1.0, 0.0), 0.1), vector(0.45, 0.55)
    )
    # (-0.5, 0.5, 0.2): the first is cut, the others gain 0.15
    new = Euclidean().step(vector(0.5, 0.5, 0.2), vector(1.0, 0.0, 0.0), 1.0)
    torch.testing.assert_close(new, vector(0.0, 0.65, 0.35))


def test_box_projections_by_hand():
    # c (0.8, 0.1, 0.1) clipped at 0.5: the other two share 0.5. Euclidean: the same, by symmetry.
    for mirror in MAPS:
        torch.testing.assert_close(
            mirror.project(vector(0.8, 0.1, 0.1), high=0.5), vector(0.5, 0.25, 0.25)
        )
    # entropy: 0.6 is left for 0.3 : 0.1
    torch.testing.assert_close(
        Entropy().project(vector(0.6, 0.3, 0.1), high=[0.4, 1, 1]), vector(0.4, 0.45, 0.15)
    )
    # Euclidean: 0.3 and 0.1 gain 0.1 each
    torch.testing.assert_close(
        Euclidean().project(vector(0.6, 0.3, 0.1), high=[0.4, 1, 1]), vector(0.4, 0.4, 0.2)
    )
    torch.testing.assert_close(
        Entropy().project(vector(1.0, 3.0), radius=8.0, high=9.0), vector(2.0, 6.0)
    )
    torch.testing.assert_close(
        Euclidean().project(vector(1.0, 3.0), radius=8.0, high=math.inf), vector(3.0, 5.0)
    )
    torch.testing.assert_close(
        Euclidean().project(vector(3.0, 0.0), low=-1.0, high=9.0), vector(2.0, -1.0)
    )


def test_pnorm_step_by_hand():
    # p = 3/2: z_i = x_i^(1/2) |x|^(1/2), so weights (16, 9) / 25 have z in the ratio 4 : 3, and z +
    # theta for any theta projects back to them.
    mirror = PNorm(1.5)
    x = vector(16, 9) / 25
    norm = (0.64**1.5 + 0.36**1.5) ** (2 / 3)
    z = norm**0.5 * vector(0.8, 0.6)
    torch.testing.assert_close(mirror.grad(x), z)
    torch.testing.assert_close(mirror.project(mirror.inverse(z - 0.3)), x)
    # a constant gradient changes nothing
    torch.testing.assert_close(mirror.step(x, vector(7.0, 7.0), 0.1), x)
    # From uniform (z = 1/2^(2/3) each), to x: the gradient is the difference.
    torch.testing.assert_close(mirror.step(vector(0.5, 0.5), -z / 0.1, 0.1), x)


def test_values_and_divergences_by_hand():
    x, y = vector(0.5, 0.5), vector(0.25, 0.75)
    assert float(Entropy().value(x)) == pytest.approx(-math.log(2))
    assert float(Entropy().value(vector(1.0, 0.0))) == 0
    assert float(Entropy().divergence(x, y)) == pytest.approx(
        0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    )
    assert float(Entropy().divergence(vector(2.0, 0.0), vector(1.0, 3.0))) == pytest.approx(
        2 * math.log(2) - 1 + 3
    )
    assert float(Entropy().divergence(x, vector(1.0, 0.0))) == math.inf
    assert float(Entropy().divergence(vector(1.0, 0.0), x)) == pytest.approx(math.log(2))
    assert float(Euclidean().value(vector(3.0, 4.0))) == 12.5
    assert float(Euclidean().divergence(x, y)) == pytest.approx(0.0625)
    assert float(PNorm(1.5).value(vector(1.0, -4.0))) == pytest.approx(9 ** (4 / 3) / 2)
    # p = 3/2, x = (1, 0), y = (1, 1): 1/2 + 2^(4/3)/2 - 2^(1/3)
    assert float(PNorm(1.5).divergence(vector(1.0, 0.0), vector(1.0, 1.0))) == pytest.approx(0.5)


def test_entropy_divergence_keeps_its_digits_near_zero():
    y = vector(0.25, 0.75)
    assert float(Entropy().divergence(y + vector(1e-9, -1e-9), y)) == pytest.approx(
        1e-18 / 2 * (4 + 4 / 3), rel=1e-6
    )


@every
@pytest.mark.parametrize("n", [1, 2, 7])
def test_start_and_reach(mirror: Mirror, n: int):
    start = mirror.start(n, torch.float64)
    assert start.tolist() == [1 / n] * n and mirror.start(n).dtype == torch.float32
    corner = torch.eye(n).double()[0]
    assert mirror.reach(n) == pytest.approx(float(mirror.divergence(corner, start)), abs=1e-12)
    random = np.random.default_rng(n)
    x = torch.stack([weights(random, n) for _ in range(50)])
    assert float(mirror.value(x).min()) >= float(mirror.value(start)) - 1e-12
    assert float(mirror.divergence(x, start.expand_as(x)).max()) <= mirror.reach(n) + 1e-12


def test_reach_by_hand():
    assert Entropy().reach(8) == math.log(8)
    assert Euclidean().reach(4) == PNorm(2.0).reach(4) == 0.375
    assert PNorm(1.5).reach(8) == pytest.approx((1 - 8 ** (-2 / 3)) / 2)  # q = 3


def test_moduli_and_norms():
    assert [(m.sigma, m.norm, m.dual) for m in (Entropy(), Euclidean(), PNorm(1.5))] == [
        (1, 1, math.inf),
        (1, 2, 2),
        (0.5, 1.5, pytest.approx(3)),
    ]


def test_best_step_minimizes_the_bound():
    r, sigma, rounds, slope = 0.7, 0.3, 50, 4.0
    eta = best_step(r, sigma, rounds, slope)

    def bound(step: float) -> float:
        return r / (step * rounds) + step * slope**2 / (2 * sigma)

    assert eta == pytest.approx(math.sqrt(2 * 0.7 * 0.3 / 50) / 4)
    assert bound(eta) == pytest.approx(slope * math.sqrt(2 * r / (sigma * rounds)))
    assert bound(eta) < min(bound(eta * 1.01), bound(eta / 1.01))


@every
def test_mirror_descent_keeps_the_bound_of_best_step(mirror: Mirror):
    n, rounds = 6, 60
    slopes = torch.tensor(np.random.default_rng(0).uniform(-1, 1, (rounds, n)))
    slope = float(torch.linalg.vector_norm(slopes, mirror.dual, dim=-1).max())
    eta = best_step(mirror.reach(n), mirror.sigma, rounds, slope)
    x, paid = mirror.start(n, torch.float64), 0.0
    for g in slopes:
        paid += float(g @ x) / rounds
        x = mirror.step(x, g, eta)
    assert paid - float(slopes.mean(0).min()) <= slope * math.sqrt(
        2 * mirror.reach(n) / (mirror.sigma * rounds)
    )


# Against a general-purpose solver, and the inequalities


@every
@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=st.integers(2, 6))
def test_projection_agrees_with_a_general_purpose_solver(mirror: Mirror, seed: int, n: int):
    random = np.random.default_rng(seed)
    low, high, radius = box(random, n)
    v = point(mirror, random, n)
    x = mirror.project(v, low, high, radius)
    assert float(x.sum()) == pytest.approx(radius, rel=1e-12)
    assert bool((x >= low).all() and (x <= high).all())
    z = mirror.grad(v).numpy()
    found = minimize(
        lambda y: objective(mirror, y, z),
        inside(random, low, high, radius).numpy(),
        jac=True,
        method="SLSQP",
        bounds=list(zip(low.tolist(), high.tolist(), strict=True)),
        constraints={"type": "eq", "fun": lambda y: y.sum() - radius, "jac": np.ones_like},
        options={"maxiter": 500, "ftol": 1e-14},
    )
    theirs = torch.tensor(found.x).clamp(low, high)
    if theirs.sum() > radius:  # the solver may miss the sum by a little
        theirs = low + (theirs - low) * (radius - low.sum()) / (theirs - low).sum()
    elif theirs.sum() < radius:
        theirs = high - (high - theirs) * (high.sum() - radius) / (high - theirs).sum()
    best, other = objective(mirror, x.numpy(), z)[0], objective(mirror, theirs.numpy(), z)[0]
    assert best <= other + 1e-12 * (1 + abs(best) + float(np.abs(z).max()) * radius)
    if found.success:
        assert other - best <= 1e-6 * (1 + abs(best))
        assert float((x - theirs).abs().max()) <= 1e-2 * radius


@every
@settings(max_examples=40, deadline=None)
@given(seed=seeds, n=st.integers(1, 40))
def test_projection_satisfies_the_optimality_conditions(mirror: Mirror, seed: int, n: int):
    """The gradient of B(x || v) is one number at free entries, at least that at low ones and at
    most at high ones.
    """
    random = np.random.default_rng(seed)
    low, high, radius = box(random, n)
    v = point(mirror, random, n)
    x = mirror.project(v, low, high, radius)
    assert float(x.sum()) == pytest.approx(radius, rel=1e-12)
    slope = mirror.grad(x) - mirror.grad(v)
    tolerance = 1e-9 * (1 + float(mirror.grad(v).abs().max()))
    down, up = slope[x > low + 1e-13], slope[x < high - 1e-13]  # entries that can go down, and up
    if len(down) and len(up):
        assert float(down.max()) <= float(up.min()) + tolerance


@every
@settings(max_examples=40, deadline=None)
@given(seed=seeds, n=st.integers(2, 8))
def test_generalized_pythagorean_inequality(mirror: Mirror, seed: int, n: int):
    random = np.random.default_rng(seed)
    low, high, radius = box(random, n)
    v = point(mirror, random, n)
    x, projected = inside(random, low, high, radius), mirror.project(v, low, high, radius)
    whole = float(mirror.divergence(x, v))
    parts = float(mirror.divergence(x, projected)) + float(mirror.divergence(projected, v))
    assert whole >= parts - 1e-9 * (1 + whole)


@every
@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=st.integers(1, 8), eta=st.floats(1e-3, 3))
def test_step_is_gradient_inverse_and_projection(mirror: Mirror, seed: int, n: int, eta: float):
    random = np.random.default_rng(seed)
    low, high, radius = box(random, n)
    x, g = weights(random, n), torch.tensor(random.normal(size=n))
    composed = mirror.project(mirror.inverse(mirror.grad(x) - eta * g), low, high, radius)
    torch.testing.assert_close(
        mirror.step(x, g, eta, low, high, radius), composed, rtol=1e-8, atol=1e-10
    )


@every
@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=st.integers(1, 8))
def test_gradient_and_its_inverse(mirror: Mirror, seed: int, n: int):
    random = np.random.default_rng(seed)
    x = point(mirror, random, n)
    torch.testing.assert_close(mirror.inverse(mirror.grad(x)), x, rtol=1e-10, atol=1e-14)
    z = torch.tensor(random.normal(size=n))
    torch.testing.assert_close(mirror.grad(mirror.inverse(z)), z, rtol=1e-10, atol=1e-12)
    leaf = x.clone().requires_grad_()
    (auto,) = torch.autograd.grad(mirror.value(leaf), leaf)
    torch.testing.assert_close(mirror.grad(x), auto)


@every
@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=st.integers(2, 8))
def test_divergence_and_strong_convexity(mirror: Mirror, seed: int, n: int):
    random = np.random.default_rng(seed)
    x, y = weights(random, n), weights(random, n)
    definition = mirror.value(x) - mirror.value(y) - (mirror.grad(y) * (x - y)).sum()
    divergence = mirror.divergence(x, y)
    torch.testing.assert_close(divergence, definition, rtol=1e-9, atol=1e-12)
    assert float(divergence) > 0 and float(mirror.divergence(x, x)) == 0
    distance = float(torch.linalg.vector_norm(x - y, mirror.norm))
    assert float(divergence) >= mirror.sigma / 2 * distance**2 - 1e-12


@every
def test_points_of_the_set_stay(mirror: Mirror):
    x = vector(0.1, 0.2, 0.7)
    torch.testing.assert_close(mirror.project(x), x)
    torch.testing.assert_close(mirror.project(x, low=[0.1, 0, 0], high=0.7), x)
    # a single point
    torch.testing.assert_close(
        mirror.project(vector(5.0, 1.0), low=[0.25, 0.75]), vector(0.25, 0.75)
    )
    torch.testing.assert_close(
        mirror.project(vector(5.0, 1.0), high=[0.25, 0.75]), vector(0.25, 0.75)
    )
    torch.testing.assert_close(mirror.project(vector(1e-3)), vector(1.0))


@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=st.integers(1, 20))
def test_pnorm_two_is_euclidean(seed: int, n: int):
    random = np.random.default_rng(seed)
    low, high, radius = box(random, n)
    v = torch.tensor(random.normal(size=n))
    torch.testing.assert_close(
        PNorm(2.0).project(v, low, high, radius), Euclidean().project(v, low, high, radius)
    )


# Batches, dtypes, extremes


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batching_equals_looping(mirror: Mirror, dtype: torch.dtype):
    random = np.random.default_rng(3)
    x = torch.stack([weights(random, 5) for _ in range(6)]).reshape(2, 3, 5).to(dtype)
    g = torch.tensor(random.normal(size=(2, 3, 5))).to(dtype)
    high = torch.tensor(random.uniform(0.3, 0.6, (2, 3, 5)))
    steps, projected = mirror.step(x, g, 0.7), mirror.project(x + 1, 0.05, high)
    values, divergences = mirror.value(x), mirror.divergence(x, projected)
    assert {
        t.dtype for t in (steps, projected, values, divergences, mirror.grad(x), mirror.inverse(g))
    } == {dtype}
    for i in np.ndindex(2, 3):
        torch.testing.assert_close(steps[i], mirror.step(x[i], g[i], 0.7))
        torch.testing.assert_close(projected[i], mirror.project(x[i] + 1, 0.05, high[i]))
        torch.testing.assert_close(values[i], mirror.value(x[i]))
        torch.testing.assert_close(divergences[i], mirror.divergence(x[i], projected[i]))
    torch.testing.assert_close(torch.func.vmap(lambda a, b: mirror.step(a, b, 0.7))(x, g), steps)
    assert mirror.step(x[:0], g[:0], 0.7).shape == (0, 3, 5)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eta", [1e4, 1e30, 1e260])
def test_extreme_steps(mirror: Mirror, dtype: torch.dtype, eta: float):
    x = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0], dtype=dtype)
    g = torch.tensor([-1.0, 1.0, 2.0, 3e38, 3e38], dtype=dtype)
    assert mirror.step(x, g, eta).tolist() == [1, 0, 0, 0, 0]
    assert mirror.step(x, g * math.inf, eta).tolist() == [1, 0, 0, 0, 0]
    # Each takes what it may, in the order of the gradients. In that of entropy, the last entry,
    # being zero, comes last.
    new = mirror.step(x, g, eta, low=0.05, high=[0.3, 0.2, 0.6, 1, 1])
    torch.testing.assert_close(new, torch.tensor([0.3, 0.2, 0.4, 0.05, 0.05], dtype=dtype))
    new = mirror.step(x, -g, eta, low=0.05, high=[1, 0.4, 0.2, 0.3, 0.0625])
    last = (
        [0.05, 0.4, 0.2, 0.3, 0.05]
        if isinstance(mirror, Entropy)
        else [0.05, 0.3875, 0.2, 0.3, 0.0625]
    )
    torch.testing.assert_close(new, torch.tensor(last, dtype=dtype))
    torch.testing.assert_close(mirror.step(x, g.clamp(max=2), 1e-300), x)


def test_huge_steps_do_not_round_the_bounds_away():
    for mirror in MAPS:
        new = mirror.step(vector(1, 1, 1) / 3, vector(0, 1e150, 1e150), 1e140, high=[0.5, 0.1, 0.5])
        torch.testing.assert_close(new, vector(0.5, 0.1, 0.4))


def test_zero_weights():
    zero = Entropy().step(vector(0.5, 0.5, 0.0), vector(1.0, 0.0, -1e308), 1e308)
    assert zero.tolist() == [0, 1, 0]
    assert Entropy().project(vector(0.0, 2.0, 2.0)).tolist() == [0, 0.5, 0.5]
    assert Entropy().project(vector(0.0, 3.0, 1.0), low=0.2).tolist() == pytest.approx(
        [0.2, 0.6, 0.2]
    )
    # The mass has no other place: zeros share it evenly.
    assert Entropy().project(vector(1.0, 0.0, 0.0), high=0.5).tolist() == pytest.approx(
        [0.5, 0.25, 0.25]
    )
    assert Entropy().project(vector(1.0, 0.0, 0.0), high=[0.5, 0.1, 1]).tolist() == pytest.approx(
        [0.5, 0.1, 0.4]
    )
    for mirror in MAPS:
        assert mirror.project(torch.zeros(4)).tolist() == pytest.approx([0.25] * 4)
        assert mirror.project(torch.zeros(2), high=[0.3, 1]).tolist() == pytest.approx([0.3, 0.7])


@every
def test_nan_spoils_its_own_vector_only(mirror: Mirror):
    x = torch.full((2, 3), 1 / 3)
    g = torch.tensor([[0.0, math.nan, 0.0], [1.0, 1.0, 1.0]])
    new = mirror.step(x, g, 0.5)
    assert bool(new[0].isnan().all())
    torch.testing.assert_close(new[1], x[1])


def test_entropy_is_defined_from_zero_on():
    assert bool(Entropy().project(vector(-1.0, 1.0)).isnan().all())
    assert Entropy().project(vector(0.0, 1.0), low=-1.0).tolist() == [0, 1]
    with pytest.raises(ConfigError, match=r"high=-1.0 must be at least low=-2.0 and at least 0"):
        Entropy().project(vector(0.0, 1.0), low=-2.0, high=-1.0)


# Refusals


@every
@pytest.mark.parametrize(
    ("bounds", "match"),
    [
        ({"low": 0.4}, r"low=0.4 sums to more than radius=1.0"),
        ({"high": 0.3}, r"high=0.3 sums to less than radius=1.0"),
        ({"low": 0.5, "high": 0.4}, r"high=0.4 must be at least low=0.5"),
        ({"high": -1.0}, r"high=-1.0 must be at least low=0.0"),
        ({"low": math.nan}, r"low=nan must be finite"),
        ({"high": math.nan}, r"high=nan must be at least low=0.0"),
        ({"high": [0.5, 0.5]}, r"high=\[0.5, 0.5\] must broadcast to the shape \(3,\)"),
        ({"low": "none"}, r"low='none' must broadcast"),
        ({"radius": 0.0}, r"radius=0.0 must be a positive finite number"),
        ({"radius": 4.0}, r"high=1.0 sums to less than radius=4.0"),
    ],
)
def test_empty_sets(mirror: Mirror, bounds: dict, match: str):
    with pytest.raises(ConfigError, match=match):
        mirror.project(vector(0.2, 0.3, 0.5), **bounds)
    with pytest.raises(ConfigError, match=match):
        mirror.step(vector(0.2, 0.3, 0.5), vector(0.0, 0.0, 0.0), 0.1, **bounds)


def test_bounds_rounded_to_float32_are_no_empty_set():
    for mirror in MAPS:
        for bounds in ({"low": torch.full((3,), 1 / 3)}, {"high": torch.full((3,), 0.33333331)}):
            torch.testing.assert_close(
                mirror.project(torch.tensor([1.0, 2.0, 3.0]), **bounds), torch.full((3,), 1 / 3)
            )


@pytest.mark.parametrize("p", [1, 1.0, 0.5, 2.1, math.nan, True, "2"])
def test_bad_p(p: object):
    with pytest.raises(ConfigError, match=r"p=.* must be a number above 1 and at most 2"):
        PNorm(p)


def test_bad_input():
    x = vector(0.5, 0.5)
    for wrong in (torch.tensor([1, 0]), torch.tensor(1.0), torch.zeros(3, 0), [0.5, 0.5]):
        with pytest.raises(ConfigError, match=r"v is .*: give a tensor of floats"):
            Entropy().project(wrong)
    with pytest.raises(ConfigError, match=r"g has shape \(3,\), x \(2,\)"):
        Entropy().step(x, vector(1, 2, 3), 0.1)
    for eta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"eta=.* must be a positive finite number"):
            Euclidean().step(x, x, eta)
    for mirror in MAPS:
        for bad in (mirror.start, mirror.reach):
            with pytest.raises(ConfigError, match="n=0 must be an integer of at least 1"):
                bad(0)
    good = {"r": 1.0, "sigma": 1.0, "rounds": 10, "slope": 1.0}
    for name in good:
        with pytest.raises(ConfigError, match=f"{name}=0 must be"):
            best_step(**{**good, name: 0})


def test_public_names():
    assert (fd.Entropy, fd.Euclidean, fd.PNorm) == (Entropy, Euclidean, PNorm)
    assert fd.PNorm(1.5) == fd.PNorm(1.5) and hash(fd.Entropy()) == hash(fd.Entropy())
