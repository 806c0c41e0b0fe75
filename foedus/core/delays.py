"""Delayed messages: clients act on earlier broadcasts, and their replies arrive late.

In round t client i is sent what the server had in round t - down_i (in the first round, until there
is such a round), and the server receives its reply in round t + up_i. So a client that was not in
the cohort of round t - down_i is still sent that round's broadcast, in round t: `down` is the age
of the server's values at client i, and no client acts on values that were not sent to it. A round
in which no reply arrives leaves the server's state unchanged. `start` is before the first round:
nothing is late there. An empty reply is never late. Bytes are charged when they are sent.
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
    """The delays of all clients in order of their ids, in rounds.

    Args:
        up: Rounds that each client's replies take.
        down: Rounds that broadcasts to each client take.
    """

    up: Tensor
    down: Tensor

    @cached_property
    def longest(self) -> int:
        """The longest round trip."""
        return int((self.up + self.down).max())


class SomeDelays(Delays):
    """The delays of the clients of one process; the longest round trip is that of all clients."""

    def __init__(self, up: Tensor, down: Tensor, longest: int):
        super().__init__(up, down)
        self.__dict__["longest"] = longest


def draw_delays(up: Rounds, down: Rounds, clients: int, seed: int = 0) -> Delays:
    """The delays of a number of clients.

    Args:
        up: One number for all clients, one for each, or a distribution with SciPy's `rvs`.
        down: As `up`.
        clients: The number of clients.
        seed: The seed of random delays.

    Raises:
        ConfigError: A delay is not an integer from 0 to 100,000.
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
    """Non-negative integers from user input; raises `ConfigError` for the first invalid value."""
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
    """Messages under way: broadcasts that may still be read or answered, and late replies."""

    def __init__(self, delays: Delays, ids: Tensor):
        self.delays, self.ids = delays, ids
        self.round = 0
        self.calls: Counter[str] = Counter()
        self.sent: dict[str, dict[int, Broadcast]] = {}
        self.replies: dict[str, list[tuple[int, Batch]]] = {}

    def slot(self, step: str, round: int) -> str:
        """A name for an exchange of a round, as a step may be run several times."""
        if round != self.round:
            self.round, self.calls = round, Counter()
        self.calls[step] += 1
        return f"{step} {self.calls[step]}"

    def broadcasts(self, slot: str, now: Broadcast, ids: Tensor) -> list[tuple[Broadcast, Tensor]]:
        """The broadcasts that these clients act on, each with the places of its clients."""
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
        """The newest broadcast that has reached each client; the first one if none has."""
        rounds = torch.tensor(sorted(self.sent[slot]))
        seen = (
            torch.searchsorted(
                rounds, round - self.delays.down[torch.searchsorted(self.ids, ids)], right=True
            )
            - 1
        )
        return rounds[seen.clamp(min=0)]

    def post(self, slot: str, round: int, batch: Batch) -> None:
        """Put replies under way to the server."""
        box = self.replies.setdefault(slot, [])
        arrives = round + self.delays.up[torch.searchsorted(self.ids, batch.ids)] * bool(
            tree.leaves(batch.reply)
        )
        for at in arrives.unique().tolist():
            box.append((at, batch.pick(torch.nonzero(arrives == at).flatten())))

    def collect(self, slot: str, round: int) -> list[Batch]:
        """The replies that have arrived by now."""
        box = self.replies.get(slot, [])
        self.replies[slot] = [(at, batch) for at, batch in box if at > round]
        return [batch for at, batch in box if at <= round]

    def save(self) -> Tree:
        """All messages under way, for a checkpoint."""
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
        """Restore what `save` returned."""
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
