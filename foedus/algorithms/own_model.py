"""Base classes of the methods that give each client a personal model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from foedus.algorithms.fedavg import FedAvg
from foedus.core.algorithm import Client
from foedus.models.base import Params
from foedus.models.schedules import Rate


@dataclass(frozen=True)
class OwnModel(FedAvg):
    """FedAvg whose clients keep a personal model, the `w` of their state.

    It is evaluated on the client's own test rows (`own_accuracy`). A client that has not taken part
    yet has the initial model.
    """

    personal: ClassVar[bool] = True

    def init(self, client: Client) -> dict[str, Params]:
        return {"w": self.model.init(client.spec, client.shared)}


@dataclass(frozen=True)
class OwnTraining(OwnModel):
    """`OwnModel` with settings for the training of the parameters that stay at the client.

    Args:
        own_lr: Step size of that training, or a schedule; `None`: `lr`.
        own_steps: Its number of mini-batches; `None`: as many as of the shared model.
    """

    own_lr: Rate | None = None
    own_steps: Annotated[int, Ge(1)] | None = None

    def descend_own(self, client: Client, w: Params, **terms: Any) -> Params:
        how = replace(self, lr=self.own_lr or self.lr, steps=self.own_steps or self.steps)
        return how.descend(client, w, **terms)["params"]
