"""Sets of matrices, sets of all the tensors of a model, and which set contains which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.base import random
from foedus.base.batching import batched
from foedus.errors import ConfigError
from foedus.geometry.domain import Ball, Domain, Shape, simplex, unit
from foedus.wire.arrays import LowRank, Sparse

GRAM = 64
"""Up to this smaller side the top singular pair comes from the spectrum of the Gram matrix."""

_STEPS, _CHECK = 24, 8  # Lanczos steps before a restart, and between looks at the residual
# steps: some ten for entries of size 1, tens to hundreds for entries of thousands and millions
_NEWTON = 500
_ROUNDING = 1e-9  # two radii that differ by less, relatively, are the same


@dataclass(frozen=True)
class NuclearBall(Ball):
    """The ball of the nuclear norm, {X : the singular values sum up to at most radius}.

    Extreme points: -radius u v^T with the top singular pair of g, sent as two vectors. Matrices
    with a side of at most 64 are solved to rounding. For larger ones the pair has a relative
    residual of at most `tolerance`: with s = u^T g v, |g^T u - s v| <= tolerance s. Then s >= sigma
    / sqrt(1 + tolerance / c), sigma the largest singular value and c > 0 the cosine of v with its
    vector; c tends to 1 unless other singular values are as large, and starts at about 1 /
    sqrt(columns), from a fixed random vector. `lmo(g, warm=v)` starts near v, such as the right
    factor of the last point, which saves steps when g has changed little. At g = 0: zero.

    Args:
        radius: Largest sum of singular values.
        tolerance: Relative residual of the top pair of a large matrix.
        iterations: Most Lanczos steps; the pair after them is returned.

    Example:
        >>> point = fd.NuclearBall(2.0).lmo(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        >>> point.left.shape, point.dense().abs().round(decimals=3)
        (torch.Size([2, 1]), tensor([[2., 0.],
                [0., 0.]]))
    """

    radius: Annotated[float, Gt(0)]
    tolerance: Annotated[float, Gt(0)] = 1e-6
    iterations: Annotated[int, Ge(1)] = 1000

    matrix: ClassVar[bool] = True

    def lmo(self, g: Tensor, batch: int = 0, warm: Tensor | None = None) -> LowRank:
        self._flat(g, batch)
        if warm is not None and warm.shape != (want := (*g.shape[:batch], g.shape[-1])):
            raise ConfigError(
                f"warm has shape {tuple(warm.shape)}; a right vector for g has shape {tuple(want)}"
            )
        u, v = top_pair(g, warm, self.tolerance, self.iterations)
        return LowRank(u.unsqueeze(-1) * -self.radius, v.unsqueeze(-1))

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        matrix, not_finite = self._matrix(x, shape)
        left, s, right = torch.linalg.svd(matrix, full_matrices=False)
        shrunk = (left * simplex(s, self.radius).unsqueeze(-2)) @ right
        # Inside the ball x itself, without the rounding of the factors.
        result = torch.where((s.sum(-1) <= self.radius)[..., None, None], matrix, shrunk)
        return torch.where(not_finite[..., None, None], torch.nan, result)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        matrix, not_finite = self._matrix(x.double(), shape)
        within = torch.linalg.svdvals(matrix).sum(-1) <= self.radius * (1 + tolerance)
        return within & ~not_finite

    @staticmethod
    def _matrix(x: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """The matrices, zero where not finite (LAPACK refuses them), and which these are."""
        not_finite = ~x.abs().amax(-1).isfinite()
        matrix = torch.where(not_finite.unsqueeze(-1), 0, x).reshape(*x.shape[:-1], *shape)
        return matrix, not_finite

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        return self.radius * (math.sqrt(math.prod(shape)) if norm == "l1" else 1.0)


@dataclass(frozen=True)
class Birkhoff(Domain):
    """The Birkhoff polytope, {X >= 0 : all row and column sums are 1}.

    It is the convex hull of the n x n permutation matrices. The extreme point is the assignment of
    least cost g (SciPy), n entries of value 1; of several, SciPy's choice, which is deterministic.
    The projection has row and column sums within 1e-12 of 1 (and rounding), and is the exact
    projection onto matrices with those sums. At g = 0: the identity.

    Example:
        >>> fd.Birkhoff().lmo(torch.tensor([[4.0, 1.0], [2.0, 3.0]])).dense()
        tensor([[0., 1.],
                [1., 0.]])
    """

    matrix: ClassVar[bool] = True

    def check(self, shape: Shape) -> None:
        super().check(shape)
        if shape[0] != shape[1]:
            raise ConfigError(f"Birkhoff needs a square matrix, not one of shape {tuple(shape)}")

    def lmo(self, g: Tensor, batch: int = 0) -> Sparse:
        self._flat(g, batch)
        n = g.shape[-1]
        columns, finite = assignment(g)
        values = torch.where(finite.unsqueeze(-1), 1.0, torch.nan).to(g.dtype).expand(columns.shape)
        return Sparse(torch.arange(n) * n + columns, values, (n, n))

    def start(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        self.check(shape)
        return torch.full(tuple(shape), 1 / shape[0], dtype=dtype)

    def diameter_of(self, shape: Shape) -> float:
        self.check(shape)
        return math.sqrt(2 * shape[0]) if shape[0] > 1 else 0.0

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        self.check(shape)
        one = torch.ones((), dtype=torch.float64)
        return (torch.zeros_like(one) if shape[0] > 1 else one), one

    def _project(self, x: Tensor, shape: Shape) -> Tensor:
        return doubly_stochastic(x.reshape(*x.shape[:-1], *shape), 1e-12)

    def _contains(self, x: Tensor, shape: Shape, tolerance: float) -> Tensor:
        x = x.reshape(*x.shape[:-1], *shape).double()
        off = torch.cat((x.sum(-1), x.sum(-2)), -1) - 1
        return (x.amin((-1, -2)) >= -tolerance) & (off.abs().amax(-1) <= tolerance)

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        return math.sqrt(shape[0]) if norm == "l2" else float(shape[0])


@batched
def assignment(cost: Tensor, shared: None = None) -> tuple[Tensor, Tensor]:
    """Of each n x n matrix, each row's column at least total cost; whether costs are finite."""
    from scipy.optimize import linear_sum_assignment

    finite = cost.isfinite().all(-1).all(-1)
    rows = torch.where(finite[..., None, None], cost, 0).double().reshape(-1, *cost.shape[-2:])
    columns = [linear_sum_assignment(c)[1] for c in rows.numpy()]
    stacked = np.stack(columns) if columns else np.empty((0, cost.shape[-1]), np.int64)
    return torch.from_numpy(stacked.astype(np.int64)).reshape(cost.shape[:-1]), finite


@batched
def doubly_stochastic(x: Tensor, tolerance: float) -> Tensor:
    """The projection of float64 n x n matrices onto {X >= 0, row and column sums 1}.

    By Newton's method on the dual.

    The projection is X = max(x + a 1^T + 1 b^T, 0) with the (a, b) that minimize |X|^2 / 2 - sum(a)
    - sum(b), whose gradient is the row and column sums minus 1. A (generalized) second derivative
    is [[diag(M 1), M], [M^T, diag(M^T 1)]], M the support of X (Li, Sun and Toh, SIAM J. Optim.
    2020). Any X of this form is the projection onto matrices of *its* row and column sums; it stops
    when these are within `tolerance` of 1, or within rounding of x if that is more.
    """
    n, shape = x.shape[-1], x.shape
    x = x.reshape(-1, n, n)
    bad = ~x.abs().amax((-2, -1), keepdim=True).isfinite()
    x = torch.where(bad, 0, x)
    # constants along rows and columns do not change the projection
    x = x - x.mean(-1, keepdim=True)
    x = x - x.mean(-2, keepdim=True)
    spread = 1 + x.abs().amax((-1, -2))
    enough = tolerance + 8 * n * torch.finfo(x.dtype).eps * spread
    dual = x.new_zeros(len(x), 2 * n)
    ridge = torch.eye(2 * n, dtype=x.dtype, device=x.device)

    def point(dual: Tensor) -> Tensor:
        return (x + dual[:, :n, None] + dual[:, None, n:]).clamp(min=0)

    def value(dual: Tensor) -> Tensor:
        return point(dual).square().sum((-1, -2)) / 2 - dual.sum(-1)

    for _ in range(_NEWTON):
        # A row without support has no slope that Newton's method could use. Lifting its largest
        # entry to 1 / n lowers the dual, as its sum stays at most 1.
        a, b = dual[:, :n], dual[:, n:]
        a = torch.maximum(a, 1 / n - (x + b.unsqueeze(-2)).amax(-1))
        b = torch.maximum(b, 1 / n - (x + a.unsqueeze(-1)).amax(-2))
        dual = torch.cat((a, b), -1)
        now, height = point(dual), value(dual)
        gradient = torch.cat((now.sum(-1), now.sum(-2)), -1) - 1
        violation = gradient.abs().amax(-1)
        done = violation <= enough
        if done.all():
            break
        support = (now > 0).to(x.dtype)
        rows, columns = torch.diag_embed(support.sum(-1)), torch.diag_embed(support.sum(-2))
        upper, lower = torch.cat((rows, support), -1), torch.cat((support.mT, columns), -1)
        second = torch.cat((upper, lower), -2)
        # The dual is flat along (a + c, b - c), and where the support falls apart. A ridge makes
        # the system regular; it vanishes with the violation, and lets moves along flat directions
        # be as long as the spread of x.
        second = second + (0.1 * violation / spread).clamp(1e-12, 0.1)[:, None, None] * ridge
        move = -torch.linalg.solve(second, gradient)
        slope, step = (move * gradient).sum(-1), torch.where(done, 0.0, torch.ones_like(height))
        for _ in range(50):
            reached = value(dual + step[:, None] * move)
            good = done | (reached <= height + 1e-4 * step * slope + 1e-15 * dual.abs().sum(-1))
            if good.all():
                break
            step = torch.where(good, step, step / 2)
        dual = dual + step[:, None] * move
    return torch.where(bad, torch.nan, point(dual)).reshape(shape)


def top_pair(
    a: Tensor, warm: Tensor | None, tolerance: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """Unit vectors u, v with u^T a v the largest singular value; v = 0 where a = 0, NaN as in a.

    Matrices with a side of at most `GRAM` are solved by the spectrum of their Gram matrix, to
    rounding. Others by Lanczos bidiagonalization (Golub and Kahan 1965) with full orthogonalization
    and restarts, until |a^T u - s v| <= tolerance s, s = u^T a v, or for `iterations` steps of two
    products with a each.
    """
    args = {"a": a} if warm is None else {"a": a, "warm": warm}
    return _top_pair(args, (tolerance, iterations))


def _rows(v: Tensor, a: Tensor) -> Tensor:
    """v^T a for each matrix.

    As a row times a matrix, of either layout, it is several times faster than a^T v.
    """
    return torch.bmm(v.unsqueeze(-2), a).squeeze(-2)


@batched
def _top_pair(args: dict[str, Tensor], shared: tuple[float, int]) -> tuple[Tensor, Tensor]:
    a = args["a"]
    lead, (m, n) = a.shape[:-2], a.shape[-2:]
    a = a.reshape(-1, m, n)
    most = a.abs().amax((-2, -1), keepdim=True)
    bad = ~most.isfinite()
    # over its largest magnitude, so that squares do not overflow; LAPACK refuses NaN and infinity
    a = a / torch.where((most > 0) & ~bad, most, 1)
    a = torch.where(bad, 0, a) if bad.any() else a
    if m <= min(n, GRAM):
        u = torch.linalg.eigh(torch.bmm(a, a.mT).double()).eigenvectors[..., -1].to(a.dtype)
        v = unit(_rows(u, a))
    else:
        if n <= GRAM:
            v = torch.linalg.eigh(torch.bmm(a.mT, a).double()).eigenvectors[..., -1].to(a.dtype)
        else:
            v = unit(random.normal(random.key(0), n, dtype=a.dtype)).expand(len(a), n)
            if "warm" in args:
                # never the given vector alone: Lanczos cannot leave a singular vector
                v = unit(unit(args["warm"].reshape(-1, n).to(a.dtype)) + 0.1 * v)
            v = _lanczos(a, v, *shared)
        u = unit(_rows(v, a.mT))
        v = unit(_rows(u, a))
    u = torch.where(bad.squeeze(-1), torch.nan, u)
    return u.reshape(*lead, m), v.reshape(*lead, n)


def _lanczos(a: Tensor, v: Tensor, tolerance: float, iterations: int) -> Tensor:
    """The right vector of the top singular pair of matrices [b, m, n], from unit vectors v.

    Their largest entry is 1 (or 0).

    A matrix that is done keeps its answer, so that no answer depends on the others in the batch.
    """
    b, m, n = a.shape
    answer, done = v, torch.zeros(b, dtype=torch.bool, device=a.device)
    left, right = a.new_zeros(b, _STEPS, m), a.new_zeros(b, _STEPS + 1, n)
    while iterations > 0 and not done.all():
        right[:, 0] = answer
        bidiagonal = torch.zeros(b, _STEPS, _STEPS + 1, dtype=torch.float64, device=a.device)
        steps = min(_STEPS, iterations)
        for j in range(steps):
            u = _rows(right[:, j], a.mT)
            bidiagonal[:, j, j] = _orthogonal(u, left[:, :j])
            left[:, j] = u
            w = _rows(u, a)
            bidiagonal[:, j, j + 1] = _orthogonal(w, right[:, : j + 1])
            right[:, j + 1] = w
            if (j + 1) % _CHECK and j + 1 < steps:
                continue
            p, s, q = torch.linalg.svd(bidiagonal[:, : j + 1, : j + 1])
            new = _rows(q[:, 0].to(a.dtype), right[:, : j + 1])
            answer = torch.where(done[:, None], answer, new)
            # |a^T u - s v| for the best u and v here, from the last entry of u's coordinates
            done = done | (bidiagonal[:, j, j + 1] * p[:, j, 0].abs() <= tolerance * s[:, 0])
            if done.all():
                break
        answer = unit(answer)
        iterations -= steps
    return answer


def _orthogonal(x: Tensor, basis: Tensor) -> Tensor:
    """Make x [b, n] orthogonal to the rows of basis [b, j, n] and of length 1, in place.

    Returns its length before the last step.

    Zero stays zero: the subspace is complete. A remainder of x that is only rounding error is as
    good as any other new direction.
    """
    for _ in range(2):
        x -= _rows(_rows(x, basis.mT), basis)
    norm = torch.linalg.vector_norm(x, dim=-1)
    x *= torch.where(norm > 0, 1 / norm, 0).unsqueeze(-1)
    return norm.double()
