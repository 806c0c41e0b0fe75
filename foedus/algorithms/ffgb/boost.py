"""FFGB: Shen, Hassani, Kale and Karbasi, "Federated functional gradient boosting", AISTATS 2022. Clients send functions.

    min over functions f of F[f] = 1/N sum_i (R_i[f] + mu/2 |f|^2_{alpha_i}),   R_i[f] = E over client i's rows of loss(f(x), y)

What is learnt is a sum of functions; every client adds to it what it can find against its own gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from foedus.base import random
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, ReplyError, unknown, whole_number
from foedus.models.losses import Loss, loss_for
from foedus.models.oracles import Forest, Oracle

STEPS = {"theorem4.1": 4.0, "theorem4.3": 2.0}
"""Step sizes c / (mu (t K + k + 1)) of the theorems."""


@dataclass(frozen=True)
class FFGB(Algorithm):
    """Boosting with functions as messages (Algorithms 1 and 2).

    In round t = 0, 1, ... a client starts from g_1 = f^t and Delta_0 = 0, and makes K = `local_steps` steps on its own rows,

        h_k = Q(Delta_{k-1} + grad R_i[g_k])                 (line 4: the oracle)
        g_{k+1} = g_k - eta_k (h_k + mu g_k)                 (line 5)
        Delta_k = Delta_{k-1} + grad R_i[g_k] - h_k          (line 6: what the oracle has missed so far)

    and f^{t+1} is the average of the clients' g_{K+1}. Since g is known but for the h_k, a client sends the K functions h_k and nothing
    else, and the server keeps f as a list of functions with weights and one scale, prod (1 - eta mu), for all that was there before. A
    client keeps the values of f on its rows; it is sent the functions that are new to it. Where messages are late, f shrinks and grows by the steps
    that the functions which arrive were made with; and where, besides, only some of the clients take part, all functions are sent every time, since what a client
    has by then is not known.

    oracle: what fits h (`fd.Forest()`, `fd.Net(model)`, ...). loss: "auto" (cross-entropy or squared), "logistic", "huber", or any object with `value`
    and `slope` of a convex loss. step: eta, or "theorem4.1", 4 / (mu (t K + k + 1)), or "theorem4.3", 2 / (mu (t K + k + 1)). residual: False leaves
    line 6 out (Delta stays 0), to see what it is for. weights: "uniform", as in the paper, or "rows".

    Example:
        >>> fd.run(fd.FFGB(fd.Forest(trees=10)), fed, rounds=30)
    """

    oracle: Oracle = Forest()  # noqa: RUF009 - frozen
    loss: str | Loss = "auto"
    local_steps: int = 1
    step: float | str = 10.0
    mu: float = 0.0
    residual: bool = True
    weights: str = "uniform"

    sign: ClassVar[float] = -1.0
    """With which functions enter f."""

    remedy: ClassVar[str] = "try a smaller step"
    batchable: ClassVar[bool] = False
    alike: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.oracle, Oracle):
            raise ConfigError(f"oracle={self.oracle!r} must be an oracle such as fd.Forest()")
        whole_number("local_steps", self.local_steps)
        if isinstance(self.mu, bool) or not isinstance(self.mu, Real) or not 0 <= self.mu < float("inf"):
            raise ConfigError(f"mu={self.mu!r} must be a number that is not negative")
        if isinstance(self.step, str):
            if self.step not in STEPS:
                raise ConfigError(unknown("step", self.step, [*STEPS, "a number"]))
            if not self.decay:
                raise ConfigError(f"step={self.step!r} is c / (mu (t K + k + 1)): it needs mu above 0")
        elif isinstance(self.step, bool) or not isinstance(self.step, Real) or not 0 < self.step < float("inf"):
            raise ConfigError(f"step={self.step!r} must be a positive number, or one of {', '.join(STEPS)}")
        if self.weights not in ("uniform", "rows"):
            raise ConfigError(unknown("weights", self.weights, ["uniform", "rows"]))
        if not isinstance(self.loss, str) and not all(hasattr(self.loss, name) for name in ("value", "slope")):
            raise ConfigError(f"loss={self.loss!r} must be a name, or have value(outputs, y) and slope(outputs, y, weight)")

    def check(self, spec: Spec) -> None:
        self._loss(spec)
        self.oracle.check(spec)

    def _loss(self, spec: Spec) -> Any:
        return loss_for(self.loss, spec.classes) if isinstance(self.loss, str) else self.loss

    def eta(self, t: int, k: int) -> float:
        """eta^{k,t} for rounds t = 0, 1, ... and k = 1 .. K."""
        if isinstance(self.step, str):
            return STEPS[self.step] / (self.decay * (t * self.local_steps + k + 1))
        return float(self.step)

    @property
    def decay(self) -> float:
        """What a step takes off what is there, g <- (1 - eta decay) g + ...; the strong convexity that steps of the theorems go by."""
        return self.mu

    # -- clients -----------------------------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tensor]:
        """The values of f on the client's rows, over the scale: it has no functions yet."""
        return {"sum": torch.zeros(len(client.data.index), client.spec.outputs)}

    def boost(self, client: Client, new: list, factors: list, keep: float, scale: float, t: int) -> tuple[Tree, Tree]:
        """Algorithm 2, after catching up with the functions of the others."""
        x, y, spec = client.data.x, client.data.y, client.spec
        total = self._caught_up(client, new, factors, keep)
        loss, ones = self._loss(spec), torch.ones(len(x))
        g, delta, found = scale * total, torch.zeros_like(total), []
        for k in range(1, self.local_steps + 1):
            target = delta + loss.slope(g, y, ones)
            found.append(self.oracle.fit(x, target, random.fold(client.key, k), spec))
            if k == self.local_steps:
                break  # g_{K+1} is the server's to make
            said = self.oracle.values(self.oracle.join(found[-1:]), torch.ones(1), x, spec)
            g = g - self.eta(t, k) * (said + self.mu * g)
            if self.residual:
                delta = target - said
        return {"functions": found}, {"sum": total}

    def _caught_up(self, client: Client, new: list, factors: list, keep: float) -> Tensor:
        """The values of f on the client's rows, over the scale, with the functions that are new to it."""
        total = client.state["sum"] * keep
        for functions, weight in zip(new, factors, strict=True):
            total = total + self.oracle.values(functions, weight, client.data.x, client.spec)
        return total

    # -- server ------------------------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        if clients.spec.classes and clients.measures:
            self._classes(clients)
        known = torch.zeros(clients.total, dtype=torch.int64)
        return State(parts=[], weights=[], keeps=[], scale=1.0, known=known, ids=clients.ids, spec=clients.spec)

    def labels(self, client: Client) -> tuple[Tree, None]:
        """Before the first round, uncharged: how often each class occurs."""
        counts = torch.zeros(client.spec.classes).index_add(0, client.data.y, client.data.weight)
        return {"counts": counts}, None

    def _classes(self, clients: Clients) -> None:
        held = clients.watched(clients.ids).sum(self.labels)["counts"]
        if bool((held == 0).any()):
            missing = torch.nonzero(held == 0).flatten().tolist()
            warnings.warn(f"classes {missing[:10]} appear at no client: their scores can only fall", stacklevel=2)

    def round(self, clients: Clients, state: State) -> State:
        place = torch.searchsorted(state.ids, clients.ids)
        known = state.known[place]
        if clients.longest and clients.participation < 1:
            known = torch.zeros_like(known)
        replies = []
        for v in known.unique().tolist():
            some = clients.some(known == v)
            keep, factors = since(state, v)
            keep = keep if v else 0.0  # all that there is: whatever the client has is replaced
            sent = {"new": state.parts[v:], "factors": factors, "keep": keep, "scale": state.scale, "t": clients.round - 1}
            try:
                found = some.gather(self.boost, weights=self.weights, **sent)
            except NothingArrived:  # of this group
                continue
            part = some.share(self.weights)
            replies += zip(found.ids.tolist(), found, (part * found.weights).tolist(), found.versions.tolist(), strict=True)
        if not replies:
            raise NothingArrived(f"round {clients.round}: no function has arrived yet")
        good = []
        for i, reply, share, version in sorted(replies, key=lambda r: r[0]):
            try:
                good.append((i, self._functions(reply, state.spec), share, version))
            except ReplyError as error:
                clients.refuse(i, str(error))
        if not good:
            raise NothingArrived(f"round {clients.round}: no function can be used")
        total = sum(share for _, _, share, _ in good)
        functions, weights, shrink = [], [], 0.0
        for _, made, share, version in good:
            factor, pulls = step_weights([self.eta(version - 1, k) for k in range(1, self.local_steps + 1)], self.decay)
            shrink += share / total * factor
            functions += made
            weights += [self.sign * pull * share / total for pull in pulls]
        scale, keep = state.scale * shrink, 1.0
        if abs(scale) < 1e-6:  # too little is left to divide by: the sum so far takes it up
            scale, keep = 1.0, scale
        weight = torch.tensor(weights, dtype=torch.float64) / scale
        there = torch.tensor([i not in clients.faults for i in clients.ids.tolist()])
        came = clients.ids[there] if clients.longest else torch.tensor([i for i, *_ in good])
        seen = state.known.index_fill(0, torch.searchsorted(state.ids, came), len(state.parts))
        return state.replace(
            parts=[*state.parts, self.oracle.join(functions)], weights=[*state.weights, weight], keeps=[*state.keeps, keep],
            scale=scale, known=seen,
        )  # fmt: skip

    def _functions(self, reply: Tree, spec: Spec) -> list[Tree]:
        """The functions of a reply, if they may be used."""
        made = reply.get("functions") if isinstance(reply, dict) else None
        if not isinstance(made, list) or len(made) != self.local_steps:
            raise ReplyError(f"a client must send {self.local_steps} functions")
        for h in made:
            self.oracle.accept(h, spec)
        return made

    def readmit(self, state: State, ids: Tensor) -> State:
        """They are sent all functions."""
        return state.replace(known=state.known.index_fill(0, torch.searchsorted(state.ids, ids), 0))

    def ensemble(self, state: State) -> tuple[Tree, Tensor]:
        """f as one structure: all functions joined, and the weight of each."""
        _, factors = since(state, 0)
        flat = state.scale * torch.cat(factors) if factors else torch.zeros(0)
        return self.oracle.concat(state.parts) if state.parts else None, flat

    def predictor(self, state: State) -> Predictor:
        functions, weights = self.ensemble(state)
        spec = state.spec

        def forward(x: Tensor) -> Tensor:
            return self.oracle.values(functions, weights, x, spec) if len(weights) else torch.zeros(len(x), spec.outputs)

        return self.speaks(forward, spec)

    def speaks(self, forward: Callable[[Tensor], Tensor], spec: Spec) -> Predictor:
        """A model from what it says of rows, with the probabilities that belong to the loss."""
        if self.loss == "logistic":  # every class against the rest: sigmoids, brought to sum 1
            return Predictor(forward, spec, lambda f: torch.nn.functional.logsigmoid(f).softmax(-1))
        return Predictor(forward, spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        classes = outputs.shape[-1] if not y.is_floating_point() else None
        return (loss_for(self.loss, classes) if isinstance(self.loss, str) else self.loss).value(outputs, y)


def since(state: State, v: int) -> tuple[float, list[Tensor]]:
    """What has become of f, over the scale, since its first v parts: the factor that these now have, and the weights of the others."""
    keep, weights = 1.0, []
    for factor, weight in zip(reversed(state.keeps[v:]), reversed(state.weights[v:]), strict=True):
        weights.append(weight * keep)
        keep *= factor
    return keep, weights[::-1]


def step_weights(etas: list[float], decay: float) -> tuple[float, list[float]]:
    """g_{K+1} = prod_k (1 - eta_k decay) f -+ sum_k eta_k prod_{j > k} (1 - eta_j decay) h_k: the factor of f, and those of the h_k."""
    shrink, pulls = 1.0, []
    for eta in reversed(etas):
        pulls.append(eta * shrink)
        shrink *= 1 - eta * decay
    return shrink, pulls[::-1]
