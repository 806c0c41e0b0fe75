"""Gradients of models that behave differently in training: dropout, running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from foedus.models.base import Drops, Model, Params
from foedus.models.dropout import Drawn, Given, Site
from foedus.models.losses import Loss
from foedus.models.training.autodiff import gradients

Draw = Callable[[int, Site, Tensor], Tensor]
"""The masks (c, *shape) of a step: of the i-th call of dropout, for tensors like this."""


class Learner:
    """Gradients and new running statistics of some clients, on mini-batches of one step.

    Args:
        model: The model.
        loss: Its loss.
    """

    def __init__(self, model: Model, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.fixed = model.statistics

    def __call__(
        self, params: Params, x: Tensor, y: Tensor, weight: Tensor, padded: bool, draw: Draw
    ) -> tuple[Params, Params]:
        """All arguments have a leading client dimension; weights sum to 1 for each client."""
        if padded:
            x, y, weight, padded = without_padding(x, y, weight)
        still = {k: v for k, v in params.items() if k in self.fixed}
        moving = {k: v for k, v in params.items() if k not in self.fixed} if still else params
        first = {k: v[0] for k, v in params.items()}
        plan = self.model.dropout_calls(first, x[0], weight[0], padded)

        alone = len(x) == 1  # masks are drawn at each call
        like = next(iter(moving.values()))  # not rows, which may be integers
        masks = [draw(i, site, like) for i, site in enumerate(plan.sites) if not alone]

        def mean_loss(
            moving: Params, still: Params, x: Tensor, y: Tensor, weight: Tensor, masks: list[Tensor]
        ) -> tuple[Tensor, Params]:
            drops: Drops | None = None
            if plan.sites:
                drops = Drawn(len(x), plan, one) if alone else Given(len(x), plan, masks)
            outputs, new = self.model.train_outputs({**moving, **still}, x, weight, padded, drops)
            return weight @ self.loss.value(outputs, y), new

        def one(*call: Any) -> Tensor:
            return draw(*call)[0]

        grads, _, new = gradients(mean_loss, moving, still, x, y, weight, masks, model=self.model)
        return grads, new


def without_padding(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Mini-batches (c, b, ...) cut after the last real row of any client, and whether padding is
    left: there is none if all have the same number of rows.
    """
    real = weight > 0
    lengths = real.int().cumprod(1).sum(1)
    longest = int(lengths.max())
    if not bool((lengths == real.sum(1)).all()):  # rows of weight 0 between others
        return x, y, weight, True
    left = bool((lengths < longest).any())
    return x[:, :longest], y[:, :longest], weight[:, :longest], left
