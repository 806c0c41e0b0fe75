"""The permutahedron: convex combinations of all permutations of a vector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor

from foedus.base.settings import Means
from foedus.errors import ConfigError
from foedus.geometry.domain import Domain, Shape, decreasing, finite_numbers, plain_numbers


@dataclass(frozen=True)
class Permutahedron(Domain):
    """The convex hull of all permutations of a vector: {x : x is majorized by weights}.

    The tensor has as many entries as the vector. The extreme point gives the largest weight to the
    smallest gradient (a sort), dense. Projection: with x and the weights w sorted from the largest
    down, x - v, where v is the decreasing sequence closest to x - w. At g = 0: the weights in
    decreasing order.

    Args:
        weights: The vector.

    Example:
        >>> fd.Permutahedron((3.0, 2.0, 1.0)).lmo(torch.tensor([0.1, 0.3, 0.2]))
        tensor([3., 1., 2.])

    Reference: Blondel, Teboul, Berthet and Djolonga, "Fast differentiable sorting and ranking",
    ICML 2020.
    """

    weights: Annotated[
        tuple[float, ...],
        MinLen(1),
        Means("a tuple of finite numbers, one for each entry of the tensor"),
    ]

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", plain_numbers(self.weights))
        super().__post_init__()

    @cached_property
    def _sorted(self) -> Tensor:
        return finite_numbers("weights", self.weights).sort(descending=True).values

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if math.prod(shape) != len(self.weights):
            given = f"weights has {len(self.weights)} entries"
            raise ConfigError(f"{given}, a tensor of shape {tuple(shape)} {math.prod(shape)}")

    def lmo(self, g: Tensor, batch: int = 0) -> Tensor:
        flat = self._flat(g, batch)
        order, weights = flat.argsort(dim=-1, stable=True), self._sorted.to(g).expand(flat.shape)
        point = torch.zeros_like(flat).scatter(-1, order, weights)
        most = flat.abs().amax(-1, keepdim=True)
        return torch.where(most.isnan(), most, point).reshape(g.shape)

    def start(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        self.check(shape)
        return torch.full(tuple(shape), float(self._sorted.mean()), dtype=dtype)

    @property
    def diameter(self) -> float:
        return float(torch.linalg.vector_norm(self._sorted - self._sorted.flip(0)))

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        self.check(shape)
        return self._sorted[-1], self._sorted[0]

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        ordered, order = x.sort(dim=-1, descending=True, stable=True)
        ordered = ordered - decreasing(ordered - self._sorted)
        return torch.zeros_like(x).scatter(-1, order, ordered)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        slack = tolerance * float(self._sorted.abs().sum())
        excess = x.double().sort(-1, descending=True).values.cumsum(-1) - self._sorted.cumsum(0)
        return (excess.amax(-1) <= slack) & (excess[..., -1] >= -slack)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float | None:
        w = self._sorted
        return {"l1": float(w.abs().sum()), "l2": float(torch.linalg.vector_norm(w))}.get(norm)
