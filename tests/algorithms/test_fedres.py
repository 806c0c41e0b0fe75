"""FedRes: rounds by hand, against NumPy straight from the paper, Example 2, Appendix C, rollouts,
and bad input.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foedus as fd
from foedus import wire
from foedus.algorithms.fedres.erm import least_squares
from foedus.algorithms.fedres.step import in_range
from foedus.base import tree

PLAIN = fd.Linear(bias=False)
RULES = ("aligned", "asymmetric", "misaligned")
UP, DOWN = [0, 2, 1], [1, 0, 3]  # round trips 1, 2, 4


# -- the paper in NumPy ----------------------------------------------------------------------------


def descend(w, g, squares, t, eta, schedule, radius):
    """One step in round t, and the projection; `squares` is added to in place."""
    if schedule == "adagrad":
        squares += g * g
        w = w - eta * g / np.sqrt(np.where(squares > 0, squares, 1))
    else:
        w = w - eta * g / (math.sqrt(t) if schedule == "sqrt" else 1)
    norm = np.linalg.norm(w)
    return w * radius / norm if radius is not None and norm > radius else w


def loss_of(loss, z, y):
    return np.sum((y - z) ** 2 if loss == "squared" else np.log1p(np.exp(-y * z)), 1)


def slope_of(loss, z, y):
    return -2 * (y - z) if loss == "squared" else -y / (1 + np.exp(y * z))


def reference(
    parts, rounds, up=0, down=0, rule="aligned", step=0.1, local_step=None, schedule="constant",
    batch_size=1, radius=None, loss="squared", start_global=None, start_local=None,
    learn_global=True, learn_local=True,
):  # fmt: skip
    """(7), (8) and Section 3.2.1 with every model of every round kept.

    parts: (global features, local features, targets) of each client. Returns G[t], L[i][t] for t =
    1 .. rounds + 1, and the losses (rounds, clients) of the predictions.
    """
    P = len(parts)
    up, down = (list(d) if np.ndim(d) else [d] * P for d in (up, down))
    m, b = parts[0][2].shape[1], batch_size
    G = {1: np.zeros((m, parts[0][0].shape[1])) if start_global is None else start_global}
    L = [{1: np.zeros((m, p[1].shape[1])) if start_local is None else start_local} for p in parts]
    squares_g, squares_l = np.zeros_like(G[1]), [np.zeros_like(v[1]) for v in L]
    losses = np.zeros((rounds, P))

    def rows(i, t):
        at = [((t - 1) * b + k) % len(parts[i][2]) for k in range(b)]
        return (a[at] for a in parts[i])

    def gradients(i, t, w, w_l):
        x_g, x_l, y = rows(i, t)
        s = slope_of(loss, x_g @ w.T + x_l @ w_l.T, y) / b
        return s.T @ x_g, s.T @ x_l

    def predicted(i, t):
        """The pair that client i predicted with in round t."""
        return G[max(t - down[i], 1)], L[i][t]

    for t in range(1, rounds + 1):
        for i in range(P):
            w, w_l = predicted(i, t)
            x_g, x_l, y = rows(i, t)
            losses[t - 1, i] = loss_of(loss, x_g @ w.T + x_l @ w_l.T, y).mean()
            s = t - up[i] - down[i] if rule == "aligned" and learn_global else t
            L[i][t + 1] = w_l
            if s >= 1 and learn_local:
                g = gradients(i, s, *predicted(i, s))[1]
                L[i][t + 1] = descend(w_l, g, squares_l[i], t, local_step or step, schedule, radius)
        total = None
        for i in range(P):
            s = t - up[i]
            if s >= 1:
                pair = (G[t], L[i][s]) if rule == "misaligned" else predicted(i, s)
                g = gradients(i, s, *pair)[0]
                total = g if total is None else total + g
        G[t + 1] = G[t]
        if total is not None and learn_global:
            G[t + 1] = descend(G[t], total, squares_g, t, step, schedule, radius)
    return G, L, losses


def online(losses):
    """The history's `online_loss`: the average over clients and rounds so far."""
    return losses.mean(1).cumsum() / np.arange(1, len(losses) + 1)


def erm_reference(
    parts,
    rounds,
    up=0,
    down=0,
    play=False,
    batch_size=1,
    start_global=None,
    start_local=None,
    fit=None,
):
    """(2), (3), or with `play` (5), (6): everything fitted again from all rows in every round."""
    P = len(parts)
    up, down = (list(d) if np.ndim(d) else [d] * P for d in (up, down))
    fit = fit or (lambda x, y: np.linalg.lstsq(x, y, rcond=None)[0])
    m, b = parts[0][2].shape[1], batch_size
    G = {1: np.zeros((parts[0][0].shape[1], m)) if start_global is None else start_global}
    L = [{1: np.zeros((p[1].shape[1], m)) if start_local is None else start_local} for p in parts]
    losses = np.zeros((rounds, P))

    def first(i, s):
        """All rows of rounds 1 .. s, and the round of each."""
        at = [k % len(parts[i][2]) for k in range(s * b)]
        return [a[at] for a in parts[i]], np.repeat(np.arange(1, s + 1), b)

    def said(x, when, models):
        """What the model of its own round said of each row."""
        return np.stack([row @ models(s) for row, s in zip(x, when, strict=True)])

    for t in range(1, rounds + 1):
        for i in range(P):
            w = G[max(t - down[i], 1)]
            if t > 1:
                (x_g, x_l, y), when = first(i, t - 1)
                others = said(x_g, when, lambda s, i=i: G[max(s - down[i], 1)]) if play else x_g @ w
                L[i][t] = fit(x_l, y - others)
            (x_g, x_l, y), _ = first(i, t)
            losses[t - 1, i] = loss_of("squared", x_g @ w + x_l @ L[i][t], y)[-b:].mean()
        X, R = [], []
        for i in range(P):
            s = t - up[i]
            if s >= 1:
                (x_g, x_l, y), when = first(i, s)
                X.append(x_g)
                R.append(y - (said(x_l, when, L[i].get) if play else x_l @ L[i][s]))
        G[t + 1] = fit(np.concatenate(X), np.concatenate(R)) if X else G[t]
    return G, L, losses


# -- data, and what a run ends with ----------------------------------------------------------------


def sites(seed=0, sizes=(5, 7, 4), features=5, classes=None):
    """Rows of each client; fewer than there are rounds, so that they come again."""
    rng = np.random.default_rng(seed)
    result = []
    for n in sizes:
        x = rng.normal(size=(n, features)).astype(np.float32)
        y = (
            rng.normal(size=n).astype(np.float32)
            if classes is None
            else rng.integers(classes, size=n)
        )
        result.append((x, y))
    return result


def parts_of(data, shared, private, classes=None, bias=False):
    """Global features, local features and targets, in double precision; a bias is a feature that is
    1.
    """
    result = []
    for x, y in data:
        x = x.astype(float)
        one = np.ones((len(x), 1 if bias else 0))
        if classes == 2:
            y = (2.0 * y - 1)[:, None]
        elif classes:
            y = 2.0 * np.eye(classes)[y] - 1
        else:
            y = y.astype(float)[:, None]
        result.append((np.hstack([x[:, shared], one]), np.hstack([x[:, private], one]), y))
    return result


def federation(data, classes=None):
    return fd.Federation.from_clients(data, classes=classes)


