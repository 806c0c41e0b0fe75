"""Convex compact sets for projection-free learning: Dadras, Banerjee, Prakhya and Yurtsever, "Federated Frank-Wolfe
Algorithm", and Jaggi, "Revisiting Frank-Wolfe: projection-free sparse convex optimization", ICML 2013.

A set is a frozen dataclass. `lmo(g)` is the linear minimisation oracle, argmin over s in the set of <g, s>, and returns an
extreme point in the form that is cheap to send: sparse, signs, low rank. A set acts on a tensor of any shape as on one
vector; the sets of matrices need a matrix. `Whole` and `PerLayer` put sets on all the tensors of a model.

Batches: every method works under `torch.func.vmap`, and takes `batch`, the number of leading dimensions of its tensor that
count clients: `L1Ball(1.0).lmo(g, batch=1)` for g of shape (clients, *shape) gives a `Sparse` whose fields have a leading
client dimension. `contains` then returns one boolean for each.

Ties go to the lowest index. A gradient of zeros gives a point of the set (each says which), one with a NaN gives a point
with a NaN, so that divergence is noticed. Projections are computed in float64 and rounded to the dtype of x once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foedus.core import tree
from foedus.core.arrays import LowRank, Signs, Sparse
from foedus.core.batching import batched
from foedus.errors import ConfigError, positive, unknown, whole_number

Shape = Sequence[int]

NORMS = ("l1", "l2", "linf", "nuclear")

_PIECE = 4096  # entries whose squares may be added in float32


@tree.node(static=("lo", "hi"))
@dataclass(frozen=True, eq=False)
class Corner:
    """A tensor whose entries are `hi` where the signs are +1 and `lo` where they are -1: one bit an entry.

    signs: with scale 1 (or NaN, where there is no such corner), and any batch dimensions.
    """

    signs: Signs
    lo: float
    hi: float

    def dense(self) -> Tensor:
        """The dense tensor, `[..., *shape]`."""
        signs = self.signs.dense()
        return torch.where(signs > 0, self.hi, torch.where(signs < 0, self.lo, signs))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`sum_c weights[c] * dense[c]`."""
        middle, half, scale = (self.hi + self.lo) / 2, (self.hi - self.lo) / 2, self.signs.scale
        # A stranger's scale may be any number; only its sign means something, here as in `dense`.
        even = torch.where(scale > 0, 1, torch.where(scale < 0, -1, scale)).to(scale.dtype)
        return half * replace(self.signs, scale=even).weighted_sum(weights) + middle * weights.sum().to(scale.dtype)


Point = Tensor | Sparse | Signs | LowRank | Corner


def dense(point: Point) -> Tensor:
    """The dense tensor of any extreme point."""
    return point if isinstance(point, Tensor) else point.dense()


