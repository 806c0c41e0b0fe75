"""Contextual bandits on FedRes: Section 5 of the paper, and another exploration.

In round t client i sees contexts of K actions, takes one, and learns the reward of that one alone.
A global and a local model together predict the reward of each action, and learn each other's
residual as in FedRes.

An environment is a federation: its rows are contexts, (K, d) with features of their own for every
action or (d,) the same for all, and its targets the expected rewards of the K actions, in [0, 1].
The learner sees a draw of the one it takes, nothing else; the table is there so that regret is
exact. `fd.class_bandit` and `fd.linear_bandit` make environments.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from foedus.algorithms.fedres.pair import forward, sum_of, union
from foedus.algorithms.fedres.play import Actionwise, play
from foedus.algorithms.fedres.sgd import FedRes
from foedus.algorithms.fedres.step import in_range, log_tally
from foedus.base import random
from foedus.base.columns import Columns
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, DataError, positive, whole_number
from foedus.export.forms import Form
from foedus.models.base import Model, Params, check_fits
from foedus.models.linear import Linear


@dataclass(frozen=True)
class FedResBandit(FedRes):
    """Contextual bandits on FedRes: epsilon-greedy (Section 5.1), or inverse-gap weighting.

    explore="epsilon": in every B-th round all clients take an action at random, and give its
    squared error (r - f(x(a)))^2 to FedRes; in the other rounds they take the action of the highest
    expected reward (12), and nothing is learned or sent, but for the new global model in the first
    of them (in each of them, where messages are late). With delays, messages wait for the next such
    round: the round trip is ceil(up / B) + ceil(down / B) of them.

    explore="squarecb": every round learns. With f_b the highest expected reward, action a has the
    probability 1 / (K + gamma_t (f_b - f_a)), and b the rest (Abe and Long 1999; Foster and Rakhlin
    2020), where gamma_t = gamma sqrt(t): regret of order sqrt T with the same oracle, where
    epsilon-greedy has T^{4/5}.

    The models, columns, steps, `send` and `rule` are those of `fd.FedRes`; columns are those of one
    action's context. The history has `regret`, the average over all clients and rounds so far of
    max_a f*(x(a)) - f*(x(a_t)), and `reward`, the average reward received.

    Args:
        global_model: The shared model of an action's context.
        local_model: The private model of an action's context.
        explore: "epsilon" or "squarecb".
        every: B; `None`: by `exploration_period` from `horizon`.
        horizon: T, the number of rounds, if `every` is not given.
        gamma: Factor of gamma_t, for "squarecb".
        reward: "bernoulli", rewards are 0 or 1 with the expected reward as probability; "mean",
            they are the expected reward itself.

    Example:
        >>> fed = fd.linear_bandit(clients=5, rounds=100, shared=8, private=4)
        >>> bandit = fd.FedResBandit(shared=range(8), private=range(8, 12), every=5)
        >>> run = fd.run(bandit, fed, rounds=100, evaluate_every=0)
        >>> run.history.regret.iloc[-1] < 0.2
        True

    Reference: Agarwal, Langford and Wei, "Federated residual learning", 2020, Section 5.
    """

    global_model: Model | None = Linear(bias=False)  # noqa: RUF009 - frozen
    local_model: Model | None = Linear(bias=False)  # noqa: RUF009 - frozen
    explore: Literal["epsilon", "squarecb"] = "epsilon"
    every: Annotated[int, Ge(1)] | None = None
    horizon: Annotated[int, Ge(1)] | None = None
    gamma: Annotated[float, Gt(0)] = 10.0
    reward: Literal["bernoulli", "mean"] = "bernoulli"

    remedy: ClassVar[str] = "try a smaller step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss != "squared" or self.batch_size != 1 or not self.alike:
            raise ConfigError(
                "a bandit needs loss='squared', batch_size=1 and local models of one kind"
            )
        if self.clip_predictions:
            raise ConfigError("clip_predictions=True: a bandit does not clip expected rewards")
        if self.explore == "epsilon" and self.every is None and self.horizon is None:
            raise ConfigError(
                "explore='epsilon' needs every=, the rounds between two explorations, or horizon=, "
                "the rounds of the run"
            )

    def check(self, spec: Spec) -> None:
        if spec.classes or spec.outputs < 2:
            raise DataError(
                "a bandit needs expected rewards of at least 2 actions as targets; see "
                "fd.class_bandit, fd.linear_bandit"
            )
        width = spec.shape[-1] if self.actionwise(spec) else spec.features
        for name, columns in (("shared", self.shared), ("private", self.private)):
            if columns is not None and max(columns) >= width:
                raise DataError(
                    f"column {max(columns)} of {name} is beyond the {width} features of a context"
                )
        if len(spec.shape) > 1 and not self.actionwise(spec):
            raise DataError(
                f"contexts have shape {spec.shape}; give (features,), or ({spec.outputs}, "
                "features): one for each action"
            )
        for name, model, columns in (
            ("global_model", self.global_model, self.shared),
            ("local_model", self.local_model, self.private),
        ):
            if model is not None:
                shape = (width if columns is None else len(columns),)
                check_fits(
                    name, model, Spec(shape, None, 1 if self.actionwise(spec) else spec.outputs)
                )

    @staticmethod
    def actionwise(spec: Spec) -> bool:
        """Whether every action has a context of its own."""
        return len(spec.shape) == 2 and spec.shape[0] == spec.outputs

    def view(self, model: Model | None, columns: Columns, spec: Spec) -> tuple[Model | None, Spec]:
        """A model as it is used on contexts, and the form of those."""
        shape = spec.shape if columns is None else (*spec.shape[:-1], len(columns))
        if not self.actionwise(spec):
            return model, Spec(shape, None, spec.outputs)
        return (None if model is None else Actionwise(model)), Spec(shape, None, spec.outputs)

    def period(self, clients: int, actions: int) -> int:
        """B."""
        if self.explore == "squarecb":
            return 1
        if self.every is not None:
            return self.every
        assert self.horizon is not None
        return exploration_period(self.horizon, clients, actions)

    # -- clients -----------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tree]:
        zero = torch.zeros((), dtype=torch.float64)
        state: dict[str, Tree] = {k: torch.zeros((), dtype=torch.int64) for k in ("t", "n")}
        state |= {"loss": zero, "regret": zero.clone(), "reward": zero.clone()}
        model, spec = self.view(self.global_model, self.shared, client.spec)
        if model is not None:
            state["seen"] = model.init(spec, client.shared)
        model, spec = self.view(*self.only_local, client.spec)
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
        args = {"state": client.state, "w": w, "index": data.index, "weight": data.weight}
        args |= {"key": client.key}
        args |= {"lag": -(-client.up // every) - (-client.down // every), "longest": client.longest}
        found = play(args, (self, how, data.table_x, data.table_y, client.spec))
        return found["reply"], found["state"]

    def extremes(self, client: Client) -> tuple[Tree, None]:
        """The least and the largest expected reward, for the check before the first round."""
        return {"least": client.data.y.min(), "most": client.data.y.max()}, None

    def tally(self, client: Client) -> tuple[Tree, None]:
        sums = {k: client.state[k] for k in ("regret", "reward")}
        return {**sums, "t": client.state["t"].double()}, None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        return self.form(client)(x)

    def form(self, client: Client) -> Form:
        models = (
            (self.global_model, self.shared, client.state.get("seen")),
            (*self.only_local, client.state.get("local")),
        )
        parts = [(self.view(m, columns, client.spec)[0], p, columns) for m, columns, p in models]
        return sum_of(parts, len(client.spec.shape))

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        self._check_rewards(clients)
        state = State(spec=clients.spec, period=self.period(clients.total, clients.spec.outputs))
        model, spec = self.view(self.global_model, self.shared, clients.spec)
        return state if model is None else self.with_model(state, model.init(spec, clients.shared))

    def _check_rewards(self, clients: Clients) -> None:
        found = clients.measure_each(self.extremes)
        if found is not None and (
            float(found["least"].min()) < 0 or float(found["most"].max()) > 1
        ):
            raise DataError(
                f"rewards are from {float(found['least'].min()):.4g} to "
                f"{float(found['most'].max()):.4g}; they must be in [0, 1]: scale them"
            )

    def round(self, clients: Clients, state: State) -> State:
        n, rest = divmod(clients.round, state.period)
        with contextlib.suppress(NothingArrived):
            if rest:
                # The first of these rounds brings the new model; where messages are late, or some
                # clients away, any may be the one that a client sees.
                news = rest == 1 or not clients.punctual or clients.participation < 1
                model = {"w": state.w} if news and self.global_model is not None else {}
                clients.mean(self.exploit, **model)
            elif self.global_model is None:
                clients.mean(self.learn)
            else:
                sent = {"w": state.w, **({} if clients.punctual else {"every": state.period})}
                g = self._gradient(clients, state, sent)
                state = self.moved(state, g, n - 1)  # the n-th round of FedRes
        log_tally(self, clients, regret="regret", reward="reward")
        return state

    def _gradient(self, clients: Clients, state: State, sent: dict[str, Any]) -> Params:
        if self.send == "gradient":
            return clients.sum(self.learn, **sent)
        known = lambda _, reply: in_range(reply, "action", state.spec.outputs)  # noqa: E731
        accept = None if self.actionwise(state.spec) else known
        replies = clients.gather(self.learn, accept=accept, **sent)
        w, seen, count = self.models_of(replies, state), replies.stack(), len(replies)
        assert self.global_model is not None
        # actionwise, the context of the action that was taken
        z, pull = forward(self.global_model, w, seen["x"])
        if self.actionwise(state.spec):
            predicted = z[..., 0]
        else:
            predicted = z.gather(-1, seen["action"].long().view(count, 1, 1)).squeeze(-1)
        predicted = predicted + seen["local"] if self.local_model is not None else predicted
        slope = 2 * (predicted - seen["reward"]).unsqueeze(-1)
        if not self.actionwise(state.spec):
            slope = slope * F.one_hot(seen["action"].long(), state.spec.outputs).view(z.shape)
        return {k: g.sum(0) for k, g in pull(slope).items()}

    def predictor(self, state: State) -> Predictor | None:
        model, _ = self.view(self.global_model, self.shared, state.spec)
        if model is None:
            return None
        form = sum_of([(model, state.w, self.shared)], len(state.spec.shape))
        return Predictor(form, state.spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().mean(-1)


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

        B = min{(P T / (K^4 norms sigma^2))^{1/5},
                T^{1/4} / (K^6 gamma D^4 G^2)^{1/8},
                T^{1/3} / (K^2 D G)^{1/3}}

    Args:
        horizon: T, the number of rounds.
        clients: P.
        actions: K.
        norms: |w*_g|^2 + sum_i |w*_i|^2.
        sigma: Standard deviation of gradients.
        gamma: Smoothness of the loss.
        bound: D.
        slope: G, the largest gradient.
    """
    numbers = {"norms": norms, "sigma": sigma, "gamma": gamma, "bound": bound, "slope": slope}
    for name, v in numbers.items():
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
    both = union(algorithm.shared, algorithm.only_local[1])
    if which == "local":
        return replace(algorithm, global_model=None, private=both)
    return replace(algorithm, local_model=None, shared=both)