def flat(params):
    """(..., outputs, features), with the bias as the last feature."""
    parts = [params["weight"].numpy()]
    if "bias" in params:
        parts.append(params["bias"].numpy()[..., None])
    return np.concatenate(parts, -1)


def kept(result, client):
    """What a client (by position in order of id) remembers."""
    states = result.clients["states"]
    if "separate" in states:
        return states["separate"][str(client)]
    slot = int(states["slot"][client])
    return tree.map(lambda t: t[slot], states["states"])


def go(algorithm, fed, rounds, up=None, down=0, **options):
    engine = {} if up is None else {"engine": fd.Delayed(up=up, down=down)}
    return fd.run(algorithm, fed, rounds, **{"evaluate_every": 0, **engine, **options})


def agrees(result, G, L, losses, rounds, tolerance=2e-5):
    """Server, clients and history are those of a reference."""
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(flat(result.state.w), G[rounds + 1], **close)
    for i, models in enumerate(L):
        np.testing.assert_allclose(flat(kept(result, i)["local"]), models[rounds + 1], **close)
    np.testing.assert_allclose(result.history.online_loss[1:], online(losses), **close)


# -- by hand ---------------------------------------------------------------------------------------


def test_rounds_by_hand():
    """Rows (x^g, x^l, y): A has (1, 1, 1), (1, 2, 2), B has (2, 1, 3), (1, -1, 1), in turn. up =
    down = 1, eta 0.05, eta_i 0.1.

    With r = f - y the loss is r^2 and the gradients are 2 r x^g and 2 r x^l. Round 1, all models 0:
    A: r = -1, gradients (-2, -2); B: r = -3, (-12, -6). Nothing arrives: w2 = 0. Round 2, all
    models 0: A: r = -2, (-4, -8); B: r = -1, (-2, 2). Of round 1 arrives -14: w3 = 0.05 * 14 = 0.7.
    Round 3, with w2 = 0: as round 1. Of round 2 arrives -6: w4 = 0.7 + 0.3 = 1. Clients learn from
    round 1: A 0.2, B 0.6. Round 4, with w3 = 0.7: A: f = 0.7 + 0.4, r = -0.9, (-1.8, -3.6); B: f =
    0.7 - 0.6, r = -0.9, (-1.8, 1.8).
      Of round 3 arrives -14: w5 = 1.7. Clients learn from round 2: A 0.2 + 0.8 = 1, B 0.6 - 0.2 =
      0.4.
    Round 5, with w4 = 1: A: f = 2, r = 1; B: f = 2.4, r = -0.6.
      Of round 4 arrives -3.6: w6 = 1.88. Clients learn from round 3: A 1.2, B 1.
    """
    data = [([[1, 1], [1, 2]], [1, 2]), ([[2, 1], [1, -1]], [3, 1])]
    data = [(np.array(x, np.float32), np.array(y, np.float32)) for x, y in data]
    options = {"schedule": "constant", "step": 0.05, "local_step": 0.1}
    algorithm = fd.FedRes(PLAIN, PLAIN, shared=(0,), private=(1,), **options)
    losses = [[1, 9], [4, 1], [1, 9], [0.81, 0.81], [1, 0.36]]
    server, clients = (
        {1: 0, 2: 0, 3: 0.7, 4: 1, 5: 1.7, 6: 1.88},
        {4: (0.2, 0.6), 5: (1, 0.4), 6: (1.2, 1)},
    )
    for rounds in (1, 2, 3, 4, 5):
        result = go(algorithm, federation(data), rounds, up=1, down=1)
        assert float(result.state.w["weight"]) == pytest.approx(server[rounds + 1], abs=1e-6)
        found = [float(kept(result, i)["local"]["weight"]) for i in (0, 1)]
        assert found == pytest.approx(clients.get(rounds + 1, (0, 0)), abs=1e-6)
        assert result.history.online_loss.iloc[-1] == pytest.approx(np.mean(losses[:rounds]))
    # (1 + 4 + 1 + 9 + 1 + 9) / 6, and with 0.81, 0.81, 1 and 0.36 more / 10.
    assert result.history.online_loss.tolist()[3:] == pytest.approx([25 / 6, 26.62 / 8, 27.98 / 10])
    # The reference below is held to the same numbers.
    G, L, found = reference(parts_of(data, [0], [1]), 5, 1, 1, **options)
    assert [G[t].item() for t in range(1, 7)] == pytest.approx(list(server.values()))
    assert [L[i][6].item() for i in (0, 1)] == pytest.approx([1.2, 1])
    np.testing.assert_allclose(found, losses)


# -- against the reference -------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("schedule", ["constant", "sqrt", "adagrad"])
@pytest.mark.parametrize("rule", RULES)
def test_unequal_delays(rule, schedule, batch_size):
    data, shared, private, rounds = sites(), (0, 3), (1, 2, 4), 12
    options = {
        "rule": rule,
        "schedule": schedule,
        "batch_size": batch_size,
        "step": 0.07,
        "local_step": 0.11,
    }
    found = go(
        fd.FedRes(PLAIN, PLAIN, shared=shared, private=private, **options),
        federation(data),
        rounds,
        UP,
        DOWN,
    )
    agrees(found, *reference(parts_of(data, shared, private), rounds, UP, DOWN, **options), rounds)


@pytest.mark.parametrize("rule", RULES)
def test_equal_delays(rule):
    data, rounds = sites(1), 12
    options = {"rule": rule, "step": 0.05, "local_step": 0.1}
    algorithm = fd.FedRes(
        PLAIN, PLAIN, shared=(0, 3), private=(1, 2), schedule="constant", **options
    )
    found = go(algorithm, federation(data), rounds, 1, 1)
    agrees(found, *reference(parts_of(data, (0, 3), (1, 2)), rounds, 1, 1, **options), rounds)


@pytest.mark.parametrize("schedule", ["constant", "adagrad"])
@pytest.mark.parametrize("rule", RULES)
def test_the_ball(rule, schedule):
    """A radius that binds for the server and for clients; the bias is inside."""
    data, rounds = sites(2), 12
    options = {"rule": rule, "schedule": schedule, "step": 0.2, "radius": 0.3}
    parts = parts_of(data, (0, 3), (1, 2, 4), bias=True)
    G, L, losses = reference(parts, rounds, UP, DOWN, **options)
    bound = lambda models: any(np.linalg.norm(w) == pytest.approx(0.3) for w in models.values())  # noqa: E731
    assert bound(G) and any(bound(models) for models in L)
    result = go(
        fd.FedRes(shared=(0, 3), private=(1, 2, 4), **options), federation(data), rounds, UP, DOWN
    )
    agrees(result, G, L, losses, rounds)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("classes", "loss", "batch_size"),
    [(2, "logistic", 1), (2, "logistic", 2), (3, "logistic", 2), (3, "squared", 1)],
)
def test_labels(classes, loss, batch_size, rule):
    """Labels are +-1, one output for two classes and one for each class of three."""
    data, rounds = sites(3, classes=classes), 12
    options = {
        "rule": rule,
        "loss": loss,
        "batch_size": batch_size,
        "step": 0.3,
        "local_step": 0.2,
        "schedule": "sqrt",
    }
    found = go(
        fd.FedRes(shared=(0, 3), private=(1, 2), **options),
        federation(data, classes),
        rounds,
        UP,
        DOWN,
    )
    parts = parts_of(data, (0, 3), (1, 2), classes, bias=True)
    assert parts[0][2].shape[1] == (1 if classes == 2 else 3)
    agrees(found, *reference(parts, rounds, UP, DOWN, **options), rounds)


