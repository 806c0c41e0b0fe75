"""Sets of vectors: balls, the simplex, boxes, sparse vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.errors import ConfigError
from foedus.geometry.domain import (
    Ball,
    Corner,
    Domain,
    Shape,
    _against,
    _signs,
    capped,
    finite_numbers,
    largest,
    length,
    plain_numbers,
    shortened,
    simplex,
    total,
    unit,
)
from foedus.wire.arrays import Signs, Sparse

_NOTHING = 1e-6  # a weight that rounding has left of a vertex


def _pair(toward: Sparse, away: Sparse, weight: Tensor) -> tuple[Sparse, Sparse, Tensor]:
    """A pairwise direction; nothing limits one between a vertex and itself, which is no move."""
    same = (toward.indices == away.indices) & (toward.values == away.values)
    return toward, away, torch.where(same, 1.0, weight).squeeze(-1)


@dataclass(frozen=True)
class L1Ball(Ball):
    """The L1 ball, {x : sum |x_i| <= radius}.

    Extreme points: +-radius at one entry, so that a message is one index and one sign. At g = 0:
    radius at the first.

    Args:
        radius: Largest sum of magnitudes.

    Example:
        >>> ball = fd.L1Ball(2.0)
        >>> ball.lmo(torch.tensor([0.5, -3.0, 1.0])).dense()
        tensor([0., 2., 0.])
        >>> ball.project(torch.tensor([3.0, 0.0, 1.0]))
        tensor([2., 0., 0.])
    """

    radius: Annotated[float, Gt(0)]

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        flat = self._flat(g, batch)
        index = flat.abs().argmax(-1, keepdim=True)
        return Sparse(index, _against(flat.gather(-1, index), self.radius), tuple(g.shape[batch:]))

    def pairwise(self, g: Tensor, x: Tensor) -> tuple[Sparse, Sparse, Tensor]:
        """Of x = sum_j |x_j| / r (r sign(x_j) e_j) + (1 - |x|_1 / r) 0; zero counts as a vertex."""
        slopes, entries = self._flat(g, 0), self._flat(x, 0)
        sizes = entries.abs() / self.radius
        spare = (1 - sizes.sum()).clamp(min=0)
        against = torch.where(sizes > _NOTHING, slopes * entries.sign(), -torch.inf)
        index = against.argmax(-1, keepdim=True)
        worst = against.gather(-1, index)
        # after an exact step from zero, v and zero tie
        zero = (spare > _NOTHING) & (worst < -1e-4 * slopes.abs().amax()) | (worst == -torch.inf)
        value = torch.where(zero, 0.0, self.radius * entries.gather(-1, index).sign())
        away = Sparse(index, value, tuple(g.shape))
        return _pair(self.lmo(g), away, torch.where(zero, spare, sizes.gather(-1, index)))

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        size = x.abs()
        shrunk = torch.copysign(simplex(size, self.radius), x)
        return torch.where(size.sum(-1, keepdim=True) <= self.radius, x, shrunk)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        return total(x.abs()) <= self.radius * (1 + tolerance)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        return float(self.radius)


@dataclass(frozen=True)
class L2Ball(Ball):
    """The Euclidean ball, {x : |x|_2 <= radius}; for matrices, the Frobenius norm.

    Extreme points: -radius g / |g|, dense. At g = 0: zero.

    Args:
        radius: Largest norm.

    Example:
        >>> ball = fd.L2Ball(5.0)
        >>> ball.lmo(torch.tensor([3.0, -4.0]))
        tensor([-3.,  4.])
        >>> bool(ball.contains(torch.tensor([3.0, -4.0])))
        True
    """

    radius: Annotated[float, Gt(0)]

    def lmo(self, g: Tensor, batch: int = 0) -> Tensor:
        return (unit(self._flat(g, batch)) * -self.radius).reshape(g.shape)

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        return x * (self.radius / length(x)).clamp(max=1).unsqueeze(-1)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        return length(x) <= self.radius * (1 + tolerance)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        spread = {"l1": math.prod(shape), "l2": 1, "nuclear": min(shape, default=1)}
        return self.radius * math.sqrt(spread[norm])


@dataclass(frozen=True)
class LInfBall(Ball):
    """The ball of the largest magnitude, {x : max |x_i| <= radius}.

    Extreme points: radius times signs, one bit an entry. At g = 0: radius everywhere.

    Args:
        radius: Largest magnitude of an entry.

    Example:
        >>> fd.LInfBall(0.5).lmo(torch.tensor([3.0, -4.0])).dense()
        tensor([-0.5000,  0.5000])
    """

    radius: Annotated[float, Gt(0)]

    def lmo(self, g: Tensor, batch: int = 0) -> Signs:
        self._flat(g, batch)
        return _signs(g, self.radius, batch)

    diameter = Domain.diameter  # depends on the shape

    def diameter_of(self, shape: Shape) -> float:
        self.check(shape)
        return 2.0 * self.radius * math.sqrt(math.prod(shape))

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        return x.clamp(-self.radius, self.radius)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        return x.abs().amax(-1).double() <= self.radius * (1 + tolerance)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float | None:
        size = math.prod(shape)
        return {"l1": self.radius * size, "l2": self.radius * math.sqrt(size)}.get(norm)


@dataclass(frozen=True)
class KSparse(Ball):
    """The convex hull of vectors with k entries of +-radius.

        {x : sum |x_i| <= k radius, max |x_i| <= radius}

    At g = 0: radius at the first k entries.

    Args:
        k: Number of entries of an extreme point.
        radius: Their magnitude.

    Example:
        >>> fd.KSparse(2, 1.0).lmo(torch.tensor([0.5, -3.0, 1.0])).dense()
        tensor([ 0.,  1., -1.])
    """

    k: Annotated[int, Ge(1)]
    radius: Annotated[float, Gt(0)]

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if self.k > (size := math.prod(shape)):
            wrong = f"k={self.k} is more than the {size} entries of {tuple(shape)}"
            raise ConfigError(f"{wrong}: use LInfBall(radius)")

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        flat = self._flat(g, batch)
        index = largest(flat.abs(), self.k)
        return Sparse(index, _against(flat.gather(-1, index), self.radius), tuple(g.shape[batch:]))

    @property
    def diameter(self) -> float:
        return 2.0 * self.radius * math.sqrt(self.k)

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        return torch.copysign(capped(x.abs(), self.k, self.radius), x)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        size, most = x.abs(), self.radius * (1 + tolerance)
        return (total(size) <= self.k * most) & (size.amax(-1).double() <= most)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float | None:
        if norm == "nuclear":  # k entries in different rows and columns are k singular values
            return self.radius * self.k if self.k <= min(shape) else None
        return self.radius * (self.k if norm == "l1" else math.sqrt(self.k))


@dataclass(frozen=True)
class Simplex(Domain):
    """The simplex, {x : x >= 0, sum x = radius}.

    Extreme points: radius at one entry. At g = 0: at the first. `diameter` is that of two or more
    entries; a single entry can only be `radius`, and `diameter_of` says 0.

    Args:
        radius: The sum of the entries.

    Example:
        >>> fd.Simplex().project(torch.tensor([0.5, 1.5, -1.0]))
        tensor([0., 1., 0.])
    """

    radius: Annotated[float, Gt(0)] = 1.0

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        flat = self._flat(g, batch)
        index = flat.argmin(-1, keepdim=True)
        least = flat.gather(-1, index)
        return Sparse(index, torch.where(least.isnan(), least, self.radius), tuple(g.shape[batch:]))

    def pairwise(self, g: Tensor, x: Tensor) -> tuple[Sparse, Sparse, Tensor]:
        slopes, weights = self._flat(g, 0), self._flat(x, 0) / self.radius
        index = torch.where(weights > _NOTHING, slopes, -torch.inf).argmax(-1, keepdim=True)
        away = Sparse(index, torch.full_like(slopes[:1], self.radius), tuple(g.shape))
        return _pair(self.lmo(g), away, weights.gather(-1, index))

    def start(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        self.check(shape)
        return torch.full(tuple(shape), self.radius / math.prod(shape), dtype=dtype)

    @property
    def diameter(self) -> float:
        return self.radius * math.sqrt(2)

    def diameter_of(self, shape: Shape) -> float:
        self.check(shape)
        return self.diameter if math.prod(shape) > 1 else 0.0

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        self.check(shape)
        high = torch.tensor(float(self.radius), dtype=torch.float64)
        return (torch.zeros_like(high) if math.prod(shape) > 1 else high), high

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        return simplex(x, self.radius)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        slack = tolerance * self.radius
        return (x.amin(-1).double() >= -slack) & ((total(x) - self.radius).abs() <= slack)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        return float(self.radius)


@dataclass(frozen=True)
class Box(Domain):
    """A box, {x : lo <= x <= hi}.

    Extreme points: s_i = lo_i where g_i > 0, else hi_i, as `Signs` for numbers with lo = -hi, as
    `Corner` for other numbers, else dense.

    Args:
        lo: Lower bound: a number, or a (nested) tuple that broadcasts to the shape.
        hi: Upper bound: a number, or a (nested) tuple that broadcasts to the shape.

    Example:
        >>> fd.Box(-1.0, 2.0).project(torch.tensor([-3.0, 0.5, 4.0]))
        tensor([-1.0000,  0.5000,  2.0000])
    """

    lo: float | tuple
    hi: float | tuple

    def __post_init__(self) -> None:
        for name in ("lo", "hi"):
            object.__setattr__(self, name, plain_numbers(getattr(self, name)))
        lo, hi = self._ends
        try:
            empty = bool((lo > hi).any())
        except RuntimeError:
            shapes = f"{tuple(lo.shape)} and {tuple(hi.shape)}"
            raise ConfigError(f"lo and hi have shapes {shapes}, which do not broadcast") from None
        if empty:
            wrong = f"lo={shortened(self.lo)} must not be above hi={shortened(self.hi)}"
            raise ConfigError(f"{wrong}: the box would be empty")

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        return finite_numbers("lo", self.lo), finite_numbers("hi", self.hi)

    def check(self, shape: Shape) -> None:
        super().check(shape)
        for name, end in zip(("lo", "hi"), self._ends, strict=True):
            given, want = tuple(end.shape), tuple(shape)
            sides = zip(given[::-1], want[::-1], strict=False)
            if len(given) > len(want) or any(a not in (1, b) for a, b in sides):
                raise ConfigError(
                    f"{name} has shape {given}, which does not broadcast to the tensor's {want}"
                )

    def lmo(self, g: Tensor, batch: int = 0) -> Signs | Corner | Tensor:
        self._flat(g, batch)
        lo, hi = self._ends
        if lo.dim() or hi.dim():
            lo, hi = (end.to(g) for end in self._ends)
            return torch.where(g > 0, lo, torch.where(g.isnan(), g, hi))
        # without dimensions
        assert not isinstance(self.lo, tuple) and not isinstance(self.hi, tuple)
        if self.lo == -self.hi:
            return _signs(g, self.hi, batch)
        return Corner(_signs(g, 1.0, batch), float(self.lo), float(self.hi))

    def start(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        lo, hi = self.bounds(shape)
        centre = torch.zeros(()) if bool(((lo <= 0) & (hi >= 0)).all()) else (lo + hi) / 2
        return centre.to(dtype).expand(tuple(shape)).clone()

    def diameter_of(self, shape: Shape) -> float:
        lo, hi = self.bounds(shape)
        return float(torch.linalg.vector_norm((hi - lo).expand(tuple(shape))))

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        self.check(shape)
        return self._ends

    def project(self, x: Tensor, batch: int = 0) -> Tensor:
        self._flat(x, batch)
        lo, hi = (end.to(x) for end in self._ends)
        return torch.minimum(torch.maximum(x, lo), hi)

    def contains(self, x: Tensor, tolerance: float = 1e-6, batch: int = 0) -> Tensor:
        """Whether x is in the box; `tolerance` is relative to its largest bound."""
        flat = self._flat(x, batch)
        slack = tolerance * max(float(end.abs().max()) for end in self._ends)
        lo, hi = (end.to(x.device) for end in self._ends)
        return ((x >= lo - slack) & (x <= hi + slack)).reshape(flat.shape).all(-1)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float | None:
        lo, hi = self._ends
        most = torch.maximum(lo.abs(), hi.abs()).expand(shape)
        return {"l1": float(most.sum()), "l2": float(torch.linalg.vector_norm(most))}.get(norm)
