"""What an engine offers for one run: `Session`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foedus import wire
from foedus.base.tree import Tree
from foedus.core.exchange import Ask, stacked_reply
from foedus.core.reduce import Accumulator, Ledger


class Session(Protocol):
    """What an engine offers for one run: see `foedus.engines.local.Local` for the reference.

    One that delays messages also has `late`, which takes what was sent and says what arrives, and `longest`, the longest round
    trip: see `foedus.engines.delayed`. One whose clients are on other machines may have `reduce(ask, weights)`, which adds up
    their replies where they are and returns a `Reduced`: see `foedus.engines.ray.engine`. One whose clients may fail to answer has
    `unsure = True`, `faults`, {client: why}, of the last exchange, and `refuse(client, why)` for answers that turn out to be no
    good: replies from strangers must be of the right round, sender and form when it yields them. One that must not send what is only
    measured has `measures = False`: see `foedus.engines.flower.session`.
    """

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]: ...


@dataclass(eq=False)
class Reduced:
    """Replies that a session has added up: their weighted sum, how many clients replied, and what they sent."""

    total: Accumulator
    clients: int = 0
    sent: Ledger = field(default_factory=Ledger)


def read_replies(session: Session, ask: Ask, ledger: Ledger) -> Iterator[tuple[Tensor, Tree, bool]]:
    """The replies as the server reads them, batch by batch; the ledger is charged with what they are on the wire."""
    for ids, reply, stacked in session.exchange(ask):
        if not ask.free:
            ledger.charge(reply, stacked, len(ids))
        yield ids, wire.dequantise(reply) if ask.quantise else reply, stacked


def add_up(session: Session, ask: Ask, weights: Tensor, remedy: str) -> Reduced:
    """What `Session.reduce` does, for sessions that are near their clients; weights are those of `ask.ids`."""
    reduced = Reduced(Accumulator(remedy))
    for ids, reply, stacked in read_replies(session, ask, reduced.sent):
        share = weights[torch.searchsorted(ask.ids, ids)]
        reduced.total.add(stacked_reply(reply, stacked), share, ask.round, ids)
        reduced.clients += len(ids)
    return reduced
