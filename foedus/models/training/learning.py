"""Gradients of models that are called otherwise in training: dropout, running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foedus.models.base import Drops, Model, Params
from foedus.models.dropout import Drawn, Given, Record, Site
from foedus.models.losses import Loss
from foedus.models.unbatched import batching_fails, raise_unbatched

Draw = Callable[[int, Site, Tensor], Tensor]
"""The masks (c, *shape) of a step: of the i-th call of dropout, for tensors like this."""


class Learner:
    """Gradients and new running statistics of some clients, on mini-batches of one step.

    Args:
        model: The model.
        loss: Its loss.
        clients: How many there are at most: one is called without `vmap`.
    """

    def __init__(self, model: Model, loss: Loss, clients: int) -> None:
        self.model, self.loss, self.clients = model, loss, clients
        self.fixed = model.statistics
        self.plain = batched_over_clients(torch.func.grad(self._plain), model)

    def __call__(
        self, params: Params, x: Tensor, y: Tensor, weight: Tensor, padded: bool, draw: Draw
    ) -> tuple[Params, Params]:
        """All with a leading client dimension; weights sum to 1 for each client."""
        if padded:
            x, y, weight, padded = without_padding(x, y, weight)
        still = {k: v for k, v in params.items() if k in self.fixed}
        moving = {k: v for k, v in params.items() if k not in self.fixed} if still else params
        first = {k: v[0] for k, v in params.items()}
        plan = self.model.dropout_calls(first, x[0], weight[0], padded)
        if self.clients == 1:
            return self._single(moving, still, x, y, weight, padded, plan, draw)
        if not plan.sites and not still:
            return self.plain(params, x, y, weight), {}
        masks = [draw(i, site, x) for i, site in enumerate(plan.sites)]

        def mean_loss(
            moving: Params, still: Params, x: Tensor, y: Tensor, weight: Tensor, *masks: Tensor
        ) -> tuple[Tensor, Params]:
            drops = Given(len(x), plan, masks) if plan.sites else None
            return self._value(moving, still, x, y, weight, padded, drops)

        step = batched_over_clients(torch.func.grad(mean_loss, has_aux=True), self.model)
        return step(moving, still, x, y, weight, *masks)

    def _value(
        self, moving: Params, still: Params, x: Tensor, y: Tensor, weight: Tensor, padded: bool,
        drops: Drops | None,
    ) -> tuple[Tensor, Params]:  # fmt: skip
        params = {**moving, **still} if still else moving
        outputs, new = self.model.train_outputs(params, x, weight, padded, drops)
        return weight @ self.loss.value(outputs, y), new

    def _plain(self, params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._value(params, {}, x, y, weight, False, None)[0]

    def _single(
        self, moving: Params, still: Params, x: Tensor, y: Tensor, weight: Tensor, padded: bool,
        plan: Record, draw: Draw,
    ) -> tuple[Params, Params]:  # fmt: skip
        leaves = {k: v.detach()[0].requires_grad_() for k, v in moving.items()}
        kept = {k: v[0] for k, v in still.items()}
        one = lambda *call: draw(*call)[0]  # noqa: E731
        drops = Drawn(x.shape[1], plan, one) if plan.sites else None
        with torch.enable_grad():
            value, new = self._value(leaves, kept, x[0], y[0], weight[0], padded, drops)
            each = list(leaves.values())
            grads = torch.autograd.grad(value, each, allow_unused=True, materialize_grads=True)
        found = {k: g.unsqueeze(0) for k, g in zip(leaves, grads, strict=True)}
        return found, {k: v.detach().unsqueeze(0) for k, v in new.items()}


def without_padding(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Mini-batches (c, b, ...) without the rows behind the last real one of any client, and whether
    padding is left: it is not where all have the same number of rows.
    """
    real = weight > 0
    lengths = real.int().cumprod(1).sum(1)
    longest = int(lengths.max())
    if not bool((lengths == real.sum(1)).all()):  # rows that count 0 lie between others
        return x, y, weight, True
    left = bool((lengths < longest).any())
    return x[:, :longest], y[:, :longest], weight[:, :longest], left


def batched_over_clients(function: Callable, model: Model) -> Callable[..., Any]:
    """`torch.func.vmap`, with an error that says what to do about a model that it cannot batch."""
    batched = torch.func.vmap(function)

    def call(*args: Any) -> Any:
        try:
            return batched(*args)
        except (RuntimeError, NotImplementedError) as error:
            if not batching_fails(error):
                raise
            raise_unbatched(type(getattr(model, "module", model)).__name__, error)

    return call
