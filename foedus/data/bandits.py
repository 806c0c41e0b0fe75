"""Environments of contextual bandits, as federations: rows are contexts, targets the expected
rewards of all actions.
"""

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
    """A federation of labelled rows as a bandit: the actions are the classes, and the right one has
    reward 1.

    Example:
        >>> fd.class_bandit(fd.split(fd.load("digits"), "labels", clients=10, per_client=3))
    """
    data = fed.data
    if not data.classes or data.classes < 2:
        raise DataError(f"{data.name!r} has no class labels; a bandit of classes needs at least 2")
    rewards = [np.eye(data.classes, dtype=np.float32)[y] for y in (data.y_train, data.y_test)]
    return replace(
        fed,
        data=replace(data, y_train=rewards[0], y_test=rewards[1], classes=None, class_names=None),
    )


def rewards_federation(
    parts: list[tuple[np.ndarray, np.ndarray]], name: str = "rewards"
) -> Federation:
    """A federation from each client's contexts (n, K, d) or (n, d), and the expected rewards (n, K)
    of the actions.
    """
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
    data = replace(Data.from_arrays(x, y), name=name)
    return Federation.from_owners(
        data, owner, np.zeros(0, np.int64), np.arange(len(parts)), name, {"clients": len(parts)}
    )


def linear_bandit(
    clients: int = 10,
    actions: int = 5,
    rounds: int = 1000,
    shared: int = 8,
    private: int = 4,
    local: float = 0.5,
    seed: int = 0,
) -> Federation:
    """A realisable environment: the expected reward of an action is w*_g . x^g + w*_i . x^l, known
    and in [0, 1].

    Contexts are uniform in [0, 1], the first `shared` columns global, the other `private` ones
    local. The weights are at random, sparse and not negative, and sum to 1 - local (global) and
    local (each client's own). `settings` has them: `w_global`, `w_local`.
    """
    for name, v in (
        ("clients", clients),
        ("rounds", rounds),
        ("shared", shared),
        ("private", private),
    ):
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
    return replace(
        fed, settings={**fed.settings, "w_global": w_global, "w_local": w_local, "seed": seed}
    )
