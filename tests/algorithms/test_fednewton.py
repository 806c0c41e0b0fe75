"""FedNewton and its relatives: by hand, against closed forms, and where the theory says that they
must or must not converge.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import poisson
from torch import nn

import foedus as fd
from foedus.wire.encoding import nbytes


def clients_of(sizes, features, outputs=1, seed=0, shift=0.0, uneven=1.0):
    """Regression clients whose features differ in scale (by `uneven`) and center (by `shift`)."""
    rng = np.random.default_rng(seed)
    parts = []
    for n in sizes:
        x = (
            rng.normal(size=(n, features)) * (1 + uneven * rng.uniform(-0.8, 1, features))
            + shift * rng.normal(size=features)
        ).astype(np.float32)
        y = (x @ rng.normal(size=(features, outputs)) + 0.1 * rng.normal(size=(n, outputs))).astype(
            np.float32
        )
        parts.append((x, y))
    return fd.Federation.from_clients(parts)


def systems(fed, reg):
    """p_j, H_j and b_j of every client, by NumPy."""
    found = []
    for j in range(len(fed)):
        rows = fed.client_rows(j)
        x, y = fed.data.x_train[rows].astype(np.float64), fed.data.y_train[rows].astype(np.float64)
        y = y[:, None] if y.ndim == 1 else y
        found.append((len(x), x.T @ x / len(x) + reg * np.eye(x.shape[1]), x.T @ y / len(x)))
    p = np.array([n for n, _, _ in found]) / sum(n for n, _, _ in found)
    return p, [h for _, h, _ in found], [b for _, _, b in found]


def krr(fed, reg):
    p, hs, bs = systems(fed, reg)
    return np.linalg.solve(np.tensordot(p, hs, 1), np.tensordot(p, bs, 1))


def quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fd.DivergenceWarning)
        return fd.run(*args, **kwargs)


def path(algorithm, fed, rounds, **options):
    """w after the start and after every round."""
    points = []

    def recorded(method):
        def call(*args):
            state = method(*args)
            points.append(state.w.numpy().copy())
            return state

        return call

    kind = type(algorithm)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start", "round"):
            patch.setattr(kind, name, recorded(getattr(kind, name)))
        quietly(algorithm, fed, rounds, evaluate_every=0, **options)
    assert len(points) == rounds + 1
    return points


# -- by hand ---------------------------------------------------------------------------------------


def test_two_clients_by_hand(two):
    """reg = 1: H_A = 2, b_A = 2, H_B = 5, b_B = 2, p = (1/3, 2/3); so H = 4, b = 2, P = 0.3.

    DKRR: 1/3 * 1 + 2/3 * 0.4 = 0.6. KRR: 0.5. Newton: w - 0.3 (4 w - 2) = 0.48, then 0.504. One
    unknown: cg is there at once.
    """
    one = fd.Identity()
    assert [w.item() for w in path(fd.FedNewton(one, reg=1.0), two, 2)] == pytest.approx(
        [0.6, 0.48, 0.504]
    )
    assert [
        w.item() for w in path(fd.FedNewton(one, reg=1.0, solver="cg"), two, 2)
    ] == pytest.approx([0.6, 0.5, 0.5])
    assert [w.item() for w in path(fd.DKRR(one, reg=1.0), two, 2)] == pytest.approx([0.6, 0.6, 0.6])
    assert fd.run(fd.KRR(one, reg=1.0), two, 0).state.w.item() == pytest.approx(0.5)


def test_averaging_baselines_by_hand(two):
    """FedAvg, lr 0.1, from 0.6: A 0.8 w + 0.2 twice is 0.744, B 0.5 w + 0.2 twice is 0.45; their
    average 0.548.

    FedProx, mu 1: A (2 + 0.6) / 3, B (2 + 0.6) / 6; their average 2.6 (1/9 + 1/9).
    """
    avg = path(fd.RidgeFedAvg(fd.Identity(), reg=1.0, lr=0.1, steps=2), two, 1)
    assert [w.item() for w in avg] == pytest.approx([0.6, 0.548])
    prox = path(fd.RidgeFedProx(fd.Identity(), reg=1.0, mu=1.0), two, 1)
    assert [w.item() for w in prox] == pytest.approx([0.6, 2.6 * 2 / 9])


def test_the_averaging_baseline_is_fedavg():
    """The same move as FedAvg on the rows themselves, from the same point (here 0, where b = 0 for
    the other's start).
    """
    fed = clients_of([20, 30, 10], 4)
    reg, lr = 0.3, 0.05
    ours = fd.RidgeFedAvg(fd.Identity(), reg=reg, lr=lr, steps=3)
    theirs = fd.FedAvg(
        fd.Linear(bias=False), lr=lr, steps=3, batch_size=None, weight_decay=reg, loss="squared"
    )
    zero = torch.zeros(4, 1, dtype=torch.float64)
    p, hs, bs = systems(fed, reg)
    moved = []
    for h, b in zip(hs, bs, strict=True):
        w = zero.numpy()
        for _ in range(3):
            w = w - lr * (h @ w - b)
        moved.append(w)
    want = np.tensordot(p, moved, 1)
    np.testing.assert_allclose(
        fd.run(theirs, fed, 1).state.w["weight"].T, want, rtol=1e-4, atol=1e-6
    )
    start, after = path(ours, fed, 1)
    moved = []
    for h, b in zip(hs, bs, strict=True):
        w = start
        for _ in range(3):
            w = w - lr * (h @ w - b)
        moved.append(w)
    np.testing.assert_allclose(after, np.tensordot(p, moved, 1), rtol=1e-10)


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["newton", "cg"])
@pytest.mark.parametrize("rows", [50, 5], ids=["primal", "dual"])
def test_one_client_or_identical_clients_need_one_round(solver, rows):
    alone = clients_of([rows], 12, outputs=2)
    x, y = alone.data.x_train, alone.data.y_train
    same = fd.Federation.from_clients([(x, y)] * 3)
    want = krr(alone, 1e-3)
    for fed in (alone, same):
        got = fd.run(
            fd.FedNewton(fd.Identity(), reg=1e-3, solver=solver), fed, 1, evaluate_every=0
        ).state.w.numpy()
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-10
        np.testing.assert_allclose(
            fd.run(fd.KRR(fd.Identity(), reg=1e-3), fed, 0).state.w, want, rtol=1e-9, atol=1e-12
        )


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 15), min_size=2, max_size=5),
    features=st.integers(1, 8),
    reg=st.sampled_from([1e-2, 0.1, 1.0]),
)
def test_gradient_and_hessian_partition(sizes, features, reg):
    """Proposition 1: the averages of the clients' gradients and Hessians are those of all rows in
    one place.
    """
    fed = clients_of(sizes, features)
    x, y = fed.data.x_train.astype(np.float64), fed.data.y_train.astype(np.float64).reshape(-1, 1)
    h = x.T @ x / len(x) + reg * np.eye(features)

    class Asked(fd.FedNewton):
        def start(self, clients):
            v = torch.arange(1.0, features + 1, dtype=torch.float64).unsqueeze(1)
            return fd.State(
                g=clients.mean(self.gradient, w=v), hv=clients.mean(self.product, v=v), v=v
            )

    state = fd.run(Asked(fd.Identity(), reg=reg), fed, 0, evaluate_every=0).state
    np.testing.assert_allclose(state.hv, h @ state.v.numpy(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        state.g, h @ state.v.numpy() - x.T @ y / len(x), rtol=1e-9, atol=1e-9
    )


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    features=st.integers(1, 10),
    reg=st.sampled_from([1e-3, 1e-2, 0.1]),
    shift=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 99),
)
def test_cg_always_reaches_krr(sizes, features, reg, shift, seed):
    """In as many rounds as there are unknowns, with a few to spare for rounding; and the H-norm of
    the error never rises.
    """
    fed = clients_of(sizes, features, outputs=2, seed=seed, shift=shift)
    p, hs, _ = systems(fed, reg)
    h, want = np.tensordot(p, hs, 1), krr(fed, reg)
    errors = []
    for w in path(fd.FedNewton(fd.Identity(), reg=reg, solver="cg", tol=1e-14), fed, features + 6):
        gap = w - want
        errors.append(np.sqrt(np.einsum("mk,mn,nk->k", gap, h, gap)))
    norm = np.sqrt(np.einsum("mk,mn,nk->k", want, h, want))
    assert np.all(errors[-1] <= 1e-8 * norm)
    for before, after in itertools.pairwise(errors):
        assert np.all(after <= before * (1 + 1e-9) + 1e-12 * norm)


def test_cg_where_newton_diverges():
    fed = clients_of([3, 4, 5, 3], 10, seed=1)
    want = krr(fed, 1e-3)
    newton = path(fd.FedNewton(fd.Identity(), reg=1e-3), fed, 8)
    assert np.linalg.norm(newton[-1] - want) > 1e3 * np.linalg.norm(newton[0] - want)
    cg = path(fd.FedNewton(fd.Identity(), reg=1e-3, solver="cg"), fed, 14)
    assert np.linalg.norm(cg[-1] - want) < 1e-8 * np.linalg.norm(want)


def test_the_error_shrinks_at_the_rate_of_the_spectral_radius():
    fed = clients_of([200, 300, 250], 6, uneven=0.4)
    reg = 0.05
    p, hs, _ = systems(fed, reg)
    h = np.tensordot(p, hs, 1)
    inverse = np.tensordot(p, [np.linalg.inv(a) for a in hs], 1)
    eigenvalues = np.linalg.eigvals(inverse @ h).real
    assert eigenvalues.min() >= 1 - 1e-12  # inversion is operator-convex
    radius = eigenvalues.max() - 1
    assert 0.05 < radius < 0.9
    want = krr(fed, reg)
    errors = [np.linalg.norm(w - want) for w in path(fd.FedNewton(fd.Identity(), reg=reg), fed, 12)]
    rates = np.array(errors[1:]) / np.array(errors[:-1])
    assert rates[-1] == pytest.approx(radius, rel=1e-2)
    assert fd.spectrum(fed, fd.Identity(), reg).radius == pytest.approx(radius, rel=1e-6)


def test_outputs_are_problems_of_their_own():
    fed = clients_of([10, 20, 15], 5, outputs=3)
    for solver in ("newton", "cg"):
        whole = path(fd.FedNewton(fd.Identity(), reg=0.1, solver=solver), fed, 3)[-1]
        for k in range(3):
            parts = [
                (fed.data.x_train[fed.client_rows(j)], fed.data.y_train[fed.client_rows(j)][:, k])
                for j in range(len(fed))
            ]
            one = path(
                fd.FedNewton(fd.Identity(), reg=0.1, solver=solver),
                fd.Federation.from_clients(parts),
                3,
            )[-1]
            np.testing.assert_allclose(whole[:, k], one[:, 0], rtol=1e-9)


def test_classes_are_one_against_all(fed):
    run = fd.run(fd.KRR(fd.Identity(intercept=True), reg=1e-2), fed, 0)
    x = np.c_[fed.data.x_train, np.ones(len(fed.data.x_train))].astype(np.float64)
    y = np.eye(10)[fed.data.y_train]
    want = np.linalg.solve(x.T @ x / len(x) + 1e-2 * np.eye(65), x.T @ y / len(x))
    np.testing.assert_allclose(run.state.w, want, rtol=1e-6, atol=1e-9)
    x_test = np.c_[fed.data.x_test, np.ones(len(fed.data.x_test))]
    assert run.history.accuracy[0] == (np.argmax(x_test @ want, 1) == fed.data.y_test).mean()
    assert np.array_equal(run.model.predict(fed.data.x_test), np.argmax(x_test @ want, 1))
    shares = run.model.predict_proba(fed.data.x_test)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert np.array_equal(shares.argmax(1), np.argmax(x_test @ want, 1))


# -- bytes, columns, participation -----------------------------------------------------------------


@pytest.mark.parametrize("solver", ["newton", "cg"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_vectors_each_way_a_round(solver, dtype, fed):
    phi = fd.RandomFourier(20, bandwidth=4.0)
    history = fd.run(fd.FedNewton(phi, reg=1e-2, solver=solver, dtype=dtype), fed, 3).history
    vector = torch.zeros(20, 10, dtype=getattr(torch, dtype))
    up, down = nbytes(vector), nbytes({"w": vector})
    assert (history.bytes_up.diff()[1:] == 2 * up * len(fed)).all()
    assert (history.bytes_down.diff()[1:] == 2 * down * len(fed)).all()
    assert (history.messages_up.diff()[1:] == 2 * len(fed)).all()
    if solver == "newton":
        assert (history.bytes_up[0], history.bytes_down[0]) == (up * len(fed), 0)


def test_a_column_that_has_converged_is_no_longer_sent():
    """The second target is 0 everywhere: its column starts at the solution, and only the first is
    ever sent.
    """
    fed = clients_of([10, 20], 6, outputs=1)
    parts = []
    for j in range(2):
        x, y = (
            fed.data.x_train[fed.client_rows(j)],
            fed.data.y_train[fed.client_rows(j)].reshape(-1, 1),
        )
        parts.append((x, np.c_[y, 0 * y]))
    fed = fd.Federation.from_clients(parts)
    run = fd.run(
        fd.FedNewton(fd.Identity(), reg=0.1, solver="cg", tol=1e-8), fed, 12, evaluate_every=0
    )
    half, none = 2 * 2 * nbytes(torch.zeros(6, 1, dtype=torch.float64)), 0
    sent = run.history.bytes_up.diff()[1:].tolist()
    assert set(sent) == {half, none}
    assert sent == sorted(sent, reverse=True)  # and once the first has converged, nothing
    np.testing.assert_allclose(run.state.w, krr(fed, 0.1), rtol=1e-6, atol=1e-9)
    assert run.history.residual.iloc[-1] <= 1e-8


# -- delays and participation ----------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(delay=st.integers(0, 30), share=st.floats(0.05, 0.995))
def test_the_largest_stable_step_on_late_gradients(delay, share):
    """e_{t+1} = e_t - c e_{t-D}: roots of z^{D+1} - z^D + c, inside the unit circle if c is below 2
    sin(pi / (4 D + 2)), on it there, outside above.
    """

    def largest(c):
        return np.abs(np.roots([1, -1, *[0] * (delay - 1), c] if delay else [1, c - 1])).max()

    edge = 2 * np.sin(np.pi / (4 * delay + 2))
    assert largest(share * edge) < 1 < largest(edge / share)
    assert largest(edge) == pytest.approx(1, abs=1e-9)
    if delay:  # so full steps on late gradients never converge: eigenvalues of P H are at least 1
        assert edge <= 1


def _late_error(system, start, step, delay, rounds):
    """|e|_H after damped steps on late gradients: w <- w - s P g of D rounds ago."""
    p, h, _ = system
    past = [start]
    for t in range(rounds):
        past.append(past[-1] - step * p @ (h @ past[max(t - delay, 0)]))
    return np.sqrt(past[-1] @ h @ past[-1])


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 12), min_size=2, max_size=5),
    trip=st.sampled_from([1, 2, 5]),
    damping=st.sampled_from([0.2, 0.5, 0.9]),
    seed=st.integers(0, 99),
)
def test_waiting_is_no_slower_than_damped_steps_on_late_gradients(sizes, trip, damping, seed):
    """Whatever the step: at the end of every iteration (2 D + 1 rounds), the H-norm of the error is
    no larger than that of damped steps, whose gradients and directions take D rounds each.
    """
    fed = clients_of(sizes, 6, seed=seed, shift=1.0)
    p, hs, _ = systems(fed, 0.05)
    h, inverse = np.tensordot(p, hs, 1), np.tensordot(p, [np.linalg.inv(a) for a in hs], 1)
    want = krr(fed, 0.05)[:, 0]
    mu = np.linalg.eigvals(inverse @ h).real.max()
    step = damping * 2 * np.sin(np.pi / (8 * trip + 2)) / mu
    cg = fd.FedNewton(fd.Identity(), reg=0.05, solver="cg")
    points = path(cg, fed, 4 * (2 * trip + 1), engine=fd.Delayed(up=trip))
    for k in range(1, 5):
        gap = points[k * (2 * trip + 1)][:, 0] - want
        ours = np.sqrt(gap @ h @ gap)
        first = points[0][:, 0] - want
        # w after k (2 D + 1) steps that are 2 D late is a polynomial in P H of degree k as well
        late = _late_error((inverse, h, None), first, step, 2 * trip, k * (2 * trip + 1))
        assert ours <= late * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("how", ["late", "random", "two of six", "two of six, random"])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy", "logistic"])
def test_it_settles_at_the_solution_of_all_rows(how, loss):
    """One class at each client: with messages that are late, with two of six clients a round."""
    rng = np.random.default_rng(0)
    parts = []
    for i, n in enumerate((9, 14, 11, 8, 12, 10)):
        x = rng.normal(size=(n, 4)) + 1.5 * rng.normal(size=(3, 4))[i % 3]
        parts.append((x.astype(np.float32), np.full(n, i % 3)))
    fed = fd.Federation.from_clients(parts, classes=3)
    engine = {
        "late": fd.Delayed(up=5),
        "random": fd.Delayed(up=poisson(3), down=poisson(2), seed=1),
        "two of six": None,
        "two of six, random": fd.Delayed(up=poisson(3), down=poisson(2), seed=1),
    }[how]
    solver = "cg" if loss == "squared" else "newton"
    algorithm = fd.FedNewton(fd.Identity(), reg=0.05, loss=loss, solver=solver)
    about = {"engine": engine, "participation": 2 / 6 if "two" in how else 1.0, "seed": 2}
    run = fd.run(algorithm, fed, 900, evaluate_every=0, **about)
    here = fd.run(algorithm, fed, 60, evaluate_every=0)
    np.testing.assert_allclose(run.state.w, here.state.w, rtol=1e-5, atol=1e-5)
    if loss == "squared":
        x, y = fed.data.x_train.astype(float), np.eye(3)[fed.data.y_train]
        want = np.linalg.solve(x.T @ x / len(x) + 0.05 * np.eye(4), x.T @ y / len(x))
        np.testing.assert_allclose(run.state.w, want, rtol=1e-6, atol=1e-9)
    else:
        objective = run.history.objective.dropna()
        assert (objective.diff().dropna() <= 1e-12).all()  # it never rises


def test_digits_that_are_two_rounds_late():
    """Conjugate gradients on late gradients end at an accuracy of 0.11, and |w| at 4e5."""
    fed = fd.split(fd.load("digits"), "iid", clients=10)
    phi = fd.RandomFourier(200, bandwidth=8.0)
    about = {"evaluate_every": 80, "engine": fd.Delayed(up=2)}
    run = fd.run(fd.FedNewton(phi, reg=1e-4, solver="cg"), fed, 80, **about)
    pooled = fd.run(fd.KRR(phi, reg=1e-4), fed, 0)
    assert abs(run.history.accuracy.iloc[-1] - pooled.history.accuracy.iloc[0]) < 0.003
    gap = float((run.state.w - pooled.state.w).norm() / pooled.state.w.norm())
    assert gap < 1e-4


def test_cg_begins_anew_from_the_model_of_another_run():
    """The residual is that of the given w; that of the own start would lead elsewhere."""
    fed = clients_of([10, 20, 15, 12], 5)
    other = fd.run(fd.FedNewton(fd.Identity(), reg=2.0), fed, 1, evaluate_every=0)
    algorithm = fd.FedNewton(fd.Identity(), reg=0.1, solver="cg")
    run = fd.run(algorithm, fed, 9, start=other, evaluate_every=0)
    np.testing.assert_allclose(run.state.w, krr(fed, 0.1), rtol=1e-8)
    assert run.history.messages_up.diff()[1] == 12 and run.history.messages_up.diff()[2] == 8


# -- what it says ----------------------------------------------------------------------------------


def test_divergence_is_foreseen_once():
    fed = clients_of([3, 4, 5, 3], 10, seed=1)
    with pytest.warns(fd.DivergenceWarning, match="Use solver='cg'") as caught:
        fd.run(fd.FedNewton(fd.Identity(), reg=1e-3), fed, 6, evaluate_every=0)
    assert len([w for w in caught if issubclass(w.category, fd.DivergenceWarning)]) == 1
    assert "round 2" in str(caught[0].message)


@pytest.mark.parametrize("solver", ["newton", "cg"])
def test_no_warning_where_there_is_nothing_to_warn_of(solver):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fed in (
            clients_of([200, 300, 250], 6, uneven=0.2),
            clients_of([40], 6),
        ):  # converges; one client, where all is rounding
            fd.run(fd.FedNewton(fd.Identity(), reg=0.1, solver=solver), fed, 25, evaluate_every=0)
        fd.run(
            fd.FedNewton(fd.Identity(), reg=1e-3, solver="cg"),
            clients_of([3, 4, 5, 3], 10, seed=1),
            6,
            evaluate_every=0,
        )


def test_diagnosis_is_numpys():
    fed = clients_of([30, 40, 20, 50], 7, outputs=2, shift=1.0)
    reg = 0.02
    found = fd.spectrum(fed, fd.Identity(), reg, iterations=200, confidence=0.9)
    p, hs, bs = systems(fed, reg)
    h, want = np.tensordot(p, hs, 1), krr(fed, reg)
    inverse = np.tensordot(p, [np.linalg.inv(a) for a in hs], 1)
    assert found.radius == pytest.approx(np.linalg.eigvals(inverse @ h).real.max() - 1, rel=1e-6)
    assert found.converges == (found.radius < 1)
    shifts = [np.linalg.norm(h - a, 2) for a in hs]
    table = found.per_client
    np.testing.assert_allclose(table.data_shift, shifts, rtol=1e-5)
    models = []
    for j, (a, b) in enumerate(zip(hs, bs, strict=True)):
        x = fed.data.x_train[fed.client_rows(j)].astype(np.float64)
        models.append(np.sqrt(np.square(x @ (np.linalg.solve(a, b) - want)).sum(1).mean()))
    np.testing.assert_allclose(table.model_shift, models, rtol=1e-6)
    assert table.client.tolist() == [0, 1, 2, 3]
    assert table["rows"].tolist() == [30, 40, 20, 50]
    kappa = np.square(fed.data.x_train.astype(np.float64)).sum(1).max()
    upsilon = 0.0
    for share, n, shift in zip(p, [30, 40, 20, 50], shifts, strict=True):
        r = 2 * kappa * np.log(20) / (reg * n) + np.sqrt(2 * (kappa + 1) * np.log(20) / (reg * n))
        beta = min(r, kappa / (kappa + reg))
        upsilon += share / (1 - beta) * (2 * r + shift / reg) * (1 + shift / reg)
    assert found.upsilon == pytest.approx(upsilon, rel=1e-4)
    assert "says nothing" in str(found)
    assert str(found).count("\n") == 6


def test_a_diagnosis_where_newton_is_exact():
    x, y = np.array([[1.0], [2.0]], np.float32), np.array([1.0, 0.0], np.float32)
    for clients in (1, 3):
        found = fd.spectrum(fd.Federation.from_clients([(x, y)] * clients), fd.Identity(), 1.0)
        assert found.radius == 0
        assert found.converges


def test_the_radius_alone_costs_one_vector():
    fed = clients_of([30, 40, 20, 50], 7, shift=1.0)
    whole, alone = (
        fd.spectrum(fed, fd.Identity(), 0.02, iterations=100, per_client=p) for p in (True, False)
    )
    assert alone.radius == pytest.approx(whole.radius, rel=1e-6)
    assert alone.upsilon is None
    assert str(alone).count("\n") == 0


def test_a_diagnosis_says_what_to_do():
    assert "use solver='cg'" in str(
        fd.spectrum(clients_of([3, 4, 5, 3], 10, seed=1), fd.Identity(), 1e-3)
    )
    good = fd.spectrum(clients_of([200, 300], 4, uneven=0.2), fd.Identity(), 1.0)
    assert good.converges
    assert "converges, and multiplies" in str(good)


# -- features --------------------------------------------------------------------------------------


def test_the_seed_of_the_run_makes_the_features(fed, tmp_path):
    free, fixed = (
        fd.FedNewton(fd.RandomFourier(30, 4.0), reg=0.5),
        fd.FedNewton(fd.RandomFourier(30, 4.0, seed=3), reg=0.5),
    )
    drawn = fd.run(free, fed, 1, seed=3)
    assert drawn.algorithm == fixed
    assert torch.equal(drawn.state.w, fd.run(fixed, fed, 1, seed=8).state.w)
    assert not torch.equal(drawn.state.w, fd.run(free, fed, 1, seed=4).state.w)
    drawn.save(tmp_path / "run")
    loaded = fd.Run.load(tmp_path / "run")
    assert loaded.algorithm == fixed
    assert np.array_equal(
        loaded.model.predict(fed.data.x_test), drawn.model.predict(fed.data.x_test)
    )


def test_a_module_as_feature_map(fed, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 40), nn.Tanh())
    run = fd.run(fd.FedNewton(net, reg=0.1, solver="cg"), fed, 5)
    assert run.history.accuracy.iloc[-1] > 0.6
    run.save(tmp_path / "run")
    with pytest.raises(fd.CheckpointError, match="pass the algorithm"):
        fd.Run.load(tmp_path / "run")
    assert fd.Run.load(tmp_path / "run", algorithm=run.algorithm).model.predict(
        fed.data.x_test
    ).shape == (100,)


def test_a_module_with_other_weights_is_another_algorithm(fed, tmp_path):
    nets = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        nets.append(fd.FedNewton(nn.Sequential(nn.Linear(64, 20), nn.Tanh()), reg=0.1))
    fd.run(nets[0], fed, 1, checkpoint=tmp_path / "c").save(tmp_path / "run")
    with pytest.raises(fd.CheckpointError, match="weights"):
        fd.run(nets[1], fed, 2, checkpoint=tmp_path / "c", resume=True)
    with pytest.raises(fd.CheckpointError, match="another algorithm"):
        fd.Run.load(tmp_path / "run", algorithm=nets[1])


def test_probabilities_agree_with_predictions_far_from_the_data(fed):
    for loss in ("squared", "logistic"):
        model = quietly(fd.FedNewton(fd.Identity(), reg=0.05, loss=loss), fed, 2).model
        x = 20 * fed.data.x_test
        shares = model.predict_proba(x)
        # but for ties of certainties
        assert (shares.max(1) - shares[np.arange(len(x)), model.predict(x)] < 1e-12).all()
        np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-9)


def test_single_precision_is_close(fed):
    phi = fd.RandomFourier(60, bandwidth=4.0)
    double, single = (
        fd.run(fd.FedNewton(phi, reg=1e-3, solver="cg", dtype=d), fed, 10)
        for d in ("float64", "float32")
    )
    assert single.state.w.dtype == torch.float32
    assert float((double.state.w - single.state.w).norm() / double.state.w.norm()) < 1e-3
    assert single.history.bytes_up.iloc[-1] < 0.51 * double.history.bytes_up.iloc[-1]


# -- other losses ----------------------------------------------------------------------------------


def pooled_solution(fed, loss, reg, outputs):
    """The minimizer of the objective over all rows, by SciPy."""
    x = torch.from_numpy(fed.data.x_train.astype(np.float64))
    y = torch.from_numpy(fed.data.y_train)
    y = y.double() if y.is_floating_point() else y

    def objective(flat):
        w = torch.tensor(flat, requires_grad=True)
        value = loss.value(x @ w.view(x.shape[1], outputs), y).mean() + 0.5 * reg * w.square().sum()
        value.backward()
        return value.item(), w.grad.numpy()

    size = x.shape[1] * outputs
    return minimize(
        objective,
        np.zeros(size),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-10},
    )


@pytest.mark.parametrize("name", ["logistic", "cross_entropy", "huber"])
def test_other_losses_reach_the_pooled_solution(name):
    rng = np.random.default_rng(0)
    parts = []
    for n in (40, 60, 50):
        x = rng.normal(size=(n, 4)).astype(np.float32) + 0.3 * rng.normal(size=4).astype(np.float32)
        f = x @ rng.normal(size=(4, 3))
        y = (
            (f[:, 0] + rng.standard_t(1.5, n)).astype(np.float32)
            if name == "huber"
            else f.argmax(1)
        )
        parts.append((x, y))
    fed = fd.Federation.from_clients(parts)
    algorithm = fd.FedNewton(fd.Identity(), reg=0.05, loss=name, delta=0.8)
    run = fd.run(algorithm, fed, 60, evaluate_every=0)
    best = pooled_solution(fed, algorithm.objective(fed.data.classes), 0.05, fed.spec.outputs)
    assert run.history.objective.iloc[-1] == pytest.approx(best.fun, rel=1e-9)
    np.testing.assert_allclose(run.state.w.flatten(), best.x, atol=2e-5)
    assert (run.history.objective.diff()[2:] <= 1e-12).all()
    assert (run.history.step[1:] >= 0).all()


def test_one_client_makes_newton_steps():
    """The first step of Newton's method from 0 on logistic regression: H = x^2/4 + reg, g = (1/2 -
    y) x, averaged over rows.
    """
    x, y = np.array([[1.0], [-2.0], [0.5]], np.float32), np.array([1, 0, 0])
    fed = fd.Federation.from_clients([(x, y)])
    run = fd.run(fd.FedNewton(fd.Identity(), reg=0.5, loss="logistic"), fed, 1, evaluate_every=0)
    h = np.mean(x**2) / 4 + 0.5
    g = np.mean(x[:, 0] * (0.5 - y))
    assert run.history.step[1] == 1.0
    np.testing.assert_allclose(run.state.w[0], [g / h, -g / h], rtol=1e-12)


def test_another_loss_costs_three_vectors_down(fed):
    phi = fd.RandomFourier(20, bandwidth=4.0)
    history = fd.run(fd.FedNewton(phi, reg=0.5, loss="cross_entropy"), fed, 2).history
    vector = torch.zeros(20, 10, dtype=torch.float64)
    objectives = nbytes(torch.zeros(12, dtype=torch.float64))
    down = 2 * nbytes({"w": vector}) + nbytes({"d": vector, "last": 1.0})
    assert (history.bytes_up.diff()[1:] == (2 * nbytes(vector) + objectives) * len(fed)).all()
    assert (history.bytes_down.diff()[1:] == down * len(fed)).all()
    assert (history.bytes_up[0], history.bytes_down[0]) == (0, 0)


def test_probabilities_of_other_losses(fed):
    for loss in ("logistic", "cross_entropy"):
        model = fd.run(fd.FedNewton(fd.Identity(), reg=0.05, loss=loss), fed, 4).model
        shares = model.predict_proba(fed.data.x_test)
        np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-12)
        assert np.array_equal(shares.argmax(1), model.predict(fed.data.x_test))


def test_other_losses_do_not_stall():
    """Few rows and a small reg: the best step is far below 1.

    Huber with every residual beyond delta: no second derivative at all.
    """
    rng = np.random.default_rng(0)
    few = [(rng.normal(size=(5, 30)).astype(np.float32), rng.integers(0, 2, 5)) for _ in range(20)]
    run = fd.run(
        fd.FedNewton(fd.Identity(), reg=1e-6, loss="logistic"),
        fd.Federation.from_clients(few),
        8,
        evaluate_every=0,
    )
    assert run.history.objective.iloc[-1] < 0.9 * 2 * np.log(2)
    assert (run.history.objective.diff()[2:] <= 1e-12).all()
    far = []
    for n in (100, 150):
        x = rng.normal(size=(n, 3)).astype(np.float32)
        far.append((x, (300 + x.sum(1)).astype(np.float32)))
    run = fd.run(
        fd.FedNewton(fd.Identity(intercept=True), reg=1e-7, loss="huber"),
        fd.Federation.from_clients(far),
        40,
        evaluate_every=0,
    )
    np.testing.assert_allclose(run.state.w.flatten(), [1, 1, 1, 300], rtol=1e-2)


def test_local_systems_of_other_losses_are_no_larger_than_the_rows(monkeypatch):
    """Five rows, forty features: nothing of the size of the features squared is factorized."""
    seen = []
    monkeypatch.setattr(
        "foedus.models.curvature.cholesky",
        lambda *a: seen.append(a[0].shape) or torch.linalg.cholesky(a[0]),
    )
    rng = np.random.default_rng(0)
    few = [(rng.normal(size=(5, 40)).astype(np.float32), rng.integers(0, 2, 5)) for _ in range(3)]
    many = [
        (rng.normal(size=(50, 40)).astype(np.float32), rng.integers(0, 2, 50)) for _ in range(3)
    ]
    fd.run(
        fd.FedNewton(fd.Identity(), reg=0.1, loss="logistic"),
        fd.Federation.from_clients(few),
        1,
        evaluate_every=0,
    )
    assert seen == []
    fd.run(
        fd.FedNewton(fd.Identity(), reg=0.1, loss="logistic"),
        fd.Federation.from_clients(many),
        1,
        evaluate_every=0,
    )
    assert {tuple(s[-2:]) for s in seen} == {(40, 40)}


def test_inner_bounds_the_local_steps():
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(5, 40)).astype(np.float32), rng.integers(0, 2, 5)) for _ in range(3)]
    fed = fd.Federation.from_clients(parts)
    one, many = (
        fd.run(
            fd.FedNewton(fd.Identity(), reg=1e-3, loss="logistic", inner=i),
            fed,
            1,
            evaluate_every=0,
        ).state.w
        for i in (1, 50)
    )
    assert not torch.allclose(one, many)


# -- precision and quantized replies ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"quantise": "float16"}, {"quantise": "int8"}], ids=str
)
def test_rounding_is_no_divergence(options):
    fed = clients_of([200, 300, 250], 6, uneven=0.2)
    dtype = options.get("dtype", "float64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fd.run(
            fd.FedNewton(fd.Identity(), reg=1e-2, dtype=dtype),
            fed,
            20,
            quantise=options.get("quantise"),
            evaluate_every=0,
        )
    assert np.linalg.norm(run.state.w.double().numpy() - krr(fed, 1e-2)) < 0.02 * np.linalg.norm(
        krr(fed, 1e-2)
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("solver", ["newton", "cg"])
def test_a_column_of_zeros_hides_nothing(dtype, solver):
    fed = clients_of([3, 4, 5, 3], 10, seed=1)
    parts = []
    for j in range(4):
        x, y = (
            fed.data.x_train[fed.client_rows(j)],
            fed.data.y_train[fed.client_rows(j)].reshape(-1, 1),
        )
        parts.append((x, np.c_[y, 0 * y]))
    algorithm = fd.FedNewton(fd.Identity(), reg=1e-2, dtype=dtype, solver=solver)
    if solver == "cg":
        assert (
            fd.run(algorithm, fd.Federation.from_clients(parts), 6, evaluate_every=0)
            .history.residual.notna()
            .all()
        )
    else:
        with pytest.warns(fd.DivergenceWarning):
            fd.run(algorithm, fd.Federation.from_clients(parts), 6, evaluate_every=0)


def test_cg_stays_accurate_with_quantized_replies():
    """Every fifth iteration asks for the gradient; the rounding of the start would otherwise stay
    forever.
    """
    fed = clients_of([200, 300, 250], 6, uneven=0.2)
    run = fd.run(
        fd.FedNewton(fd.Identity(), reg=0.1, solver="cg"),
        fed,
        26,
        quantise="float16",
        evaluate_every=0,
    )
    want = krr(fed, 0.1)
    assert np.linalg.norm(run.state.w.numpy() - want) < 1e-3 * np.linalg.norm(want)
    assert run.history.messages_up.diff().iloc[5] == 9


@pytest.mark.parametrize(("up", "down"), [(1, 1), (2, 1), (0, 4)])
def test_every_fifth_iteration_asks_for_the_gradient_however_long_iterations_take(up, down):
    """Two clients with the same rows, so that their gradients vanish with the residual and their
    rounding with them. An iteration has two passes, with the gradient three, unless all
    has converged; the true residual falls, not only that of the recurrence.
    """
    one = clients_of([200], 6, uneven=0.2)
    rows = one.data.x_train, one.data.y_train
    fed = fd.Federation.from_clients([rows, rows])
    algorithm, late = (
        fd.FedNewton(fd.Identity(), reg=0.1, solver="cg"),
        fd.Delayed(up=up, down=down),
    )
    run = fd.run(algorithm, fed, 200, quantise="int8", engine=late, evaluate_every=0)
    ends = run.history[run.history.residual.notna()]
    sent = ends.messages_up.diff().tolist()[1:]
    assert len(sent) > 15 and sent[:5] == [4, 4, 4, 4, 6]
    assert [k for k, n in enumerate(sent, 1) if n % 4] == list(range(5, len(sent) + 1, 5))
    (_, (h, _), (b, _)) = systems(fed, 0.1)
    true = np.linalg.norm(b - h @ run.state.w.numpy()) / np.linalg.norm(b)
    assert true < 1e-10
    assert ends.residual.iloc[-1] == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("reg", [1e-4, 1e-5])
@pytest.mark.parametrize("rows", [30, 60], ids=["dual", "primal"])
def test_single_precision_with_small_reg(reg, rows):
    """One client: exact after the start, and Newton must not leave it."""
    fed = clients_of([rows], 40)
    run = fd.run(fd.FedNewton(fd.Identity(), reg=reg, dtype="float32"), fed, 3, evaluate_every=0)
    want = krr(fed, reg)
    assert np.linalg.norm(run.state.w.double().numpy() - want) < 2e-7 / reg * np.linalg.norm(want)


def test_single_precision_refuses_what_it_cannot_solve():
    with pytest.raises(fd.ConfigError, match="singular in float32"):
        fd.run(
            fd.FedNewton(fd.Identity(), reg=1e-12, dtype="float32"),
            clients_of([30], 40),
            3,
            evaluate_every=0,
        )


def test_the_right_hand_side_may_cancel():
    """Two clients with opposite b: the solution is 0, the residual is measured against the first
    one, and cg stops.
    """
    x = np.array([[1.0], [2.0]], np.float32)
    fed = fd.Federation.from_clients([(x, x[:, 0]), (2 * x, -x[:, 0] / 2)])
    run = fd.run(fd.FedNewton(fd.Identity(), reg=0.1, solver="cg"), fed, 4, evaluate_every=0)
    assert run.history.residual.max() <= 1
    assert abs(float(run.state.w)) < 1e-12
    assert run.history.bytes_up.diff().iloc[-1] == 0


def test_divergence_with_some_of_the_clients_is_noticed():
    """By the same proof as with all of them; what it advises converges."""
    fed, about = clients_of([3] * 12, 10, seed=1), {"participation": 0.5, "evaluate_every": 0}
    with pytest.warns(fd.DivergenceWarning, match="radius of its .* Use solver='cg', which conv"):
        run = fd.run(fd.FedNewton(fd.Identity(), reg=1e-3), fed, 40, **about)
    assert run.history.radius.max() > 1
    cg = fd.run(fd.FedNewton(fd.Identity(), reg=1e-3, solver="cg"), fed, 150, **about)
    np.testing.assert_allclose(cg.state.w, krr(fed, 1e-3), rtol=1e-6)
    residual = cg.history.residual.dropna()
    assert len(residual) > 10 and "cohort_residual" not in cg.history


def test_the_advice_promises_cg_only_where_averages_are_exact():
    """Rounded replies, or a robust mean: the gradient grows, and nothing is proved."""
    fed = clients_of([3, 4, 5, 3], 10, seed=1)
    for about in ({"quantise": "float16"}, {"aggregation": fd.TrimmedMean(0.25)}):
        with pytest.warns(fd.DivergenceWarning, match="has grown .*-fold. Use full precision and"):
            fd.run(fd.FedNewton(fd.Identity(), reg=1e-3), fed, 9, evaluate_every=0, **about)


def test_a_run_that_overflows_says_what_to_do():
    fed = clients_of([3, 4, 5, 3], 10, seed=1)
    with pytest.raises(fd.DivergenceError, match="use solver='cg'"):
        quietly(fd.FedNewton(fd.Identity(), reg=1e-5, dtype="float32"), fed, 40, evaluate_every=0)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reg": 0}, "reg=0 must be a positive finite number"),
        ({"reg": -1.0}, "reg=-1.0"),
        ({"reg": float("nan")}, "reg=nan"),
        ({"solver": "gd"}, "solver"),
        ({"loss": "square"}, "squared"),
        ({"loss": "auto"}, "auto"),
        ({"dtype": "float16"}, "dtype"),
        ({"loss": "huber", "solver": "cg"}, "needs loss='squared'"),
        ({"tol": 0.0}, "tol=0.0"),
        ({"delta": -1, "loss": "huber"}, "delta=-1"),
        ({"inner": 0}, "inner=0"),
    ],
)
def test_bad_settings(settings, says):
    with pytest.raises(fd.ConfigError, match=says):
        fd.FedNewton(fd.Identity(), **settings)


def test_other_bad_input(values):
    with pytest.raises(fd.ModelError, match="features must be"):
        fd.FedNewton(500)
    with pytest.raises(fd.ConfigError, match="dim=0"):
        fd.FedNewton(fd.RandomFourier(0))
    with pytest.raises(fd.ConfigError, match="needs class labels"):
        fd.run(fd.FedNewton(fd.Identity(), loss="logistic"), values, 1)
    with pytest.raises(fd.ConfigError, match="mu=0"):
        fd.RidgeFedProx(fd.Identity(), mu=0)
    with pytest.raises(fd.ConfigError, match="lr=0"):
        fd.RidgeFedAvg(fd.Identity(), lr=0)
    with pytest.raises(fd.DataError, match="y_train"):
        fd.Data.from_arrays(np.zeros((4, 2), np.float32), np.zeros((4, 2, 2), np.float32))
    with pytest.raises(fd.ConfigError, match="singular"):
        fd.run(
            fd.FedNewton(fd.Identity(), reg=1e-25),
            fd.Federation.from_clients([(np.ones((9, 3), np.float32), np.ones(9, np.float32))]),
            1,
        )
    with pytest.raises(fd.ConfigError, match="confidence=1"):
        fd.spectrum(values, fd.Identity(), confidence=1)


# -- real data -------------------------------------------------------------------------------------


def test_pendigits_newton_falls_and_cg_reaches_krr(real):
    """Ten clients, Dirichlet(1), M = 1000, bandwidth 1, reg 1e-4: plain Newton ends below 10%, cg
    is at KRR in 4 rounds.
    """
    fed = fd.split(fd.load("pendigits"), "dirichlet", clients=10, alpha=1.0, seed=0)
    phi = fd.RandomFourier(1000, bandwidth=1.0)
    reference = fd.run(fd.KRR(phi, reg=1e-4), fed, 0)
    newton = quietly(fd.FedNewton(phi, reg=1e-4), fed, 8).history.accuracy
    assert newton[0] > 0.94
    assert newton[8] < 0.1
    cg, want = fd.FedNewton(phi, reg=1e-4, solver="cg"), reference.state.w.numpy()
    errors = [float(np.linalg.norm(w - want)) for w in path(cg, fed, 8)[::2]]
    assert errors == sorted(errors, reverse=True)
    accuracy = fd.run(cg, fed, 4, evaluate_every=4).history.accuracy.iloc[-1]
    assert accuracy > reference.history.accuracy[0] - 0.002


class OneRound:
    """The passes of clients whose objective rises at every step that is tried."""

    @property
    def clients(self):
        return self

    def mean(self, step, **payload):
        told = {
            "gradient": torch.ones(1, 1),
            "direction": torch.ones(1, 1),
            "search": torch.arange(1.0, 13.0),
        }
        return told[step.__name__].double()

    def log(self, **metrics):
        pass


def test_where_no_step_is_any_good_smaller_ones_are_tried_next():
    """w stays; the steps of the next round are 2^-20 of these, the smallest that was tried, and not
    0 forever.
    """
    state = fd.State(w=torch.zeros(1, 1).double(), spec=None, step=0.5)
    after = fd.FedNewton(fd.Identity(), loss="logistic").iteration(OneRound(), state)
    assert after.w.item() == 0 and after.step == 0.5 * 2.0**-20
