"""Local training: mini-batch descent on clients' rows, for a whole batch of clients at once.

All averaging methods of foedus use this loop with another gradient: that of the local loss, plus a
constant `correction`, plus a proximal term that pulls towards the starting point (`prox`). Clients
of unequal size share a batch at no cost: they are ordered by their number of steps, and step t runs
on those with at least t steps, a prefix of the batch.
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

    Args:
        lr: The step size (learning rate), or a schedule of `fd.schedules`.
        epochs: Passes over the client's rows.
        steps: The number of optimizer steps, in place of `epochs`.
        batch_size: Rows per mini-batch; `None`: all rows.
        accumulate: Mini-batches per optimizer step. The step equals that of one mini-batch of all
            these rows, but not all of their activations are in memory at once.
        optimizer: "sgd", "adam", or "adamw", whose weight decay is separate from the gradient (w <-
            (1 - lr weight_decay) w before the step).
        momentum: The momentum m of SGD, in PyTorch's form v = m v + g.
        weight_decay: The factor of the L2 term that is added to the gradient.
        decay: The parameters with weight decay: "all", or "weights", those of two or more
            dimensions (not biases and scales of norms).
        clip: The largest norm of a step's gradient of the local loss, before correction terms and
            weight decay are added; `None`: no limit.
        augment: "crop_flip" pads every image of a mini-batch by 4, crops it at random, and flips it
            or not; `None`: rows are used as they are.
        precision: "bfloat16" or, on a GPU, "float16": the model's forward pass runs under
            `torch.autocast`; parameters, losses and updates stay float32. `None`: float32
            throughout.

    Raises:
        ConfigError: A setting is out of range.

    Example:
        >>> how = fd.Training(lr=0.1, epochs=2, batch_size=32)
        >>> how.local_steps(torch.tensor([64.0, 100.0])).tolist()
        [4.0, 8.0]
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
        """The number of rows of an optimizer step; `None`: all."""
        return None if self.batch_size is None else self.batch_size * self.accumulate

    def local_steps(self, rows: Tensor) -> Tensor:
        """The number of optimizer steps of each client in a round.

        Args:
            rows: The number of rows of each client.
        """
        each = torch.ceil(rows / (self.step_rows or rows))
        return torch.full_like(each, self.steps) if self.steps else self.epochs * each

    def decay_of(self, dimensions: int) -> float:
        """The weight decay of a parameter.

        Args:
            dimensions: The number of dimensions of the parameter.
        """
        return self.weight_decay if self.decay == "all" or dimensions >= 2 else 0.0
