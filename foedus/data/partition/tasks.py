"""FedRes' binary tasks."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Interval

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.partition.base import Division
from foedus.errors import SplitError


def tasks(
    data: Data,
    clients: int,
    rng: np.random.Generator,
    *,
    n0: int = 30,
    merged: float = 0.3,
) -> Division:
    """FedRes, Section 6.1: a binary task per client, the merged class C_0 against another class.

    1. A random set A of floor(0.3 K) classes (`merged`) becomes C_0, label 0.
    2. The rows of A are dealt at random, N to each client, with N = min(N_0, #A / clients) (`n0` is
       N_0).
    3. The rows of each class outside A are cut into buckets of N rows; each client gets a random
       bucket, label 1.

    Each client thus has 2 N rows, balanced; no row is in two clients, and rows that are left over
    are not used. A random half of the features is global, the other half local. The paper does not
    say what happens if the rows do not suffice: here N is lowered until there is a bucket for each
    client, and A is drawn again (up to 100 times) if N would be 0. Test rows are dealt likewise:
    those of A evenly, those of another class evenly among the clients with that task, then cut to
    equal numbers of both labels in each client (possibly none, if there are fewer test rows than
    clients).

    The result has a new `Data` of the rows used, with binary labels and the client as group.
    `settings` has `task` (the class that each client must tell from C_0, by client id),
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
    # a client's rows are not sorted by label
    order = rng.permuted(np.tile(np.arange(2 * n), (clients, 1)), axis=1)
    source = np.take_along_axis(rows, order, axis=1).reshape(-1)
    names = None
    if data.class_names is not None:
        names = ("+".join(data.class_names[c] for c in merged_classes), "other")
    relabelled = Data(
        data.name, data.x_train[source], (order.reshape(-1) >= n).astype(np.int64),
        data.x_test[test_rows], test_label[test_rows], 2, names,
        np.repeat(np.arange(clients), 2 * n), test_owner[test_rows], None, data.scaling,
        weights_train=None if data.weights_train is None else data.weights_train[source],
        weights_test=None if data.weights_test is None else data.weights_test[test_rows],
    )  # fmt: skip
    settings = {
        "rows_per_class": n, "merged_classes": merged_classes, "task": task,
        "global_features": np.sort(features[:half]), "local_features": np.sort(features[half:]),
        "source_rows": source, "source_test_rows": test_rows,
    }  # fmt: skip
    owner, held = relabelled.groups_train, relabelled.groups_test
    assert owner is not None
    return Division(owner, held, relabelled, settings)


def _task_test_rows(
    data: Data, merged_classes: np.ndarray, task: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Binary label and client (-1: none) of each test row, balanced within each client."""
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
