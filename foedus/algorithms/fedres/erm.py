"""FedRes by empirical risk minimization (Section 3.1 of the FedRes paper).

Linear models and the squared loss, sum_s |y_s - A^g x^g_s - A^l x^l_s|^2: every minimum is a
least-squares solution from sums of products, which a new row changes in O(d^2) operations. Old rows
are never visited again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.algorithms.fedres.least_squares import least_squares
from foedus.algorithms.fedres.pair import (
    columns_of,
    part_spec,
    row_loss,
    scores,
    targets,
    value,
)
from foedus.algorithms.fedres.step import in_range, log_tally, stream
from foedus.base import tree
from foedus.base.batching import batched
from foedus.base.columns import Columns, part
from foedus.base.rows import take
from foedus.base.settings import check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Batching, Client
from foedus.core.clients import Clients
from foedus.core.exchange import NothingArrived
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, DataError
from foedus.export.forms import Form, OnFeatures, Rounded, SomeColumns, Total
from foedus.models.features import Identity

Statistics = dict[str, Tensor]


@dataclass(frozen=True)
class FedResERM(Algorithm):
    """FedRes by least squares over all rows so far (Algorithms 1 and 2).

    Both models minimize the loss over all rows so far, given the other's newest model:

        client i:  w_{i,t} = argmin over |w| <= D of sum_{s < t} l_{i,s}(w^g_{t-down}, w)        (2)
        server:    w^g_{t+1} = argmin over |w| <= D of
                               sum_i sum_{s <= t-up} l_{i,s}(w, w_{i,t-up})                      (3)

    With sums S_lg = sum_s x^l_s x^g_s^T and so on, (2) is S_ll w = S_ly - S_lg w^g, where the ball,
    if it binds, adds mu I to S_ll with the mu >= 0 for which |w| = D; of several minima the
    shortest is taken. Clients send their rows and their local model, as (3) needs them. (In
    Appendix C, Algorithm 6 prints w^l_s where (3) has the newest, and lets the client fit to w^g_t
    where (2) has w^g_{t+1}; this is (2) and (3).)

    Args:
        shared: The columns of the global features; `None`: all.
        private: The columns of the local features; `None`: all.
        bias: Whether both models have a constant feature.
        radius: D; `None`: no ball.
        batch_size: Rows in a round.
        start_global: The global model before the first row, for one output; `None`: 0.
        start_local: The local model before the first row, for one output; `None`: 0.
        measure_every: Log `online_loss`, the average loss of all predictions so far, every this
            number of rounds (0: never); not sent.

    Example:
        >>> fed = fd.split(fd.load("digits"), "tasks", clients=5)
        >>> shared, private = fed.settings["global_features"], fed.settings["local_features"]
        >>> run = fd.run(fd.FedResERM(shared, private, radius=0.5), fed, rounds=50)
        >>> run.history.own_accuracy.iloc[-1] > 0.8
        True

    Reference: Agarwal, Langford and Wei, "Federated residual learning", 2020, Section 3.1.
    """

    shared: Columns = None
    private: Columns = None
    bias: bool = True
    radius: Annotated[float, Gt(0)] | None = None
    batch_size: Annotated[int, Ge(1)] = 1
    start_global: tuple[float, ...] | None = None
    start_local: tuple[float, ...] | None = None
    measure_every: Annotated[int, Ge(0)] = 1

    personal: ClassVar[bool] = True
    remedy: ClassVar[str] = "try a smaller radius, or scale the features"

    def __post_init__(self) -> None:
        for name in ("shared", "private"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, columns_of(name, getattr(self, name)))
        for name in ("start_global", "start_local"):
            if getattr(self, name) is not None:
                try:
                    values = tuple(float(v) for v in getattr(self, name))
                except (TypeError, ValueError):
                    values = (math.nan,)
                if not all(math.isfinite(v) for v in values):
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} must be finite numbers, one for each "
                        "feature of the model"
                    )
                object.__setattr__(self, name, values)
        check_settings(self)

    def batching(self) -> Batching:
        return Batching(spread=math.inf)

    def check(self, spec: Spec) -> None:
        for name, columns in (("shared", self.shared), ("private", self.private)):
            if columns is not None and max(columns) >= spec.features:
                raise DataError(
                    f"column {max(columns)} of {name} is beyond the {spec.features} features of "
                    "the data"
                )
        for name, columns in (("start_global", self.shared), ("start_local", self.private)):
            self._first(name, columns, spec)

    def _first(self, name: str, columns: Columns, spec: Spec) -> Tensor:
        """The first parameters, (d, m)."""
        form, given = part_spec(spec, columns), getattr(self, name)
        size = form.features + self.bias
        if given is None:
            return torch.zeros(size, form.outputs, dtype=torch.float64)
        if len(given) != size or form.outputs != 1:
            raise ConfigError(
                f"{name} has {len(given)} numbers; the model has {size} for each of {form.outputs} "
                "outputs"
            )
        return torch.tensor(given, dtype=torch.float64).unsqueeze(1)

    # -- clients -----------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tree]:
        local, seen = (
            self._first(*args, client.spec)
            for args in (("start_local", self.private), ("start_global", self.shared))
        )
        (d, m), g = local.shape, len(seen)
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.float64)  # noqa: E731
        sums = {"own": zeros(d, d), "cross": zeros(d, g), "y": zeros(d, m)}
        return {
            "t": torch.zeros((), dtype=torch.int64),
            "loss": zeros(),
            "local": local,
            "seen": seen,
            "sums": sums,
        }

    def act(self, client: Client, w: Tensor) -> tuple[Tree, Tree]:
        """Algorithm 1, or (5): fit, predict, see a row."""
        args = {
            "state": client.state,
            "w": w,
            "index": client.data.index,
            "weight": client.data.weight,
        }
        found = _act(args, (self, client.data.table_x, client.data.table_y, client.spec))
        return found["reply"], found["state"]

    def fit(self, sums: Statistics, other: Tensor, now: Tensor, t: Tensor) -> Tensor:
        """(2) or (3): the best model given the other one; before the first row, the present one."""
        best = least_squares(sums["own"], sums["y"] - sums["cross"] @ other, self.radius)
        return torch.where((t > 0).view(-1, 1, 1), best, now)

    def learn(
        self, sums: Statistics, own: Tensor, other: Tensor, y: Tensor, said: Tensor
    ) -> Statistics:
        """The sums with new rows (c, b, d); `said` is what the other model predicted for them."""
        return {
            "own": sums["own"] + own.mT @ own,
            "cross": sums["cross"] + own.mT @ other,
            "y": sums["y"] + own.mT @ y,
        }

    def message(
        self, x_g: Tensor, x_l: Tensor, y: Tensor, said: Tensor, local: Tensor
    ) -> dict[str, Tensor]:
        """What a client sends: the rows and the local model."""
        return {"x": x_g.float(), "x_local": x_l.float(), "y": y, "local": local}

    def tally(self, client: Client) -> tuple[Tree, None]:
        return {"loss": client.state["loss"], "t": client.state["t"].double()}, None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        return self.form(client)(x)

    def form(self, client: Client) -> Form:
        """The sum of the global and the local model."""
        shared = self.linear(client.state["seen"], self.shared)
        private = self.linear(client.state["local"], self.private)
        return scores(Rounded(Total((shared, private))), client.spec)

    def linear(self, w: Tensor, columns: Columns) -> Form:
        """One of the two models."""
        return SomeColumns(OnFeatures(Identity(intercept=self.bias), w), columns)

    def features(self, x: Tensor, columns: Columns, batch: int) -> Tensor:
        """Rows of one of the models, flat, in double precision, with a constant if there is a
        bias.
        """
        x = part(x, columns, batch).flatten(batch).double()
        return torch.cat((x, torch.ones(*x.shape[:-1], 1, dtype=x.dtype)), -1) if self.bias else x

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        w = self._first("start_global", self.shared, clients.spec)
        local = self._first("start_local", self.private, clients.spec)
        (d, m), g = local.shape, len(w)
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.float64)  # noqa: E731
        state = State(w=w, spec=clients.spec, own=zeros(g, g), y=zeros(g, m), seen=0)
        return state.replace(
            **self.remembers(zeros(clients.total, g, d), local.expand(clients.total, d, m).clone())
        )

    def remembers(self, cross: Tensor, local: Tensor) -> dict[str, Tensor]:
        """What the server keeps of each client."""
        return {"cross": cross, "local": local}

    def round(self, clients: Clients, state: State) -> State:
        try:
            replies = clients.gather(
                self.act,
                w=state.w,
                accept=lambda _, reply: in_range(reply, "y", state.spec.classes),
            )
        except NothingArrived:
            replies = None
        if replies is not None:
            state = self.receive(state, clients.positions(replies.ids), replies.stack())
        log_tally(self, clients, loss="online_loss")
        return state

    def receive(self, state: State, who: Tensor, sent: dict[str, Tensor]) -> State:
        """Algorithm 2: the rows of all clients, and their newest local models."""
        x, x_l = self.features(sent["x"], None, 2), self.features(sent["x_local"], None, 2)
        y = targets(sent["y"], state.spec).double()
        own, right = state.own + (x.mT @ x).sum(0), state.y + (x.mT @ y).sum(0)
        cross = state.cross.index_add(0, who, x.mT @ x_l)
        local = state.local.index_copy(0, who, sent["local"])
        w = least_squares(own, right - (cross @ local).sum(0), self.radius)
        return state.replace(
            w=w,
            own=own,
            y=right,
            cross=cross,
            local=local,
            seen=state.seen + x.shape[0] * x.shape[1],
        )

    def predictor(self, state: State) -> Predictor:
        form = Rounded(self.linear(state.w, self.shared))
        return Predictor(scores(form, state.spec), state.spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return row_loss("squared", outputs, y)


@batched
def _act(args: dict[str, Tree], shared: tuple) -> Tree:
    algorithm, table_x, table_y, spec = shared
    state, w, b = args["state"], args["w"], algorithm.batch_size
    t = state["t"]
    rows = stream(t, args["index"], (args["weight"] > 0).sum(1), b)
    x, labels = take(table_x, rows).float(), take(table_y, rows)
    y = targets(labels, spec).double()
    x_g, x_l = (
        algorithm.features(x, algorithm.shared, 2),
        algorithm.features(x, algorithm.private, 2),
    )
    local = algorithm.fit(state["sums"], w, state["local"], t)
    z_g, z_l = x_g @ w, x_l @ local
    sums = algorithm.learn(state["sums"], x_l, x_g, y, z_g)
    new = {"t": t + 1, "local": local, "seen": w, "sums": sums}
    new["loss"] = state["loss"] + value("squared", z_g + z_l, y).mean(1)
    plain_g, plain_l = (part(x, c, 2).flatten(2) for c in (algorithm.shared, algorithm.private))
    reply = algorithm.message(plain_g, plain_l, labels, z_l, local)
    return {"reply": reply, "state": tree.map(lambda v: v.contiguous(), new)}
