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
from foedus.models.schedules import rates_of, varies


@dataclass(frozen=True)
class FedNova(LocalTraining):
    """Normalized averaging: more local steps give a client no more weight (Wang et al., 2020).

        client i:  w_i <- w, then tau_i steps of SGD;  sends d_i = (w_i - w) / a_i
        server:    a <- sum_i p_i a_i;   w <- w + server_lr * a * sum_i p_i d_i

    a_i is the sum of the weights that local training gives to its tau_i gradients, |a_i|_1 in the
    paper: tau_i for plain SGD, and with momentum rho

        a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho).

    With a schedule by local step, a gradient counts by its step size in units of the first. Where
    all clients make the same number of steps, this is FedAvg. tau_i follows from the settings and
    from the client's number of rows, which the server knows, so that a is not asked for. With
    differential privacy, the clip is that of d_i, the change of one step on average, and a
    multiplies the noise of the average.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        server_lr: Server step size; 1 is the paper's.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.FedNova(fd.Linear(), lr=0.1, epochs=2), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Wang, Liu, Liang, Joshi and Poor, "Tackling the objective inconsistency problem in
    heterogeneous federated optimization", NeurIPS 2020, Section 5.
    """

    keeps_layers: ClassVar[bool] = True

    server_lr: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "sgd":
            raise ConfigError("FedNova knows a_i of SGD only: use optimizer='sgd'")

    def scale(self, steps: Tensor, most: int) -> Tensor:
        """a_i of a number of local steps tau_i, which is at most `most`."""
        rho, tau = self.momentum, steps.float()
        if not varies(self.lr):
            return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        rates = torch.tensor(rates_of(self.lr, 1, most)).double()
        counts = (1 - rho ** torch.arange(1, most + 1).double()) / (1 - rho)
        sums = torch.nn.functional.pad((rates / rates[0] * counts).cumsum(0), (1, 0))
        return sums.float()[steps.long()]

    def train(self, client: Client, w: Params) -> tuple[Params, Any]:
        trained = self.descend(client, w)
        move, state = self.answer(client, w, trained["params"])
        a = self.scale(trained["steps"], self.most_steps(client.data))
        return tree.map(lambda m: m / a, move), state

    def round(self, clients: Clients, state: State) -> State:
        d = clients.mean(self.train, weights=self.weights, w=state.w)
        rows = (clients.sizes if clients.answered_rows is None else clients.answered_rows).float()
        p = rows / rows.sum() if self.weights == "rows" else torch.full_like(rows, 1 / len(rows))
        steps = self.local_steps(rows)
        a = float(p @ self.scale(steps, int(steps.max())))
        return state.replace(w=tree.add(state.w, d, self.server_lr * a))