def test_delays_belong_to_clients_by_id():
    """The order of clients in the federation does not matter."""
    data, rounds = sites(4), 12
    fed = federation(data).select([2, 0, 1])
    found = go(fd.FedRes(PLAIN, PLAIN, shared=(0, 3), private=(1, 2)), fed, rounds, UP, DOWN)
    agrees(
        found,
        *reference(parts_of(data, (0, 3), (1, 2)), rounds, UP, DOWN, schedule="adagrad"),
        rounds,
    )


def test_clients_one_after_the_other():
    data, rounds = sites(5), 12
    engine = fd.Delayed(fd.Local(batch=False), up=UP, down=DOWN)
    found = go(fd.FedRes(shared=(0, 3), private=(1, 2)), federation(data), rounds, engine=engine)
    agrees(
        found,
        *reference(parts_of(data, (0, 3), (1, 2), bias=True), rounds, UP, DOWN, schedule="adagrad"),
        rounds,
    )


def test_all_columns_for_both_models():
    data, rounds = sites(6, features=3), 6
    found = go(fd.FedRes(schedule="constant"), federation(data), rounds, UP, DOWN)
    everything = (0, 1, 2)
    agrees(
        found,
        *reference(parts_of(data, everything, everything, bias=True), rounds, UP, DOWN),
        rounds,
    )


def test_measure_every():
    data = sites(7)
    whole = go(
        fd.FedRes(PLAIN, PLAIN, shared=(0,), private=(1,)), federation(data), 6
    ).history.online_loss
    some = go(
        fd.FedRes(PLAIN, PLAIN, shared=(0,), private=(1,), measure_every=3), federation(data), 6
    ).history.online_loss
    assert [i for i in range(7) if not math.isnan(some[i])] == [3, 6]
    losses = reference(parts_of(data, [0], [1]), 6, schedule="adagrad")[2]
    assert some[[3, 6]].tolist() == pytest.approx(online(losses)[[2, 5]])
    assert whole[1:].tolist() == pytest.approx(online(losses))
    assert "online_loss" not in go(fd.FedRes(measure_every=0), federation(data), 2).history


# -- what must be the same -------------------------------------------------------------------------


def test_rules_coincide_without_delay():
    data = sites(8)
    results = [
        go(fd.FedRes(shared=(0, 3), private=(1, 2), rule=rule), federation(data), 12, up, 0)
        for rule in RULES
        for up in (None, 0)
    ]
    first = results[0]
    assert first.state.w["weight"].abs().min() > 0
    for r in results[1:]:
        assert all(torch.equal(r.state.w[k], first.state.w[k]) for k in ("weight", "bias"))
        assert r.history.online_loss.equals(first.history.online_loss)
        for i in range(3):
            assert np.array_equal(flat(kept(r, i)["local"]), flat(kept(first, i)["local"]))
    agrees(first, *reference(parts_of(data, (0, 3), (1, 2), bias=True), 12, schedule="adagrad"), 12)


def test_rules_differ_under_delay():
    data = sites(8)
    ends = [
        go(fd.FedRes(shared=(0, 3), private=(1, 2), rule=r), federation(data), 12, UP, DOWN).state.w
        for r in RULES
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (ends[a]["weight"] - ends[b]["weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("rule", ["aligned", "asymmetric"])
@pytest.mark.parametrize("delays", [(None, 0), (UP, DOWN), (1, 2)])
def test_gradients_are_the_same_as_rows(rule, delays):
    data = sites(9, classes=2)
    options = {
        "shared": (0, 3),
        "private": (1, 2),
        "loss": "logistic",
        "batch_size": 2,
        "rule": rule,
    }
    rows, gradient = (
        go(fd.FedRes(**options, send=s), federation(data, 2), 12, *delays)
        for s in ("rows", "gradient")
    )
    np.testing.assert_allclose(flat(gradient.state.w), flat(rows.state.w), atol=1e-6)
    np.testing.assert_allclose(gradient.history.online_loss, rows.history.online_loss, atol=1e-6)
    for i in range(3):
        np.testing.assert_allclose(
            flat(kept(gradient, i)["local"]), flat(kept(rows, i)["local"]), atol=1e-6
        )
    up, down = (0 if d is None else d for d in delays)
    parts = parts_of(data, (0, 3), (1, 2), 2, bias=True)
    options = {"loss": "logistic", "batch_size": 2, "rule": rule, "schedule": "adagrad"}
    agrees(gradient, *reference(parts, 12, up, down, **options), 12)


def test_gradients_are_the_same_as_rows_when_nobody_takes_part_for_a_while():
    fed, options = federation(sites(9, sizes=(4, 5))), {"shared": (0, 3), "private": (1, 2)}
    rows, gradient = (
        go(fd.FedRes(**options, send=send), fed, 15, 1, 1, participation=fd.Poisson(0.3))
        for send in ("rows", "gradient")
    )
    np.testing.assert_allclose(flat(gradient.state.w), flat(rows.state.w), atol=1e-6)


@pytest.mark.parametrize("kind", [fd.FedRes, fd.FedResERM])
def test_the_online_loss_is_of_those_who_have_predicted(kind):
    """One of three clients predicts 0 for y = 1."""
    fed = federation([(np.ones((1, 2), np.float32), np.ones(1, np.float32))] * 3)
    history = go(kind(shared=(0,), private=(1,)), fed, 1, participation=0.34).history
    assert history.clients.iloc[-1] == 1
    assert history.online_loss.iloc[-1] == pytest.approx(1)


# -- Independent and Central -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "delays"),
    [("aligned", (None, 0)), ("aligned", (UP, DOWN)), ("misaligned", (UP, DOWN))],
)
def test_independent_is_sgd_on_all_features_of_each_client(rule, delays):
    """Columns 0, 1, 3, 4 in that order (2 is nobody's); no delay matters, for nothing is sent."""
    data, rounds = sites(10), 12
    algorithm = fd.FedRes(shared=(3, 0), private=(4, 1), local_step=0.2, rule=rule).independent()
    result = go(algorithm, federation(data), rounds, *delays)
    for i, (x, y) in enumerate(data):
        x = np.hstack([x[:, [0, 1, 3, 4]], np.ones((len(x), 1))]).astype(float)
        w, squares, total = np.zeros(5), np.zeros(5), 0.0
        for t in range(rounds):
            row, target = x[t % len(x)], float(y[t % len(y)])
            r = row @ w - target
            total += r * r
            squares += (2 * r * row) ** 2
            w = w - 0.2 * 2 * r * row / np.sqrt(squares)
        np.testing.assert_allclose(flat(kept(result, i)["local"])[0], w, atol=2e-5)
        assert float(kept(result, i)["loss"]) == pytest.approx(total, rel=1e-5)
    assert result.history.bytes_up.iloc[-1] == 0
    assert "w" not in result.state and "seen" not in kept(result, 0)


def test_independent_logs_its_loss():
    data, rounds = sites(10), 6
    result = go(fd.FedRes(shared=(0, 3), private=(1, 4)).independent(), federation(data), rounds)
    parts = parts_of(data, (0, 3), (0, 1, 3, 4), bias=True)
    losses = reference(parts, rounds, schedule="adagrad", learn_global=False)[2]
    np.testing.assert_allclose(result.history.online_loss[1:], online(losses), rtol=1e-5)


def test_independent_logs_its_loss_under_delay():
    data, rounds = sites(10), 6
    result = go(
        fd.FedRes(shared=(0, 3), private=(1, 4)).independent(), federation(data), rounds, 2, 1
    )
    parts = parts_of(data, (0, 3), (0, 1, 3, 4), bias=True)
    losses = reference(parts, rounds, schedule="adagrad", learn_global=False)[2]
    np.testing.assert_allclose(result.history.online_loss[1:], online(losses), rtol=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "adagrad"])
@pytest.mark.parametrize("delays", [(0, 0), (UP, DOWN)])
def test_central_is_sgd_on_the_global_features_of_all(delays, schedule):
    """The server's step in round t is at its own model, with the rows that have come by then."""
    data, rounds = sites(11), 12
    algorithm = fd.FedRes(shared=(0, 3), private=(1, 2), step=0.04, schedule=schedule).central()
    result = go(algorithm, federation(data), rounds, *delays)
    up = delays[0] if delays[0] else [0, 0, 0]
    w, squares = np.zeros(3), np.zeros(3)
    for t in range(rounds):
        g = np.zeros(3)
        for (x, y), late in zip(data, up, strict=True):
            if t >= late:
                row = np.append(x[(t - late) % len(x), [0, 3]].astype(float), 1.0)
                g += 2 * (row @ w - float(y[(t - late) % len(y)])) * row
        squares += g * g
        w = w - 0.04 * (g / np.sqrt(squares) if schedule == "adagrad" else g)
    np.testing.assert_allclose(flat(result.state.w)[0], w, atol=2e-5)
    assert "local" not in kept(result, 0)
    parts = parts_of(data, (0, 3), (1, 2), bias=True)
    losses = reference(
        parts, rounds, *delays, "misaligned", 0.04, schedule=schedule, learn_local=False
    )[2]
    np.testing.assert_allclose(result.history.online_loss[1:], online(losses), rtol=1e-4)


# -- memory ----------------------------------------------------------------------------------------


def test_clients_keep_the_gradients_that_are_needed():
    """The longest round trip is 4: gradients of the last five rounds."""
    data, rounds = sites(12), 13
    options = {"shared": (0, 3), "private": (1, 2, 4), "schedule": "constant", "step": 0.05}
    result = go(fd.FedRes(PLAIN, PLAIN, **options), federation(data), rounds, UP, DOWN)
    assert set(result.state) == {"w", "spec"}  # the versions that replies answer are core's to keep
    assert all(kept(result, i)["waiting"]["weight"].shape == (5, 1, 3) for i in range(3))


@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        ({"rule": "asymmetric"}, False),
        ({"rule": "misaligned"}, False),
        ({"send": "gradient"}, True),
    ],
)
def test_nothing_is_kept_that_is_not_needed(options, gradients):
    result = go(fd.FedRes(**options), federation(sites()), 2, UP, DOWN)
    assert ("waiting" in kept(result, 0)) == gradients


