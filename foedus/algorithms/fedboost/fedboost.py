"""FedBoost and AFLBoost: Hamer, Mohri and Suresh, "FedBoost: communication-efficient algorithms for federated learning", ICML 2020.

A server owns q given predictors h_k, too large to send them all, and learns the weights alpha of the mixture h = sum_k alpha_k h_k:

    min over alpha in the simplex of L(alpha) = sum_j m_j/m L_j(alpha),   L_j(alpha) the mean loss of h on client j's m_j rows

Each round it sends a few predictors, drawn at random, and clients send back as many numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from foedus.base import random
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived, Replies
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, positive, unknown, whole_number
from foedus.geometry import Entropy, Mirror
from foedus.models.predictors.base import LOSSES, Predictors

SAMPLINGS = ("all", "uniform", "weighted")


@dataclass(frozen=True)
class FedBoost(Algorithm):
    """Mirror descent on the weights of given predictors, a few of which are sent in a round (Figure 1).

    Round t, with 1_k whether h_k is sent (independently, with probability gamma_k), and a_k = alpha_k 1_k / gamma_k:

        client j:  sends  d_k = dL_j(a) / da_k  for the h_k it was sent
        server:    g_k = (1_k / gamma_k) sum_j m_j/m d_k;   v = [grad F]^-1(grad F(alpha) - eta g);   alpha <- Bregman projection of v

    and the average of alpha over the rounds is what is learnt. gamma_k is C/q with sampling="uniform", min(1, C alpha_k) with
    "weighted" (equation 8), 1 with "all"; the number of predictors sent is C = budget on average, at most. Figure 1 leaves open
    what dL_j/da_k is for a predictor that was not sent; 1_k / gamma_k, the derivative of a in alpha, is Section 4.2's answer.
    With reweigh=False it is left out: predictors that are not sent just keep their place.

    bias_correction: for the squared loss. The paper's derivative in Section 4.2 multiplies by alpha_l where h_l(x) is meant; with
    <,> the mean over rows of the inner product over labels, and e_y the label, the right one is

        dL/dalpha_l = 2 <sum_k alpha_k h_k - e_y, h_l>,
        E[g_l] = dL/dalpha_l + 2 alpha_l (1/gamma_l - 1) <h_l, h_l>,

    so that  g_l - 2 (1_l / gamma_l) alpha_l (1/gamma_l - 1) <h_l, h_l>  has the gradient as its expectation, exactly. Clients
    take it off their own sums. (Off the loss they take  sum_l 1_l (alpha_l / gamma_l) alpha_l (1/gamma_l - 1) <h_l, h_l>.)

    budget: C. repeats: R, the bandwidth of Corollary 2: C R predictors are drawn, and sent in R exchanges of about C with the
    same clients, who keep what the predictors say of their rows, not the predictors; so a client holds about C at a time.
    step: eta, or None for the step of Theorem 2 (see `foedus.geometry.best_step`; the paper's has a misprint) with `horizon`
    rounds and for G the largest gradient so far; without a horizon, T G^2 is the sum of the squared gradients so far.
    loss: "log", -log(h(y|x) + floor), with `floor` for what no predictor that was sent covers; "squared", |h(x) - e_y|^2.
    average: whether the average of alpha or the last one is the result. explore: part of the probabilities that is spread evenly
    over all predictors (with "weighted", a weight of 0 is never tried again without). cache: clients keep predictors, so that
    each is sent to a client only once; the simulation keeps one copy of each for all of them.
    start_weights: alpha before the first round (uniform unless given). measure_every: log the loss over all clients' rows with
    all predictors (`objective`, of the result so far; `objective_last`, of the last alpha) every so many rounds, uncharged.
    Where messages are late, each reply counts for the predictors and probabilities of its own round, which the server keeps as
    long as replies to it may come.

    Example:
        >>> fd.run(fd.FedBoost(fd.Classifiers(fitted, classes=10), budget=3), fed, rounds=100)
    """

    predictors: Predictors
    budget: float | None = None
    sampling: str = "weighted"
    mirror: Mirror = Entropy()  # noqa: RUF009 - frozen
    step: float | None = None
    horizon: int | None = None
    repeats: int = 1
    average: bool = True
    loss: str = "log"
    floor: float = 1e-6
    bias_correction: bool = False
    reweigh: bool = True
    explore: float = 0.0
    cache: bool = False
    start_weights: tuple[float, ...] | None = None
    measure_every: int = 1

    remedy = "try a smaller step"

    def __post_init__(self) -> None:
        if not isinstance(self.predictors, Predictors):
            raise ConfigError(
                f"predictors={self.predictors!r} must be a collection: fd.Densities(table), fd.Classifiers([...]) or fd.NGrams(...)"
            )
        q = len(self.predictors)
        for name, known in (("sampling", SAMPLINGS), ("loss", LOSSES)):
            if getattr(self, name) not in known:
                raise ConfigError(unknown(name, getattr(self, name), list(known)))
        if not isinstance(self.mirror, Mirror):
            raise ConfigError(f"mirror={self.mirror!r} must be a mirror map such as fd.Entropy()")
        if self.sampling == "all":
            if self.budget not in (None, q):
                raise ConfigError(f"budget={self.budget!r} with sampling='all' sends all {q}; leave the budget out")
        elif isinstance(self.budget, bool) or not isinstance(self.budget, Real) or not 0 < self.budget <= q:
            raise ConfigError(f"budget={self.budget!r} must be above 0 and at most the {q} predictors (or sampling='all')")
        for name, least in (("repeats", 1), ("measure_every", 0), ("horizon", 1)):
            if name != "horizon" or self.horizon is not None:
                whole_number(name, getattr(self, name), least)
        if self.step is not None:
            positive("step", self.step)
        positive("floor", self.floor)
        if isinstance(self.explore, bool) or not isinstance(self.explore, Real) or not 0 <= self.explore <= 1:
            raise ConfigError(f"explore={self.explore!r} must be from 0 to 1")
        if self.bias_correction and self.loss != "squared":
            raise ConfigError(f"bias_correction is for loss='squared'; no unbiased gradient is known for loss={self.loss!r}")
        if self.bias_correction and not self.reweigh:
            raise ConfigError("bias_correction needs reweigh=True: without it the gradient is of another function")
        if not self.predictors.at_hand and (self.cache or self.repeats > 1 or self.measure_every):
            raise ConfigError(
                "predictors that are not at hand allow neither cache, nor repeats above 1, nor measure_every above 0"
            )
        if self.start_weights is not None:
            try:
                object.__setattr__(self, "start_weights", tuple(float(v) for v in self.start_weights))
            except (TypeError, ValueError):
                raise ConfigError(f"start_weights={self.start_weights!r} must be {q} numbers") from None
            on_simplex("start_weights", self.start_weights, q)

    @property
    def spread(self) -> float:
        return self.predictors.spread

    def check(self, spec: Spec) -> None:
        self.predictors.check(spec, self.loss)

    # -- clients -----------------------------------------------------------------------------------------------------

    def prepare(self, data: Rows) -> Tree:
        return self.predictors.prepare(data, self.loss)

    def receive(self, client: Client, which: Tensor, models: Tree) -> tuple[Tree, None]:
        """Predictors for later: nothing is sent back."""
        return {}, None

    def slope(self, client: Client, **sent: Tree) -> tuple[dict[str, Tensor], None]:
        """Line 3: the gradient of the loss of the mixture of what was sent."""
        return {"slope": self.at(client, **sent)[1]}, None

    def at(
        self, client: Client, which: Tensor, models: Tree, weight: Tensor, excess: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of the mixture of what was sent, and its gradient."""
        args = (client.prepared, client.data, which.long(), models, weight, self.loss, self.floor, excess)
        return self.predictors.loss(*args)

    def look(self, client: Client, weight: Tensor) -> tuple[dict[str, Tensor], None]:
        """For the history: the loss of mixtures (rows of `weight`) of all predictors."""
        all_of_them = torch.arange(len(self.predictors))
        values = [
            self.predictors.loss(client.prepared, client.data, all_of_them, None, w, self.loss, self.floor, None, slope=False)[
                0
            ]
            for w in weight.unbind()
        ]
        return {"loss": torch.stack(values)}, None

    # -- server ------------------------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        q = len(self.predictors)
        alpha = self.mirror.start(q, torch.float64)
        if self.start_weights is not None:
            alpha = torch.tensor(self.start_weights, dtype=torch.float64)
        state = State(alpha=alpha, total=torch.zeros_like(alpha), rounds=0, steepest=0.0, squares=0.0)
        state = state.replace(ids=clients.ids, sizes=clients.sizes, spec=clients.spec)
        if self.cache:
            state = state.replace(have=torch.zeros(clients.total, q, dtype=torch.bool))
        if self.measure_every:
            self.log(clients, state)
        return state

    def probabilities(self, alpha: Tensor) -> Tensor:
        """gamma, for a budget of C R."""
        if self.sampling == "all":
            return torch.ones_like(alpha)
        budget = min(self.budget * self.repeats, len(alpha))
        even = torch.full_like(alpha, budget / len(alpha))
        if self.sampling == "uniform":
            return even
        return ((1 - self.explore) * (alpha * budget).clamp(max=1) + self.explore * even).clamp(max=1)

    def draw(self, clients: Clients, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Line 2: which predictors are sent, and all probabilities."""
        gamma = self.probabilities(alpha)
        sent = random.uniform(random.fold(clients.key, 1), len(alpha), torch.float64) < gamma
        return sent.nonzero().flatten(), gamma

    def payload(self, alpha: Tensor, gamma: Tensor, which: Tensor) -> dict[str, Tensor]:
        weight = alpha[which] / gamma[which]
        more = {"excess": ((1 - gamma[which]) * weight).float()} if self.bias_correction else {}
        return {"weight": weight.float(), **more}

    def round(self, clients: Clients, state: State) -> State:
        which, gamma = self.draw(clients, state.alpha)
        state = state.replace(total=state.total + state.alpha, rounds=state.rounds + 1)
        if len(which):
            sent = self.payload(state.alpha, gamma, which)
            state, models = self.send(clients, state, which)
            if clients.longest:
                state = self.remember(clients, state, which, gamma)
            drawn = state.drawn if clients.longest else [[clients.round, which, gamma]]
            with contextlib.suppress(NothingArrived):
                state, g = self.ask(clients, state, drawn, which=which.to(torch.int32), models=models, **sent)
                state = self.move(state, g)
        clients.log(sent=len(which))
        if self.measure_every and clients.round % self.measure_every == 0:
            self.log(clients, state)
        return state

    def send(self, clients: Clients, state: State, which: Tensor) -> tuple[State, Tree]:
        """Line 3: the predictors, in `repeats` exchanges. If one is enough, they are returned, to go with the weights."""
        parts = [p for p in which.tensor_split(self.repeats) if len(p)]
        if not self.cache:
            if len(parts) == 1:
                return state, self.predictors.message(which)
            for part in parts:  # clients keep what these say of their rows
                clients.gather(self.receive, which=part.to(torch.int32), models=self.predictors.message(part))
            return state, None
        at = torch.searchsorted(state.ids, clients.ids)
        for part in parts:
            lacking = ~state.have[at][:, part]
            for pattern in lacking.unique(dim=0):
                if bool(pattern.any()):
                    some, new = clients.some((lacking == pattern).all(1)), part[pattern]
                    some.gather(self.receive, which=new.to(torch.int32), models=self.predictors.message(new))
        have = state.have.clone()
        have[at.unsqueeze(1), which] = True
        return state.replace(have=have), None

    def remember(self, clients: Clients, state: State, which: Tensor, gamma: Tensor) -> State:
        """What was drawn, for as long as replies to it may come: a reply is at most `longest` exchanges behind."""
        drawn = [*state.get("drawn", []), [clients.round, which, gamma]]
        return state.replace(drawn=drawn[-1 - clients.longest :])

    def ask(self, clients: Clients, state: State, drawn: list, **sent: Any) -> tuple[State, Tensor]:
        """Lines 3 and 4: the average over rows of the gradients that come back."""
        if not clients.longest:
            (_, which, gamma), slope = drawn[-1], clients.mean(self.slope, **sent)["slope"]
            return state, self.whole(slope, which, gamma)
        replies = clients.gather(self.slope, **sent)
        return state, self.total(replies, replies.weights, drawn)

    def total(self, replies: Replies, weights: Tensor, drawn: list) -> Tensor:
        """sum_j weights_j g_j, each gradient for what was drawn in the round that it answers."""
        known = {when: (which, gamma) for when, which, gamma in drawn}
        total = torch.zeros(len(self.predictors), dtype=torch.float64)
        for when in replies.versions.unique().tolist():
            own = (replies.versions == when).nonzero().flatten()
            total += self.whole(weights[own] @ column(replies, "slope", own).double(), *known[when])
        return total

    def whole(self, slope: Tensor, which: Tensor, gamma: Tensor) -> Tensor:
        """The gradient in all q weights, from that in the weights of what was sent."""
        slope = slope.double() / gamma[which] if self.reweigh else slope.double()
        return torch.zeros_like(gamma).index_put((which,), slope)

    def move(self, state: State, g: Tensor) -> State:
        """Line 5."""
        eta, steepest, squares = pace(self.mirror, self.step, self.horizon, g, state.steepest, state.squares)
        alpha = self.mirror.step(state.alpha, g, eta) if eta else state.alpha
        return state.replace(alpha=alpha, steepest=steepest, squares=squares)

    def result(self, state: State) -> Tensor:
        """What is learnt: the average of alpha_1 .. alpha_T, or the last alpha."""
        return state.total / state.rounds if self.average and state.rounds else state.alpha

    def log(self, clients: Clients, state: State) -> None:
        if not clients.measures:
            return
        both = torch.stack((self.result(state), state.alpha)).float()
        seen = clients.watched(state.ids, state.sizes).mean(self.look, weight=both)["loss"]
        clients.log(objective=seen[0], objective_last=seen[1])

    def predictor(self, state: State) -> Predictor:
        weight = self.result(state).float()
        return Predictor(lambda x: self.predictors.mixture(weight, x), state.spec, probabilities=_as_they_are)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.loss == "log":
            return -(outputs.gather(-1, y.unsqueeze(-1)).squeeze(-1) + self.floor).log()
        return outputs.square().sum(-1) - 2 * outputs.gather(-1, y.unsqueeze(-1)).squeeze(-1) + 1


def column(replies: Replies, name: str, some: Tensor) -> Tensor:
    """One entry of some of the replies, stacked."""
    if replies.separate is None:
        return replies.stacked[name][some]
    return torch.stack([replies[i][name] for i in some.tolist()])


def _as_they_are(outputs: Tensor) -> Tensor:
    return outputs


def pace(
    mirror: Mirror, step: float | None, horizon: int | None, g: Tensor, steepest: float, squares: float
) -> tuple[float, float, float]:
    """eta, the largest gradient so far in the dual norm, and the sum of their squares: the steps of Theorem 2."""
    size = float(torch.linalg.vector_norm(g, mirror.dual))
    steepest, squares = max(steepest, size), squares + size**2
    if step is not None:
        return step, steepest, squares
    bound = horizon * steepest**2 if horizon else squares
    return (math.sqrt(2 * mirror.sigma * mirror.reach(len(g)) / bound) if bound else 0.0), steepest, squares


def on_simplex(name: str, values: Sequence[float], size: int) -> None:
    """Refuse weights that are not those of a mixture of so many."""
    if len(values) != size or not min(values) >= 0 or not abs(math.fsum(values) - 1) <= 1e-6:
        raise ConfigError(
            f"{name} must be {size} numbers that are not negative and sum to 1; these {len(values)} sum to {math.fsum(values):.6g}, "
            f"the least is {min(values, default=0):.4g}"
        )
