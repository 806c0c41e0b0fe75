"""FedBoost and AFLBoost: Hamer, Mohri and Suresh, "FedBoost: communication-efficient algorithms for
federated learning", ICML 2020.

A server owns q given predictors h_k, too large to send them all, and learns the weights alpha of
the mixture h = sum_k alpha_k h_k:

    min over alpha in the simplex of L(alpha) = sum_j m_j/m L_j(alpha)
    L_j(alpha): the mean loss of h on client j's m_j rows

Each round it sends a few predictors, drawn at random, and clients send back as many numbers.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Interval
from torch import Tensor

from foedus.algorithms.fedboost.settings import check_together, mixture, pace
from foedus.base import random
from foedus.base.rows import Rows
from foedus.base.settings import Means, check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Batching, Client, client_step
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived
from foedus.core.held import HeldItems
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError
from foedus.export.forms import Mixture
from foedus.export.probabilities import as_they_are
from foedus.geometry import Entropy, Mirror
from foedus.models.predictors.base import Predictors


@dataclass(frozen=True)
class FedBoost(Algorithm):
    """Mirror descent on the weights of given predictors, a few sent a round (Hamer et al., 2020).

    Round t, with 1_k whether h_k is sent (independently, with probability gamma_k), and a_k =
    alpha_k 1_k / gamma_k (Figure 1):

        client j:  sends  d_k = dL_j(a) / da_k  for the h_k it was sent
        server:    g_k = (1_k / gamma_k) sum_j m_j/m d_k;   v = [grad F]^-1(grad F(alpha) - eta g)
                   alpha <- Bregman projection of v

    and the average of alpha over the rounds is the result. gamma_k is C/q with sampling="uniform",
    min(1, C alpha_k) with "weighted" (equation 8), 1 with "all"; the number of predictors sent is C
    = budget on average, at most. Figure 1 leaves open what dL_j/da_k is for a predictor that was
    not sent; 1_k / gamma_k, the derivative of a in alpha, is Section 4.2's answer.

    `bias_correction` is for the squared loss. The paper's derivative in Section 4.2 multiplies by
    alpha_l where h_l(x) is meant; with <,> the mean over rows of the inner product over labels, and
    e_y the label, the right one is

        dL/dalpha_l = 2 <sum_k alpha_k h_k - e_y, h_l>,
        E[g_l] = dL/dalpha_l + 2 alpha_l (1/gamma_l - 1) <h_l, h_l>,

    so that g_l - 2 (1_l / gamma_l) alpha_l (1/gamma_l - 1) <h_l, h_l> has the gradient as its exact
    expectation. Clients subtract it from their own sums, and from the loss sum_l 1_l (alpha_l /
    gamma_l) alpha_l (1/gamma_l - 1) <h_l, h_l>.

    Where messages are late, each reply counts for the predictors and probabilities of its own
    round, which the server keeps as long as replies to it may come.

    Args:
        predictors: What is mixed: `fd.Classifiers`, `fd.Densities` or `fd.NGrams`.
        budget: C, the average number of predictors that are sent.
        sampling: How predictors are drawn: "weighted", "uniform" or "all".
        mirror: The mirror map F: `fd.Entropy()`, `fd.Euclidean()` or `fd.PNorm(p)`.
        step: eta, or `None` for the step of Theorem 2 (see `foedus.geometry.best_step`; the paper's
            has a misprint) with `horizon` rounds and for G the largest gradient so far; without a
            horizon, T G^2 is the sum of the squared gradients so far.
        horizon: T, the number of rounds, for `step=None`.
        repeats: R, the bandwidth of Corollary 2: C R predictors are drawn, and sent in R exchanges
            of about C with the same clients, who keep the predictors' outputs on their rows, not
            the predictors; so a client holds about C at a time.
        average: Whether the average of alpha or the last alpha is the result.
        loss: "log", -log(h(y|x) + floor), or "squared", |h(x) - e_y|^2.
        floor: For "log": the probability of what no predictor that was sent covers.
        bias_correction: Whether clients correct the bias of the gradient of the squared loss.
        reweigh: Whether gradients are divided by gamma_k; without it, predictors that are not sent
            just keep their place.
        explore: Share of the probabilities that is spread evenly over all predictors (without it,
            "weighted" never tries a weight of 0 again).
        cache: Whether clients keep predictors, so that each is sent to a client only once; the
            simulation keeps one copy of each for all of them.
        start_weights: alpha before the first round; uniform unless given.
        measure_every: Log the loss over all clients' rows with all predictors (`objective`, of the
            result so far; `objective_last`, of the last alpha) every this number of rounds (0:
            never), uncharged.

    Example:
        >>> from sklearn.naive_bayes import GaussianNB
        >>> data = fd.load("digits")
        >>> parts = [slice(i, None, 5) for i in range(5)]
        >>> fitted = [GaussianNB(var_smoothing=0.1).fit(data.x_train[p], data.y_train[p])
        ...           for p in parts]
        >>> fed = fd.split(data, "dirichlet", clients=10, alpha=0.3)
        >>> fedboost = fd.FedBoost(fd.Classifiers(fitted, classes=10), budget=2)
        >>> run = fd.run(fedboost, fed, rounds=5)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True
    """

    predictors: Predictors
    budget: Annotated[float, Gt(0)] | None = None
    sampling: Literal["all", "uniform", "weighted"] = "weighted"
    mirror: Annotated[Mirror, Means("a mirror map such as fd.Entropy()")] = Entropy()  # noqa: RUF009 - frozen
    step: Annotated[float, Gt(0)] | None = None
    horizon: Annotated[int, Ge(1)] | None = None
    repeats: Annotated[int, Ge(1)] = 1
    average: bool = True
    loss: Literal["log", "squared"] = "log"
    floor: Annotated[float, Gt(0)] = 1e-6
    bias_correction: bool = False
    reweigh: bool = True
    explore: Annotated[float, Interval(ge=0, le=1)] = 0.0
    cache: bool = False
    start_weights: tuple[float, ...] | None = None
    measure_every: Annotated[int, Ge(0)] = 1

    remedy = "try a smaller step"

    def __post_init__(self) -> None:
        if not isinstance(self.predictors, Predictors):
            raise ConfigError(
                f"predictors={self.predictors!r} must be a collection: fd.Densities(table), "
                "fd.Classifiers([...]) or fd.NGrams(...)"
            )
        if self.start_weights is not None:
            start = mixture("start_weights", self.start_weights, len(self.predictors))
            object.__setattr__(self, "start_weights", start)
        check_settings(self)
        check_together(self)

    def batching(self) -> Batching:
        return Batching(spread=self.predictors.spread)

    def check(self, spec: Spec) -> None:
        self.predictors.check(spec, self.loss)

    def reply_bound(self, step: str, spec: Spec) -> float:
        return math.inf  # slopes of the log loss are as large as 1 / floor

    # -- clients -----------------------------------------------------------------------------------

    def prepare(self, data: Rows) -> Tree:
        return self.predictors.prepare(data, self.loss)

    def receive(self, client: Client, models: Tree = None) -> tuple[Tree, None]:
        """Predictors for later: nothing is sent back."""
        return {}, None

    def slope(self, client: Client, **sent: Tree) -> tuple[dict[str, Tensor], None]:
        """Line 3: the gradient of the loss of the mixture of what was sent."""
        return {"slope": self.at(client, **sent)[1]}, None

    @client_step(batch="whole")
    def slopes(self, client: Client, **sent: Tree) -> tuple[dict[str, Tensor], None]:
        """The same for a batch of clients at once."""
        return self.slope(client, **sent)

    def at(
        self,
        client: Client,
        which: Tensor,
        weight: Tensor,
        models: Tree = None,
        excess: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss of the mixture of what was sent, and its gradient."""
        given = (client.prepared, client.data, which.long(), models)
        value, slope = self.predictors.loss(*given, weight, self.loss, self.floor, excess)
        assert slope is not None
        return value, slope

    def look(self, client: Client, weight: Tensor) -> tuple[dict[str, Tensor], None]:
        """For the history: the loss of mixtures (rows of `weight`) of all predictors."""
        given = (client.prepared, client.data, torch.arange(len(self.predictors)), None)
        loss = lambda w: self.predictors.loss(*given, w, self.loss, self.floor, None, slope=False)  # noqa: E731
        return {"loss": torch.stack([loss(w)[0] for w in weight.unbind()])}, None

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        alpha = self.mirror.start(len(self.predictors), torch.float64)
        if self.start_weights is not None:
            alpha = torch.tensor(self.start_weights, dtype=torch.float64)
        state = State(
            alpha=alpha,
            total=torch.zeros_like(alpha),
            rounds=0,
            steepest=0.0,
            squares=0.0,
            spec=clients.spec,
        )
        self.measure(clients, state)
        return state

    def probabilities(self, alpha: Tensor) -> Tensor:
        """gamma, for a budget of C R."""
        if self.sampling == "all":
            return torch.ones_like(alpha)
        assert self.budget is not None
        budget = min(self.budget * self.repeats, len(alpha))
        even = torch.full_like(alpha, budget / len(alpha))
        if self.sampling == "uniform":
            return even
        weighted = (alpha * budget).clamp(max=1)
        return ((1 - self.explore) * weighted + self.explore * even).clamp(max=1)

    def draw(self, clients: Clients, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Line 2: which predictors are sent, and all probabilities."""
        gamma = self.probabilities(alpha)
        sent = random.uniform(random.fold(clients.key, 1), len(alpha), torch.float64) < gamma
        return sent.nonzero().flatten(), gamma

    def round(self, clients: Clients, state: State) -> State:
        which, gamma = self.draw(clients, state.alpha)  # line 2
        state = state.replace(total=state.total + state.alpha, rounds=state.rounds + 1)
        clients.log(sent=len(which))
        if len(which):
            sent = {**self.models(clients, which), **self.payload(state.alpha, gamma, which)}
            with contextlib.suppress(NothingArrived):
                state, g = self.ask(clients, state, sent, note=[which, gamma])  # lines 3 and 4
                state = self.move(state, g)  # line 5
        self.measure(clients, state)
        return state

    def payload(self, alpha: Tensor, gamma: Tensor, which: Tensor) -> dict[str, Tree]:
        """a_k = alpha_k / gamma_k of the predictors that are sent, and what corrects the bias."""
        weight = alpha[which] / gamma[which]
        excess = {"excess": ((1 - gamma[which]) * weight).float()} if self.bias_correction else {}
        return {"which": which.to(torch.int32), "weight": weight.float(), **excess}

    def models(self, clients: Clients, which: Tensor) -> dict[str, Tree]:
        """Line 3: the predictors, with the weights or in `repeats` exchanges before them."""
        parts = [p for p in which.tensor_split(self.repeats) if len(p)]
        send = (lambda p: HeldItems(p, len(self.predictors))) if self.cache else self.items
        if len(parts) == 1:
            return {"models": send(which)}
        for part in parts:  # clients keep what these say of their rows
            clients.gather(self.receive, models=send(part))
        return {"models": None}

    def items(self, which: Tensor) -> Tree:
        return self.predictors.message(which)

    def ask(
        self, clients: Clients, state: State, sent: dict[str, Tree], note: list[Tensor]
    ) -> tuple[State, Tensor]:
        """The average over rows of the gradients, each for the draw of the round it answers."""
        step = self.slopes if self.predictors.takes_batches else self.slope
        parts = clients.mean_by_broadcast(step, note=note, **sent)
        return state, reduce(torch.add, (self.whole(g["slope"], *b.note) for b, g in parts))

    def whole(self, slope: Tensor, which: Tensor, gamma: Tensor) -> Tensor:
        """The gradient in all q weights, from that in the weights of what was sent."""
        slope = slope.double() / gamma[which] if self.reweigh else slope.double()
        return torch.zeros_like(gamma).index_put((which,), slope)

    def move(self, state: State, g: Tensor) -> State:
        """Line 5."""
        how = (self.mirror, self.step, self.horizon)
        eta, steepest, squares = pace(*how, g, state.steepest, state.squares)
        alpha = self.mirror.step(state.alpha, g, eta) if eta else state.alpha
        return state.replace(alpha=alpha, steepest=steepest, squares=squares)

    def result(self, state: State) -> Tensor:
        """What is learnt: the average of alpha_1 .. alpha_T, or the last alpha."""
        return state.total / state.rounds if self.average and state.rounds else state.alpha

    def measure(self, clients: Clients, state: State) -> None:
        """Log the loss over all rows of the result so far and of the last alpha, uncharged."""
        if self.due(clients):
            weight = torch.stack((self.result(state), state.alpha)).float()
            seen = clients.measure(self.look, weight=weight)
            if seen is not None:
                clients.log(objective=seen["loss"][0], objective_last=seen["loss"][1])

    def due(self, clients: Clients) -> bool:
        """Whether this round is measured."""
        return self.measure_every > 0 and clients.round % self.measure_every == 0

    def predictor(self, state: State) -> Predictor:
        form = Mixture(self.predictors, self.result(state).float())
        return Predictor(form, state.spec, as_they_are)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.loss == "log":
            return -(outputs.gather(-1, y.unsqueeze(-1)).squeeze(-1) + self.floor).log()
        return outputs.square().sum(-1) - 2 * outputs.gather(-1, y.unsqueeze(-1)).squeeze(-1) + 1
