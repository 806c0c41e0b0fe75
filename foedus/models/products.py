"""Linear layers of batched clients, whose gradients have the memory layout of their matrices.

Under `torch.func.vmap`, PyTorch computes X W^T of all clients as a product of batches, whose
derivative leaves the gradient of W transposed: a step along it then takes three times as long. The
derivative of (W X^T)^T does not.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The plain linear layers of a module, by name: none of a subclass."""
    return {name: m for name, m in module.named_modules() if type(m) is nn.Linear}


def with_products(module: nn.Module) -> None:
    """Let the linear layers of a copy compute (W X^T)^T where clients are batched."""
    for m in linear_layers(module).values():
        m.forward = partial(_linear, m)  # type: ignore[method-assign]


def _linear(m: nn.Linear, x: Tensor) -> Tensor:
    if not torch._C._are_functorch_transforms_active():
        return F.linear(x, m.weight, m.bias)
    columns = x.reshape(-1, x.shape[-1]).mT
    if m.bias is None:
        product = m.weight @ columns
    else:
        product = torch.addmm(m.bias.unsqueeze(1), m.weight, columns)
    return product.mT.contiguous().view(*x.shape[:-1], len(m.weight))
