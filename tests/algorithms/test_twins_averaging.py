"""The averaging methods and their references against NumPy twins: see `tests.algorithms.twins`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import foedus as fd
from tests.algorithms.twins import (
    FEATURES,
    SIZES,
    Case,
    Rounds,
    adam_memory,
    classes,
    compare,
    copies,
    train,
    values,
)

pytestmark = pytest.mark.usefixtures("compiled_or_not")

FULL = {"lr": 0.13, "steps": 3, "batch_size": None}
"""Full gradients: no permutation of rows makes a difference."""


@pytest.fixture(scope="module", params=[values, classes], ids=["values", "classes"])
def case(request) -> Case:
    return request.param()


def test_the_cohorts_are_no_special_point(case):
    """Three of five clients, others in each round; some come twice, some come late."""
    assert [len(who) for who in case.cohorts] == [3, 3, 3]
    assert len({tuple(who) for who in case.cohorts}) == 3
    assert len(set(SIZES)) == len(SIZES)
    assert set(case.cohorts[1]) - set(case.cohorts[0])
    assert len(set(case.cohorts[0]) & set(case.cohorts[2])) in (1, 2)


def filled(case: Case, how: dict[str, Any]) -> dict[str, Any]:
    """Settings with the clip that fits the case."""
    return how | {"clip": case.clip} if "clip" in how else how


# -- FedAvg and FedProx ----------------------------------------------------------------------------


def fedavg(
    case: Case,
    *,
    weights: str = "rows",
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    project: Any = None,
    adam: bool = False,
    steps: Any = None,
    lr: float = FULL["lr"],
    **how: Any,
) -> Rounds:
    """w_i by local training;  v <- beta v + sum_i p_i (w_i - w);  w <- project(w + server_lr v)."""
    w = case.start if project is None else project(case.start)
    v = np.zeros_like(w)
    for who in case.cohorts:
        moves = {}
        for i in who:
            memory = adam_memory(w) if adam else None
            made = FULL["steps"] if steps is None else steps(i)
            moves[i] = train(case.gradient(i), w, lr=lr, steps=made, memory=memory, **how) - w
        v = server_momentum * v + case.mean(moves, weights)
        w = w + server_lr * v
        w = w if project is None else project(w)
        server = {"w": case.named(w)} | ({"v": case.named(v)} if server_momentum else {})
        yield server, {}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"weights": "uniform"},
        {"server_lr": 0.7, "server_momentum": 0.53},
        {"server_lr": 0.7, "server_momentum": 0.53, "weights": "uniform"},
        {"weight_decay": 0.37},
        {"momentum": 0.61},
        {"momentum": 0.61, "weight_decay": 0.37, "server_lr": 0.7},
        {"clip": "between"},
        {"clip": "between", "weight_decay": 0.37, "momentum": 0.61},
    ],
    ids=str,
)
def test_fedavg(case, how):
    how = filled(case, how)
    compare(fd.FedAvg(case.model, **FULL, **how), case, fedavg(case, **how))


def test_some_gradients_are_clipped_and_some_are_not(case):
    """Otherwise the twins with a clip show nothing."""
    norms = [np.linalg.norm(case.gradient(i)(case.start)) for who in case.cohorts for i in who]
    assert min(norms) < 0.99 * case.clip < 1.01 * case.clip < max(norms)


@pytest.mark.parametrize(
    "how", [{}, {"weight_decay": 0.37}, {"clip": "between", "server_lr": 0.7}], ids=str
)
def test_fedavg_with_adam(case, how):
    how = filled(case, how)
    compare(
        fd.FedAvg(case.model, optimizer="adam", **FULL, **how), case, fedavg(case, adam=True, **how)
    )


@pytest.mark.parametrize(
    "how", [{}, {"adam": True}, {"momentum": 0.61}, {"clip": "between"}], ids=str
)
def test_clients_that_make_more_steps_than_others(how):
    """Two epochs of ceil(n / 2) batches: 2, 8, 4, 6 and 4 steps for 2, 7, 3, 5 and 4 rows."""
    case = copies()
    how = filled(case, how)
    steps = dict(enumerate((2, 8, 4, 6, 4)))
    options = {k: v for k, v in how.items() if k != "adam"} | (
        {"optimizer": "adam"} if "adam" in how else {}
    )
    algorithm = fd.FedAvg(case.model, lr=0.13, epochs=2, batch_size=2, **options)
    compare(algorithm, case, fedavg(case, steps=steps.get, **how))


def test_epochs_of_one_batch(case):
    """Two epochs, each of one batch of all rows, are two steps."""
    algorithm = fd.FedAvg(case.model, lr=0.13, epochs=2, batch_size=7)
    compare(algorithm, case, fedavg(case, steps=lambda i: 2))


@pytest.mark.parametrize(
    "how",
    [{}, {"weight_decay": 0.37, "server_lr": 0.7, "server_momentum": 0.53}, {"momentum": 0.61}],
    ids=str,
)
def test_fedprox(case, how):
    """g_i(w_i) + mu (w_i - w), where w is the server's of this round."""
    compare(fd.FedProx(case.model, mu=0.23, **FULL, **how), case, fedavg(case, prox=0.23, **how))


