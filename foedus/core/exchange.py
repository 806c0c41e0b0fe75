"""One exchange as data: what is asked (`Ask`), what was sent (`Broadcast`), and what comes back
(`Batch`, `Replies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree

if TYPE_CHECKING:
    from foedus.core.held import Held

Accept = Callable[[Tensor, Tree], dict[int, str]]
"""Of clients' ids and their stacked replies: the places of those that must not be used, and why."""


class NothingArrived(Exception):  # noqa: N818 - a signal, no error
    """No reply has arrived in this round that can be used; unless caught, the round leaves the
    state as it is.
    """


@dataclass(frozen=True, eq=False)
class Broadcast:
    """What clients were asked with in a round: arguments, held values as they were then, and the
    server's own note on it.
    """

    round: int
    payload: dict[str, Tree]
    held: dict[str, Held] = field(default_factory=dict)
    note: Tree = None

    def __getitem__(self, name: str) -> Tree:
        return self.held[name] if name in self.held else self.payload[name]


@dataclass(frozen=True, eq=False)
class Ask:
    """One exchange for an engine: which step, with what, of whom, and the key from which each
    client's key is folded.

    payload: arguments that are the same for all. held: the held values, for engines in whose
    process the server is; updates: what each group of clients, given by its places in `ids`, is
    sent to bring its copies of them up to date. The message of a client is {**payload, **updates},
    without those that are `None`: its copy is the newest. free: not sent (a measurement, or a
    reference with all rows in one place). taking: how many clients take part in the round. sent:
    the round of the broadcast, where it is late.
    """

    step: str
    payload: dict[str, Tree]
    ids: Tensor
    key: Tensor
    round: int
    exchange: int
    quantise: str | None = None
    free: bool = False
    taking: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    updates: list[tuple[Tensor, dict[str, Tree]]] = field(default_factory=list)
    sent: int | None = None

    @property
    def answers(self) -> int:
        """The round whose broadcast the replies answer."""
        return self.round if self.sent is None else self.sent

    def of(self, ids: Tensor) -> Ask:
        """The same, asked of some of the clients."""
        if not self.held:
            return replace(self, ids=ids)
        at = {i: n for n, i in enumerate(ids.tolist())}
        updates = [
            (
                torch.tensor(
                    [at[i] for i in self.ids[places].tolist() if i in at], dtype=torch.int64
                ),
                u,
            )
            for places, u in self.updates
        ]
        return replace(self, ids=ids, updates=[(places, u) for places, u in updates if len(places)])

    def messages(self) -> Iterator[tuple[Tensor, dict[str, Tree]]]:
        """(ids, message) of each group of clients."""
        if not self.held:
            yield self.ids, self.payload
            return
        for places, updates in self.updates:
            yield (
                self.ids[places],
                {**self.payload, **{name: u for name, u in updates.items() if u is not None}},
            )

    @property
    def arguments(self) -> dict[str, Tree]:
        """What a step is given where the server's own held values can be used."""
        return {
            **self.payload,
            **{name: h.argument for name, h in self.held.items() if h.argument is not None},
        }


@dataclass(frozen=True, eq=False)
class Batch:
    """Replies that come together: of clients `ids` with so many rows, to the broadcast of round
    `version`.
    """

    ids: Tensor
    sizes: Tensor
    reply: Tree
    stacked: bool
    version: int

    def __len__(self) -> int:
        return len(self.ids)

    def tree(self) -> Tree:
        """The replies with a leading client dimension."""
        return stacked_reply(self.reply, self.stacked)

    def pick(self, places: list[int] | Tensor) -> Batch:
        """Some of the replies."""
        if not self.stacked:
            return self
        at = torch.as_tensor(places)
        reply = map_tensors(lambda t: t.index_select(0, at), self.reply)
        return Batch(self.ids[at], self.sizes[at], reply, True, self.version)


@dataclass(frozen=True, eq=False)
class Replies:
    """Every reply of an exchange, in order of client id; each knows what it answers.

    Batched steps give `stacked`, one tree whose tensors have a leading client dimension; looped
    ones a list of trees that may differ in shape. `replies[i]` and iteration work for both.
    `versions` are the rounds whose broadcasts they answer: this one, unless messages are late;
    `broadcasts` are these, by round.
    """

    ids: Tensor
    weights: Tensor
    stacked: Tree = None
    separate: list[Tree] | None = None
    versions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    broadcasts: dict[int, Broadcast] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Tree:
        return (
            self.separate[i]
            if self.separate is not None
            else map_tensors(lambda t: t[i], self.stacked)
        )

    def __iter__(self) -> Iterator[Tree]:
        return (self[i] for i in range(len(self)))

    def stack(self) -> Tree:
        """One tree with a leading client dimension; the replies must have one shape."""
        return (
            self.stacked
            if self.separate is None
            else map_tensors(lambda *ts: torch.stack(ts), *self.separate)
        )

    def column(self, name: str) -> Tensor:
        """One entry of all replies, with a leading client dimension; other entries may differ in
        shape.
        """
        return (
            self.stacked[name]
            if self.separate is None
            else torch.stack([reply[name] for reply in self.separate])
        )

    def pick(self, places: Tensor) -> Replies:
        """Some of the replies."""
        versions = self.versions[places] if len(self.versions) else self.versions
        about = (self.ids[places], self.weights[places])
        if self.separate is not None:
            return Replies(
                *about, None, [self.separate[i] for i in places.tolist()], versions, self.broadcasts
            )
        return Replies(
            *about, map_tensors(lambda t: t[places], self.stacked), None, versions, self.broadcasts
        )

    def by_broadcast(self) -> Iterator[tuple[Broadcast, Replies]]:
        """The replies to each broadcast."""
        if len(self.broadcasts) == 1:
            yield next(iter(self.broadcasts.values())), self
            return
        for when in self.versions.unique().tolist():
            yield self.broadcasts[when], self.pick(torch.nonzero(self.versions == when).flatten())

    def sent(self, name: str) -> Tree:
        """What each reply's client was sent under this name, with a leading client dimension."""
        rounds, place = self.versions.unique(return_inverse=True)
        each = [self.broadcasts[when][name] for when in rounds.tolist()]
        if len(each) == 1:
            return map_tensors(lambda t: t.expand(len(self), *t.shape), each[0])
        return map_tensors(lambda *ts: torch.stack(ts).index_select(0, place), *each)


def map_tensors(f: Callable, first: Tree, *rest: Tree) -> Tree:
    """`f` on the tensors of a reply; constants stay as they are."""
    return tree.map(lambda t, *ts: f(t, *ts) if isinstance(t, Tensor) else t, first, *rest)


def form_of_batch(reply: Tree) -> tuple:
    """What stacked replies must have in common to be joined."""
    leaves, form = tree.flatten(reply)
    return form, [t.shape[1:] if isinstance(t, Tensor) else t for t in leaves]


def stacked_reply(reply: Tree, stacked: bool) -> Tree:
    """A reply with its leading client dimension."""
    return reply if stacked else map_tensors(lambda t: t.unsqueeze(0), reply)
