"""One round of the bandit at a batch of clients: choose an action, see its reward, learn from
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foedus.algorithms.fedres.pair import forward
from foedus.algorithms.fedres.step import descended, late, stream
from foedus.base import random, tree
from foedus.base.batching import batched
from foedus.base.columns import part
from foedus.base.rows import take
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.models.base import Model, Params, Pull


@dataclass(frozen=True)
class Actionwise(Model):
    """One model of an action's context, applied to the contexts (K, d) of all actions of a row."""

    model: Model

    @property
    def closed_form(self) -> bool:
        return self.model.closed_form

    @property
    def batchable(self) -> bool:
        return self.model.batchable

    def init(self, spec: Spec, key: Tensor) -> Params:
        return self.model.init(Spec(spec.shape[1:], None, 1), key)

    def apply(self, params: Params, x: Tensor) -> Tensor:
        return self.model.apply(params, x.flatten(0, 1)).view(x.shape[:2])

    def pullback(self, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
        """Contexts (c, n, K, d)."""
        z, pull = self.model.pullback(params, x.flatten(1, 2))
        return z.view(x.shape[:3]), lambda slope: pull(slope.reshape(z.shape))


@batched
def play(args: dict[str, Tree], shared: tuple) -> Tree:
    """One round of a batch of clients."""
    algorithm, how, table_x, table_y, spec = shared
    state, count = args["state"], (args["weight"] > 0).sum(1)
    t, c = state["t"], len(count)
    rows = stream(t, args["index"], count, 1)
    x, mean = take(table_x, rows).float(), take(table_y, rows)[:, 0]
    new = {**state, "t": t + 1}
    w = args["w"] if args["w"] is not None else state.get("seen")
    if args["w"] is not None and (how != "uniform" or not args["longest"]):
        # where messages are late, the last broadcast for an exploration may be older than what the
        # client has
        new["seen"] = w
    z, parts = torch.zeros(()), {}
    for name, model, columns, params in (
        ("global", algorithm.global_model, algorithm.shared, w),
        ("local", algorithm.local_model, algorithm.private, state.get("local")),
    ):
        if model is not None:
            view, _ = algorithm.view(model, columns, spec)
            own = part(x, columns, x.dim() - 1)
            said, pull = _forward(view, params, own)
            parts[name], z = (said[:, 0], pull, own), z + said[:, 0]
    draws = random.uniform(args["key"], 2, torch.float64)
    action = _choose(how, z, draws[:, :1], algorithm.gamma, state["n"])
    reward = mean.gather(1, action).double()
    new["regret"] = state["regret"] + (mean.amax(1) - reward[:, 0].float()).double()
    if algorithm.reward == "bernoulli":
        reward = (draws[:, 1:] < reward).double()
    new["reward"] = state["reward"] + reward[:, 0]
    if how == "greedy":
        return {"reply": {}, "state": tree.map(lambda v: v.contiguous(), new)}

    reward = reward.float()
    error = z.gather(1, action) - reward
    new["n"], new["loss"] = state["n"] + 1, state["loss"] + error[:, 0].square()
    slope = torch.zeros_like(z).scatter(1, action, 2 * error).unsqueeze(1)
    reply: Tree = {}
    if "global" in parts:
        _, pull, own = parts["global"]
        if algorithm.send == "gradient":
            reply = pull(slope)
        else:
            taken = own[torch.arange(c), :, action[:, 0]] if algorithm.actionwise(spec) else own
            reply = {"x": taken, "reward": reward}
            if not algorithm.actionwise(spec):
                reply["action"] = action.to(torch.int32)
            if "local" in parts:
                reply["local"] = parts["local"][0].gather(1, action)
    if "local" in parts:
        g = parts["local"][1](slope)
        if "waiting" in state:
            new["waiting"], g = late(state["waiting"], g, state["n"], args["lag"], False)
        eta = algorithm.local_step or algorithm.step
        new["local"], squares = descended(
            algorithm, state["local"], g, state.get("squares"), state["n"], eta, 1
        )
        if squares is not None:
            new["squares"] = squares
    return {"reply": reply, "state": tree.map(lambda v: v.contiguous(), new)}


def _forward(model: Model, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
    return (
        model.pullback(params, x)
        if isinstance(model, Actionwise) and model.closed_form
        else forward(model, params, x)
    )


def _choose(how: str, z: Tensor, draw: Tensor, gamma: float, n: Tensor) -> Tensor:
    """The actions (c, 1) for expected rewards z (c, K)."""
    actions = z.shape[1]
    if how == "uniform":
        return (draw * actions).long().clamp(max=actions - 1)
    best = z.argmax(1, keepdim=True)
    if how == "greedy":
        return best
    return (
        (inverse_gaps(z, gamma * (n + 1).double().sqrt().unsqueeze(1)).cumsum(1) <= draw)
        .sum(1, keepdim=True)
        .clamp(max=actions - 1)
    )


def inverse_gaps(z: Tensor, gamma: Tensor | float) -> Tensor:
    """Probabilities (c, K) by the gaps between expected rewards: 1 / (K + gamma gap), and the rest
    for the best action.
    """
    best = z.argmax(1, keepdim=True)
    p = 1 / (z.shape[1] + gamma * (z.gather(1, best) - z).double())
    p = p.scatter(1, best, 0.0)
    return p.scatter(1, best, 1 - p.sum(1, keepdim=True))