def _plain(value: Any) -> Any:
    """Numbers as they are; tensors, arrays and lists as (nested) tuples, which compare, hash and go into a configuration."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _numbers(name: str, value: Any) -> Tensor:
    try:
        numbers = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name}={_short(value)} must be a number or a tuple of numbers: {error}") from None
    if not numbers.isfinite().all():
        raise ConfigError(f"{name}={_short(value)} must be finite: the set must be bounded")
    return numbers


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _against(g: Tensor, radius: float) -> Tensor:
    """-radius where g is positive, radius elsewhere, NaN where it is NaN."""
    return torch.where(g > 0, -radius, torch.where(g.isnan(), g, radius))


def _signs(g: Tensor, scale: float, batch: int) -> Signs:
    """scale times the signs of -g, +1 for zero; the scale is NaN where g holds one."""
    scales = torch.full(g.shape[:batch], scale, dtype=g.dtype, device=g.device)
    most = g.abs().reshape(*g.shape[:batch], math.prod(g.shape[batch:])).amax(-1)  # a NaN counts as the largest
    return Signs.pack(-g, torch.where(most.isnan(), most, scales))


def total(x: Tensor) -> Tensor:
    """Sums, added in float64."""
    return x.sum(-1, dtype=torch.float64)


def length(x: Tensor) -> Tensor:
    """Euclidean norms: of short pieces in the dtype of x, which is much faster, and of these in float64."""
    pieces = [torch.linalg.vector_norm(part, dim=-1) for part in x.split(_PIECE, -1)]
    return torch.linalg.vector_norm(torch.stack(pieces, -1), dim=-1, dtype=torch.float64)


def scaled(x: Tensor) -> Tensor:
    """x over its largest magnitude, so that squares neither overflow nor vanish; zero stays zero."""
    most = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
    return x / torch.where(most > 0, most, 1)


def unit(x: Tensor) -> Tensor:
    """x over its Euclidean norm; zero stays zero."""
    x = scaled(x)
    norm = length(x).unsqueeze(-1)
    return x * torch.where(norm > 0, 1 / norm, 0).to(x.dtype)


def largest(a: Tensor, k: int) -> Tensor:
    """Indices of the k largest entries, in ascending order; of equal entries the first. A NaN is larger than any number."""
    if k == 1:
        return a.argmax(-1, keepdim=True)
    a = torch.where(a.isnan(), torch.inf, a)
    least = a.topk(k).values[..., -1:]
    above, equal = a > least, a == least
    # `topk` takes any of the entries that equal the k-th; a second pass takes the first of them.
    chosen = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    return chosen.to(torch.uint8).topk(k).indices.sort().values


def simplex(y: Tensor, radius: float) -> Tensor:
    """The projection of float64 vectors onto {x >= 0, sum x = radius}: max(y - theta, 0), theta found by sorting.

    Held, Wolfe and Crowder (1974); Duchi, Shalev-Shwartz, Singer and Chandra (2008).
    """
    # Only entries within a radius of the largest can stay positive. In these units no sum loses digits.
    y = ((y - y.amax(-1, keepdim=True)) / radius).clamp(min=-1)
    ordered = y.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    count = torch.arange(1, y.shape[-1] + 1, device=y.device)
    support = (ordered * count > excess).sum(-1, keepdim=True).clamp(min=1)  # none, if there is a NaN
    theta = excess.gather(-1, support - 1) / support
    return (y - theta).clamp(min=0) * radius


def capped(y: Tensor, k: int, radius: float) -> Tensor:
    """The projection of non-negative float64 vectors onto {0 <= x <= radius, sum x <= k radius}.

    It is min(y, radius) if that satisfies the sum, else clip(y - theta, 0, radius) with the theta at which the sum is
    k radius. As a function of theta the sum is piecewise linear with breaks at y_i and y_i - radius: it is evaluated at all
    of them, and the equation solved on the right piece.
    """
    clipped = y.clamp(max=radius)
    # theta lies between y_(k) - radius and y_(k), the k-th largest: beyond a radius of that, values do not matter.
    z = ((y - y.topk(k).values[..., -1:]) / radius).clamp(-2, 1)
    breaks, order = torch.cat((z, z - 1), -1).sort(dim=-1, descending=True, stable=True)
    slopes = torch.where(order < z.shape[-1], 1.0, -1.0).to(z.dtype)
    slope, level = slopes.cumsum(-1), (slopes * breaks).cumsum(-1)
    last = (level - breaks * slope <= k).sum(-1, keepdim=True).clamp(min=1) - 1
    slope, level, at = (t.gather(-1, last) for t in (slope, level, breaks))
    theta = torch.where(slope > 0, (level - k) / slope.clamp(min=1), at)
    return torch.where(total(clipped).unsqueeze(-1) <= k * radius, clipped, (z - theta).clamp(0, 1) * radius)


@batched
def decreasing(z: Tensor, shared: None = None) -> Tensor:
    """The closest decreasing sequence of each float64 vector: isotonic regression by pooling adjacent violators."""
    from sklearn.isotonic import isotonic_regression

    most = z.abs().amax(-1, keepdim=True)
    rows = torch.where(most.isfinite(), z, 0).reshape(-1, z.shape[-1])
    fits = [isotonic_regression(row, increasing=False) for row in rows.numpy()]
    fit = torch.from_numpy(np.stack(fits)).reshape(z.shape) if fits else torch.empty_like(z)
    return torch.where(most.isfinite(), fit, torch.nan)


class Domain:
    """Base of the sets of one tensor."""

    matrix: ClassVar[bool] = False
    """Whether the tensor must be a matrix."""

    def check(self, shape: Shape) -> None:
        """Refuse tensors of a shape that the set cannot hold, with the reason."""
        if math.prod(shape) == 0:
            raise ConfigError(f"{type(self).__name__} needs a tensor with entries, not one of shape {tuple(shape)}")
        if self.matrix and len(shape) != 2:
            raise ConfigError(
                f"{type(self).__name__} needs a matrix, not a tensor of shape {tuple(shape)}; "
                "give such tensors another set: PerLayer({name: set, ...})"
            )

    def lmo(self, g: Tensor, batch: int = 0) -> Point:
        """An extreme point s that minimises <g, s> over the set."""
        raise NotImplementedError

    def project(self, x: Tensor, batch: int = 0) -> Tensor:
        """The point of the set closest to x."""
        flat = self._flat(x, batch)
        return self._project(flat.double(), x.shape[batch:]).to(x.dtype).reshape(x.shape)

    def contains(self, x: Tensor, tolerance: float = 1e-6, batch: int = 0) -> Tensor:
        """Whether x is in the set; `tolerance` is relative to the size of the set."""
        return self._contains(self._flat(x, batch), x.shape[batch:], tolerance)

    def start(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zero if it is in the set, else the set's centre."""
        self.check(shape)
        return torch.zeros(tuple(shape), dtype=dtype)

    @property
    def diameter(self) -> float:
        """The largest Euclidean distance of two points; of a set for which it depends on the shape, see `diameter_of`."""
        raise ConfigError(f"the diameter of {type(self).__name__} depends on the shape of the tensor: use diameter_of(shape)")

    def diameter_of(self, shape: Shape) -> float:
        """The largest Euclidean distance of two points of the set, for a tensor of this shape."""
        self.check(shape)
        return self.diameter

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each entry over the set, in float64 and broadcastable to the shape."""
        raise NotImplementedError

    def reach(self, norm: str, shape: Shape) -> float | None:
        """The largest norm in the set: the radius of the smallest ball around the origin that contains it.

        norm: "l1", "l2" (Frobenius), "linf" or "nuclear". None where no closed form is known: the nuclear norm over boxes,
        permutahedra and some k-sparse polytopes.
        """
        self.check(shape)
        if norm not in NORMS:
            raise ConfigError(unknown("norm", norm, NORMS))
        if norm == "nuclear":
            if len(shape) != 2:
                raise ConfigError(f"the nuclear norm needs a matrix, not a tensor of shape {tuple(shape)}: use norm='l2'")
            norm = "l2" if 1 in shape else norm  # one singular value
        if norm == "linf":
            return max(float(b.abs().max()) for b in self.bounds(shape))
        return self._reach(norm, tuple(shape))

    def _flat(self, x: Tensor, batch: int) -> Tensor:
        shape = tuple(x.shape[batch:])
        self.check(shape)
        if not x.is_floating_point():
            raise ConfigError(f"{type(self).__name__} takes floating tensors, not {x.dtype}: convert with .float()")
        return x.reshape(*x.shape[:batch], math.prod(shape))

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        raise NotImplementedError

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        raise NotImplementedError

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float | None:
        raise NotImplementedError


class Ball(Domain):
    """Base of the sets that are symmetric around zero and reach from -radius to radius in every entry."""

    radius: float

    def __post_init__(self) -> None:
        positive("radius", self.radius)

    @property
    def diameter(self) -> float:
        return 2.0 * self.radius

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        self.check(shape)
        r = torch.tensor(float(self.radius), dtype=torch.float64)
        return -r, r


@dataclass(frozen=True)
class L1Ball(Ball):
    """{x : sum |x_i| <= radius}. Extreme points: +-radius at one entry. At g = 0: radius at the first."""

    radius: float

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        flat = self._flat(g, batch)
        index = flat.abs().argmax(-1, keepdim=True)
        return Sparse(index, _against(flat.gather(-1, index), self.radius), tuple(g.shape[batch:]))

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
    """{x : |x|_2 <= radius}; for matrices, the Frobenius norm. s = -radius g / |g|, dense. At g = 0: zero."""

    radius: float

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
    """{x : max |x_i| <= radius}. Extreme points: radius times signs. At g = 0: radius everywhere."""

    radius: float

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
        return {"l1": self.radius * math.prod(shape), "l2": self.radius * math.sqrt(math.prod(shape))}.get(norm)


@dataclass(frozen=True)
class KSparse(Ball):
    """{x : sum |x_i| <= k radius, max |x_i| <= radius}, the convex hull of the vectors with k entries of +-radius.

    At g = 0: radius at the first k entries.
    """

    k: int
    radius: float

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("k", self.k)

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if self.k > math.prod(shape):
            raise ConfigError(f"k={self.k} is more than the {math.prod(shape)} entries of {tuple(shape)}: use LInfBall(radius)")

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
    """{x : x >= 0, sum x = radius}. Extreme points: radius at one entry. At g = 0: at the first.

    `diameter` is that of two or more entries; a single entry can only be `radius`, and `diameter_of` says 0.
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        positive("radius", self.radius)

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        flat = self._flat(g, batch)
        index = flat.argmin(-1, keepdim=True)
        least = flat.gather(-1, index)
        return Sparse(index, torch.where(least.isnan(), least, self.radius), tuple(g.shape[batch:]))

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
    """{x : lo <= x <= hi}. Bounds are numbers, or (nested) tuples that broadcast to the shape; tensors become tuples.

    s_i = lo_i where g_i > 0, else hi_i: `Signs` for numbers with lo = -hi, `Corner` for other numbers, else dense.
    """

    lo: float | tuple
    hi: float | tuple

    def __post_init__(self) -> None:
        for name in ("lo", "hi"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        lo, hi = self._ends
        try:
            empty = bool((lo > hi).any())
        except RuntimeError:
            raise ConfigError(
                f"lo and hi have shapes {tuple(lo.shape)} and {tuple(hi.shape)}, which do not broadcast"
            ) from None
        if empty:
            raise ConfigError(f"lo={_short(self.lo)} must not be above hi={_short(self.hi)}: the box would be empty")

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        return _numbers("lo", self.lo), _numbers("hi", self.hi)

    def check(self, shape: Shape) -> None:
        super().check(shape)
        for name, end in zip(("lo", "hi"), self._ends, strict=True):
            given, want = tuple(end.shape), tuple(shape)
            if len(given) > len(want) or any(a not in (1, b) for a, b in zip(given[::-1], want[::-1], strict=False)):
                raise ConfigError(f"{name} has shape {given}, which does not broadcast to the tensor's {want}")

    def lmo(self, g: Tensor, batch: int = 0) -> Signs | Corner | Tensor:
        self._flat(g, batch)
        lo, hi = self._ends
        if lo.dim() or hi.dim():
            lo, hi = (end.to(g) for end in self._ends)
            return torch.where(g > 0, lo, torch.where(g.isnan(), g, hi))
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


@dataclass(frozen=True)
class GroupBall(Ball):
    """{x : sum over groups of |x_g|_2 <= radius}, the ball of the group lasso.

    groups: the size of equal consecutive groups; "rows" for one group an index of the first dimension (the inputs of one
    neuron); or a label (a whole number) for each entry, as a tuple. Extreme points: vectors of length radius in one group.
    The point is sparse, with as many entries as the largest group has; if the winning group has fewer, other entries come
    with the value zero. At g = 0: zero.
    """

    radius: float
    groups: int | str | tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", _plain(self.groups))
        if isinstance(self.groups, tuple):
            if not self.groups or not all(type(g) is int for g in self.groups):
                raise ConfigError(f"groups={_short(self.groups)} must hold one whole number, its group, for each entry")
        elif self.groups != "rows" and not (type(self.groups) is int and self.groups >= 1):
            raise ConfigError(
                f"groups={self.groups!r} must be the size of the groups, 'rows', or a tuple with a label for each entry"
            )

    def check(self, shape: Shape) -> None:
        super().check(shape)
        entries, groups = math.prod(shape), self.groups
        if groups == "rows" and len(shape) < 2:
            raise ConfigError(
                f"groups='rows' needs a matrix, not a tensor of shape {tuple(shape)}: use PerLayer, or give the size of the groups"
            )
        if isinstance(groups, int) and entries % groups:
            raise ConfigError(f"groups={groups} does not divide the {entries} entries of {tuple(shape)}: label each entry")
        if isinstance(groups, tuple) and len(groups) != entries:
            raise ConfigError(f"groups has {len(groups)} labels, but a tensor of shape {tuple(shape)} has {entries} entries")

    @cached_property
    def _labels(self) -> tuple[Tensor, Tensor, Tensor]:
        """For labelled groups: the number of each entry's group, the entries ordered by it, and the sizes of the groups."""
        _, numbers, sizes = torch.tensor(self.groups).unique(return_inverse=True, return_counts=True)
        return numbers, numbers.argsort(stable=True), sizes

    def _size(self, shape: Shape) -> int:
        """The size of the largest group."""
        if isinstance(self.groups, tuple):
            return int(self._labels[2].max())
        return math.prod(shape[1:]) if self.groups == "rows" else int(self.groups)

    def count(self, shape: Shape) -> int:
        """How many groups there are."""
        return len(self._labels[2]) if isinstance(self.groups, tuple) else math.prod(shape) // self._size(shape)

    def _lengths(self, x: Tensor, shape: Shape) -> Tensor:
        """The Euclidean norm of each group, in float64."""
        if not isinstance(self.groups, tuple):
            size = self._size(shape)
            return length(x.reshape(*x.shape[:-1], x.shape[-1] // size, size))
        numbers, _, sizes = self._labels
        zeros = x.new_zeros(*x.shape[:-1], len(sizes), dtype=torch.float64)
        return zeros.scatter_add(-1, numbers.expand(x.shape), x.double().square()).sqrt()

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        shape = tuple(g.shape[batch:])
        flat = scaled(self._flat(g, batch))
        winner, place = self._lengths(flat, shape).argmax(-1, keepdim=True), torch.arange(self._size(shape))
        if isinstance(self.groups, tuple):
            # Behind the members of the group, in this order, come those of the next: other entries, with value zero.
            _, order, sizes = self._labels
            index = order[((sizes.cumsum(0) - sizes)[winner] + place) % len(order)]
            values = torch.where(place < sizes[winner], flat.gather(-1, index), 0)
        else:
            index = winner * len(place) + place
            values = flat.gather(-1, index)
        return Sparse(index, unit(values) * -self.radius, shape)

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        norms = self._lengths(x, shape)
        ratios = simplex(norms, self.radius) / torch.where(norms > 0, norms, 1)
        ratios = torch.where(norms.sum(-1, keepdim=True) <= self.radius, 1.0, ratios)
        if isinstance(self.groups, tuple):
            return x * ratios.gather(-1, self._labels[0].expand(x.shape))
        return x * ratios.repeat_interleave(self._size(shape), -1)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        return self._lengths(x, shape).sum(-1) <= self.radius * (1 + tolerance)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        if norm == "nuclear":
            return self.radius * math.sqrt(self._rank(shape))
        return self.radius * (math.sqrt(self._size(shape)) if norm == "l1" else 1.0)

    def _rank(self, shape: tuple[int, ...]) -> int:
        """The largest rank of a matrix that is zero outside one group: entries of it in different rows and columns.

        |X|_* <= sqrt(rank) |X|_2, and equal entries at such places attain it.
        """
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import maximum_bipartite_matching

        entries, most = torch.arange(math.prod(shape)), 0
        if isinstance(self.groups, tuple):
            parts = entries[self._labels[1]].split(self._labels[2].tolist())
        else:
            parts = entries.split(self._size(shape))
        for part in parts:
            rows, columns = (part // shape[1]).numpy(), (part % shape[1]).numpy()
            pattern = csr_matrix(([1] * len(part), (rows - rows.min(), columns)))
            most = max(most, int((maximum_bipartite_matching(pattern) >= 0).sum()))
        return most


@dataclass(frozen=True)
class Permutahedron(Domain):
    """The convex hull of all permutations of a vector: {x : x is majorised by weights}. A tensor with as many entries.

    s gives the largest weight to the smallest gradient (a sort), dense. Projection: with x and the weights w sorted from
    the largest down, x - v, where v is the decreasing sequence closest to x - w (Blondel, Teboul, Berthet and Djolonga,
    "Fast differentiable sorting and ranking", ICML 2020). At g = 0: the weights in decreasing order.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", _plain(self.weights))
        if not isinstance(self.weights, tuple) or self._sorted.dim() != 1 or not len(self.weights):
            raise ConfigError(f"weights={_short(self.weights)} must be a tuple of numbers, one for each entry of the tensor")

    @cached_property
    def _sorted(self) -> Tensor:
        return _numbers("weights", self.weights).sort(descending=True).values

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if math.prod(shape) != len(self.weights):
            raise ConfigError(f"weights has {len(self.weights)} entries, a tensor of shape {tuple(shape)} {math.prod(shape)}")

    def lmo(self, g: Tensor, batch: int = 0) -> Tensor:
        flat = self._flat(g, batch)
        point = torch.zeros_like(flat).scatter(-1, flat.argsort(dim=-1, stable=True), self._sorted.to(g).expand(flat.shape))
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
