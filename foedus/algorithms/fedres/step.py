"""One round of FedRes at a batch of clients: predict, see rows, learn from those of a round trip
earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.algorithms.fedres.pair import forward, slope, targets, value
from foedus.base import tree
from foedus.base.batching import batched
from foedus.base.columns import Columns, part
from foedus.base.rows import take
from foedus.base.tree import Tree
from foedus.core.clients import Clients
from foedus.errors import ReplyError
from foedus.models.base import Model, Params

if TYPE_CHECKING:
    from foedus.algorithms.fedres.sgd import FedRes


def log_tally(algorithm: Any, clients: Clients, **names: str) -> None:
    """Log the sums of clients over their rounds so far (`tally`), as averages over all rounds of
    all clients.
    """
    if algorithm.measure_every and clients.round % algorithm.measure_every == 0:
        found = clients.measure(algorithm.tally, weights="uniform")
        if found is not None:
            clients.log(**{name: found[key] / found["t"] for key, name in names.items()})


def act(
    algorithm: FedRes,
    model: Model | None,
    columns: Columns,
    args: dict[str, Tree],
    tables: Sequence[Any],
    own: bool = False,
) -> Tree:
    """One round of a batch of clients: `reply` and new `state`, everything with a leading client
    dimension.

    `gradient()` is that in the global model, whether or not it is sent. own: the state belongs only
    to the caller, so the gradients that wait in it may be changed in place.
    """
    table_x, table_y, spec = tables
    state, w, index, b = args["state"], args["w"], args["index"], algorithm.batch_size
    t = state["t"]
    if "rows" in args:
        rows = args["rows"]
    else:
        rows = stream(
            t, index, args["count"] if "count" in args else (args["weight"] > 0).sum(1), b
        )
    x, y = take(table_x, rows).float(), take(table_y, rows)
    target = targets(y, spec)
    z, reply, new = torch.zeros_like(target), {}, {**state, "t": t + 1}
    if algorithm.global_model is not None:
        x_g = part(x, algorithm.shared, 2)
        z_g, pull_g = forward(algorithm.global_model, w, x_g)
        z, new["seen"] = z + z_g, w
    if model is not None:
        z_l, pull_l = forward(model, state["local"], part(x, columns, 2))
        z = z + z_l
    if algorithm.clip_predictions:
        new["low"] = torch.minimum(state["low"], target.amin(1))
        new["high"] = torch.maximum(state["high"], target.amax(1))
        z = clipped(z, new)
    new["loss"] = state["loss"] + value(algorithm.loss, z, target).mean(1)
    s = slope(algorithm.loss, z, target)
    s = s / b if b > 1 else s
    if algorithm.global_model is not None:
        if algorithm.send == "gradient":
            reply = pull_g(s)
        else:
            reply = {
                "x": x_g,
                "y": y.to(torch.uint8) if spec.classes and spec.classes <= 256 else y,
            }
            if model is not None:
                reply["local"] = z_l
            if algorithm.clip_predictions:
                reply |= {"low": new["low"], "high": new["high"]}
    if model is not None:
        g = pull_l(s)
        if "waiting" in state:
            new["waiting"], g = late(state["waiting"], g, t, args["lag"], own)
        eta = algorithm.local_step or algorithm.step
        new["local"], squares = descended(
            algorithm, state["local"], g, state.get("squares"), t, eta, 1
        )
        if squares is not None:
            new["squares"] = squares
    return {"reply": reply, "state": new, "gradient": lambda: pull_g(s)}


@batched
def act_batched(args: dict[str, Tree], shared: tuple) -> Tree:
    algorithm, model, columns, *tables = shared
    found = act(algorithm, model, columns, args, tables)
    # What all clients share arrives expanded; a state must stand on its own.
    return {"reply": found["reply"], "state": tree.map(lambda v: v.contiguous(), found["state"])}


def by_client(values: Tensor, like: Tensor) -> Tensor:
    """One value for each client (or for all), in the shape of its parameters."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))


def clipped(z: Tensor, range_: Tree) -> Tensor:
    """Predictions (c, b, m) within each client's interval of 0 and the labels it has seen."""
    return z.clamp(range_["low"].unsqueeze(1), range_["high"].unsqueeze(1))


def late(waiting: Params, g: Params, t: Tensor, lag: Tensor, own: bool) -> tuple[Params, Params]:
    """Put the gradients of round t into the ring, and take out those of round t - lag: zero, where
    there was none.
    """
    clients = torch.arange(len(t))
    size = next(iter(waiting.values())).shape[1]
    kept, due = {}, {}
    for k, ring in waiting.items():
        kept[k] = ring if own else ring.clone()
        kept[k][clients, t % size] = g[k]
        found = kept[k][clients, (t - lag) % size]
        due[k] = found * by_client((t >= lag).to(found.dtype), found)
    return kept, due


def stream(t: Tensor, index: Tensor, count: Tensor, b: int) -> Tensor:
    """Row numbers (c, b) of each client's round t: its rows in their order, cyclically."""
    return index.gather(1, (t.unsqueeze(1) * b + torch.arange(b)) % count.unsqueeze(1))


def in_range(replies: Tree, name: str, most: int | None) -> dict[int, str]:
    """Which of some stacked replies have integers of this name that are not all below
    `most`.
    """
    values = replies.get(name) if isinstance(replies, dict) else None
    if not isinstance(values, Tensor) or (most is not None and values.is_floating_point()):
        raise ReplyError(f"its reply has no {name}, or one that is not of integers")
    if most is None:
        return {}
    bad = ((values < 0) | (values >= most)).reshape(len(values), -1).any(1)
    return dict.fromkeys(
        torch.nonzero(bad).flatten().tolist(),
        f"its {name} must be integers from 0 to {most - 1}",
    )


def counted(t: Tensor, forget: float) -> Tensor:
    """sum_s forget^(t-s) over rounds s = 0 ... t: t + 1, if nothing is forgotten."""
    return t + 1 if forget == 1 else (1 - forget ** (t + 1.0)) / (1 - forget)


def descended(
    settings: FedRes,
    w: Params,
    g: Params,
    squares: Params | None,
    t: Tensor,
    eta: float,
    batch: int,
) -> tuple[Params, Params | None]:
    """One step of the schedule, and the projection; parameters with `batch` leading dimensions."""
    if settings.schedule == "adagrad":
        assert squares is not None
        if settings.forget != 1:
            squares = {k: settings.forget * s for k, s in squares.items()}
        squares = {k: s.addcmul(g[k], g[k]) for k, s in squares.items()}
        # Where no gradient has been, the sum is 0 and so is the gradient: any finite factor does.
        w = {
            k: p.addcmul(g[k], squares[k].clamp(min=1e-30).rsqrt(), value=-eta)
            for k, p in w.items()
        }
    elif settings.schedule in ("constant", "theorem2"):
        eta = eta if settings.theorem is None else settings.theorem.size
        w = {k: p + -eta * g[k] for k, p in w.items()}
    else:
        pace = -eta * counted(t, settings.forget).rsqrt()
        w = {k: p + (pace if batch == 0 else by_client(pace, p)) * g[k] for k, p in w.items()}
    if settings.radius is not None:
        norm = reduce(torch.add, (p.flatten(batch).square().sum(-1) for p in w.values())).sqrt()
        shrink = (settings.radius / norm.clamp(min=1e-30)).clamp(max=1)
        w = {k: p * by_client(shrink, p) for k, p in w.items()}
    return w, squares
