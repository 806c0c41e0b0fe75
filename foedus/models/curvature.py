"""Linear models on features under any convex loss: gradient, Newton direction and line search.

    F_j(w)   = sum_i s_i loss(phi_i^T w, y_i) + reg/2 |w|^2,
    H_j(w) v = Phi^T (s * bend(Phi w, y, Phi v)) + reg v

with s_i = 1 / n_j for the client's rows (times their weights, where they have some) and 0 for
padding. The Hessian is formed and factorized
while it is small; beyond that, conjugate gradients solve with it without ever forming it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foedus.base.batching import batched
from foedus.base.rows import Rows, shares, take
from foedus.errors import ConfigError, shown, unknown
from foedus.models.features import FeatureMap
from foedus.models.least_squares import back_product, cholesky
from foedus.models.losses import LOSSES, Loss, check_loss

DIRECT = 512
"""Local systems of up to this number of unknowns, and no more than rows, are factorized."""

_CLOSE = 1e-12
"""Conjugate gradients stop when the residual is this fraction of the right-hand side."""


def check(loss: Any) -> None:
    """Raise for a loss whose second derivative is not known (`Loss.bend`)."""
    found = LOSSES.get(loss) if isinstance(loss, str) else loss
    if _known(found):
        return
    names = [name for name, loss in LOSSES.items() if _known(loss)]
    if found is None:
        raise ConfigError(unknown("loss", loss, names))
    check_loss(loss)
    raise ConfigError(
        f"loss={shown(loss)}: its second derivative is not known, which Newton's method needs; use "
        f"{', '.join(map(repr, names))} or fd.losses.WeightedCrossEntropy(weights), or fd.FedAvg, "
        "which takes any loss"
    )


def _known(loss: Any) -> bool:
    return isinstance(loss, Loss) and type(loss).bend is not Loss.bend


def prepare(features: FeatureMap, dtype: torch.dtype, data: Rows) -> dict[str, Tensor]:
    """A client's features, targets and row shares s."""
    args = data.counted
    return _prepare(args, (features, dtype, data.table_x, data.table_y))


@batched
def _prepare(args: dict[str, Tensor], shared: tuple) -> dict[str, Tensor]:
    features, dtype, table_x, table_y = shared
    index = args["index"]
    phi = features(take(table_x, index.flatten()), dtype).view(*index.shape, -1)
    y = take(table_y, index)
    y = y.to(dtype) if y.is_floating_point() else y
    wide = {k: v.to(dtype) for k, v in args.items() if k != "index"}
    return {"phi": phi, "y": y, "share": shares(wide)}


def gradient(prepared: dict[str, Tensor], loss: Loss, reg: float, w: Tensor) -> Tensor:
    """g_j(w)."""
    return _gradient({**prepared, "w": w}, (loss, reg))


@batched
def _gradient(args: dict[str, Tensor], shared: tuple) -> Tensor:
    loss, reg = shared
    slope = loss.slope(args["phi"] @ args["w"], args["y"], args["share"])
    return back_product(args["phi"], slope) + reg * args["w"]


def solve(
    prepared: dict[str, Tensor], loss: Loss, reg: float, w: Tensor, g: Tensor, inner: int
) -> Tensor:
    """H_j(w)^-1 g: exactly, or by `inner` steps of conjugate gradients."""
    return _solve({**prepared, "w": w, "g": g}, (loss, reg, inner))


@batched
def _solve(args: dict[str, Tensor], shared: tuple) -> Tensor:
    loss, reg, inner = shared
    phi, y, g = args["phi"], args["y"], args["g"]
    share, outputs = args["share"].unsqueeze(-1), phi @ args["w"]
    size, k = g.shape[1:]
    rows = phi.shape[1]
    if loss.separable and size <= min(DIRECT, rows):
        bend = share * loss.bend(outputs, y, torch.ones_like(outputs))
        columns = zip(bend.split(1, -1), g.split(1, -1), strict=True)
        solved = [_factorised((phi * b).mT @ phi, reg, rows, right) for b, right in columns]
        return torch.cat(solved, -1)
    if size * k <= min(DIRECT, rows * k):
        basis = torch.eye(k, dtype=g.dtype)
        bend = torch.stack([share * loss.bend(outputs, y, e.expand_as(outputs)) for e in basis], -2)
        blocks = torch.einsum("cnab,cnm,cnl->cambl", bend, phi, phi)
        hessian = blocks.reshape(len(g), k * size, k * size)
        return _factorised(hessian, reg, rows, g.mT.reshape(len(g), -1, 1)).view(len(g), k, size).mT

    def apply(v: Tensor) -> Tensor:
        return back_product(phi, share * loss.bend(outputs, y, phi @ v)) + reg * v

    return conjugate_gradients(apply, g, inner, (-2,) if loss.separable else (-2, -1))


def _factorised(hessian: Tensor, reg: float, rows: int, g: Tensor) -> Tensor:
    hessian.diagonal(dim1=-2, dim2=-1).add_(reg)
    return torch.cholesky_solve(g, cholesky(hessian, reg, rows, hessian.dtype))


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right: Tensor, steps: int, over: tuple[int, ...]
) -> Tensor:
    """Up to `steps` steps on apply(x) = right from 0.

    Sums run over the dimensions `over`; the others index separate systems.
    """

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(over, keepdim=True)

    x, r, p = torch.zeros_like(right), right.clone(), right.clone()
    rr = dot(r, r)
    close = _CLOSE**2 * rr
    for _ in range(steps):
        going = rr > close
        if not bool(going.any()):
            break
        q = apply(p)
        alpha = torch.where(going, rr / dot(p, q), 0)
        x += alpha * p
        r -= alpha * q
        new = dot(r, r)
        p = r + torch.where(going, new / rr, 0) * p
        rr = new
    return x


def along(
    prepared: dict[str, Tensor],
    loss: Loss,
    reg: float,
    w: Tensor,
    d: Tensor,
    steps: Sequence[float],
) -> Tensor:
    """F_j(w - s d) for every step size s."""
    return _along({**prepared, "w": w, "d": d}, (loss, reg, steps))


@batched
def _along(args: dict[str, Tensor], shared: tuple) -> Tensor:
    loss, reg, steps = shared
    w, d, y, share = args["w"], args["d"], args["y"], args["share"]
    here, there = args["phi"] @ w, args["phi"] @ d
    values = [
        (share * loss.value(here - s * there, y)).sum(-1)
        + 0.5 * reg * (w - s * d).square().sum((-2, -1))
        for s in steps
    ]
    return torch.stack(values, -1)
