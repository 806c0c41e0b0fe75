"""FedRes: Agarwal, Langford and Wei, "Federated residual learning", 2020.

Client i predicts with a global model on global features plus a model of its own on local features,

    f(x^g; w^g) + f(x^l; w_i),   loss l(y, f(x^g; w^g) + f(x^l; w_i)),

one row (or mini-batch) a round, and learns from it online. Either model learns what the other
leaves: the residual. The local model and the local features never leave the client.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from foedus.algorithms.fedres.pair import (
    by_id,
    columns_of,
    forward,
    part_spec,
    row_loss,
    scores,
    slope,
    sum_of,
    targets,
    union,
)
from foedus.algorithms.fedres.settings import check_ids, check_parts, check_schedule
from foedus.algorithms.fedres.step import act_batched, clipped, descended, in_range, log_tally
from foedus.algorithms.fedres.theorem import Theorem2
from foedus.base import random, tree
from foedus.base.columns import Columns
from foedus.base.settings import check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Batching, Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived, Replies
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, ReplyError
from foedus.export.forms import Form
from foedus.models.base import Model, Params, model_of
from foedus.models.linear import Linear


@dataclass(frozen=True)
class FedRes(Algorithm):
    """Federated residual learning by aligned stochastic gradients (Agarwal et al., 2020).

    A global model of the global features and a private model of the local ones predict together,
    and learn each other's residual online, also under delay (`fd.Delayed`): Algorithms 3 and 4.
    Round t, with delays of up_i and down_i rounds, w^g_t the server's model and s_i = t - down_i
    the round whose broadcast has reached client i:

        client i:  predicts with (w^g_{s_i}, w_{i,t}), sees a row, sends (x^g, f(x^l; w_{i,t}), y)
                   w_{i,t+1} = P_D(w_{i,t} - eta_i grad^l_{i,t-up_i-down_i})                     (7)
        server:    w^g_{t+1} = P_D(w^g_t - eta sum_i grad^g_{i,t-up_i})                          (8)

    where grad_{i,s} is the gradient at the pair that client i predicted with in round s, and P_D
    projects onto the ball of radius D. So both models learn from a row at the same time, a round
    trip after it was seen. The paper writes w_t on the left of (7) and (8); without delay the
    gradient would then be taken at a model that it is needed for. Here it is t + 1, as in the
    paper's Section 3.2.1.

    The paper's two other rules (Section 3.2.1) are not aligned. In both the client takes its own
    gradient at once, (w^g_{s_i}, w_{i,t}) -> w_{i,t+1}; "misaligned" takes the server's at the pair
    (w^g_t, w_{i,t-up_i}), "asymmetric" at the right pair. Without delay, all three are the same.

    Labels are y = +-1: one output for two classes, else one for each class. Rows come in the order
    of the data, cyclically. Under partial participation, a client's t, and its delay in (7), count
    the rounds in which it takes part. Clients are scored on their own test rows (`own_accuracy`)
    with the pair that they hold after the round: the last global model that has reached them, and
    their own. `accuracy` is that of the server's model alone, which a newcomer would get.

    Args:
        global_model: The shared model, any model or `nn.Module`; `None` leaves it out.
        local_model: The private model; `None` leaves it out, {client id: model} gives clients
            different ones.
        loss: "squared", |f - y|^2, or "logistic", log(1 + exp(-y f)).
        shared: The columns of the global features; `None`: all.
        private: The columns of the local features, or {client id: columns}; `None`: all.
        step: eta.
        local_step: eta_i; `None`: `step`.
        schedule: "constant", "sqrt" (eta / sqrt t), "adagrad" (by coordinate, eta / sqrt of the sum
            of squared gradients; Vowpal Wabbit's --adaptive), or "theorem2", for both models the
            step of `theorem`.
        theorem: The constants of Theorem 2, for schedule="theorem2".
        forget: Factor by which what was seen a round ago counts less, for streams that drift: the
            sum of squared gradients of "adagrad", or t of "sqrt", as sum_s forget^(t-s). 1 forgets
            nothing, and steps go to 0; below 1 they do not.
        clip_predictions: Whether the gradient is taken at the prediction clipped to the smallest
            interval with 0 and the labels that the client has seen, as by Vowpal Wabbit, so that
            large steps are safe. `online_loss` is that of clipped predictions; test rows are
            predicted unclipped.
        batch_size: Rows in a round, of which the loss is averaged (Section 4).
        radius: D; `None`: no ball.
        rule: "aligned"; or "misaligned", all that a server can do that keeps no old weights, such
            as Vowpal Wabbit; or "asymmetric", for comparison.
        send: "rows", as in (8): the server sees x^g, y and the local prediction of every row; or
            "gradient": the client computes grad^g_{i,t} itself, and only the sum over clients is
            needed. The same numbers; only "misaligned" needs rows.
        measure_every: Log `online_loss`, the average loss of all predictions so far, every this
            number of rounds (0: never); not sent.

    Example:
        >>> fed = fd.split(fd.load("digits"), "tasks", clients=5)
        >>> shared, private = fed.settings["global_features"], fed.settings["local_features"]
        >>> run = fd.run(fd.FedRes(shared=shared, private=private), fed, rounds=50)
        >>> last = run.history.iloc[-1]
        >>> last.own_accuracy > last.accuracy
        True
    """

    global_model: Model | None = Linear()  # noqa: RUF009 - frozen
    local_model: Model | Mapping[int, Model] | None = Linear()  # noqa: RUF009 - frozen
    loss: Literal["squared", "logistic"] = "squared"
    shared: Columns = None
    private: Columns | Mapping[int, Columns] = None
    step: Annotated[float, Gt(0)] = 0.1
    local_step: Annotated[float, Gt(0)] | None = None
    schedule: Literal["constant", "sqrt", "adagrad", "theorem2"] = "adagrad"
    batch_size: Annotated[int, Ge(1)] = 1
    radius: Annotated[float, Gt(0)] | None = None
    rule: Literal["aligned", "asymmetric", "misaligned"] = "aligned"
    send: Literal["rows", "gradient"] = "rows"
    measure_every: Annotated[int, Ge(0)] = 1
    theorem: Theorem2 | None = field(default=None, kw_only=True)
    forget: Annotated[float, Gt(0), Le(1)] = field(default=1.0, kw_only=True)
    clip_predictions: bool = field(default=False, kw_only=True)

    personal: ClassVar[bool] = True
    remedy: ClassVar[str] = "try a smaller step, schedule='adagrad', or a radius"

    def __post_init__(self) -> None:
        if self.global_model is None and self.local_model is None:
            raise ConfigError("global_model and local_model are both None: nothing would learn")
        if self.rule == "misaligned" and self.send == "gradient":
            raise ConfigError(
                "rule='misaligned' needs send='rows': a client cannot know the model that the "
                "server has by then"
            )
        check_schedule(self)
        each = {
            "global_model": None if self.global_model is None else model_of(self.global_model),
            "local_model": by_id("local_model", self.local_model, model_of),
            "shared": None if self.shared is None else columns_of("shared", self.shared),
            "private": by_id("private", self.private, lambda v: columns_of("private", v)),
        }
        for name, checked in each.items():
            object.__setattr__(self, name, checked)
        check_settings(self)

    # -- what is learnt ----------------------------------------------------------------------------

    @property
    def alike(self) -> bool:
        """Whether all clients have the same local model and columns."""
        return not isinstance(self.local_model, Mapping) and not isinstance(self.private, Mapping)

    @property
    def only_local(self) -> tuple[Model | None, Columns]:
        """The local model and the columns that all clients share."""
        assert not isinstance(self.local_model, Mapping) and not isinstance(self.private, Mapping)
        return self.local_model, self.private

    @property
    def names_clients(self) -> bool:
        return not self.alike

    def batching(self) -> Batching:
        models = [m for m in (self.global_model, self.local_model) if isinstance(m, Model)]
        pays = self.alike and all(m.batchable for m in models)
        return Batching(spread=math.inf, alike=self.alike, pays=pays)

    def independent(self) -> FedRes:
        """Every client alone, on all of its features: the paper's Independent."""
        if not self.alike or self.local_model is None:
            raise ConfigError(
                "independent() needs one local_model, and one set of columns, for all clients"
            )
        both = union(self.shared, self.only_local[1])
        return replace(self, global_model=None, private=both, rule="aligned")

    def central(self) -> FedRes:
        """The paper's Central: one model, of the global features; every row goes to the server."""
        rule: Literal["misaligned", "aligned"] = "misaligned" if self.send == "rows" else "aligned"
        return replace(self, local_model=None, private=None, rule=rule)

    def check(self, spec: Spec) -> None:
        check_parts(self, spec)

    def local(self, client: Client) -> tuple[Model | None, Columns]:
        """The local model and the columns of a client."""
        model, columns = self.local_model, self.private
        return (
            model[int(client.id)] if isinstance(model, Mapping) else model,
            columns[int(client.id)] if isinstance(columns, Mapping) else columns,
        )

    # -- clients -----------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tree]:
        rounds, loss = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.float64)
        state: dict[str, Tree] = {"t": rounds, "loss": loss}
        if self.clip_predictions:
            zero = torch.zeros(part_spec(client.spec, None).outputs)
            state |= {"low": zero, "high": zero.clone()}
        if self.global_model is not None:
            spec = part_spec(client.spec, self.shared)
            state["seen"] = self.global_model.init(spec, client.shared)
        model, columns = self.local(client)
        if model is not None:
            local = model.init(part_spec(client.spec, columns), random.fold(client.key, 1))
            state |= self.with_local(local, client.longest)
        return state

    def with_local(self, local: Params, longest: int) -> dict[str, Tree]:
        """The state of a client with a first local model."""
        state: dict[str, Tree] = {"local": local}
        if self.schedule == "adagrad":
            state["squares"] = tree.zeros_like(local)
        if self.waits(longest):
            state["waiting"] = tree.map(lambda p: torch.zeros(longest + 1, *p.shape), local)
        return state

    def waits(self, longest: int) -> bool:
        """Whether clients keep gradients for later, (7)."""
        return bool(longest) and self.rule == "aligned" and self.global_model is not None

    def act(self, client: Client, w: Params | None = None) -> tuple[Tree, Tree]:
        """Algorithm 3: predict, see a row, learn from the row of a round trip ago."""
        model, columns = self.local(client)
        data = client.data
        args = {"state": client.state, "w": w, "index": data.index, "weight": data.weight}
        args["lag"] = client.up + client.down
        found = act_batched(args, (self, model, columns, data.table_x, data.table_y, client.spec))
        return found["reply"], found["state"]

    def tally(self, client: Client) -> tuple[Tree, None]:
        """For the history: the sum of the losses of a client's predictions, and its rounds."""
        return {"loss": client.state["loss"], "t": client.state["t"].double()}, None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        return self.form(client)(x)

    def form(self, client: Client) -> Form:
        """The sum of the global and the local model."""
        model, columns = self.local(client)
        shared = (self.global_model, client.state.get("seen"), self.shared)
        private = (model, client.state.get("local"), columns)
        return scores(sum_of((shared, private)), client.spec)

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        check_ids(self, clients.ids.tolist())
        state = State(spec=clients.spec)
        if self.global_model is not None:
            spec = part_spec(clients.spec, self.shared)
            state = self.with_model(state, self.global_model.init(spec, clients.shared))
        return state

    def with_model(self, state: State, w: Params) -> State:
        """The first state of the server with a global model."""
        squares = {"squares": tree.zeros_like(w)} if self.schedule == "adagrad" else {}
        return state.replace(w=w, **squares)

    def readmit(self, state: State, ids: Tensor) -> State:
        """Their local models begin anew."""
        return state

    def round(self, clients: Clients, state: State) -> State:
        with contextlib.suppress(NothingArrived):
            if self.global_model is None:
                clients.mean(self.act)
            else:
                state = self.moved(state, self.gradient(clients, state), clients.round - 1)
        log_tally(self, clients, loss="online_loss")
        return state

    def moved(self, state: State, g: Params, t: int) -> State:
        """(8): the server's step, from the sum of the clients' gradients."""
        squares = state.get("squares")
        w, squares = descended(self, state.w, g, squares, torch.tensor(t), self.step, 0)
        return state.replace(w=w, **({} if squares is None else {"squares": squares}))

    def gradient(self, clients: Clients, state: State) -> Params:
        """Algorithm 4: the sum of the gradients of the rows that arrived, at their versions."""
        if self.send == "gradient":
            return clients.sum(self.act, w=state.w)
        accept = lambda _, reply: in_range(reply, "y", state.spec.classes)  # noqa: E731
        replies = clients.gather(self.act, w=state.w, accept=accept)
        each = self.global_gradient(self.models_of(replies, state), replies.stack(), state.spec)
        return {k: g.sum(0) for k, g in each.items()}

    def models_of(self, replies: Replies, state: State) -> Params:
        """The global model that each reply's gradient is taken at, clients first."""
        if self.rule == "misaligned":
            return {k: p.expand(len(replies), *p.shape) for k, p in state.w.items()}
        return replies.sent("w")

    def global_gradient(self, w: Params, sent: dict[str, Tensor], spec: Spec) -> Params:
        """grad^g_{i,s} of each client from what it sent: all with a leading client dimension."""
        x, y = sent["x"], targets(sent["y"], spec)
        local = y if self.local_model is None else sent["local"]
        range_ = [sent[k].shape for k in ("low", "high") if k in sent]
        fits = all(shape == y[:, 0].shape for shape in range_)
        if y.shape[:2] != x.shape[:2] or local.shape != y.shape or not fits:
            shapes = ", ".join(f"{k} {tuple(v.shape[1:])}" for k, v in sent.items())
            raise ReplyError(f"replies do not fit together: {shapes}")
        assert self.global_model is not None
        z, pull = forward(self.global_model, w, x)
        if self.local_model is not None:
            z = z + local
        if self.clip_predictions:
            z = clipped(z, sent)
        return pull(slope(self.loss, z, y) / x.shape[1])

    def predictor(self, state: State) -> Predictor | None:
        if self.global_model is None:
            return None
        form = sum_of([(self.global_model, state.w, self.shared)])
        return Predictor(scores(form, state.spec), state.spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return row_loss(self.loss, outputs, y)
