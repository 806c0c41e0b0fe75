"""Local training: mini-batch descent on one client's rows, run for a whole batch of clients at once.

Every averaging method of foedus is this loop with another gradient: that of the local loss, plus a fixed `correction`,
plus a pull towards the starting point (`prox`). Clients of unequal size share a batch at no cost: they are ordered by
their number of steps, and step t runs on those that still have one, a prefix of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from foedus import kernels
from foedus.core import random, tree
from foedus.core.batching import batched
from foedus.core.rows import Rows, take
from foedus.errors import ConfigError, unknown
from foedus.models.base import Model, Params
from foedus.models.linear import Linear
from foedus.models.losses import CrossEntropy, Huber, Logistic, Loss, Squared
from foedus.models.mlp import MLP

_BLOCK_BYTES = 1 << 21
"""Rows are collected for several steps at once, in blocks of about this size, so that they are still in cache when used."""

_STEP_BYTES, _STATE_BYTES, _FEWEST = 1 << 22, 1 << 25, 4
"""Clients are trained so many at a time that one step's rows, and their parameters with all that belongs to them, have about these sizes, and no
fewer than this."""

_TRAINED = ("params", "correction", "memory")
"""Of the arguments of a training, those that are on the device of the rows while it goes on."""

_LARGE_STEP, _LARGE_NET = 1 << 22, 1 << 20
"""Multiplications of a step from which several threads do it faster than one; weights of a network from which no core's cache holds them."""

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a client trains in one round.

    lr: step size. optimizer: "sgd" or "adam". momentum: of SGD (PyTorch's form, v = m v + g).
    epochs: passes over the client's rows; steps: a number of mini-batches instead. batch_size: rows in one (`None`: all).
    weight_decay: L2 term added to the gradient. clip: largest norm of a mini-batch gradient of the local loss (before
    correction terms and weight decay are added); `None`: no limit. augment: "crop_flip" crops every image of a mini-batch
    at random after padding it by 4, and flips it or not; `None`: rows as they are.
    """

    lr: float = 0.1
    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 32
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    augment: str | None = None

    def __post_init__(self) -> None:
        def positive(name: str, kind: type = int, optional: bool = False) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            right = isinstance(value, Real if kind is float else Integral) and not isinstance(value, bool)
            if not right or not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value!r} must be a positive {'number' if kind is float else 'whole number'}")

        positive("lr", float)
        positive("epochs")
        positive("steps", optional=True)
        positive("batch_size", optional=True)
        positive("clip", float, optional=True)
        if self.optimizer not in ("sgd", "adam"):
            raise ConfigError(unknown("optimizer", self.optimizer, ["sgd", "adam"]))
        if self.augment not in (None, "crop_flip"):
            raise ConfigError(unknown("augment", self.augment, ["crop_flip", None]))
        if not isinstance(self.momentum, Real) or not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum!r} must be in [0, 1)")
        if not isinstance(self.weight_decay, Real) or not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(f"weight_decay={self.weight_decay!r} must be a number that is not negative")


def descend(
    how: Training,
    model: Model,
    loss: Loss,
    params: Params,
    data: Rows,
    key: Tensor,
    *,
    prox: float = 0.0,
    correction: Params | None = None,
    memory: Any = None,
) -> dict[str, Any]:
    """Train from `params` on a client's rows. One step, with g the mini-batch gradient of the mean loss at w:

        w <- w - lr * optimizer(g + correction + prox * (w - params) + weight_decay * w)

    Returns `params`; `steps`, how many were made; and `memory`, the optimizer's, to go on with another time. Given the rows of a batch of
    clients at once (see `foedus.core.algorithm.stacked`), what it returns has their dimension, too; `params` are those that all start from,
    a `correction` may be one for all or have their dimension, and there is no `memory`.
    """
    args = {"params": params, "index": data.index, "weight": data.weight, "key": key}
    if correction is not None:
        args["correction"] = correction
    if memory:
        args["memory"] = memory
    shared = (how, model, loss, data.table_x, data.table_y, prox)
    if data.index.dim() == 2:
        if memory:
            raise TypeError("a stacked step has no memory of its own: leave the decorator out")
        clients = len(data.index)
        args["params"] = {k: v.expand(clients, *v.shape) for k, v in params.items()}
        if correction is not None:
            own = {k: v.dim() > params[k].dim() for k, v in correction.items()}
            args["correction"] = {k: v if own[k] else v.expand(clients, *v.shape) for k, v in correction.items()}
        with torch.no_grad():
            return _descend.__wrapped__(args, shared)
    return _descend(args, shared)


def gradient(model: Model, loss: Loss, params: Params, data: Rows) -> Params:
    """Gradient of the mean loss over all of a client's rows, at `params`."""
    return _home(_gradient(_whole(params, data), (model, loss)), data)


def value_and_gradient(model: Model, loss: Loss, params: Params, data: Rows) -> tuple[Tensor, Params]:
    """The mean loss over all of a client's rows, and its gradient, at `params`: one pass for both."""
    return _home(_value_and_gradient(_whole(params, data), (model, loss)), data)


def _whole(params: Params, data: Rows) -> dict[str, Any]:
    """All rows of a client, where the table lies, with weights that sum to 1."""
    x, y, weight = data.there
    return {"params": to(x.device, params), "x": x, "y": y, "weight": weight / weight.sum(-1, keepdim=True)}


def _home(found: Any, data: Rows) -> Any:
    return to(data.index.device, found)


def to(device: torch.device, values: Any) -> Any:
    """Tensors of a tree on a device; those that are there already are not copied."""
    return tree.map(lambda v: v.to(device) if isinstance(v, Tensor) else v, values)


@batched
def _gradient(args: dict[str, Any], shared: tuple) -> Params:
    model, loss = shared
    x = args["x"].flatten(2) if model.closed_form else args["x"]
    return gradient_of(model, loss, len(x))(args["params"], x, args["y"], args["weight"])


@batched
def _value_and_gradient(args: dict[str, Any], shared: tuple) -> tuple[Tensor, Params]:
    model, loss = shared
    params, y, weight = args["params"], args["y"], args["weight"]
    if model.closed_form:
        outputs, pull = model.pullback(params, args["x"].flatten(2))
        values = loss.value(outputs, y)
        return (weight * values).sum(1), pull(loss.slope(outputs, y, weight))

    def mean_loss(params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return weight @ loss.value(model.apply(params, x), y)

    each = torch.func.grad_and_value(mean_loss)
    if len(y) > 1:
        slopes, values = torch.func.vmap(each)(params, args["x"], y, weight)
        return values, slopes
    slopes, value = each({k: v[0] for k, v in params.items()}, args["x"][0], y[0], weight[0])
    return value.unsqueeze(0), {k: v.unsqueeze(0) for k, v in slopes.items()}


def gradient_of(model: Model, loss: Loss, clients: int) -> Callable[[Params, Tensor, Tensor, Tensor], Params]:
    """The function (parameters, x, y, normalised row weights), all with a client dimension -> gradients."""
    if model.closed_form:

        def closed(params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Params:
            outputs, pull = model.pullback(params, x)
            return pull(loss.slope(outputs, y, weight))

        return closed

    def mean_loss(params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return weight @ loss.value(model.apply(params, x), y)

    if clients > 1:
        return torch.func.vmap(torch.func.grad(mean_loss))

    def single(params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Params:
        leaves = {k: v.detach()[0].requires_grad_() for k, v in params.items()}
        with torch.enable_grad():
            value = mean_loss(leaves, x[0], y[0], weight[0])
            grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return {k: g.unsqueeze(0) for k, g in zip(leaves, grads, strict=True)}

    return single


def batch_gradient(
    model: Model, loss: Loss, params: Params, index: Tensor, weight: Tensor, table_x: Tensor, table_y: Tensor
) -> Params:
    """Gradients of several clients, each on the rows (c, b) of its index with weights that sum to 1; made where the table lies."""
    home, device = index.device, table_x.device
    index = index.to(device)
    x, y = take(table_x, index), take(table_y, index)
    x = x.flatten(2) if model.closed_form else x
    return to(home, gradient_of(model, loss, len(index))(to(device, params), x, y, weight.to(device)))


def _schedule(how: Training, index: Tensor, weight: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows each client uses in each step: (row numbers (T, c, b), weights (T, c, b) summing to 1, steps (c,)).

    Every epoch is a fresh permutation of the client's rows, cut into batches; the last one may be smaller.
    """
    clients, n = index.shape
    b = min(how.batch_size or n, n)
    rows = (weight > 0).sum(1)
    per_epoch = torch.div(rows + b - 1, b, rounding_mode="floor").clamp_(min=1)
    steps = torch.full_like(per_epoch, how.steps) if how.steps else per_epoch * how.epochs
    batches, epochs = int(per_epoch.max()), int(torch.div(steps + per_epoch - 1, per_epoch, rounding_mode="floor").max())
    full = int(rows.min()) == n and bool((weight == 1).all())
    if batches == 1 and not how.augment:  # (augmented, a row's place in its batch must not depend on who else is there)
        table, table_weight = index.view(1, clients, 1, n), weight.view(1, clients, 1, n)
    else:
        keys = key.unsqueeze(0)
        if epochs > 1:
            keys = torch.cat((keys, random.fold(key, torch.arange(1, epochs).unsqueeze(1))))
        order = random.permutation(keys, n, valid=None if full else weight > 0)
        order = torch.nn.functional.pad(order, (0, batches * b - n))
        table = index.expand(epochs, -1, -1).gather(-1, order).view(epochs, clients, batches, b)
        if full and len(table) * batches == int(steps[0]):  # whole epochs, the same for all: no need to look up who is where
            real = (torch.arange(batches * b) < n).to(weight.dtype).view(batches, 1, b)
            used_weight = (real / real.sum(-1, keepdim=True)).expand(-1, clients, -1).repeat(epochs, 1, 1)
            return table.transpose(1, 2).reshape(epochs * batches, clients, b), used_weight, steps
        table_weight = weight.expand(epochs, -1, -1).gather(-1, order)
        table_weight[..., n:] = 0
        table_weight = table_weight.reshape(epochs, clients, batches, b)
    t = torch.arange(int(steps.max())).unsqueeze(1)
    epoch = torch.div(t, per_epoch, rounding_mode="floor") if batches > 1 else torch.zeros_like(t)
    at = (epoch.clamp_(max=len(table) - 1), torch.arange(clients).unsqueeze(0), t % per_epoch)
    used, used_weight = table[at], table_weight[at]
    return used, used_weight / used_weight.sum(-1, keepdim=True).clamp(min=1e-30), steps


def descend_to(how: Training, model: Model, loss: Loss, params: Params, data: Rows, target: Tensor, key: Tensor) -> Params:
    """Train from `params` towards targets (n, outputs) of a client's own rows instead of its labels."""
    args = {"params": params, "index": data.index, "weight": data.weight, "key": key, "target": target}
    return _descend_to(args, (how, model, loss, data.table_x))


@batched
def _descend_to(args: dict[str, Any], shared: tuple) -> Params:
    """Every row is one client's, so the targets of all clients fit into one table."""
    how, model, loss, table_x = shared
    target, real = args.pop("target"), args["weight"] > 0
    table_y = target.new_zeros(len(table_x), target.shape[-1], device=table_x.device)
    table_y[args["index"][real].to(table_x.device)] = target[real].to(table_x.device)
    return _descend.__wrapped__(args, (how, model, loss, table_x, table_y, 0.0))["params"]


@batched
def _descend(args: dict[str, Any], shared: tuple) -> dict[str, Any]:
    how, model, loss, table_x, table_y, prox = shared
    used, weight, steps = _schedule(how, args["index"], args["weight"], args["key"])
    decay = prox + how.weight_decay
    in_place = model.closed_form and how.optimizer == "sgd" and not how.momentum and how.clip is None
    if in_place and not how.augment and _knows(model, loss, table_x, table_y, args, used.shape[2]):
        params = _own(args["params"])
        layers = [model.layers({k: v.contiguous() for k, v in part.items()}) for part in (params, _constant(args, prox))]
        kernels.train(
            *layers, table_x.flatten(1), table_y, used.contiguous(), weight.contiguous(), steps, loss=_LOSSES.index(type(loss)), lr=how.lr,
            keep=1 - how.lr * decay, delta=getattr(loss, "delta", 1.0),
        )  # fmt: skip
        return {"params": params, "memory": args.get("memory") or {}, "steps": steps}
    order = torch.argsort(steps, descending=True, stable=True)
    moved = bool((steps[1:] > steps[:-1]).any())
    if moved:
        used, weight = used[:, order], weight[:, order]
        args = {**args, **tree.map(lambda v: v[order], {k: args[k] for k in _TRAINED if k in args})}
    device, home = table_x.device, used.device
    used, weight, args = (
        to(device, used),
        to(device, weight),
        {**args, **to(device, {k: args[k] for k in _TRAINED if k in args})},
    )
    params = _own(args["params"])
    clients, total = len(steps), len(used)
    memory = _own(args["memory"]) if args.get("memory") else fresh_memory(how, params, (clients,))
    even = "memory" not in args or "steps" not in memory or bool((memory["steps"] == memory["steps"][0]).all())
    constant = _constant(args, prox)

    still = (steps.unsqueeze(0) > torch.arange(total).unsqueeze(1)).sum(1).tolist()
    shape = table_x.shape[1:]
    if how.augment and len(shape) != 3:
        raise ConfigError(
            f"augment={how.augment!r} needs images of shape (channels, height, width); rows have shape {tuple(shape)}"
        )
    noise = random.fold(args["key"][order] if moved else args["key"], 0xA06) if how.augment else None
    if model.closed_form:
        table_x = table_x.flatten(1)
    row_bytes = table_x[:1].numel() * table_x.element_size()
    # Networks under autograd pay for every call; closed forms are faster on as many clients as the cache holds.
    many = clients
    if model.closed_form:
        kept = sum(v[:1].nbytes for v in tree.leaves((params, memory))) + (
            0 if in_place else sum(v[:1].nbytes for v in params.values())
        )
        many = max(_FEWEST, min(_STEP_BYTES // max(1, used.shape[2] * row_bytes), _STATE_BYTES // max(1, kept)))
    many = -(-clients // -(-clients // many))

    def train(low: int, high: int) -> None:
        """All steps of some of the clients."""
        own, own_memory, own_constant = (
            (
                {k: v[low:high] for k, v in params.items()},
                tree.map(lambda v: v[low:high], memory),
                {k: v[low:high] for k, v in constant.items()},
            )
            if (low, high) != (0, clients)
            else (params, memory, constant)
        )
        slope_at = gradient_of(model, loss, high - low)
        left = [min(a, high) - low for a in still if a > low]
        each = (high - low) * used.shape[2]
        block = max(1, _BLOCK_BYTES // max(1, each * row_bytes))
        buffer = _buffer(min(block, len(left)) * each, table_x)
        # Labels for all steps at once; vectors would take much memory.
        every_y = take(table_y, used[: len(left), low:high]) if table_y.dim() == 1 else None
        for first in range(0, len(left), block):
            a = left[first]
            picked = used[first : min(first + block, len(left)), low : low + a]
            flat = picked.reshape(-1)
            x = torch.index_select(table_x, 0, flat, out=buffer[: len(flat)]).view(*picked.shape, *table_x.shape[1:])
            y = take(table_y, picked) if every_y is None else every_y[first : first + len(picked), :a]
            if noise is not None:
                steps_here = torch.arange(first, first + len(picked)).unsqueeze(1)
                x = crop_flip(x.view(*picked.shape, *shape), random.fold(noise[low : low + a], steps_here)).view(x.shape)
            shares = weight[first : first + len(picked), low : low + a]
            for t, here, labels, share in zip(
                range(first, first + len(picked)), x.unbind(), y.unbind(), shares.unbind(), strict=True
            ):
                if left[t] < a:
                    here, labels, share = here[: left[t]], labels[: left[t]], share[: left[t]]
                now = own if left[t] == high - low else {k: v[: left[t]] for k, v in own.items()}
                if in_place:
                    outputs, pull = model.pullback(now, here)
                    pull(loss.slope(outputs, labels, share), -how.lr, 1 - how.lr * decay)
                    for k, v in own_constant.items():
                        now[k].add_(v[: left[t]], alpha=-how.lr)
                    continue
                grads = slope_at(now, here, labels, share)
                if how.clip is not None:
                    _clip(grads, how.clip)
                for k, g in grads.items():
                    if constant:
                        g.add_(own_constant[k][: left[t]])
                    if decay:
                        g.add_(now[k], alpha=decay)
                _update(how, now, grads, own_memory, left[t], even)

    for low in range(0, clients, many):
        train(low, min(low + many, clients))
    result = to(home, {"params": params, "memory": memory, "steps": steps[order] if moved else steps})
    if moved:
        back = torch.argsort(order)
        result = tree.map(lambda v: v[back], result)
    return result


def _own(values: Any) -> Any:
    """Copies of a tree's tensors, to be written over."""
    return tree.map(lambda v: v.clone(memory_format=torch.contiguous_format), values)


def _constant(args: dict[str, Any], prox: float) -> Params:
    """What is added to every gradient of a training: the correction, and the part of the pull towards the start that does not change."""
    constant = dict(args.get("correction") or {})
    if prox:
        start = args["params"]
        constant = {k: torch.add(constant[k], v, alpha=-prox) if k in constant else v * -prox for k, v in start.items()}
    return constant


_LOSSES = (CrossEntropy, Squared, Logistic, Huber)
"""Those that compiled code knows, by its numbers."""


def _knows(model: Model, loss: Loss, x: Tensor, y: Tensor, args: dict[str, Any], batch: int) -> bool:
    """Whether compiled training is there for such a model, loss and data, and the faster way: it gives every client to one thread."""
    if not kernels.ready or type(model) not in (Linear, MLP) or type(loss) not in _LOSSES or x.device.type != "cpu":
        return False
    numbers = [x, args["weight"], *tree.leaves([args[k] for k in ("params", "correction") if k in args])]
    if (
        any(t.dtype != torch.float32 for t in numbers)
        or any(t.requires_grad for t in (*numbers, y))
        or not (x.is_contiguous() and y.is_contiguous())
    ):
        return False
    weights = [weight for weight, _ in model.layers(args["params"])]
    clients, outputs, threads = len(args["index"]), weights[-1].shape[-2], torch.get_num_threads()
    if y.dtype == torch.int64 and y.dim() == 1:
        fits = True
    else:
        fits = y.dtype == torch.float32 and y.numel() == len(y) * outputs and type(loss) is not CrossEntropy
    busy = clients >= threads or batch * max(w[0].numel() for w in weights) < _LARGE_STEP
    small = len(weights) == 1 or sum(w[0].numel() for w in weights) <= _LARGE_NET
    return fits and busy and small and len(weights) <= kernels.MOST_LAYERS


def crop_flip(x: Tensor, key: Tensor, pad: int = 4) -> Tensor:
    """Images (..., b, channels, height, width), each cropped at random after padding by `pad`, and flipped or not; keys (..., 2)."""
    b, channels, height, width = x.shape[-4:]
    draws = random.uniform(key, (b, 3)).reshape(-1, 3).to(x.device)
    top, left = (draws[:, :2] * (2 * pad + 1)).long().unbind(1)
    flip = draws[:, 2:] < 0.5
    images = torch.nn.functional.pad(x.reshape(-1, channels, height, width), (pad,) * 4)
    across, n, c = (torch.arange(size, device=x.device) for size in (width, len(images), channels))
    rows = top.unsqueeze(1) + torch.arange(height, device=x.device)
    columns = left.unsqueeze(1) + torch.where(flip, across.flip(0), across)
    n, c = n.view(-1, 1, 1, 1), c.view(1, -1, 1, 1)
    return images[n, c, rows.view(-1, 1, height, 1), columns.view(-1, 1, 1, width)].reshape(x.shape)


_kept = threading.local()


def _buffer(rows: int, like: Tensor) -> Tensor:
    """Room for so many rows, used again by the next call: fresh memory would have to be cleared by the system first."""
    size = rows * like[:1].numel()
    old = getattr(_kept, "buffer", None)
    if old is None or old.dtype != like.dtype or old.device != like.device or old.numel() < size:
        _kept.buffer = old = like.new_empty(size)
    return old[:size].view(rows, *like.shape[1:])


def fresh_memory(how: Training, params: Params, batch: tuple[int, ...] = ()) -> dict[str, Any]:
    """The optimizer's running averages before its first step, for parameters with leading dimensions `batch`."""
    if how.optimizer == "adam":
        return {
            "mean": tree.zeros_like(params),
            "square": tree.zeros_like(params),
            "steps": torch.zeros(batch, device=next(iter(params.values())).device),
        }
    return {"velocity": tree.zeros_like(params)} if how.momentum else {}


def _clip(grads: Params, limit: float) -> None:
    """Scale each client's gradient to at most `limit` in Euclidean norm over all of its parameters."""
    norm = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    factor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
    for g in grads.values():
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))


def _update(how: Training, params: Params, grads: Params, memory: dict[str, Any], a: int, even: bool) -> None:
    """One optimizer step, in place, on the first `a` clients. even: they have made as many steps as each other."""
    if how.optimizer == "adam":
        memory["steps"][:a] += 1
        t = memory["steps"][:a]
        if even:  # one pass over all numbers, instead of one for each operation
            names, many = list(grads), [t[:1].float().clone().squeeze(0) for _ in grads]
            mean, square = ([memory[m][k][:a] for k in names] for m in ("mean", "square"))
            torch._fused_adam_(
                [params[k] for k in names], [grads[k].contiguous() for k in names], mean, square, [], many, lr=how.lr,
                beta1=_BETA1, beta2=_BETA2, weight_decay=0.0, eps=_EPSILON, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        for k, g in grads.items():
            shape = (-1, *[1] * (g.dim() - 1))
            mean, square = memory["mean"][k][:a], memory["square"][k][:a]
            mean.lerp_(g, 1 - _BETA1)
            square.mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
            root = (square / (1 - _BETA2**t).view(shape)).sqrt_().add_(_EPSILON)
            params[k].addcdiv_(mean / (1 - _BETA1**t).view(shape), root, value=-how.lr)
        return
    for k, g in grads.items():
        if how.momentum:
            g = memory["velocity"][k][:a].mul_(how.momentum).add_(g)
        params[k].add_(g, alpha=-how.lr)
