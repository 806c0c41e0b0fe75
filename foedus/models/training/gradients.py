"""Gradients of a model's loss, for one client or a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foedus import kernels
from foedus.base import tree
from foedus.base.batching import batched
from foedus.base.rows import Rows, shares, take
from foedus.models.base import Model, Params
from foedus.models.linear import Linear
from foedus.models.losses import Loss
from foedus.models.training.autodiff import gradients
from foedus.models.training.compiled import LOSSES, knows

_SMALL_NET = 1 << 14
"""Number of parameters up to which compiled loops are faster for full gradients."""


def gradient(model: Model, loss: Loss, params: Params, data: Rows) -> Params:
    """Gradient of the mean loss over all of a client's rows, at `params`."""
    args: dict[str, Any] = {"params": params, **data.counted}
    if data.stacked:
        args["stacked"] = data.stacked
    return _gradient(args, (model, loss, data.table_x, data.table_y))


def value_and_gradient(
    model: Model, loss: Loss, params: Params, data: Rows
) -> tuple[Tensor, Params]:
    """The mean loss over all of a client's rows and its gradient, in one pass."""
    return _home(_value_and_gradient(_whole(params, data), (model, loss)), data)


def _whole(params: Params, data: Rows) -> dict[str, Any]:
    """All rows of a client on the device of the table, with their shares in its objective."""
    x, y, _ = data.there
    weight = shares(data.counted).to(x.device)
    return {"params": to(x.device, params), "x": x, "y": y, "weight": weight}


def _home(found: Any, data: Rows) -> Any:
    return to(data.index.device, found)


def to(device: torch.device, values: Any) -> Any:
    """Tensors of a tree on a device; those that are there already are not copied."""
    return tree.map(lambda v: v.to(device) if isinstance(v, Tensor) else v, values)


@batched
def _gradient(args: dict[str, Any], shared: tuple) -> Params:
    model, loss, table_x, table_y = shared
    params, index, share = args["params"], args["index"], shares(args)
    small = sum(v[0].numel() for v in params.values()) <= _SMALL_NET or isinstance(model, Linear)
    small = small and model.closed_form
    if small and knows(model, loss, table_x, table_y, args, index.shape[1]):
        # one step from w on all rows with lr = -1 and keep = 0: 0 w + the gradient
        found = tree.map(lambda v: v.clone(memory_format=torch.contiguous_format), params)
        layers = model.layers(found)
        kernels.train(
            layers, [(None, None)] * len(layers), table_x.flatten(1), table_y,
            index.unsqueeze(0).contiguous(), share.unsqueeze(0).contiguous(),
            torch.ones(len(index), dtype=torch.int64), loss=LOSSES.index(type(loss)),
            lr=-1.0, keep=0.0, delta=getattr(loss, "delta", 1.0),
        )  # fmt: skip
        return found
    device = table_x.device
    x, y = args.get("stacked") or (take(t, index.to(device)) for t in (table_x, table_y))
    x = x.flatten(2) if model.closed_form else x
    slope = gradient_of(model, loss)
    return to(index.device, slope(to(device, params), x, y, share.to(device)))


@batched
def _value_and_gradient(args: dict[str, Any], shared: tuple) -> tuple[Tensor, Params]:
    model, loss = shared
    params, y, weight = args["params"], args["y"], args["weight"]
    if model.closed_form:
        outputs, pull = model.pullback(params, args["x"].flatten(2))
        values = loss.value(outputs, y)
        return (weight * values).sum(1), pull(loss.slope(outputs, y, weight))

    grads, values, _ = gradients(_mean_loss(model, loss), params, args["x"], y, weight, model=model)
    return values, grads


def _mean_loss(model: Model, loss: Loss) -> Callable[..., tuple[Tensor, Params]]:
    return lambda params, x, y, weight: (weight @ loss.value(model.apply(params, x), y), {})


def gradient_of(model: Model, loss: Loss) -> Callable[[Params, Tensor, Tensor, Tensor], Params]:
    """The function (parameters, x, y, normalized row weights) -> gradients, by client."""
    if model.closed_form:

        def closed(params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Params:
            outputs, pull = model.pullback(params, x)
            return pull(loss.slope(outputs, y, weight))

        return closed

    mean_loss = _mean_loss(model, loss)
    return lambda params, *rows: gradients(mean_loss, params, *rows, model=model)[0]


def batch_gradient(
    model: Model,
    loss: Loss,
    params: Params,
    index: Tensor,
    weight: Tensor,
    table_x: Tensor,
    table_y: Tensor,
) -> Params:
    """Gradients of several clients on rows (c, b) of their index, with weights that sum to 1."""
    home, device = index.device, table_x.device
    index = index.to(device)
    x, y = take(table_x, index), take(table_y, index)
    x = x.flatten(2) if model.closed_form else x
    slope = gradient_of(model, loss)
    return to(home, slope(to(device, params), x, y, weight.to(device)))
