"""What the NumPy twins share: small unequal federations, gradients, training, and the comparison.

A twin is the pseudo-code of a paper, written again in NumPy and float64. It is compared with foedus
after each of three rounds, away from degenerate points: clients of 2 to 7 rows, 3 of 5 of them in a
round, a random start, and constants such as 0.37. Parameters are one vector, weights by rows and
then the biases; `Case.named` gives them foedus' form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import foedus as fd

SEED, PART, ROUNDS = 11, 0.5, 3
SIZES = (2, 7, 3, 5, 4)
FEATURES = 3

Server = dict[str, Any]
Rounds = Iterable[tuple[Server, dict[int, Any]]]
"""After each round: the server's state and those of the clients that have one."""


@dataclass(frozen=True)
class Seen(fd.Algorithm):
    """Writes down who takes part in each round, and the server's own key."""

    def start(self, clients: Any) -> fd.State:
        return fd.State(cohorts=[], drawn=[])

    def round(self, clients: Any, state: fd.State) -> fd.State:
        return state.replace(
            cohorts=[*state.cohorts, clients.ids], drawn=[*state.drawn, clients.key]
        )


def seen(fed: fd.Federation, rounds: int, participation: Any = PART, seed: int = SEED) -> fd.State:
    return fd.run(
        Seen(), fed, rounds, seed=seed, participation=participation, evaluate_every=0
    ).state


