"""Distillation on an unlabeled public set: FFGB-Distill (FFGB, Section 5) and ensemble distillation
(FedDF, Lin et al. 2020).

The server makes one model of what clients sent, by training on public rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.algorithms.ffgb.boost import step_weights
from foedus.algorithms.ffgb.steps import step_of_loss
from foedus.algorithms.local_training import LocalTraining
from foedus.base import random, tree
from foedus.base.rows import Rows
from foedus.base.settings import Settings, check_settings, check_value
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Batching, Client
from foedus.core.clients import Clients
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, DataError, shown
from foedus.export.forms import Parametric
from foedus.models.base import Model, Params, model_of, raise_statistics
from foedus.models.convexity import warn_unless_convex
from foedus.models.custom_loss import check_custom
from foedus.models.losses import LossSetting, SoftLabels, Squared, check_loss, loss_for
from foedus.models.training.augment import crop_flip
from foedus.models.training.descend import descend, descend_to
from foedus.models.training.gradients import to
from foedus.models.training.settings import Training

ADAM = Training(lr=1e-3, optimizer="adam", epochs=100, batch_size=64, clip=5.0)
STUDENT = Training(lr=1e-3, optimizer="adam", epochs=20, batch_size=64, clip=5.0, weight_decay=1e-3)


class Public(Settings):
    """Unlabeled rows that the server may use for distillation.

    Args:
        x: The rows, as an array.
        views: Number of randomly cropped and flipped copies that replace the rows (images only).

    Example:
        >>> fd.Public(fd.load("digits").x_test)
        Public(451 rows of shape (64,), views=0)
    """

    def __init__(self, x: Any, views: int = 0):
        check_value("views", views, Annotated[int, Ge(0)])
        self.x = torch.from_numpy(np.ascontiguousarray(x, np.float32))
        if self.x.dim() < 2 or not len(self.x) or not bool(torch.isfinite(self.x).all()):
            raise DataError(
                f"public has shape {tuple(self.x.shape)}; it must be rows of finite numbers, at "
                "least one"
            )
        if views and self.x.dim() != 4:
            raise DataError(
                f"views={views} needs images (rows, channels, height, width), not "
                f"{tuple(self.x.shape)}"
            )
        self.views = views

    def check(self, spec: Spec) -> None:
        """Refuse rows of another form than the clients'."""
        if tuple(self.x.shape[1:]) != spec.shape:
            raise DataError(
                f"the public rows have shape {tuple(self.x.shape[1:])}, the clients' {spec.shape}: "
                "bring them to one form (size, channels, scaling) first"
            )

    def rows(self, key: Tensor) -> Tensor:
        """The rows of a round: as they are, or views of them that are drawn once."""
        if not self.views:
            return self.x
        return torch.cat([crop_flip(self.x, random.fold(key, v)) for v in range(self.views)])

    def state_dict(self) -> dict[str, Tensor]:
        return {"x": self.x}

    def __repr__(self) -> str:
        return f"Public({len(self.x)} rows of shape {tuple(self.x.shape[1:])}, views={self.views})"


