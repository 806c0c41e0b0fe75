"""Convex compact sets for projection-free learning.

Dadras, Banerjee, Prakhya and Yurtsever, "Federated Frank-Wolfe Algorithm"; Jaggi, "Revisiting
Frank-Wolfe: projection-free sparse convex optimization", ICML 2013.

A set is a frozen dataclass. `lmo(g)` is the linear minimization oracle, argmin over s in the set of
<g, s>, and returns an extreme point in the form that is cheap to send: sparse, signs, low rank. A
set acts on a tensor of any shape as on one vector; the sets of matrices need a matrix. `Whole` and
`PerLayer` put sets on all the tensors of a model.

Batches: every method works under `torch.func.vmap`, and takes `batch`, the number of leading
dimensions of its tensor that count clients: `L1Ball(1.0).lmo(g, batch=1)` for g of shape (clients,
*shape) gives a `Sparse` whose fields have a leading client dimension. `contains` then returns one
boolean for each.

Ties go to the lowest index. A gradient of zeros gives a point of the set (see each set); NaNs
propagate, so that divergence is noticed. Projections are computed in float64 and rounded to the
dtype of x once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Gt
from torch import Tensor

from foedus.base import tree
from foedus.base.batching import batched
from foedus.base.settings import Settings, check_settings
from foedus.errors import ConfigError, unknown
from foedus.wire.arrays import LowRank, Signs, Sparse

Shape = Sequence[int]

NORMS = ("l1", "l2", "linf", "nuclear")

_PIECE = 4096  # entries whose squares may be added in float32


@tree.node(static=("lo", "hi"))
@dataclass(frozen=True, eq=False)
class Corner:
    """A tensor with entries `hi` where the signs are +1 and `lo` where they are -1: one bit each.

    signs: with scale 1 (or NaN, where there is no such corner), and any batch dimensions.
    """

    signs: Signs
    lo: float
    hi: float

    def dense(self) -> Tensor:
        """The dense tensor, `[..., *shape]`."""
        signs = self.signs.dense()
        return torch.where(signs > 0, self.hi, torch.where(signs < 0, self.lo, signs))


Point = Tensor | Sparse | Signs | LowRank | Corner


def dense(point: Point) -> Tensor:
    """The dense tensor of any extreme point."""
    return point if isinstance(point, Tensor) else point.dense()


def plain_numbers(value: Any) -> Any:
    """Numbers as they are; tensors, arrays and lists as (nested) tuples, which can be hashed."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(plain_numbers, value)) if isinstance(value, list | tuple) else value


def finite_numbers(name: str, value: Any) -> Tensor:
    try:
        numbers = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name}={shortened(value)} must be a number or a tuple of numbers: {error}"
        ) from None
    if not numbers.isfinite().all():
        raise ConfigError(f"{name}={shortened(value)} must be finite: the set must be bounded")
    return numbers


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _against(g: Tensor, radius: float) -> Tensor:
    """-radius where g is positive, radius elsewhere, NaN where it is NaN."""
    return torch.where(g > 0, -radius, torch.where(g.isnan(), g, radius))


def _signs(g: Tensor, scale: float, batch: int) -> Signs:
    """scale times the signs of -g, +1 for zero; the scale is NaN where g holds one."""
    scales = torch.full(g.shape[:batch], scale, dtype=g.dtype, device=g.device)
    # a NaN counts as the largest
    most = g.abs().reshape(*g.shape[:batch], math.prod(g.shape[batch:])).amax(-1)
    return Signs.pack(-g, torch.where(most.isnan(), most, scales))


def total(x: Tensor) -> Tensor:
    """Sums, added in float64."""
    return x.sum(-1, dtype=torch.float64)


def length(x: Tensor) -> Tensor:
    """Euclidean norms: of short pieces in the dtype of x, which is fast; of these in float64."""
    pieces = [torch.linalg.vector_norm(part, dim=-1) for part in x.split(_PIECE, -1)]
    return torch.linalg.vector_norm(torch.stack(pieces, -1), dim=-1, dtype=torch.float64)


