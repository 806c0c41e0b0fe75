"""Local training: mini-batch descent on clients' rows, a whole batch of clients at once.

Every averaging method of foedus is this loop with another gradient: that of the local loss, plus a
fixed `correction`, plus a pull towards the starting point (`prox`). Clients of unequal size share a
batch at no cost: they are ordered by their number of steps, and step t runs on those that still
have one, a prefix of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from foedus.base.settings import Settings, check_settings


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """How a client trains in one round.

    lr: step size. optimizer: "sgd" or "adam". momentum: of SGD (PyTorch's form, v = m v + g).
    epochs: passes over the client's rows; steps: a number of mini-batches instead. batch_size: rows
    in one (`None`: all). weight_decay: L2 term added to the gradient. clip: largest norm of a
    mini-batch gradient of the local loss (before correction terms and weight decay are added);
    `None`: no limit. augment: "crop_flip" crops every image of a mini-batch at random after padding
    it by 4, and flips it or not; `None`: rows as they are.
    """

    lr: Annotated[float, Gt(0)] = 0.1
    epochs: Annotated[int, Ge(1)] = 1
    steps: Annotated[int, Ge(1)] | None = None
    batch_size: Annotated[int, Ge(1)] | None = 32
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    weight_decay: Annotated[float, Ge(0)] = 0.0
    clip: Annotated[float, Gt(0)] | None = None
    augment: Literal["crop_flip"] | None = None

    def __post_init__(self) -> None:
        check_settings(self)
