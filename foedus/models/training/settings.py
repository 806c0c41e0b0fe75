"""Local training: mini-batch descent on clients' rows, a whole batch of clients at once.

Every averaging method of foedus is this loop with another gradient: that of the local loss, plus a
fixed `correction`, plus a pull towards the starting point (`prox`). Clients of unequal size share a
batch at no cost: they are ordered by their number of steps, and step t runs on those that still
have one, a prefix of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from foedus.base.settings import Settings, check_settings
from foedus.errors import ConfigError
from foedus.models.schedules import Rate


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """How a client trains in one round.

    lr: step size, or a schedule of `fd.schedules`. epochs: passes over the client's rows; steps: a
    number of optimizer steps instead. batch_size: rows in a mini-batch (`None`: all). accumulate:
    mini-batches of one optimizer step, which is that of a single one as large as all; but
    not all of their activations are in memory at once. optimizer: "sgd", "adam", or "adamw", whose
    weight decay is apart from the gradient (w <- (1 - lr weight_decay) w before the step).
    momentum: of SGD (PyTorch's form, v = m v + g). weight_decay: L2 term added to the gradient.
    decay: what has weight decay: "all", or "weights", the parameters of two or more dimensions (no
    biases and scales of norms). clip: largest norm of a step's gradient of the local loss (before
    correction terms and weight decay are added); `None`: no limit. augment: "crop_flip" crops every
    image of a mini-batch at random after padding it by 4, and flips it or not; `None`: rows as they
    are. precision: "bfloat16" or, on a GPU, "float16": the model's forward pass under
    `torch.autocast`; parameters, losses and updates stay float32. `None`: float32 throughout.
    """

    lr: Rate = 0.1
    epochs: Annotated[int, Ge(1)] = 1
    steps: Annotated[int, Ge(1)] | None = None
    batch_size: Annotated[int, Ge(1)] | None = 32
    accumulate: Annotated[int, Ge(1)] = 1
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    weight_decay: Annotated[float, Ge(0)] = 0.0
    decay: Literal["all", "weights"] = "all"
    clip: Annotated[float, Gt(0)] | None = None
    augment: Literal["crop_flip"] | None = None
    precision: Literal["bfloat16", "float16"] | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.accumulate > 1 and self.batch_size is None:
            raise ConfigError(
                f"accumulate={self.accumulate} adds up mini-batches, and batch_size=None has one "
                "of all rows; give the rows of a mini-batch, such as batch_size=32"
            )

    @property
    def step_rows(self) -> int | None:
        """Rows of an optimizer step; `None`: all."""
        return None if self.batch_size is None else self.batch_size * self.accumulate

    def local_steps(self, rows: Tensor) -> Tensor:
        """Optimizer steps in a round of clients with this number of rows."""
        each = torch.ceil(rows / (self.step_rows or rows))
        return torch.full_like(each, self.steps) if self.steps else self.epochs * each

    def decay_of(self, dimensions: int) -> float:
        """The weight decay of a parameter with this number of dimensions."""
        return self.weight_decay if self.decay == "all" or dimensions >= 2 else 0.0
