"""The models, losses and data that compiled training (`foedus.kernels`) supports, and its call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foedus import kernels
from foedus.base import tree
from foedus.kernels import Between
from foedus.models.base import Model, Params
from foedus.models.chain import Link, chain_of
from foedus.models.dropout import Masks, dropped, kept_scale
from foedus.models.linear import Linear
from foedus.models.losses import CrossEntropy, Huber, Logistic, Loss, Squared
from foedus.models.mlp import MLP
from foedus.models.module import Module

_LARGE_STEP, _LARGE_NET = 1 << 22, 1 << 20
"""Multiplications of a step from which several threads are faster; the number of weights beyond the
cache of a core."""

LOSSES = (CrossEntropy, Squared, Logistic, Huber)
"""The losses that compiled code supports, with their numbers."""


def train(
    model: Model, loss: Loss, params: Params, more: Params, x: Tensor, y: Tensor, used: Tensor,
    shares: Tensor, steps: Tensor, masks: Masks, lr: float, keep: float,
) -> None:  # fmt: skip
    """All steps of a batch of clients, in place: w <- keep w - lr (mini-batch gradient + more).

    Args:
        model: A model that compiled training supports (`knows`), as all arguments.
        loss: Its loss.
        params: The parameters of all clients.
        more: Terms that are added to their gradients.
        x: Rows.
        y: Labels or targets.
        used: The numbers of the rows of each step (most, c, b).
        shares: Their weights.
        steps: How many steps each client makes (c,).
        masks: The masks of dropout.
        lr: The step size.
        keep: The factor of the parameters.
    """
    more = {k: v.contiguous() for k, v in more.items()}
    layers, terms = layers_of(model, params, x), layers_of(model, more, x)
    assert layers is not None and terms is not None
    kernels.train(
        layers, terms, x.flatten(1), y, used.contiguous(), shares.contiguous(), steps,
        between=between_of(model, params, more, x, masks), loss=LOSSES.index(type(loss)), lr=lr,
        keep=keep, delta=getattr(loss, "delta", 1.0),
    )  # fmt: skip


def layers_of(model: Model, params: Params, x: Tensor) -> list[kernels.Layer] | None:
    """Weight and bias of each linear layer, from any of the parameters; `None` for other models.

    Args:
        model: The model.
        params: Parameters by name; missing ones become `None`.
        x: Rows.
    """
    if isinstance(model, Linear | MLP) and type(model) in (Linear, MLP):
        return model.layers(params)
    links = links_of(model, x)
    if links is None:
        return None
    parts = (_parts_of(link.name, ("weight", "bias"), params) for link in links)
    return [(weight, bias) for weight, bias in parts]


def links_of(model: Model, x: Tensor) -> tuple[Link, ...] | None:
    """The layers of a user's module that is a chain, all of which is trained."""
    if type(model) is not Module or model.trainable is not None or model.norm == "group":
        return None
    return chain_of(model.module, x.dim() - 1)


def between_of(
    model: Model, params: Params, more: Params, x: Tensor, masks: Masks
) -> list[Between]:
    """What follows each layer but the last; nothing for foedus' own models: ReLU.

    Args:
        model: The model.
        params: The parameters of all clients, which training writes over.
        more: What is added to the gradients.
        x: Rows.
        masks: The masks of dropout.
    """
    found: list[Between] = []
    for link in (links_of(model, x) or ())[:-1]:
        between = Between(link.operations)
        if link.norm is not None:
            assert isinstance(model, Module)
            layer: Any = model.module.get_submodule(link.norm)
            norm = _parts_of(link.norm, ("weight", "bias", "running_mean", "running_var"), params)
            fixed = norm[2] is None
            if fixed:
                clients = len(next(iter(params.values())))
                still = (layer.running_mean, layer.running_var)
                norm = [*norm[:2], *(t.detach().float().repeat(clients, 1) for t in still)]
            terms = _parts_of(link.norm, ("weight", "bias"), more)
            between = replace(
                between, norm=tuple(norm), more=tuple(terms), fixed=fixed,
                eps=layer.eps, momentum=0.0 if fixed else layer.momentum,
            )  # fmt: skip
        if link.p:
            number = sum(other.keys is not None for other in found)
            keys, kept = masks.keys_of(number), kept_scale(link.p)
            between = replace(between, keys=keys, dropped=dropped(link.p), kept=kept)
        found.append(between)
    return found


def _parts_of(name: str, parts: tuple[str, ...], params: Params) -> list[Tensor | None]:
    """Tensors of a layer."""
    stem = name.replace(".", "/")
    return [params.get(f"{stem}/{part}" if stem else part) for part in parts]


def knows(model: Model, loss: Loss, x: Tensor, y: Tensor, args: dict[str, Any], batch: int) -> bool:
    """Whether compiled training supports these settings, and is faster.

    Each client is trained by one thread.
    """
    if not kernels.ready or type(loss) not in LOSSES or x.device.type != "cpu":
        return False
    layers = layers_of(model, args["params"], x)
    if layers is None:
        return False
    trained = [args[k] for k in ("params", "correction") if k in args]
    numbers = [x, args["weight"], *tree.leaves(trained)]
    if any(t.dtype != torch.float32 for t in numbers):
        return False
    if any(t.requires_grad for t in (*numbers, y)) or not (x.is_contiguous() and y.is_contiguous()):
        return False
    weights = [weight for weight, _ in layers if weight is not None]
    clients, outputs, threads = len(args["index"]), weights[-1].shape[-2], torch.get_num_threads()
    labels = y.dtype == torch.int64 and y.dim() == 1
    values = y.dtype == torch.float32 and y.numel() == len(y) * outputs
    fits = labels or (values and type(loss) is not CrossEntropy)
    busy = clients >= threads or batch * max(w[0].numel() for w in weights) < _LARGE_STEP
    small = len(weights) == 1 or sum(w[0].numel() for w in weights) <= _LARGE_NET
    return fits and busy and small and len(weights) <= kernels.MOST_LAYERS
