"""Base of the methods on a convex set: a model, a loss, and the set of the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from foedus.base import random
from foedus.base.rows import Rows
from foedus.base.settings import check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State
from foedus.core.algorithm import Algorithm, Batching, Client
from foedus.core.clients import Clients
from foedus.core.held import HeldArrays
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError
from foedus.export.forms import Parametric
from foedus.geometry import Domain, L2Ball, ModelDomain, domain_of
from foedus.models.base import Model, Params, check_plain, model_of
from foedus.models.custom_loss import check_custom
from foedus.models.linear import Linear
from foedus.models.losses import LossSetting, check_loss, loss_for
from foedus.models.training.gradients import gradient, value_and_gradient


@dataclass(frozen=True)
class ConstrainedTraining(Algorithm):
    """Base of the methods on a convex set: a model, a loss, and the set of the parameters.

    Args:
        model: What is trained: a foedus model, or any `torch.nn.Module`.
        domain: One set over all parameters as one vector (`fd.L1Ball(10.0)`), or one for each
            tensor (`fd.PerLayer(fd.L1Ball(10.0))`).
        loss: "auto", "cross_entropy", "squared", "logistic", "huber", another name, a loss of
            `fd.losses`, or a function `loss(outputs, y)`.
        begin: Where x starts: at the "model"'s own start (an error if that is outside), at the
            point of the set closest to it ("projected"; for networks, which cannot leave zero), or
            at the canonical point of the "domain".
    """

    model: Model = Linear()  # noqa: RUF009 - frozen
    domain: Domain | ModelDomain = L2Ball(10.0)  # noqa: RUF009 - frozen
    loss: LossSetting = "auto"
    begin: Literal["model", "projected", "domain"] = "model"

    sends_points: ClassVar[str] = ""
    """The step whose replies are points of the set."""

    remedy = "scale the features: inside a bounded set, only they can make numbers this large"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", model_of(self.model))
        domain_of(self.domain)
        check_loss(self.loss)
        check_settings(self)

    def batching(self) -> Batching:
        return Batching(pays=self.model.batchable)

    @property
    def set(self) -> ModelDomain:
        """The domain, as one of parameter dicts."""
        return domain_of(self.domain)

    @property
    def sets(self) -> list[ModelDomain]:
        """The domain, and other sets that clients' points are of."""
        return [self.set]

    def row_spec(self, spec: Spec) -> Spec:
        return replace(spec, integers=spec.integers and self.model.takes_integers(spec))

    def check(self, spec: Spec) -> None:
        loss = loss_for(self.loss, spec.classes)
        loss.check(spec.classes, spec.outputs)
        self.model.check(spec)
        check_plain(type(self).__name__, self.model, spec)
        check_custom(loss, self.model, spec)
        self.set.check(self.model.init(spec, random.key(0)))

    def reply_bound(self, step: str, spec: Spec) -> float:
        """Points are in the set; what else is sent grows with the gradients."""
        if step != self.sends_points:
            return math.inf
        x = self.model.init(spec, random.key(0))
        return max(domain.largest_entry(x) for domain in self.sets)

    def beginning(self, clients: Clients) -> Params:
        """x^1, or an error if the model's own start is outside of the set."""
        x = self.first(clients.spec, clients.shared)
        if self.begin == "model" and not bool(self.set.contains(x)):
            raise ConfigError(
                f"the start of {type(self.model).__name__} lies outside of {self.domain}; "
                "use begin='projected' to start at the closest point of the set, or a larger set"
            )
        return x

    def first(self, spec: Spec, shared: Tensor) -> Params:
        """x^1, the same everywhere."""
        x = self.model.init(spec, shared)
        if self.begin == "domain":
            return self.set.start(x, next(iter(x.values())).dtype)
        return self.set.project(x) if self.begin == "projected" else x

    def slope(self, client: Client, x: Params, rows: Rows | None = None) -> Params:
        """The gradient of f_i, the mean loss over the client's rows (or over some of them)."""
        return gradient(
            self.model, loss_for(self.loss, client.spec.classes), x, rows or client.data
        )

    def look(self, client: Client, center: Params) -> tuple[dict[str, Any], None]:
        """For the history: objective and gradient at the center, and the distance of the client's
        own x from it.
        """
        x = (client.state or {}).get("x", center)
        apart = sum((x[k] - center[k]).double().square().sum() for k in center)
        value, slope = value_and_gradient(
            self.model, loss_for(self.loss, client.spec.classes), center, client.data
        )
        return {"objective": value, "slope": slope, "apart": apart}, None

    def measure(self, clients: Clients, center: Params, every: int, consensus: bool = True) -> None:
        """Log, every so many rounds, the objective, the gap of equation 11 and the consensus, over
        all clients; not sent.
        """
        if not every or clients.round % every:
            return
        seen = clients.measure(self.look, weights="uniform", center=center)
        if seen is not None:
            clients.log(objective=seen["objective"], fw_gap=gap(self.set, seen["slope"], center))
            if consensus:
                clients.log(consensus=seen["apart"])

    def predictor(self, state: State) -> Predictor:
        center = state.center.value if isinstance(state.center, HeldArrays) else state.center
        return Predictor(Parametric(self.model, center), state.spec)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return loss_for(self.loss, None if y.is_floating_point() else outputs.shape[-1]).value(
            outputs, y
        )


def gap(domain: ModelDomain, slope: Params, x: Params) -> Tensor:
    """max over u in D of <slope, x - u>: 0 exactly at stationary points of the constrained
    problem.
    """
    best = domain.dense(domain.lmo(slope), x)
    return reduce(torch.add, ((slope[k].double() * (x[k] - best[k]).double()).sum() for k in x))
