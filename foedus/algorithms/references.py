"""The two references: separate models for all clients, and one model of the pooled data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from foedus.algorithms.local_training import LocalTraining
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.models.base import Params
from foedus.models.training.memory import fresh_memory


@dataclass(frozen=True)
class Independent(LocalTraining):
    """Every client trains its own model on its own rows; nothing is sent.

    This is what clients reach without each other. The model is evaluated on the client's own test
    rows (`own_accuracy`), and on the global test set (`accuracy`: the average over clients).

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.1, min_rows=10)
        >>> run = fd.run(fd.Independent(fd.Linear(), lr=0.1), fed, rounds=5)
        >>> last = run.history.iloc[-1]
        >>> last.own_accuracy > 0.9, last.accuracy < 0.5
        (True, True)
    """

    personal: ClassVar[bool] = True
    averages_statistics: ClassVar[bool] = True  # each keeps its own
    keeps_layers: ClassVar[bool] = True
    divided: ClassVar[bool] = False  # nothing is sent

    def init(self, client: Client) -> dict[str, Any]:
        w = self.model.init(client.spec, client.shared)
        return {"w": w, "memory": fresh_memory(self, w)}

    def train(self, client: Client) -> tuple[dict, dict[str, Any]]:
        trained = self.descend(client, client.state["w"], memory=client.state["memory"])
        return {}, {"w": trained["params"], "memory": trained["memory"]}

    def start(self, clients: Clients) -> State:
        return State()

    def round(self, clients: Clients, state: State) -> State:
        clients.mean(self.train)
        return state

    def predictor(self, state: State) -> None:
        return None


@dataclass(frozen=True)
class Central(LocalTraining):
    """One model trained on all rows in one place: the reference for every federated method.

    A round makes `epochs` passes over all rows. It is not a federated method: the cost of bringing
    the data together is not counted, and nothing else is sent.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.Central(fd.Linear(), lr=0.1), fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.9
        True
    """

    pooled: ClassVar[bool] = True
    averages_statistics: ClassVar[bool] = True
    keeps_layers: ClassVar[bool] = True
    divided: ClassVar[bool] = False  # a single client

    def init(self, client: Client) -> dict[str, Any]:
        return fresh_memory(self, self.model.init(client.spec, client.shared))

    def train(self, client: Client, w: Params) -> tuple[Params, dict[str, Any]]:
        trained = self.descend(client, w, memory=client.state)
        return trained["params"], trained["memory"]

    def round(self, clients: Clients, state: State) -> State:
        return state.replace(w=clients.mean(self.train, w=state.w))
