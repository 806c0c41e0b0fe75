"""FedRes: Agarwal, Langford and Wei, "Federated residual learning", 2020.

Client i predicts with a global model on global features plus a model of its own on local features,

    f(x^g; w^g) + f(x^l; w_i),   loss l(y, f(x^g; w^g) + f(x^l; w_i)),

one row (or mini-batch) a round, and learns from it online. Either model learns what the other leaves: the residual. The local
model and the local features never leave the client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from foedus.algorithms.fedres.pair import (
    LOSSES,
    Columns,
    columns_of,
    forward,
    logits,
    part,
    part_spec,
    row_loss,
    slope,
    targets,
    value,
)
from foedus.base import random, tree
from foedus.base.batching import batched
from foedus.base.rows import take
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, DataError, ReplyError, positive, unknown, whole_number
from foedus.models.base import Model, Params, check_fits, model_of
from foedus.models.linear import Linear

SCHEDULES = ("constant", "sqrt", "adagrad")
RULES = ("aligned", "asymmetric", "misaligned")
SENDS = ("rows", "gradient")


@dataclass(frozen=True)
class FedRes(Algorithm):
    """Aligned stochastic gradients (Algorithms 3 and 4), under delays of up_i and down_i rounds (`fd.Delayed`).

    Round t, with w^g_t the server's model and s_i = t - down_i the round whose broadcast has reached client i:

        client i:  predicts with (w^g_{s_i}, w_{i,t}), sees a row, and sends (x^g, f(x^l; w_{i,t}), y)
                   w_{i,t+1} = P_D(w_{i,t} - eta_i grad^l_{i,t-up_i-down_i})                                        (7)
        server:    w^g_{t+1} = P_D(w^g_t - eta sum_i grad^g_{i,t-up_i})                                             (8)

    where grad_{i,s} is the gradient at the pair that client i predicted with in round s, and P_D projects onto the ball of radius
    D = `radius` (`None`: no ball). So both models learn from a row at the same time, a round trip after it was seen. The paper
    writes w_t on the left of (7) and (8); without delay the gradient would then be taken at a model that it is needed for.
    Here it is t + 1, as in the paper's Section 3.2.1. The server keeps the versions that outstanding replies refer to: one more
    than the longest round trip.

    rule: "aligned", or one of the paper's two rules that are not (Section 3.2.1), to compare. In both the client takes its own
    gradient at once, (w^g_{s_i}, w_{i,t}) -> w_{i,t+1}; "misaligned" takes the server's at the pair (w^g_t, w_{i,t-up_i}),
    "asymmetric" at the right pair. Without delay, all three are the same.
    send: "rows", what (8) says: the server sees x^g, y and the local prediction of every row; or "gradient": the client
    computes grad^g_{i,t} itself, and only the sum over clients is needed. The same numbers; only "misaligned" needs rows.

    global_model, local_model: any models (or `nn.Module`s); `None` leaves one out. local_model may be {client id: model}: local
    models need not be alike. shared, private: the columns of global and local features (`None`: all); private may be
    {client id: columns}. loss: "squared", |f - y|^2, or "logistic", log(1 + exp(-y f)). Labels are y = +-1: one output for
    two classes, else one for each class. step, local_step: eta and eta_i (by default the same), with `schedule` "constant", "sqrt"
    (eta / sqrt t) or "adagrad" (by coordinate, eta / sqrt of the sum of squared gradients; Vowpal Wabbit's --adaptive).
    batch_size: rows in a round, of which the loss is averaged (Section 4). Where only some clients take part in a round, a client's t, and its
    delay in (7), count the rounds that it takes part in. Rows come in the order of the data, again and again.
    measure_every: log `online_loss`, the average loss of all predictions so far, every so many rounds; sent by nobody.

    Clients are scored on their own test rows (`own_accuracy`) with the pair that they hold after the round: the last global model that has
    reached them, and their own. `accuracy` is that of the server's model alone, what a newcomer would get.

    Example:
        >>> fed = fd.split(fd.load("digits"), "tasks", clients=10)
        >>> part = {"shared": fed.settings["global_features"], "private": fed.settings["local_features"]}
        >>> fd.run(fd.FedRes(**part, step=0.1), fed, rounds=300, engine=fd.Delayed(up=2, down=3))
    """

    global_model: Model | None = Linear()  # noqa: RUF009 - frozen
    local_model: Model | Mapping[int, Model] | None = Linear()  # noqa: RUF009 - frozen
    loss: str = "squared"
    shared: Columns = None
    private: Columns | Mapping[int, Columns] = None
    step: float = 0.1
    local_step: float | None = None
    schedule: str = "adagrad"
    batch_size: int = 1
    radius: float | None = None
    rule: str = "aligned"
    send: str = "rows"
    measure_every: int = 1

    personal: ClassVar[bool] = True
    spread: ClassVar[float] = float("inf")
    remedy: ClassVar[str] = "try a smaller step, schedule='adagrad', or a radius"

    def __post_init__(self) -> None:
        known = (("loss", LOSSES), ("schedule", SCHEDULES), ("rule", RULES), ("send", SENDS))
        for name, values in known:
            if getattr(self, name) not in values:
                raise ConfigError(unknown(name, getattr(self, name), list(values)))
        positive("step", self.step)
        for name in ("local_step", "radius"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        whole_number("batch_size", self.batch_size)
        whole_number("measure_every", self.measure_every, 0)
        if self.global_model is None and self.local_model is None:
            raise ConfigError("global_model and local_model are both None: nothing would learn")
        if self.rule == "misaligned" and self.send == "gradient":
            raise ConfigError("rule='misaligned' needs send='rows': a client cannot know the model that the server has by then")
        each = {
            "global_model": None if self.global_model is None else model_of(self.global_model),
            "local_model": _each("local_model", self.local_model, model_of),
            "shared": None if self.shared is None else columns_of("shared", self.shared),
            "private": _each("private", self.private, lambda v: columns_of("private", v)),
        }
        for name, checked in each.items():
            object.__setattr__(self, name, checked)

    # -- what is learnt ----------------------------------------------------------------------------------------------

    @property
    def alike(self) -> bool:
        return not isinstance(self.local_model, Mapping) and not isinstance(self.private, Mapping)

    @property
    def names_clients(self) -> bool:
        return not self.alike

    @property
    def batchable(self) -> bool:
        return self.alike and all(m is None or m.batchable for m in (self.global_model, self.local_model))

    def independent(self) -> FedRes:
        """Every client alone, on all of its features: the paper's Independent."""
        parts = (self.shared, self.private)
        if not self.alike or self.local_model is None:
            raise ConfigError("independent() needs one local_model, and one set of columns, for all clients")
        both = None if None in parts else tuple(sorted({*self.shared, *self.private}))
        return replace(self, global_model=None, private=both, rule="aligned")

    def central(self) -> FedRes:
        """One model of the global features, with every row sent to the server, which learns from it as it is then: Central."""
        return replace(self, local_model=None, private=None, rule="misaligned" if self.send == "rows" else "aligned")

    def local(self, client: Client) -> tuple[Model | None, Columns]:
        """The local model and the columns of a client."""
        return tuple(v[int(client.id)] if isinstance(v, Mapping) else v for v in (self.local_model, self.private))

    def check(self, spec: Spec) -> None:
        if self.loss == "logistic" and not spec.classes:
            raise ConfigError("loss='logistic' needs class labels; the data has real targets: use loss='squared'")
        parts: list[tuple[str, Model | None, Columns]] = [("global_model", self.global_model, self.shared)]
        if not self.alike:
            sets = [set(v) for v in (self.local_model, self.private) if isinstance(v, Mapping)]
            if sets[0] != sets[-1]:
                raise ConfigError("local_model and private must name the same clients")
            pick = lambda v, i: v[i] if isinstance(v, Mapping) else v  # noqa: E731
            parts += [(f"local_model[{i}]", pick(self.local_model, i), pick(self.private, i)) for i in sorted(sets[0])]
        else:
            parts.append(("local_model", self.local_model, self.private))
        for name, model, columns in parts:
            if columns is not None and max(columns) >= spec.features:
                raise DataError(f"column {max(columns)} of {name} is beyond the {spec.features} features of the data")
            if model is not None:
                check_fits(name, model, part_spec(spec, columns))

    # -- clients -----------------------------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tree]:
        state: dict[str, Tree] = {"t": torch.zeros((), dtype=torch.int64), "loss": torch.zeros((), dtype=torch.float64)}
        if self.global_model is not None:
            state["seen"] = self.global_model.init(part_spec(client.spec, self.shared), client.shared)
        model, columns = self.local(client)
        if model is not None:
            state |= self.with_local(model.init(part_spec(client.spec, columns), random.fold(client.key, 1)), client.longest)
        return state

    def with_local(self, local: Params, longest: int) -> dict[str, Tree]:
        """A first local model, and what goes with it."""
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
        args = {"state": client.state, "w": w, "index": client.data.index, "weight": client.data.weight}
        args["lag"] = client.up + client.down
        shared = (self, model, columns, client.data.table_x, client.data.table_y, client.spec)
        found = _act(args, shared)
        return found["reply"], found["state"]

    def tally(self, client: Client) -> tuple[Tree, None]:
        """For the history: the losses of a client's predictions so far, and how many rounds they are of."""
        return {"loss": client.state["loss"], "t": client.state["t"].double()}, None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        model, columns = self.local(client)
        z = 0.0
        if self.global_model is not None:
            z = z + self.global_model.apply(client.state["seen"], part(x, self.shared, 1))
        if model is not None:
            z = z + model.apply(client.state["local"], part(x, columns, 1))
        return logits(z, client.spec)

    # -- server ------------------------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        state = State(ids=clients.ids, spec=clients.spec)
        if not self.alike:
            self.check_ids(clients.ids.tolist())
        if self.global_model is not None:
            w = self.global_model.init(part_spec(clients.spec, self.shared), clients.shared)
            state = self.with_model(state, w, clients.longest)
        return state

    def with_model(self, state: State, w: Params, longest: int) -> State:
        """The first state with a global model, and what goes with it."""
        state = state.replace(w=w)
        if self.schedule == "adagrad":
            state = state.replace(squares=tree.zeros_like(w))
        if self.keeps(longest):
            past = tree.map(lambda p: p.expand(longest + 1, *p.shape).clone(), w)
            state = state.replace(past=past, when=torch.zeros(longest + 1, dtype=torch.int64), broadcasts=0)
        return state

    def keeps(self, longest: int) -> bool:
        """Whether the server keeps old versions, (8)."""
        return bool(longest) and self.send == "rows" and self.rule != "misaligned" and self.global_model is not None

    def remember(self, clients: Clients, state: State) -> State:
        """Keep the model that is about to be broadcast, for replies that will refer to it, in the place of the oldest."""
        if not self.keeps(clients.longest):
            return state
        place = torch.tensor([state.broadcasts % (clients.longest + 1)])
        past = {k: v.index_copy(0, place, state.w[k][None]) for k, v in state.past.items()}
        when = state.when.index_copy(0, place, torch.tensor([clients.round]))
        return state.replace(past=past, when=when, broadcasts=state.broadcasts + 1)

    def readmit(self, state: State, ids: Tensor) -> State:
        """Their local models begin anew."""
        return state

    def recall(self, clients: Clients, state: State, versions: Tensor) -> Params:
        """The models that replies refer to, with a leading client dimension."""
        if not self.keeps(clients.longest):
            return {k: p.expand(len(versions), *p.shape) for k, p in state.w.items()}
        match = state.when == versions.unsqueeze(1)
        if not bool(match.any(1).all()):
            raise ReplyError(
                f"round {clients.round}: a reply refers to the model of round {int(versions.min())}, which is gone"
            )
        place = match.int().argmax(1)
        return {k: p.index_select(0, place) for k, p in state.past.items()}

    def round(self, clients: Clients, state: State) -> State:
        with contextlib.suppress(NothingArrived):
            if self.global_model is None:
                clients.mean(self.act)
            else:
                state = self.remember(clients, state)
                g = clients.sum(self.act, w=state.w) if self.send == "gradient" else self.gradient(clients, state)
                w, squares = self.move(state.w, g, state.get("squares"), torch.tensor(clients.round - 1), self.step, 0)
                state = state.replace(w=w, **({} if squares is None else {"squares": squares}))
        log_tally(self, clients, state, loss="online_loss")
        return state

    def gradient(self, clients: Clients, state: State) -> Params:
        """Algorithm 4: the gradient of each row that has arrived, at the version that its client had."""
        replies = clients.gather(self.act, w=state.w, accept=lambda reply: in_range(reply, "y", state.spec.classes))
        w = self.recall(clients, state, replies.versions)
        return {k: g.sum(0) for k, g in self.global_gradient(w, replies.stack(), state.spec).items()}

    def global_gradient(self, w: Params, sent: dict[str, Tensor], spec: Spec) -> Params:
        """grad^g_{i,s} of each client from what it sent: all with a leading client dimension."""
        x, y = sent["x"], targets(sent["y"], spec)
        if y.shape[:2] != x.shape[:2] or (self.local_model is not None and sent["local"].shape != y.shape):
            shapes = ", ".join(f"{k} {tuple(v.shape[1:])}" for k, v in sent.items())
            raise ReplyError(f"replies do not fit together: {shapes}")
        z, pull = forward(self.global_model, w, x)
        if self.local_model is not None:
            z = z + sent["local"]
        return pull(slope(self.loss, z, y) / x.shape[1])

    def move(
        self, w: Params, g: Params, squares: Params | None, t: Tensor, eta: float, batch: int
    ) -> tuple[Params, Params | None]:
        """One step of the schedule, and the projection; parameters with `batch` leading dimensions."""
        if self.schedule == "adagrad":
            squares = {k: s.addcmul(g[k], g[k]) for k, s in squares.items()}
            # Where no gradient has been, the sum is 0 and so is the gradient: any finite factor does.
            w = {k: p.addcmul(g[k], squares[k].clamp(min=1e-30).rsqrt(), value=-eta) for k, p in w.items()}
        else:
            pace = -eta if self.schedule == "constant" else -eta * (t + 1).rsqrt()
            w = {k: p + (pace if batch == 0 or self.schedule == "constant" else _spread(pace, p)) * g[k] for k, p in w.items()}
        if self.radius is not None:
            norm = sum(p.flatten(batch).square().sum(-1) for p in w.values()).sqrt()
            shrink = (self.radius / norm.clamp(min=1e-30)).clamp(max=1)
            w = {k: p * _spread(shrink, p) for k, p in w.items()}
        return w, squares

    def predictor(self, state: State) -> Predictor | None:
        if self.global_model is None:
            return None
        spec = state.spec
        return Predictor(lambda x: logits(self.global_model.apply(state.w, part(x, self.shared, 1)), spec), spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return row_loss(self.loss, outputs, y)

    def check_ids(self, ids: list[int]) -> None:
        """Refuse clients of whom nothing is said."""
        for name in ("local_model", "private"):
            given = getattr(self, name)
            if isinstance(given, Mapping) and (missing := [i for i in ids if i not in given]):
                raise ConfigError(f"{name} says nothing of clients {missing[:10]}: give an entry for each client id")


def log_tally(algorithm: Any, clients: Clients, state: State, **names: str) -> None:
    """Log what clients have added up over their rounds so far (`tally`), as averages over all rounds of all of them."""
    if algorithm.measure_every and clients.measures and clients.round % algorithm.measure_every == 0:
        found = clients.watched(state.ids).mean(algorithm.tally, weights="uniform")
        clients.log(**{name: found[key] / found["t"] for key, name in names.items()})


def act(
    algorithm: FedRes, model: Model | None, columns: Columns, args: dict[str, Tree], tables: tuple, own: bool = False
) -> Tree:
    """One round of a batch of clients: `reply` and new `state`, everything with a leading client dimension.

    `gradient()` is that in the global model, whether or not it is sent. own: the state belongs to the caller alone, and what waits in it may be changed in place.
    """
    table_x, table_y, spec = tables
    state, w, index, b = args["state"], args["w"], args["index"], algorithm.batch_size
    t = state["t"]
    if "rows" in args:
        rows = args["rows"]
    else:
        rows = stream(t, index, args["count"] if "count" in args else (args["weight"] > 0).sum(1), b)
    x, y = take(table_x, rows).float(), take(table_y, rows)
    target = targets(y, spec)
    z, reply, new = torch.zeros_like(target), {}, {**state, "t": t + 1}
    if algorithm.global_model is not None:
        x_g = part(x, algorithm.shared, 2)
        z_g, pull_g = forward(algorithm.global_model, w, x_g)
        z, new["seen"] = z + z_g, w
    if model is not None:
        z_l, pull_l = forward(model, state["local"], part(x, columns, 2))
        z = z + z_l
    new["loss"] = state["loss"] + value(algorithm.loss, z, target).mean(1)
    s = slope(algorithm.loss, z, target)
    s = s / b if b > 1 else s
    if algorithm.global_model is not None:
        if algorithm.send == "gradient":
            reply = pull_g(s)
        else:
            reply = {"x": x_g, "y": y.to(torch.uint8) if spec.classes and spec.classes <= 256 else y}
            if model is not None:
                reply["local"] = z_l
    if model is not None:
        g = pull_l(s)
        if "waiting" in state:
            new["waiting"], g = late(state["waiting"], g, t, args["lag"], own)
        eta = algorithm.local_step or algorithm.step
        new["local"], squares = algorithm.move(state["local"], g, state.get("squares"), t, eta, 1)
        if squares is not None:
            new["squares"] = squares
    return {"reply": reply, "state": new, "gradient": lambda: pull_g(s)}


@batched
def _act(args: dict[str, Tree], shared: tuple) -> Tree:
    algorithm, model, columns, *tables = shared
    found = act(algorithm, model, columns, args, tables)
    # What all clients share arrives expanded; a state must stand on its own.
    return {"reply": found["reply"], "state": tree.map(lambda v: v.contiguous(), found["state"])}


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """One value for each client (or for all), in the shape of its parameters."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))


def late(waiting: Params, g: Params, t: Tensor, lag: Tensor, own: bool) -> tuple[Params, Params]:
    """Put the gradients of round t into the ring, and take out those of round t - lag: zero, where there was none."""
    clients = torch.arange(len(t))
    size = next(iter(waiting.values())).shape[1]
    kept, due = {}, {}
    for k, ring in waiting.items():
        kept[k] = ring if own else ring.clone()
        kept[k][clients, t % size] = g[k]
        found = kept[k][clients, (t - lag) % size]
        due[k] = found * _spread((t >= lag).to(found.dtype), found)
    return kept, due


def stream(t: Tensor, index: Tensor, count: Tensor, b: int) -> Tensor:
    """Row numbers (c, b) of each client's round t: its rows in their order, again and again."""
    return index.gather(1, (t.unsqueeze(1) * b + torch.arange(b)) % count.unsqueeze(1))


def in_range(replies: Tree, name: str, most: int | None) -> dict[int, str]:
    """Which of some stacked replies have whole numbers of this name that are not all below `most`."""
    values = replies.get(name) if isinstance(replies, dict) else None
    if not isinstance(values, Tensor) or (most is not None and values.is_floating_point()):
        raise ReplyError(f"its reply has no {name}, or one that is not of whole numbers")
    if most is None:
        return {}
    bad = ((values < 0) | (values >= most)).reshape(len(values), -1).any(1)
    return dict.fromkeys(torch.nonzero(bad).flatten().tolist(), f"its {name} must be whole numbers from 0 to {most - 1}")


def _each(name: str, given: Any, f: Callable) -> Any:
    """`f` of a setting, or of the setting of each client."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return f(given)
    if not all(isinstance(k, Integral) and not isinstance(k, bool) for k in given):
        raise ConfigError(f"{name} must have client ids as keys, whole numbers; it has {list(given)[:5]}")
    return {int(k): f(v) for k, v in given.items()}