def test_fedprox_with_adam_and_clip(case):
    """The pull is not clipped."""
    algorithm = fd.FedProx(case.model, mu=2.3, optimizer="adam", clip=case.clip, **FULL)
    compare(algorithm, case, fedavg(case, prox=2.3, adam=True, clip=case.clip))


# -- Scaffold and FedDyn ---------------------------------------------------------------------------


def scaffold(
    case: Case,
    *,
    option: int,
    weights: str,
    server_lr: float,
    weight_decay: float,
    momentum: float = 0.0,
) -> Rounds:
    """Karimireddy et al., Algorithm 1, on f_i(y) + weight_decay/2 |y|^2."""
    x, c, own = case.start, np.zeros_like(case.start), {}
    for who in case.cohorts:
        moves, changes = {}, {}
        for i in who:
            c_i = own.get(i, np.zeros_like(x))
            more = {"weight_decay": weight_decay, "momentum": momentum}
            y = train(
                case.gradient(i), x, lr=FULL["lr"], steps=FULL["steps"], correction=c - c_i, **more
            )
            if option == 1:
                own[i] = case.gradient(i)(x) + weight_decay * x
            else:
                own[i] = c_i - c + (x - y) / (FULL["steps"] * FULL["lr"])
            moves[i], changes[i] = y - x, own[i] - c_i
        x = x + server_lr * case.mean(moves, weights)
        c = c + case.share(who, weights) * case.mean(changes, weights)
        yield {"w": case.named(x), "c": case.named(c)}, {i: case.named(v) for i, v in own.items()}


@pytest.mark.parametrize("weights", ["uniform", "rows"])
@pytest.mark.parametrize(("option", "weight_decay"), [(1, 0.0), (1, 0.37), (2, 0.0), (2, 0.37)])
def test_scaffold(case, option, weight_decay, weights):
    how = {"option": option, "weights": weights, "server_lr": 0.7, "weight_decay": weight_decay}
    compare(fd.Scaffold(case.model, **FULL, **how), case, scaffold(case, **how))


def test_scaffold_option_1_with_momentum(case):
    how = {
        "option": 1,
        "weights": "uniform",
        "server_lr": 0.7,
        "weight_decay": 0.37,
        "momentum": 0.61,
    }
    compare(fd.Scaffold(case.model, **FULL, **how), case, scaffold(case, **how))


def test_scaffold_option_2_divides_by_the_steps_of_each_client():
    """Two epochs of batches of 2 rows make K_i = 2, 8, 4, 6 and 4 steps."""
    case, steps = copies(), (2, 8, 4, 6, 4)
    x, c, own = case.start, np.zeros_like(case.start), {}

    def twin() -> Rounds:
        nonlocal x, c
        for who in case.cohorts:
            moves, changes = {}, {}
            for i in who:
                c_i = own.get(i, np.zeros_like(x))
                y = train(case.gradient(i), x, lr=0.13, steps=steps[i], correction=c - c_i)
                own[i] = c_i - c + (x - y) / (steps[i] * 0.13)
                moves[i], changes[i] = y - x, own[i] - c_i
            x, c = x + case.mean(moves, "uniform"), c + 3 / 5 * case.mean(changes, "uniform")
            yield (
                {"w": case.named(x), "c": case.named(c)},
                {i: case.named(v) for i, v in own.items()},
            )

    compare(fd.Scaffold(case.model, lr=0.13, epochs=2, batch_size=2), case, twin())


