"""Divide a data set among clients: every training row goes to one client, and no client is empty.

A scheme is a function `(data, clients, rng, **options) -> owner`, where `owner[i]` is the client of
training row i. Test rows are dealt so that each client's follow its training distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Interval

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.errors import SplitError, unknown


def split(
    data: Data, scheme: str = "iid", *, clients: int | None = None, seed: int = 0, **options
) -> Federation:
    """Divide the rows of `data` among `clients`; the same seed gives the same division.

    - `"iid"`: rows at random, sizes equal up to one row.
    - `"dirichlet"` (`alpha`, `min_rows=1`): the shares of each label among the clients are drawn
      from a Dirichlet distribution with parameter alpha (Hsu et al. 2019; Wang et al. 2020).
      Clients below `min_rows` then receive rows of the largest.
    - `"homogeneity"` (`s`): a random part s of the rows is shared evenly, the rest is sorted by
      label and handed out in that order (FFGB; Karimireddy et al. 2020; Hsu et al. 2020). Sizes are
      equal up to one row.
    - `"labels"` (`per_client=3`): each client holds rows of exactly that many labels (of fewer only
      where labels have fewer rows than clients that should hold them), and each label is held by
      about equally many clients (FedFW, Section 5).
    - `"tasks"` (`n0=30`, `merged=0.3`): FedRes' binary tasks, see `_tasks`. By its definition it
      uses only part of the rows.
    - `"natural"`: the groups of the data say whose row it is. `clients`, if given, must be their
      number.

    Test rows of a label are dealt to clients in proportion to their training rows of it (in
    proportion to size for regression); natural test rows go by `groups_test`, and those of a group
    without training rows stay in the common test set only.
    """
    if scheme not in SCHEMES and scheme not in ("natural", "tasks"):
        raise SplitError(unknown("scheme", scheme, [*SCHEMES, "tasks", "natural"]))
    _check_options(scheme, options)
    check_value("seed", seed, Annotated[int, Ge(0)], SplitError)
    rng = np.random.default_rng(seed)
    if scheme == "natural":
        return _natural(data, clients, rng)
    if clients is None:
        raise SplitError(f"scheme {scheme!r} needs clients=, the number of clients")
    check_value("clients", clients, Annotated[int, Ge(1)], SplitError)
    clients = int(clients)
    if clients > len(data.x_train):
        raise SplitError(
            f"clients={clients} is more than the {len(data.x_train)} training rows of "
            f"{data.name!r}; no client may be empty"
        )
    if data.classes is None and scheme != "iid":
        raise SplitError(
            f"scheme {scheme!r} divides by label, and {data.name!r} is a regression set; use 'iid' "
            "or 'natural'"
        )
    if scheme == "tasks":
        return _tasks(data, clients, seed, rng, **options)
    owner = SCHEMES[scheme](data, clients, rng, **options)
    test_owner = deal_test_rows(data, owner, clients, rng)
    settings = {"clients": clients, "seed": int(seed), **options}
    for p in scheme_options(SCHEMES[scheme]):
        settings.setdefault(p.name, p.default)
    return Federation.from_owners(data, owner, test_owner, np.arange(clients), scheme, settings)


def scheme_options(scheme: Callable) -> list[inspect.Parameter]:
    parameters = inspect.signature(scheme).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _check_options(scheme: str, options: dict) -> None:
    functions: dict[str, Callable] = {"natural": _natural, "tasks": _tasks, **SCHEMES}
    parameters = scheme_options(functions[scheme])
    for name in options:
        if name not in [p.name for p in parameters]:
            takes = ", ".join(p.name for p in parameters) or "none"
            raise SplitError(f"option {name!r} is unknown to scheme {scheme!r} (allowed: {takes})")
    for p in parameters:
        if p.default is inspect.Parameter.empty and p.name not in options:
            raise SplitError(f"scheme {scheme!r} needs {p.name}=, for example {p.name}=0.5")


# Schemes


def _iid(data: Data, clients: int, rng: np.random.Generator) -> np.ndarray:
    owner = np.empty(len(data.y_train), np.int64)
    owner[rng.permutation(len(owner))] = np.arange(len(owner)) % clients
    return owner


def _dirichlet(
    data: Data, clients: int, rng: np.random.Generator, *, alpha: float, min_rows: int = 1
) -> np.ndarray:
    check_value("alpha", alpha, Annotated[float, Gt(0)], SplitError)
    check_value("min_rows", min_rows, Annotated[int, Ge(1)], SplitError)
    if clients * min_rows > len(data.y_train):
        raise SplitError(
            f"min_rows={min_rows} for {clients} clients is more than the {len(data.y_train)} "
            f"training rows of {data.name!r}"
        )
    owner = np.empty(len(data.y_train), np.int64)
    for label in np.unique(data.y_train):
        rows = rng.permutation(np.flatnonzero(data.y_train == label))
        share = rng.dirichlet(np.full(clients, alpha))
        # the draw underflows for a minute alpha, whose limit is one client for all
        if not np.isclose(share.sum(), 1.0):
            share = np.bincount([rng.integers(clients)], minlength=clients).astype(np.float64)
        ends = np.floor(np.cumsum(share) * len(rows) + 0.5)
        ends[-1] = len(rows)
        owner[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right")
    return _repair(owner, clients, min_rows, rng)


def _repair(owner: np.ndarray, clients: int, least: int, rng: np.random.Generator) -> np.ndarray:
    """Give clients with fewer than `least` rows random rows of the largest clients, in turn."""
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


def _homogeneity(data: Data, clients: int, rng: np.random.Generator, *, s: float) -> np.ndarray:
    check_value("s", s, Annotated[float, Interval(ge=0, le=1)], SplitError)
    order = rng.permutation(len(data.y_train))
    shared = round(s * len(order))
    owner = np.empty(len(order), np.int64)
    owner[order[:shared]] = np.arange(shared) % clients
    rest = order[shared:]
    # Both parts fill the same equal sizes, so that no client ends with nothing where rows are few.
    sizes = np.bincount(np.arange(len(order)) % clients, minlength=clients)
    room = sizes - np.bincount(np.arange(shared) % clients, minlength=clients)
    owner[rest[np.argsort(data.y_train[rest], kind="stable")]] = np.repeat(np.arange(clients), room)
    return owner


def _labels(
    data: Data, clients: int, rng: np.random.Generator, *, per_client: int = 3
) -> np.ndarray:
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
            f"{len(present)} labels to nobody; "
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
    name = rng.permutation(clients)  # who came first must not show in the client's number
    holder, held = name[np.concatenate(takers)], np.concatenate(taken)
    owner = np.empty(len(data.y_train), np.int64)
    for index, label in enumerate(present):
        rows = rng.permutation(np.flatnonzero(data.y_train == label))
        who = rng.permutation(holder[held == index])
        owner[rows] = who[np.arange(len(rows)) % len(who)]
    return owner


def _level(limits: np.ndarray, total: int) -> np.ndarray:
    """Integers as equal as possible that sum to `total`, each at most its limit."""
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


SCHEMES: dict[str, Callable[..., np.ndarray]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "homogeneity": _homogeneity,
    "labels": _labels,
}


def _natural(data: Data, clients: int | None, rng: np.random.Generator) -> Federation:
    if data.groups_train is None:
        raise SplitError(
            f"scheme 'natural' needs groups, and {data.name!r} has none; load it with group=, or "
            "give Data groups_train"
        )
    ids, owner = np.unique(data.groups_train, return_inverse=True)
    check_value("clients", clients, Annotated[int, Ge(1)] | None, SplitError)
    if clients is not None and clients != len(ids):
        raise SplitError(
            f"clients={clients}, but {data.name!r} has {len(ids)} groups; leave clients out, then "
            ".select() those you want"
        )
    if data.groups_test is None:
        test_owner = deal_test_rows(data, owner, len(ids), rng)
    else:
        place = np.minimum(np.searchsorted(ids, data.groups_test), len(ids) - 1)
        test_owner = np.where(ids[place] == data.groups_test, place, -1)
    return Federation.from_owners(data, owner, test_owner, ids, "natural", {"clients": len(ids)})


def deal_test_rows(
    data: Data, owner: np.ndarray, clients: int, rng: np.random.Generator
) -> np.ndarray:
    """The client of each test row: each label in proportion to the clients' training rows of it.

    A label without training rows, and all rows of a regression set, go in proportion to the
    clients' sizes.
    """
    test_owner = np.empty(len(data.y_test), np.int64)
    sizes = np.bincount(owner, minlength=clients)
    y_train = np.zeros(len(data.y_train), np.int64) if data.classes is None else data.y_train
    y_test = np.zeros(len(data.y_test), np.int64) if data.classes is None else data.y_test
    for label in np.unique(y_test):
        weights = np.bincount(owner[y_train == label], minlength=clients)
        rows = rng.permutation(np.flatnonzero(y_test == label))
        counts = apportion(weights if weights.any() else sizes, len(rows), rng)
        test_owner[rows] = np.repeat(np.arange(clients), counts)
    return test_owner


def apportion(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Integers in proportion to weights that sum to `total`: largest remainders, ties at random."""
    quota, remainder = np.divmod(weights.astype(np.int64) * total, int(weights.sum()))
    left = total - int(quota.sum())
    if left:
        quota[np.lexsort((rng.random(len(quota)), -remainder))[:left]] += 1
    return quota


