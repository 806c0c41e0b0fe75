"""Mini-batch training of a batch of clients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from foedus.base import random, tree
from foedus.base.batching import batched
from foedus.base.rows import Rows, take
from foedus.errors import ConfigError
from foedus.models.base import Model, Params
from foedus.models.dropout import Masks
from foedus.models.losses import Loss
from foedus.models.schedules import rates_of, varies
from foedus.models.training.accumulate import accumulated
from foedus.models.training.augment import crop_flip
from foedus.models.training.compiled import knows
from foedus.models.training.compiled import train as train_compiled
from foedus.models.training.gradients import gradient_of, to
from foedus.models.training.learning import Learner
from foedus.models.training.memory import fresh_memory, take_buffer
from foedus.models.training.optimizers import clip_gradients, update_parameters
from foedus.models.training.precision import narrowed
from foedus.models.training.schedule import batch_schedule
from foedus.models.training.settings import Training

_BLOCK_BYTES = 1 << 21
"""Rows are gathered for several steps together, in blocks of about this size, which fit the
cache."""

_STEP_BYTES, _STATE_BYTES, _FEWEST = 1 << 22, 1 << 25, 4
"""Limits for the clients that are trained together: size of the rows of a step, size of the
parameters with their gradients and moments; and the least number of clients.
"""

_TRAINED = ("params", "correction", "memory")
"""The arguments of a training that are moved to the device of the rows."""


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
    frozen: frozenset[str] = frozenset(),
    round: int = 0,
) -> dict[str, Any]:
    """Train from `params` on a client's rows. One step, with g the mini-batch gradient at w:

        w <- w - lr * optimizer(g + correction + prox * (w - params) + weight_decay * w)

    where lr may depend on the step and, from 1, the `round`; "adamw" takes lr * weight_decay * w
    off w before it.

    Returns `params`; `steps`, how many were made; and `memory`, the optimizer's, to go on with
    another time. Parameters whose names are in `frozen` stay as they are.

    Given the rows of a batch of clients at once (see `foedus.core.algorithm.stacked`), what it
    returns has their dimension, too; `params` are those that all start from, a `correction` may be
    one for all or have their dimension, and there is no `memory`.
    """
    args = {"params": params, "index": data.index, "weight": data.weight, "key": key}
    if correction is not None:
        args["correction"] = correction
    if memory:
        args["memory"] = memory
    shared: tuple = (how, model, loss, data.table_x, data.table_y, prox)
    shared = (*shared, data.table_w, frozen, round)
    if data.index.dim() == 2:
        if memory:
            raise TypeError("a stacked step cannot keep memory: leave the decorator out")
        clients = len(data.index)
        args["params"] = {k: v.expand(clients, *v.shape) for k, v in params.items()}
        if correction is not None:
            args["correction"] = {
                k: v if v.dim() > params[k].dim() else v.expand(clients, *v.shape)
                for k, v in correction.items()
            }
        with torch.no_grad():
            return _descend.__wrapped__(args, shared)
    return _descend(args, shared)


def descend_to(
    how: Training, model: Model, loss: Loss, params: Params, data: Rows, target: Tensor,
    key: Tensor, round: int = 0,
) -> Params:  # fmt: skip
    """Train from `params` towards targets (n, outputs) of a client's rows, not its labels."""
    args = {"params": params, "index": data.index, "weight": data.weight, "key": key}
    return _descend_to({**args, "target": target}, (how, model, loss, data.table_x, round))


@batched
def _descend_to(args: dict[str, Any], shared: tuple) -> Params:
    """Every row belongs to one client, so the targets of all clients fit into one table."""
    how, model, loss, table_x, *round = shared
    target, real = args.pop("target"), args["weight"] > 0
    table_y = target.new_zeros(len(table_x), target.shape[-1], device=table_x.device)
    table_y[args["index"][real].to(table_x.device)] = target[real].to(table_x.device)
    about = (how, model, loss, table_x, table_y, 0.0, None, frozenset(), *(round or [0]))
    return _descend.__wrapped__(args, about)["params"]


