"""Storage of client states between rounds, for engines."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast

import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree
from foedus.errors import CheckpointError, ReplyError
from foedus.storage.spill import Pile, mapped, nbytes


class States:
    """Client states by position: one tensor for all if they have one shape, otherwise a tree each.

    Memory grows with the clients that have taken part, not with all clients. States beyond `memory`
    bytes (if given) are on disk.
    """

    def __init__(self, clients: int, memory: int | None = None):
        self.memory = memory
        self.slot = torch.full((clients,), -1, dtype=torch.int64)
        self.used = 0
        self.form: tree.Form = None
        self.tensors: list[Tensor] | None = None
        self.separate: MutableMapping[int, Tree] = {} if memory is None else Pile(memory)
        self.spilled = False  # whether `tensors` are on disk
        self.lent = False  # whether `tensors` may be shared: a reply may be a client's state

    def known(self, positions: Tensor) -> Tensor:
        """Which of these clients have a state."""
        return self.slot[positions] >= 0

    def get(self, position: int) -> Tree:
        """One client's state (`None` if it has none yet)."""
        if self.slot[position] < 0:
            return None
        if self.tensors is None:
            return self.separate[position]
        rows = [t[self.slot[position]] for t in self.tensors]
        self.lent = not self.spilled
        return tree.unflatten([t.clone() for t in rows] if self.spilled else rows, self.form)

    def put(self, position: int, state: Tree) -> None:
        """Keep one client's state."""
        if self.tensors is not None:
            self._scatter()
        if self.slot[position] < 0:
            self.slot[position] = self.used
            self.used += 1
        self.separate[position] = state

    def get_many(self, positions: Tensor) -> Tree:
        """States of some clients, stacked."""
        if self.tensors is None:
            if not self.separate:
                return None
            states = [self.separate[p] for p in positions.tolist()]
            form = tree.flatten(states[0])[1]
            columns = zip(*(_in_form(s, form) for s in states), strict=True)
            stacked = [torch.stack(c) if isinstance(c[0], Tensor) else c[0] for c in columns]
            return tree.unflatten(stacked, form)
        slots = self.slot[positions]
        # Tensors on disk are written in place, so only copies are returned.
        same = not self.spilled and self._all(slots, self.tensors[0]) if self.tensors else True
        self.lent |= same
        chosen = self.tensors if same else [t.index_select(0, slots) for t in self.tensors]
        return tree.unflatten(chosen, self.form)

    def put_many(self, positions: Tensor, stacked: Tree) -> None:
        """Keep the states of some clients, given stacked."""
        leaves, form = tree.flatten(stacked)
        if self.separate or not all(isinstance(t, Tensor) for t in leaves):
            for i, p in enumerate(positions.tolist()):
                self.put(p, tree.map(lambda t, i=i: t[i] if isinstance(t, Tensor) else t, stacked))
            return
        new = positions[self.slot[positions] < 0]
        if len(new):
            self.slot[new] = torch.arange(self.used, self.used + len(new))
            self.used += len(new)
        slots = self.slot[positions]
        if self.form is None:
            self.form = form
        elif form != self.form:
            leaves = _in_form(stacked, self.form)
        if self.tensors is None:
            self.tensors = [t.new_empty((0, *t.shape[1:])) for t in leaves]
        limited = self.memory is not None and not self.spilled
        if limited and self.used * nbytes(leaves) > cast("int", self.memory) * len(slots):
            # once, with room for all clients there are: a file is no larger than what is in it
            for i, t in enumerate(self.tensors):
                self.tensors[i] = mapped((len(self.slot), *t.shape[1:]), t.dtype)
                self.tensors[i][: len(t)] = t
            self.spilled = True
        everybody = self.used == len(slots) and torch.equal(slots, torch.arange(self.used))
        whole = everybody and not self.spilled
        if self.lent and not whole and not self.spilled:
            self.tensors = [t.clone() for t in self.tensors]
        self.lent = whole
        for i, t in enumerate(leaves):
            if whole:
                self.tensors[i] = t  # all clients, in order: no copy
                continue
            if len(self.tensors[i]) < self.used:
                size = max(self.used, min(2 * len(self.tensors[i]), len(self.slot)))
                room = t.new_empty((size, *t.shape[1:]))
                room[: len(self.tensors[i])] = self.tensors[i]
                self.tensors[i] = room
            elif not self.tensors[i].is_contiguous():
                self.tensors[i] = self.tensors[i].contiguous()
            self.tensors[i].index_copy_(0, slots, t)

    @staticmethod
    def _all(slots: Tensor, t: Tensor) -> bool:
        return len(slots) == len(t) and torch.equal(slots, torch.arange(len(slots)))

    def _scatter(self) -> None:
        """Convert one tensor for all to separate trees."""
        for p in torch.nonzero(self.slot >= 0).flatten().tolist():
            self.separate[p] = tree.map(torch.clone, self.get(p))
        self.tensors, self.form, self.spilled = None, None, False

    def save(self) -> Tree:
        """All states, as a tree."""
        if self.tensors is not None:
            states = tree.unflatten([t[: self.used] for t in self.tensors], self.form)
            return {"slot": self.slot, "states": states}
        return {"slot": self.slot, "separate": {str(p): s for p, s in self.separate.items()}}

    def load(self, saved: Tree) -> None:
        """Restore what `save` returned."""
        if saved["slot"].shape != self.slot.shape:
            raise CheckpointError(
                f"the checkpoint has {len(saved['slot'])} clients, the federation {len(self.slot)}"
            )
        if "states" in saved and self.memory is not None:
            known = torch.nonzero(saved["slot"] >= 0).flatten()
            self.put_many(known[saved["slot"][known].argsort()], saved["states"])
            return
        self.slot = saved["slot"].clone()
        self.used = int((self.slot >= 0).sum())
        if "states" in saved:
            self.tensors, self.form = tree.flatten(saved["states"])
            self.lent = True
        else:
            self.separate.update({int(p): s for p, s in saved["separate"].items()})


def _in_form(state: Tree, form: Any) -> list:
    """The leaves of a state in the order of another's, whose dictionaries may differ in order."""
    try:
        return tree.in_places(state, form)
    except ValueError as error:
        raise ReplyError(
            f"a client step returned a state of another structure than the states before: {error}"
        ) from None
