"""FFGB: Shen, Hassani, Kale and Karbasi, "Federated functional gradient boosting", AISTATS 2022.

    min over functions f of F[f] = 1/N sum_i (R_i[f] + mu/2 |f|^2_{alpha_i})
    R_i[f]: the mean of loss(f(x), y) over client i's rows

The model is a sum of functions. Clients send functions: each fits its own gradient.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.algorithms.ffgb.steps import STEPS, LineSearch, step_of_loss, within_reach
from foedus.base import random
from foedus.base.settings import Means, check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Batching, Client
from foedus.core.clients import Clients
from foedus.core.exchange import map_tensors
from foedus.core.held import HeldSum, sum_from_wire
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, ReplyError, shown
from foedus.export.forms import Ensemble
from foedus.export.probabilities import shares_of, softmax
from foedus.models.convexity import warn_unless_convex
from foedus.models.custom_loss import check_custom
from foedus.models.losses import Loss, check_loss, loss_for
from foedus.models.oracles import Forest, Oracle


@dataclass(frozen=True)
class FFGB(LineSearch):
    """Federated functional gradient boosting: clients send functions (Shen et al., 2022).

    In round t = 0, 1, ... a client starts from g_1 = f^t and Delta_0 = 0, and makes K =
    `local_steps` steps on its own rows (Algorithm 2),

        h_k = Q(Delta_{k-1} + grad R_i[g_k])                 (line 4: the oracle)
        g_{k+1} = g_k - eta_k (h_k + mu g_k)                 (line 5)
        Delta_k = Delta_{k-1} + grad R_i[g_k] - h_k          (line 6: what the oracle has missed)

    and f^{t+1} is the average of the clients' g_{K+1} (Algorithm 1). Since g is known but for the
    h_k, a client sends the K functions h_k and nothing else, and the server keeps f as a weighted
    sum of functions. A client keeps the values of f on its rows, and is sent only the functions
    that it does not have. Late functions enter f with the steps that they were made with.

    Args:
        oracle: What fits h: `fd.Forest()`, `fd.Net(model)`, ...
        loss: "auto" (cross-entropy or squared), another name, a loss of `fd.losses`, a function
            `loss(outputs, y)`, a loss module of `torch.nn`, or any object with `value` and `slope`.
            The theorems need it convex in the outputs; a warning tells where it is not ("focal").
        local_steps: K, the number of functions that a client sends in a round.
        step: eta. "auto" follows the loss: 10 for cross-entropy, 0.4 for the squared loss, Newton
            steps of bounded length for counts, a line search where the smoothness of the loss is
            not known. "search": a line search over the clients of each round. Or "theorem4.1", 4 /
            (mu (t K + k + 1)), or "theorem4.3", 2 / (mu (t K + k + 1)).
        mu: Weight of the L2 norm of f.
        residual: Whether line 6 is used; without it Delta stays 0.
        weights: How clients count: "uniform", as in the paper, or "rows".

    Example:
        >>> fed = fd.split(fd.load("breast_cancer"), "dirichlet", clients=5, alpha=0.5)
        >>> run = fd.run(fd.FFGB(fd.Forest(trees=5)), fed, rounds=3)
        >>> run.history.accuracy.iloc[-1] > 0.9
        True
    """

    weighs_rows: ClassVar[bool] = True

    oracle: Annotated[Oracle, Means("an oracle such as fd.Forest()")] = Forest()  # noqa: RUF009 - frozen
    loss: Any = "auto"  # a name, or an object with value and slope
    local_steps: Annotated[int, Ge(1)] = 1
    step: Annotated[float, Gt(0)] | Literal["auto", "search", "theorem4.1", "theorem4.3"] = "auto"
    mu: Annotated[float, Ge(0), Means("a number that is not negative")] = 0.0
    residual: bool = True
    weights: Literal["uniform", "rows"] = "uniform"

    sign: ClassVar[float] = -1.0
    """With which functions enter f."""

    remedy: ClassVar[str] = "try a smaller step"

    def __post_init__(self) -> None:
        check_settings(self)
        if self.step in STEPS and not self.decay:
            raise ConfigError(f"step={self.step!r} is c / (mu (t K + k + 1)): it needs mu above 0")
        if self.step == "search" and self.decay:
            raise ConfigError("step='search' looks along functions alone: it needs mu=0")
        if self._made_elsewhere:
            return
        if not isinstance(self.loss, str | Loss) and not callable(self.loss):
            raise ConfigError(
                f"loss={shown(self.loss)} must be a name, a function loss(outputs, y), or have "
                "value(outputs, y) and slope(outputs, y, weight)"
            )
        check_loss(self.loss)

    def batching(self) -> Batching:
        return Batching(alike=False, pays=False)

    def check(self, spec: Spec) -> None:
        loss = self._loss(spec.classes)
        if isinstance(loss, Loss):
            loss.check(spec.classes, spec.outputs)
            check_custom(loss, None, spec)
        self.oracle.check(spec)
        if spec.weighted and not self.oracle.weighs_rows:
            raise ConfigError(
                f"{type(self.oracle).__name__} does not use the weights of rows; use fd.Forest() "
                "or fd.Net(model), or drop weight= where the data is loaded"
            )
        if self.searches(spec) and self.decay:
            raise ConfigError(
                "step='auto' is a line search for a loss of unknown smoothness, and needs mu=0; "
                "give step= a number"
            )

    @property
    def _made_elsewhere(self) -> bool:
        """Whether the loss is an object with `value` and `slope` that is none of foedus' losses."""
        return not isinstance(self.loss, Loss) and all(
            hasattr(self.loss, name) for name in ("value", "slope")
        )

    def _loss(self, classes: int | None) -> Any:
        return self.loss if self._made_elsewhere else loss_for(self.loss, classes)

    def eta(self, t: int, k: int, spec: Spec | None = None) -> float:
        """eta^{k,t} for rounds t = 0, 1, ... and k = 1 .. K; "auto" needs the form of the data."""
        step = self.step if spec is None else self._step(spec)
        if isinstance(step, str):
            return STEPS[step] / (self.decay * (t * self.local_steps + k + 1))
        assert step is not None  # a line search sends it
        return float(step)

    def searches(self, spec: Spec) -> bool:
        """Whether the step is found by a line search in every round."""
        return self._step(spec) is None

    def _step(self, spec: Spec) -> float | str | None:
        """A number, the name of a theorem, or `None`: by line search."""
        if self.step == "auto":
            return step_of_loss(self._loss(spec.classes), spec.outputs, self.oracle.bounds)
        return None if self.step == "search" else self.step

    @property
    def decay(self) -> float:
        """The factor of eta in g <- (1 - eta decay) g + ...: the strong convexity that the
        theorems' steps use.
        """
        return self.mu

    # -- clients -----------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tensor]:
        """f on the client's rows: it has no functions yet."""
        f = torch.zeros(len(client.data.index), client.spec.outputs)
        return {"f": f, "before": f} if self.searches(client.spec) else {"f": f}

    def absorb(self, client: Client, **updates: Tree) -> dict[str, Tensor]:
        """f on the client's rows, with the functions that are new to it."""
        keep, parts, weights = updates["f"]
        total, x = keep * client.state["f"], self._features(client)
        for functions, weight in zip(parts, weights, strict=True):
            before = total
            total = before + self.oracle.values(functions, weight, x, client.spec)
        return {"f": total, "before": before} if "before" in client.state else {"f": total}

    def _features(self, client: Client) -> Tensor:
        """Rows, where the oracle uses them."""
        return client.data.there[0] if self.oracle.trains else client.data.x

    def check_updates(self, spec: Spec, **updates: Tree) -> None:
        """The parts of f must be functions of the oracle."""
        if list(updates) != ["f"]:
            raise ReplyError(f"the held values {list(updates)} are not those of FFGB, ['f']")
        for n, (functions, weights) in enumerate(sum_from_wire("f", updates["f"])):
            try:
                self.oracle.accept_joined(functions, len(weights), spec)
            except ReplyError as error:
                raise ReplyError(f"f, part {n}: {error}") from None

    def boost(self, client: Client, t: int, eta: float | None = None) -> tuple[Tree, None]:
        """Algorithm 2. eta: the step, if the server searches for it."""
        x, y, spec = self._features(client), client.data.y, client.spec
        loss, ones = self._loss(spec.classes), torch.ones(len(x))
        g = client.state["f"]  # line 2: g_1 = f^t
        weight = weights_of(client)
        ones, more = (ones, {}) if weight is None else (ones * weight[0], {"weight": weight[1]})
        delta, found = torch.zeros_like(g), []
        for k in range(1, self.local_steps + 1):
            step = self.eta(t, k, spec) if eta is None else eta
            target, fit = loss.slope(g, y, ones), more
            if self.step == "auto" and eta is None:
                target, fit = within_reach(loss, g, target, step, more)
            target = delta + target
            key = random.fold(client.key, k)
            found.append(self.oracle.fit(x, target, key, spec, **fit))  # line 4
            if k == self.local_steps:
                break  # g_{K+1} is the server's to make
            fitted = self.oracle.values(self.oracle.join(found[-1:]), torch.ones(1), x, spec)
            g = g - step * (fitted + self.mu * g)  # line 5
            if self.residual:
                delta = target - fitted  # line 6
        return {"functions": found}, None

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        if clients.spec.classes:
            self._classes(clients)
        spec = clients.spec
        warn_unless_convex(type(self).__name__, self.loss, self._loss(spec.classes), spec)
        state = State(f=HeldSum(), spec=spec)
        return self.begin_search(clients, state) if self.searches(spec) else state

    def labels(self, client: Client) -> tuple[Tree, None]:
        """Before the first round, uncharged: how often each class occurs."""
        assert client.spec.classes is not None
        counts = torch.zeros(client.spec.classes).index_add(0, client.data.y, client.data.weight)
        return {"counts": counts}, None

    def _classes(self, clients: Clients) -> None:
        held = clients.measure(self.labels, weights=None)
        if held is not None and bool((held["counts"] == 0).any()):
            missing = torch.nonzero(held["counts"] == 0).flatten().tolist()
            warnings.warn(
                f"classes {missing[:10]} appear at no client: their scores can only fall",
                stacklevel=2,
            )

    def round(self, clients: Clients, state: State) -> State:
        """Algorithm 1: every client starts from f^t (line 4), and f^{t+1} is the average of their
        g_{K+1} (line 5).
        """
        accept = lambda ids, reply: self.unusable(ids, reply, state.spec)  # noqa: E731
        sent = {"eta": state.step} if "step" in state else {}
        replies = clients.gather(
            self.boost, weights=self.weights, accept=accept, f=state.f, t=clients.round - 1, **sent
        )
        functions, weights, shrink = [], [], 0.0
        for reply, share, when in zip(
            replies, replies.weights.tolist(), replies.versions.tolist(), strict=True
        ):
            etas = [state.step] * self.local_steps if sent else self._etas(when - 1, state.spec)
            factor, pulls = step_weights(etas, self.decay)
            shrink += share * factor
            functions += self._functions(reply, state.spec)
            weights += [self.sign * pull * share for pull in pulls]
        joined = self.oracle.join(functions)
        f = state.f.grown(shrink, joined, torch.tensor(weights, dtype=torch.float64))
        return self.searched(clients, state, f) if sent else state.replace(f=f)

    def _etas(self, t: int, spec: Spec) -> list[float]:
        return [self.eta(t, k, spec) for k in range(1, self.local_steps + 1)]

    def unusable(self, ids: Tensor, replies: Tree, spec: Spec) -> dict[int, str]:
        """Which replies of untrusted clients hold functions that must not be used, and why."""
        bad = {}
        for i in range(len(ids)):
            try:
                self._functions(map_tensors(lambda t, i=i: t[i], replies), spec)
            except ReplyError as error:
                bad[i] = str(error)
        return bad

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
        return state

    def ensemble(self, state: State) -> tuple[Tree, Tensor]:
        """f as one structure: all functions joined, and the weight of each."""
        _, weights = state.f.since(0)
        flat = torch.cat(weights) if weights else torch.zeros(0)
        return self.oracle.concat(state.f.parts) if state.f.parts else None, flat

    def predictor(self, state: State) -> Predictor:
        functions, weights = self.ensemble(state)
        return self.predictor_of(Ensemble(self.oracle, functions, weights, state.spec))

    def predictor_of(self, form: Ensemble) -> Predictor:
        """A model with the probabilities that belong to the loss."""
        return Predictor(form, form.spec, shares_of(self._loss(form.spec.classes), softmax))

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        classes = None if y.is_floating_point() else outputs.shape[-1]
        return self._loss(classes).value(outputs, y)


def weights_of(client: Client) -> tuple[Tensor, Tensor] | None:
    """Where rows have weights w_j: their mean m, and w_j / m. R_i is then m times the mean of the
    loss in the measure alpha_i that has w_j / m as weights; `None` where there are none.
    """
    worth = client.data.worth
    if worth is None:
        return None
    mean = worth.mean()
    return mean, worth / mean if bool(mean > 0) else torch.ones_like(worth)


def step_weights(etas: list[float], decay: float) -> tuple[float, list[float]]:
    """g_{K+1} = prod_k (1 - eta_k decay) f -+ sum_k eta_k prod_{j > k} (1 - eta_j decay) h_k: the
    factor of f, and those of the h_k.
    """
    shrink, pulls = 1.0, []
    for eta in reversed(etas):
        pulls.append(eta * shrink)
        shrink *= 1 - eta * decay
    return shrink, pulls[::-1]
