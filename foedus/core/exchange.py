"""One exchange: what is asked (`Ask`), and what comes back (`Batch`, `Replies`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree

Accept = Callable[[Tree], dict[int, str]]
"""Of stacked replies: the places of those that must not be used, and why."""

NOT_FINITE = "its reply is not finite (NaN or infinity)"


@dataclass(frozen=True, eq=False)
class Replies:
    """Every reply of an exchange, in order of client id.

    Batched steps give `stacked`, one tree whose tensors have a leading client dimension; looped ones a list of trees
    that may differ in shape. `replies[i]` and iteration work for both. `versions` are the rounds whose broadcast they were
    computed from: this one, unless the engine delays messages.
    """

    ids: Tensor
    weights: Tensor
    stacked: Tree | None = None
    separate: list[Tree] | None = None
    versions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Tree:
        return self.separate[i] if self.separate is not None else map_tensors(lambda t: t[i], self.stacked)

    def __iter__(self) -> Iterator[Tree]:
        return (self[i] for i in range(len(self)))

    def stack(self) -> Tree:
        """One tree with a leading client dimension; the replies must have one shape."""
        return self.stacked if self.separate is None else map_tensors(lambda *ts: torch.stack(ts), *self.separate)


def map_tensors(f: Callable, first: Tree, *rest: Tree) -> Tree:
    """`f` on the tensors of a reply; constants stay as they are."""
    return tree.map(lambda t, *ts: f(t, *ts) if isinstance(t, Tensor) else t, first, *rest)


def form_of_batch(reply: Tree) -> tuple:
    """What stacked replies must have in common to be joined."""
    leaves, form = tree.flatten(reply)
    return form, [t.shape[1:] if isinstance(t, Tensor) else t for t in leaves]


class NothingArrived(Exception):  # noqa: N818 - a signal, no error
    """An engine that delays messages has no reply to deliver in this round; unless caught, the round leaves the state as it is."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Replies that come together: of clients `ids` with so many rows, computed from the broadcast of round `version`."""

    ids: Tensor
    sizes: Tensor
    reply: Tree
    stacked: bool
    version: int


def some_of(batch: Batch, places: list[int]) -> Batch:
    """Some of the replies of a batch."""
    if not batch.stacked:
        return batch
    at = torch.tensor(places)
    return Batch(batch.ids[at], batch.sizes[at], map_tensors(lambda t: t[at], batch.reply), True, batch.version)


@dataclass(frozen=True, eq=False)
class Ask:
    """One exchange: which step, what is sent, to whom, and the key from which each client's key is folded.

    A free one is not sent in earnest (a measurement, or a reference with all rows in one place). `group` tells apart exchanges of
    a round that ask different clients for the same step; `taking` is how many clients take part in the round. `accept` says which
    replies the algorithm must not use: it stays at the server.
    """

    step: str
    payload: dict[str, Tree]
    ids: Tensor
    key: Tensor
    round: int
    exchange: int
    quantise: str | None = None
    free: bool = False
    group: str = ""
    taking: int = 0
    accept: Accept | None = None


def stacked_reply(reply: Tree, stacked: bool) -> Tree:
    """A reply with its leading client dimension."""
    return reply if stacked else map_tensors(lambda t: t.unsqueeze(0), reply)
