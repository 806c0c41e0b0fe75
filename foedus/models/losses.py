"""Losses by row, with closed-form derivatives in the model's output.

Each loss has `value`, the loss of every row; `slope`, its derivative in the outputs times a weight;
and `bend`, its second derivative in the outputs times a vector v. A loss is `separable` if it is a
sum over outputs; its second derivative is then diagonal. A user's own function becomes one of
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
"""Created once: creating a tensor takes longer than adding it to a batch."""


class Loss(Settings):
    """Base of the losses: frozen dataclasses with the loss of each row and its derivatives.

    `needs` states the data that the loss is for: "classes", "values", or `None` for both.

    Example:
        >>> loss, f, y = fd.losses.Squared(), torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
        >>> loss.value(f, y).tolist(), loss.slope(f, y, torch.ones(2)).tolist()
        ([0.5, 2.0], [[1.0], [2.0]])
    """

    separable: ClassVar[bool] = False
    needs: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, classes: int | None, outputs: int) -> None:
        """Raise `ConfigError` for data that the loss does not fit.

        Args:
            classes: The number of classes; `None` for regression.
            outputs: The number of outputs of the model.
        """

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each row.

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Labels (..., n), or targets (..., n) or (..., n, k).

        Returns:
            A tensor (..., n).
        """
        raise NotImplementedError

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The derivative in the outputs times a weight for each row, by autograd unless overridden.

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Labels (..., n), or targets (..., n) or (..., n, k).
            weight: The weight of each row, (..., n).

        Returns:
            A tensor (..., n, k).
        """

        def total(outputs: Tensor) -> Tensor:
            return (weight * self.value(outputs, y)).sum()

        return torch.func.grad(total)(outputs)

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The second derivative in the outputs times v.

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Labels (..., n), or targets (..., n) or (..., n, k).
            v: A vector for each row, (..., n, k).

        Returns:
            A tensor (..., n, k).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy: -log softmax(f)_y for labels y.

    Example:
        >>> loss = fd.losses.CrossEntropy()
        >>> loss.value(torch.zeros(1, 4), torch.tensor([2])).exp().tolist()
        [4.0]
    """

    needs: ClassVar[str | None] = "classes"

    separable: ClassVar[bool] = False

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each row.

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Labels (..., n).

        Returns:
            A tensor (..., n).
        """
        return -outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """weight (softmax(f) - onehot(y)).

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Labels (..., n).
            weight: The weight of each row, (..., n).

        Returns:
            A tensor (..., n, k).
        """
        p = outputs.softmax(-1)
        known = p.device.type == "cpu" and p.dtype in _MINUS_ONE
        minus = _MINUS_ONE[p.dtype] if known else p.new_full((), -1.0)
        p.scatter_add_(-1, y.unsqueeze(-1), minus.expand(*y.shape, 1))
        return p.mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """(diag(p) - p p^T) v with p = softmax(f).

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Labels (..., n).
            v: A vector for each row, (..., n, k).

        Returns:
            A tensor (..., n, k).
        """
        p = outputs.softmax(-1)
        pv = p * v
        return pv - p * pv.sum(-1, keepdim=True)


class _Targets(Loss):
    """Losses of outputs against targets y, (n,) or (n, k); labels become one-hot vectors."""

    separable: ClassVar[bool] = True

    def target(self, outputs: Tensor, y: Tensor) -> Tensor:
        """y in the shape of the outputs.

        Args:
            outputs: Outputs of the model, (..., n, k).
            y: Labels or targets.
        """
        if not y.is_floating_point():
            # not by one_hot, which looks at values: vmap cannot batch it, and a GPU waits for it
            classes = torch.arange(outputs.shape[-1], device=y.device)
            return (y.unsqueeze(-1) == classes).to(outputs.dtype)
        return y.unsqueeze(-1) if y.dim() < outputs.dim() else y


@dataclass(frozen=True)
class Squared(_Targets):
    """Squared loss: |f - y|^2 / 2.

    Example:
        >>> fd.losses.Squared().value(torch.tensor([[3.0]]), torch.tensor([1.0])).tolist()
        [2.0]
    """

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (outputs - self.target(outputs, y)).square().sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs - self.target(outputs, y)).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return v


@dataclass(frozen=True)
class Logistic(_Targets):
    """Logistic loss, one class against the rest: sum_k log(1 + exp(f_k)) - y_k f_k, y_k in {0, 1}.

    Example:
        >>> loss = fd.losses.Logistic()
        >>> round(loss.value(torch.zeros(1, 3), torch.tensor([2])).item(), 4)  # 3 log 2
        2.0794
    """

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
    """Huber loss: quadratic for small residuals r = f - y, linear for large ones (outliers).

        r^2 / 2  for |r| <= delta,      delta (|r| - delta / 2)  beyond

    Args:
        delta: The residual from which the loss is linear.

    Example:
        >>> fd.losses.Huber(1.0).value(torch.tensor([[0.5], [3.0]]), torch.zeros(2)).tolist()
        [0.125, 2.5]
    """

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

        The second derivative itself is 0 for outliers: if all rows were outliers, there would be
        nothing to solve.

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Targets, (..., n) or (..., n, k).
            v: A vector for each row, (..., n, k).

        Returns:
            A tensor (..., n, k).
        """
        size = (outputs - self.target(outputs, y)).abs()
        return v * (self.delta / size.clamp(min=self.delta))


@dataclass(frozen=True)
class SoftLabels(_Targets):
    """Cross-entropy with probabilities y as labels, for distillation from a teacher.

        -sum_k y_k log softmax(f)_k

    Example:
        >>> loss, y = fd.losses.SoftLabels(), torch.tensor([[0.5, 0.5]])
        >>> round(loss.value(torch.zeros(1, 2), y).item(), 4)  # log 2
        0.6931
    """

    separable: ClassVar[bool] = False

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return -(self.target(outputs, y) * outputs.log_softmax(-1)).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs.softmax(-1) - self.target(outputs, y)).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return CrossEntropy().bend(outputs, y, v)


