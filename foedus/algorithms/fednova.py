"""FedNova: Wang, Liu, Liang, Joshi and Poor, "Tackling the objective inconsistency problem in
heterogeneous federated optimization", NeurIPS 2020, Section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from foedus.algorithms.local_training import LocalTraining
from foedus.base import tree
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.errors import ConfigError
from foedus.models.base import Params


@dataclass(frozen=True)
class FedNova(LocalTraining):
    """Normalized averaging: a client that makes more local steps than others does not count more.

        client i:  w_i <- w, then tau_i steps of SGD;  sends d_i = (w_i - w) / a_i
        server:    a <- sum_i p_i a_i;   w <- w + server_lr * a * sum_i p_i d_i

    a_i is the sum of the weights that local training gives to its tau_i gradients, |a_i|_1 in the
    paper: tau_i for plain SGD, and with momentum rho

        a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho).

    Where all clients make the same number of steps, this is FedAvg. tau_i follows from the settings
    and from the client's number of rows, which the server knows, so that a is not asked for. With
    differential privacy, the clip is that of d_i, the change of one step on average, and a
    multiplies the noise of the average.

    Args:
        server_lr: Server step size; 1 is the paper's.
    """

    keeps_layers: ClassVar[bool] = True

    server_lr: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "sgd":
            raise ConfigError("FedNova knows a_i of SGD only: use optimizer='sgd'")

    def scale(self, steps: Tensor) -> Tensor:
        """a_i of a number of local steps tau_i."""
        rho, tau = self.momentum, steps.float()
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)

    def local_steps(self, rows: Tensor) -> Tensor:
        """tau_i of a client with this number of rows."""
        batches = torch.ceil(rows / (self.batch_size or rows))
        return torch.full_like(batches, self.steps) if self.steps else self.epochs * batches

    def train(self, client: Client, w: Params) -> tuple[Params, Any]:
        trained = self.descend(client, w)
        move, state = self.answer(client, w, trained["params"])
        a = self.scale(trained["steps"])
        return tree.map(lambda m: m / a, move), state

    def round(self, clients: Clients, state: State) -> State:
        d = clients.mean(self.train, weights=self.weights, w=state.w)
        rows = (clients.sizes if clients.answered_rows is None else clients.answered_rows).float()
        p = rows / rows.sum() if self.weights == "rows" else torch.full_like(rows, 1 / len(rows))
        a = float(p @ self.scale(self.local_steps(rows)))
        return state.replace(w=tree.add(state.w, d, self.server_lr * a))
