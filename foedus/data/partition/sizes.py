"""Quantity skew: clients with the same distribution of rows and unequal numbers of them."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.partition.base import Division, check_min_rows, repair
from foedus.errors import SplitError


def quantity(
    data: Data, clients: int, rng: np.random.Generator, *, exponent: float = 1.0, min_rows: int = 1
) -> Division:
    """Sizes by a power law: the client of rank r has a share r^-exponent / sum_q q^-exponent."""
    check_value("exponent", exponent, Annotated[float, Ge(0)], SplitError)
    logs = -exponent * np.log(1 + rng.permutation(clients))
    return _shared_out(data, clients, rng, logs, min_rows)


def lognormal(
    data: Data, clients: int, rng: np.random.Generator, *, sigma: float, min_rows: int = 1
) -> Division:
    """Sizes by a lognormal law: client k has a share exp(sigma z_k) / sum_j exp(sigma z_j)."""
    check_value("sigma", sigma, Annotated[float, Ge(0)], SplitError)
    return _shared_out(data, clients, rng, sigma * rng.standard_normal(clients), min_rows)


def _shared_out(
    data: Data, clients: int, rng: np.random.Generator, logs: np.ndarray, min_rows: int
) -> Division:
    """Random rows in proportion to exp(logs), each size within one row of its share."""
    check_min_rows(data, clients, min_rows)
    share = np.exp(logs - logs.max())
    ends = np.floor(np.cumsum(share / share.sum()) * len(data.y_train) + 0.5).astype(np.int64)
    ends[-1] = len(data.y_train)
    owner = np.empty(len(data.y_train), np.int64)
    sizes = np.diff(ends, prepend=0)
    owner[rng.permutation(len(owner))] = np.repeat(np.arange(clients), sizes)
    return Division(repair(owner, clients, min_rows, rng))
