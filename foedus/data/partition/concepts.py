"""Concept shift: labels that mean something else at each client, or in each phase of a drift."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from foedus.base.settings import Means, check_value
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.data.partition.base import Division, deal_test_rows, even_owners
from foedus.data.partition.features import turned
from foedus.errors import SplitError

_PART = Annotated[float, Gt(0), Le(1), Means("a number above 0 and at most 1")]


def permuted(
    data: Data, clients: int, rng: np.random.Generator, *, kinds: int | None = None
) -> Division:
    """Rows at random; client k writes permutation[k][y] for label y."""
    check_value("kinds", kinds, Annotated[int, Ge(1)] | None, SplitError)
    assert data.classes is not None  # checked before
    owner = even_owners(len(data.y_train), clients, rng)
    test_owner = deal_test_rows(data, owner, clients, rng)
    count = clients if kinds is None else min(int(kinds), clients)
    known = np.tile(np.arange(data.classes), (count, 1))
    known[1:] = rng.permuted(known[1:], axis=1)  # the first kind keeps the labels
    own = known[np.arange(clients) % count]
    relabeled = replace(data, y_train=own[owner, data.y_train], y_test=own[test_owner, data.y_test])
    return Division(owner, test_owner, relabeled, {"permutation": own})


def drift(
    fed: Federation,
    kind: Literal["labels", "rotation"] = "labels",
    *,
    phases: int = 2,
    seed: int = 0,
    part: float = 1.0,
    angle: float = 30.0,
    share: float = 1.0,
) -> list[Federation]:
    """Concept drift: a federation whose labels or images change from phase to phase.

        labels      y_t = pi_t(y),   pi_0 the identity,   pi_t = sigma_t pi_(t-1)
        rotation    x_t = x rotated counterclockwise by t * angle degrees

    where sigma_t moves round(part * classes) labels (at least two), drawn at random, in a cycle.
    Clients and rows are the same in all phases, and training and test rows change together. Start
    the run of a phase from that of the phase before; client states begin anew, as after any
    `start=`.

    Args:
        fed: The federation of phase 0.
        kind: What changes: "labels" or "rotation" (of square images).
        phases: The number of phases.
        seed: The seed of the labels and clients that are drawn.
        part: The fraction of the labels that move from one phase to the next.
        angle: Degrees from one phase to the next.
        share: The fraction of the clients that change, the same ones in all phases; at least one.

    Returns:
        A federation for each phase; the first is `fed`, with the phase recorded.

    Raises:
        SplitError: The federation has no labels of rows, or no square images, to change.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> run = None
        >>> for phase in fd.drift(fed, "labels", phases=3, part=0.3):
        ...     run = fd.run(fd.FedAvg(fd.Linear()), phase, rounds=2, start=run)
        >>> len(run.history)
        3
    """
    check_value("kind", kind, Literal["labels", "rotation"], SplitError)
    check_value("phases", phases, Annotated[int, Ge(1)], SplitError)
    check_value("seed", seed, Annotated[int, Ge(0)], SplitError)
    for name, value in (("part", part), ("share", share)):
        check_value(name, value, _PART, SplitError)
    check_value("angle", angle, float, SplitError)
    data, rng = fed.data, np.random.default_rng(seed)
    if kind == "rotation":
        data.refuse_raw()
    if kind == "labels" and data.classes is None:
        raise SplitError(f"kind='labels' needs labels, and {data.name!r} is a regression set")
    if kind == "labels" and data.spec.steps:
        raise SplitError(
            f"kind='labels' needs one label a row, and rows of {data.name!r} have "
            f"{data.spec.steps}, one for each step of a sequence; use kind='rotation'"
        )
    drifting = np.zeros(len(fed), bool)
    drifting[rng.permutation(len(fed))[: max(1, round(share * len(fed)))]] = True
    changed, changed_test = (np.zeros(len(y), bool) for y in (data.y_train, data.y_test))
    changed[fed.rows] = np.repeat(drifting, fed.sizes)
    changed_test[fed.test_rows] = np.repeat(drifting, fed.test_sizes)
    options = {"part": part} if kind == "labels" else {"angle": angle}
    meaning = np.arange(data.classes or 0)
    found = []
    for phase in range(phases):
        seen = data
        if kind == "rotation":
            turn = phase * angle % 360
            x_train, x_test = (
                turned(data, x, np.where(rows, turn, 0.0))
                for x, rows in ((data.x_train, changed), (data.x_test, changed_test))
            )
            seen = replace(data, x_train=x_train, x_test=x_test)
        elif phase:
            moved = rng.permutation(len(meaning))[: max(2, round(part * len(meaning)))]
            circle = np.arange(len(meaning))
            circle[moved] = np.roll(moved, 1)
            meaning = circle[meaning]
            y_train, y_test = (
                np.where(rows, meaning[y], y)
                for y, rows in ((data.y_train, changed), (data.y_test, changed_test))
            )
            seen = replace(data, y_train=y_train, y_test=y_test)
        how = {"drift": kind, "phase": phase, "drift_seed": int(seed), "share": share, **options}
        found.append(replace(fed, data=seen, settings={**fed.settings, **how}))
    return found