def _tasks(
    data: Data,
    clients: int,
    seed: int,
    rng: np.random.Generator,
    *,
    n0: int = 30,
    merged: float = 0.3,
) -> Federation:
    """FedRes, Section 6.1: a binary task a client, the merged class C_0 against one other class.

    1. A random set A of floor(0.3 K) classes (`merged`) becomes C_0, label 0.
    2. The rows of A are dealt out at random, N to a client, where N = min(N_0, #A / clients) (`n0`
       is N_0).
    3. The rows of each class outside A are cut into buckets of N rows; each client gets a random
       bucket, label 1.

    Each client thus has 2 N rows, balanced, and no row is in two clients; rows that are left over
    are used by nobody. Half of the features, at random, are global and the others local. The paper
    leaves open what happens where the rows do not suffice: here N is lowered until there is a
    bucket for each client, and A is drawn again (up to 100 times) where N would be 0. Test rows are
    dealt likewise: those of A evenly, those of another class evenly among the clients with that
    task, then cut to equal numbers of both labels in each client (which may be none where test rows
    are fewer than clients).

    The result has a new `Data` of the rows used, with binary labels and the client as group.
    `settings` holds `task` (the class each client must tell from C_0, by client id),
    `merged_classes` (A), `rows_per_class` (N), `global_features`, `local_features` (indices of flat
    features), and `source_rows`, `source_test_rows` (rows of the original set).
    """
    check_value("n0", n0, Annotated[int, Ge(1)], SplitError)
    n0 = int(n0)
    check_value("merged", merged, Annotated[float, Interval(ge=0, le=1)], SplitError)
    assert data.classes is not None
    count = int(merged * data.classes + 1e-9)
    if not 1 <= count < data.classes:
        raise SplitError(
            f"merged={merged:g} of the {data.classes} classes of {data.name!r} merges {count}; at "
            "least one must be merged and one left (FedRes uses sets of at least 6 classes)"
        )
    own_rows = (np.flatnonzero(data.y_train == label) for label in range(data.classes))
    class_rows = [rng.permutation(rows) for rows in own_rows]
    sizes = np.array([len(rows) for rows in class_rows])
    for _ in range(100):
        merged_classes = np.sort(rng.choice(data.classes, count, replace=False))
        others = np.setdiff1d(np.arange(data.classes), merged_classes)
        n = min(n0, int(sizes[merged_classes].sum()) // clients)
        while n > 0 and (sizes[others] // n).sum() < clients:
            n -= 1
        if n > 0:
            break
    else:
        raise SplitError(
            f"clients={clients} is too many for binary tasks on {data.name!r}: there is not a row "
            "of each class for each client"
        )
    zeros = rng.permutation(np.concatenate([class_rows[label] for label in merged_classes]))
    zeros = zeros[: n * clients].reshape(clients, n)
    kept = (class_rows[c][: sizes[c] // n * n] for c in others)
    buckets = np.concatenate([rows.reshape(-1, n) for rows in kept])
    ones = buckets[rng.permutation(len(buckets))[:clients]]
    rows = np.concatenate([zeros, ones], axis=1)
    task = data.y_train[ones[:, 0]]

    test_label, test_owner = _task_test_rows(data, merged_classes, task, rng)
    test_rows = np.flatnonzero(test_owner >= 0)
    test_rows = test_rows[np.argsort(test_owner[test_rows], kind="stable")]
    features = rng.permutation(int(np.prod(data.x_train.shape[1:])))
    half = len(features) // 2
    # a client's rows come in no order of labels
    order = rng.permuted(np.tile(np.arange(2 * n), (clients, 1)), axis=1)
    source = np.take_along_axis(rows, order, axis=1).reshape(-1)
    names = None
    if data.class_names is not None:
        names = ("+".join(data.class_names[c] for c in merged_classes), "other")
    relabelled = Data(
        data.name, data.x_train[source], (order.reshape(-1) >= n).astype(np.int64),
        data.x_test[test_rows], test_label[test_rows], 2, names,
        np.repeat(np.arange(clients), 2 * n), test_owner[test_rows], None, data.scaling,
    )  # fmt: skip
    settings = {
        "clients": clients, "seed": int(seed), "n0": n0, "merged": merged, "rows_per_class": n,
        "merged_classes": merged_classes, "task": task,
        "global_features": np.sort(features[:half]), "local_features": np.sort(features[half:]),
        "source_rows": source, "source_test_rows": test_rows,
    }  # fmt: skip
    owner, held = relabelled.groups_train, relabelled.groups_test
    assert owner is not None and held is not None
    return Federation.from_owners(relabelled, owner, held, np.arange(clients), "tasks", settings)


def _task_test_rows(
    data: Data, merged_classes: np.ndarray, task: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Binary label and client of each test row (-1: of nobody), balanced within each client."""
    clients = len(task)
    label = (~np.isin(data.y_test, merged_classes)).astype(np.int64)
    owner = np.full(len(data.y_test), -1, np.int64)

    def deal(rows: np.ndarray, who: np.ndarray) -> None:
        if len(who):
            owner[rng.permutation(rows)] = rng.permutation(who)[np.arange(len(rows)) % len(who)]

    deal(np.flatnonzero(label == 0), np.arange(clients))
    for c in np.unique(task):
        deal(np.flatnonzero(data.y_test == c), np.flatnonzero(task == c))
    held = owner >= 0
    counts = np.stack([np.bincount(owner[held & (label == b)], minlength=clients) for b in (0, 1)])
    keep = counts.min(0)
    for b in (0, 1):
        rows = rng.permutation(np.flatnonzero(held & (label == b)))
        rows = rows[np.argsort(owner[rows], kind="stable")]
        height = np.arange(len(rows)) - np.repeat(np.cumsum(counts[b]) - counts[b], counts[b])
        owner[rows[height >= keep[owner[rows]]]] = -1
    return label, owner
