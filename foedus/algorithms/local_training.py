"""The base of the averaging methods: a model, a loss, and local training by mini-batch descent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.base.tree import State
from foedus.core.algorithm import Algorithm, Batching, Client
from foedus.core.clients import Clients
from foedus.core.predictor import Predictor
from foedus.export.forms import Form, Parametric
from foedus.models.base import (
    Model,
    Params,
    check_sequences,
    model_of,
    raise_kept,
    raise_statistics,
)
from foedus.models.custom_loss import check_custom
from foedus.models.linear import Linear
from foedus.models.losses import Loss, LossSetting, check_loss, loss_for
from foedus.models.training.descend import descend
from foedus.models.training.settings import Training


@dataclass(frozen=True)
class LocalTraining(Training, Algorithm):
    """Base of the methods whose clients train a model on their own rows.

    Args:
        model: What is trained: a foedus model, or any `torch.nn.Module`.
        loss: "auto" (cross-entropy for classes, squared for values); another name of
            `foedus.models.losses.LOSSES`; a loss such as `fd.losses.Quantile(0.9)`; or any function
            `loss(outputs, y)` that returns one number a row or their mean, such as a loss module of
            `torch.nn`.
        weights: How clients count in an average: "rows", by their numbers of rows, or "uniform".
    """

    weighs_rows: ClassVar[bool] = True
    takes_sequences: ClassVar[bool] = True

    averages_statistics: ClassVar[bool] = False
    """Whether its server averages running statistics; otherwise models that have them are refused.
    """

    keeps_layers: ClassVar[bool] = False
    """Whether its clients can keep private layers (`Model.kept`); otherwise models that have such
    layers are refused.
    """

    model: Model = Linear()  # noqa: RUF009 - frozen
    loss: LossSetting = "auto"
    weights: Literal["rows", "uniform"] = "rows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_of(self.model))
        check_loss(self.loss)
        super().__post_init__()

    def batching(self) -> Batching:
        spread = 1.5 if self.steps or self.batch_size is None else float("inf")
        pays = self.model.batchable and self.precision is None
        return Batching(spread, pays=pays, footprint=self.footprint)

    def footprint(self, rows: int, row_bytes: int) -> int:
        """Bytes of a client in a batch: the schedule of its mini-batches, and two of them."""
        each = self.step_rows or rows
        schedule = 64 * (self.steps * each if self.steps else self.epochs * rows)
        return schedule + 2 * min(rows, each) * row_bytes

    def row_spec(self, spec: Spec) -> Spec:
        return replace(spec, integers=spec.integers and self.model.takes_integers(spec))

    def check(self, spec: Spec) -> None:
        loss = self.loss_of(spec)
        loss.check(spec.classes, spec.outputs)
        check_sequences(self.model, spec)
        self.model.check(spec)
        if self.model.kept and not self.keeps_layers:
            raise_kept(type(self).__name__)
        if self.model.statistics - self.model.kept and not self.averages_statistics:
            raise_statistics(type(self).__name__)
        check_custom(loss, self.model, spec)

    if TYPE_CHECKING:

        @property
        def divided(self) -> bool:
            """Whether some parameters stay at their clients, which then have personal models."""
    else:

        @property
        def divided(self) -> bool:
            return bool(self.model.kept)

    @property
    def personal(self) -> bool:
        return self.divided

    @property
    def stateful(self) -> bool:
        return self.divided or type(self).init is not LocalTraining.init

    def body(self, w: Params) -> Params:
        """The parameters that are sent: all but those that stay at their clients."""
        return {k: v for k, v in w.items() if k not in self.model.kept}

    def init(self, client: Client) -> Any:
        return {"w": self.model.init(client.spec, client.shared)} if self.divided else None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        return self.form(client)(x)

    def form(self, client: Client) -> Form:
        return Parametric(self.model, client.state["w"])

    def readmit(self, state: State, ids: Tensor) -> State | None:
        """A client that has lost its own model starts again."""
        return state if self.personal else None

    def start(self, clients: Clients) -> State:
        w = self.model.init(clients.spec, clients.shared)
        return State(w=self.body(w) if self.divided else w, spec=clients.spec)

    def predictor(self, state: State) -> Predictor | None:
        if self.divided:
            return None
        return Predictor(Parametric(self.model, state.w), state.spec)

    def loss_of(self, spec: Spec) -> Loss:
        """The loss of rows of this form."""
        return loss_for(self.loss, spec.classes, spec.steps)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        classes = None if y.is_floating_point() else outputs.shape[-1]
        steps = y.shape[-1] if outputs.dim() == 3 else None
        return loss_for(self.loss, classes, steps).value(outputs, y)

    def moved(self, w: Params, move: Params, rate: float) -> Params:
        """w + rate move; running statistics are averaged without the rate."""
        fixed = self.model.statistics
        if not fixed:
            return tree.add(w, move, rate)
        return {k: torch.add(v, move[k], alpha=1.0 if k in fixed else rate) for k, v in w.items()}

    def moving(self, w: Params) -> Params:
        """The parameters that gradients move: all but running statistics."""
        fixed = self.model.statistics
        return {k: v for k, v in w.items() if k not in fixed} if fixed else w

    def answer(self, client: Client, w: Params, own: Params) -> tuple[Params, Any]:
        """The reply and the kept parameters of a client after training from w to `own`, a fresh
        copy."""
        if not self.divided:
            return tree.map(lambda new, old: new.sub_(old), own, w), client.state
        return {k: own[k] - v for k, v in w.items()}, {"w": own}

    def most_steps(self, data: Rows) -> int:
        """The most optimizer steps of a client in a batch."""
        return int(self.local_steps(torch.tensor(float(data.index.shape[-1]))))

    def descend(self, client: Client, w: Params, **terms: Any) -> dict[str, Any]:
        """Local training from w, and from the client's own parameters for those not in w; see
        `foedus.models.training.descend`.
        """
        if self.divided:
            w = {**client.state["w"], **w}
        return descend(
            self,
            self.model,
            self.loss_of(client.spec),
            w,
            client.data,
            client.key,
            round=client.round,
            **terms,
        )
