"""Labels for each step of a sequence, (n, t): which steps count, and means over those that do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""The label of a step that does not count, such as padding: PyTorch's `ignore_index`."""


def mean_over_steps(values: Tensor, y: Tensor) -> Tensor:
    """Means (..., n) of numbers (..., n, t) over the steps that have a label; 0 where none has."""
    real = y != IGNORED
    total = torch.where(real, values, values.new_zeros(())).sum(-1)
    return total / real.sum(-1).clamp(min=1)


def labels_of(y: np.ndarray) -> np.ndarray:
    """All labels, one after the other, without those of steps that do not count."""
    return y if y.ndim == 1 else y[y != IGNORED]
