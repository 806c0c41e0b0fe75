"""Losses by row, with derivatives in the model's output for gradients and Hessians in closed form.

Each has `value`, the loss of every row; `slope`, its derivative in the outputs times a weight; and
`bend`, its second derivative in the outputs times a vector v. Where a loss is `separable`, outputs
do not meet in it, and `bend` is a product by number. A user's own function is one of
`foedus.models.custom_loss`, differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torch.nn import functional as F

from foedus.base.settings import Means, Settings, check_settings
from foedus.base.steps import IGNORED, mean_over_steps
from foedus.errors import ConfigError, shown, unknown

_MINUS_ONE = {dtype: torch.tensor(-1.0, dtype=dtype) for dtype in (torch.float32, torch.float64)}
"""Made once: to make a number takes longer than to add it to a batch."""


class Loss(Settings):
    """Base of the losses: frozen dataclasses with the loss of each row and its derivatives.

    needs: what it is for, "classes" or "values"; `None`: both.
    """

    separable: ClassVar[bool] = False
    needs: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, classes: int | None, outputs: int) -> None:
        """Refuse data that the loss does not fit, with the reason."""

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each row: outputs (..., n, k), y (..., n) or (..., n, k) -> (..., n)."""
        raise NotImplementedError

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """weight times the derivative in the outputs, by autograd unless there is a formula."""

        def total(outputs: Tensor) -> Tensor:
            return (weight * self.value(outputs, y)).sum()

        return torch.func.grad(total)(outputs)

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The second derivative in the outputs times v."""
        raise NotImplementedError


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-log softmax(f)_y for labels y."""

    needs: ClassVar[str | None] = "classes"

    separable: ClassVar[bool] = False

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each row: outputs (..., n, k), y (..., n) -> (..., n)."""
        return -outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """weight times the derivative in the outputs: (softmax(f) - onehot(y))."""
        p = outputs.softmax(-1)
        known = p.device.type == "cpu" and p.dtype in _MINUS_ONE
        minus = _MINUS_ONE[p.dtype] if known else p.new_full((), -1.0)
        p.scatter_add_(-1, y.unsqueeze(-1), minus.expand(*y.shape, 1))
        return p.mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """(diag(p) - p p^T) v with p = softmax(f)."""
        p = outputs.softmax(-1)
        pv = p * v
        return pv - p * pv.sum(-1, keepdim=True)


class _Targets(Loss):
    """Losses of outputs against targets y, (n,) or (n, k); labels become one-hot vectors."""

    separable: ClassVar[bool] = True

    def target(self, outputs: Tensor, y: Tensor) -> Tensor:
        """y in the shape of the outputs."""
        if not y.is_floating_point():
            # not by one_hot, which looks at values: vmap cannot batch it, and a GPU waits for it
            classes = torch.arange(outputs.shape[-1], device=y.device)
            return (y.unsqueeze(-1) == classes).to(outputs.dtype)
        return y.unsqueeze(-1) if y.dim() < outputs.dim() else y


@dataclass(frozen=True)
class Squared(_Targets):
    """|f - y|^2 / 2."""

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (outputs - self.target(outputs, y)).square().sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs - self.target(outputs, y)).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return v


@dataclass(frozen=True)
class Logistic(_Targets):
    """sum_k log(1 + exp(f_k)) - y_k f_k: every class against the rest, y_k in {0, 1}."""

    needs: ClassVar[str | None] = "classes"

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (torch.nn.functional.softplus(outputs) - self.target(outputs, y) * outputs).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs.sigmoid() - self.target(outputs, y)).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return p * (1 - p) * v


@dataclass(frozen=True)
class Huber(_Targets):
    """r^2 / 2 for residuals |r| <= delta, delta (|r| - delta / 2) beyond: outliers pull less."""

    delta: Annotated[float, Gt(0)] = 1.0

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        size = (outputs - self.target(outputs, y)).abs()
        near, far = 0.5 * size.square(), self.delta * (size - 0.5 * self.delta)
        return torch.where(size <= self.delta, near, far).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        residuals = outputs - self.target(outputs, y)
        return residuals.clamp(-self.delta, self.delta).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """min(1, delta / |r|) v: the curvature of the parabola that touches the loss from above.

        The second derivative itself is 0 for outliers: where all rows are, it would leave nothing
        to solve.
        """
        size = (outputs - self.target(outputs, y)).abs()
        return v * (self.delta / size.clamp(min=self.delta))


@dataclass(frozen=True)
class SoftLabels(_Targets):
    """-sum_k y_k log softmax(f)_k for probabilities y: distillation from a teacher."""

    separable: ClassVar[bool] = False

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return -(self.target(outputs, y) * outputs.log_softmax(-1)).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs.softmax(-1) - self.target(outputs, y)).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return CrossEntropy().bend(outputs, y, v)


@dataclass(frozen=True)
class WeightedCrossEntropy(Loss):
    """-weights_y log softmax(f)_y: classes that are rare, or whose errors are costly, count more.

    The mean is over rows: it is not divided by the weights of a mini-batch's labels, so that a
    row counts alike in every mini-batch (PyTorch's `CrossEntropyLoss(weight=...)` divides).

    Args:
        weights: The weight of each class, 0 or more.
    """

    needs: ClassVar[str | None] = "classes"

    weights: tuple[Annotated[float, Ge(0)], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.weights, str) and hasattr(self.weights, "__iter__"):
            object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))
        super().__post_init__()

    def check(self, classes: int | None, outputs: int) -> None:
        if len(self.weights) != classes:
            raise ConfigError(
                f"loss has weights for {len(self.weights)} classes, the data has {classes}; give "
                "one weight a class"
            )

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self._of(outputs, y) * CrossEntropy().value(outputs, y)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return CrossEntropy().slope(outputs, y, weight * self._of(outputs, y))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return self._of(outputs, y).unsqueeze(-1) * CrossEntropy().bend(outputs, y, v)

    def _of(self, outputs: Tensor, y: Tensor) -> Tensor:
        return torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)[y]


@dataclass(frozen=True)
class Focal(Loss):
    """-(1 - p)^gamma log p with p = softmax(f)_y: rows that are already right count less (Lin,
    Goyal, Girshick, He and Dollar, ICCV 2017). `gamma=0` is cross-entropy.

    Args:
        gamma: How much less.
    """

    needs: ClassVar[str | None] = "classes"

    gamma: Annotated[float, Ge(0)] = 2.0

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        log_p = -CrossEntropy().value(outputs, y)
        # 1 - p, without its cancellation for p near 1; never exactly 0, where a power below 1
        # would have an infinite derivative
        return -(-torch.expm1(log_p)).clamp(min=1e-12).pow(self.gamma) * log_p


@dataclass(frozen=True)
class BinaryCrossEntropy(_Targets):
    """1/k sum_k log(1 + exp(f_k)) - y_k f_k: several labels a row, y_k in [0, 1] (multi-label).

    PyTorch's `BCEWithLogitsLoss`.
    """

    needs: ClassVar[str | None] = "values"

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (F.softplus(outputs) - self.target(outputs, y) * outputs).mean(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        weight = weight.unsqueeze(-1) / outputs.shape[-1]
        return (outputs.sigmoid() - self.target(outputs, y)).mul_(weight)

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return Logistic().bend(outputs, y, v) / outputs.shape[-1]


@dataclass(frozen=True)
class Quantile(_Targets):
    """max(tau r, (tau - 1) r) of residuals r = y - f, the pinball loss: its minimum is the
    tau-quantile of y.

    Args:
        tau: Which quantile, in (0, 1); 0.5 is the median.
    """

    needs: ClassVar[str | None] = "values"

    tau: Annotated[float, Gt(0), Lt(1)] = 0.5

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        r = self.target(outputs, y) - outputs
        return torch.maximum(self.tau * r, (self.tau - 1) * r).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """-tau above the output, 1 - tau below it, and 0 on it."""
        r = self.target(outputs, y) - outputs
        side = torch.where(r > 0, -self.tau, torch.where(r < 0, 1 - self.tau, 0.0))
        return side.to(outputs.dtype) * weight.unsqueeze(-1)


@dataclass(frozen=True)
class PoissonNLL(_Targets):
    """exp(f) - y f: counts y with mean exp(f), up to a constant (PyTorch's `PoissonNLLLoss`)."""

    needs: ClassVar[str | None] = "values"

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.exp() - self.target(outputs, y) * outputs).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs.exp() - self.target(outputs, y)).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return outputs.exp() * v


