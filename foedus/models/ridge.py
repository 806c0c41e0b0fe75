"""Ridge regression at a client: its own normal equations, factorised once, on the smaller of their two sides.

With Phi the client's features divided by sqrt(n) (n rows, M features) and Y its targets divided likewise,

    H = Phi^T Phi + reg I,    b = Phi^T Y,    primal:  H = L L^T,  (M x M)
                                              dual:    K = Phi Phi^T + reg I = L L^T,  (n x n)
                                                       H^-1 v = (v - Phi^T K^-1 Phi v) / reg

A client with fewer rows than features works in the dual, and no M x M matrix is ever formed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from foedus.core.batching import batched
from foedus.core.rows import Rows, take
from foedus.errors import ConfigError
from foedus.models.features import FeatureMap
from foedus.models.losses import Squared

Ridge = dict[str, Tensor]
"""A factorised client: `factor` is L, `right` is b, `local` is H^-1 b; and `hessian` (primal) or `phi` (dual)."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}

_BLOCK_BYTES = 1 << 26
"""Features are made in blocks of about this size: a client's features as a whole are kept only where the dual needs them."""

_REFINEMENTS = 2
"""Steps of iterative refinement of a solution in single precision, with residuals in double precision."""


def prepare_ridge(features: FeatureMap, reg: float, dtype: torch.dtype, data: Rows) -> Ridge:
    """Line 1 and 2 of FedNewton's Algorithm 1: make and factorise a client's system, and solve it."""
    args = {"index": data.index, "weight": data.weight}
    return _prepare(args, (features, reg, dtype, data.table_x, data.table_y, data.spec.outputs))


def ridge_bytes(rows: int, size: int, dtype: torch.dtype) -> int:
    """Memory that a client takes, roughly, while it is prepared and afterwards."""
    numbers = 3 * size * size if rows >= size else 2 * rows * (size + rows)
    return numbers * dtype.itemsize


def product(ridge: Ridge, reg: float, v: Tensor) -> Tensor:
    """H v, added up in double precision."""
    if "hessian" in ridge:
        return (ridge["hessian"].double() @ v.double()).to(v.dtype)
    phi, x = ridge["phi"].double(), v.double()
    return (phi.mT @ (phi @ x) + reg * x).to(v.dtype)


def solve(ridge: Ridge, reg: float, v: Tensor) -> Tensor:
    """H^-1 v; in single precision, refined."""
    factor = ridge["factor"]
    if "hessian" in ridge:
        return _refined(v, lambda v: _back(factor, v), lambda x: product(ridge, reg, x))
    phi = ridge["phi"]
    return _refined(v, lambda v: (v - phi.mT @ _back(factor, phi @ v)) / reg, lambda x: product(ridge, reg, x))


