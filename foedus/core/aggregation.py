"""How replies become one: `clients.mean` and `clients.sum` add them up, unless a run is told
otherwise.

`fd.run(..., aggregation=...)` takes settings (an `Aggregation`): robust means that a few hostile
clients cannot move, differential privacy, secure aggregation. `open` gives the `Aggregator` of one
run; where there is one, every exchange that is averaged or added up goes through its `total`, and
every exchange whose single replies the server wants to see asks its `gathered`.
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
    """What an aggregation may depend on: the run that it is for."""

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
    """An exchange that must not be: a round in which it comes up is not made, and the run ends
    before it.
    """


class Aggregation(Settings):
    """Settings of how replies are put together; a frozen dataclass."""

    def open(self, setting: Setting) -> Aggregator:
        """Get ready for one run; refuse, before any work, what does not go together."""
        raise NotImplementedError(f"{type(self).__name__} does not define open")


class Aggregator:
    """Puts the replies of one run together."""

    spent: str | None = None
    """Why the run must stop after this round, if it must."""

    wary: bool = False
    """Whether clients are taken as untrusted: a reply that must not be used is then left out of the
    round, and no error.
    """

    hides: bool = False
    """Single replies are seen by nobody: the server can keep no copies of what clients have (see
    `Clients.copies`).
    """

    draws: bool = False
    """Who takes part is drawn by `among`, and is for nobody to know: the algorithm is shown all
    clients, in every round.
    """

    def among(self, round: int, ids: Tensor) -> Tensor | slice:
        """Which of the clients that take part in a round are asked."""
        return slice(None)

    def total(self, trip: RoundTrip, weights: str | None) -> Tree:
        """Ask, and return the average by `weights` ("rows", "uniform"), or with None the sum, in
        place of `RoundTrip.mean`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define total")

    def gathered(self, trip: RoundTrip, replies: Replies) -> None:
        """Single replies are about to be handed to the algorithm; raise an error where it must not
        see them.
        """

    def row(self) -> dict[str, float | str]:
        """What this round's row of the history says of it."""
        return {}

    def save(self) -> dict[str, Any]:
        """What must survive in a checkpoint, as JSON has it."""
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        """Take up what `save` gave."""


def check_aggregation(aggregation: Any) -> None:
    """Refuse what is no aggregation."""
    if aggregation is not None and not isinstance(aggregation, Aggregation):
        hint = " (the class: add parentheses)" if isinstance(aggregation, type) else ""
        raise ConfigError(
            f"aggregation={aggregation!r}{hint} must be None or settings such as fd.Median()"
        )
