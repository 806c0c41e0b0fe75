"""Scaffold: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic controlled
averaging for federated learning", ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt

from foedus.algorithms.local_training import LocalTraining
from foedus.base import tree
from foedus.base.settings import Means
from foedus.base.tree import State
from foedus.core.algorithm import Batching, Client
from foedus.core.clients import Clients
from foedus.errors import ConfigError
from foedus.models.base import Params
from foedus.models.schedules import lowest_rate, total_rate
from foedus.models.training.gradients import gradient


@dataclass(frozen=True)
class Scaffold(LocalTraining):
    """Stochastic controlled averaging (Karimireddy et al., 2020).

    Control variates c_i (of client i) and c (their average) take the client's own drift out of
    every local step:

        client i:  y <- x, then K steps y <- y - lr * (g_i(y) - c_i + c)                  line 10
                   c_i+ <- g_i(x), the gradient on all its rows, with weight decay        12, I
                      or   c_i - c + (x - y) / (K lr)                                     12, II
                           (K lr: the sum of the step sizes, where they follow a schedule)
                   sends y - x and the difference c_i+ - c_i                              line 13
        server:    x <- x + server_lr * mean_S(y - x)                                     line 16
                   c <- c + |S|/N * mean_S(c_i+ - c_i)                                    line 17

    Averages count every client equally, as in the paper; `weights="rows"` counts rows in both
    lines.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        weights: How clients count in both averages: "uniform", as in the paper, or "rows".
        option: Which c_i+ of line 12: 1, the gradient at x, or 2, from the distance traveled; 2
            needs plain SGD, since it reads the average gradient off that distance.
        server_lr: Server step size.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.Scaffold(fd.Linear(), lr=0.1), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic controlled
    averaging for federated learning", ICML 2020, Algorithm 1.
    """

    averages_statistics: ClassVar[bool] = True

    weights: Literal["rows", "uniform"] = "uniform"
    option: Annotated[Literal[1, 2], Means("1 (gradient at x) or 2 (from the way travelled)")] = 2
    server_lr: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.option == 2 and (self.optimizer != "sgd" or self.momentum):
            raise ConfigError(
                "Scaffold's option 2 needs plain SGD: use optimizer='sgd' and momentum=0, or "
                "option=1"
            )
        if self.option == 2 and lowest_rate(self.lr) == 0:
            raise ConfigError(
                f"lr={self.lr!r} falls to 0, and Scaffold's option 2 divides by it: use a schedule "
                "that stays above 0, such as end=0.001, or option=1"
            )

    def batching(self) -> Batching:
        return super().batching() if self.option == 2 else replace(super().batching(), spread=1.5)

    def footprint(self, rows: int, row_bytes: int) -> int:
        whole = 3 * rows * row_bytes if self.option == 1 else 0
        return super().footprint(rows, row_bytes) + whole

    def init(self, client: Client) -> Params:
        return tree.zeros_like(self.moving(self.model.init(client.spec, client.shared)))

    def train(self, client: Client, x: Params, c: Params) -> tuple[dict[str, Any], Params]:
        c_i = client.state
        trained = self.descend(client, x, correction=tree.sub(c, c_i))
        move = tree.sub(trained["params"], x)
        if self.option == 1:
            new = gradient(self.model, self.loss_of(client.spec), x, client.data)
            apart = self.optimizer == "adamw"
            decay = {k: 0.0 if apart else self.decay_of(v.dim()) for k, v in x.items()}
            new = {k: torch.add(v, x[k], alpha=decay[k]) for k, v in self.moving(new).items()}
        else:
            most, way = self.most_steps(client.data), self.moving(move)
            total = total_rate(self.lr, client.round, trained["steps"], most)
            new = tree.map(lambda own, all_, m: own - all_ - m / total, c_i, c, way)
        return {"move": move, "control": tree.sub(new, c_i)}, new

    def start(self, clients: Clients) -> State:
        state = super().start(clients)
        return state.replace(c=tree.map(torch.zeros_like, self.moving(state.w)))

    def round(self, clients: Clients, state: State) -> State:
        mean = clients.mean(self.train, weights=self.weights, x=state.w, c=state.c)
        w = self.moved(state.w, mean["move"], self.server_lr)
        return state.replace(w=w, c=tree.add(state.c, mean["control"], clients.share(self.weights)))
