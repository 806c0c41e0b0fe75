"""Contextual bandits as federations: rows are contexts, targets the actions' expected rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Interval

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.errors import DataError


def class_bandit(fed: Federation) -> Federation:
    """A federation of labelled rows as a bandit: the action of the right class has reward 1.

    Example:
        >>> fd.class_bandit(fd.split(fd.load("digits"), "labels", clients=10, per_client=3))
    """
    data = fed.data
    if not data.classes or data.classes < 2:
        raise DataError(f"{data.name!r} has no class labels; a bandit of classes needs at least 2")
    if data.spec.steps:
        raise DataError(
            f"rows of {data.name!r} have {data.spec.steps} labels each, one for each step of a "
            "sequence; a bandit of classes needs one label a row"
        )
    train, test = (np.eye(data.classes, dtype=np.float32)[y] for y in (data.y_train, data.y_test))
    data = replace(data, y_train=train, y_test=test, classes=None, class_names=None)
    return replace(fed, data=data)


def rewards_federation(
    parts: list[tuple[np.ndarray, np.ndarray]], name: str = "rewards"
) -> Federation:
    """A federation from clients' contexts (n, K, d) or (n, d) and expected rewards (n, K)."""
    for i, (x, y) in enumerate(parts):
        y = np.asarray(y)
        if y.ndim != 2 or len(y) != len(x) or y.shape[1] < 2:
            raise DataError(
                f"client {i} has rewards of shape {y.shape} for {len(x)} rows: give (rows, "
                "actions), at least 2 actions"
            )
        if not (np.isfinite(y).all() and y.min() >= 0 and y.max() <= 1):
            raise DataError(
                f"client {i} has rewards from {y.min():.4g} to {y.max():.4g}; rewards must be in "
                "[0, 1]: scale them"
            )
    owner = np.repeat(np.arange(len(parts)), [len(x) for x, _ in parts])
    x = np.concatenate([x for x, _ in parts]).astype(np.float32)
    y = np.concatenate([y for _, y in parts]).astype(np.float32)
    data, ids, nobody = Data.from_arrays(x, y, name=name), np.arange(len(parts)), owner[:0]
    return Federation.from_owners(data, owner, nobody, ids, name, {"clients": len(parts)})


def linear_bandit(
    clients: int = 10,
    actions: int = 5,
    rounds: int = 1000,
    shared: int = 8,
    private: int = 4,
    local: float = 0.5,
    seed: int = 0,
) -> Federation:
    """A realisable environment: an action's expected reward w*_g . x^g + w*_i . x^l is in [0, 1].

    Contexts are uniform in [0, 1], the first `shared` columns global, the other `private` ones
    local. The weights are at random, sparse and not negative, and sum to 1 - local (global) and
    local (each client's own). `settings` has them: `w_global`, `w_local`.
    """
    counts = {"clients": clients, "rounds": rounds, "shared": shared, "private": private}
    for name, v in counts.items():
        check_value(name, v, Annotated[int, Ge(1)])
    check_value("actions", actions, Annotated[int, Ge(2)])
    check_value("local", local, Annotated[float, Interval(ge=0, le=1)])
    rng = np.random.default_rng(seed)
    w_global = rng.dirichlet(np.full(shared, 0.5)) * (1 - local)
    w_local = rng.dirichlet(np.full(private, 0.5), clients) * local
    parts = []
    for i in range(clients):
        x = rng.random((rounds, actions, shared + private), dtype=np.float32)
        parts.append((x, np.clip(x[..., :shared] @ w_global + x[..., shared:] @ w_local[i], 0, 1)))
    fed = rewards_federation(parts, "linear bandit")
    weights = {"w_global": w_global, "w_local": w_local, "seed": seed}
    return replace(fed, settings={**fed.settings, **weights})
