"""Mixed precision: a model's forward pass under `torch.autocast`, in a narrower type."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from foedus.errors import ConfigError
from foedus.models.base import Drops, Model, Params
from foedus.models.dropout import Record

_SCALE = 1024.0
"""The scale of float16 gradients, whose least number above 0 is 6e-8; a power of 2, so scaling is
exact.
"""


class _Narrow(Model):
    """A model whose training outputs are computed in a narrower type and returned as float32.

    It is differentiated by autograd, for one client at a time: batched, products and biases are
    rounded differently, and a client's steps would depend on the other clients in its batch.
    """

    trains_apart: ClassVar[bool] = True

    def __init__(self, model: Model, precision: str, device: str) -> None:
        self.model, self.device = model, device
        self.dtype = getattr(torch, precision)
        self.scale = _SCALE if precision == "float16" else 1.0

    @property
    def statistics(self) -> frozenset[str]:
        return self.model.statistics

    def dropout_calls(self, params: Params, x: Tensor, weight: Tensor, padded: bool) -> Any:
        if not self.model.trains_apart:
            return Record(len(x))
        return self.model.dropout_calls(params, x, weight, padded)

    def train_outputs(
        self, params: Params, x: Tensor, weight: Tensor, padded: bool, drops: Drops | None
    ) -> tuple[Tensor, Params]:
        if self.scale != 1:
            params = {k: _Scaled.apply(v, 1 / self.scale) for k, v in params.items()}
        with torch.autocast(self.device, self.dtype):
            outputs, new = self.model.train_outputs(params, x, weight, padded, drops)
        outputs = outputs.float()
        if self.scale != 1:
            outputs = _Scaled.apply(outputs, self.scale)
        return outputs, {k: v.float() for k, v in new.items()}


class _Scaled(torch.autograd.Function):
    """The identity, which multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def narrowed(model: Model, precision: str, device: torch.device) -> Model:
    """The model to be trained in mixed precision on this device."""
    if precision == "float16" and device.type == "cpu":
        raise ConfigError(
            "precision='float16' needs a GPU; use precision='bfloat16', or train on a GPU, as with "
            "engine=fd.Local(device='cuda')"
        )
    return _Narrow(model, precision, device.type)
