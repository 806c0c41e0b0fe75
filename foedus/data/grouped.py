"""Hold out whole groups: all rows of a patient are on one side of the test split."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Lt

from foedus.base.settings import Means, check_value
from foedus.errors import DataError

_PART = Annotated[float, Gt(0), Lt(1), Means("a number above 0 and below 1, such as 0.25")]


def held_out_groups(
    groups: np.ndarray, part: float, seed: int = 0, strata: np.ndarray | None = None
) -> np.ndarray:
    """Which rows to hold out, so that no group has rows on both sides.

    Groups are drawn at random, in each stratum until its held-out rows are as near to `part` of its
    rows as whole groups allow. A group with rows of several strata belongs to the one with most of
    its rows (the smallest of these, in a tie). At least one group is held out, and at least one is
    not.

    Args:
        groups: The group of each row: numbers or texts.
        part: The fraction of the rows to hold out.
        seed: The seed of the draw.
        strata: A label for each row; both sides get their share of each label.

    Returns:
        A bool for each row.

    Raises:
        DataError: There are fewer than two groups, or arrays of unequal length.

    Example:
        >>> held_out_groups(np.array(["ann", "ben", "ann", "cy"]), 0.25).tolist()
        [False, False, False, True]
    """
    check_value("part", part, _PART, DataError)
    check_value("seed", seed, Annotated[int, Ge(0)], DataError)
    groups = np.asarray(groups)
    if groups.ndim != 1 or (strata is not None and np.shape(strata) != groups.shape):
        shapes = f"{groups.shape} and {np.shape(strata)}" if strata is not None else groups.shape
        raise DataError(f"groups and strata have shapes {shapes}; give one entry a row to each")
    names, group = np.unique(groups, return_inverse=True)
    if len(names) < 2:
        raise DataError(
            f"group_holdout needs at least two groups, and there is {len(names)}; leave it out, or "
            "name another column"
        )
    stratum = np.zeros(len(names), np.int64)
    if strata is not None:
        labels, label = np.unique(strata, return_inverse=True)
        counts = np.zeros((len(names), len(labels)), np.int64)
        np.add.at(counts, (group, label), 1)
        stratum = counts.argmax(1)
    sizes = np.bincount(group)
    order = np.lexsort((np.random.default_rng(seed).random(len(names)), stratum))
    ends = np.cumsum(sizes[order])
    rows = np.bincount(stratum, sizes)[stratum[order]]  # of the stratum of each group
    _, firsts, place = np.unique(stratum[order], return_index=True, return_inverse=True)
    before = (ends - sizes[order])[firsts][place]  # rows of earlier strata
    # a group is held out if its middle is below the target: the sum ends nearest to it
    held = np.zeros(len(names), bool)
    held[order] = ends - before - sizes[order] / 2 < part * rows
    if held.all():
        held[order[-1]] = False
    if not held.any():
        held[np.lexsort((order.argsort(), sizes))[0]] = True
    return held[group]
