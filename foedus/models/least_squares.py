"""Ridge regression at a client: its own normal equations, factorised once, on the smaller of their
two sides.

With Phi the client's features divided by sqrt(n) (n rows, M features) and Y its targets divided
likewise,

    H = Phi^T Phi + reg I,    b = Phi^T Y,    primal:  H = L L^T,  (M x M)
                                              dual:    K = Phi Phi^T + reg I = L L^T,  (n x n)
                                                       H^-1 v = (v - Phi^T K^-1 Phi v) / reg

A client with fewer rows than features works in the dual, and no M x M matrix is ever formed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from foedus.base.batching import batched
from foedus.base.rows import Rows, take
from foedus.errors import ConfigError, ModelError
from foedus.models.features import FeatureMap
from foedus.models.losses import Squared

Ridge = dict[str, Tensor]
"""A factorised client: `factor` is L, `right` is b, `local` is H^-1 b; and `hessian` (primal) or
`phi` (dual).
"""

DTYPES = {"float64": torch.float64, "float32": torch.float32}

_BLOCK_BYTES = 1 << 26
"""Features are made in blocks of about this size: a client's features as a whole are kept only
where the dual needs them.
"""

_REFINEMENTS = 3
"""Steps of iterative refinement where the factor is in single precision, with residuals in double
precision.
"""

_WIDE_ROWS = 256
"""Rows of a matrix in single precision that are converted at a time."""


def prepare_ridge(
    features: FeatureMap, reg: float, dtype: torch.dtype, data: Rows, pull: float = 0.0
) -> Ridge:
    """Line 1 and 2 of FedNewton's Algorithm 1: make and factorise a client's system, and solve it.

    With a `pull`, what is kept is the system of reg + pull; `local` is the solution with reg alone.
    """
    args = {"index": data.index, "weight": data.weight}
    return _prepare(
        args, (features, reg, pull, dtype, data.table_x, data.table_y, data.spec.outputs)
    )


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
    inside = _refined(_wide(phi, wide), factor, lambda a: _wide(phi, _wide_back(phi, a)) + reg * a)
    return ((wide - _wide_back(phi, inside)) / reg).to(v.dtype)


def _refined(v: Tensor, factor: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
    """(L L^T)^-1 v, all in double precision but for L: where L is not, improved by what is left of
    v, v - back(x).
    """
    x = _back(factor, v.to(factor.dtype)).double()
    if factor.dtype != torch.float64:
        for _ in range(_REFINEMENTS):
            x = x + _back(factor, (v - back(x)).to(factor.dtype)).double()
    return x


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
    """Phi^T v for few columns, with Phi read by rows as it is stored: several times faster than by
    columns.
    """
    return (v.mT @ phi).mT


def _back(factor: Tensor, v: Tensor) -> Tensor:
    """(L L^T)^-1 v."""
    half = torch.linalg.solve_triangular(factor, v, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


@batched
def _prepare(args: dict[str, Tensor], shared: tuple) -> Ridge:
    features, reg, pull, dtype, table_x, table_y, outputs = shared
    index, weight = args["index"], args["weight"]
    clients, n = index.shape
    size = features(table_x[:1].cpu(), dtype).shape[1]
    count = weight.sum(1).to(dtype).view(-1, 1, 1)
    if n >= size:
        hessian = torch.zeros(clients, size, size, dtype=dtype)
        right = torch.zeros(clients, size, outputs, dtype=dtype)
        for some, phi, y in _blocks(
            features, dtype, table_x, table_y, index, weight, size, outputs
        ):
            add_gram(hessian[some], phi)
            right[some] += back_product(phi, y)
        mirror(hessian)
        matrix = hessian.div_(count)
        ridge = {"hessian": hessian, "right": right.div_(count)}
    else:
        phi, y = (
            t.mul_(count.rsqrt())
            for t in _rows(features, dtype, table_x, table_y, index, weight, outputs)
        )
        matrix = phi @ phi.mT
        ridge = {"phi": phi, "right": back_product(phi, y)}
    matrix.diagonal(dim1=-2, dim2=-1).add_(reg)
    ridge["factor"] = cholesky(matrix, reg, n, dtype)
    if "phi" in ridge:
        # Phi^T K^-1 Y is the same as H^-1 b, without the cancellation of the general formula.
        inside = _refined(
            y.double(), ridge["factor"], lambda a: _wide(phi, _wide_back(phi, a)) + reg * a
        )
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
    """Refuse what single precision cannot solve: reg lost beside the features, or a refinement that
    did not converge.
    """
    x, right = ridge["local"].double(), ridge["right"].double()
    if "hessian" in ridge:
        again, trace = (
            _wide(ridge["hessian"], x),
            ridge["hessian"].diagonal(dim1=-2, dim2=-1).sum(-1),
        )
    else:
        again, trace = (
            _wide_back(ridge["phi"], _wide(ridge["phi"], x)) + reg * x,
            ridge["phi"].square().sum((-2, -1)),
        )
    wrong = (again - right).norm(dim=(-2, -1)) > 1e-3 * right.norm(dim=(-2, -1))
    wrong |= reg < torch.finfo(torch.float32).eps * trace
    if bool(wrong.any()):
        raise _singular(reg, int(wrong.sum()), rows, torch.float32)


def _blocks(
    features: FeatureMap,
    dtype: torch.dtype,
    table_x: Tensor,
    table_y: Tensor,
    index: Tensor,
    weight: Tensor,
    size: int,
    outputs: int,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The clients' features and targets: many small clients at once, or a large one in blocks of
    its real rows.
    """
    clients, n = index.shape
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
        yield (
            some,
            *_rows(
                features,
                dtype,
                table_x,
                table_y,
                index[some, part],
                weight[some, part],
                outputs,
                room,
            ),
        )


def _rows(
    features: FeatureMap,
    dtype: torch.dtype,
    table_x: Tensor,
    table_y: Tensor,
    index: Tensor,
    weight: Tensor,
    outputs: int,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Features (c, n, M) and targets (c, n, k) of clients' rows, 0 where there is only padding."""
    out = None if room is None else room[: index.numel()]
    phi = features(take(table_x, index.flatten()), dtype, out).view(*index.shape, -1)
    y = targets(take(table_y, index), outputs, dtype)
    if not bool((weight == 1).all()):
        root = weight.to(dtype).sqrt().unsqueeze(-1)
        phi, y = phi.mul_(root), y * root
    return phi, y


def targets(y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    """Targets (.., n, k): labels one against all, as 0 and 1; values as they are."""
    return Squared().target(torch.empty(*y.shape[:2], outputs, dtype=dtype), y).to(dtype)


def add_gram(total: Tensor, phi: Tensor) -> None:
    """total += Phi^T Phi, in blocks on and below the diagonal (`mirror` fills in the rest): not
    much more than half the products.
    """
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
    """Factors of a batch of systems; one that is singular in this precision is an error that says
    what to do.
    """
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
