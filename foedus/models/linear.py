"""Linear models: softmax regression on class labels, linear regression on real targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foedus.base.spec import Spec
from foedus.models.base import Model, Params, Pull, product, total, uniform_init

_LARGE = 1 << 17
"""Multiplications from which (W x^T)^T is faster than x W^T, where rows outnumber outputs."""


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b with a leading client dimension."""
    # one row, one output: inner products, for which bmm takes up to three times as long
    if x.shape[-2] == weight.shape[-2] == 1:
        outputs = (x * weight).sum(-1, keepdim=True)
        return outputs if bias is None else outputs + bias.unsqueeze(-2)
    if x.shape[-2] > weight.shape[-2] and x.numel() * weight.shape[-2] >= _LARGE:
        if bias is None:
            return torch.bmm(weight, x.mT).mT.contiguous()
        return torch.baddbmm(bias.unsqueeze(-1), weight, x.mT).mT.contiguous()
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)


@dataclass(frozen=True)
class Linear(Model):
    """Linear model: softmax regression on class labels, linear regression on real targets.

        f(x) = W x + b,    W of shape (outputs, features)

    With few outputs, products with contiguous rows of W are several times faster than with
    contiguous columns.

    Args:
        bias: Whether there is a bias b.
        zero_start: Start at zero, as the objective is convex; `False`: at random.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=3)
        >>> {name: tuple(p.shape) for name, p in run.state.w.items()}
        {'weight': (10, 64), 'bias': (10,)}
    """

    bias: bool = True
    zero_start: bool = True

    closed_form: ClassVar[bool] = True

    def init(self, spec: Spec, key: Tensor) -> Params:
        d, k = spec.features, spec.outputs
        weight = torch.zeros(k, d) if self.zero_start else uniform_init(key, 0, (k, d), d)
        return {"weight": weight, "bias": torch.zeros(k)} if self.bias else {"weight": weight}

    def layers(self, params: Params) -> list[tuple[Tensor | None, Tensor | None]]:
        """Weight and bias of each layer, from any of the parameters; here there is one layer.

        Args:
            params: Parameters by name; missing ones become `None`.
        """
        return [(params.get("weight"), params.get("bias"))]

    def apply(self, params: Params, x: Tensor) -> Tensor:
        weight = params["weight"]
        return F.linear(x.flatten(1).to(weight.dtype), weight, params.get("bias"))

    def pullback(self, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
        outputs = affine(x, params["weight"], params.get("bias"))

        def pull(slope: Tensor, alpha: float | None = None, beta: float = 1.0) -> Params:
            grads = {"weight": product(slope, x, params["weight"], alpha, beta)}
            if self.bias:
                grads["bias"] = total(slope, params["bias"], alpha, beta)
            return grads

        return outputs, pull