def feddyn(case: Case, *, alpha: float, weights: str, weight_decay: float = 0.0) -> Rounds:
    """Acar et al., Algorithm 1.

    theta_i by training on f_i(v) - <grad_i, v> + alpha/2 |v - theta|^2;
    grad_i <- grad_i - alpha (theta_i - theta);  h <- h - alpha/m sum_P (theta_i - theta);
    theta <- mean_P theta_i - h / alpha.
    """
    w, h, own = case.start, np.zeros_like(case.start), {}
    for who in case.cohorts:
        models = {}
        for i in who:
            grad_i = own.get(i, np.zeros_like(w))
            more = {"prox": alpha, "correction": -grad_i, "weight_decay": weight_decay}
            models[i] = train(case.gradient(i), w, lr=FULL["lr"], steps=FULL["steps"], **more)
            own[i] = grad_i - alpha * (models[i] - w)
        if weights == "uniform":  # as the paper has it: a sum over P, over all m clients
            h = h - alpha / len(SIZES) * sum(models[i] - w for i in who)
        else:  # the same, with clients' rows in place of clients
            h = h - alpha / sum(SIZES) * sum(SIZES[i] * (models[i] - w) for i in who)
        w = case.mean(models, weights) - h / alpha
        yield {"w": case.named(w), "h": case.named(h)}, {i: case.named(v) for i, v in own.items()}


@pytest.mark.parametrize("weights", ["uniform", "rows"])
@pytest.mark.parametrize("how", [{"alpha": 0.37}, {"alpha": 2.3, "weight_decay": 0.19}], ids=str)
def test_feddyn(case, how, weights):
    compare(
        fd.FedDyn(case.model, **FULL, **how, weights=weights),
        case,
        feddyn(case, weights=weights, **how),
    )


# -- sets ------------------------------------------------------------------------------------------


def onto_l2(radius: float) -> Any:
    return lambda v: v * min(1.0, radius / np.linalg.norm(v))


def onto_l1(radius: float) -> Any:
    """sign(v) max(|v| - theta, 0), with theta found by bisection so that the norm is the radius."""

    def project(v: np.ndarray) -> np.ndarray:
        if np.abs(v).sum() <= radius:
            return v
        low, high = 0.0, np.abs(v).max()
        for _ in range(200):
            theta = (low + high) / 2
            low, high = (
                (theta, high) if np.maximum(np.abs(v) - theta, 0).sum() > radius else (low, theta)
            )
        return np.sign(v) * np.maximum(np.abs(v) - high, 0)

    return project


def feddr(
    case: Case, project: Any, *, eta: float, relaxation: float, weight_decay: float = 0.0
) -> Rounds:
    """Tran-Dinh et al., Algorithm 1, with n = 5 and x_i = y_i = start before the first visit."""
    n, h, own = len(SIZES), case.start, {}
    center = project(h)
    for who in case.cohorts:
        for i in who:
            x_i, y_i = own.get(i, (case.start, case.start))
            last = 2 * x_i - y_i
            y_i = y_i + relaxation * (center - x_i)
            more = {"prox": 1 / eta, "weight_decay": weight_decay}
            x_i = train(case.gradient(i), y_i, lr=FULL["lr"], steps=FULL["steps"], **more)
            own[i] = (x_i, y_i)
            h = h + (2 * x_i - y_i - last) / n
        center = project(h)
        clients = {i: {"x": case.named(x_i), "y": case.named(y_i)} for i, (x_i, y_i) in own.items()}
        yield {"w": case.named(center), "h": case.named(h)}, clients


