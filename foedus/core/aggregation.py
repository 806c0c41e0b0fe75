"""Aggregation: how the replies of an exchange are combined; by default they are added up.

`fd.run(..., aggregation=...)` takes settings (an `Aggregation`): robust means that a few hostile
clients cannot move, differential privacy, secure aggregation. `open` returns the `Aggregator` of
one run. With an aggregator, every exchange that is averaged or added up goes through its `total`,
and every exchange whose single replies the server wants to see calls its `gathered`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foedus.base.settings import Settings
from foedus.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from foedus.base.tree import Tree
    from foedus.core.algorithm import Algorithm
    from foedus.core.exchange import Replies
    from foedus.core.network import RoundTrip
    from foedus.core.participation import Poisson
    from foedus.core.session import Session


@dataclass(frozen=True, eq=False)
class Setting:
    """The run that an aggregation is for: everything that its aggregator may depend on."""

    algorithm: Algorithm
    session: Session
    ids: Tensor
    sizes: Tensor
    participation: float | Poisson
    rounds: int
    seed: int
    quantise: str | None = None
    checkpoint: Path | None = None
    resume: bool = False


class BudgetSpent(ConfigError):  # noqa: N818 - a reason to stop
    """An exchange would exceed the budget: the run ends before the round that needs it."""


class Aggregation(Settings):
    """Settings of how replies are combined: a frozen dataclass such as `fd.Median()`."""

    def open(self, setting: Setting) -> Aggregator:
        """The aggregator of one run.

        Args:
            setting: The run.

        Raises:
            ConfigError: Settings exclude each other.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define open")


class Aggregator:
    """Combines the replies of one run."""

    spent: str | None = None
    """The reason why the run must stop after this round; `None`: it goes on."""

    checks_replies: bool = False
    """Whether clients are untrusted: an unusable reply is left out of the round instead of raising
    an error.
    """

    hides: bool = False
    """Whether the server sees no single reply. It then keeps no copies of clients' values (see
    `Clients.copies`).
    """

    draws: bool = False
    """Whether `among` draws the participants of a round in secret. The algorithm is then shown all
    clients in every round.
    """

    def among(self, round: int, ids: Tensor) -> Tensor | slice:
        """Which of the clients that take part in a round are asked.

        Args:
            round: The round.
            ids: The ids of the clients that take part.

        Returns:
            An index into `ids`.
        """
        return slice(None)

    def total(self, trip: RoundTrip, weights: str | None) -> Tree:
        """Run the exchange and return the average of the replies, in place of `RoundTrip.mean`.

        Args:
            trip: The exchange.
            weights: "rows" or "uniform"; `None`: the sum.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define total")

    def gathered(self, trip: RoundTrip, replies: Replies) -> None:
        """Called before the algorithm is given single replies; raises an error if it must not be.

        Args:
            trip: The exchange.
            replies: The replies.
        """

    def row(self) -> dict[str, float | str]:
        """Columns of this round's row of the history."""
        return {}

    def save(self) -> dict[str, Any]:
        """The state for a checkpoint, in the types of JSON."""
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a state that `save` returned."""


def check_aggregation(aggregation: Any) -> None:
    """Raise `ConfigError` for a value that is not an aggregation."""
    if aggregation is not None and not isinstance(aggregation, Aggregation):
        hint = " (the class: add parentheses)" if isinstance(aggregation, type) else ""
        raise ConfigError(
            f"aggregation={aggregation!r}{hint} must be None or settings such as fd.Median()"
        )
