"""Contextual bandits on FedRes: Section 5 of the FedRes paper, and an exploration that the paper leaves open.

In round t client i sees contexts of K actions, takes one, and learns the reward of that one alone. A global and a local model together
say what reward to expect of each action, and learn each other's residual as in FedRes.

An environment is a federation: its rows are contexts, (K, d) with features of their own for every action or (d,) the same for all,
and its targets the expected rewards of the K actions, in [0, 1]. The learner sees a draw of the one it takes, nothing else; the table
is there so that regret is exact. `fd.class_bandit` and `fd.linear_bandit` make some.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foedus.algorithms.fedres.pair import Columns, forward, part
from foedus.algorithms.fedres.sgd import FedRes, in_range, late, log_tally, stream
from foedus.base import random, tree
from foedus.base.batching import batched
from foedus.base.rows import take
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, DataError, positive, unknown, whole_number
from foedus.models.base import Model, Params, Pull, check_fits
from foedus.models.linear import Linear


@dataclass(frozen=True)
class _Actionwise(Model):
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


@dataclass(frozen=True)
class FedResBandit(FedRes):
    """Epsilon-greedy on FedRes (Section 5.1), or inverse-gap weighting.

    explore="epsilon": in every B-th round all clients take an action at random, and feed its squared error (r - f(x(a)))^2 to FedRes;
    in the other rounds they take the action of the highest expected reward (12), and nothing is learnt or sent, but for the new
    global model in the first of them (in each of them, where messages are late). With delays, messages wait for the next such round: the round trip is ceil(up / B) +
    ceil(down / B) of them. B = `every`, or by `exploration_period` from `horizon`, the number of rounds T.
    explore="squarecb": every round learns. With f_b the highest expected reward, action a has the probability 1 / (K + gamma_t (f_b -
    f_a)), and b the rest (Abe and Long 1999; Foster and Rakhlin 2020), where gamma_t = gamma sqrt(t): regret of order sqrt T
    with the same oracle, where epsilon-greedy has T^{4/5}.

    reward: "bernoulli", rewards are 0 or 1 with the expected reward as probability; "mean", they are the expected reward itself.
    The models, columns, steps, `send` and `rule` are those of `fd.FedRes`; columns are those of one action's context. The history has
    `regret`, the average over all clients and rounds so far of max_a f*(x(a)) - f*(x(a_t)), and `reward`, that of what was got.

    Example:
        >>> fed = fd.linear_bandit(clients=10, actions=5, rounds=2000)
        >>> fd.run(fd.FedResBandit(shared=range(8), private=range(8, 12), every=10), fed, rounds=2000, evaluate_every=0)
    """

    global_model: Model | None = Linear(bias=False)  # noqa: RUF009 - frozen
    local_model: Model | None = Linear(bias=False)  # noqa: RUF009 - frozen
    explore: str = "epsilon"
    every: int | None = None
    horizon: int | None = None
    gamma: float = 10.0
    reward: str = "bernoulli"

    remedy: ClassVar[str] = "try a smaller step"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("explore", ("epsilon", "squarecb")), ("reward", ("bernoulli", "mean"))):
            if getattr(self, name) not in known:
                raise ConfigError(unknown(name, getattr(self, name), list(known)))
        for name in ("every", "horizon"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        positive("gamma", self.gamma)
        if self.loss != "squared" or self.batch_size != 1 or not self.alike:
            raise ConfigError("a bandit needs loss='squared', batch_size=1 and local models of one kind")
        if self.explore == "epsilon" and self.every is None and self.horizon is None:
            raise ConfigError(
                "explore='epsilon' needs every=, the rounds between two explorations, or horizon=, the rounds of the run"
            )

    def check(self, spec: Spec) -> None:
        if spec.classes or spec.outputs < 2:
            raise DataError(
                "a bandit needs expected rewards of at least 2 actions as targets; see fd.class_bandit, fd.linear_bandit"
            )
        width = spec.shape[-1] if self.actionwise(spec) else spec.features
        for name, columns in (("shared", self.shared), ("private", self.private)):
            if columns is not None and max(columns) >= width:
                raise DataError(f"column {max(columns)} of {name} is beyond the {width} features of a context")
        if len(spec.shape) > 1 and not self.actionwise(spec):
            raise DataError(
                f"contexts have shape {spec.shape}; give (features,), or ({spec.outputs}, features): one for each action"
            )
        for name, model, columns in (
            ("global_model", self.global_model, self.shared),
            ("local_model", self.local_model, self.private),
        ):
            if model is not None:
                shape = (width if columns is None else len(columns),)
                check_fits(name, model, Spec(shape, None, 1 if self.actionwise(spec) else spec.outputs))

    @staticmethod
    def actionwise(spec: Spec) -> bool:
        """Whether every action has a context of its own."""
        return len(spec.shape) == 2 and spec.shape[0] == spec.outputs

    def view(self, model: Model | None, columns: Columns, spec: Spec) -> tuple[Model | None, Spec]:
        """A model as it is used on contexts, and the form of those."""
        shape = spec.shape if columns is None else (*spec.shape[:-1], len(columns))
        if not self.actionwise(spec):
            return model, Spec(shape, None, spec.outputs)
        return (None if model is None else _Actionwise(model)), Spec(shape, None, spec.outputs)

    def period(self, clients: int, actions: int) -> int:
        """B."""
        if self.explore == "squarecb":
            return 1
        return self.every or exploration_period(self.horizon, clients, actions)

    # -- clients -----------------------------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tree]:
        zero = torch.zeros((), dtype=torch.float64)
        state: dict[str, Tree] = {"t": torch.zeros((), dtype=torch.int64), "n": torch.zeros((), dtype=torch.int64)}
        state |= {"loss": zero, "regret": zero.clone(), "reward": zero.clone()}
        model, spec = self.view(self.global_model, self.shared, client.spec)
        if model is not None:
            state["seen"] = model.init(spec, client.shared)
        model, spec = self.view(self.local_model, self.private, client.spec)
        if model is not None:
            state |= self.with_local(model.init(spec, random.fold(client.key, 1)), client.longest)
        return state

    def learn(self, client: Client, w: Params | None = None, every: int = 1) -> tuple[Tree, Tree]:
        """A round that explores, and learns from it."""
        return self._play(client, w, "squarecb" if self.explore == "squarecb" else "uniform", every)

    def exploit(self, client: Client, w: Params | None = None) -> tuple[Tree, Tree]:
        """A round that takes the best action, (12)."""
        return self._play(client, w, "greedy", 1)

    def _play(self, client: Client, w: Params | None, how: str, every: int) -> tuple[Tree, Tree]:
        data = client.data
        args = {"state": client.state, "w": w, "index": data.index, "weight": data.weight, "key": client.key}
        args |= {"lag": -(-client.up // every) - (-client.down // every), "longest": client.longest}
        found = _play(args, (self, how, data.table_x, data.table_y, client.spec))
        return found["reply"], found["state"]

    def extremes(self, client: Client) -> tuple[Tree, None]:
        """The least and the largest expected reward, for the check before the first round."""
        return {"least": client.data.y.min(), "most": client.data.y.max()}, None

    def tally(self, client: Client) -> tuple[Tree, None]:
        return {**{k: client.state[k] for k in ("regret", "reward")}, "t": client.state["t"].double()}, None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        z = 0.0
        for model, columns, params in (
            (self.global_model, self.shared, client.state.get("seen")),
            (self.local_model, self.private, client.state.get("local")),
        ):
            model, _ = self.view(model, columns, client.spec)
            z = z if model is None else z + model.apply(params, part(x, columns, x.dim() - 1))
        return z

    # -- server ------------------------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        if clients.measures:
            self._check_rewards(clients)
        period = self.period(clients.total, clients.spec.outputs)
        state = State(ids=clients.ids, spec=clients.spec, period=period)
        model, spec = self.view(self.global_model, self.shared, clients.spec)
        if model is not None:
            w = model.init(spec, clients.shared)
            state = self.with_model(state, w, clients.longest)
        return state

    def _check_rewards(self, clients: Clients) -> None:
        found = clients.watched(clients.ids).gather(self.extremes).stack()
        if float(found["least"].min()) < 0 or float(found["most"].max()) > 1:
            raise DataError(
                f"rewards are from {float(found['least'].min()):.4g} to {float(found['most'].max()):.4g}; they must be in [0, 1]: scale them"
            )

    def round(self, clients: Clients, state: State) -> State:
        n, rest = divmod(clients.round, state.period)
        if rest:
            # The first of these rounds brings the new model; with delays, or some clients only, any may be the one that a client sees.
            news = self.global_model is not None and (rest == 1 or clients.longest or clients.participation < 1)
            with contextlib.suppress(NothingArrived):
                clients.mean(self.exploit, **({"w": state.w} if news else {}))
        else:
            with contextlib.suppress(NothingArrived):
                state = self._explore(clients, state, n)
        log_tally(self, clients, state, regret="regret", reward="reward")
        return state

    def _explore(self, clients: Clients, state: State, n: int) -> State:
        """The n-th round of FedRes."""
        if self.global_model is None:
            clients.mean(self.learn)
            return state
        state = self.remember(clients, state)
        payload = {"w": state.w, **({"every": state.period} if clients.longest else {})}
        try:
            g = clients.sum(self.learn, **payload) if self.send == "gradient" else self._gradient(clients, state, payload)
        except NothingArrived:
            return state  # with the version that was sent
        w, squares = self.move(state.w, g, state.get("squares"), torch.tensor(n - 1), self.step, 0)
        return state.replace(w=w, **({} if squares is None else {"squares": squares}))

    def _gradient(self, clients: Clients, state: State, payload: dict[str, Any]) -> Params:
        accept = None if self.actionwise(state.spec) else lambda reply: in_range(reply, "action", state.spec.outputs)
        replies = clients.gather(self.learn, accept=accept, **payload)
        sent, count = replies.stack(), len(replies)
        w = self.recall(clients, state, replies.versions)
        model, _ = self.view(self.global_model, self.shared, state.spec)
        if self.actionwise(state.spec):
            z, pull = forward(model.model, w, sent["x"])  # the context of the action that was taken
            said = z[..., 0]
        else:
            z, pull = forward(model, w, sent["x"])
            said = z.gather(-1, sent["action"].long().view(count, 1, 1)).squeeze(-1)
        said = said + sent["local"] if self.local_model is not None else said
        slope = 2 * (said - sent["reward"]).unsqueeze(-1)
        if not self.actionwise(state.spec):
            slope = slope * F.one_hot(sent["action"].long(), state.spec.outputs).view(z.shape)
        return {k: g.sum(0) for k, g in pull(slope).items()}

    def predictor(self, state: State) -> Predictor | None:
        if self.global_model is None:
            return None
        model, _ = self.view(self.global_model, self.shared, state.spec)
        return Predictor(lambda x: model.apply(state.w, part(x, self.shared, x.dim() - 1)), state.spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().mean(-1)


@batched
def _play(args: dict[str, Tree], shared: tuple) -> Tree:
    """One round of a batch of clients."""
    algorithm, how, table_x, table_y, spec = shared
    state, count = args["state"], (args["weight"] > 0).sum(1)
    t, c = state["t"], len(count)
    rows = stream(t, args["index"], count, 1)
    x, mean = take(table_x, rows).float(), take(table_y, rows)[:, 0]
    new = {**state, "t": t + 1}
    w = args["w"] if args["w"] is not None else state.get("seen")
    if args["w"] is not None and (how != "uniform" or not args["longest"]):
        new["seen"] = w  # where messages are late, the last broadcast for an exploration may be older than what the client has
    z, parts = 0.0, {}
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
        new["local"], squares = algorithm.move(state["local"], g, state.get("squares"), state["n"], eta, 1)
        if squares is not None:
            new["squares"] = squares
    return {"reply": reply, "state": tree.map(lambda v: v.contiguous(), new)}


def _forward(model: Model, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
    return model.pullback(params, x) if isinstance(model, _Actionwise) and model.closed_form else forward(model, params, x)


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
    """Probabilities (c, K) by the gaps between expected rewards: 1 / (K + gamma gap), and the rest for the best action."""
    best = z.argmax(1, keepdim=True)
    p = 1 / (z.shape[1] + gamma * (z.gather(1, best) - z).double())
    p = p.scatter(1, best, 0.0)
    return p.scatter(1, best, 1 - p.sum(1, keepdim=True))


def exploration_period(
    horizon: int,
    clients: int,
    actions: int,
    norms: float = 1.0,
    sigma: float = 1.0,
    gamma: float = 1.0,
    bound: float = 1.0,
    slope: float = 1.0,
) -> int:
    """B of Theorem 3 for T = horizon rounds, P clients and K actions, at least 2.

        B = min{(P T / (K^4 norms sigma^2))^{1/5}, T^{1/4} / (K^6 gamma D^4 G^2)^{1/8}, T^{1/3} / (K^2 D G)^{1/3}}

    norms: |w*_g|^2 + sum_i |w*_i|^2. sigma^2: the variance of gradients. gamma: smoothness. bound: D. slope: G, the largest gradient.
    """
    for name, v in (("norms", norms), ("sigma", sigma), ("gamma", gamma), ("bound", bound), ("slope", slope)):
        positive(name, v)
    for name, v in (("horizon", horizon), ("clients", clients), ("actions", actions)):
        whole_number(name, v)
    rules = (
        (clients * horizon / (actions**4 * norms * sigma**2)) ** (1 / 5),
        horizon ** (1 / 4) / (actions**6 * gamma * bound**4 * slope**2) ** (1 / 8),
        horizon ** (1 / 3) / (actions**2 * bound * slope) ** (1 / 3),
    )
    return max(2, math.floor(min(rules)))


def alone(algorithm: FedResBandit, which: str) -> FedResBandit:
    """The bandit with only its "global" or its "local" model, on all columns that the two have."""
    both = (
        None
        if algorithm.shared is None or algorithm.private is None
        else tuple(sorted({*algorithm.shared, *algorithm.private}))
    )
    if which == "local":
        return replace(algorithm, global_model=None, private=both)
    return replace(algorithm, local_model=None, shared=both)
