"""Clipping, and the updates of SGD with momentum, Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from foedus.models.base import Params
from foedus.models.training.settings import Training

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


def clip_gradients(grads: Params, limit: float) -> None:
    """Scale each client's gradient to at most `limit` in Euclidean norm."""
    norm = cast("Tensor", sum(g.flatten(1).square().sum(1) for g in grads.values())).sqrt()
    factor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
    for g in grads.values():
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))


def update_parameters(
    how: Training, lr: float, params: Params, grads: Params, memory: dict[str, Any], a: int,
    even: bool,
) -> None:  # fmt: skip
    """One optimizer step, in place, on the first `a` clients. even: all have made the same number
    of steps."""
    if how.optimizer == "adamw":
        for k in grads:
            if decay := how.decay_of(params[k].dim() - 1):
                params[k].mul_(1 - lr * decay)
    if how.optimizer != "sgd":
        memory["steps"][:a] += 1
        t = memory["steps"][:a]
        if even:  # one pass over all numbers, instead of one for each operation
            names, many = list(grads), [t[:1].float().clone().squeeze(0) for _ in grads]
            mean, square = ([memory[m][k][:a] for k in names] for m in ("mean", "square"))
            torch._fused_adam_(
                [params[k] for k in names], [grads[k].contiguous() for k in names], mean, square,
                [], many, lr=lr, beta1=_BETA1, beta2=_BETA2, weight_decay=0.0, eps=_EPSILON,
                amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        for k, g in grads.items():
            shape = (-1, *[1] * (g.dim() - 1))
            mean, square = memory["mean"][k][:a], memory["square"][k][:a]
            mean.lerp_(g, 1 - _BETA1)
            square.mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
            # 1 - beta^t, which loses half of its digits in single precision while t is small
            rates = (-torch.expm1(t * math.log(beta)) for beta in (_BETA1, _BETA2))
            first, second = (v.to(g.dtype).view(shape) for v in rates)
            root = (square / second).sqrt_().add_(_EPSILON)
            params[k].addcdiv_(mean / first, root, value=-lr)
        return
    for k, g in grads.items():
        if how.momentum:
            g = memory["velocity"][k][:a].mul_(how.momentum).add_(g)
        params[k].add_(g, alpha=-lr)
