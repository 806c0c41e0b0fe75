"""Rows as a hostile client would have them: labels turned into others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foedus.base.steps import IGNORED
from foedus.data.federation import Federation
from foedus.errors import ConfigError


def poison(fed: Federation, clients: Sequence[int]) -> Federation:
    """A federation in which some clients train on flipped labels, to test robust aggregation.

        y <- classes - 1 - y   for classes,       y <- -y   for regression

    Test rows are unchanged.

    Args:
        fed: The federation.
        clients: The ids of the clients whose labels are flipped.

    Returns:
        The poisoned federation.

    Raises:
        ConfigError: A client id is not in the federation.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> rows, bad = fed.client_rows(0), fd.poison(fed, [0])
        >>> bool((bad.data.y_train[rows] == 9 - fed.data.y_train[rows]).all())
        True
    """
    place = {int(i): p for p, i in enumerate(fed.ids)}
    if strange := [i for i in clients if i not in place]:
        raise ConfigError(
            f"clients names {strange[0]!r}, who is not in the federation of {len(fed)} clients"
        )
    rows = np.concatenate([fed.rows[:0], *(fed.client_rows(place[int(i)]) for i in clients)])
    y = fed.data.y_train.copy()
    if fed.data.classes is None:
        y[rows] = -y[rows]
    else:
        y[rows] = np.where(y[rows] == IGNORED, IGNORED, fed.data.classes - 1 - y[rows])
    return replace(fed, data=replace(fed.data, y_train=y))
