"""What the NumPy twins of the five paper families share: tiny federations, draws, delays, and
comparisons.
"""

from __future__ import annotations

import math

import numpy as np
import torch

import foedus as fd
from foedus.base import random

SIZES = (2, 7, 3, 8, 5, 4)
"""Rows of the six clients: no two are alike."""

UP, DOWN = (0, 1, 2, 0, 1, 0), (1, 0, 0, 2, 1, 0)
"""Delays of the six clients: each has a pair of its own, and their round trips are from 0 to 2
rounds.
"""

_COHORT, _SERVER = 0xFFFFFFFE, 0xFFFFFFFF


# -- data ------------------------------------------------------------------------------------------


def values(outputs=1, features=3, sizes=SIZES, seed=5):
    """Rows with real targets, [(x, y)] in float32."""
    rng = np.random.default_rng(seed)
    clients = []
    for i, n in enumerate(sizes):
        x = rng.normal(size=(n, features)) + 0.2 * i
        y = x @ rng.normal(size=(features, outputs)) + 0.4 * i + 0.3 * rng.normal(size=(n, outputs))
        clients.append((x.astype(np.float32), (y[:, 0] if outputs == 1 else y).astype(np.float32)))
    return clients


def labels(classes=3, features=3, sizes=SIZES, seed=6):
    """Rows with labels; the first client has every class that fits."""
    rng = np.random.default_rng(seed)
    clients = []
    for i, n in enumerate(sizes):
        x = rng.normal(size=(n, features)) + 0.2 * i
        y = (np.arange(n) + rng.integers(0, 2, n) + i) % classes
        clients.append((x.astype(np.float32), y.astype(np.int64)))
    return clients


def federation(clients, classes=None):
    return fd.Federation.from_clients(clients, classes=classes)


def double(clients):
    """The same rows as float64, with targets (n, k)."""
    return [
        (x.astype(float), y if y.dtype.kind == "i" else y.astype(float).reshape(len(y), -1))
        for x, y in clients
    ]


# -- draws -----------------------------------------------------------------------------------------


def cohort(seed, t, n, participation):
    """Who takes part in round t: round(p n) of n clients."""
    if participation == 1:
        return list(range(n))
    size = max(1, math.floor(participation * n + 0.5))
    return random.subset(random.fold(random.key(seed), t, _COHORT), n, size).tolist()


def server_key(seed, t):
    return random.fold(random.key(seed), t, _SERVER)


def shared_key(seed):
    return random.fold(random.key(seed), 0)


def client_key(seed, t, i, exchange=0):
    return random.fold(random.key(seed), t, exchange, i)


# -- delays ----------------------------------------------------------------------------------------


class Delays:
    """In round t client i acts on the broadcast of round max(t - down_i, 1); its reply is there in
    round t + up_i.
    """

    def __init__(self, up=UP, down=DOWN):
        self.up, self.down, self.n = up, down, len(up)

    def version(self, t, i):
        return max(t - self.down[i], 1)

    def arriving(self, t):
        """(client, the round in which it acted, the round of the broadcast that it acted on) of all
        replies of round t.
        """
        made = [(i, t - self.up[i]) for i in range(self.n) if t - self.up[i] >= 1]
        return [(i, s, self.version(s, i)) for i, s in made]

    @property
    def engine(self):
        return fd.Delayed(up=self.up, down=self.down)


def pass_ends(seed, began, n, participation=1.0, delays=None):
    """The round in which all clients have answered what was first asked in round `began`: client i
    is asked in the first round in which it takes part and that broadcast has reached it.
    """
    up, down = ((0,) * n, (0,) * n) if delays is None else (delays.up, delays.down)
    ends = []
    for i in range(n):
        t = began + down[i]
        while i not in cohort(seed, t, n, participation):
            t += 1
        ends.append(t + up[i])
    return max(ends)


