"""The base of private aggregators: accounting of rounds, the budget, and a journal that survives a
crash.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.aggregation.dp import noise as sampling
from foedus.aggregation.dp.accounting import Spent, epsilon
from foedus.base import tree
from foedus.core.aggregation import Aggregator, BudgetSpent, Setting
from foedus.core.participation import Poisson
from foedus.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from foedus.aggregation.dp.mechanism import DifferentialPrivacy
    from foedus.core.exchange import Replies
    from foedus.core.network import RoundTrip


class Accounted(Aggregator):
    """An aggregator that releases noisy sums, accounts for them, and ends the run when the budget
    is spent.
    """

    hides = draws = True

    apart = 0.0
    """How far the noise of an exchange may differ from normal noise: see
    `foedus.aggregation.dp.accounting.epsilon`.
    """

    def __init__(self, privacy: DifferentialPrivacy, setting: Setting):
        self.privacy, self.ids = privacy, setting.ids
        self.entropy = privacy.entropy or os.urandom
        part = setting.participation
        if not isinstance(part, Poisson) and part != 1:
            raise ConfigError(
                f"participation={part!r} draws a fixed number of clients, for which no epsilon is "
                f"accounted; use participation=fd.Poisson({part!r}), or 1.0 for all of them"
            )
        self.probability = part.probability if isinstance(part, Poisson) else 1.0
        if (
            setting.session.conditions.delays is not None
            and setting.session.conditions.delays.longest
        ):
            raise ConfigError(
                "fd.Delayed and differential privacy do not go together: two late replies of one "
                "client may come in one round, and would count twice; use the engine without delays"
            )
        if privacy.delta >= 1 / len(self.ids):
            raise ConfigError(
                f"delta={privacy.delta!r} allows to give away one of the {len(self.ids)} clients "
                f"altogether; it must be well below 1 / clients, such as {0.01 / len(self.ids):.0e}"
            )
        for step, _ in privacy.clip if isinstance(privacy.clip, tuple) else ():
            if not callable(getattr(setting.algorithm, step, None)):
                raise ConfigError(
                    f"clip: {step!r} is not a client step of {type(setting.algorithm).__name__}"
                )
        self.rounds: Counter[tuple[float, float, int]] = Counter()
        # probability and exchanges so far of the current round
        self.open_round: tuple[float, int] | None = None
        self.usual = 1  # exchanges in a round
        self.round, self.cohort = -1, ""
        self.journal = None if setting.checkpoint is None else Journal(setting.checkpoint)
        if self.journal is not None and self.journal.path.exists():
            if not setting.resume:
                raise CheckpointError(
                    f"{self.journal.path} is the privacy account of an earlier run with this "
                    'checkpoint; pass resume="auto" to go on, or remove both'
                )
            self.rounds = self.journal.read()
        if not self.rounds:
            self._affordable(self._with(self.probability, 1), "one round")

    def _begin(self, round: int) -> bool:
        """Whether this is the first exchange of a round, for which a cohort must be drawn: each
        client with probability `open_round[0]`, all clients before the first round.
        """
        if self.round == round:
            return False
        self._close()
        self.round, self.cohort = round, os.urandom(8).hex()
        self.open_round = (self.probability if round else 1.0, 0)
        return True

    @property
    def chance(self) -> float:
        """The probability with which each client takes part in the current round."""
        assert self.open_round is not None
        return self.open_round[0]

    def _draw(self) -> Tensor:
        """Which of all clients take part in the current round."""
        return torch.from_numpy(sampling.bernoulli(self.chance, len(self.ids), self.entropy))

    def gathered(self, trip: RoundTrip, replies: Replies) -> None:
        if any(
            tree.leaves(reply)
            for reply in ([replies.stacked] if replies.separate is None else replies.separate)
        ):
            raise ConfigError(
                f"{type(trip.algorithm).__name__} looks at single replies ({trip.step}), which "
                "have no differential privacy here: only averages and sums get noise. Use an "
                "algorithm that asks for averages, such as FedAvg, FedFW, FedBoost or FedNewton"
            )

    def _with(self, probability: float, exchanges: int) -> Counter[tuple[float, float, int]]:
        """The released rounds, and one more."""
        return self.rounds + Counter({(probability, float(self.privacy.noise), exchanges): 1})

    def _epsilon(self, spent: Spent) -> float:
        return epsilon(spent, self.privacy.delta, self.privacy.accountant, self.apart)

    def _affordable(self, spent: Spent, what: str) -> None:
        if self.privacy.budget is None or (cost := self._epsilon(spent)) <= self.privacy.budget:
            return
        before = f", after {self._epsilon(self.rounds):.4g} so far" if self.rounds else ""
        raise BudgetSpent(
            f"budget={self.privacy.budget!r}: {what} would make epsilon {cost:.4g}{before}; use "
            f"more noise than {self.privacy.noise!r}, or a larger budget"
        )

    def _charge(self, trip: RoundTrip) -> None:
        """Count an exchange before it is released; refuse it if it exceeds the budget."""
        assert self.open_round is not None
        probability, exchanges = self.open_round
        self._affordable(
            self._with(probability, exchanges + 1), f"round {trip.round} ({trip.step})"
        )
        self.open_round = (probability, exchanges + 1)
        if self.journal is not None:
            self.journal.add(self.cohort, probability, float(self.privacy.noise))

    def _nothing(self) -> None:
        """Undo the count of an exchange whose replies were empty: nothing was released."""
        assert self.open_round is not None
        self.open_round = (self.open_round[0], self.open_round[1] - 1)

    def _close(self) -> None:
        """The round is over."""
        if self.open_round is not None and self.open_round[1]:
            self.rounds = self._with(*self.open_round)
            if self.round:
                self.usual = max(self.usual, self.open_round[1])
        self.open_round = None

    def row(self) -> dict[str, float | str]:
        self._close()
        self.round = -1  # the next exchange has another cohort
        self._look_ahead()
        return {"epsilon": self._epsilon(self.rounds)}

    def _look_ahead(self) -> None:
        try:
            self._affordable(self._with(self.probability, self.usual), "another round")
        except BudgetSpent as error:
            self.spent = str(error)

    def save(self) -> dict[str, Any]:
        return {
            "rounds": [[*kind, times] for kind, times in sorted(self.rounds.items())],
            "usual": self.usual,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """The account of the checkpoint, plus the exchanges that the journal has after it."""
        known = Counter(
            {(float(q), float(z), int(k)): int(times) for q, z, k, times in saved["rounds"]}
        )
        self.rounds, self.usual = known | self.rounds, int(saved["usual"])
        self._look_ahead()


class Journal:
    """Every exchange, written beside the checkpoint before its result is released: rounds that a
    crash undoes have been released nevertheless.
    """

    def __init__(self, checkpoint: Path):
        self.path = checkpoint.with_name(checkpoint.name + ".privacy")

    def add(self, cohort: str, probability: float, noise: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps([cohort, probability, noise]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Counter[tuple[float, float, int]]:
        """Rounds by kind.

        A truncated last line is ignored: its exchange was never released.
        """
        lines = self.path.read_text().split("\n")
        try:
            entries = Counter(tuple(json.loads(line)) for line in lines[:-1])
            return Counter((float(q), float(z), k) for (_, q, z), k in entries.items())
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} is damaged, so what was spent is not known: {error!r}"
            ) from error
