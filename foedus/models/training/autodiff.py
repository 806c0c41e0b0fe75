"""Gradients of several clients in one pass, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from foedus.models.base import Model, Params, derives_within
from foedus.models.unbatched import batching_fails, raise_unbatched


def gradients(
    function: Callable[..., tuple[Tensor, Params]], params: Params, *others: Any, model: Model
) -> tuple[Params, Tensor, Params]:
    """Gradients in `params`, values, and other results of `function`, for each client.

    Each client has its own parameters, so the gradient of the sum of their values contains the
    gradient of each. This is one backward pass through the batched graph, while `torch.func.vmap`
    of a gradient batches every operation of the backward pass as well; see `derives_within` for the
    cases in which the latter is used.

    Args:
        function: Of parameters and others, of one client: a value, and tensors that need none.
        params: With a leading client dimension, as all tensors of `others`.
        others: Further arguments.
        model: For errors.

    Returns:
        Gradients that can be written over, values (c,), and the other tensors.
    """
    like = next(iter(params.values()))
    alone = len(like) == 1
    model.ready(like.device)
    if not alone and derives_within(model, {k: v[0] for k, v in params.items()}):
        each = torch.func.grad_and_value(function, has_aux=True)
        grads, (values, more) = _batched(each, model)(params, *others)
        return dict(zip(grads, _apart(grads.values()), strict=True)), values, more
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    with torch.enable_grad():
        if alone:  # without vmap, whose calls cost time
            value, more = function(*_first((leaves, *others)))
            value, more = value.unsqueeze(0), {k: v.unsqueeze(0) for k, v in more.items()}
        else:
            value, more = _batched(function, model)(leaves, *others)
        found = torch.autograd.grad(
            value.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
    grads = dict(zip(leaves, _apart(found), strict=True))
    return grads, value.detach(), {k: v.detach() for k, v in more.items()}


def _first(values: Any) -> Any:
    """The tensors in tuples, lists and dictionaries without the dimension of the single client."""
    if isinstance(values, Tensor):
        return values[0]
    if isinstance(values, dict):
        return {k: _first(v) for k, v in values.items()}
    return [_first(v) for v in values]


def _apart(grads: Iterable[Tensor]) -> list[Tensor]:
    """Gradients without shared memory: those of two added parameters may be the same tensor, and
    that of a sum has strides of 0.
    """
    seen: set[int] = set()
    apart = []
    for g in grads:
        place = g.untyped_storage().data_ptr()
        shared = place in seen or (g.numel() > 1 and 0 in g.stride())
        apart.append(g.clone(memory_format=torch.contiguous_format) if shared else g)
        seen.add(place)
    return apart


def _batched(function: Callable, model: Model) -> Callable[..., Any]:
    """`torch.func.vmap`, with an error that names the remedy for a model that it cannot batch."""
    batched = torch.func.vmap(function)

    def call(*args: Any) -> Any:
        try:
            return batched(*args)
        except (RuntimeError, NotImplementedError) as error:
            if not batching_fails(error):
                raise
            raise_unbatched(type(getattr(model, "module", model)).__name__, error)

    return call
