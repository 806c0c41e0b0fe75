"""Losses by row, with derivatives in the model's output for gradients and Hessians in closed form.

Each has `value`, the loss of every row; `slope`, its derivative in the outputs times a weight; and
`bend`, its second derivative in the outputs times a vector v. Where a loss is `separable`, outputs
do not meet in it, and `bend` is a product by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foedus.errors import ConfigError, unknown

_MINUS_ONE = {dtype: torch.tensor(-1.0, dtype=dtype) for dtype in (torch.float32, torch.float64)}
"""Made once: to make a number takes longer than to add it to a batch."""


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(f)_y for labels y."""

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


class _Targets:
    """Losses of outputs against targets y, (n,) or (n, k); labels become one-hot vectors."""

    separable: ClassVar[bool] = True

    def target(self, outputs: Tensor, y: Tensor) -> Tensor:
        """y in the shape of the outputs."""
        if not y.is_floating_point():
            return torch.nn.functional.one_hot(y, outputs.shape[-1]).to(outputs.dtype)
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

    delta: float = 1.0

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


Loss = CrossEntropy | Squared | Logistic | Huber
LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "squared": Squared(),
    "logistic": Logistic(),
    "huber": Huber(),
}


def loss_for(name: str, classes: int | None) -> Loss:
    """The loss of a name; "auto" is cross-entropy for classes and squared for values."""
    if name == "auto":
        return LOSSES["cross_entropy" if classes else "squared"]
    if name not in LOSSES:
        raise ConfigError(unknown("loss", name, ["auto", *LOSSES]))
    if name in ("cross_entropy", "logistic") and not classes:
        raise ConfigError(
            f"loss {name!r} needs class labels; the data has real targets: use loss='squared'"
        )
    return LOSSES[name]
