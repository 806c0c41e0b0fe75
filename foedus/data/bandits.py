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
    """Classification as a contextual bandit: the action of the right class has reward 1.

    Args:
        fed: A federation with at least two classes and one label per row.

    Returns:
        The federation, with the rewards of all actions (one-hot labels) as targets.

    Raises:
        DataError: The federation has no class labels, or one for each step of a sequence.

    Example:
        >>> fed = fd.class_bandit(fd.split(fd.load("digits"), "labels", clients=10, per_client=3))
        >>> fed.data.y_train.shape
        (1346, 10)
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
    """A contextual bandit from the clients' contexts and expected rewards.

    Args:
        parts: For each client its contexts, of shape (n, K, d) or (n, d), and the expected rewards
            (n, K) of the K actions, in [0, 1].
        name: The name of the data set.

    Returns:
        The federation; all rows are training rows.

    Raises:
        DataError: Rewards are not of this shape, or outside [0, 1].

    Example:
        >>> contexts, rewards = np.ones((4, 3)), np.full((4, 2), 0.5)
        >>> fd.rewards_federation([(contexts, rewards), (contexts, rewards)]).sizes.tolist()
        [4, 4]
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
    """A bandit with linear rewards: E[reward of an action] = w*_g . x^g + w*_i . x^l, in [0, 1].

    Contexts are uniform in [0, 1]; their first `shared` columns are global features x^g, the other
    `private` ones local features x^l. The weights are random, sparse and not negative; w*_g sums to
    1 - local and each client's w*_i to local. Both are in `settings` as `w_global` and `w_local`.

    Args:
        clients: The number of clients.
        actions: The number of actions K, at least 2.
        rounds: The number of contexts of each client.
        shared: The number of global features of an action.
        private: The number of local features of an action.
        local: The part of the reward that depends on local features, from 0 to 1.
        seed: The seed of all draws.

    Returns:
        The federation; its rows are contexts of shape (actions, shared + private).

    Raises:
        ConfigError: An argument is out of range.

    Example:
        >>> fed = fd.linear_bandit(clients=3, actions=5, rounds=10, shared=8, private=4, local=0.5)
        >>> fed.data.x_train.shape, fed.settings["w_local"].shape
        ((30, 5, 12), (3, 4))
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
