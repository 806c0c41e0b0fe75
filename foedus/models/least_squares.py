"""Ridge regression at a client: its normal equations, factorized once, on their smaller side.

With Phi the client's features divided by sqrt(n) (n rows, M features; times the roots of the rows'
weights, where they have some) and Y its targets likewise,

    H = Phi^T Phi + reg I,    b = Phi^T Y,    primal:  H = L L^T,  (M x M)
                                              dual:    K = Phi Phi^T + reg I = L L^T,  (n x n)
                                                       H^-1 v = (v - Phi^T K^-1 Phi v) / reg

A client with fewer rows than features works in the dual, and no M x M matrix is ever formed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from foedus.base.batching import batched
from foedus.base.rows import Rows, take
from foedus.errors import ConfigError, ModelError
from foedus.models.features import FeatureMap
from foedus.models.losses import Squared

Ridge = dict[str, Tensor]
"""A client: `factor` L, `right` b, `local` H^-1 b; and `hessian` (primal) or `phi` (dual)."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}

_BLOCK_BYTES = 1 << 26
"""Features are made in blocks of about this size; only the dual needs a client's as a whole."""

_REFINEMENTS = 3
"""Steps of iterative refinement of a factor in single precision, residuals in double."""

_WIDE_ROWS = 256
"""Rows of a matrix in single precision that are converted at a time."""


def prepare_ridge(
    features: FeatureMap, reg: float, dtype: torch.dtype, data: Rows, pull: float = 0.0
) -> Ridge:
    """Line 1 and 2 of FedNewton's Algorithm 1: make and factorize a client's system, and solve it.

    With a `pull`, the system of reg + pull is kept; `local` is the solution with reg only.
    """
    args = data.counted
    table = _Table(features, dtype, data.table_x, data.table_y, data.spec.outputs)
    return _prepare(args, (table, reg, pull))


def ridge_bytes(rows: int, size: int, dtype: torch.dtype) -> int:
    """Memory that a client takes, roughly, while it is prepared and afterwards."""
    numbers = 3 * size * size if rows >= size else 2 * rows * (size + rows)
    return numbers * dtype.itemsize


def product(ridge: Ridge, reg: float, v: Tensor) -> Tensor:
    """H v."""
    if "hessian" in ridge:
        return ridge["hessian"] @ v
    return back_product(ridge["phi"], ridge["phi"] @ v) + reg * v


def solve(ridge: Ridge, reg: float, v: Tensor) -> Tensor:
    """H^-1 v; in single precision, refined."""
    factor = ridge["factor"]
    if "hessian" in ridge:
        return _refined(v.double(), factor, lambda x: _wide(ridge["hessian"], x)).to(v.dtype)
    phi, wide = ridge["phi"], v.double()
    inside = _dual(_wide(phi, wide), factor, phi, reg)
    return ((wide - _wide_back(phi, inside)) / reg).to(v.dtype)