@pytest.mark.parametrize("delays", [(None, 0), (0, 0)])
def test_nothing_is_kept_without_delay(delays):
    result = go(fd.FedRes(), federation(sites()), 2, *delays)
    assert "past" not in result.state and "waiting" not in kept(result, 0)


def test_resuming_with_rows_and_gradients_on_their_way(tmp_path):
    data, path = sites(13), tmp_path / "run.safetensors"
    algorithm, fed = fd.FedRes(PLAIN, PLAIN, shared=(0, 3), private=(1, 2)), federation(data)
    go(algorithm, fed, 5, UP, DOWN, checkpoint=path)
    again = go(algorithm, fed, 12, UP, DOWN, checkpoint=path, resume=True)
    agrees(again, *reference(parts_of(data, (0, 3), (1, 2)), 12, UP, DOWN, schedule="adagrad"), 12)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "delays"), [(2, (None, 0)), (2, (UP, DOWN)), (3, (None, 0)), (None, (UP, DOWN))]
)
def test_bytes_of_rows(classes, delays):
    """A message is two rows of two global features, their labels, and what the local model says of
    them.
    """
    outputs = 3 if classes == 3 else 1
    y = torch.zeros(2, dtype=torch.uint8 if classes else torch.float32)
    message = len(wire.encode({"x": torch.zeros(2, 2), "y": y, "local": torch.zeros(2, outputs)}))
    broadcast = len(
        wire.encode({"w": {"weight": torch.zeros(outputs, 2), "bias": torch.zeros(outputs)}})
    )
    fed = federation(sites(classes=classes), classes)
    history = go(fd.FedRes(shared=(0, 3), private=(1, 2), batch_size=2), fed, 5, *delays).history
    assert history.bytes_up.tolist() == [t * 3 * message for t in range(6)]
    assert history.bytes_down.tolist() == [t * 3 * broadcast for t in range(6)]
    assert history.messages_up.tolist() == [3 * t for t in range(6)]
    central = go(
        fd.FedRes(shared=(0, 3), private=(1, 2), batch_size=2).central(), fed, 5, *delays
    ).history
    assert central.bytes_up.iloc[-1] == 5 * 3 * len(wire.encode({"x": torch.zeros(2, 2), "y": y}))


def test_bytes_of_gradients():
    each = len(wire.encode({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}))
    history = go(
        fd.FedRes(shared=(0, 3), private=(1, 2), send="gradient"), federation(sites()), 5
    ).history
    assert history.bytes_up.iloc[-1] == 5 * 3 * each


# -- Example 2 -------------------------------------------------------------------------------------


def test_example_2():
    """y = (u + v) x at half of the clients, (u - v) x at the others, with the same features for
    both models.

    Clients see the same x in a round, so that +v and -v cancel in the sum: the global model alone
    goes to u, and has the loss (v x)^2 forever.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2)).astype(np.float32)
    u, v = np.array([1.0, -0.5]), np.array([0.6, 0.8])
    data = [(x, (x @ (u + sign * v)).astype(np.float32)) for sign in (1, 1, -1, -1)]
    algorithm = fd.FedRes(PLAIN, PLAIN, schedule="constant", step=0.02, local_step=0.05)
    alone, both = (go(a, federation(data), 150, 1, 1) for a in (algorithm.central(), algorithm))

    def late(result):
        """The average loss of the last 30 rounds, each row once."""
        total = result.history.online_loss * result.history["round"]
        return (total.iloc[-1] - total.iloc[-31]) / 30

    np.testing.assert_allclose(flat(alone.state.w)[0], u, atol=1e-3)
    assert late(alone) == pytest.approx(np.mean((x @ v) ** 2), rel=1e-3)
    assert late(both) < 1e-4
    for i, sign in enumerate((1, 1, -1, -1)):
        total = flat(both.state.w)[0] + flat(kept(both, i)["local"])[0]
        np.testing.assert_allclose(total, u + sign * v, atol=0.02)


# -- Appendix C ------------------------------------------------------------------------------------


class FromOneZero(fd.Linear):
    """Starts at (1, 0)."""

    def init(self, spec, key):
        return {"weight": torch.tensor([[1.0, 0.0]])}


def appendix_c(rounds):
    """Section C.1, with a row for each round."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, rounds))
    x = np.stack([a + rng.normal(0, 0.5, rounds), b, 1 - a, 1 - b], 1)
    return [(x.astype(np.float32), np.ones(rounds, np.float32))]