@batched
def _descend(args: dict[str, Any], shared: tuple) -> dict[str, Any]:
    how, model, loss, table_x, table_y, prox, *extra = shared
    table_w, frozen, round = extra or (None, frozenset(), 0)
    used, weight, steps = batch_schedule(how, args["index"], args["weight"], args["key"])
    if table_w is not None:  # 1/b sum_j w_j loss_j of a mini-batch of b rows
        weight = weight * take(table_w, used)
    decay = prox + how.weight_decay
    plain = how.optimizer == "sgd" and not how.momentum and how.clip is None
    plain = plain and (how.decay == "all" or not how.weight_decay)
    if how.precision is not None:
        model = narrowed(model, how.precision, table_x.device)
    plain = plain and not frozen
    in_place = model.closed_form and plain
    simple = plain and not how.augment and not varies(how.lr)
    rates = rates_of(how.lr, round, 1 if simple else len(used))
    whole = model.closed_form or how.accumulate == 1  # not by parts, each with its own statistics
    if simple and whole and knows(model, loss, table_x, table_y, args, used.shape[2]):
        params, lr = _own(args["params"]), rates[0]
        train_compiled(
            model, loss, params, _constant(args, prox), table_x, table_y, used, weight, steps,
            Masks(args["key"], len(used)), lr, 1 - lr * decay,
        )  # fmt: skip
        return {"params": params, "memory": args.get("memory") or {}, "steps": steps}
    rates = rates * len(used) if simple else rates
    order = torch.argsort(steps, descending=True, stable=True)
    moved = bool((steps[1:] > steps[:-1]).any())
    if moved:
        used, weight = used[:, order], weight[:, order]
        args = {**args, **tree.map(lambda v: v[order], {k: args[k] for k in _TRAINED if k in args})}
    device, home = table_x.device, used.device
    used, weight = to(device, used), to(device, weight)
    args = {**args, **to(device, {k: args[k] for k in _TRAINED if k in args})}
    params = _own(args["params"])
    clients, total = len(steps), len(used)
    memory = _own(args["memory"]) if args.get("memory") else fresh_memory(how, params, (clients,))
    even = "memory" not in args or "steps" not in memory
    even = even or bool((memory["steps"] == memory["steps"][0]).all())
    constant = _constant(args, prox)
    apart = how.optimizer == "adamw"
    pulls = {k: prox + (0 if apart else how.decay_of(v.dim() - 1)) for k, v in params.items()}

    still = (steps.unsqueeze(0) > torch.arange(total).unsqueeze(1)).sum(1).tolist()
    shape = table_x.shape[1:]
    if how.augment and len(shape) != 3:
        raise ConfigError(
            f"augment={how.augment!r} needs images of shape (channels, height, width); rows have "
            f"shape {tuple(shape)}"
        )
    key = args["key"][order] if moved else args["key"]
    noise = random.fold(key, 0xA06) if how.augment else None
    masks = Masks(key, total * how.accumulate)
    # closed forms hold no activations
    pieces = 0 if how.accumulate == 1 or model.closed_form else how.batch_size or 0
    padded = [False] * total
    if model.statistics or pieces:
        padded = (weight <= 0).flatten(1).any(1).tolist()
    if model.closed_form:
        table_x = table_x.flatten(1)
    row_bytes = table_x[:1].numel() * table_x.element_size()
    # autograd has a cost per call; closed forms are faster on blocks that fit the cache
    many = clients
    if model.closed_form:
        gradients = {} if in_place else params
        kept = sum(v[:1].nbytes for v in tree.leaves((params, memory, gradients)))
        step_bytes = used.shape[2] * row_bytes
        many = min(_STEP_BYTES // max(1, step_bytes), _STATE_BYTES // max(1, kept))
        many = max(_FEWEST, many)
    elif how.precision is not None:
        many = 1
    many = -(-clients // -(-clients // many))

    def train(low: int, high: int) -> None:
        """All steps of a part of the clients."""
        own, own_memory, own_constant = params, memory, constant
        if (low, high) != (0, clients):
            own = {k: v[low:high] for k, v in params.items()}
            own_memory = tree.map(lambda v: v[low:high], memory)
            own_constant = {k: v[low:high] for k, v in constant.items()}
        slope_at = gradient_of(model, loss)
        learner = Learner(model, loss) if model.trains_apart else None

        def slopes(
            first: int, params: Params, x: Tensor, y: Tensor, weight: Tensor, padded: bool,
            number: int = 0,
        ) -> tuple[Params, Params]:  # fmt: skip
            """Gradients and new running statistics on mini-batch `first + number` of all steps."""
            if learner is None:
                return slope_at(params, x, y, weight), {}
            some = slice(low, low + len(weight))
            draw = partial(masks.draw, step=first + number, clients=some)
            return learner(params, x, y, weight, padded, draw)

        left = [min(a, high) - low for a in still if a > low]
        each = (high - low) * used.shape[2]
        block = max(1, _BLOCK_BYTES // max(1, each * row_bytes))
        buffer = take_buffer(min(block, len(left)) * each, table_x)
        # Labels for all steps at once; vectors would take much memory.
        every_y = take(table_y, used[: len(left), low:high]) if table_y.dim() == 1 else None
        for first in range(0, len(left), block):
            a = left[first]
            picked = used[first : min(first + block, len(left)), low : low + a]
            flat, stop = picked.reshape(-1), first + len(picked)
            x = torch.index_select(table_x, 0, flat, out=buffer[: len(flat)])
            x = x.view(*picked.shape, *table_x.shape[1:])
            y = take(table_y, picked) if every_y is None else every_y[first:stop, :a]
            if noise is not None:
                steps_here = torch.arange(first, stop).unsqueeze(1)
                keys = random.fold(noise[low : low + a], steps_here)
                x = crop_flip(x.view(*picked.shape, *shape), keys).view(x.shape)
            shares = weight[first:stop, low : low + a]
            parts = (part.unbind() for part in (x, y, shares))
            for t, here, labels, share in zip(range(first, stop), *parts, strict=True):
                if left[t] < a:
                    here, labels, share = here[: left[t]], labels[: left[t]], share[: left[t]]
                now = own if left[t] == high - low else {k: v[: left[t]] for k, v in own.items()}
                lr = rates[t]
                if in_place:
                    outputs, pull = model.pullback(now, here)
                    pull(loss.slope(outputs, labels, share), -lr, 1 - lr * decay)
                    for k, v in own_constant.items():
                        now[k].add_(v[: left[t]], alpha=-lr)
                    continue
                batch = (now, here, labels, share, padded[t])
                at = partial(slopes, t * how.accumulate)
                grads, new = accumulated(at, pieces, *batch) if pieces else at(*batch)
                grads = {k: g for k, g in grads.items() if k not in frozen}
                if how.clip is not None:
                    clip_gradients(grads, how.clip)
                for k, g in grads.items():
                    if constant:
                        g.add_(own_constant[k][: left[t]])
                    if pulls[k]:
                        g.add_(now[k], alpha=pulls[k])
                update_parameters(how, lr, now, grads, own_memory, left[t], even)
                for k, v in new.items():
                    if k not in frozen:
                        now[k].copy_(v)

    for low in range(0, clients, many):
        train(low, min(low + many, clients))
    steps = steps[order] if moved else steps
    result = to(home, {"params": params, "memory": memory, "steps": steps})
    if moved:
        back = torch.argsort(order)
        result = tree.map(lambda v: v[back], result)
    return result


def _own(values: Any) -> Any:
    """Copies of a tree's tensors, for updates in place."""
    return tree.map(lambda v: v.clone(memory_format=torch.contiguous_format), values)


def _constant(args: dict[str, Any], prox: float) -> Params:
    """The term that is added to every gradient: the correction, and the constant part of the
    proximal term."""
    constant = dict(args.get("correction") or {})
    if prox:
        start = args["params"]
        constant = {
            k: torch.add(constant[k], v, alpha=-prox) if k in constant else v * -prox
            for k, v in start.items()
        }
    return constant
