"""Lipschitz constants of labels, and their extension to all points."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from foedus.base.settings import check_value


def lipschitz_constant(x: Tensor, y: Tensor) -> float:
    """The largest slope between two rows: the least L for which (13) goes through the data."""
    rows, target = x.flatten(1).double(), y.double().reshape(len(x), -1)
    # By differences: by products, as is the default for more than 25 rows, neighbors far from 0
    # lose all digits of their distance.
    mode = "donot_use_mm_for_euclid_dist"
    apart, rise = (torch.cdist(v, v, compute_mode=mode) for v in (rows, target))
    slopes = torch.where(apart > 0, rise / apart.clamp(min=1e-30), 0)
    return float(slopes.max()) if len(slopes) else 0.0


def lipschitz_extension(points: Tensor, y: Tensor, constant: float, x: Tensor) -> Tensor:
    """u(x) = min_j (y_j + L |x - x_j|), equation (13): L-Lipschitz, through the data."""
    check_value("constant", constant, Annotated[float, Gt(0)])
    apart = torch.linalg.vector_norm(x.flatten(1).unsqueeze(1) - points.flatten(1), dim=-1)
    return (y.reshape(1, len(points), -1) + constant * apart.unsqueeze(-1)).amin(1)