@pytest.mark.parametrize("relaxation", [0.61, 1.37])
@pytest.mark.parametrize(
    ("domain", "project"),
    [(fd.L2Ball(0.31), onto_l2(0.31)), (fd.L1Ball(0.47), onto_l1(0.47))],
    ids=["L2", "L1"],
)
def test_feddr(case, domain, project, relaxation):
    how = {"eta": 1.7, "relaxation": relaxation}
    runs = compare(
        fd.FedDR(case.model, domain=domain, **FULL, **how), case, feddr(case, project, **how)
    )
    apart = [float((run.state.h["weight"] - run.state.w["weight"]).abs().max()) for run in runs]
    assert min(apart) > 0.01  # the set binds in every round


def test_projected_fedavg(case):
    """FedAvg and a projection; objective and gap are over all rows, not only the cohort's."""
    how = {"server_lr": 0.7, "server_momentum": 0.53}
    twin = list(fedavg(case, project=onto_l2(0.31), **how))
    ids = {"ids": np.arange(len(SIZES)), "sizes": np.array(SIZES)}
    want = [(server | ids, clients) for server, clients in twin]
    runs = compare(
        fd.ProjectedFedAvg(case.model, domain=fd.L2Ball(0.31), **FULL, **how), case, want
    )
    for done, (server, _) in enumerate(twin, 1):
        w = np.concatenate([server["w"]["weight"].ravel(), server["w"]["bias"]])
        assert np.linalg.norm(w) == pytest.approx(0.31) or done == 1
        slope = case.gradient_on(*case.pooled(), w)
        row = runs[-1].history.iloc[done]
        assert row["objective"] == pytest.approx(case.loss_on(*case.pooled(), w), rel=1e-5)
        # max over |u| <= r of <g, w - u> is <g, w> + r |g|.
        assert row["fw_gap"] == pytest.approx(slope @ w + 0.31 * np.linalg.norm(slope), rel=1e-4)


def test_naive_frank_wolfe(case):
    """s_i = -radius sign(g_k) e_k, k the largest entry of g;  x <- (1 - eta) x + eta mean s_i.

    eta = 2 / (t + 1).
    """
    radius = 1.3
    x = onto_l1(radius)(case.start)

    def twin() -> Rounds:
        nonlocal x
        for t, who in enumerate(case.cohorts, 1):
            points = {}
            for i in who:
                g = case.gradient(i)(x)
                at = int(np.abs(g).argmax())
                points[i] = np.zeros_like(g)
                points[i][at] = -radius * np.sign(g[at])
            eta = 2 / (t + 1)
            x = (1 - eta) * x + eta * case.mean(points, "uniform")
            yield {"center": case.named(x)}, {}

    algorithm = fd.NaiveFW(case.model, fd.L1Ball(radius), begin="projected")
    runs = compare(algorithm, case, twin())
    every = range(len(SIZES))
    slope = np.mean([case.gradient(i)(x) for i in every], axis=0)
    last = runs[-1].history.iloc[-1]
    assert last["objective"] == pytest.approx(np.mean([case.loss(i, x) for i in every]), rel=1e-5)
    assert last["fw_gap"] == pytest.approx(slope @ x + radius * np.abs(slope).max(), rel=1e-4)


# -- ridge regression ------------------------------------------------------------------------------


