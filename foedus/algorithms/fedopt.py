"""FedOpt: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive federated
optimization", ICLR 2021, Algorithm 1, with any optimizer of `torch.optim` at the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from foedus.algorithms.local_training import LocalTraining
from foedus.base import tree
from foedus.base.tree import State
from foedus.core.algorithm import Client, client_step
from foedus.core.clients import Clients
from foedus.errors import ConfigError, unknown
from foedus.models.base import Params

Option = bool | float | str | tuple[float, ...] | None


@dataclass(frozen=True)
class FedOpt(LocalTraining):
    """FedAvg with any optimizer of `torch.optim` at the server (Reddi et al., 2021).

        client i:  w_i <- w, then mini-batch steps w_i <- w_i - lr * g_i(w_i);  sends w_i - w
        server:    w <- one step of `server_optimizer` from w, with gradient -sum_i p_i (w_i - w)

    "SGD" with `server_lr=1` is FedAvg. `fd.FedAdam`, `fd.FedYogi` and `fd.FedAdagrad` are the
    paper's, without bias correction and with its `tau`; "Adam" here is PyTorch's. The optimizer's
    memory is part of the server's state (`run.state.memory`) and of checkpoints.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        server_optimizer: The name of a class of `torch.optim`, or the class.
        server_lr: Its step size.
        server_options: Its other arguments, by name.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> fedadamw = fd.FedOpt(fd.Linear(), lr=0.1, server_optimizer="AdamW", server_lr=0.05,
        ...                      server_options={"weight_decay": 0.1})
        >>> fd.run(fedadamw, fed, rounds=5).history.accuracy.iloc[-1] > 0.8
        True

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive
    federated optimization", ICLR 2021, Algorithm 1.
    """

    averages_statistics: ClassVar[bool] = True
    keeps_layers: ClassVar[bool] = True

    server_optimizer: str = "SGD"
    server_lr: Annotated[float, Gt(0)] = 1.0
    server_options: dict[str, Option] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        given: Any = self.server_optimizer
        name = getattr(given, "__name__", "")
        if name and getattr(torch.optim, name, None) is given:
            object.__setattr__(self, "server_optimizer", name)
        if isinstance(self.server_options, dict):
            options = {
                k: tuple(v) if isinstance(v, list) else v for k, v in self.server_options.items()
            }
            object.__setattr__(self, "server_options", options)
        super().__post_init__()
        if self.server_optimizer not in _NAMES:
            raise ConfigError(unknown("server_optimizer", self.server_optimizer, _NAMES))
        if "lr" in self.server_options:
            raise ConfigError("server_options: the step size is server_lr, not 'lr'")
        trial = {"matrix": torch.ones(2, 2), "vector": torch.ones(2)}
        try:
            self._stepped(trial, trial, {})
        except Exception as error:  # whatever a class says of its arguments and of gradients
            raise ConfigError(
                f"server_optimizer={self.server_optimizer!r} with "
                f"server_options={self.server_options!r} cannot be used: {error}"
            ) from error

    def _stepped(self, w: Params, change: Params, memory: dict) -> tuple[Params, dict]:
        """The parameters and what the optimizer remembers after one of its steps."""
        w = {k: v.clone() for k, v in w.items()}
        made: Any = getattr(torch.optim, self.server_optimizer)
        optimizer = made(list(w.values()), lr=self.server_lr, **self.server_options)
        for k, p in w.items():
            p.grad = -change[k]
            if memory:
                optimizer.state[p] = tree.map(_copied, memory[k])
        optimizer.step()
        return tree.map(Tensor.detach, w), {k: dict(optimizer.state[p]) for k, p in w.items()}

    @client_step(batch="whole")
    def train(self, client: Client, w: Params) -> tuple[Params, Any]:
        return self.answer(client, w, self.descend(client, w)["params"])

    def start(self, clients: Clients) -> State:
        return super().start(clients).replace(memory={})

    def round(self, clients: Clients, state: State) -> State:
        change = clients.mean(self.train, weights=self.weights, w=state.w)
        new, memory = self._stepped(self.moving(state.w), change, state.memory)
        return state.replace(w={**self.moved(state.w, change, 1.0), **new}, memory=memory)


def _copied(value: Any) -> Any:
    """Optimizers change their tensors in place, and the server's states stay."""
    return value.clone() if isinstance(value, Tensor) else value


_NAMES = tuple(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
)
