"""Reused buffers, and the optimizer's running averages."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from foedus.base import tree
from foedus.models.base import Params
from foedus.models.training.settings import Training

_kept = threading.local()


def take_buffer(rows: int, like: Tensor) -> Tensor:
    """A buffer for rows, reused by the next call: the system must clear fresh memory."""
    size = rows * like[:1].numel()
    old = getattr(_kept, "buffer", None)
    if old is None or old.dtype != like.dtype or old.device != like.device or old.numel() < size:
        _kept.buffer = old = like.new_empty(size)
    return old[:size].view(rows, *like.shape[1:])


def fresh_memory(how: Training, params: Params, batch: tuple[int, ...] = ()) -> dict[str, Any]:
    """The optimizer's running averages before its first step; `batch`: leading dimensions."""
    if how.optimizer != "sgd":
        steps = torch.zeros(batch, device=next(iter(params.values())).device)
        return {"mean": tree.zeros_like(params), "square": tree.zeros_like(params), "steps": steps}
    return {"velocity": tree.zeros_like(params)} if how.momentum else {}