def scaled(x: Tensor) -> Tensor:
    """x over its largest magnitude, so that squares do not overflow; zero stays zero."""
    most = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
    return x / torch.where(most > 0, most, 1)


def unit(x: Tensor) -> Tensor:
    """x over its Euclidean norm; zero stays zero."""
    x = scaled(x)
    norm = length(x).unsqueeze(-1)
    return x * torch.where(norm > 0, 1 / norm, 0).to(x.dtype)


def largest(a: Tensor, k: int) -> Tensor:
    """Indices of the k largest entries, in ascending order; of equal entries the first.

    A NaN is larger than any number.
    """
    if k == 1:
        return a.argmax(-1, keepdim=True)
    a = torch.where(a.isnan(), torch.inf, a)
    least = a.topk(k).values[..., -1:]
    above, equal = a > least, a == least
    # `topk` takes any of the entries that equal the k-th; a second pass takes the first of them.
    chosen = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    return chosen.to(torch.uint8).topk(k).indices.sort().values


def simplex(y: Tensor, radius: float) -> Tensor:
    """Project float64 vectors onto {x >= 0, sum x = radius}: max(y - theta, 0), by sorting.

    Held, Wolfe and Crowder (1974); Duchi, Shalev-Shwartz, Singer and Chandra (2008).
    """
    # only entries within a radius of the largest stay positive; in these units sums keep digits
    y = ((y - y.amax(-1, keepdim=True)) / radius).clamp(min=-1)
    ordered = y.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    count = torch.arange(1, y.shape[-1] + 1, device=y.device)
    # none, if there is a NaN
    support = (ordered * count > excess).sum(-1, keepdim=True).clamp(min=1)
    theta = excess.gather(-1, support - 1) / support
    return (y - theta).clamp(min=0) * radius


def capped(y: Tensor, k: int, radius: float) -> Tensor:
    """The projection of non-negative float64 vectors onto {0 <= x <= radius, sum x <= k radius}.

    It is min(y, radius) if that satisfies the sum, else clip(y - theta, 0, radius) with the theta
    at which the sum is k radius. As a function of theta the sum is piecewise linear with breaks at
    y_i and y_i - radius: it is evaluated at all of them, and the equation solved on the right
    piece.
    """
    clipped = y.clamp(max=radius)
    # theta is between y_(k) - radius and y_(k), the k-th largest: values beyond do not matter
    z = ((y - y.topk(k).values[..., -1:]) / radius).clamp(-2, 1)
    breaks, order = torch.cat((z, z - 1), -1).sort(dim=-1, descending=True, stable=True)
    slopes = torch.where(order < z.shape[-1], 1.0, -1.0).to(z.dtype)
    slope, level = slopes.cumsum(-1), (slopes * breaks).cumsum(-1)
    last = (level - breaks * slope <= k).sum(-1, keepdim=True).clamp(min=1) - 1
    slope, level, at = (t.gather(-1, last) for t in (slope, level, breaks))
    theta = torch.where(slope > 0, (level - k) / slope.clamp(min=1), at)
    fits = total(clipped).unsqueeze(-1) <= k * radius
    return torch.where(fits, clipped, (z - theta).clamp(0, 1) * radius)


@batched
def decreasing(z: Tensor, shared: None = None) -> Tensor:
    """The closest decreasing sequence of each float64 vector, by isotonic regression."""
    from sklearn.isotonic import isotonic_regression

    most = z.abs().amax(-1, keepdim=True)
    rows = torch.where(most.isfinite(), z, 0).reshape(-1, z.shape[-1])
    fits = [isotonic_regression(row, increasing=False) for row in rows.numpy()]
    fit = torch.from_numpy(np.stack(fits)).reshape(z.shape) if fits else torch.empty_like(z)
    return torch.where(most.isfinite(), fit, torch.nan)


