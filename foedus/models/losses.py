"""Losses by row, with their derivative in the model's output, so that gradients can be written in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foedus.errors import ConfigError, unknown


@dataclass(frozen=True)
class CrossEntropy:
    """-log softmax(f)_y for labels y."""

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each row: outputs (..., n, k), y (..., n) -> (..., n)."""
        return -outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """weight times the derivative in the outputs: (softmax(f) - onehot(y))."""
        p = outputs.softmax(-1)
        p.scatter_add_(-1, y.unsqueeze(-1), p.new_full((), -1.0).expand(*y.shape, 1))
        return p.mul_(weight.unsqueeze(-1))


@dataclass(frozen=True)
class Squared:
    """|f - y|^2 / 2 for targets y, (n,) or (n, k); labels are compared as one-hot vectors."""

    def target(self, outputs: Tensor, y: Tensor) -> Tensor:
        """y in the shape of the outputs."""
        if not y.is_floating_point():
            return torch.nn.functional.one_hot(y, outputs.shape[-1]).to(outputs.dtype)
        return y.unsqueeze(-1) if y.dim() < outputs.dim() else y

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (outputs - self.target(outputs, y)).square().sum(-1)

    def slope(self, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (outputs - self.target(outputs, y)).mul_(weight.unsqueeze(-1))


Loss = CrossEntropy | Squared
LOSSES: dict[str, Loss] = {"cross_entropy": CrossEntropy(), "squared": Squared()}


def loss_for(name: str, classes: int | None) -> Loss:
    """The loss of a name; "auto" is cross-entropy for classes and squared for values."""
    if name == "auto":
        return LOSSES["cross_entropy" if classes else "squared"]
    if name not in LOSSES:
        raise ConfigError(unknown("loss", name, ["auto", *LOSSES]))
    if name == "cross_entropy" and not classes:
        raise ConfigError("loss 'cross_entropy' needs class labels; the data has real targets: use loss='squared'")
    return LOSSES[name]
