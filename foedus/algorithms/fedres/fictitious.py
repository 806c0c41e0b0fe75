"""Fictitious play (Appendix C of the FedRes paper), which can stall."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foedus.algorithms.fedres.erm import FedResERM, Statistics
from foedus.algorithms.fedres.least_squares import least_squares
from foedus.algorithms.fedres.pair import targets
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client


@dataclass(frozen=True)
class FictitiousPlay(FedResERM):
    """FedRes by least squares against the other model's past predictions, which can stall.

    Each model minimizes the loss over all rows given what the other predicted for each row when it
    was new:

        w_{i,t+1} = argmin_w sum_{s <= t} l_{i,s}(w^g_{s-down}, w)                           (5)
        w^g_{t+1} = argmin_w sum_i sum_{s <= t-up} l_{i,s}(w, w_{i,s})                       (6)

    Clients need to send only (x^g, y, f(x^l; w_{i,s})). It is cheap and natural, but both models
    learn against each other's past (Appendix C): use `fd.FedResERM` or `fd.FedRes`.

    Example:
        >>> fed = fd.split(fd.load("digits"), "tasks", clients=5)
        >>> columns = fed.settings["global_features"], fed.settings["local_features"]
        >>> played = fd.run(fd.FictitiousPlay(*columns, radius=0.5), fed, rounds=50)
        >>> solved = fd.run(fd.FedResERM(*columns, radius=0.5), fed, rounds=50)
        >>> bool(played.history.own_loss.iloc[-1] > solved.history.own_loss.iloc[-1])
        True

    Reference: Agarwal, Langford and Wei, "Federated residual learning", 2020, Appendix C.
    """

    def init(self, client: Client) -> dict[str, Tree]:
        state = super().init(client)
        return {**state, "sums": {k: v for k, v in state["sums"].items() if k != "cross"}}

    def fit(self, sums: Statistics, other: Tensor, now: Tensor, t: Tensor) -> Tensor:
        return torch.where(
            (t > 0).view(-1, 1, 1), least_squares(sums["own"], sums["y"], self.radius), now
        )

    def learn(
        self, sums: Statistics, own: Tensor, other: Tensor, y: Tensor, said: Tensor
    ) -> Statistics:
        return {"own": sums["own"] + own.mT @ own, "y": sums["y"] + own.mT @ (y - said)}

    def message(
        self, x_g: Tensor, x_l: Tensor, y: Tensor, said: Tensor, local: Tensor
    ) -> dict[str, Tensor]:
        return {"x": x_g.float(), "y": y, "local": said}

    def remembers(self, cross: Tensor, local: Tensor) -> dict[str, Tensor]:
        return {}

    def receive(self, state: State, who: Tensor, sent: dict[str, Tensor]) -> State:
        x, y = self.features(sent["x"], None, 2), targets(sent["y"], state.spec).double()
        own, right = state.own + (x.mT @ x).sum(0), state.y + (x.mT @ (y - sent["local"])).sum(0)
        return state.replace(
            w=least_squares(own, right, self.radius),
            own=own,
            y=right,
            seen=state.seen + x.shape[0] * x.shape[1],
        )
