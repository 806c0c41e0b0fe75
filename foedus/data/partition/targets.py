"""Target skew for regression: clients with ranges of y, or unequal mixtures of its quantiles."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from annotated_types import Ge

from foedus.base.settings import check_value
from foedus.data.dataset import Data
from foedus.data.partition.base import Division, deal_test_rows
from foedus.data.partition.labels import dirichlet_owners, sorted_owners
from foedus.errors import SplitError

_MOST_BINS = 100


def targets(data: Data, clients: int, rng: np.random.Generator, *, s: float) -> Division:
    """A random fraction s of the rows is shared evenly, the rest dealt in the order of y."""
    owner = sorted_owners(_first(data.y_train), clients, rng, s)
    # bins that end where ranges of clients do; few, since test rows are dealt bin by bin
    strata = quantile_bins(data, min(clients * math.ceil(10 / clients), _MOST_BINS))
    return Division(owner, deal_test_rows(data, owner, clients, rng, strata))


def quantiles(
    data: Data,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    bins: int = 10,
    min_rows: int = 1,
) -> Division:
    """Dirichlet(alpha) shares of each of the bins between quantiles of y."""
    check_value("bins", bins, Annotated[int, Ge(2)], SplitError)
    strata = quantile_bins(data, bins)
    owner = dirichlet_owners(data, strata[0], clients, rng, alpha, min_rows)
    return Division(owner, deal_test_rows(data, owner, clients, rng, strata))


def quantile_bins(data: Data, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The bin of each training and test row, between the quantiles of y_train."""
    y, y_test = _first(data.y_train), _first(data.y_test)
    edges = np.quantile(y, np.arange(1, bins) / bins)
    return np.searchsorted(edges, y, side="right"), np.searchsorted(edges, y_test, side="right")


def _first(y: np.ndarray) -> np.ndarray:
    """The target by which rows are sorted: the first of several."""
    return y if y.ndim == 1 else y[:, 0]