def _refined(v: Tensor, factor: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
    """(L L^T)^-1 v in double precision; where L is not, improved by the residual v - back(x)."""
    x = _back(factor, v.to(factor.dtype)).double()
    if factor.dtype != torch.float64:
        for _ in range(_REFINEMENTS):
            x = x + _back(factor, (v - back(x)).to(factor.dtype)).double()
    return x


def _dual(v: Tensor, factor: Tensor, phi: Tensor, reg: float) -> Tensor:
    """K^-1 v."""
    return _refined(v, factor, lambda a: _wide(phi, _wide_back(phi, a)) + reg * a)


def _wide(matrix: Tensor, v: Tensor) -> Tensor:
    """matrix @ v in double precision, without a copy of the whole matrix in it."""
    if matrix.dtype == torch.float64:
        return matrix @ v
    return torch.cat([part.double() @ v for part in matrix.split(_WIDE_ROWS, -2)], -2)


def _wide_back(phi: Tensor, v: Tensor) -> Tensor:
    """Phi^T v in double precision, likewise."""
    if phi.dtype == torch.float64:
        return back_product(phi, v)
    parts = zip(phi.split(_WIDE_ROWS, -2), v.split(_WIDE_ROWS, -2), strict=True)
    return cast("Tensor", sum(back_product(part.double(), some) for part, some in parts))


def back_product(phi: Tensor, v: Tensor) -> Tensor:
    """Phi^T v for few columns, reading Phi by rows: several times faster than by columns."""
    return (v.mT @ phi).mT


def _back(factor: Tensor, v: Tensor) -> Tensor:
    """(L L^T)^-1 v."""
    half = torch.linalg.solve_triangular(factor, v, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


@batched
def _prepare(args: dict[str, Tensor], shared: tuple) -> Ridge:
    table, reg, pull = shared
    index, dtype = args["index"], table.dtype
    weight = args["weight"] * args["worth"] if "worth" in args else args["weight"]
    clients, n = index.shape
    size = table.features(table.x[:1].cpu(), dtype).shape[1]
    count = args["weight"].sum(1).to(dtype).view(-1, 1, 1)
    if n >= size:
        hessian = torch.zeros(clients, size, size, dtype=dtype)
        right = torch.zeros(clients, size, table.outputs, dtype=dtype)
        for some, phi, y in _blocks(table, index, weight, size):
            add_gram(hessian[some], phi)
            right[some] += back_product(phi, y)
        mirror(hessian)
        matrix = hessian.div_(count)
        ridge = {"hessian": hessian, "right": right.div_(count)}
    else:
        phi, y = (t.mul_(count.rsqrt()) for t in _rows(table, index, weight))
        matrix = phi @ phi.mT
        ridge = {"phi": phi, "right": back_product(phi, y)}
    matrix.diagonal(dim1=-2, dim2=-1).add_(reg)
    ridge["factor"] = cholesky(matrix, reg, n, dtype)
    if "phi" in ridge:
        # Phi^T K^-1 Y is the same as H^-1 b, without the cancellation of the general formula.
        inside = _dual(y.double(), ridge["factor"], phi, reg)
        ridge["local"] = _wide_back(phi, inside).to(dtype)
    else:
        ridge["local"] = solve(ridge, reg, ridge["right"])
    if dtype != torch.float64:
        _check(ridge, reg, n)
    if pull:
        matrix.diagonal(dim1=-2, dim2=-1).add_(pull)
        ridge["factor"] = cholesky(matrix, reg + pull, n, dtype)
    return ridge


def _check(ridge: Ridge, reg: float, rows: int) -> None:
    """Refuse what single precision cannot solve: reg is lost, or refinement did not converge."""
    x, right = ridge["local"].double(), ridge["right"].double()
    if "hessian" in ridge:
        again = _wide(ridge["hessian"], x)
        trace = ridge["hessian"].diagonal(dim1=-2, dim2=-1).sum(-1)
    else:
        again = _wide_back(ridge["phi"], _wide(ridge["phi"], x)) + reg * x
        trace = ridge["phi"].square().sum((-2, -1))
    wrong = (again - right).norm(dim=(-2, -1)) > 1e-3 * right.norm(dim=(-2, -1))
    wrong |= reg < torch.finfo(torch.float32).eps * trace
    if bool(wrong.any()):
        raise _singular(reg, int(wrong.sum()), rows, torch.float32)


class _Table(NamedTuple):
    """All rows of a federation, and their conversion to features and targets."""

    features: FeatureMap
    dtype: torch.dtype
    x: Tensor
    y: Tensor
    outputs: int


def _blocks(
    table: _Table, index: Tensor, weight: Tensor, size: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The clients' features and targets: many small clients at once, or blocks of a large one."""
    (clients, n), dtype = index.shape, table.dtype
    at_once = max(1, _BLOCK_BYTES // (n * size * dtype.itemsize))
    if at_once > 1:
        parts = [(slice(first, first + at_once), slice(n)) for first in range(0, clients, at_once)]
    else:
        rows = max(size, _BLOCK_BYTES // (size * dtype.itemsize))
        real = [w.nonzero().flatten() for w in weight]
        parts = [(slice(c, c + 1), part) for c, own in enumerate(real) for part in own.split(rows)]
    # The same room for every block: fresh memory would have to be cleared by the system first.
    room = torch.empty(max(index[some, part].numel() for some, part in parts), size, dtype=dtype)
    for some, part in parts:
        yield some, *_rows(table, index[some, part], weight[some, part], room)


def _rows(
    table: _Table, index: Tensor, weight: Tensor, room: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Features (c, n, M) and targets (c, n, k) of clients' rows times the roots of their weights: 0
    where there is only padding.
    """
    out, dtype = None if room is None else room[: index.numel()], table.dtype
    phi = table.features(take(table.x, index.flatten()), dtype, out).view(*index.shape, -1)
    y = targets(take(table.y, index), table.outputs, dtype)
    if not bool((weight == 1).all()):
        root = weight.to(dtype).sqrt().unsqueeze(-1)
        phi, y = phi.mul_(root), y * root
    return phi, y


def targets(y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    """Targets (.., n, k): labels one against all, as 0 and 1; values as they are."""
    return Squared().target(torch.empty(*y.shape[:2], outputs, dtype=dtype), y).to(dtype)


def add_gram(total: Tensor, phi: Tensor) -> None:
    """total += Phi^T Phi, in blocks on and below the diagonal; `mirror` fills in the rest."""
    for first, stop in _panels(phi.shape[-1]):
        total[:, first:stop, :stop].baddbmm_(phi[..., first:stop].mT, phi[..., :stop])


def mirror(total: Tensor) -> None:
    """Copy the blocks below the diagonal of each matrix to above it."""
    for first, stop in _panels(total.shape[-1]):
        total[:, :first, first:stop] = total[:, first:stop, :first].mT


def _panels(size: int) -> list[tuple[int, int]]:
    width = max(200, -(-size // 10))
    return [(first, min(first + width, size)) for first in range(0, size, width)]


def cholesky(matrix: Tensor, reg: float, rows: int, dtype: torch.dtype) -> Tensor:
    """Factors of a batch of systems; one singular in this precision is an error."""
    if not bool(matrix.diagonal(dim1=-2, dim2=-1).isfinite().all()):
        raise ModelError(
            "the features of some rows are so large that their products overflow; scale the data"
        )
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        raise _singular(reg, int((info > 0).sum()), rows, dtype)
    return factor


def _singular(reg: float, clients: int, rows: int, dtype: torch.dtype) -> ConfigError:
    name = str(dtype).removeprefix("torch.")
    remedy = "raise reg" if dtype == torch.float64 else "raise reg, or use dtype='float64'"
    return ConfigError(
        f"reg={reg!r} is too small: the local system of {clients} client(s) of up to {rows} rows "
        f"is singular in {name}; {remedy}"
    )
