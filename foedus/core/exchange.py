"""One exchange as data: question (`Ask`), message (`Broadcast`), replies (`Batch`, `Replies`)."""

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
"""From ids and stacked replies to the places of unusable replies, with reasons."""


class NothingArrived(Exception):  # noqa: N818 - a signal, no error
    """No usable reply has arrived in this round.

    Unless caught, the round leaves the state unchanged.
    """


@dataclass(frozen=True, eq=False)
class Broadcast:
    """What clients were sent in a round.

    Args:
        round: The round.
        payload: Arguments of the step.
        held: Held values as they were then.
        note: The server's own note, which is not sent.
    """

    round: int
    payload: dict[str, Tree]
    held: dict[str, Held] = field(default_factory=dict)
    note: Tree = None

    def __getitem__(self, name: str) -> Tree:
        return self.held[name] if name in self.held else self.payload[name]


@dataclass(frozen=True, eq=False)
class Ask:
    """One exchange for an engine.

    The message of a client is {**payload, **updates}, without updates that are `None`: its copy is
    up to date.

    Args:
        step: The name of the client step.
        payload: Arguments that are the same for all clients.
        ids: The ids of the clients that are asked.
        key: The key from which each client's key is folded.
        round: The round.
        exchange: The number of the exchange in the round.
        quantise: The precision in which replies are sent.
        free: Whether nothing is sent: a measurement, or a reference with all rows in one place.
        taking: The number of clients that take part in the round.
        held: The held values, for engines in whose process the server is.
        updates: For each group of clients, given by its places in `ids`, the messages that bring
            its copies of held values up to date.
        sent: The round of the broadcast, if it is late.
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
        """The same exchange with some of the clients.

        Args:
            ids: The ids of these clients.
        """
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
        """The arguments of a step where the server's own held values can be used."""
        return {
            **self.payload,
            **{name: h.argument for name, h in self.held.items() if h.argument is not None},
        }


@dataclass(frozen=True, eq=False)
class Batch:
    """Replies that arrive together.

    Args:
        ids: The ids of the clients.
        sizes: Their numbers of rows.
        reply: The replies.
        stacked: Whether the tensors of `reply` have a leading client dimension.
        version: The round of the broadcast that they answer.
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
    """Every reply of an exchange, in order of client id, with the broadcast that it answers.

    `replies[i]` and iteration work for batched and looped steps.

    Args:
        ids: The ids of the clients.
        weights: The weight of each client.
        stacked: For batched steps, one tree whose tensors have a leading client dimension.
        separate: For looped steps, a list of trees that may differ in shape.
        versions: The rounds whose broadcasts they answer: this one, unless messages are late.
        broadcasts: These broadcasts, by round.
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
        """One entry of all replies, with a leading client dimension.

        Other entries may differ in shape.

        Args:
            name: The name of the entry.
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
        """What each reply's client was sent under a name, with a leading client dimension.

        Args:
            name: The name of an argument.
        """
        rounds, place = self.versions.unique(return_inverse=True)
        each = [self.broadcasts[when][name] for when in rounds.tolist()]
        if len(each) == 1:
            return map_tensors(lambda t: t.expand(len(self), *t.shape), each[0])
        return map_tensors(lambda *ts: torch.stack(ts).index_select(0, place), *each)


def map_tensors(f: Callable, first: Tree, *rest: Tree) -> Tree:
    """Apply `f` to the tensors of a reply; constants are kept."""
    return tree.map(lambda t, *ts: f(t, *ts) if isinstance(t, Tensor) else t, first, *rest)


def form_of_batch(reply: Tree) -> tuple:
    """What stacked replies must have in common to be joined."""
    leaves, form = tree.flatten(reply)
    return form, [t.shape[1:] if isinstance(t, Tensor) else t for t in leaves]


def stacked_reply(reply: Tree, stacked: bool) -> Tree:
    """A reply with its leading client dimension."""
    return reply if stacked else map_tensors(lambda t: t.unsqueeze(0), reply)
