"""Local training: mini-batch descent on one client's rows, run for a whole batch of clients at once.

Every averaging method of foedus is this loop with another gradient: that of the local loss, plus a fixed `correction`,
plus a pull towards the starting point (`prox`). Clients of unequal size share a batch at no cost: they are ordered by
their number of steps, and step t runs on those that still have one, a prefix of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from foedus.errors import ConfigError, unknown


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a client trains in one round.

    lr: step size. optimizer: "sgd" or "adam". momentum: of SGD (PyTorch's form, v = m v + g).
    epochs: passes over the client's rows; steps: a number of mini-batches instead. batch_size: rows in one (`None`: all).
    weight_decay: L2 term added to the gradient. clip: largest norm of a mini-batch gradient of the local loss (before
    correction terms and weight decay are added); `None`: no limit. augment: "crop_flip" crops every image of a mini-batch
    at random after padding it by 4, and flips it or not; `None`: rows as they are.
    """

    lr: float = 0.1
    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 32
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    augment: str | None = None

    def __post_init__(self) -> None:
        def positive(name: str, kind: type = int, optional: bool = False) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            right = isinstance(value, Real if kind is float else Integral) and not isinstance(value, bool)
            if not right or not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value!r} must be a positive {'number' if kind is float else 'whole number'}")

        positive("lr", float)
        positive("epochs")
        positive("steps", optional=True)
        positive("batch_size", optional=True)
        positive("clip", float, optional=True)
        if self.optimizer not in ("sgd", "adam"):
            raise ConfigError(unknown("optimizer", self.optimizer, ["sgd", "adam"]))
        if self.augment not in (None, "crop_flip"):
            raise ConfigError(unknown("augment", self.augment, ["crop_flip", None]))
        if not isinstance(self.momentum, Real) or not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum!r} must be in [0, 1)")
        if not isinstance(self.weight_decay, Real) or not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(f"weight_decay={self.weight_decay!r} must be a number that is not negative")
