"""The models, losses and data that compiled training (`foedus.kernels`) supports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foedus import kernels
from foedus.base import tree
from foedus.models.base import Model
from foedus.models.linear import Linear
from foedus.models.losses import CrossEntropy, Huber, Logistic, Loss, Squared
from foedus.models.mlp import MLP

_LARGE_STEP, _LARGE_NET = 1 << 22, 1 << 20
"""Multiplications of a step from which several threads are faster; the number of weights beyond the
cache of a core."""

LOSSES = (CrossEntropy, Squared, Logistic, Huber)
"""The losses that compiled code supports, with their numbers."""


def knows(model: Model, loss: Loss, x: Tensor, y: Tensor, args: dict[str, Any], batch: int) -> bool:
    """Whether compiled training supports these settings, and is faster.

    Each client is trained by one thread.
    """
    known = type(model) in (Linear, MLP) and type(loss) in LOSSES
    if not kernels.ready or not known or x.device.type != "cpu":
        return False
    trained = [args[k] for k in ("params", "correction") if k in args]
    numbers = [x, args["weight"], *tree.leaves(trained)]
    if any(t.dtype != torch.float32 for t in numbers):
        return False
    if any(t.requires_grad for t in (*numbers, y)) or not (x.is_contiguous() and y.is_contiguous()):
        return False
    assert isinstance(model, Linear | MLP)
    weights = [weight for weight, _ in model.layers(args["params"]) if weight is not None]
    clients, outputs, threads = len(args["index"]), weights[-1].shape[-2], torch.get_num_threads()
    labels = y.dtype == torch.int64 and y.dim() == 1
    values = y.dtype == torch.float32 and y.numel() == len(y) * outputs
    fits = labels or (values and type(loss) is not CrossEntropy)
    busy = clients >= threads or batch * max(w[0].numel() for w in weights) < _LARGE_STEP
    small = len(weights) == 1 or sum(w[0].numel() for w in weights) <= _LARGE_NET
    return fits and busy and small and len(weights) <= kernels.MOST_LAYERS