COLUMNS = {"shared": (0, 1), "private": (2, 3), "measure_every": 0}


def test_appendix_c():
    """Gradients and ERM find (0, 1) from (1, 0); fictitious play is still on its way."""
    rounds, start = 600, FromOneZero(bias=False)
    fed, starts = (
        federation(appendix_c(rounds)),
        {"bias": False, "start_global": (1, 0), "start_local": (1, 0)},
    )
    sgd = go(fd.FedRes(start, start, schedule="constant", step=0.1, **COLUMNS), fed, rounds)
    np.testing.assert_allclose(flat(sgd.state.w)[0], [0, 1], atol=0.01)
    np.testing.assert_allclose(flat(kept(sgd, 0)["local"])[0], [0, 1], atol=0.01)
    erm, play = (
        go(kind(**starts, **COLUMNS), fed, 300) for kind in (fd.FedResERM, fd.FictitiousPlay)
    )
    np.testing.assert_allclose(erm.state.w[:, 0], [0, 1], atol=1e-4)
    np.testing.assert_allclose(kept(erm, 0)["local"][:, 0], [0, 1], atol=1e-4)
    for w in (play.state.w, kept(play, 0)["local"]):
        assert np.linalg.norm(w[:, 0].numpy() - [0, 1]) > 0.3


# -- ERM and fictitious play -----------------------------------------------------------------------


def erm_agrees(result, G, L, losses, rounds, tolerance=1e-6):
    np.testing.assert_allclose(result.state.w, G[rounds + 1], atol=tolerance, rtol=tolerance)
    for i, models in enumerate(L):  # the model that a client predicted with in the last round
        np.testing.assert_allclose(
            kept(result, i)["local"], models[rounds], atol=tolerance, rtol=tolerance
        )
    np.testing.assert_allclose(result.history.online_loss[1:], online(losses), rtol=tolerance)


@pytest.mark.parametrize(
    ("delays", "bias"),
    [
        ((0, 0), True),
        ((1, 1), False),
        ((UP, DOWN), False),
        ((UP, DOWN), True),
        (([2, 3, 2], 0), True),
    ],
)
@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
def test_erm_is_least_squares_from_scratch(kind, delays, bias):
    data, rounds = sites(20, sizes=(9, 14, 6)), 12
    result = go(
        kind(shared=(0, 3), private=(1, 2, 4), bias=bias), federation(data), rounds, *delays
    )
    parts = parts_of(data, (0, 3), (1, 2, 4), bias=bias)
    erm_agrees(
        result, *erm_reference(parts, rounds, *delays, play=kind is fd.FictitiousPlay), rounds
    )


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
def test_erm_of_labels_in_batches(kind, classes):
    data, rounds = sites(21, sizes=(9, 14, 6), classes=classes), 8
    result = go(
        kind(shared=(0, 3), private=(1, 2), batch_size=2),
        federation(data, classes),
        rounds,
        UP,
        DOWN,
    )
    parts = parts_of(data, (0, 3), (1, 2), classes, bias=True)
    found = erm_reference(parts, rounds, UP, DOWN, play=kind is fd.FictitiousPlay, batch_size=2)
    erm_agrees(result, *found, rounds)


@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
def test_erm_from_a_start(kind):
    """With up = 3 the first model is the server's for three rounds."""
    data, rounds = sites(22, sizes=(9, 14)), 7
    algorithm = kind(
        shared=(0, 3), private=(1, 2), bias=False, start_global=(1, 0), start_local=(0.5, -1)
    )
    starts = {"start_global": np.array([[1.0], [0]]), "start_local": np.array([[0.5], [-1]])}
    for n in (2, rounds):
        result = go(algorithm, federation(data), n, 3, 1)
        found = erm_reference(
            parts_of(data, (0, 3), (1, 2)), n, 3, 1, play=kind is fd.FictitiousPlay, **starts
        )
        erm_agrees(result, *found, n)


@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
def test_erm_in_a_ball(kind):
    """Against SciPy's SLSQP, refitted from scratch."""
    radius, rounds, data = 0.4, 5, sites(23, sizes=(9, 8))
    bound = []

    def fit(x, y):
        best = np.linalg.lstsq(x, y, rcond=None)[0]
        if np.linalg.norm(best) <= radius:
            return best
        bound.append(len(x))
        found = scipy.optimize.minimize(
            lambda w: np.sum((x @ w - y[:, 0]) ** 2),
            best[:, 0] * radius / np.linalg.norm(best),
            jac=lambda w: 2 * x.T @ (x @ w - y[:, 0]),
            constraints={
                "type": "ineq",
                "fun": lambda w: radius**2 - w @ w,
                "jac": lambda w: -2 * w,
            },
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        return found.x[:, None]

    parts = parts_of(data, (0, 3), (1, 2, 4))
    found = erm_reference(parts, rounds, 1, 1, play=kind is fd.FictitiousPlay, fit=fit)
    assert len(bound) >= 4
    algorithm = kind(shared=(0, 3), private=(1, 2, 4), bias=False, radius=radius)
    erm_agrees(go(algorithm, federation(data), rounds, 1, 1), *found, rounds, tolerance=1e-4)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 2), st.integers(0, 10**6),
    st.floats(0.02, 3.0), st.booleans(),
)  # fmt: skip
def test_least_squares_in_a_ball(rows, features, outputs, seed, radius, batched):
    """The conditions of Karush, Kuhn and Tucker: (a + mu I) w = c with mu >= 0, and |w| = D where
    mu > 0; also of singular a.
    """
    rng = np.random.default_rng(seed)
    x, y = (
        rng.integers(-3, 4, (rows, features)).astype(float),
        rng.integers(-3, 4, (rows, outputs)).astype(float),
    )
    a, c = x.T @ x, x.T @ y
    free = np.linalg.pinv(x) @ y
    np.testing.assert_allclose(least_squares(torch.tensor(a), torch.tensor(c)), free, atol=1e-8)
    given_a, given_c = torch.tensor(a), torch.tensor(c)
    if batched:  # with a neighbor whose ball does not bind
        given_a, given_c = (
            torch.stack((given_a, torch.eye(features).double())),
            torch.stack((given_c, 0 * given_c)),
        )
    w = least_squares(given_a, given_c, radius).numpy()
    if batched:
        assert not w[1].any()
        w = w[0]
    if np.linalg.norm(free) <= radius * (1 - 1e-9):
        np.testing.assert_allclose(w, free, atol=1e-8)
    else:
        assert np.linalg.norm(w) == pytest.approx(radius, rel=1e-9)
        mu = np.sum((c - a @ w) * w) / radius**2
        assert mu >= -1e-9
        np.testing.assert_allclose(a @ w + mu * w, c, atol=1e-7 * (1 + np.abs(c).max()))


# -- models of other kinds -------------------------------------------------------------------------