def _refined(v: Tensor, roughly: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`roughly(v)`; in single precision improved by what is left of v, v - back(x) in double precision."""
    x = roughly(v)
    if v.dtype != torch.float64:
        for _ in range(_REFINEMENTS):
            x = x + roughly((v.double() - back(x.double())).to(v.dtype))
    return x


def _back(factor: Tensor, v: Tensor) -> Tensor:
    """(L L^T)^-1 v."""
    half = torch.linalg.solve_triangular(factor, v, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


@batched
def _prepare(args: dict[str, Tensor], shared: tuple) -> Ridge:
    features, reg, dtype, table_x, table_y, outputs = shared
    index, weight = args["index"], args["weight"]
    clients, n = index.shape
    size = features(table_x[:1], dtype).shape[1]
    if n >= size:
        hessian = torch.zeros(clients, size, size, dtype=dtype)
        right = torch.zeros(clients, size, outputs, dtype=dtype)
        for some, phi, y in _blocks(features, dtype, table_x, table_y, index, weight, size, outputs):
            add_gram(hessian[some], phi)
            right[some] += phi.mT @ y
        mirror(hessian)
        hessian.diagonal(dim1=-2, dim2=-1).add_(reg)
        ridge = {"hessian": hessian, "factor": cholesky(hessian, reg, n, dtype), "right": right}
        return {**ridge, "local": solve(ridge, reg, right)}
    phi, y = _weighted(features, dtype, table_x, table_y, index, weight, weight.sum(1), outputs)
    kernel = phi @ phi.mT
    kernel.diagonal(dim1=-2, dim2=-1).add_(reg)
    ridge = {"phi": phi, "factor": cholesky(kernel, reg, n, dtype), "right": phi.mT @ y}
    # Phi^T K^-1 Y is the same as H^-1 b, without the cancellation of the general formula.
    wide = phi.double()
    inside = _refined(y, lambda v: _back(ridge["factor"], v), lambda a: wide @ (wide.mT @ a) + reg * a)
    return {**ridge, "local": phi.mT @ inside}


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
    """The clients' features and targets: many small clients at once, or a large one in blocks of its real rows."""
    clients, n = index.shape
    count = weight.sum(1)
    at_once = max(1, _BLOCK_BYTES // (n * size * dtype.itemsize))
    if at_once > 1:
        for first in range(0, clients, at_once):
            some = slice(first, first + at_once)
            yield some, *_weighted(features, dtype, table_x, table_y, index[some], weight[some], count[some], outputs)
        return
    rows = max(size, _BLOCK_BYTES // (size * dtype.itemsize))
    for c in range(clients):
        some = slice(c, c + 1)
        real = int(weight[c].nonzero().max()) + 1
        for first in range(0, real, rows):
            part = slice(first, min(first + rows, real))
            yield (
                some,
                *_weighted(features, dtype, table_x, table_y, index[some, part], weight[some, part], count[some], outputs),
            )


def _weighted(
    features: FeatureMap,
    dtype: torch.dtype,
    table_x: Tensor,
    table_y: Tensor,
    index: Tensor,
    weight: Tensor,
    count: Tensor,
    outputs: int,
) -> tuple[Tensor, Tensor]:
    """Features (c, n, M) and targets (c, n, k) of clients' rows, times the root of weight / count."""
    root = (weight.to(dtype) / count.to(dtype).unsqueeze(1)).sqrt().unsqueeze(-1)
    phi = features(take(table_x, index.flatten()), dtype).view(*index.shape, -1)
    return phi.mul_(root) if phi.data_ptr() != table_x.data_ptr() else phi * root, targets(
        take(table_y, index), outputs, dtype
    ) * root


def targets(y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    """Targets (.., n, k): labels one against all, as 0 and 1; values as they are."""
    return Squared().target(torch.empty(*y.shape[:2], outputs, dtype=dtype), y).to(dtype)


def add_gram(total: Tensor, phi: Tensor) -> None:
    """total += Phi^T Phi, in blocks on and below the diagonal (`mirror` fills in the rest): 5/8 of the products."""
    for first, stop in _panels(phi.shape[-1]):
        total[:, first:stop, :stop].baddbmm_(phi[..., first:stop].mT, phi[..., :stop])


def mirror(total: Tensor) -> None:
    """Copy the blocks below the diagonal of each matrix to above it."""
    for first, stop in _panels(total.shape[-1]):
        total[:, :first, first:stop] = total[:, first:stop, :first].mT


def _panels(size: int) -> list[tuple[int, int]]:
    width = -(-size // 4) if size >= 512 else size
    return [(first, min(first + width, size)) for first in range(0, size, width)]


def cholesky(matrix: Tensor, reg: float, rows: int, dtype: torch.dtype) -> Tensor:
    """Factors of a batch of systems; one that is singular in this precision is an error that says what to do."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        name = str(dtype).removeprefix("torch.")
        remedy = "raise reg" if dtype == torch.float64 else "raise reg, or use dtype='float64'"
        raise ConfigError(
            f"reg={reg!r} is too small: the local system of {int((info > 0).sum())} client(s) of up to {rows} rows is singular "
            f"in {name}; {remedy}"
        )
    return factor