def iterations_end(count, passes, seed, n, participation=1.0, delays=None):
    """The rounds in which iterations of some passes, one after the other, are complete."""
    ends, t = [], 0
    for _ in range(count):
        t += 1
        for _ in range(passes):
            t = pass_ends(seed, t, n, participation, delays)
        ends.append(t)
    return ends


# -- runs ------------------------------------------------------------------------------------------


def run(algorithm, clients, rounds, classes=None, **options):
    return fd.run(algorithm, federation(clients, classes), rounds, evaluate_every=0, **options)


def states_of(result):
    """{client: its state}, of those who have one."""
    saved = result.clients["states"]
    if "separate" in saved:
        return {int(i): state for i, state in saved["separate"].items()}
    slot = saved["slot"].tolist()
    return {i: _pick(saved["states"], place) for i, place in enumerate(slot) if place >= 0}


def _pick(tree, place):
    if isinstance(tree, dict):
        return {k: _pick(v, place) for k, v in tree.items()}
    return tree[place]


def flat(params):
    """Parameters as one vector: the weights, row by row, then the bias."""
    parts = [params[k] for k in ("weight", "bias") if k in params]
    return np.concatenate([np.asarray(p, dtype=float).reshape(-1) for p in parts])


def near(got, want, tolerance=1e-5, what=""):
    """Equal up to `tolerance` of the largest entry."""
    got = got.detach().double().numpy() if isinstance(got, torch.Tensor) else np.asarray(got, float)
    want = np.asarray(want, float)
    assert got.size == want.size, f"{what}: {got.shape} instead of {want.shape}"
    got, scale = got.reshape(want.shape), np.abs(want[np.isfinite(want)]).max(initial=0)
    np.testing.assert_allclose(
        got, want, rtol=tolerance, atol=tolerance * max(scale, 1e-6), err_msg=what
    )


# -- losses of linear models -----------------------------------------------------------------------


def softmax(f):
    e = np.exp(f - f.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def hot(y, width):
    return np.eye(width)[y] if y.dtype.kind == "i" else y.reshape(len(y), -1)


def sigmoid(f):
    return 1 / (1 + np.exp(-f))


def value_of(loss, f, y):
    """The loss of each row."""
    target = hot(y, f.shape[1])
    if loss == "cross_entropy":
        return -np.log((softmax(f) * target).sum(1))
    if loss == "logistic":
        return (np.log1p(np.exp(f)) - target * f).sum(1)
    r = np.abs(f - target)
    if loss == "huber":
        return np.where(r <= 1, r**2 / 2, r - 0.5).sum(1)
    return (r**2).sum(1) / 2


def slope_of(loss, f, y):
    """Its derivative in the outputs f."""
    target = hot(y, f.shape[1])
    if loss == "cross_entropy":
        return softmax(f) - target
    if loss == "logistic":
        return sigmoid(f) - target
    return np.clip(f - target, -1, 1) if loss == "huber" else f - target


def linear_gradient(loss, w, x, y, outputs, bias=True):
    """The gradient of the mean loss of f = W x + b in the vector w of `flat`."""
    rows = np.hstack([x, np.ones((len(x), 1))]) if bias else x
    f = rows @ matrix(w, x.shape[1], outputs, bias).T
    g = slope_of(loss, f, y).T @ rows / len(x)
    return vector(g, bias)


def linear_value(loss, w, x, y, outputs, bias=True):
    rows = np.hstack([x, np.ones((len(x), 1))]) if bias else x
    return value_of(loss, rows @ matrix(w, x.shape[1], outputs, bias).T, y).mean()


def matrix(w, features, outputs, bias=True):
    """(outputs, features + 1) from `flat`'s vector, the bias in the last column."""
    weight = w[: features * outputs].reshape(outputs, features)
    return np.hstack([weight, w[features * outputs :].reshape(outputs, 1)]) if bias else weight


def vector(m, bias=True):
    return np.concatenate([m[:, :-1].reshape(-1), m[:, -1]]) if bias else m.reshape(-1)
