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
    """Positions of the clients that take part in a round, in order."""
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
    """The part of all clients that takes part in a round, on average: whole clients, and at least
    one.
    """
    return (
        participation.probability
        if isinstance(participation, Poisson)
        else cohort_size(participation, total) / total
    )


@dataclass(frozen=True)
class Poisson(Settings):
    """Participation in which every client takes part independently, with this probability, in each
    round.

    A round in which nobody takes part leaves the state as it is.
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigError(
                f"Poisson({self.probability!r}): the probability must be above 0 and at most 1"
            )
