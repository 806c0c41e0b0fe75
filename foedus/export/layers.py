"""Layers of exported PyTorch modules that `torch.nn` does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foedus.base.columns import part
from foedus.export.forms import two_classes
from foedus.models.base import Model, Params


class Applied(nn.Module):
    """A foedus model with its parameters."""

    def __init__(self, model: Model, params: Params) -> None:
        super().__init__()
        self.model, self.names = model, tuple(params)
        for name, p in params.items():
            self.register_parameter(
                name.replace("/", "_").replace(".", "_"), nn.Parameter(p.detach().clone())
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.model.apply(dict(zip(self.names, self.parameters(), strict=True)), x)


class Cast(nn.Module):
    """Numbers in another precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Cosine(nn.Module):
    """scale cos(x)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x) * self.scale


class Monomials(nn.Module):
    """Products of features by number; the feature 0 is always 1."""

    factors: Tensor

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)  # (monomials, degree)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((torch.ones_like(x[:, :1]), x), 1)[:, self.factors].prod(-1)


class Take(nn.Module):
    """Some columns of rows."""

    def __init__(self, columns: Sequence[int], batch: int) -> None:
        super().__init__()
        self.columns, self.batch = tuple(columns), batch

    def forward(self, x: Tensor) -> Tensor:
        return part(x, self.columns, self.batch)


class Logits(nn.Module):
    """Logits of two classes from one output."""

    def forward(self, z: Tensor) -> Tensor:
        return two_classes(z)


class WeightedSum(nn.Module):
    """sum_j weights_j m_j(x)."""

    weights: Tensor

    def __init__(self, members: Sequence[nn.Module], weights: Tensor) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        parts = [w * m(x) for w, m in zip(self.weights, self.members, strict=True)]
        return torch.stack(parts).sum(0)


class Constant(nn.Module):
    """The same outputs for every row."""

    outputs: Tensor

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs.expand(len(x), -1)
