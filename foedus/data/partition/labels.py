"""Label skew: iid, Dirichlet shares, sorted shards, a number of labels per client."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Interval

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.partition.base import Division, check_min_rows, even_owners, repair
from foedus.errors import SplitError


def iid(data: Data, clients: int, rng: np.random.Generator) -> Division:
    """Rows at random, sizes equal up to one row."""
    return Division(even_owners(len(data.y_train), clients, rng))


def dirichlet(
    data: Data, clients: int, rng: np.random.Generator, *, alpha: float, min_rows: int = 1
) -> Division:
    """Shares of each label are drawn from Dirichlet(alpha)."""
    return Division(dirichlet_owners(data, data.y_train, clients, rng, alpha, min_rows))


def dirichlet_owners(
    data: Data,
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    alpha: float,
    min_rows: int,
) -> np.ndarray:
    """The client of each row, with shares of each label drawn from Dirichlet(alpha)."""
    check_value("alpha", alpha, Annotated[float, Gt(0)], SplitError)
    check_min_rows(data, clients, min_rows)
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        share = rng.dirichlet(np.full(clients, alpha))
        # the draw underflows for a tiny alpha, for which one client gets all rows in the limit
        if not np.isclose(share.sum(), 1.0):
            share = np.bincount([rng.integers(clients)], minlength=clients).astype(np.float64)
        ends = np.floor(np.cumsum(share) * len(rows) + 0.5)
        ends[-1] = len(rows)
        owner[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right")
    return repair(owner, clients, min_rows, rng)


def homogeneity(data: Data, clients: int, rng: np.random.Generator, *, s: float) -> Division:
    """A random fraction s of the rows is shared evenly, the rest is dealt sorted by label."""
    return Division(sorted_owners(data.y_train, clients, rng, s))


def sorted_owners(y: np.ndarray, clients: int, rng: np.random.Generator, s: float) -> np.ndarray:
    """The client of each row: a random fraction s shared evenly, the rest dealt sorted by y."""
    check_value("s", s, Annotated[float, Interval(ge=0, le=1)], SplitError)
    order = rng.permutation(len(y))
    shared = round(s * len(order))
    owner = np.empty(len(order), np.int64)
    owner[order[:shared]] = np.arange(shared) % clients
    rest = order[shared:]
    # Both parts together have equal sizes, so that no client is empty if there are few rows.
    sizes = np.bincount(np.arange(len(order)) % clients, minlength=clients)
    room = sizes - np.bincount(np.arange(shared) % clients, minlength=clients)
    owner[rest[np.argsort(y[rest], kind="stable")]] = np.repeat(np.arange(clients), room)
    return owner


def labels(data: Data, clients: int, rng: np.random.Generator, *, per_client: int = 3) -> Division:
    """Each client holds `per_client` labels, and each label has about equally many clients."""
    check_value("per_client", per_client, Annotated[int, Ge(1)], SplitError)
    assert data.classes is not None  # checked before: labels are dealt
    if per_client > data.classes:
        raise SplitError(
            f"per_client={per_client} is more than the {data.classes} classes of {data.name!r}; "
            "choose at most that many"
        )
    present, counts = np.unique(data.y_train, return_counts=True)
    per_client = min(per_client, len(present))
    if clients * per_client < len(present):
        raise SplitError(
            f"per_client={per_client} labels for {clients} clients leave rows of some of the "
            f"{len(present)} labels without a client; "
            f"raise clients or per_client so that their product is at least {len(present)}"
        )
    holders = _level(np.minimum(counts, clients), clients * per_client)
    labels_of = np.full(clients, holders.sum() // clients)
    labels_of[: holders.sum() % clients] += 1
    # Each client in turn takes the labels with most holders left to find (ties at random): a client
    # never takes a label twice, and since clients with more labels come first the last client finds
    # as many labels as it needs.
    left = holders.copy()
    takers: list[np.ndarray] = []
    taken: list[np.ndarray] = []
    noise = rng.random((clients, len(present)))
    for client, k in enumerate(labels_of):
        chosen = np.argsort(noise[client] - left)[:k]
        left[chosen] -= 1
        taken.append(chosen)
        takers.append(np.full(k, client))
    name = rng.permutation(clients)  # a client's id must not depend on its turn
    holder, held = name[np.concatenate(takers)], np.concatenate(taken)
    owner = np.empty(len(data.y_train), np.int64)
    for index, label in enumerate(present):
        rows = rng.permutation(np.flatnonzero(data.y_train == label))
        who = rng.permutation(holder[held == index])
        owner[rows] = who[np.arange(len(rows)) % len(who)]
    return Division(owner)


def _level(limits: np.ndarray, total: int) -> np.ndarray:
    """Integers as equal as possible with sum `total`, each at most its limit."""
    result = np.zeros_like(limits)
    total = min(total, int(limits.sum()))
    while total > 0:
        open_ = np.flatnonzero(result < limits)
        step = total // len(open_)
        if step == 0:
            result[open_[:total]] += 1
            break
        add = np.minimum(limits[open_] - result[open_], step)
        result[open_] += add
        total -= int(add.sum())
    return result
