"""Learning-rate schedules: step sizes that follow the number of the round or of the local step.

    fd.FedAvg(net, lr=fd.schedules.Cosine(0.1, over=100))                  # by round
    fd.FedAvg(net, lr=fd.schedules.Cosine(0.1, over=50, by="step"))        # within every round
    fd.FedAvg(net, lr=fd.schedules.WarmUp(5, then=fd.schedules.Step(0.1, every=30)))

With t = 0, 1, 2, ... the rounds before this one (`by="round"`), or the local steps that a client
has made in this round (`by="step"`: every round begins at 0), a step size is a function of t alone,
so a run that is resumed goes on where it stopped. Where messages are late, a client uses the step
size of the round whose broadcast it was sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from foedus.base.settings import Means, Settings, check_settings

By = Literal["round", "step"]


class Schedule(Settings):
    """Base of the schedules: `at(round, step)` is the step size after a number of rounds and local
    steps, and `lowest` the least that there is.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def counted(self) -> frozenset[str]:
        """What it depends on: "round", "step" or both."""
        raise NotImplementedError

    @property
    def lowest(self) -> float:
        raise NotImplementedError

    def at(self, round: int, step: int) -> float:
        raise NotImplementedError


Rate = Annotated[float, Gt(0)] | Annotated[Schedule, Means("a schedule of fd.schedules")]
"""What a step size may be."""


@dataclass(frozen=True)
class Step(Schedule):
    """lr * factor^floor(t / every): the step size falls after each `every` rounds or steps.

    Args:
        lr: The first step size.
        every: Rounds or local steps after which it falls.
        factor: By what it is multiplied then.
        by: What is counted.
    """

    lr: Annotated[float, Gt(0)]
    every: Annotated[int, Ge(1)]
    factor: Annotated[float, Gt(0), Le(1)] = 0.1
    by: By = "round"

    @property
    def counted(self) -> frozenset[str]:
        return frozenset({self.by})

    @property
    def lowest(self) -> float:
        return self.lr * self.factor**1000  # 0 where numbers end

    def at(self, round: int, step: int) -> float:
        return self.lr * self.factor ** ((step if self.by == "step" else round) // self.every)


@dataclass(frozen=True)
class Cosine(Schedule):
    """end + (lr - end) (1 + cos(pi t / over)) / 2 for t < over, and `end` from there on.

    Args:
        lr: The first step size.
        over: Rounds or local steps until it is `end`.
        end: The last step size.
        by: What is counted.
    """

    lr: Annotated[float, Gt(0)]
    over: Annotated[int, Ge(1)]
    end: Annotated[float, Ge(0)] = 0.0
    by: By = "round"

    @property
    def counted(self) -> frozenset[str]:
        return frozenset({self.by})

    @property
    def lowest(self) -> float:
        return min(self.lr, self.end)

    def at(self, round: int, step: int) -> float:
        t = min(step if self.by == "step" else round, self.over)
        return self.end + (self.lr - self.end) * (1 + math.cos(math.pi * t / self.over)) / 2


@dataclass(frozen=True)
class WarmUp(Schedule):
    """(t + 1) / (over + 1) of the first step size of `then` for t < over; after that `then`, whose
    own count begins there if it counts the same.

    Args:
        over: Rounds or local steps of rising step sizes.
        then: What follows: a step size or a schedule.
        by: What is counted.
    """

    over: Annotated[int, Ge(1)]
    then: Rate
    by: By = "round"

    @property
    def counted(self) -> frozenset[str]:
        then = self.then.counted if isinstance(self.then, Schedule) else frozenset()
        return then | {self.by}

    @property
    def lowest(self) -> float:
        first = rate_at(self.then, 1, 0) / (self.over + 1)
        return min(first, lowest_rate(self.then))

    def at(self, round: int, step: int) -> float:
        t = step if self.by == "step" else round
        rest = max(0, t - self.over)
        where = (round, rest) if self.by == "step" else (rest, step)
        value = self.then.at(*where) if isinstance(self.then, Schedule) else self.then
        return value * min(1.0, (t + 1) / (self.over + 1))


def varies(lr: float | Schedule) -> bool:
    """Whether a step size changes within a round."""
    return isinstance(lr, Schedule) and "step" in lr.counted


def follows_rounds(lr: float | Schedule) -> bool:
    """Whether a step size changes from round to round."""
    return isinstance(lr, Schedule) and "round" in lr.counted


def rate_at(lr: float | Schedule, round: int, step: int = 0) -> float:
    """The step size of a local step (from 0) in a round (from 1)."""
    return lr.at(max(0, round - 1), step) if isinstance(lr, Schedule) else lr


def lowest_rate(lr: float | Schedule) -> float:
    """The least step size there is."""
    return lr.lowest if isinstance(lr, Schedule) else lr


def rates_of(lr: float | Schedule, round: int, steps: int) -> list[float]:
    """The step sizes of the local steps of a round."""
    if varies(lr):
        return [rate_at(lr, round, step) for step in range(steps)]
    return [rate_at(lr, round)] * steps


def total_rate(lr: float | Schedule, round: int, steps: Tensor, most: int) -> Tensor:
    """The sum of the step sizes of a number of local steps (`steps`, each at most `most`)."""
    if not varies(lr):
        return steps * rate_at(lr, round)
    sums = torch.tensor([0.0, *rates_of(lr, round, most)]).double().cumsum(0).float()
    return sums[steps]