def test_local_models_and_columns_of_each_client():
    """Linear models with and without a bias, on one, two and three columns; client 1 learns its
    neighbor's way with its own.
    """
    data, rounds = sites(30), 12
    models = {0: fd.Linear(), 1: PLAIN, 2: fd.Linear()}
    private = {0: (1,), 1: (4, 2), 2: (1, 2, 4)}
    algorithm = fd.FedRes(
        PLAIN, models, shared=(0, 3), private=private, schedule="sqrt", step=0.05, local_step=0.1
    )
    result = go(algorithm, federation(data), rounds, UP, DOWN)
    parts = [parts_of([site], (0, 3), private[i], bias=i != 1)[0] for i, site in enumerate(data)]
    parts = [(x_g[:, :2], x_l, y) for x_g, x_l, y in parts]
    assert [p[1].shape[1] for p in parts] == [2, 2, 4]
    G, L, losses = reference(parts, rounds, UP, DOWN, step=0.05, local_step=0.1, schedule="sqrt")
    agrees(result, G, L, losses, rounds)
    x = sites(31, sizes=(6,))[0][0]
    for i in range(3):
        said = (
            x[:, [0, 3]] @ G[max(rounds - DOWN[i], 1)][0]
            + x[:, private[i]] @ L[i][rounds + 1][0, : len(private[i])]
        )
        said = said + (L[i][rounds + 1][0, -1] if i != 1 else 0)
        np.testing.assert_allclose(result.model_of(i).outputs(x)[:, 0], said, atol=1e-4)


@pytest.mark.parametrize("each", [False, True], ids=["alike", "of each client"])
@pytest.mark.parametrize("rule", RULES)
def test_modules_against_autograd(rule, each):
    """A global network and local networks, up = down = 1, five rounds (the last is the first to see
    all of it).
    """
    torch.manual_seed(0)
    net = lambda d, h: nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, 1))  # noqa: E731
    data, shared, rounds, eta, eta_l = sites(32, sizes=(4, 3)), [0, 3], 5, 0.1, 0.2
    shape, columns = net(2, 3), [[1, 2], [1, 2]]
    local = shape
    if each:
        columns = [[1, 2], [2, 1, 4]]
        local = {0: shape, 1: net(3, 2)}
    top = net(2, 4)
    locals_ = list(local.values()) if each else [local, local]
    copy = lambda m: {k.replace(".", "/"): p.detach().clone() for k, p in m.named_parameters()}  # noqa: E731
    say = lambda p, x: p["2/weight"] @ torch.tanh(p["0/weight"] @ x + p["0/bias"]) + p["2/bias"]  # noqa: E731

    G, L = {1: copy(top)}, [{1: copy(m)} for m in locals_]

    def gradients(i, s, w, w_l):
        x, y = torch.from_numpy(data[i][0]), torch.from_numpy(data[i][1])
        at = (s - 1) % len(x)
        w, w_l = ({k: p.clone().requires_grad_() for k, p in part.items()} for part in (w, w_l))
        z = say(w, x[at, shared]) + say(w_l, x[at, columns[i]])
        loss = (y[at] - z[0]) ** 2
        g = torch.autograd.grad(loss, [*w.values(), *w_l.values()])
        return (
            dict(zip(w, g[: len(w)], strict=True)),
            dict(zip(w_l, g[len(w) :], strict=True)),
            loss.item(),
        )

    losses = np.zeros((rounds, 2))
    for t in range(1, rounds + 1):
        total = {k: torch.zeros_like(p) for k, p in G[1].items()}
        for i in (0, 1):
            pair = lambda s, i=i: (G[max(s - 1, 1)], L[i][s])  # noqa: E731
            losses[t - 1, i] = gradients(i, t, *pair(t))[2]
            s = t - 2 if rule == "aligned" else t
            L[i][t + 1] = L[i][t]
            if s >= 1:
                g = gradients(i, s, *pair(s))[1]
                L[i][t + 1] = {k: p - eta_l * g[k] for k, p in L[i][t].items()}
            if t > 1:
                g = gradients(
                    i, t - 1, *((G[t], L[i][t - 1]) if rule == "misaligned" else pair(t - 1))
                )[0]
                total = {k: v + g[k] for k, v in total.items()}
        G[t + 1] = {k: p - eta * total[k] for k, p in G[t].items()}

    private = {i: tuple(c) for i, c in enumerate(columns)} if each else tuple(columns[0])
    algorithm = fd.FedRes(
        top,
        local,
        shared=tuple(shared),
        private=private,
        schedule="constant",
        step=eta,
        local_step=eta_l,
        rule=rule,
    )
    result = go(algorithm, federation(data), rounds, 1, 1)
    for k, p in G[rounds + 1].items():
        np.testing.assert_allclose(result.state.w[k], p, atol=1e-5)
        assert (G[1][k] - p).abs().max() > 1e-3
    for i in (0, 1):
        for k, p in L[i][rounds + 1].items():
            np.testing.assert_allclose(kept(result, i)["local"][k], p, atol=1e-5)
    np.testing.assert_allclose(result.history.online_loss[1:], online(losses), rtol=1e-5)


# -- rollouts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks():
    """Three federations of four binary tasks; the clients of the second are in another order."""
    data = fd.load("digits")
    feds = [fd.split(data, "tasks", clients=4, seed=s, n0=3) for s in range(3)]
    return [feds[0], feds[1].select([2, 0, 3, 1]), feds[2]]


def columns(fed):
    return {
        k: tuple(fed.settings[f"{n}_features"].tolist())
        for k, n in (("shared", "global"), ("private", "local"))
    }


FOUR = ([0, 2, 1, 0], [1, 0, 3, 0])


def task_parts(fed, test=False):
    """In order of id."""
    split = columns(fed)
    x, y = (fed.data.x_test, fed.data.y_test) if test else (fed.data.x_train, fed.data.y_train)
    rows = fed.test_client_rows if test else fed.client_rows
    data = [(x[rows(p)].reshape(len(rows(p)), -1), y[rows(p)]) for p in np.argsort(fed.ids)]
    return parts_of(data, split["shared"], split["private"], 2, bias=True)