@dataclass(frozen=True)
class WeightedCrossEntropy(Loss):
    """Cross-entropy with class weights: -weights_y log softmax(f)_y.

    Give rare classes, or classes whose errors are costly, a larger weight. The mean is over rows:
    it is not divided by the weights of a mini-batch's labels, so a row has the same weight in every
    mini-batch (PyTorch's `CrossEntropyLoss(weight=...)` divides).

    Args:
        weights: The weight of each class, 0 or more.

    Raises:
        ConfigError: A weight is negative; or, for given data, there is not one weight per class.

    Example:
        >>> loss = fd.losses.WeightedCrossEntropy([1.0, 10.0])
        >>> values = loss.value(torch.zeros(2, 2), torch.tensor([0, 1]))
        >>> round((values[1] / values[0]).item(), 4)
        10.0
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
    """Focal loss: cross-entropy that gives less weight to rows which are already classified well.

        -(1 - p)^gamma log p,    p = softmax(f)_y

    Args:
        gamma: How much less; 0 is cross-entropy.

    Example:
        >>> loss = fd.losses.Focal(gamma=1.0)
        >>> round(loss.value(torch.zeros(1, 2), torch.tensor([0])).item(), 4)  # log(2) / 2
        0.3466

    Reference:
        Lin, Goyal, Girshick, He and Dollar, "Focal loss for dense object detection", ICCV 2017.
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
    """Binary cross-entropy for several labels per row (multi-label).

        1/k sum_k log(1 + exp(f_k)) - y_k f_k,    y_k in [0, 1]

    It is PyTorch's `BCEWithLogitsLoss`.

    Example:
        >>> loss, y = fd.losses.BinaryCrossEntropy(), torch.tensor([[1.0, 0.0]])
        >>> round(loss.value(torch.zeros(1, 2), y).item(), 4)  # log 2
        0.6931
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
    """Pinball loss, whose minimizer is the tau-quantile of y.

        max(tau r, (tau - 1) r),    r = y - f

    Args:
        tau: The quantile, in (0, 1); 0.5 is the median.

    Example:
        >>> loss = fd.losses.Quantile(0.75)
        >>> loss.value(torch.zeros(2, 1), torch.tensor([2.0, -2.0])).tolist()
        [1.5, 0.5]
    """

    needs: ClassVar[str | None] = "values"

    tau: Annotated[float, Gt(0), Lt(1)] = 0.5

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        r = self.target(outputs, y) - outputs
        return torch.maximum(self.tau * r, (self.tau - 1) * r).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """weight times -tau where y > f, 1 - tau where y < f, and 0 where y = f.

        Args:
            outputs: Outputs f of the model, (..., n, k).
            y: Targets, (..., n) or (..., n, k).
            weight: The weight of each row, (..., n).

        Returns:
            A tensor (..., n, k).
        """
        r = self.target(outputs, y) - outputs
        side = torch.where(r > 0, -self.tau, torch.where(r < 0, 1 - self.tau, 0.0))
        return side.to(outputs.dtype) * weight.unsqueeze(-1)


@dataclass(frozen=True)
class PoissonNLL(_Targets):
    """Poisson negative log-likelihood up to a constant: exp(f) - y f for counts y, mean exp(f).

    It is PyTorch's `PoissonNLLLoss`.

    Example:
        >>> fd.losses.PoissonNLL().value(torch.zeros(1, 1), torch.tensor([3.0])).tolist()
        [1.0]
    """

    needs: ClassVar[str | None] = "values"

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.exp() - self.target(outputs, y) * outputs).sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs.exp() - self.target(outputs, y)).mul_(weight.unsqueeze(-1))

    def bend(self, outputs: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return outputs.exp() * v


@dataclass(frozen=True)
class Stepwise(Loss):
    """The mean of another loss over the steps of each row of sequences.

    Steps with the label -100 (`foedus.base.steps.IGNORED`) are left out.

    Args:
        loss: The loss of a step; outputs are (..., n, t, k) and labels y (..., n, t).

    Example:
        >>> loss = fd.losses.Stepwise(fd.losses.CrossEntropy())
        >>> loss.value(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]])).exp().tolist()
        [2.0]
    """

    loss: Loss

    def check(self, classes: int | None, outputs: int) -> None:
        self.loss.check(classes, outputs)

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        # any valid label, because the step is left out
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
    """Raise `ConfigError` for a setting that cannot be a loss, before any data is known.

    Args:
        loss: The setting.

    Example:
        >>> fd.losses.check_loss("cross_entropy")
    """
    if isinstance(loss, type):
        raise ConfigError(f"loss={loss.__name__} is a class: add parentheses")
    if not isinstance(loss, str | Loss) and not callable(loss):
        raise ConfigError(
            f"loss={shown(loss)} must be the name of a loss, one of foedus.models.losses or a "
            "function loss(outputs, y); a set is passed as domain=..."
        )


def loss_for(loss: Any, classes: int | None, steps: int | None = None) -> Loss:
    """The loss of a setting; "auto" is cross-entropy for classes and squared loss for regression.

    Args:
        loss: The name of a loss, a loss, or a function `loss(outputs, y)`.
        classes: The number of classes; `None` for regression.
        steps: The number of labels of a row, if each step of a sequence has one.

    Raises:
        ConfigError: The name is unknown, or the loss is not for this kind of data.

    Example:
        >>> fd.losses.loss_for("auto", classes=10)
        CrossEntropy()
        >>> fd.losses.loss_for("auto", classes=None)
        Squared()
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
