"""Rows as a hostile client would have them: labels turned into others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foedus.base.steps import IGNORED
from foedus.data.federation import Federation
from foedus.errors import ConfigError


def poison(fed: Federation, clients: Sequence[int]) -> Federation:
    """The federation in which these clients (by id) train on flipped labels.

    Class c becomes classes - 1 - c, a value its negative.

    Test rows stay as they are.
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
