"""What all schemes use: the division that they return, and how test rows follow training rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.errors import SplitError


@dataclass(frozen=True, eq=False)
class Division:
    """The division of a data set that a scheme returns.

    Args:
        owner: The client of each training row; -1: the row is not used.
        test_owner: The client of each test row; `None`: as `deal_test_rows` deals them.
        data: The rows as clients see them; `None`: unchanged.
        settings: What the federation records besides the options of the scheme.
    """

    owner: np.ndarray
    test_owner: np.ndarray | None = None
    data: Data | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def even_owners(rows: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """The client of each row: at random, with sizes equal up to one row."""
    owner = np.empty(rows, np.int64)
    owner[rng.permutation(rows)] = np.arange(rows) % clients
    return owner


def check_min_rows(data: Data, clients: int, min_rows: int) -> None:
    """Raise `SplitError` if the training rows do not suffice for `min_rows` per client."""
    check_value("min_rows", min_rows, Annotated[int, Ge(1)], SplitError)
    if clients * min_rows > len(data.y_train):
        raise SplitError(
            f"min_rows={min_rows} for {clients} clients is more than the {len(data.y_train)} "
            f"training rows of {data.name!r}"
        )


def repair(owner: np.ndarray, clients: int, least: int, rng: np.random.Generator) -> np.ndarray:
    """Give clients with fewer than `least` rows random rows of the largest clients."""
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(least - sizes, 0)
    needed = int(missing.sum())
    if needed == 0:
        return owner
    shuffled = rng.permutation(len(owner))
    order = shuffled[np.argsort(owner[shuffled], kind="stable")]
    # a row's height is its place in the pile of its client: the highest rows are taken first
    height = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken = order[np.argsort(-height, kind="stable")[:needed]]
    owner[taken] = np.repeat(np.arange(clients), missing)
    return owner


def deal_test_rows(
    data: Data,
    owner: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    strata: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """The client of each test row: each label in proportion to the clients' training rows of it.

    Labels without training rows, regression sets and labels of the steps of sequences are dealt in
    proportion to the clients' sizes.

    Args:
        data: The data set.
        owner: The client of each training row; -1: the row is not used.
        clients: The number of clients.
        rng: The random generator.
        strata: In place of labels, a number for each training row and for each test row.
    """
    test_owner = np.empty(len(data.y_test), np.int64)
    held = owner[owner >= 0]
    sizes = np.bincount(held, minlength=clients)
    if strata is not None:
        y_train, y_test = strata
    elif data.classes is None or data.spec.steps:
        y_train, y_test = (np.zeros(len(y), np.int64) for y in (data.y_train, data.y_test))
    else:
        y_train, y_test = data.y_train, data.y_test
    y_train = y_train[owner >= 0]
    for label in np.unique(y_test):
        weights = np.bincount(held[y_train == label], minlength=clients)
        rows = rng.permutation(np.flatnonzero(y_test == label))
        counts = apportion(weights if weights.any() else sizes, len(rows), rng)
        test_owner[rows] = np.repeat(np.arange(clients), counts)
    return test_owner


def apportion(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Integers in proportion to weights, with sum `total`: largest remainders, ties at random."""
    quota, remainder = np.divmod(weights.astype(np.int64) * total, int(weights.sum()))
    left = total - int(quota.sum())
    if left:
        quota[np.lexsort((rng.random(len(quota)), -remainder))[:left]] += 1
    return quota
