"""Families whose replies only make sense next to an old broadcast, with messages that are late:
against loops written out here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.base import random
from tests.algorithms.test_ffgb import Table

UP, DOWN = [0, 2, 1], [1, 0, 2]


def arrivals(rounds: int, asks=lambda t: True):
    """(t, [(i, s, v), ...]): in round t the server takes client i's reply of round s, made from the
    broadcast of round v.

    In a round in which nobody is asked, replies wait.
    """
    waiting = []
    for t in range(1, rounds + 1):
        if not asks(t):
            yield t, []
            continue
        sent = [r for r in range(1, t + 1) if asks(r)]
        for i, (up, down) in enumerate(zip(UP, DOWN, strict=True)):
            waiting.append((t + up, i, t, max([r for r in sent if r <= t - down], default=sent[0])))
        yield t, [rest for at, *rest in waiting if at <= t]
        waiting = [entry for entry in waiting if entry[0] > t]


@pytest.mark.parametrize("variant", ["penalty", "augmented"])
def test_fedfw(variant):
    """Least squares in one unknown on [-2, 2]: f_i(x) = (a_i x - y_i)^2 with one row each."""
    a, y, n, penalty = np.array([1.0, 2.0, 0.5]), np.array([1.0, -3.0, 2.0]), 3, 0.3
    clients = [(np.array([[a[i]]], np.float32), np.array([y[i]], np.float32)) for i in range(n)]
    algorithm = fd.FedFW(fd.Linear(bias=False), fd.LInfBall(2.0), variant=variant, penalty=penalty)
    result = fd.run(
        algorithm,
        fd.Federation.from_clients(clients),
        9,
        engine=fd.Delayed(up=UP, down=DOWN),
        evaluate_every=0,
    )

    eta, pull = (lambda t: 2 / (t + 1)), (lambda t: penalty * np.sqrt(t + 1))
    scale = _slope_scale()
    x, dual, seen = np.zeros(n), np.zeros(n), np.zeros(n)  # seen: the x_i as the server knows them
    centers, points = {1: 0.0}, {}
    for t, here in arrivals(9):
        for i in range(n):
            v = max(t - DOWN[i], 1)
            apart = x[i] - centers[v]
            g = scale * a[i] * (a[i] * x[i] - y[i]) / n + pull(v) * apart
            if variant == "augmented":
                dual[i] += penalty * apart
                g += dual[i]
            s = -2.0 if g > 0 else 2.0
            x[i] += eta(v) * (s - x[i])
            points[i, t] = s, eta(v)
        for i, s, _ in here:
            point, step = points[i, s]
            seen[i] += step * (point - seen[i])
        centers[t + 1] = seen.mean()
    torch.testing.assert_close(
        result.state.center["weight"].flatten(), torch.tensor([centers[10]], dtype=torch.float32)
    )
    states = result.clients["states"]["states"]["x"]["weight"].flatten()
    torch.testing.assert_close(states, torch.tensor(x, dtype=torch.float32))


def _slope_scale() -> float:
    """The squared loss is |f - y|^2 or half of it: asked, not assumed."""
    from foedus.models.losses import loss_for

    return float(
        loss_for("squared", None).slope(torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.ones(1))
    )


@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_ffgb(participation):
    """All clients have the same two inputs; the oracle is exact, so that a function is a gradient:
    two numbers.
    """
    y = np.array([[1.0, 2.0], [-1.0, 0.5], [3.0, 0.0]])
    clients = [(np.array([[0.0], [1.0]], np.float32), y[i].astype(np.float32)) for i in range(3)]
    algorithm = fd.FFGB(Table(), loss="squared", step="theorem4.3", mu=0.5, local_steps=2)
    fed = fd.Federation.from_clients(clients)
    engine = fd.Delayed(up=UP, down=DOWN)
    result = fd.run(algorithm, fed, 8, engine=engine, participation=participation, evaluate_every=0)

    cohorts = {t: _cohort(participation, t) for t in range(1, 9)}
    f, made = {1: np.zeros(2)}, {}
    scale = _slope_scale()
    for t in range(1, 9):
        here = []
        for i in range(3):
            v = max(t - DOWN[i], 1)
            if i in cohorts[t]:
                g, hs = f[v], []
                for k in (1, 2):
                    eta = 2 / (0.5 * ((v - 1) * 2 + k + 1))
                    h = scale * (g - y[i])
                    g = g - eta * (h + 0.5 * g)
                    hs.append(h)
                made[i, t] = hs, v
            if (i, t - UP[i]) in made:
                here.append(made[i, t - UP[i]])
        g = np.zeros(2)
        # the steps of the round that the functions were made for, on f as it is now
        for hs, v in here:
            now = f[t]
            for k, h in enumerate(hs, 1):
                eta = 2 / (0.5 * ((v - 1) * 2 + k + 1))
                now = now - eta * (h + 0.5 * now)
            g = g + now / len(here)
        f[t + 1] = g if here else f[t]
    got = algorithm.predictor(result.state).outputs(np.array([[0.0], [1.0]], np.float32))
    np.testing.assert_allclose(got.flatten(), f[9], rtol=1e-4, atol=1e-5)


def _cohort(participation: float, t: int) -> list[int]:
    from foedus.core.loop import _COHORT
    from foedus.core.participation import cohort

    return cohort(participation, 3, random.fold(random.key(0), t, _COHORT)).tolist()


@pytest.mark.parametrize("agnostic", [False, True], ids=["FedBoost", "AFLBoost"])
def test_fedboost(agnostic):
    """Three densities over four symbols, two of which are sent on average; three clients with
    symbols of their own.
    """
    table = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6]])
    labels = [np.array([0, 0, 1]), np.array([1, 2]), np.array([3, 3, 3, 2])]
    clients = [(np.zeros((len(v), 1), np.float32), v) for v in labels]
    fed = fd.Federation.from_clients(clients, classes=4)
    base = {"budget": 1.2, "sampling": "uniform", "step": 0.3, "average": False}
    kind = fd.AFLBoost if agnostic else fd.FedBoost
    more = {"step_domains": 0.2} if agnostic else {}
    algorithm = kind(fd.Densities(torch.tensor(table, dtype=torch.float32)), **base, **more)
    result = fd.run(algorithm, fed, 12, engine=fd.Delayed(up=UP, down=DOWN), evaluate_every=0)

    gamma, key = 0.4, random.key(0)
    server = lambda t: random.fold(random.fold(key, t, 0xFFFFFFFF), 1)  # noqa: E731
    sent = {t: (random.uniform(server(t), 3, torch.float64).numpy() < gamma) for t in range(1, 13)}
    rows = np.array([3, 2, 4])
    alpha, lam = {1: np.full(3, 1 / 3)}, np.full(3, 1 / 3)
    for t, here in arrivals(12, lambda r: bool(sent[r].any())):
        alpha[t + 1] = alpha[t]
        if not here:
            continue
        g, losses, total = np.zeros(3), np.zeros(3), sum(rows[i] for i, _, _ in here)
        for i, _, v in here:
            weight = alpha[v] * sent[v] / gamma
            mixed = weight @ table[:, labels[i]] + 1e-6
            slope = -(table[:, labels[i]] / mixed).mean(1) * sent[v] / gamma
            times = sum(j == i for j, _, _ in here)
            g += (lam[i] / times if agnostic else rows[i] / total) * slope
            losses[i] += -np.log(mixed).mean() / times
        new = alpha[t] * np.exp(-0.3 * g)
        alpha[t + 1] = new / new.sum()
        if agnostic:
            lam = lam * np.exp(0.2 * losses)
            lam = lam / lam.sum()
    assert any(not s.any() for s in sent.values()) and any(s.sum() == 1 for s in sent.values())
    np.testing.assert_allclose(result.state.alpha, alpha[13], rtol=1e-4)
    if agnostic:
        np.testing.assert_allclose(result.state.lam, lam, rtol=1e-4)