@pytest.mark.parametrize(
    ("rule", "delays"),
    [*((rule, delays) for rule in RULES for delays in ((0, 0), FOUR)), ("aligned", (1, 2))],
)
def test_rollouts_are_runs(tasks, rule, delays):
    rounds = 9  # a client has six rows
    schemes = {
        "squared": lambda fed: fd.FedRes(**columns(fed), rule=rule),
        "logistic": lambda fed: fd.FedRes(
            **columns(fed), rule=rule, loss="logistic", schedule="sqrt", batch_size=2, radius=0.3
        ),
    }
    table = fd.rollouts(schemes, tasks, rounds, up=delays[0], down=delays[1])
    assert table.scheme.tolist() == ["squared"] * 3 + ["logistic"] * 3
    assert table.rollout.tolist() == [0, 1, 2] * 2
    for row in table.itertuples():
        fed = tasks[row.rollout]
        history = go(schemes[row.scheme](fed), fed, rounds, *delays, evaluate_every=rounds).history
        for name in ("own_accuracy", "own_accuracy_worst", "online_loss"):
            assert getattr(row, name) == pytest.approx(history[name].iloc[-1], abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_rollouts_against_the_reference(tasks, rule):
    """The losses and the models that `watch` sees, and the scores on test rows."""
    rounds, seen = 11, []
    scheme = {"mine": lambda fed: fd.FedRes(**columns(fed), rule=rule, local_step=0.05)}
    table = fd.rollouts(
        scheme, tasks, rounds, up=FOUR[0], down=FOUR[1], watch=lambda name, t,
        now: seen.append((name, t, now["loss"].clone(), flat(now["w"]).copy())),
    )  # fmt: skip
    assert [(name, t) for name, t, *_ in seen] == [("mine", t) for t in range(1, rounds + 1)]
    for r, fed in enumerate(tasks):
        options = {"rule": rule, "local_step": 0.05, "schedule": "adagrad"}
        G, L, losses = reference(task_parts(fed), rounds, *FOUR, **options)
        np.testing.assert_allclose(
            np.stack([loss[r] for *_, loss, _ in seen]), losses, rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(
            np.stack([w[r] for *_, w in seen]), [G[t + 1] for t in range(1, rounds + 1)], atol=1e-4
        )
        assert table.online_loss[r] == pytest.approx(losses.mean(), rel=1e-4)
        right = []
        for i, (x_g, x_l, y) in enumerate(task_parts(fed, test=True)):
            z = x_g @ G[max(rounds - FOUR[1][i], 1)].T + x_l @ L[i][rounds + 1].T
            right.append((z > 0) == (y > 0))
        assert table.own_accuracy[r] == pytest.approx(np.concatenate(right).mean(), abs=1e-6)
        assert table.own_accuracy_worst[r] == pytest.approx(min(v.mean() for v in right), abs=1e-6)


def test_rollouts_of_independent_and_central(tasks):
    schemes = {
        "Independent": lambda fed: fd.FedRes(**columns(fed)).independent(),
        "Central": lambda fed: fd.FedRes(**columns(fed)).central(),
    }
    table = fd.rollouts(schemes, tasks, 9, up=FOUR[0], down=FOUR[1])
    for row in table.itertuples():
        history = go(
            schemes[row.scheme](tasks[row.rollout]), tasks[row.rollout], 9, *FOUR, evaluate_every=9
        ).history
        for name in ("own_accuracy", "own_accuracy_worst", "online_loss"):
            assert getattr(row, name) == pytest.approx(history[name].iloc[-1], abs=1e-6)


def test_rollouts_of_regression():
    feds = []
    for seed in (0, 1):
        data = sites(seed, sizes=(5, 7))
        feds.append(fd.Federation.from_clients(data, test=sites(seed + 5, sizes=(3, 6))))
    algorithm = fd.FedRes(shared=(0, 3), private=(1, 2), schedule="constant", step=0.05)
    table = fd.rollouts({"mine": lambda _: algorithm}, feds, 9, up=1, down=[0, 2])
    for r, fed in enumerate(feds):
        history = go(algorithm, fed, 9, 1, [0, 2], evaluate_every=9).history
        for name in ("own_mse", "own_mse_worst", "online_loss"):
            assert table[name][r] == pytest.approx(history[name].iloc[-1], rel=1e-5)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "alinged"}, "rule 'alinged' is unknown; did you mean 'aligned'"),
        ({"schedule": "linear"}, "schedule 'linear' is unknown"),
        ({"loss": "hinge"}, "loss 'hinge' is unknown"),
        ({"send": "row"}, "send 'row' is unknown; did you mean 'rows'"),
        ({"global_model": None, "local_model": None}, "global_model and local_model are both None"),
        ({"rule": "misaligned", "send": "gradient"}, "rule='misaligned' needs send='rows'"),
        ({"shared": (0, 0)}, "shared must be different column numbers"),
        ({"private": (1, 2, 1)}, "private must be different column numbers"),
        ({"private": {0: (1,), 1: (2, 2)}}, "private must be different column numbers"),
        ({"shared": ()}, "shared must be different column numbers"),
        ({"shared": (-1,)}, "shared must be different column numbers"),
        ({"shared": "half"}, "shared='half' must be numbers of columns"),
        ({"private": 3}, "private=3 must be numbers of columns"),
        ({"step": 0}, "step=0 must be a positive"),
        ({"local_step": -1.0}, "local_step=-1.0 must be a positive"),
        ({"radius": 0.0}, "radius=0.0 must be a positive"),
        ({"batch_size": 0}, "batch_size=0 must be an integer"),
        ({"measure_every": -1}, "measure_every=-1 must be an integer"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.FedRes(**options)


class Twice(fd.Linear):
    """Says everything twice."""

    def apply(self, params, x):
        return super().apply(params, x).repeat(1, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shared": (0, 5)}, fd.DataError, "column 5 of global_model is beyond the 5 features"),
        ({"private": (7, 1)}, fd.DataError, "column 7 of local_model is beyond the 5 features"),
        (
            {"private": {0: (1,), 1: (2,), 2: (9,)}},
            fd.DataError,
            r"column 9 of local_model\[2\] is beyond the 5 features",
        ),
        ({"loss": "logistic"}, fd.ConfigError, "loss='logistic' needs class labels"),
        ({"global_model": nn.Linear(5, 3)}, fd.ModelError, "its last layer must have 1 outputs"),
        ({"global_model": Twice()}, fd.ModelError, r"global_model returns shape \(2, 2\)"),
        ({"local_model": Twice()}, fd.ModelError, r"local_model returns shape \(2, 2\)"),
        (
            {"local_model": {0: PLAIN, 1: Twice(), 2: PLAIN}},
            fd.ModelError,
            r"local_model\[1\] returns shape \(2, 2\)",
        ),
        ({"local_model": nn.Linear(4, 1)}, fd.ModelError, "cannot take rows of shape"),
        (
            {"local_model": {0: PLAIN, 1: PLAIN}},
            fd.ConfigError,
            r"local_model says nothing of clients \[2\]",
        ),
        ({"private": {1: (0,)}}, fd.ConfigError, r"private says nothing of clients \[0, 2\]"),
        (
            {"private": {0: (1,), 1: (2,), 2: (3,)}, "local_model": {0: PLAIN, 1: PLAIN}},
            fd.ConfigError,
            "local_model and private must name the same clients",
        ),
    ],
)
def test_what_does_not_fit_the_data(options, error, message):
    with pytest.raises(error, match=message):
        fd.run(fd.FedRes(**options), federation(sites()), 1)


@pytest.mark.parametrize(
    "options", [{"local_model": None}, {"private": {0: (1,)}}, {"local_model": {0: PLAIN}}]
)
def test_independent_needs_one_local_model(options):
    with pytest.raises(fd.ConfigError, match=r"independent\(\) needs one local_model"):
        fd.FedRes(**options).independent()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"radius": -1}, fd.ConfigError, "radius=-1 must be a positive"),
        ({"batch_size": 0}, fd.ConfigError, "batch_size=0"),
        ({"shared": (0, 0)}, fd.ConfigError, "shared must be different"),
        ({"shared": (0, 5)}, fd.DataError, "column 5 of shared is beyond the 5 features"),
        ({"private": (6,)}, fd.DataError, "column 6 of private is beyond the 5 features"),
        ({"start_global": (1, 0)}, fd.ConfigError, "start_global has 2 numbers; the model has 6"),
        (
            {"private": (1, 2), "start_local": (1, 0)},
            fd.ConfigError,
            "start_local has 2 numbers; the model has 3",
        ),
    ],
)
@pytest.mark.parametrize("kind", [fd.FedResERM, fd.FictitiousPlay])
def test_bad_settings_of_erm(kind, options, error, message):
    with pytest.raises(error, match=message):
        fd.run(kind(**options), federation(sites()), 1)


