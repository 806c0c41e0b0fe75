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
    return (back_product(phi, phi @ x) + reg * x).to(v.dtype)


def solve(ridge: Ridge, reg: float, v: Tensor) -> Tensor:
    """H^-1 v; in single precision, refined."""
    factor = ridge["factor"]
    if "hessian" in ridge:
        return _refined(v, lambda v: _back(factor, v), lambda x: product(ridge, reg, x))
    phi = ridge["phi"]
    return _refined(v, lambda v: (v - back_product(phi, _back(factor, phi @ v))) / reg, lambda x: product(ridge, reg, x))


def _refined(v: Tensor, roughly: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`roughly(v)`; in single precision improved by what is left of v, v - back(x) in double precision."""
    x = roughly(v)
    if v.dtype != torch.float64:
        for _ in range(_REFINEMENTS):
            x = x + roughly((v.double() - back(x.double())).to(v.dtype))
    return x


def back_product(phi: Tensor, v: Tensor) -> Tensor:
    """Phi^T v for few columns, with Phi read by rows as it is stored: several times faster than by columns."""
    return (v.mT @ phi).mT


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
    count = weight.sum(1).to(dtype).view(-1, 1, 1)
    if n >= size:
        hessian = torch.zeros(clients, size, size, dtype=dtype)
        right = torch.zeros(clients, size, outputs, dtype=dtype)
        for some, phi, y in _blocks(features, dtype, table_x, table_y, index, weight, size, outputs):
            add_gram(hessian[some], phi)
            right[some] += back_product(phi, y)
        mirror(hessian)
        hessian.div_(count).diagonal(dim1=-2, dim2=-1).add_(reg)
        ridge = {"hessian": hessian, "factor": cholesky(hessian, reg, n, dtype), "right": right.div_(count)}
        return {**ridge, "local": solve(ridge, reg, right)}
    phi, y = (t.mul_(count.rsqrt()) for t in _rows(features, dtype, table_x, table_y, index, weight, outputs))
    kernel = phi @ phi.mT
    kernel.diagonal(dim1=-2, dim2=-1).add_(reg)
    ridge = {"phi": phi, "factor": cholesky(kernel, reg, n, dtype), "right": back_product(phi, y)}
    # Phi^T K^-1 Y is the same as H^-1 b, without the cancellation of the general formula.
    wide = phi.double()
    inside = _refined(y, lambda v: _back(ridge["factor"], v), lambda a: wide @ back_product(wide, a) + reg * a)
    return {**ridge, "local": back_product(phi, inside)}


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
    at_once = max(1, _BLOCK_BYTES // (n * size * dtype.itemsize))
    if at_once > 1:
        parts = [(slice(first, first + at_once), slice(n)) for first in range(0, clients, at_once)]
    else:
        rows = max(size, _BLOCK_BYTES // (size * dtype.itemsize))
        real = (weight > 0).sum(1).tolist()  # padding comes last
        parts = [
            (slice(c, c + 1), slice(first, min(first + rows, k))) for c, k in enumerate(real) for first in range(0, k, rows)
        ]
    # The same room for every block: fresh memory would have to be cleared by the system first.
    room = torch.empty(max(index[some, part].numel() for some, part in parts), size, dtype=dtype)
    for some, part in parts:
        yield some, *_rows(features, dtype, table_x, table_y, index[some, part], weight[some, part], outputs, room)


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
