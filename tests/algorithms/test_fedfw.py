"""FedFW: the paper's counter-example, numbers by hand, rates, participation, bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import testing
from foedus.algorithms.fedfw.points import noisy
from foedus.base import random
from foedus.core.participation import cohort
from foedus.wire import Sparse
from foedus.wire.encoding import nbytes

SCALAR = fd.Linear(bias=False)


@pytest.fixture(scope="module")
def appendix() -> fd.Federation:
    """Appendix A with both functions halved: f_1 = (x - 3)^2 / 2 and f_2 = (x + 1)^2 / 2 on [-1,
    1]; the solution is 1.
    """
    one = np.ones((1, 1), np.float32)
    return fd.Federation.from_clients(
        [(one, np.array([3.0], np.float32)), (one, np.array([-1.0], np.float32))]
    )


def values(sizes=(20, 30, 25), features=6, seed=0, noise=0.1) -> fd.Federation:
    rng = np.random.default_rng(seed)
    parts = []
    for n in sizes:
        x = rng.normal(size=(n, features)).astype(np.float32)
        w = rng.normal(size=features) * 2
        parts.append((x, (x @ w + noise * rng.normal(size=n)).astype(np.float32)))
    return fd.Federation.from_clients(parts)


def own(run: fd.Run, name: str = "x") -> np.ndarray:
    """What every client remembers under a name, (clients, outputs, features)."""
    order = run.clients["states"]["slot"]
    return run.clients["states"]["states"][name]["weight"][order].numpy()


def quadratics(fed):
    """A_i, b_i with f_i(w) = w^T A_i w / 2 - b_i^T w + constant."""
    found = []
    for j in range(len(fed)):
        rows = fed.client_rows(j)
        x, y = fed.data.x_train[rows].astype(np.float64), fed.data.y_train[rows].astype(np.float64)
        found.append((x.T @ x / len(x), x.T @ y / len(x)))
    return found


def test_the_counter_example(appendix):
    """Averaged Frank-Wolfe stays at 0 forever; FedFW goes to 1."""
    naive = fd.run(fd.NaiveFW(SCALAR, fd.Box(-1.0, 1.0)), appendix, 20, evaluate_every=0)
    assert float(naive.state.center["weight"]) == 0
    assert naive.history.fw_gap.iloc[-1] == pytest.approx(1)  # F'(0) = -1, and 1 is the best point
    ours = fd.run(
        fd.FedFW(SCALAR, fd.Box(-1.0, 1.0), penalty=1.0, measure_every=0),
        appendix,
        600,
        evaluate_every=0,
    )
    assert abs(float(ours.state.center["weight"]) - 1) < 0.1


def test_the_counter_example_by_hand(appendix):
    """lambda_0 = 1. t = 1: eta 1, both go to their own ends, 1 and -1. t = 2: eta 2/3, lambda
    sqrt(3); g_1 = -1 + 1.73 > 0 and g_2 = -1.73: they swap, x = -1/3, 1/3. t = 3: eta 1/2, lambda
    2; g_1 = -5/3 - 2/3, g_2 = 2/3 + 2/3: x = 1/3, -1/3.
    """
    for t, want in enumerate([[0, 0], [1, -1], [-1 / 3, 1 / 3], [1 / 3, -1 / 3]]):
        run = fd.run(
            fd.FedFW(SCALAR, fd.Box(-1.0, 1.0), penalty=1.0), appendix, t, evaluate_every=0
        )
        np.testing.assert_allclose(own(run).flatten(), want, atol=1e-6)
        assert float(run.state.center["weight"]) == pytest.approx(np.mean(want), abs=1e-6)
        assert run.history.consensus.iloc[-1] == pytest.approx(np.var(want), abs=1e-6)


def test_schedules_are_the_theorems():
    algorithm = lambda **k: fd.FedFW(SCALAR, fd.L2Ball(1.0), **k)  # noqa: E731
    assert algorithm().steps(7, 1.0)[:2] == pytest.approx((2 / 8, math.sqrt(8)))
    assert algorithm().steps(7, 0.5)[:2] == pytest.approx(
        (2 / (0.5 * 6 + 2), math.sqrt(0.5 * 6 + 2))
    )
    nonconvex = algorithm(schedule="nonconvex", horizon=50)
    assert nonconvex.steps(7, 1.0)[:2] == pytest.approx((50 ** (-2 / 3), 50 ** (1 / 3)))
    assert nonconvex.steps(7, 0.5)[:2] == pytest.approx((26 ** (-2 / 3), 26 ** (1 / 3)))
    # the average of gradients is the stochastic variant's, whatever the schedule; tau = 4
    for schedule in (None, "convex"):
        assert algorithm(variant="stochastic", schedule=schedule).steps(7, 0.5)[2] == pytest.approx(
            4 / 11 ** (2 / 3)
        )
    assert algorithm(variant="stochastic").steps(7, 0.5)[:2] == pytest.approx(
        (9 / 12, math.sqrt(12))
    )
    assert algorithm(variant="stochastic").steps(7, 1.0) == pytest.approx(
        (9 / 15, math.sqrt(15), 4 / 14 ** (2 / 3))
    )


def test_one_client_without_penalty_is_frank_wolfe():
    fed = values((40,), 5)
    ((a, b),) = quadratics(fed)
    w = np.zeros(5)
    for t in range(1, 26):
        g = a @ w - b
        i = np.abs(g).argmax()
        s = np.zeros(5)
        s[i] = -3 * np.sign(g[i])
        w = w + 2 / (t + 1) * (s - w)
    run = fd.run(fd.FedFW(SCALAR, fd.L1Ball(3.0), penalty=0.0), fed, 25, evaluate_every=0)
    np.testing.assert_allclose(run.state.center["weight"][0], w, atol=1e-5)
    g = a @ w - b
    assert run.history.fw_gap.iloc[-1] == pytest.approx(g @ w + 3 * np.abs(g).max(), rel=1e-3)


def step_by_hand(fed, rounds, variant, penalty, radius=2.0):
    """Algorithm 1 on an L2 ball, in NumPy."""
    forms = quadratics(fed)
    n, d = len(forms), len(forms[0][1])
    x, y, c = np.zeros((n, d)), np.zeros((n, d)), np.zeros(d)
    for t in range(1, rounds + 1):
        eta, lam = 2 / (t + 1), penalty * math.sqrt(t + 1)
        s = np.empty((n, d))
        for i, (a, b) in enumerate(forms):
            g = (a @ x[i] - b) / n + lam * (x[i] - c)
            if variant == "augmented":
                y[i] = y[i] + penalty * (x[i] - c)
                g = g + y[i]
            s[i] = -radius * g / np.linalg.norm(g)
        x = (1 - eta) * x + eta * s
        c = (1 - eta) * c + eta * s.mean(0)
    return x, c


@pytest.mark.parametrize("variant", ["penalty", "augmented"])
def test_algorithm_1_by_numpy(variant):
    fed = values()
    run = fd.run(
        fd.FedFW(SCALAR, fd.L2Ball(2.0), variant=variant, penalty=0.3), fed, 12, evaluate_every=0
    )
    x, c = step_by_hand(fed, 12, variant, 0.3)
    np.testing.assert_allclose(own(run)[:, 0], x, atol=2e-4)
    np.testing.assert_allclose(run.state.center["weight"][0], c, atol=2e-4)


def test_the_stochastic_average_of_gradients():
    """Every client has one row, many times: its mini-batch gradient is its gradient, and d_i their
    running average.
    """
    x = np.ones((8, 1), np.float32)
    fed = fd.Federation.from_clients([(x, 3 * x[:, 0]), (x, -x[:, 0])])
    n, c, lam0 = 2, 0.0, 0.1
    w, d = np.zeros(2), np.zeros(2)
    for t in range(1, 7):
        eta, lam, rho = 9 / (t + 8), lam0 * math.sqrt(t + 8), 4 / (t + 7) ** (2 / 3)
        d = (1 - rho) * d + rho * (w - np.array([3, -1])) / n
        s = -np.sign(d + lam * (w - c))
        w, c = (1 - eta) * w + eta * s, (1 - eta) * c + eta * s.mean()
    run = fd.run(
        fd.FedFW(SCALAR, fd.Box(-1.0, 1.0), variant="stochastic", penalty=lam0, batch_size=3),
        fed,
        6,
        evaluate_every=0,
    )
    np.testing.assert_allclose(own(run).flatten(), w, atol=1e-5)
    np.testing.assert_allclose(own(run, "d").flatten(), d, atol=1e-5)
    assert float(run.state.center["weight"]) == pytest.approx(c, abs=1e-5)


def test_mini_batches_are_drawn_from_the_clients_own_rows():
    rng = np.random.default_rng(0)
    parts = [
        (np.ones((n, 1), np.float32), rng.normal(loc, 0.1, n).astype(np.float32))
        for n, loc in ((5, 0.0), (60, 50.0))
    ]
    run = fd.run(
        fd.FedFW(SCALAR, fd.Box(-100.0, 100.0), variant="stochastic", penalty=1.0, batch_size=4),
        fd.Federation.from_clients(parts), 1, evaluate_every=0,
    )  # fmt: skip
    first, second = own(run, "d").flatten()  # -(mean of the batch) / n
    assert abs(first) < 0.2
    assert second == pytest.approx(-25, abs=0.2)


# -- convergence -----------------------------------------------------------------------------------


def best(fed, domain, steps=4000):
    """F*, by projected gradient."""
    forms = quadratics(fed)
    a, b = np.mean([f[0] for f in forms], 0), np.mean([f[1] for f in forms], 0)
    w = torch.zeros(1, len(b), dtype=torch.float64)
    rate = 1 / np.linalg.eigvalsh(a).max()
    for _ in range(steps):
        w = domain.project(w - rate * torch.from_numpy(a @ w[0].numpy() - b))
    return w[0].numpy(), lambda v: 0.5 * v @ a @ v - b @ v


def slope_of(run, fed, domain, rounds):
    """The exponent with which F(centre_t) - F* falls over some rounds."""
    solution, value = best(fed, domain)
    constant = np.mean(
        [
            0.5 * np.square(fed.data.y_train[fed.client_rows(j)].astype(np.float64)).mean()
            for j in range(len(fed))
        ]
    )
    above = run.history.objective[rounds] - (value(solution) + constant)
    assert above.min() > -1e-4
    return np.polyfit(np.log(rounds), np.log(np.maximum(above, 1e-9)), 1)[0]


@pytest.mark.parametrize("domain", [fd.L2Ball(2.0), fd.L1Ball(3.0)], ids=["L2", "L1"])
def test_the_objective_falls_like_one_over_root_t(domain):
    fed = values((60, 80, 70, 50), 6)
    run = fd.run(fd.FedFW(SCALAR, domain, measure_every=8), fed, 256, evaluate_every=0)
    assert bool(domain.contains(run.state.center["weight"], 1e-6))
    assert slope_of(run, fed, domain, [16, 24, 32, 48, 64, 96, 128, 192, 256]) <= -0.5


def test_the_gap_falls_like_the_cube_root_of_the_horizon():
    fed = values((60, 80, 70, 50), 6)
    least, horizons = [], [10, 30, 90]
    for horizon in horizons:
        run = fd.run(
            fd.FedFW(SCALAR, fd.L2Ball(2.0), schedule="nonconvex", horizon=horizon),
            fed,
            horizon,
            evaluate_every=0,
        )
        least.append(run.history.fw_gap.min())
    assert np.polyfit(np.log(horizons), np.log(least), 1)[0] <= -1 / 3


def test_the_stochastic_objective_falls_like_the_cube_root():
    fed = values((60, 80, 70, 50), 6)
    algorithm = fd.FedFW(
        SCALAR, fd.L2Ball(2.0), variant="stochastic", batch_size=4, measure_every=8
    )
    run = fd.run(algorithm, fed, 200, evaluate_every=0)
    assert slope_of(run, fed, fd.L2Ball(2.0), list(range(16, 201, 8))) <= -1 / 3


# -- participation, copies, bytes ------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    part=st.sampled_from([0.3, 0.5, 1.0]),
    rounds=st.integers(1, 6),
    poisson=st.booleans(),
    seed=st.integers(0, 50),
)
def test_the_center_is_the_average_of_all_points(part, rounds, poisson, seed):
    """Also of those who stayed away; and the copies that clients make of it are the server's, to
    the last bit (`Encoding`).
    """
    fed = values((5, 6, 7, 8, 9, 10), 4)
    how = fd.Poisson(part) if poisson and part < 1 else part
    engine = testing.Encoding(fd.Local())
    run = fd.run(
        fd.FedFW(SCALAR, fd.L1Ball(2.0)),
        fed,
        rounds,
        seed=seed,
        participation=how,
        evaluate_every=0,
        engine=engine,
    )
    np.testing.assert_allclose(own(run).mean(0), run.state.center["weight"], atol=1e-5)
    assert bool(fd.L1Ball(2.0).contains(run.state.center["weight"], 1e-5))
    assert engine.down == run.history.bytes_down.iloc[-1]


@pytest.mark.parametrize("variant", ["augmented", "stochastic"])
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_states_of_clients_in_several_batches_are_not_mixed_up(variant, part):
    """From a start that is not zero, so that x, the copy of the center and the third tensor all
    differ.
    """
    fed = fd.split(fd.load("digits"), "dirichlet", clients=6, alpha=0.3, seed=1)
    algorithm = fd.FedFW(
        fd.MLP(5), fd.L2Ball(3.0), begin="projected", variant=variant, penalty=1e-3, measure_every=0
    )
    runs = [
        fd.run(algorithm, fed, 6, participation=part, engine=fd.Local(batch=b), evaluate_every=0)
        for b in (True, False)
    ]
    for name, tensor in runs[0].state.center.items():
        torch.testing.assert_close(tensor, runs[1].state.center[name], rtol=0, atol=2e-3)


def test_who_stays_away_keeps_its_model():
    fed = values((5, 6, 7, 8, 9, 10), 4)
    before, after = (
        fd.run(
            fd.FedFW(SCALAR, fd.L2Ball(2.0)), fed, t, participation=0.5, evaluate_every=0, seed=3
        )
        for t in (4, 5)
    )
    came = cohort(0.5, 6, random.fold(random.key(3), 5, 0xFFFFFFFE))
    assert len(came) == 3
    changed = (own(before) != own(after)).any((1, 2))
    assert np.flatnonzero(changed).tolist() == came.tolist()


@pytest.mark.parametrize("part", [1.0, 0.4])
@pytest.mark.parametrize("domain", [fd.L1Ball(2.0), fd.L2Ball(2.0)], ids=str)
def test_copies_of_the_center_equal_the_servers(domain, part):
    """Their copies of the center, rebuilt from encoded messages, are the server's to the last bit;
    short ones are sent.
    """
    fed = values((5, 6, 7, 8, 9, 10), 40)
    engine = testing.Encoding(fd.Local())
    run = fd.run(
        fd.FedFW(SCALAR, domain), fed, 9, participation=part, evaluate_every=0, engine=engine
    )
    assert (engine.up, engine.down) == tuple(run.history[["bytes_up", "bytes_down"]].iloc[-1])
    whole = nbytes({"center": run.state.center.value})
    asked = run.history.clients.sum()
    assert (engine.down < 0.9 * asked * whole) == (domain == fd.L1Ball(2.0))


def test_both_directions_are_short(digits):
    """L1: one entry up; down at most one entry a client. FedAvg sends 650 numbers each way."""
    fed = fd.split(digits, "iid", clients=5)
    history = fd.run(fd.FedFW(fd.Linear(), fd.L1Ball(10.0)), fed, 5).history
    average = fd.run(fd.FedAvg(fd.Linear()), fed, 5).history
    point = Sparse(torch.zeros(1, dtype=torch.int64), torch.zeros(1), (650,))
    assert (history.bytes_up.diff()[1:] <= 5 * nbytes(point)).all()
    assert 50 * history.bytes_up.iloc[-1] < average.bytes_up.iloc[-1]
    assert 5 * history.bytes_down.iloc[-1] < average.bytes_down.iloc[-1]


def test_low_rank_news_are_sent_as_factors():
    rng = np.random.default_rng(0)
    parts = [
        (rng.normal(size=(30, 40)).astype(np.float32), rng.normal(size=(30, 30)).astype(np.float32))
        for _ in range(3)
    ]
    fed = fd.Federation.from_clients(parts)
    run = fd.run(
        fd.FedFW(SCALAR, fd.NuclearBall(2.0)),
        fed,
        4,
        evaluate_every=0,
        engine=testing.Encoding(fd.Local()),
    )
    assert run.history.bytes_up.diff().iloc[-1] < 3 * 4 * (30 + 40 + 30)
    assert run.history.bytes_down.diff().iloc[-1] < 3 * 4 * (3 * (30 + 40) + 60)
    assert np.linalg.matrix_rank(run.state.center["weight"].numpy(), tol=1e-4) <= 12
    np.testing.assert_allclose(own(run).mean(0), run.state.center["weight"], atol=1e-5)


# -- options ---------------------------------------------------------------------------------------


def test_the_automatic_penalty_is_the_gap_over_the_squared_diameter(appendix):
    """Gaps at 0 on [-1, 1]: 3 and 1, halved by 1/n and averaged: 1; the diameter is 2."""
    run = fd.run(fd.FedFW(SCALAR, fd.Box(-1.0, 1.0)), appendix, 0, evaluate_every=0)
    assert run.state.penalty == pytest.approx(0.25)
    assert run.history.bytes_up[0] == 2 * nbytes(torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize(
    "domain",
    [fd.L2Ball(10.0), fd.L1Ball(10.0), fd.PerLayer(fd.L1Ball(30.0)), fd.LInfBall(0.1)],
    ids=str,
)
def test_the_automatic_penalty_needs_no_tuning(domain, digits):
    """Within three points of the best of a wide grid, where clients hold three labels each."""
    fed = fd.split(digits, "labels", clients=10, per_client=3)
    auto = fd.run(fd.FedFW(fd.Linear(), domain, measure_every=0), fed, 60, evaluate_every=60)
    scale, accuracy = auto.state.penalty, auto.history.accuracy.iloc[-1]
    grid = [
        fd.run(
            fd.FedFW(fd.Linear(), domain, penalty=c * scale, measure_every=0),
            fed,
            60,
            evaluate_every=60,
        ).history.accuracy.iloc[-1]
        for c in (0.0, 0.1, 10.0)
    ]
    assert accuracy >= max(grid) - 0.03


def test_stragglers_with_a_larger_set():
    """A client with an L2 ball around the L1 ball sends dense points; the center still goes to the
    solution.
    """
    fed = values((60, 80, 70, 50), 6)
    solution, value = best(fed, fd.L1Ball(3.0))
    run = fd.run(
        fd.FedFW(SCALAR, fd.L1Ball(3.0), supersets={1: fd.L2Ball(3.0)}, measure_every=0),
        fed,
        200,
        evaluate_every=0,
    )
    start = fd.run(fd.FedFW(SCALAR, fd.L1Ball(3.0)), fed, 0, evaluate_every=0)
    w, first = (r.state.center["weight"].double().numpy()[0] for r in (run, start))
    assert value(w) - value(solution) < 0.1 * (value(first) - value(solution))
    x = own(run)[:, 0]
    assert np.abs(x[[0, 2, 3]]).sum(1).max() <= 3 + 1e-4
    assert np.linalg.norm(x[1]) <= 3 + 1e-4
    assert np.abs(x[1]).sum() > 3.1  # it does use its larger set


def test_every_client_counts_alike_whatever_its_set():
    """Points of rank one and dense ones are averaged apart, two clients against one, and put
    together again.
    """
    rng = np.random.default_rng(0)
    parts = [
        (rng.normal(size=(30, 5)).astype(np.float32), rng.normal(size=(30, 4)).astype(np.float32))
        for _ in range(3)
    ]
    algorithm = fd.FedFW(SCALAR, fd.NuclearBall(2.0), supersets={1: fd.L2Ball(2.0)})
    run = fd.run(algorithm, fd.Federation.from_clients(parts), 3, evaluate_every=0)
    np.testing.assert_allclose(own(run).mean(0), run.state.center["weight"], atol=1e-5)


def test_noise_is_a_function_of_the_seed():
    fed = values()
    runs = [
        fd.run(fd.FedFW(SCALAR, fd.L1Ball(2.0), noise=2.0), fed, 5, seed=s, evaluate_every=0)
        for s in (0, 0, 1)
    ]
    w = [r.state.center["weight"] for r in runs]
    assert torch.equal(w[0], w[1])
    assert not torch.equal(w[0], w[2])
    assert not torch.equal(
        w[0],
        fd.run(fd.FedFW(SCALAR, fd.L1Ball(2.0)), fed, 5, evaluate_every=0).state.center["weight"],
    )


def test_noise_is_relative_to_the_root_mean_square():
    g = {"a": torch.full((4000,), 3.0), "b": torch.full((4000,), -4.0)}
    found = noisy(g, 0.5, random.key(0))
    added = torch.cat([found[k] - g[k] for k in g])
    assert float(added.std()) == pytest.approx(0.5 * 12.5**0.5, rel=0.03)  # sqrt((9 + 16) / 2)
    assert abs(float(added.mean())) < 0.1
    assert noisy(g, 0.0, random.key(0)) is g


def test_every_tensor_has_noise_of_its_own():
    found = noisy({"a": torch.ones(5), "b": torch.ones(5)}, 0.5, random.key(1))
    assert (
        not torch.isclose(found["a"], found["b"]).any()
        and not torch.isclose(found["a"], torch.ones(5)).any()
    )


def test_a_zero_gradient_is_no_nan():
    x = np.zeros((4, 3), np.float32)
    fed = fd.Federation.from_clients([(x, x[:, 0])] * 2)
    for domain in (fd.L2Ball(1.0), fd.L1Ball(1.0), fd.LInfBall(1.0)):
        run = fd.run(fd.FedFW(SCALAR, domain), fed, 3, evaluate_every=0)
        assert bool(torch.isfinite(run.state.center["weight"]).all())


def test_projected_methods_stay_in_the_set_and_find_the_solution():
    fed = values((60, 80, 70, 50), 6)
    domain = fd.L1Ball(3.0)
    solution, _ = best(fed, domain)
    dr = fd.run(
        fd.FedDR(SCALAR, domain=domain, lr=0.1, eta=1.0, steps=50, batch_size=None),
        fed,
        150,
        evaluate_every=0,
    )
    assert bool(domain.contains(dr.state.w["weight"], 1e-5))
    np.testing.assert_allclose(dr.state.w["weight"][0], solution, atol=0.02)
    averaged = fd.run(
        fd.ProjectedFedAvg(
            SCALAR, domain=domain, lr=0.1, steps=1, batch_size=None, weights="uniform"
        ),
        fed,
        100,
        evaluate_every=0,
    )
    assert bool(domain.contains(averaged.state.w["weight"], 1e-5))
    assert averaged.history.fw_gap.iloc[-1] < 0.05 * averaged.history.fw_gap.iloc[1]


def test_feddr_by_hand(appendix):
    """eta = 1, one exact prox by many steps: prox of (v - t)^2 / 2 at y is (y + t) / 2.

    Round 1 from 0: y = 0, x = (3/2, -1/2), h = (3, -1), their average 1, projected 1. Round 2: y =
    (0 + 1 - 3/2, 0 + 1 + 1/2), x = ((-1/2 + 3) / 2, (3/2 - 1) / 2) = (5/4, 1/4), h = (3, -1): the
    average stays at 1.
    """
    algorithm = fd.FedDR(
        SCALAR, domain=fd.Box(-1.0, 1.0), eta=1.0, lr=0.4, steps=60, batch_size=None
    )
    for t, h in ((1, 1.0), (2, 1.0)):
        run = fd.run(algorithm, appendix, t, evaluate_every=0)
        assert float(run.state.h["weight"]) == pytest.approx(h, abs=1e-5)
        assert float(run.state.w["weight"]) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(own(run).flatten(), [1.25, 0.25], atol=1e-5)


def test_feddr_with_some_of_the_clients_by_exact_proxes():
    """eta 2.5, alpha 1.4, half of the clients: every step in NumPy, with the prox of a quadratic in
    closed form.
    """
    fed, domain = values((6, 7, 8, 9), 3), fd.L2Ball(1.5)
    algorithm = fd.FedDR(
        SCALAR, domain=domain, eta=2.5, relaxation=1.4, lr=0.1, steps=400, batch_size=None
    )
    came = []
    for t in range(1, 4):
        run = fd.run(algorithm, fed, t, participation=0.5, evaluate_every=0)
        slot = run.clients["states"]["slot"].numpy()
        x = np.zeros((4, 1, 3))
        x[slot >= 0] = run.clients["states"]["states"]["x"]["weight"][slot[slot >= 0]].numpy()
        came.append((x, run))
    a = quadratics(fed)
    x, y, h, w = np.zeros((4, 3)), np.zeros((4, 3)), np.zeros(3), np.zeros(3)
    for t, (found, run) in enumerate(came, start=1):
        chosen = [i for i in range(4) if np.abs(found[i, 0] - x[i]).max() > 0]
        assert len(chosen) == 2, t
        for i in chosen:
            before = 2 * x[i] - y[i]
            y[i] = y[i] + 1.4 * (w - x[i])
            hessian, right = a[i]
            x[i] = np.linalg.solve(hessian + np.eye(3) / 2.5, right + y[i] / 2.5)
            h = h + (2 * x[i] - y[i] - before) / 4
        w = h * min(1, 1.5 / np.linalg.norm(h))
        np.testing.assert_allclose(found[:, 0], x, atol=2e-4)
        np.testing.assert_allclose(run.state.w["weight"][0], w, atol=2e-4)
        x = found[:, 0].astype(float)


def test_naive_frank_wolfe_moves_where_clients_agree():
    """One client: x_1 = s_1 (eta = 1), then x_2 = x_1 / 3 + 2 s_2 / 3."""
    one = np.ones((1, 1), np.float32)
    fed = fd.Federation.from_clients([(one, np.array([0.5], np.float32))])
    for rounds, x in ((1, 1.0), (2, 1 / 3 - 2 / 3), (3, -1 / 6 + 1 / 2)):
        run = fd.run(fd.NaiveFW(SCALAR, fd.Box(-1.0, 1.0)), fed, rounds, evaluate_every=0)
        assert float(run.state.center["weight"]) == pytest.approx(x, abs=1e-6)


def test_the_gap_of_projected_averaging_is_that_of_its_own_objective():
    fed = values((200, 5, 5), 3)
    for weights in ("rows", "uniform"):
        algorithm = fd.ProjectedFedAvg(
            SCALAR,
            domain=fd.L2Ball(50.0),
            lr=0.2,
            steps=1,
            batch_size=None,
            weights=weights,
            measure_every=150,
        )
        assert abs(fd.run(algorithm, fed, 150, evaluate_every=0).history.fw_gap.iloc[-1]) < 1e-2, (
            weights
        )


def test_the_part_that_takes_part_is_that_of_whole_clients():
    """One of ten clients comes for any participation up to 0.1, and the steps are the same."""
    fed = values((5,) * 10, 3)
    runs = [
        fd.run(fd.FedFW(SCALAR, fd.L1Ball(1.0)), fed, 5, participation=p, evaluate_every=0)
        for p in (0.1, 0.001)
    ]
    assert torch.equal(*(r.state.center["weight"] for r in runs))


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"domain": "L1"}, "domain must be a set"),
        ({"variant": "plus"}, "variant"),
        ({"schedule": "fast"}, "schedule"),
        ({"schedule": "nonconvex"}, "horizon=None"),
        ({"penalty": -1.0}, "penalty=-1.0"),
        ({"penalty": "best"}, "penalty='best'"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"measure_every": -1}, "measure_every=-1"),
        ({"begin": "zero"}, "begin"),
        ({"penalty": None}, "penalty=None"),
        ({"noise": True}, "noise=True"),
        ({"horizon": True}, "horizon=True"),
        ({"supersets": None}, "supersets=None"),
        ({"supersets": {"1": fd.L2Ball(2.0)}}, r"supersets\['1'\]"),
        ({"supersets": {0: "L2"}}, r"supersets\[0\]"),
        ({"supersets": ((0, fd.L2Ball(2.0)), (0, fd.L2Ball(3.0)))}, "names a client twice"),
    ],
)
def test_bad_settings(options, says):
    with pytest.raises(fd.ConfigError, match=says):
        fd.FedFW(SCALAR, **{"domain": fd.L1Ball(1.0), **options})


def test_sets_that_do_not_fit(appendix, fed):
    with pytest.raises(fd.ConfigError, match="radius=0"):
        fd.L1Ball(0)
    with pytest.raises(fd.ConfigError, match=r"outside of Simplex.*begin='projected'"):
        fd.run(fd.FedFW(SCALAR, fd.Simplex()), fed, 1)
    assert (
        fd.run(fd.FedFW(fd.Linear(), fd.Simplex(), begin="domain"), fed, 2)
        .history.accuracy.notna()
        .all()
    )

    with pytest.raises(fd.ConfigError, match="use PerLayer"):
        fd.run(fd.FedFW(fd.Linear(), fd.NuclearBall(1.0)), fed, 1)
    with pytest.raises(fd.ConfigError, match=r"supersets\[0\].*does not contain"):
        fd.run(fd.FedFW(SCALAR, fd.L2Ball(2.0), supersets={0: fd.L2Ball(1.0)}), appendix, 1)
    with pytest.raises(fd.ConfigError, match=r"supersets\[9\] is for a client that does not exist"):
        fd.run(fd.FedFW(SCALAR, fd.L1Ball(1.0), supersets={9: fd.L2Ball(1.0)}), appendix, 1)
    with pytest.raises(fd.ConfigError, match="supersets are given for all 2 clients"):
        fd.run(
            fd.FedFW(SCALAR, fd.L1Ball(1.0), supersets={0: fd.L2Ball(1.0), 1: fd.L2Ball(2.0)}),
            appendix,
            1,
        )
    with pytest.raises(fd.ConfigError, match="relaxation=2"):
        fd.FedDR(relaxation=2)
    with pytest.raises(fd.ConfigError, match="weights='rows'"):
        fd.FedDR(weights="rows")
    with pytest.raises(fd.ConfigError, match=r"loss=L1Ball.*domain="):
        fd.FedDR(SCALAR, fd.L1Ball(1.0))
    assert (
        fd.run(
            fd.FedFW(SCALAR, fd.Box(0.0, 0.0)), appendix, 2, evaluate_every=0
        ).history.penalty.iloc[0]
        == 0
    )


def test_a_network_starts_at_the_point_of_the_set_closest_to_its_own_start():
    fed = fd.split(fd.load("digits"), "iid", clients=3)
    net, ball = fd.MLP((8,)), fd.L2Ball(0.5)
    own = torch.cat([v.flatten() for v in fd.run(fd.FedAvg(net), fed, 0).state.w.values()])
    begun = fd.run(fd.FedFW(net, ball, begin="projected"), fed, 0).state.center
    torch.testing.assert_close(
        torch.cat([v.flatten() for v in begun.values()]), own * 0.5 / own.norm()
    )


def test_projected_methods_begin_in_the_set():
    """A network's own start has a norm above 0.5; FedDR's h is the start itself, and its model the
    projection of h.
    """
    fed = fd.split(fd.load("digits"), "iid", clients=3)
    how = {"model": fd.MLP((8,)), "domain": fd.L2Ball(0.5)}
    joined = lambda tensors: torch.cat([v.flatten() for v in tensors.values()])  # noqa: E731
    own = joined(fd.run(fd.FedAvg(how["model"]), fed, 0, evaluate_every=0).state.w)
    assert own.norm() > 0.5
    for algorithm in (fd.FedDR(**how), fd.ProjectedFedAvg(**how)):
        state = fd.run(algorithm, fed, 0, evaluate_every=0).state
        torch.testing.assert_close(joined(state.w), own * 0.5 / own.norm())
        assert "h" not in state or torch.equal(joined(state.h), own)