def systems(case: Case, reg: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """H_j = Phi^T Phi / n + reg I and b_j = Phi^T Y / n, with phi(x) = (x, 1).

    Clients of 2 and 3 rows have fewer rows than features.
    """
    made = []
    for x, y in case.rows:
        phi = np.hstack([x, np.ones((len(x), 1))])
        made.append((phi.T @ phi / len(x) + reg * np.eye(FEATURES + 1), phi.T @ y / len(x)))
    return made


def test_ridge_fedavg(case):
    """From sum_j p_j H_j^-1 b_j over all clients; 3 steps w_j <- w_j - lr (H_j w_j - b_j)."""
    each = systems(case, 0.37)

    def twin() -> Rounds:
        w = case.mean({i: np.linalg.solve(h, b) for i, (h, b) in enumerate(each)})
        for who in case.cohorts:
            models = {}
            for i in who:
                (h, b), models[i] = each[i], w
                for _ in range(3):
                    models[i] = models[i] - 0.13 * (h @ models[i] - b)
            w = case.mean(models)
            yield {"w": w}, {}

    compare(
        fd.RidgeFedAvg(fd.Identity(intercept=True), reg=0.37, lr=0.13, steps=3),
        case,
        twin(),
        tolerance=1e-9,
    )


def test_ridge_fedprox(case):
    """(H_j + mu I)^-1 (b_j + mu w), exactly; started with reg alone."""
    each = systems(case, 0.37)

    def twin() -> Rounds:
        w = case.mean({i: np.linalg.solve(h, b) for i, (h, b) in enumerate(each)})
        for who in case.cohorts:
            pulled = {i: each[i][0] + 0.23 * np.eye(FEATURES + 1) for i in who}
            w = case.mean({i: np.linalg.solve(pulled[i], each[i][1] + 0.23 * w) for i in who})
            yield {"w": w}, {}

    compare(
        fd.RidgeFedProx(fd.Identity(intercept=True), reg=0.37, mu=0.23),
        case,
        twin(),
        tolerance=1e-9,
    )


# -- every client alone, and all rows in one place -------------------------------------------------


def in_names(case: Case, memory: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's memory in foedus' form."""
    return {k: v if k == "steps" else case.named(v) for k, v in memory.items()}


def independent(
    case: Case, steps: Any, *, lr: float = 0.13, adam: bool = False, **how: Any
) -> Rounds:
    """Clients go on from their own model and optimizer's memory in the rounds they take part in."""
    own: dict[int, tuple[np.ndarray, dict[str, Any]]] = {}
    for who in case.cohorts:
        for i in who:
            fresh = (
                adam_memory(case.start)
                if adam
                else {"velocity": 0 * case.start}
                if how.get("momentum")
                else {}
            )
            w, memory = own.get(i, (case.start, fresh))
            memory = copy.deepcopy(memory)
            own[i] = (
                train(case.gradient(i), w, lr=lr, steps=steps(i), memory=memory, **how),
                memory,
            )
        yield (
            {},
            {
                i: {"w": case.named(w), "memory": in_names(case, memory)}
                for i, (w, memory) in own.items()
            },
        )


@pytest.mark.parametrize(
    "how", [{}, {"momentum": 0.61, "weight_decay": 0.37}, {"clip": "between"}], ids=str
)
def test_independent(case, how):
    how = filled(case, how)
    compare(fd.Independent(case.model, **FULL, **how), case, independent(case, lambda i: 3, **how))


@pytest.mark.parametrize("how", [{}, {"weight_decay": 0.37, "clip": "between"}], ids=str)
def test_independent_with_adam(case, how):
    """In a round, some clients are in their first steps and some are not: unequal t."""
    how = filled(case, how)
    algorithm = fd.Independent(case.model, optimizer="adam", lr=0.13, epochs=3, batch_size=7, **how)
    compare(algorithm, case, independent(case, lambda i: 3, adam=True, **how))


def test_independent_with_adam_where_clients_make_more_steps_than_others():
    """1 - 0.999^t in single precision is off by 3e-5 at t = 2; it is made in double precision."""
    case, steps = copies(), (2, 8, 4, 6, 4)
    algorithm = fd.Independent(case.model, optimizer="adam", lr=0.019, epochs=2, batch_size=2)
    compare(algorithm, case, independent(case, lambda i: steps[i], lr=0.019, adam=True))


@pytest.mark.parametrize(
    "how", [{}, {"momentum": 0.61, "weight_decay": 0.37}, {"adam": True}], ids=str
)
def test_central(case, how):
    """All rows in one place in every round, whatever the participation; the memory is kept."""
    adam = how.get("adam", False)
    options = {k: v for k, v in how.items() if k != "adam"}

    def twin() -> Rounds:
        w = case.start
        memory = adam_memory(w) if adam else {"velocity": 0 * w} if "momentum" in how else {}
        for _ in case.cohorts:
            w = train(
                lambda v: case.gradient_on(*case.pooled(), v),
                w,
                lr=0.13,
                steps=3,
                memory=memory,
                **options,
            )
            kept = in_names(case, memory)
            yield {"w": case.named(w)}, {0: kept} if kept else {}

    optimizer = "adam" if adam else "sgd"
    compare(fd.Central(case.model, **FULL, optimizer=optimizer, **options), case, twin())
