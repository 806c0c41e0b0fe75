"""Least squares from sums of products, within a ball."""

from __future__ import annotations

import torch
from torch import Tensor


def least_squares(a: Tensor, c: Tensor, radius: float | None = None) -> Tensor:
    """argmin of tr(w^T a w - 2 w^T c) over |w| <= radius.

    a (..., d, d) is positive semi-definite, and c (..., d, m) in its range. The shortest of the
    minima; directions whose eigenvalue is below 1e-14 d of the largest count as zero, so features
    should be of similar scale. On the sphere w = (a + mu I)^-1 c, where |w| falls in mu: the root
    of |w| = radius is bracketed by 0 and |c| / radius.
    """
    values, vectors = torch.linalg.eigh(a)
    turned = vectors.mT @ c
    values = values.clamp(min=0).unsqueeze(-1)
    # Rounding leaves tiny eigenvalues where there are none; what c has there is rounding too.
    gone = (
        values
        <= 100 * a.shape[-1] * torch.finfo(a.dtype).eps * values.amax(-2, keepdim=True) + 1e-300
    )
    turned = torch.where(gone, 0, turned)
    values = torch.where(gone, 1, values)
    w = turned / values
    if radius is not None:
        out = torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True) > radius
        if bool(out.any()):
            low = torch.zeros_like(out, dtype=a.dtype)
            high = torch.linalg.vector_norm(turned, dim=(-2, -1), keepdim=True) / radius
            for _ in range(100):
                mu = (low + high) / 2
                far = (
                    torch.linalg.vector_norm(turned / (values + mu), dim=(-2, -1), keepdim=True)
                    > radius
                )
                low, high = torch.where(far, mu, low), torch.where(far, high, mu)
            w = torch.where(out, turned / (values + high), w)
    return vectors @ w