class Domain(Settings):
    """Base of the sets of one tensor: frozen dataclasses."""

    matrix: ClassVar[bool] = False
    """Whether the tensor must be a matrix."""

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, shape: Shape) -> None:
        """Refuse tensors of a shape that the set cannot hold, with the reason."""
        name, dims = type(self).__name__, tuple(shape)
        if math.prod(shape) == 0:
            raise ConfigError(f"{name} needs a tensor with entries, not one of shape {dims}")
        if self.matrix and len(shape) != 2:
            raise ConfigError(
                f"{name} needs a matrix, not a tensor of shape {dims}; give such tensors another "
                "set: PerLayer({name: set, ...})"
            )

    def lmo(self, g: Tensor, batch: int = 0) -> Point:
        """An extreme point s that minimizes <g, s> over the set.

        Args:
            g: The gradient.
            batch: Number of leading dimensions of g that count clients.

        Returns:
            The point in its short form; `foedus.geometry.dense` gives the tensor.
        """
        raise NotImplementedError

    def pairwise(self, g: Tensor, x: Tensor) -> tuple[Sparse, Sparse, Tensor]:
        """A pairwise direction at x, for sets whose extreme points have one entry.

        Args:
            g: The gradient.
            x: A point of the set.

        Returns:
            The extreme point s with the least <g, s>, the vertex v of x with the largest <g, v>,
            and its weight in x: x + gamma (s - v) is in the set for gamma from 0 to this weight.
        """
        raise ConfigError(
            f"{type(self).__name__} has no pairwise directions: they are for fd.L1Ball and "
            "fd.Simplex; use direction='frank_wolfe'"
        )

    def project(self, x: Tensor, batch: int = 0) -> Tensor:
        """The point of the set closest to x."""
        flat = self._flat(x, batch)
        return self._project(flat.double(), x.shape[batch:]).to(x.dtype).reshape(x.shape)

    def contains(self, x: Tensor, tolerance: float = 1e-6, batch: int = 0) -> Tensor:
        """Whether x is in the set; `tolerance` is relative to the size of the set."""
        return self._contains(self._flat(x, batch), x.shape[batch:], tolerance)

    def start(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zero if it is in the set, else the set's center."""
        self.check(shape)
        return torch.zeros(tuple(shape), dtype=dtype)

    @property
    def diameter(self) -> float:
        """The largest Euclidean distance of two points; see also `diameter_of`."""
        raise ConfigError(
            f"the diameter of {type(self).__name__} depends on the shape of the tensor: use "
            "diameter_of(shape)"
        )

    def diameter_of(self, shape: Shape) -> float:
        """The largest Euclidean distance of two points of the set, for a tensor of this shape."""
        self.check(shape)
        return self.diameter

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each entry, in float64, broadcastable to the shape."""
        raise NotImplementedError

    def reach(self, norm: str, shape: Shape) -> float | None:
        """The largest norm in the set: the radius of the smallest ball around zero that holds it.

        norm: "l1", "l2" (Frobenius), "linf" or "nuclear". None where no closed form is known: the
        nuclear norm over boxes, permutahedra and some k-sparse polytopes.
        """
        self.check(shape)
        if norm not in NORMS:
            raise ConfigError(unknown("norm", norm, NORMS))
        if norm == "nuclear":
            if len(shape) != 2:
                given = f"not a tensor of shape {tuple(shape)}"
                raise ConfigError(f"the nuclear norm needs a matrix, {given}: use norm='l2'")
            norm = "l2" if 1 in shape else norm  # one singular value
        if norm == "linf":
            return max(float(b.abs().max()) for b in self.bounds(shape))
        return self._reach(norm, tuple(shape))

    def _flat(self, x: Tensor, batch: int) -> Tensor:
        shape = tuple(x.shape[batch:])
        self.check(shape)
        if not x.is_floating_point():
            given = f"{type(self).__name__} takes floating tensors, not {x.dtype}"
            raise ConfigError(f"{given}: convert with .float()")
        return x.reshape(*x.shape[:batch], math.prod(shape))

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        raise NotImplementedError

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        raise NotImplementedError

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float | None:
        raise NotImplementedError


class Ball(Domain):
    """Base of sets that are symmetric around zero, from -radius to radius in every entry."""

    radius: Annotated[float, Gt(0)]

    @property
    def diameter(self) -> float:
        return 2.0 * self.radius

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        self.check(shape)
        r = torch.tensor(float(self.radius), dtype=torch.float64)
        return -r, r