def test_a_start_is_for_one_output():
    with pytest.raises(
        fd.ConfigError, match="start_global has 6 numbers; the model has 6 for each of 3 outputs"
    ):
        fd.run(fd.FedResERM(start_global=(0,) * 6), federation(sites(classes=3), 3), 1)


@pytest.mark.parametrize(
    ("algorithm", "options", "error", "message"),
    [
        (fd.FedRes(), {"rounds": 0}, fd.ConfigError, "rounds=0"),
        (fd.FedRes(), {"up": -1}, fd.ConfigError, "up has a delay of -1"),
        (fd.FedRes(), {"down": [0, -2, 0]}, fd.ConfigError, "down has a delay of -2"),
        (fd.FedRes(), {"down": 1.5}, fd.ConfigError, "down has a delay of 1.5"),
        (fd.FedRes(), {"feds": []}, fd.SplitError, "feds must be at least one"),
        (fd.FedRes(), {"up": [1, 2]}, fd.ConfigError, "up has 2 delays"),
        (fd.FedAvg(fd.Linear()), {}, fd.ConfigError, "rollouts are of fd.FedRes, not of FedAvg"),
        (fd.FedRes(send="gradient"), {}, fd.ConfigError, "send='rows'"),
        (fd.FedRes(fd.MLP(3)), {}, fd.ConfigError, "closed-form gradients"),
        (fd.FedRes(local_model=nn.Linear(5, 1)), {}, fd.ConfigError, "closed-form gradients"),
        (fd.FedRes(local_model=fd.Linear(zero_start=False)), {}, fd.ConfigError, "fixed start"),
        (
            fd.FedRes(private={0: (1,), 1: (1,), 2: (1,)}),
            {},
            fd.ConfigError,
            "local models of one kind",
        ),
        (fd.FedRes(shared=(5,)), {}, fd.DataError, "column 5 of global_model"),
    ],
)
def test_bad_rollouts(algorithm, options, error, message):
    with pytest.raises(error, match=message):
        fd.rollouts(
            {"a": lambda _: algorithm}, **{"feds": [federation(sites())], "rounds": 2, **options}
        )


def test_rollouts_must_be_alike():
    three, two = federation(sites()), federation(sites(sizes=(3, 4)))
    with pytest.raises(
        fd.SplitError, match="feds must be at least one federation, all with as many clients"
    ):
        fd.rollouts({"a": lambda _: fd.FedRes()}, [three, two], 2)
    feds, labels = [three, federation(sites(1))], federation(sites(classes=3), 3)
    steps = iter((0.1, 0.2))
    with pytest.raises(fd.ConfigError, match="differ in the choice of columns alone"):
        fd.rollouts({"a": lambda _: fd.FedRes(step=next(steps))}, feds, 2)
    wide = iter(((0,), (0, 1)))
    with pytest.raises(fd.ConfigError, match="differ in the choice of columns alone"):
        fd.rollouts({"a": lambda _: fd.FedRes(shared=next(wide))}, feds, 2)
    with pytest.raises(fd.ConfigError, match="the same outputs"):
        fd.rollouts({"a": lambda _: fd.FedRes()}, [three, labels], 2)


def test_two_classes_are_those_of_the_labels():
    """One row x = 1 of class 1, step 1/2: the slope at 0 is 2 (0 - 1), so that w = 1 says +1 of x =
    1 and -1 of x = -1.
    """
    fed = fd.Federation.from_clients([(np.ones((1, 1), np.float32), np.array([1]))], classes=2)
    algorithm = fd.FedRes(fd.Linear(bias=False), None, step=0.5, schedule="constant")
    model = fd.run(algorithm, fed, 1, evaluate_every=0).model
    assert model.predict([[1.0], [-1.0]]).tolist() == [1, 0]
    assert model.predict_proba([[1.0]])[0, 1] == pytest.approx(1 / (1 + np.exp(-1)))


def test_labels_are_below_the_number_of_classes():
    sent = {"y": torch.tensor([[0], [2], [3], [255]], dtype=torch.uint8)}
    assert sorted(in_range(sent, "y", 3)) == [2, 3]
    assert in_range({"y": torch.zeros(2, 1)}, "y", None) == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "theorem2"}, "schedule='theorem2' needs theorem="),
        ({"theorem": fd.fedres.Theorem2(10, 2, 1.0, 1.0)}, "other schedules do not use it"),
        ({"schedule": "constant", "forget": 0.9}, "forget=0.9 has no effect on"),
        ({"forget": 0.0}, "forget=0.0"),
        ({"forget": 1.1}, "forget=1.1"),
        ({"clip_predictions": 1}, "clip_predictions=1"),
    ],
)
def test_options_of_the_schedule_that_do_not_fit(options, says):
    with pytest.raises(fd.ConfigError, match=re.escape(says)):
        fd.FedRes(**options)
    with pytest.raises(fd.ConfigError, match="clip_predictions=True: a bandit"):
        fd.FedResBandit(every=2, clip_predictions=True)


@pytest.mark.parametrize("up", [0, 2])
def test_rollouts_and_the_service_clip_like_a_run(up):
    """The same numbers: one rollout; and, without delay, sites and a hub."""
    rng = np.random.default_rng(4)
    parts = [(rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=n)) for n in (4, 4, 4)]
    fed = fd.Federation.from_clients([(x, y.astype(np.float32)) for x, y in parts])
    how = fd.FedRes(shared=[0, 1], private=[1, 2], step=1.7, clip_predictions=True)
    run = fd.run(how, fed, 9, engine=fd.Delayed(up=up), evaluate_every=0)
    loss = run.history.online_loss.iloc[-1]
    free = fd.run(dataclasses.replace(how, clip_predictions=False), fed, 9, evaluate_every=0)
    assert abs(free.history.online_loss.iloc[-1] - loss) > 0.1
    table = fd.rollouts({"": lambda fed: how}, [fed], 9, up=up)
    assert table.online_loss[0] == pytest.approx(loss, rel=1e-5)
    if up:
        return
    hub = fd.Hub(how, fed.spec)
    sites = {i: fd.Site(how, fed.spec, id=i) for i in range(3)}
    for t in range(9):
        sent = {}
        for i, site in sites.items():
            row = fed.client_rows(i)[t % 4]
            site.receive(hub.broadcast())
            sent[i] = site.learn(fed.data.x_train[row], fed.data.y_train[row])
        hub.learn(sent)
    assert np.mean([site.loss for site in sites.values()]) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(hub.w, run.state.w, rtol=1e-5, atol=1e-6)


def test_a_site_with_a_network_of_its_own_is_a_client_of_a_run():
    """Its private model is an MLP; the hub's is linear."""
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), rng.integers(0, 2, 6)
    fed = fd.Federation.from_clients([(x, y)])
    how = fd.FedRes(local_model=fd.MLP(4), step=0.05)
    hub, site = fd.Hub(how, fed.spec), fd.Site(how, fed.spec, id=0)
    for t in range(8):
        site.receive(hub.broadcast())
        hub.learn({0: site.learn(x[t % 6], y[t % 6])})
    run = fd.run(how, fed, 8, evaluate_every=0)
    torch.testing.assert_close(hub.w, run.state.w, rtol=1e-4, atol=1e-6)
    assert site.loss == pytest.approx(run.history.online_loss.iloc[-1], rel=1e-5)
