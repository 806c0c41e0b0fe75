"""`Session`, the interface of an engine for one run, and `Conditions`, the state of its network."""

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
    """The network of a run.

    Args:
        trusted: Whether replies can be used unchecked; otherwise each is checked, and one that
            fails is left out of the round.
        measures: Whether measurements for the history alone may be asked for: in a simulation, but
            not between real sites.
        device: The device on which networks are trained.
        delays: The rounds that messages take, if any.
    """

    trusted: bool = True
    measures: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    delays: Delays | None = None


@dataclass(eq=False)
class Reduced:
    """Replies that a session has added up.

    Args:
        total: Their weighted sum.
        clients: The number of clients that replied.
        sent: The bytes and messages that they sent.
    """

    total: Accumulator
    clients: int = 0
    sent: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True, eq=False)
class Measured:
    """Sums over test rows that stay with their clients (`foedus.core.site_sums`).

    Args:
        sums: Sums by name, with a leading dimension of clients.
        ids: The ids of these clients, ascending; `None`: sums over all clients, as the server sees
            no single reply.
        left_out: The clients that sent none, with reasons.
    """

    sums: dict[str, np.ndarray]
    ids: np.ndarray | None = None
    left_out: str = ""


class SecureChannel(ABC):
    """The connection of secure aggregation to clients in other processes, phase by phase.

    See `foedus.aggregation.secure`.
    """

    name: str
    """Of the run, in what is signed."""

    @property
    @abstractmethod
    def faults(self) -> Mapping[int, str]:
        """The clients that did not answer the last exchange, with reasons."""

    @abstractmethod
    def present(self, ask: Ask) -> list[int]:
        """Begin an exchange; returns the clients that can be asked."""

    @abstractmethod
    def question(self, ask: Ask, weights: str | None, extra: dict[str, Any]) -> str:
        """The hash of everything that clients are asked; they can compute it, too."""

    @abstractmethod
    def phase(
        self,
        ask: Ask,
        phase: str,
        questions: dict[int, Tree],
        weights: str | None,
        extra: dict[str, Any],
        settings: Any,
    ) -> dict[int, Tree | SecureError]:
        """Send the questions of a phase to clients; returns an answer or an error for each.

        `settings` are those of the exchange.
        """

    @abstractmethod
    def leave(self, faults: Mapping[int, str]) -> None:
        """Leave these clients out of the rest of the round."""

    @abstractmethod
    def settle(self, ask: Ask, ids: Iterable[int]) -> None:
        """Count the answers of these clients."""

    @abstractmethod
    def enough(self, ask: Ask) -> None:
        """Raise an error if fewer clients of the round are left than required."""


class Engine(Protocol):
    """Where the clients of a run are, and how they are reached: `fd.Local()`, `fd.Ray()`, ..."""

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> Session:
        """The session of one run."""


class Session(ABC):
    """One run of one algorithm on an engine.

    Exchanges: `exchange`, and `reduce` if replies can be added up near the clients. Client states:
    `save`, `load`, `keep`; `lost`, `readmit`, `repeat_round`, `refuse` if clients may fail.
    Evaluation of personal models: `evaluate_own`, `evaluate_global`. `close` at the end.
    """

    conditions: Conditions = Conditions()
    faults: Mapping[int, str] = MappingProxyType({})
    """Those who failed to answer the last exchange, and why."""
    lost: frozenset[int] | set[int] = frozenset()
    """Clients who have lost their states."""

    # -- exchanges ---------------------------------------------------------------------------------

    @abstractmethod
    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        """Run a step at the clients, yielding (ids, reply, whether it is stacked) batch by batch.

        Replies of untrusted clients are of the right round, sender and form when they are yielded.

        Args:
            ask: The exchange.
        """

    def reduce(self, ask: Ask, weights: Tensor) -> Reduced | None:
        """The weighted sum of the replies, computed near the clients; `None`: use `exchange`.

        Args:
            ask: The exchange.
            weights: The weight of each client of `ask.ids`.
        """
        return None

    def delay(self, delays: Delays) -> None:
        """Tell clients the rounds that their messages take; core implements the delays."""
        self.conditions = replace(self.conditions, delays=delays)

    def secure(self, config: Any) -> SecureChannel | None:
        """Allow only masked replies from now on; `None`: the clients are in this process."""
        return None

    # -- clients who may fail ----------------------------------------------------------------------

    def refuse(self, client: int, why: str) -> None:
        """Undo the state change of a client whose reply is unusable, where states can be undone."""
        return None

    def readmit(self, ids: list[int], allowed: bool) -> None:
        """Take clients that have lost their state back as new ones, or exclude them."""
        return None

    def repeat_round(self) -> None:
        """Restore all clients as before the round, which is repeated."""
        return None

    # -- states ------------------------------------------------------------------------------------

    def keep(self, folder: Path) -> None:
        """Called before `load` if the run has a checkpoint.

        Args:
            folder: A folder beside the checkpoint, for what must survive and is not in it.
        """
        return None

    @abstractmethod
    def save(self) -> Tree:
        """Everything that must survive in a checkpoint."""

    @abstractmethod
    def load(self, saved: Tree) -> None:
        """Restore what `save` returned."""

    # -- evaluation of personal models -------------------------------------------------------------

    @abstractmethod
    def evaluate_own(self, metrics: Sequence[str] = ()) -> dict[str, Tensor]:
        """Sums of scores of each client's model on its own test rows, by client in order of id.

        "weight" is among the sums if test rows have weights.

        Args:
            metrics: Names of further metrics. If there are any, "outputs" has those of all test
                rows, client after client; an engine whose rows stay at their sites returns the sums
                that these metrics need (`foedus.core.site_sums`) instead.
        """

    @abstractmethod
    def evaluate_global(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Sums of scores of each client's model on the same rows, by client in order of id.

        Args:
            x: The rows.
            y: Their labels or targets.
            weight: The weight of each row, if rows have weights; "weight" is then among the sums.
        """

    def measure(self, algorithm: Algorithm, run: Run, sums: SiteSums, round: int) -> Measured:
        """Sums of scores of the global model on test rows that the server does not have.

        Args:
            algorithm: The algorithm without the seed of the run.
            run: The run so far.
            sums: The sums that are needed.
            round: The round.
        """
        raise NotImplementedError(f"{type(self).__name__} has the test rows itself")

    def close(self) -> None:
        """Release the resources of the run."""
        return None


def read_replies(session: Session, ask: Ask, ledger: Ledger) -> Iterator[tuple[Tensor, Tree, bool]]:
    """The replies as the server reads them, batch by batch; the ledger is charged for them."""
    for ids, reply, stacked in session.exchange(ask):
        if not ask.free:
            ledger.charge(reply, stacked, len(ids))
        yield ids, wire.dequantise(reply) if ask.quantise else reply, stacked


def add_up(session: Session, ask: Ask, weights: Tensor, remedy: str) -> Reduced:
    """`Session.reduce` for sessions that are near their clients.

    Args:
        session: The session.
        ask: The exchange.
        weights: The weight of each client of `ask.ids`.
        remedy: What to do about numbers that are not finite, for an error.
    """
    reduced = Reduced(Accumulator(remedy))
    for ids, reply, stacked in read_replies(session, ask, reduced.sent):
        share = weights[torch.searchsorted(ask.ids, ids)]
        reduced.total.add(stacked_reply(reply, stacked), share, ask.round, ids)
        reduced.clients += len(ids)
    return reduced
