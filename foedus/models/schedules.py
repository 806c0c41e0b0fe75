"""Learning-rate schedules: step sizes that depend on the number of the round or of the local step.

    fd.FedAvg(net, lr=fd.schedules.Cosine(0.1, over=100))                  # by round
    fd.FedAvg(net, lr=fd.schedules.Cosine(0.1, over=50, by="step"))        # within every round
    fd.FedAvg(net, lr=fd.schedules.WarmUp(5, then=fd.schedules.Step(0.1, every=30)))

A step size is a function of t = 0, 1, 2, ... alone: the number of earlier rounds (`by="round"`), or
of local steps that a client has made in this round (`by="step"`: each round begins at 0). A resumed
run therefore continues where it stopped. Where messages are late, a client uses the step size of
the round whose broadcast it received.
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
    """Base of the schedules; subclasses define `at`, `lowest` and `counted`.

    Example:
        >>> schedule = fd.schedules.Cosine(0.1, over=100)
        >>> isinstance(schedule, fd.schedules.Schedule), schedule.at(round=0, step=0)
        (True, 0.1)
    """

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def counted(self) -> frozenset[str]:
        """The counters it depends on: "round", "step" or both."""
        raise NotImplementedError

    @property
    def lowest(self) -> float:
        """The smallest step size."""
        raise NotImplementedError

    def at(self, round: int, step: int) -> float:
        """The step size after a number of rounds and local steps.

        Args:
            round: The number of earlier rounds.
            step: The number of earlier local steps of the round.
        """
        raise NotImplementedError


Rate = Annotated[float, Gt(0)] | Annotated[Schedule, Means("a schedule of fd.schedules")]
"""What a step size may be."""


@dataclass(frozen=True)
class Step(Schedule):
    """Step decay: the step size falls by a factor at regular intervals.

        lr(t) = lr * factor^floor(t / every)

    Args:
        lr: The first step size.
        every: Rounds or local steps between two changes.
        factor: The factor, above 0 and at most 1.
        by: The counter t: "round" or "step".

    Example:
        >>> schedule = fd.schedules.Step(0.1, every=30)
        >>> [round(schedule.at(t, 0), 4) for t in (0, 29, 30, 60)]
        [0.1, 0.1, 0.01, 0.001]
    """

    lr: Annotated[float, Gt(0)]
    every: Annotated[int, Ge(1)]
    factor: Annotated[float, Gt(0), Le(1)] = 0.1
    by: By = "round"

    @property
    def counted(self) -> frozenset[str]:
        """The counters it depends on: "round", "step" or both."""
        return frozenset({self.by})

    @property
    def lowest(self) -> float:
        """The smallest step size."""
        return self.lr * self.factor**1000  # 0 where numbers end

    def at(self, round: int, step: int) -> float:
        return self.lr * self.factor ** ((step if self.by == "step" else round) // self.every)


@dataclass(frozen=True)
class Cosine(Schedule):
    """Cosine annealing from `lr` to `end`.

        lr(t) = end + (lr - end) (1 + cos(pi t / over)) / 2   for t < over,   end from there on

    Args:
        lr: The first step size.
        over: The number of rounds or local steps after which it is `end`.
        end: The last step size.
        by: The counter t: "round" or "step".

    Example:
        >>> schedule = fd.schedules.Cosine(0.1, over=10)
        >>> [round(schedule.at(t, 0), 4) for t in (0, 5, 10, 20)]
        [0.1, 0.05, 0.0, 0.0]
    """

    lr: Annotated[float, Gt(0)]
    over: Annotated[int, Ge(1)]
    end: Annotated[float, Ge(0)] = 0.0
    by: By = "round"

    @property
    def counted(self) -> frozenset[str]:
        """The counters it depends on: "round", "step" or both."""
        return frozenset({self.by})

    @property
    def lowest(self) -> float:
        """The smallest step size."""
        return min(self.lr, self.end)

    def at(self, round: int, step: int) -> float:
        t = min(step if self.by == "step" else round, self.over)
        return self.end + (self.lr - self.end) * (1 + math.cos(math.pi * t / self.over)) / 2


@dataclass(frozen=True)
class WarmUp(Schedule):
    """Linear warm-up to the first step size of another schedule.

        lr(t) = (t + 1) / (over + 1) * then(0)   for t < over,   then(t - over) from there on

    if `then` uses the same counter; otherwise `then` is multiplied by the factor of the warm-up.

    Args:
        over: The number of rounds or local steps of warm-up.
        then: The step size or schedule that follows.
        by: The counter t: "round" or "step".

    Example:
        >>> schedule = fd.schedules.WarmUp(4, then=fd.schedules.Step(0.1, every=30))
        >>> [round(schedule.at(t, 0), 4) for t in (0, 3, 4, 33, 34)]
        [0.02, 0.08, 0.1, 0.1, 0.01]
    """

    over: Annotated[int, Ge(1)]
    then: Rate
    by: By = "round"

    @property
    def counted(self) -> frozenset[str]:
        """The counters it depends on: "round", "step" or both."""
        then = self.then.counted if isinstance(self.then, Schedule) else frozenset()
        return then | {self.by}

    @property
    def lowest(self) -> float:
        """The smallest step size."""
        first = rate_at(self.then, 1, 0) / (self.over + 1)
        return min(first, lowest_rate(self.then))

    def at(self, round: int, step: int) -> float:
        t = step if self.by == "step" else round
        rest = max(0, t - self.over)
        where = (round, rest) if self.by == "step" else (rest, step)
        value = self.then.at(*where) if isinstance(self.then, Schedule) else self.then
        return value * min(1.0, (t + 1) / (self.over + 1))


def varies(lr: float | Schedule) -> bool:
    """Whether a step size changes within a round.

    Args:
        lr: A step size or a schedule.

    Example:
        >>> fd.schedules.varies(0.1), fd.schedules.varies(fd.schedules.Step(0.1, 5, by="step"))
        (False, True)
    """
    return isinstance(lr, Schedule) and "step" in lr.counted


def follows_rounds(lr: float | Schedule) -> bool:
    """Whether a step size changes from round to round.

    Args:
        lr: A step size or a schedule.

    Example:
        >>> fd.schedules.follows_rounds(0.1), fd.schedules.follows_rounds(fd.schedules.Step(0.1, 5))
        (False, True)
    """
    return isinstance(lr, Schedule) and "round" in lr.counted


def rate_at(lr: float | Schedule, round: int, step: int = 0) -> float:
    """The step size of a local step of a round.

    Args:
        lr: A step size or a schedule.
        round: The round, from 1.
        step: The local step, from 0.

    Example:
        >>> schedule = fd.schedules.Cosine(0.1, over=10)
        >>> round(fd.schedules.rate_at(schedule, 1), 3), round(fd.schedules.rate_at(schedule, 6), 3)
        (0.1, 0.05)
    """
    return lr.at(max(0, round - 1), step) if isinstance(lr, Schedule) else lr


def lowest_rate(lr: float | Schedule) -> float:
    """The smallest step size that can occur.

    Args:
        lr: A step size or a schedule.

    Example:
        >>> fd.schedules.lowest_rate(fd.schedules.Cosine(0.1, over=10, end=0.01))
        0.01
    """
    return lr.lowest if isinstance(lr, Schedule) else lr


def rates_of(lr: float | Schedule, round: int, steps: int) -> list[float]:
    """The step sizes of all local steps of a round.

    Args:
        lr: A step size or a schedule.
        round: The round, from 1.
        steps: The number of local steps.

    Example:
        >>> fd.schedules.rates_of(fd.schedules.Step(0.1, every=2, factor=0.5, by="step"), 1, 4)
        [0.1, 0.1, 0.05, 0.05]
    """
    if varies(lr):
        return [rate_at(lr, round, step) for step in range(steps)]
    return [rate_at(lr, round)] * steps


def total_rate(lr: float | Schedule, round: int, steps: Tensor, most: int) -> Tensor:
    """The sum of the step sizes of each client's local steps.

    Args:
        lr: A step size or a schedule.
        round: The round, from 1.
        steps: The number of local steps of each client.
        most: The largest number of local steps.

    Example:
        >>> schedule = fd.schedules.Step(0.5, every=1, factor=0.5, by="step")
        >>> fd.schedules.total_rate(schedule, 1, torch.tensor([1, 2]), most=2).tolist()
        [0.5, 0.75]
    """
    if not varies(lr):
        return steps * rate_at(lr, round)
    sums = torch.tensor([0.0, *rates_of(lr, round, most)]).double().cumsum(0).float()
    return sums[steps]