@dataclass(frozen=True)
class Stepwise(Loss):
    """The mean of another loss over the steps of each row: outputs (..., n, t, k), y (..., n, t).

    Steps whose label is -100 (`foedus.base.steps.IGNORED`) are left out.
    """

    loss: Loss

    def check(self, classes: int | None, outputs: int) -> None:
        self.loss.check(classes, outputs)

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        # any label in place of none: the step is left out
        return mean_over_steps(self.loss.value(outputs, y.masked_fill(y == IGNORED, 0)), y)


LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "squared": Squared(),
    "logistic": Logistic(),
    "huber": Huber(),
    "focal": Focal(),
    "bce": BinaryCrossEntropy(),
    "quantile": Quantile(),
    "poisson": PoissonNLL(),
}

LossSetting = Annotated[
    str | Loss | Callable[..., Any], Means("the name of a loss, a loss, or a function")
]
"""The type of a setting that `loss_for` understands."""


def check_loss(loss: Any) -> None:
    """Refuse what cannot be a loss, before there is data."""
    if isinstance(loss, type):
        raise ConfigError(f"loss={loss.__name__} is a class: add parentheses")
    if not isinstance(loss, str | Loss) and not callable(loss):
        raise ConfigError(
            f"loss={shown(loss)} must be the name of a loss, one of foedus.models.losses or a "
            "function loss(outputs, y); a set is passed as domain=..."
        )


def loss_for(loss: Any, classes: int | None, steps: int | None = None) -> Loss:
    """The loss of a setting; "auto" is cross-entropy for classes and squared for values.

    steps: how many labels a row has, where it has one for each step of a sequence.
    """
    if not isinstance(loss, str | Loss):
        from foedus.models.custom_loss import custom_loss

        return custom_loss(loss, steps is not None)
    found = _known_loss(loss, classes)
    return found if steps is None else Stepwise(found)


def _known_loss(loss: str | Loss, classes: int | None) -> Loss:
    if not isinstance(loss, str):
        name, found = type(loss).__name__, loss
    elif loss == "auto":
        return LOSSES["cross_entropy" if classes else "squared"]
    elif loss not in LOSSES:
        raise ConfigError(unknown("loss", loss, ["auto", *LOSSES]))
    else:
        name, found = loss, LOSSES[loss]
    if found.needs == "classes" and not classes:
        raise ConfigError(
            f"loss {name!r} needs class labels; the data has real targets: use loss='squared'"
        )
    if found.needs == "values" and classes:
        raise ConfigError(
            f"loss {name!r} needs real targets; the data has class labels: use "
            "loss='cross_entropy', or load the data with task='regression'"
        )
    return found
