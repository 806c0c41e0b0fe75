"""Mirror maps on the simplex, for FedBoost.

Hamer, Mohri and Suresh, "FedBoost: communication-efficient algorithms for federated learning", ICML
2020, Figure 1, line 5: v = [grad F]^-1 (grad F(alpha) - eta g), then the Bregman projection of v.

A mirror map is a strictly convex F. Its divergence is B(x || y) = F(x) - F(y) - <grad F(y), x - y>.
Every projection is onto {x : sum x = radius, low <= x <= high}: the simplex, unless the bounds say
otherwise. As argmin B(x || v) = argmin F(x) - <grad F(v), x>, it needs only z = grad F(v), and of z
only the differences, because sum x is fixed. A step is therefore computed from z = grad F(x) - eta
g without ever forming v, which may overflow.

Tensors are vectors in the last dimension, with any batch dimensions before it. The work is done in
float64 and rounded to the dtype of the input once. A vector with a NaN, or outside the domain of F,
gives NaN, so that divergence is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from foedus.base.batching import batched
from foedus.base.settings import Remedy, Settings, check_settings, check_value
from foedus.errors import ConfigError
from foedus.geometry.domain import scaled, shortened, simplex

Bound = float | Tensor | Sequence[float]

SLACK = 1e-6  # relative: bounds that were rounded to float32 may miss the radius by this much
HUGE = 1e300  # stands for infinity where infinities would cancel


def best_step(r: float, sigma: float, rounds: int, slope: float) -> float:
    """The step size eta for which the bound of mirror descent after T = `rounds` rounds is least.

    With F sigma-strongly convex in a norm, gradients g_t of at most G = `slope` in the dual norm,
    and B(x || x_1) <= r (`Mirror.reach`), one step gives, for any x of the set,

        eta <g_t, x_t - x> <= B(x || x_t) - B(x || x_{t+1}) + eta^2 G^2 / (2 sigma).

    Summed over the rounds and divided by eta T, the error of the averaged iterate is at most

        r / (eta T) + eta G^2 / (2 sigma),

    whose derivative in eta vanishes at eta = sqrt(2 sigma r / T) / G, where the bound is G sqrt(2 r
    / (sigma T)). Theorem 2 of the paper prints sqrt(sigma / (T G^2 r)), with r below the line,
    which minimizes no such bound: a set of larger r needs longer steps.
    """
    for name, value in (("r", r), ("sigma", sigma), ("slope", slope)):
        check_value(name, value, Annotated[float, Gt(0)])
    check_value("rounds", rounds, Annotated[int, Ge(1)])
    return math.sqrt(2 * sigma * r / rounds) / slope


class Mirror(Settings):
    """Base of the mirror maps."""

    if TYPE_CHECKING:  # constants of the class or properties

        @property
        def sigma(self) -> float:
            """Modulus of strong convexity: B(x || y) >= sigma/2 |x - y|^2 in the order `norm`."""

        @property
        def norm(self) -> float:
            """The order p of that norm, |x|_p."""

    _least: ClassVar[float] = -math.inf
    """The entries of x from which on F is defined."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def dual(self) -> float:
        """The order of the dual norm, in which gradients are measured: 1/norm + 1/dual = 1."""
        return math.inf if self.norm == 1 else self.norm / (self.norm - 1)

    def value(self, x: Tensor) -> Tensor:
        """F(x)."""
        raise NotImplementedError

    def grad(self, x: Tensor) -> Tensor:
        """grad F(x)."""
        raise NotImplementedError

    def inverse(self, z: Tensor) -> Tensor:
        """[grad F]^-1 (z), the gradient of the conjugate F*."""
        raise NotImplementedError

    def divergence(self, x: Tensor, y: Tensor) -> Tensor:
        """B(x || y)."""
        raise NotImplementedError

    def reach(self, n: int) -> float:
        """r: the largest B(x || start) over the simplex, attained at its corners."""
        raise NotImplementedError

    def start(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The minimizer of F over the simplex: for a symmetric F, the uniform vector."""
        check_value("n", n, Annotated[int, Ge(1)])
        return torch.full((n,), 1 / n, dtype=dtype)

    def project(
        self, v: Tensor, low: Bound = 0.0, high: Bound = 1.0, radius: float = 1.0
    ) -> Tensor:
        """argmin B(x || v) over sum x = radius, low <= x <= high.

        Bounds broadcast to v; `high` may be infinite.
        """
        _check("v", v)
        return self._nearest(self.grad(v.double()), low, high, radius).to(v.dtype)

    def step(
        self,
        x: Tensor,
        g: Tensor,
        eta: float,
        low: Bound = 0.0,
        high: Bound = 1.0,
        radius: float = 1.0,
    ) -> Tensor:
        """One step of mirror descent: argmin eta <g, y> + B(y || x) over the set."""
        _check("x", x)
        check_value("eta", eta, Annotated[float, Gt(0)])
        if g.shape != x.shape:
            shapes = f"g has shape {tuple(g.shape)}, x {tuple(x.shape)}"
            raise ConfigError(f"{shapes}: give one gradient entry for each entry of x")
        # less than HUGE: a weight of zero stays below all others
        move = (eta * g.double()).clamp(-HUGE / 10, HUGE / 10)
        return self._nearest(self.grad(x.double()) - move, low, high, radius).to(x.dtype)

    def _nearest(self, z: Tensor, low: Bound, high: Bound, radius: float) -> Tensor:
        if isinstance(low, float) and isinstance(high, float) and (low, high, radius) == (0, 1, 1):
            low, high = torch.zeros_like(z), torch.ones_like(z)  # the simplex needs no checks
        else:
            low, high = self._bounds(z, low, high, radius)
        lost = z.isnan().any(-1, keepdim=True)
        most = low + (radius - low.sum(-1, keepdim=True)).clamp(min=0)
        # an inactive bound must not look active if all but one entry vanish
        roof = torch.where(high < most, high, 2 * most - low)
        z = torch.where(lost, 0, z).clamp(-HUGE, HUGE)
        x = batched(self._solve)((z, low, roof), float(radius))
        return torch.where(lost, torch.nan, x.clamp(low, high))

    def _bounds(self, z: Tensor, low: Bound, high: Bound, radius: float) -> tuple[Tensor, Tensor]:
        """The bounds in the shape of z; an empty set is refused."""
        check_value("radius", radius, Annotated[float, Gt(0)])
        lows, highs = _bound("low", low, z).clamp(min=self._least), _bound("high", high, z)
        if not lows.isfinite().all():
            raise ConfigError(f"low={shortened(low)} must be finite")
        shown_low, shown_high = f"low={shortened(low)}", f"high={shortened(high)}"
        if not (lows <= highs).all():
            least = f" and at least {self._least:g}, where F begins"
            least = least if math.isfinite(self._least) else ""
            needed = f"{shown_high} must be at least {shown_low}{least}"
            raise ConfigError(f"{needed}: the set would be empty")
        if (lows.sum(-1) > radius * (1 + SLACK)).any():
            excess = f"{shown_low} sums to more than radius={radius!r}"
            raise ConfigError(f"{excess}: lower it or give a larger radius")
        if (highs.sum(-1) < radius * (1 - SLACK)).any():
            lack = f"{shown_high} sums to less than radius={radius!r}"
            raise ConfigError(f"{lack}: raise it or give a smaller radius")
        return lows, highs

    def _solve(self, args: tuple[Tensor, Tensor, Tensor], radius: float) -> Tensor:
        """argmin F(x) - <z, x> over the set, for finite float64 (z, low, high) of one shape."""
        raise NotImplementedError


@dataclass(frozen=True)
class Entropy(Mirror):
    """The entropy, whose step is exponentiated gradient.

        F(x) = sum x_i log x_i  for x >= 0,        a step: x_i <- x_i exp(-eta g_i) / sum

    grad F(x) = log x + 1 (minus infinity at zero), and B(x || y) = sum x_i log(x_i / y_i) - x_i +
    y_i, the Kullback-Leibler divergence. 1-strongly convex in |.|_1 (Pinsker). The projection is
    x_i = clip(c v_i, low_i, high_i). Entries that are zero stay so, unless the bounds leave no
    other place for the mass: then they share it as if they were equal and tiny.

    Example:
        >>> alpha = torch.tensor([0.5, 0.25, 0.25])
        >>> fd.Entropy().step(alpha, torch.tensor([1.0, 0.0, 0.0]), eta=0.7).round(decimals=2)
        tensor([0.3300, 0.3300, 0.3300])
    """

    sigma: ClassVar[float] = 1.0
    norm: ClassVar[float] = 1.0
    _least: ClassVar[float] = 0.0

    def value(self, x: Tensor) -> Tensor:
        return -torch.special.entr(x.double()).sum(-1).to(x.dtype)

    def grad(self, x: Tensor) -> Tensor:
        return (x.double().log() + 1).to(x.dtype)

    def inverse(self, z: Tensor) -> Tensor:
        return (z.double() - 1).exp().to(z.dtype)

    def divergence(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x.double(), y.double()
        # x log(x / y): near x = y no digits are lost
        terms = torch.special.xlog1py(a, (a - b) / b) - (a - b)
        return torch.where(a == b, 0, terms.clamp(min=0)).sum(-1).to(x.dtype)

    def reach(self, n: int) -> float:
        check_value("n", n, Annotated[int, Ge(1)])
        return math.log(n)

    def _solve(self, args: tuple[Tensor, Tensor, Tensor], radius: float) -> Tensor:
        z, low, high = args
        if (low == 0).all() and (high >= radius).all():
            return radius * z.softmax(-1)
        # e^1500 is more than the ratio of any two floats
        z = _shortened(z, torch.tensor(1500.0, dtype=z.dtype))
        free, fixed = _pieces(torch.exp, torch.log, z, low, high, radius)
        mass = radius - torch.where(free, 0, fixed).sum(-1, keepdim=True)
        return torch.where(free, mass * torch.where(free, z, -torch.inf).softmax(-1), fixed)


@dataclass(frozen=True)
class Euclidean(Mirror):
    """The squared Euclidean norm, whose step is projected gradient.

        F(x) = |x|_2^2 / 2,        B(x || y) = |x - y|_2^2 / 2

    1-strongly convex in |.|_2. The projection is x_i = clip(v_i + theta, low_i, high_i).

    Example:
        >>> alpha = torch.tensor([0.5, 0.5])
        >>> fd.Euclidean().step(alpha, torch.tensor([1.0, 0.0]), eta=0.5)
        tensor([0.2500, 0.7500])
    """

    sigma: ClassVar[float] = 1.0
    norm: ClassVar[float] = 2.0

    def value(self, x: Tensor) -> Tensor:
        return (x.double().square().sum(-1) / 2).to(x.dtype)

    def grad(self, x: Tensor) -> Tensor:
        return x.clone()

    def inverse(self, z: Tensor) -> Tensor:
        return z.clone()

    def divergence(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x.double() - y.double()).square().sum(-1) / 2).to(x.dtype)

    def reach(self, n: int) -> float:
        check_value("n", n, Annotated[int, Ge(1)])
        return (1 - 1 / n) / 2

    def _solve(self, args: tuple[Tensor, Tensor, Tensor], radius: float) -> Tensor:
        z, low, high = args
        if (low == 0).all() and (high >= radius).all():
            return simplex(z, radius)
        z = _shortened(z, high.amax(-1, keepdim=True) - low.amin(-1, keepdim=True))
        free, fixed = _pieces(_same, _same, z, low, high, radius)
        mass = radius - torch.where(free, 0, fixed).sum(-1, keepdim=True)
        z = z - torch.where(free, z, -torch.inf).amax(-1, keepdim=True)
        theta = (mass - torch.where(free, z, 0).sum(-1, keepdim=True)) / free.sum(-1, keepdim=True)
        return torch.where(free, z + theta, fixed)


@dataclass(frozen=True)
class PNorm(Mirror):
    """The squared p-norm: from Euclidean (p = 2) to entropy-like, say p = 1 + 1 / log n.

        F(x) = |x|_p^2 / 2,    grad F(x)_i = sign(x_i) |x_i|^(p-1) |x|_p^(2-p)

    and the inverse of the gradient is the same with q for p, 1/p + 1/q = 1. (p-1)-strongly convex
    in |.|_p. The projection is x_i = clip(phi((z_i + theta) / |x|_p^(2-p)), low_i, high_i) with
    phi(u) = sign(u) |u|^(q-1). For a fixed |x|_p in it, sum x increases with theta, and with theta
    so chosen the norm of x decreases: two nested root-finds.

    Args:
        p: The order of the norm, above 1 and at most 2.

    Example:
        >>> alpha = torch.tensor([0.5, 0.5])
        >>> fd.PNorm(2.0).step(alpha, torch.tensor([1.0, 0.0]), eta=0.5)
        tensor([0.2500, 0.7500])

    Reference: Gentile, "The robustness of the p-norm algorithms", 2003; Grove, Littlestone and
    Schuurmans, "General convergence results for linear discriminant updates", 2001.
    """

    p: Annotated[float, Gt(1), Le(2), Remedy("for the limit p = 1 take Entropy()")]

    @property
    def sigma(self) -> float:
        return self.p - 1

    @property
    def norm(self) -> float:
        return self.p

    def value(self, x: Tensor) -> Tensor:
        return (_norm(x.double(), self.p).square().squeeze(-1) / 2).to(x.dtype)

    def grad(self, x: Tensor) -> Tensor:
        return _link(x.double(), self.p).to(x.dtype)

    def inverse(self, z: Tensor) -> Tensor:
        return _link(z.double(), self.dual).to(z.dtype)

    def divergence(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x.double(), y.double()
        # <grad F(y), y> = |y|_p^2, hence F(x) - F(y) - <grad F(y), x - y> is this:
        squares = (_norm(a, self.p).square() + _norm(b, self.p).square()).squeeze(-1)
        gap = squares / 2 - (_link(b, self.p) * a).sum(-1)
        return torch.where((a == b).all(-1), 0, gap.clamp(min=0)).to(x.dtype)

    def reach(self, n: int) -> float:
        check_value("n", n, Annotated[int, Ge(1)])
        return (1 - n ** (-2 / self.dual)) / 2

    def _solve(self, args: tuple[Tensor, Tensor, Tensor], radius: float) -> Tensor:
        (z, low, high), p = args, self.p
        ends = torch.maximum(low.abs(), high.abs())
        z = _shortened(z, 2 * ends.sum(-1, keepdim=True))  # |grad F(x)|_q = |x|_p <= |x|_1
        # |x|_p of the uniform vector
        smallest = torch.full_like(z[..., :1], radius * z.shape[-1] ** (-1 / self.dual))
        # the simplex: x = [grad F]^-1 (max(z + theta, 0)), one root-find
        if (low == 0).all() and (high >= radius).all():

            def positive_part(theta: Tensor) -> Tensor:
                return _link((z + theta).clamp(min=0), self.dual)

            def surplus(theta: Tensor) -> Tensor:
                return positive_part(theta).sum(-1, keepdim=True) / radius - 1

            # |x|_1 <= n^(1/q) |x|_p and |x|_p = |z + theta|_q <= n^(1/q) theta: a lower bound
            begin, end = smallest**2 / radius, torch.full_like(smallest, radius)
            x = positive_part(_root(surplus, begin, end))
            return x * (radius / x.sum(-1, keepdim=True))
        least, most = _power(low, p - 1), _power(high, p - 1)

        def fit(size: Tensor) -> Tensor:
            """The x of the right sum, for |x|_p = size on the right-hand side."""
            slope = size ** (2 - p)

            def at(theta: Tensor) -> Tensor:
                return _power((z + theta) / slope, self.dual - 1).clamp(low, high)

            def excess(theta: Tensor) -> Tensor:  # to the power p - 1, almost linear in theta
                return _power(at(theta).sum(-1, keepdim=True) / radius, p - 1) - 1

            begin = (slope * least - z).amin(-1, keepdim=True)
            end = (slope * most - z).amax(-1, keepdim=True)
            return at(_root(excess, begin, end))

        x = fit(_root(lambda size: size / _norm(fit(size), p) - 1, smallest, _norm(ends, p)))
        # the rounding error is divided among the free entries
        weight = torch.where((x > low) & (x < high), x.abs(), 0)
        share = torch.nan_to_num(weight / weight.sum(-1, keepdim=True))
        return x + (radius - x.sum(-1, keepdim=True)) * share


def _check(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0 or x.shape[-1] == 0:
        given = f"a {type(x).__name__}"
        if isinstance(x, Tensor):
            given = f"of {x.dtype} and shape {tuple(x.shape)}"
        raise ConfigError(
            f"{name} is {given}: give a tensor of floats whose last dimension holds the entries"
        )


def _bound(name: str, value: Bound, z: Tensor) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float64, device=z.device).broadcast_to(z.shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name}={shortened(value)} must broadcast to the shape {tuple(z.shape)}: {error}"
        ) from None


def _same(x: Tensor) -> Tensor:
    return x


def _power(x: Tensor, exponent: float) -> Tensor:
    """sign(x) |x|^exponent."""
    return x.abs().pow(exponent).copysign(x)


def _norm(x: Tensor, p: float) -> Tensor:
    """|x|_p, with the last dimension kept."""
    norm = torch.linalg.vector_norm(scaled(x), p, dim=-1, keepdim=True)
    return x.abs().amax(-1, keepdim=True) * norm


def _link(x: Tensor, p: float) -> Tensor:
    """The gradient of |x|_p^2 / 2.

    Homogeneous of degree 1: powers are taken of x over its largest magnitude.
    """
    unit = scaled(x)
    return _power(unit, p - 1) * _norm(unit, p) ** (2 - p) * x.abs().amax(-1, keepdim=True)


def _shortened(z: Tensor, gap: Tensor) -> Tensor:
    """z less its largest entry, and no entry further than `gap` below the next one.

    Where entries of z that far apart are never both strictly between their bounds, neither changes
    the solution; but after a huge step, theta and the bounds would otherwise be rounded away beside
    z.
    """
    below = z - z.amax(-1, keepdim=True)
    ordered, order = z.sort(dim=-1, descending=True)
    steps = torch.maximum(ordered.diff(dim=-1, prepend=ordered[..., :1]), -gap)
    nearer = torch.empty_like(z).scatter(-1, order, steps.cumsum(-1))
    return torch.where(below >= -gap, below, nearer)


def _pieces(
    link: Callable, unlink: Callable, z: Tensor, low: Tensor, high: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    """Which entries of x_i = clip(link(z_i + theta), low_i, high_i) are free; the others' values.

    theta is such that they sum to radius.

    Entry i is free for theta between unlink(low_i) - z_i and unlink(high_i) - z_i. The sum
    increases with theta: among all these sorted ends, bisection finds the neighbors between which
    it reaches the radius.
    """
    leave, arrive = unlink(low) - z, unlink(high) - z
    ends = torch.cat((leave, arrive), -1).sort(-1).values
    first = torch.zeros_like(z[..., :1], dtype=torch.long)
    last = first + ends.shape[-1] - 1
    for _ in range(ends.shape[-1].bit_length()):
        middle = (first + last) // 2
        below = link(z + ends.gather(-1, middle)).clamp(low, high).sum(-1, keepdim=True) <= radius
        first, last = torch.where(below, middle, first), torch.where(below, last, middle)
    theta, beyond = ends.gather(-1, first), ends.gather(-1, last)
    return (leave <= theta) & (arrive >= beyond), torch.where(arrive <= theta, high, low)


def _root(f: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """The root of an increasing f with f(a) <= 0 <= f(b), to rounding, for each element.

    False position with the Illinois rule (the value at an end that stays is halved); every sixth
    point is the middle, so that the bracket shrinks whatever f is.
    """
    fa, fb = f(a), f(b)
    eps = torch.finfo(a.dtype).eps
    best, error, side = a, fa.abs(), torch.zeros_like(a)
    for i in range(400):
        x = a - fa * (b - a) / (fb - fa) if i % 6 < 5 else (a + b) / 2
        x = torch.minimum(torch.maximum(torch.where(x.isnan(), (a + b) / 2, x), a), b)
        fx = f(x)
        left = fx <= 0
        fa, fb = (
            torch.where(left, fx, torch.where(side < 0, fa / 2, fa)),
            torch.where(left, torch.where(side > 0, fb / 2, fb), fx),
        )
        a, b, side = torch.where(left, x, a), torch.where(left, b, x), torch.where(left, 1.0, -1.0)
        best, error = torch.where(fx.abs() < error, x, best), torch.minimum(error, fx.abs())
        if ((error <= 4 * eps) | (b - a <= 2 * eps * torch.maximum(a.abs(), b.abs()))).all():
            break
    return best
