"""Messages that take time: clients act on what the server had some rounds ago, and their replies
come late.

In round t client i is sent what the server had in round t - down_i (in the first round, until there
is such a one), and the server has its reply in round t + up_i. So a client that was not in the
cohort of round t - down_i still is sent that round's broadcast, in round t: `down` is how old the
server's values are where client i reads them, and nobody acts on what was not sent to it. A round
in which no reply arrives leaves the server as it is. `start` is before time begins: nothing is late
there, and a reply with nothing in it does not travel. Bytes are charged when they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree
from foedus.core.exchange import Batch, Broadcast
from foedus.errors import CheckpointError, ConfigError

Rounds = int | Sequence[int] | Any
LONGEST = 100_000


@dataclass(frozen=True, eq=False)
class Delays:
    """Rounds that each client's replies (`up`) and broadcasts (`down`) take, in order of client
    id.
    """

    up: Tensor
    down: Tensor

    @cached_property
    def longest(self) -> int:
        """The longest round trip."""
        return int((self.up + self.down).max())


class SomeDelays(Delays):
    """Delays of some of the clients of a run, where they are; the longest round trip is that of
    all.
    """

    def __init__(self, up: Tensor, down: Tensor, longest: int):
        super().__init__(up, down)
        self.__dict__["longest"] = longest


def draw_delays(up: Rounds, down: Rounds, clients: int, seed: int = 0) -> Delays:
    """Delays of so many clients: one number for all, one for each, or drawn from a distribution
    with SciPy's `rvs`.
    """
    draws = np.random.default_rng(seed)
    found = []
    for name, given in (("up", up), ("down", down)):
        if hasattr(given, "rvs"):
            value: Sequence[int] = given.rvs(size=clients, random_state=draws)
        else:
            value = cast("Sequence[int]", [given] * clients if np.ndim(given) == 0 else given)
        if len(value) != clients:
            raise ConfigError(
                f"{name} has {len(value)} delays; the federation has {clients} clients: give one "
                "for each"
            )
        found.append(torch.tensor(whole_rounds(name, value), dtype=torch.int64))
    return Delays(*found)


def whole_rounds(name: str, values: Any) -> list[int]:
    """Integers that are not negative, or an error that names the first that is not."""
    each: list[Any] = (
        [values] if isinstance(values, str) else np.asarray(values, dtype=object).tolist()
    )
    for v in each:
        whole = not isinstance(v, bool) and (
            isinstance(v, Integral) or (isinstance(v, float) and v.is_integer())
        )
        if not whole or not 0 <= v <= LONGEST:
            raise ConfigError(
                f"{name} has a delay of {v!r}; delays are integers, in rounds, from 0 to {LONGEST}"
            )
    return [int(v) for v in values]


class Mail:
    """What is on its way: the broadcasts that may still be read or answered, and the replies that
    have not arrived.
    """

    def __init__(self, delays: Delays, ids: Tensor):
        self.delays, self.ids = delays, ids
        self.round = 0
        self.calls: Counter[str] = Counter()
        self.sent: dict[str, dict[int, Broadcast]] = {}
        self.replies: dict[str, list[tuple[int, Batch]]] = {}

    def slot(self, step: str, round: int) -> str:
        """Which exchange of a round this is: a step may be asked for several times."""
        if round != self.round:
            self.round, self.calls = round, Counter()
        self.calls[step] += 1
        return f"{step} {self.calls[step]}"

    def broadcasts(self, slot: str, now: Broadcast, ids: Tensor) -> list[tuple[Broadcast, Tensor]]:
        """The broadcast that each of these clients acts on, and the places of the clients."""
        past = self.sent.setdefault(slot, {})
        past[now.round] = now
        waiting = {batch.version for _, batch in self.replies.get(slot, [])}
        rounds = torch.tensor(sorted(past))
        oldest = int(
            rounds[
                torch.searchsorted(rounds, now.round - int(self.delays.down.max()), right=True)
                .sub(1)
                .clamp(min=0)
            ]
        )
        for when in [r for r in past if r < oldest and r not in waiting]:
            del past[when]
        version = self._versions(slot, now.round, ids)
        return [
            (past[v], torch.nonzero(version == v).flatten()) for v in sorted(set(version.tolist()))
        ]

    def _versions(self, slot: str, round: int, ids: Tensor) -> Tensor:
        """The newest broadcast that has reached each client; the first, if none has."""
        rounds = torch.tensor(sorted(self.sent[slot]))
        seen = (
            torch.searchsorted(
                rounds, round - self.delays.down[torch.searchsorted(self.ids, ids)], right=True
            )
            - 1
        )
        return rounds[seen.clamp(min=0)]

    def post(self, slot: str, round: int, batch: Batch) -> None:
        """Replies on their way to the server."""
        box = self.replies.setdefault(slot, [])
        arrives = round + self.delays.up[torch.searchsorted(self.ids, batch.ids)] * bool(
            tree.leaves(batch.reply)
        )
        for at in arrives.unique().tolist():
            box.append((at, batch.pick(torch.nonzero(arrives == at).flatten())))

    def collect(self, slot: str, round: int) -> list[Batch]:
        """What has arrived by now."""
        box = self.replies.get(slot, [])
        self.replies[slot] = [(at, batch) for at, batch in box if at > round]
        return [batch for at, batch in box if at <= round]

    def save(self) -> Tree:
        """All that is on its way."""
        boxes = {
            name: [[at, b.ids, b.sizes, b.reply, b.stacked, b.version] for at, b in box]
            for name, box in self.replies.items()
        }
        sent = {
            name: [[b.round, b.payload, b.held, b.note] for b in past.values()]
            for name, past in self.sent.items()
        }
        return {"up": self.delays.up, "down": self.delays.down, "sent": sent, "mail": boxes}

    def load(self, saved: Tree) -> None:
        """Take up what `save` gave."""
        if not torch.equal(saved["up"], self.delays.up) or not torch.equal(
            saved["down"], self.delays.down
        ):
            raise CheckpointError(
                "the checkpoint was made with other delays: use the same up, down and seed of "
                "fd.Delayed"
            )
        self.sent = {
            name: {entry[0]: Broadcast(*entry) for entry in past}
            for name, past in saved["sent"].items()
        }
        self.replies = {
            name: [(at, Batch(*rest)) for at, *rest in box] for name, box in saved["mail"].items()
        }
