"""Who takes part in a round: fixed-size cohorts and Poisson sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foedus.base import random
from foedus.base.settings import Settings
from foedus.errors import ConfigError


def cohort(participation: float | Poisson, total: int, key: Tensor) -> Tensor:
    """Positions of the clients that take part in a round, ascending."""
    if isinstance(participation, Poisson):
        return torch.nonzero(
            random.uniform(key, total, torch.float64) < participation.probability
        ).flatten()
    if participation == 1:
        return torch.arange(total)
    return random.subset(key, total, cohort_size(participation, total))


def cohort_size(participation: float, total: int) -> int:
    return max(1, math.floor(participation * total + 0.5))


def expected(participation: float | Poisson, total: int) -> float:
    """The expected fraction of clients in a round.

    With a fraction, it is the size of the cohort (at least one client) over the number of clients.
    """
    return (
        participation.probability
        if isinstance(participation, Poisson)
        else cohort_size(participation, total) / total
    )


@dataclass(frozen=True)
class Poisson(Settings):
    """Participation in which each client takes part in a round independently with this probability.

    A round without any client leaves the state unchanged.

    Args:
        probability: The probability, above 0 and at most 1.

    Raises:
        ConfigError: The probability is out of range.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAvg(), fed, rounds=3, participation=fd.Poisson(0.5))
        >>> bool(run.history.clients.max() <= 10)
        True
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigError(
                f"Poisson({self.probability!r}): the probability must be above 0 and at most 1"
            )
