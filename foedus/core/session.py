"""What an engine offers for one run: `Session`, and what its network is like: `Conditions`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foedus import wire
from foedus.base.tree import Tree
from foedus.core.delays import Delays
from foedus.core.exchange import Ask, stacked_reply
from foedus.core.reduce import Accumulator, Ledger

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from foedus.core.algorithm import Algorithm
    from foedus.core.result import Run
    from foedus.core.site_sums import SiteSums
    from foedus.data.federation import Federation
    from foedus.errors import SecureError


@dataclass(frozen=True, eq=False)
class Conditions:
    """What the network of a run is like.

    trusted: replies can be used as they are; otherwise each is checked, and one that fails is left
        out of the round.
    measures: what is only measured for the history may be asked for: in a simulation, not between
        real sites.
    device: where networks are trained. delays: how many rounds messages take, if any.
    """

    trusted: bool = True
    measures: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    delays: Delays | None = None


@dataclass(eq=False)
class Reduced:
    """Replies that a session has added up: their weighted sum, how many clients replied, and what
    they sent.
    """

    total: Accumulator
    clients: int = 0
    sent: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True, eq=False)
class Measured:
    """Sums over test rows that stay with their clients (`foedus.core.site_sums`).

    sums: by name, with a leading dimension of clients. ids: whose they are, ascending; `None`: they
        are of all together, for single replies are seen by nobody. left_out: who gave none, and
        why.
    """

    sums: dict[str, np.ndarray]
    ids: np.ndarray | None = None
    left_out: str = ""


class SecureChannel(ABC):
    """How secure aggregation reaches clients in other processes, phase by phase: see
    `foedus.aggregation.secure`.
    """

    name: str
    """Of the run, in what is signed."""

    @property
    @abstractmethod
    def faults(self) -> Mapping[int, str]:
        """Those who failed to answer the last exchange, and why."""

    @abstractmethod
    def present(self, ask: Ask) -> list[int]:
        """An exchange begins: those who can be asked."""

    @abstractmethod
    def question(self, ask: Ask, weights: str | None, told: dict[str, Any]) -> str:
        """The hash of all that clients are asked in an exchange, as they can compute it, too."""

    @abstractmethod
    def phase(
        self,
        ask: Ask,
        phase: str,
        questions: dict[int, Tree],
        weights: str | None,
        told: dict[str, Any],
    ) -> dict[int, Tree | SecureError]:
        """Put the questions of a phase to clients: their answers, or why there is none."""

    @abstractmethod
    def leave(self, faults: Mapping[int, str]) -> None:
        """Leave these clients out of the rest of the round."""

    @abstractmethod
    def settle(self, ask: Ask, ids: Iterable[int]) -> None:
        """The answers of these clients count."""

    @abstractmethod
    def enough(self, ask: Ask) -> None:
        """Stop where fewer clients of the round are left than there must be."""


class Engine(Protocol):
    """Where the clients of a run are, and how they are reached: `fd.Local()`, `fd.Ray()`,
    `fd.Delayed()`, ...
    """

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> Session:
        """Get ready for one run."""


class Session(ABC):
    """One run of one algorithm on an engine.

    Exchanges: `exchange`, and `reduce` where replies can be added up near the clients. Client
    states: `save`, `load`, `keep`; `lost`, `readmit`, `repeat_round`, `refuse` where clients may
    fail. Evaluation of personal models: `evaluate_own`, `evaluate_global`. `close` at the end.
    """

    conditions: Conditions = Conditions()
    faults: Mapping[int, str] = MappingProxyType({})
    """Those who failed to answer the last exchange, and why."""
    lost: frozenset[int] | set[int] = frozenset()
    """Clients who have lost their states."""

    # -- exchanges ---------------------------------------------------------------------------------

    @abstractmethod
    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        """Run a step at the clients asked: (ids, reply, whether it has a leading client dimension),
        batch by batch.

        Replies of untrusted clients are of the right round, sender and form when they are yielded.
        """

    def reduce(self, ask: Ask, weights: Tensor) -> Reduced | None:
        """The weighted sum of the replies, added up where the clients are; `None`: not here, use
        `exchange`.
        """
        return None

    def delay(self, delays: Delays) -> None:
        """Tell clients how many rounds their messages take; the delays themselves are core's
        business.
        """
        self.conditions = replace(self.conditions, delays=delays)

    def secure(self, config: Any) -> SecureChannel | None:
        """From now on nothing but masked replies may be sent; `None`: clients are in this
        process.
        """
        return None

    # -- clients who may fail ----------------------------------------------------------------------

    def refuse(self, client: int, why: str) -> None:
        """A reply that must not be used: where states can be undone, the client's is to be as
        before it.
        """
        return None

    def readmit(self, ids: list[int], allowed: bool) -> None:
        """Take clients who have lost their state back as newcomers, or exclude them."""
        return None

    def repeat_round(self) -> None:
        """The round is about to be repeated: all clients are to be as they were before it."""
        return None

    # -- states ------------------------------------------------------------------------------------

    def keep(self, folder: Path) -> None:
        """The run has a checkpoint, with this folder beside it for what must survive and is not in
        it; said before `load`.
        """
        return None

    @abstractmethod
    def save(self) -> Tree:
        """All that must survive in a checkpoint."""

    @abstractmethod
    def load(self, saved: Tree) -> None:
        """Take up what `save` gave."""

    # -- evaluation of personal models -------------------------------------------------------------

    @abstractmethod
    def evaluate_own(self, metrics: Sequence[str] = ()) -> dict[str, Tensor]:
        """Each client's model on its own test rows: sums by client, in id order; "weight" is among
        them where test rows have weights.

        metrics: names of what is measured besides; then also "outputs", those of all test rows,
        client after client. An engine whose rows stay at their sites gives the sums that these
        metrics need (`foedus.core.site_sums`) in their place.
        """

    @abstractmethod
    def evaluate_global(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Each client's model on the same rows: sums by client, in id order.

        weight: of the rows, where they have some; "weight" is then among the sums.
        """

    def measure(self, algorithm: Algorithm, run: Run, sums: SiteSums, round: int) -> Measured:
        """How the global model of a run does on test rows that the server does not have.

        algorithm: as it was given, without the seed of the run.
        """
        raise NotImplementedError(f"{type(self).__name__} has the test rows itself")

    def close(self) -> None:
        """Release what the run has held."""
        return None


def read_replies(session: Session, ask: Ask, ledger: Ledger) -> Iterator[tuple[Tensor, Tree, bool]]:
    """The replies as the server reads them, batch by batch; the ledger is charged with what they
    are on the wire.
    """
    for ids, reply, stacked in session.exchange(ask):
        if not ask.free:
            ledger.charge(reply, stacked, len(ids))
        yield ids, wire.dequantise(reply) if ask.quantise else reply, stacked


def add_up(session: Session, ask: Ask, weights: Tensor, remedy: str) -> Reduced:
    """What `Session.reduce` does, for sessions that are near their clients; weights are those of
    `ask.ids`.
    """
    reduced = Reduced(Accumulator(remedy))
    for ids, reply, stacked in read_replies(session, ask, reduced.sent):
        share = weights[torch.searchsorted(ask.ids, ids)]
        reduced.total.add(stacked_reply(reply, stacked), share, ask.round, ids)
        reduced.clients += len(ids)
    return reduced