@dataclass(eq=False)
class Case:
    """A federation, its rows in float64, the cohorts of a run, and the model that it starts at."""

    parts: list[tuple[np.ndarray, np.ndarray]]
    classes: int | None
    seed: int = SEED

    def __post_init__(self) -> None:
        self.fed = fd.Federation.from_clients(self.parts, classes=self.classes)
        self.rows = [(x.astype(float), self._targets(y)) for x, y in self.parts]
        self.sizes = np.array([len(x) for x, _ in self.parts], float)
        self.outputs, self.features = self.rows[0][1].shape[1], self.rows[0][0].shape[1]
        self.cohorts = [ids.tolist() for ids in seen(self.fed, ROUNDS, seed=self.seed).cohorts]
        first = fd.run(fd.FedAvg(self.model), self.fed, 0, seed=self.seed, evaluate_every=0).state.w
        self.start = np.concatenate([first["weight"].flatten(), first["bias"]]).astype(float)

    @property
    def model(self) -> fd.Linear:
        return fd.Linear(zero_start=False)

    def _targets(self, y: np.ndarray) -> np.ndarray:
        return np.eye(self.classes)[y] if self.classes else y.astype(float)[:, None]

    def named(self, v: np.ndarray) -> dict[str, np.ndarray]:
        cut = self.outputs * self.features
        return {"weight": v[:cut].reshape(self.outputs, self.features), "bias": v[cut:]}

    def _outputs(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        p = self.named(w)
        return x @ p["weight"].T + p["bias"]

    def loss_on(self, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
        """The mean over rows of -log softmax(f)_y, or of |f - y|^2 / 2."""
        f = self._outputs(x, w)
        if self.classes:
            return float(np.mean(np.log(np.exp(f).sum(1)) - (f * y).sum(1)))
        return float(np.mean(0.5 * ((f - y) ** 2).sum(1)))

    def gradient_on(self, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The gradient of `loss_on`."""
        f = self._outputs(x, w)
        if self.classes:
            f = np.exp(f) / np.exp(f).sum(1, keepdims=True)
        slope = (f - y) / len(x)
        return np.concatenate([(slope.T @ x).ravel(), slope.sum(0)])

    def loss(self, i: int, w: np.ndarray) -> float:
        return self.loss_on(*self.rows[i], w)

    def gradient(self, i: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda w: self.gradient_on(*self.rows[i], w)

    @property
    def clip(self) -> float:
        """A bound that some of the gradients at the start exceed and others do not."""
        return (
            round(
                float(
                    np.median(
                        [
                            np.linalg.norm(self.gradient(i)(self.start))
                            for i in range(len(self.rows))
                        ]
                    )
                ),
                2,
            )
            + 0.003
        )

    def pooled(self) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.concatenate(t) for t in zip(*self.rows, strict=True))

    def weights(self, who: Iterable[int], kind: str = "rows") -> np.ndarray:
        sizes = self.sizes[list(who)]
        return sizes / sizes.sum() if kind == "rows" else np.full(len(sizes), 1 / len(sizes))

    def mean(self, replies: dict[int, np.ndarray], kind: str = "rows") -> np.ndarray:
        return sum(
            p * r for p, r in zip(self.weights(replies, kind), replies.values(), strict=True)
        )

    def share(self, who: Iterable[int], kind: str) -> float:
        """The part of all rows, or of all clients, that takes part."""
        return (
            self.sizes[list(who)].sum() / self.sizes.sum()
            if kind == "rows"
            else len(list(who)) / len(self.sizes)
        )


def values(seed: int = 3) -> Case:
    """Linear regression: every client has a law of its own."""
    rng = np.random.default_rng(seed)
    parts = []
    for n in SIZES:
        x = (0.8 * rng.normal(size=(n, FEATURES)) + 0.3 * rng.normal(size=FEATURES)).astype(
            np.float32
        )
        y = 0.6 * (x @ rng.normal(size=FEATURES)) + 0.5 * rng.normal() + 0.1 * rng.normal(size=n)
        parts.append((x, y.astype(np.float32)))
    return Case(parts, None)


def classes(seed: int = 4) -> Case:
    """Three classes, in other shares at every client."""
    rng = np.random.default_rng(seed)
    parts = []
    for n in SIZES:
        y = rng.choice(3, size=n, p=rng.dirichlet(np.ones(3)))
        x = rng.normal(size=(n, FEATURES)) + rng.normal(size=FEATURES) + np.eye(3)[y]
        parts.append((x.astype(np.float32), y))
    return Case(parts, 3)


def copies(seed: int = 5) -> Case:
    """Every client holds copies of one row, so the gradient is the same on all mini-batches."""
    rng = np.random.default_rng(seed)
    parts = []
    for n in SIZES:
        x = np.repeat(rng.normal(size=(1, FEATURES)), n, 0).astype(np.float32)
        parts.append((x, np.full(n, rng.normal(), np.float32)))
    return Case(parts, None)


def train(
    gradient: Callable[[np.ndarray], np.ndarray],
    w: np.ndarray,
    *,
    lr: float,
    steps: int,
    prox: float = 0.0,
    correction: float | np.ndarray = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    momentum: float = 0.0,
    memory: dict[str, Any] | None = None,
) -> np.ndarray:
    """Local training with full gradients; Adam if `memory` has "mean". The memory is updated."""
    start, w = w, w.copy()
    memory = {} if memory is None else memory
    for _ in range(steps):
        g = gradient(w)
        if clip is not None:
            g = g * min(1.0, clip / np.linalg.norm(g))
        g = g + correction + prox * (w - start) + weight_decay * w
        if "mean" in memory:
            memory["steps"] += 1
            memory["mean"] = 0.9 * memory["mean"] + 0.1 * g
            memory["square"] = 0.999 * memory["square"] + 0.001 * g**2
            mean = memory["mean"] / (1 - 0.9 ** memory["steps"])
            square = memory["square"] / (1 - 0.999 ** memory["steps"])
            g = mean / (np.sqrt(square) + 1e-8)
        elif momentum:
            g = memory["velocity"] = momentum * memory.get("velocity", 0.0) + g
        w = w - lr * g
    return w


def adam_memory(w: np.ndarray) -> dict[str, Any]:
    return {"mean": np.zeros_like(w), "square": np.zeros_like(w), "steps": 0}


def flat(values: Any, name: str = "") -> dict[str, np.ndarray]:
    """Every tensor and number of a tree by its path; the form of the data (`spec`) is left out."""
    if isinstance(values, dict):
        return {
            k: v for key, part in values.items() for k, v in flat(part, f"{name}/{key}").items()
        }
    if isinstance(values, list | tuple):
        return {k: v for i, part in enumerate(values) for k, v in flat(part, f"{name}/{i}").items()}
    if isinstance(values, fd.Spec) or values is None:
        return {}
    values = (
        values.double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)
    )
    return {name: values}


def same(found: Any, want: Any, where: str, tolerance: float = 1e-5) -> None:
    """Two trees have the same entries, and they are equal.

    The tolerance is relative to the largest number of a tensor, of weights and biases together.
    """
    found, want = flat(found), flat(want)
    assert set(found) == set(want), where
    sizes: dict[str, float] = {}
    for name, right in want.items():
        whole = name.removesuffix("/weight").removesuffix("/bias")
        sizes[whole] = max(sizes.get(whole, 1e-3), np.abs(right).max(initial=0.0))
    for name, right in want.items():
        assert found[name].shape == right.shape, f"{where}: {name}"
        scale = sizes[name.removesuffix("/weight").removesuffix("/bias")]
        np.testing.assert_allclose(
            found[name], right, rtol=0, atol=tolerance * scale, err_msg=f"{where}: {name}"
        )


def states_of(run: fd.Run) -> dict[int, Any]:
    """The states of the clients that have one, by id."""
    ids, kept = run.clients["ids"].tolist(), run.clients["states"]
    if "separate" in kept:
        return {ids[int(p)]: state for p, state in kept["separate"].items()}
    slots = {i: int(slot) for i, slot in zip(ids, kept["slot"], strict=True) if slot >= 0}
    return {i: _pick(kept["states"], slot) for i, slot in slots.items()}


def _pick(stacked: Any, slot: int) -> Any:
    return (
        {k: _pick(v, slot) for k, v in stacked.items()}
        if isinstance(stacked, dict)
        else stacked[slot]
    )


def compare(
    algorithm: fd.Algorithm, case: Case, twin: Rounds, tolerance: float = 1e-5
) -> list[fd.Run]:
    """Runs of one, two and three rounds against the twin's three states."""
    runs = []
    for done, (server, clients) in enumerate(twin, 1):
        run = fd.run(
            algorithm, case.fed, done, seed=case.seed, participation=PART, evaluate_every=0
        )
        same(run.state, server, f"the server after round {done}", tolerance)
        same(states_of(run), clients, f"the clients after round {done}", tolerance)
        runs.append(run)
    assert len(runs) == ROUNDS
    return runs
