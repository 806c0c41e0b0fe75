"""Gradient accumulation: the gradient of an optimizer step as the sum over mini-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foedus.models.base import Params

Slopes = Callable[..., tuple[Params, Params]]
"""(parameters, x, y, weight, padded, number, clients) -> (gradients, new running statistics)."""


def accumulated(
    slopes: Slopes, size: int, params: Params, x: Tensor, y: Tensor, weight: Tensor, padded: bool
) -> tuple[Params, Params]:
    """Gradients of weighted rows (c, b, ...), `size` rows of each client at a time.

    Weights sum to 1 over all b rows, so that the gradients of the parts add up to that of the
    whole. Running statistics go from part to part. A client that has fewer rows than others is
    left out of the parts where it has none.
    """
    total: Params = {}
    statistics: Params = {}
    everyone = torch.arange(len(weight))
    for number, first in enumerate(range(0, weight.shape[1], size)):
        part = slice(first, first + size)
        share, who = weight[:, part], everyone
        if padded and number:
            who = torch.nonzero((share > 0).any(1)).flatten().cpu()
            if not len(who):
                break
        now = {**params, **statistics}
        if len(who) == len(everyone):
            grads, new = slopes(now, x[:, part], y[:, part], share, padded, number, who)
            statistics |= new
            total = {k: total[k].add_(g) for k, g in grads.items()} if total else grads
            continue
        at = who.to(weight.device)
        now = {k: v[at] for k, v in now.items()}
        grads, new = slopes(now, x[at, part], y[at, part], share[at], padded, number, who)
        for k, v in new.items():
            statistics[k] = statistics[k].index_copy(0, at, v)
        for k, g in grads.items():
            total[k].index_add_(0, at, g)
    return total, statistics
