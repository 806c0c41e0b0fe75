"""Parts of a federation for worker processes: the division of clients, and the transport of states
and trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree
from foedus.core.session import Reduced
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.errors import CheckpointError
from foedus.storage.states import States

# -- division of clients ---------------------------------------------------------------------------


def cut(fed: Federation, parts: int) -> list[np.ndarray]:
    """Positions of the clients of each part: neighbors in order of id, with about equal numbers of
    rows.
    """
    order = np.argsort(fed.ids, kind="stable")
    parts = min(parts, len(fed))
    ends = np.cumsum(fed.sizes[order])
    middles = ends - fed.sizes[order] / 2
    starts = np.searchsorted(middles, ends[-1] * np.arange(1, parts) / parts)
    # No part is empty, even if clients are very unequal.
    for k in range(parts - 1):
        starts[k] = max(starts[k], starts[k - 1] + 1 if k else 1)
    starts = np.minimum(starts, len(fed) - np.arange(parts - 1, 0, -1))
    return np.split(order, starts)


def part_of(fed: Federation, positions: np.ndarray) -> Federation:
    """The federation of some clients, with their own rows only, client after client."""
    some, data = fed.select(positions), fed.data
    rows, test = some.rows, some.test_rows
    own = Data(
        data.name,
        data.x_train[rows],
        data.y_train[rows],
        data.x_test[test],
        data.y_test[test],
        data.classes,
        data.class_names,
        weights_train=None if data.weights_train is None else data.weights_train[rows],
        weights_test=None if data.weights_test is None else data.weights_test[test],
        raw=data.raw,
    )
    return Federation(
        own, np.arange(len(rows)), some.offsets, np.arange(len(test)), some.test_offsets, some.ids
    )


def split_states(saved: Tree, sizes: list[int]) -> list[Tree]:
    """Split what `LocalSession.save` returned for all clients into consecutive parts.

    Args:
        saved: The states of all clients.
        sizes: The number of clients of each part.
    """
    if "late" in saved:
        raise CheckpointError(
            "the checkpoint was made with messages on their way: use the same fd.Delayed(...) "
            "engine"
        )
    if len(saved["slot"]) != sum(sizes):
        raise CheckpointError(
            f"the checkpoint has {len(saved['slot'])} clients, the federation {sum(sizes)}"
        )
    found, first = [], 0
    for size in sizes:
        slot = saved["slot"][first : first + size]
        slots = slot[slot >= 0].sort().values
        part: dict[str, Tree] = {
            "slot": torch.where(slot >= 0, torch.searchsorted(slots, slot), -1)
        }
        if "states" in saved:
            part["states"] = tree.map(lambda t, s=slots: t[s], saved["states"])
        else:
            part["separate"] = {
                str(p): saved["separate"][str(first + p)]
                for p in torch.nonzero(slot >= 0).flatten().tolist()
            }
        found.append(part)
        first += size
    return found


def join_states(parts: list[Tree]) -> Tree:
    """The inverse of `split_states`."""
    slots, used = [], 0
    for part in parts:
        slots.append(torch.where(part["slot"] >= 0, part["slot"] + used, -1))
        used += int((part["slot"] >= 0).sum())
    some = [p["states"] for p in parts if "states" in p]
    if some and all("states" in p or not p["separate"] for p in parts) and _alike(some):
        return {"slot": torch.cat(slots), "states": tree.map(lambda *ts: torch.cat(ts), *some)}
    separate: dict[str, Tree] = {}
    first = 0
    for part in parts:
        states = States(len(part["slot"]))
        states.load(part)
        known = torch.nonzero(part["slot"] >= 0).flatten().tolist()
        separate |= {
            str(first + p): tree.map(
                lambda t: t.clone() if isinstance(t, Tensor) else t, states.get(p)
            )
            for p in known
        }
        first += len(part["slot"])
    return {"slot": torch.cat(slots), "separate": separate}


def _alike(trees: list[Tree]) -> bool:
    """Whether stacked states have one structure, shape and dtype."""
    form = lambda t: (tree.flatten(t)[1], [(v.shape[1:], v.dtype) for v in tree.leaves(t)])  # noqa: E731
    return all(form(t) == form(trees[0]) for t in trees[1:])


# -- transport of trees ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Bits:
    """A bfloat16 array, which numpy does not know, by its bits."""

    array: np.ndarray


def pack(t: Tree) -> Tree:
    """A tree with arrays in place of tensors: these go into shared memory as they are."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().contiguous()
        return (
            _Bits(leaf.view(torch.int16).numpy()) if leaf.dtype == torch.bfloat16 else leaf.numpy()
        )

    return tree.map(one, t)


def unpack(t: Tree) -> Tree:
    """The inverse of `pack`, copied: shared memory must not be written to."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, _Bits):
            return one(leaf.array).view(torch.bfloat16)
        if not isinstance(leaf, np.ndarray):
            return leaf
        own = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name))
        own.numpy()[...] = leaf
        return own

    return tree.map(one, t)


def packed_sum(reduced: Reduced) -> Reduced:
    """A partial sum, packed as trees, because structures of trees cannot be sent separately."""
    sums = reduced.total
    assert sums.total is not None
    sums.total, sums.rest, sums.form = (
        pack(tree.unflatten(sums.total, sums.form)),
        pack(sums.rest),
        None,
    )
    return reduced


def unpacked_sum(reduced: Reduced) -> Reduced:
    """A partial sum that was sent."""
    sums = reduced.total
    sums.total, sums.form = tree.flatten(unpack(sums.total))
    sums.rest = unpack(sums.rest)
    return reduced