@dataclass(frozen=True)
class FFGBDistill(Algorithm):
    """FFGB whose ensemble is distilled into one model after every round (equation 17).

    A round sends the model theta down and K networks up. Client i starts from g_1 = h_theta on its
    rows and makes the K steps of `fd.FFGB` with networks fitted by least squares (Q^2, equation 6);
    the server then trains theta on the public rows towards

        f(x) = prod_k (1 - eta mu) h_theta(x)
               - 1/|S| sum_i sum_k eta prod_{j > k} (1 - eta mu) h_{i,k}(x)

    by squared error, from the theta of the last round.

    Args:
        model: The model that is learned, theta.
        public: Rows without labels: an array, or `fd.Public(x, views=...)`.
        weak: The clients' model; `None`: the same as `model`.
        loss: As in `fd.FFGB`.
        local_steps: K, the number of networks that a client sends in a round.
        step: eta; "auto" follows the loss, as in `fd.FFGB` (10 for cross-entropy).
        mu: Weight of the L2 norm of f.
        residual: As in `fd.FFGB`.
        weights: How clients count: "uniform", as in the paper, or "rows".
        oracle: How clients fit (`fd.Training`).
        student: How the server distills (`fd.Training`).

    Example:
        >>> data = fd.load("digits")
        >>> fed = fd.split(data, "dirichlet", clients=10, alpha=0.3)
        >>> adam = fd.Training(lr=0.01, optimizer="adam", epochs=10)
        >>> distill = fd.FFGBDistill(fd.MLP(10), data.x_test, oracle=adam, student=adam)
        >>> fd.run(distill, fed, rounds=3).history.accuracy.iloc[-1] > 0.7
        True

    Reference: Shen, Hassani, Kale and Karbasi, "Federated functional gradient boosting", AISTATS
    2022, Section 5.
    """

    model: Model
    public: Any = field(compare=False)
    weak: Model | None = None
    loss: LossSetting = "auto"
    local_steps: Annotated[int, Ge(1)] = 1
    step: Annotated[float, Gt(0)] | Literal["auto"] = "auto"
    mu: Annotated[float, Ge(0)] = 5e-3
    residual: bool = True
    weights: Literal["rows", "uniform"] = "uniform"
    oracle: Training = ADAM
    student: Training = STUDENT

    remedy: ClassVar[str] = "try a smaller step"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_of(self.model))
        object.__setattr__(self, "weak", self.model if self.weak is None else model_of(self.weak))
        object.__setattr__(self, "public", as_public(self.public))
        check_loss(self.loss)
        check_settings(self)

    @property
    def fitted(self) -> Model:
        """The clients' model."""
        return self.model if self.weak is None else self.weak

    def batching(self) -> Batching:
        return Batching(
            float("inf"),
            pays=self.fitted.batchable and self.model.batchable,
            footprint=self.footprint,
        )

    def footprint(self, rows: int, row_bytes: int) -> int:
        return 64 * self.oracle.epochs * rows + 4 * rows * row_bytes

    def check(self, spec: Spec) -> None:
        loss = loss_for(self.loss, spec.classes)
        loss.check(spec.classes, spec.outputs)
        self.eta(spec)
        self.public.check(spec)
        for model in (self.model, self.fitted):
            model.check(spec)
            if model.statistics:
                raise_statistics(type(self).__name__)
        check_custom(loss, self.model, spec)

    def eta(self, spec: Spec) -> float:
        """The step size."""
        if self.step != "auto":
            return self.step
        found = step_of_loss(loss_for(self.loss, spec.classes), spec.outputs, bounds=False)
        if found is None:
            raise ConfigError(
                f"step='auto': no bound of the second derivative of loss={shown(self.loss)} is "
                "known; give step= a number"
            )
        return found

    def boost(self, client: Client, w: Params, t: int) -> tuple[Tree, None]:
        """Algorithm 2 with networks; all clients' start from the same draw, another in every
        round.
        """
        data, spec = client.data, client.spec
        x, y, loss = data.x, data.y, loss_for(self.loss, spec.classes)
        g = self.model.apply(w, x)
        delta, found = torch.zeros_like(g), []
        for k in range(1, self.local_steps + 1):
            key = random.fold(client.key, k)
            target = delta + loss.slope(g, y, torch.ones_like(data.weight))
            start = self.fitted.init(spec, random.fold(client.shared, t, k))
            h = descend_to(
                self.oracle, self.fitted, Squared(), start, data, target, random.fold(key, 1), t
            )
            said = self.fitted.apply(h, x)
            g = g - self.eta(spec) * (said + self.mu * g)
            if self.residual:
                delta = target - said
            found.append(h)
        return {"functions": found}, None

    def start(self, clients: Clients) -> State:
        spec = clients.spec
        loss = loss_for(self.loss, spec.classes)
        warn_unless_convex(type(self).__name__, self.loss, loss, spec)
        return State(w=self.model.init(spec, clients.shared), spec=spec)

    def round(self, clients: Clients, state: State) -> State:
        replies = clients.gather(self.boost, weights=self.weights, w=state.w, t=clients.round)
        functions, share = replies.stack()["functions"], replies.weights.float()
        shrink, pulls = step_weights([self.eta(state.spec)] * self.local_steps, self.mu)
        rows = clients.place(self.public.rows(clients.key))
        teach = lambda block: self._teacher(block, state.w, functions, pulls, share, shrink)  # noqa: E731
        teacher = torch.cat([teach(block) for block in rows.split(1024)])
        data = Rows(rows, teacher, torch.arange(len(rows)), torch.ones(len(rows)), state.spec)
        key = random.fold(clients.key, 1)
        round = clients.round
        learnt = descend(self.student, self.model, Squared(), state.w, data, key, round=round)
        return state.replace(w=learnt["params"])

    def _teacher(
        self,
        x: Tensor,
        w: Params,
        functions: list,
        pulls: list[float],
        share: Tensor,
        shrink: float,
    ) -> Tensor:
        """f of the new ensemble on public rows."""
        with torch.no_grad():
            f = shrink * self.model.apply(to(x.device, w), x)
            for stacked, pull in zip(functions, pulls, strict=True):
                f = f - pull * weighted_outputs(self.fitted, stacked, share, x)
        return f

    def predictor(self, state: State) -> Predictor:
        return Predictor(Parametric(self.model, state.w), state.spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return loss_for(self.loss, None if y.is_floating_point() else outputs.shape[-1]).value(
            outputs, y
        )


@dataclass(frozen=True)
class FedAvgDistill(LocalTraining):
    """FedAvg whose average is then distilled from the ensemble of client models (Lin et al., 2020).

    The average of the clients' weights is where the student starts; the teacher is softmax(1/|S|
    sum_i f_i(x)) on the public rows, and the loss the Kullback-Leibler divergence (squared error
    for values). Also known as FedDF.

    Args:
        public: Rows without labels: an array, or `fd.Public(x, views=...)`.
        student: How the server distills (`fd.Training`).

    Example:
        >>> data = fd.load("digits")
        >>> fed = fd.split(data, "dirichlet", clients=10, alpha=0.3)
        >>> adam = fd.Training(lr=0.01, optimizer="adam", epochs=5)
        >>> feddf = fd.FedAvgDistill(fd.MLP(10), lr=0.3, public=data.x_test, student=adam)
        >>> fd.run(feddf, fed, rounds=3).history.accuracy.iloc[-1] > 0.7
        True

    Reference: Lin, Kong, Stich and Jaggi, "Ensemble distillation for robust model fusion in
    federated learning", NeurIPS 2020, Algorithm 1.
    """

    weighs_rows: ClassVar[bool] = False
    takes_sequences: ClassVar[bool] = False

    public: Any = field(default=None, compare=False)
    student: Training = STUDENT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.public is None:
            raise ConfigError("public=None: ensemble distillation needs an unlabelled public set")
        object.__setattr__(self, "public", as_public(self.public))

    def check(self, spec: Spec) -> None:
        super().check(spec)
        self.public.check(spec)

    def row_spec(self, spec: Spec) -> Spec:
        return replace(spec, integers=False)  # as the public rows are

    def train(self, client: Client, w: Params) -> tuple[Params, None]:
        return self.descend(client, w)["params"], None

    def round(self, clients: Clients, state: State) -> State:
        replies = clients.gather(self.train, weights=self.weights, w=state.w)
        stacked, share = replies.stack(), replies.weights
        average = lambda v: torch.tensordot(share.double(), v.double(), 1).to(v.dtype)  # noqa: E731
        start, even = tree.map(average, stacked), torch.full((len(share),), 1 / len(share))
        if len(share) == 1:  # the student is the teacher: its slopes are rounding errors
            return state.replace(w=start)
        rows = clients.place(self.public.rows(clients.key))
        with torch.no_grad():
            said = [weighted_outputs(self.model, stacked, even, x) for x in rows.split(1024)]
        teacher = torch.cat(said)
        loss: Any = Squared()
        if state.spec.classes:
            loss, teacher = SoftLabels(), teacher.softmax(-1)
        data = Rows(rows, teacher, torch.arange(len(rows)), torch.ones(len(rows)), state.spec)
        key, round = random.fold(clients.key, 1), clients.round
        learnt = descend(self.student, self.model, loss, start, data, key, round=round)
        return state.replace(w=learnt["params"])


def as_public(given: Any) -> Public:
    """A public set from what the user passed."""
    return given if isinstance(given, Public) else Public(given)


def weighted_outputs(model: Model, stacked: Params, share: Tensor, x: Tensor) -> Tensor:
    """sum_i share_i f_i(x) of models with a leading client dimension."""
    total = torch.zeros(())
    for i, weight in enumerate(share.tolist()):
        total = total + weight * model.apply({k: v[i].to(x.device) for k, v in stacked.items()}, x)
    return total
