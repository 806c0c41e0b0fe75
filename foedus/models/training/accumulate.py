"""Gradient accumulation: the gradient of an optimizer step as the sum over mini-batches."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foedus.models.base import Params

Slopes = Callable[..., tuple[Params, Params]]
"""(parameters, x, y, weight, padded, number) -> (gradients, new running statistics)."""


def accumulated(
    slopes: Slopes, size: int, params: Params, x: Tensor, y: Tensor, weight: Tensor, padded: bool
) -> tuple[Params, Params]:
    """Gradients of weighted rows (c, b, ...), `size` rows of each client at a time.

    Weights sum to 1 over all b rows, so that the gradients of the parts add up to that of the
    whole. Running statistics go from part to part; padding comes last.
    """
    total: Params = {}
    statistics: Params = {}
    for number, first in enumerate(range(0, weight.shape[1], size)):
        part = slice(first, first + size)
        if number and padded and not bool((weight[:, part] > 0).any()):
            break
        now = {**params, **statistics}
        grads, new = slopes(now, x[:, part], y[:, part], weight[:, part], padded, number)
        statistics |= new
        total = {k: total[k].add_(g) for k, g in grads.items()} if total else grads
    return total, statistics
