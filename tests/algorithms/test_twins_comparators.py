"""Server optimizers, FedNova and personal methods against NumPy twins: see
`tests.algorithms.twins`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foedus as fd
from tests.algorithms.twins import Case, Rounds, classes, compare, copies, train, values

pytestmark = pytest.mark.usefixtures("compiled_or_not")

FULL = {"lr": 0.13, "steps": 3, "batch_size": None}
"""Full gradients: no permutation of rows makes a difference."""


@pytest.fixture(scope="module", params=[values, classes], ids=["values", "classes"])
def case(request) -> Case:
    return request.param()


def moves(case: Case, who: list[int], w: np.ndarray, **how: Any) -> dict[int, np.ndarray]:
    return {i: train(case.gradient(i), w, lr=0.13, steps=3, **how) - w for i in who}


# -- server optimizers -----------------------------------------------------------------------------

SECOND = {
    fd.FedAdam: lambda v, d: 0.83 * v + 0.17 * d**2,
    fd.FedYogi: lambda v, d: v - 0.17 * d**2 * np.sign(v - d**2),
    fd.FedAdagrad: lambda v, d: v + d**2,
}


@pytest.mark.parametrize("weights", ["rows", "uniform"])
@pytest.mark.parametrize("kind", SECOND, ids=lambda k: k.__name__)
def test_server_optimizers(case, kind, weights):
    """Reddi et al., Algorithm 2, with v_{-1} = tau^2."""

    def twin() -> Rounds:
        w, m, v = case.start, np.zeros_like(case.start), np.full_like(case.start, 0.07**2)
        for who in case.cohorts:
            d = case.mean(moves(case, who, w, weight_decay=0.19), weights)
            m, v = 0.37 * m + 0.63 * d, SECOND[kind](v, d)
            w = w + 0.29 * m / (np.sqrt(v) + 0.07)
            yield {"w": case.named(w), "m": case.named(m), "v": case.named(v)}, {}

    how = {"server_lr": 0.29, "tau": 0.07, "beta1": 0.37, "weight_decay": 0.19, "weights": weights}
    how |= {} if kind is fd.FedAdagrad else {"beta2": 0.83}
    compare(kind(case.model, **FULL, **how), case, twin())


def test_yogi_moves_both_ways(case):
    """Otherwise its twin does not see the sign."""
    d = case.mean(moves(case, case.cohorts[0], case.start))
    assert (d**2 > 0.07**2).any() and (d**2 < 0.07**2).any()


# -- FedNova ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["rows", "uniform"])
@pytest.mark.parametrize("rho", [0.0, 0.61])
def test_fednova(rho, weights):
    """Two epochs of ceil(n / 2) batches make tau_i = 2, 8, 4, 6 and 4 steps."""
    case, tau = copies(), (2, 8, 4, 6, 4)
    a = [sum(rho**j for k in range(t) for j in range(t - k)) for t in tau]

    def twin() -> Rounds:
        w = case.start
        for who in case.cohorts:
            d = {
                i: (train(case.gradient(i), w, lr=0.13, steps=tau[i], momentum=rho) - w) / a[i]
                for i in who
            }
            scale = case.weights(who, weights) @ np.array([a[i] for i in who])
            w = w + 0.7 * scale * case.mean(d, weights)
            yield {"w": case.named(w)}, {}

    how = {"momentum": rho, "weights": weights, "server_lr": 0.7}
    compare(fd.FedNova(case.model, lr=0.13, epochs=2, batch_size=2, **how), case, twin())


# -- own models ------------------------------------------------------------------------------------

SERVER = {"server_lr": 0.7, "server_momentum": 0.53}


def own(case: Case, models: dict[int, np.ndarray]) -> dict[int, Any]:
    return {i: {"w": case.named(v)} for i, v in models.items()}


@pytest.mark.parametrize("how", [{}, {"own_lr": 0.07, "own_steps": 5}], ids=str)
def test_finetuned(case, how):
    lr, steps = how.get("own_lr", 0.13), how.get("own_steps", 3)

    def twin() -> Rounds:
        w, v, models = case.start, np.zeros_like(case.start), {}
        for who in case.cohorts:
            for i in who:
                models[i] = train(case.gradient(i), w, lr=lr, steps=steps, weight_decay=0.19)
            v = 0.53 * v + case.mean(moves(case, who, w, weight_decay=0.19))
            w = w + 0.7 * v
            yield {"w": case.named(w), "v": case.named(v)}, own(case, models)

    algorithm = fd.FineTuned(case.model, weight_decay=0.19, **FULL, **SERVER, **how)
    compare(algorithm, case, twin())


@pytest.mark.parametrize("how", [{}, {"own_lr": 0.07, "own_steps": 5}], ids=str)
@pytest.mark.parametrize("weights", ["rows", "uniform"])
def test_ditto(case, how, weights):
    """v_i <- v_i - eta (g_i(v_i) + lam (v_i - w)), by its definition."""
    lr, steps = how.get("own_lr", 0.13), how.get("own_steps", 3)

    def twin() -> Rounds:
        w, models = case.start, {}
        for who in case.cohorts:
            for i in who:
                u = models.get(i, case.start)
                for _ in range(steps):
                    u = u - lr * (case.gradient(i)(u) + 0.37 * (u - w))
                models[i] = u
            w = w + 0.7 * case.mean(moves(case, who, w), weights)
            yield {"w": case.named(w)}, own(case, models)

    algorithm = fd.Ditto(case.model, lam=0.37, server_lr=0.7, weights=weights, **FULL, **how)
    compare(algorithm, case, twin())


def body(case: Case) -> np.ndarray:
    """1 where a parameter is a weight, which is shared; 0 where it is a bias."""
    return (np.arange(len(case.start)) < case.outputs * case.features).astype(float)


@pytest.mark.parametrize("how", [{}, {"momentum": 0.61, "weight_decay": 0.19}], ids=str)
def test_fedper(case, how):
    shared = body(case)

    def twin() -> Rounds:
        w, models = case.start, {}
        for who in case.cohorts:
            for i in who:
                start = shared * w + (1 - shared) * models.get(i, case.start)
                models[i] = train(case.gradient(i), start, lr=0.13, steps=3, **how)
            w = w + 0.7 * shared * case.mean({i: models[i] - w for i in who})
            yield {"w": {"weight": case.named(w)["weight"]}}, own(case, models)

    compare(fd.FedPer(case.model, shared="w*", server_lr=0.7, **FULL, **how), case, twin())


@pytest.mark.parametrize(
    "how", [{}, {"weight_decay": 0.19}, {"momentum": 0.61, "weight_decay": 0.19, "clip": 0.31}],
    ids=str,
)  # fmt: skip
def test_fedrep(case, how):
    """The gradient of what is fixed is neither clipped nor decayed nor kept."""
    shared = body(case)

    def fit(i: int, start: np.ndarray, which: np.ndarray, lr: float, steps: int) -> np.ndarray:
        decay = which * how.get("weight_decay", 0.0)
        more = {k: v for k, v in how.items() if k != "weight_decay"}
        slope = lambda v: which * case.gradient(i)(v)  # noqa: E731
        return train(slope, start, lr=lr, steps=steps, weight_decay=decay, **more)

    def twin() -> Rounds:
        w, models = case.start, {}
        for who in case.cohorts:
            bodies = {}
            for i in who:
                start = shared * w + (1 - shared) * models.get(i, case.start)
                models[i] = fit(i, start, 1 - shared, 0.07, 5)
                bodies[i] = fit(i, models[i], shared, 0.13, 3)
            w = w + 0.7 * shared * case.mean({i: bodies[i] - w for i in who})
            yield {"w": {"weight": case.named(w)["weight"]}}, own(case, models)

    own_how = {"own_lr": 0.07, "own_steps": 5, "shared": "weight", "server_lr": 0.7}
    compare(fd.FedRep(case.model, **own_how, **FULL, **how), case, twin())
