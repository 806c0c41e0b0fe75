"""`foedus audit hostile`: what hostile clients do to plain and robust means, measured."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from foedus.aggregation.robust import GeometricMedian, Krum, Median, NormBound, TrimmedMean
from foedus.algorithms import FedAvg, FedFW
from foedus.core.aggregation import Aggregation
from foedus.core.algorithm import Algorithm
from foedus.core.exchange import Accept
from foedus.core.run import run
from foedus.data import Data, load, split
from foedus.engines.hostile import ATTACKS, Attack, Hostile
from foedus.errors import ConfigError, FoedusError, unknown
from foedus.geometry import L2Ball
from foedus.models.base import Params
from foedus.models.linear import Linear

PARTS, ROWS = (0.1, 0.2, 0.3, 0.4), 4000
STRENGTH = {"scale": 100.0}


@dataclass(frozen=True)
class _Trusting(FedFW):
    """FedFW that accepts every point unchecked."""

    def outside(self, like: Params) -> Accept:
        return lambda ids, points: {}


@dataclass(frozen=True)
class HostileAudit:
    """Accuracies by (attack, fraction of hostile clients, method); None if a run did not finish."""

    data: str
    rows: int
    attacks: tuple[str, ...]
    parts: tuple[float, ...]
    methods: tuple[str, ...]
    accuracy: dict[tuple[str, float, str], float | None]

    @property
    def headings(self) -> list[str]:
        return ["attack", "method", *(f"{part:.0%}" for part in (0.0, *self.parts))]

    def table(self) -> list[list[str]]:
        """One row for each attack and method, a column for each part of hostile clients."""
        return [
            [attack, method, *(self._shown(attack, part, method) for part in (0.0, *self.parts))]
            for attack, method in itertools.product(self.attacks, self.methods)
        ]

    def report(self, path: str | os.PathLike, title: str | None = None, command: str = "") -> Path:
        """Write one self-contained HTML page: accuracy by attack, part and method.

        Needs matplotlib.

        Args:
            path: The file.
            title: Of the page; by default the name of the data.
            command: The command that makes the page again, to be shown on it.

        Returns:
            The path of the file.
        """
        from foedus.audit import pages
        from foedus.report.html import write_page

        return write_page(path, pages.hostile(self, title, command))

    def _shown(self, attack: str, part: float, method: str) -> str:
        value = self.accuracy["" if part == 0 else attack, part, method]
        return "stops" if value is None else f"{value:.3f}"


def methods(
    clients: int, quick: bool = False
) -> dict[str, tuple[Algorithm, int, Aggregation | None]]:
    """A method to compare: an algorithm, its rounds, and how replies are averaged."""
    hostile = max(0, min(int(0.4 * clients), (clients - 3) // 2))
    averaging, ball = FedAvg(Linear(), lr=0.1), L2Ball(10.0)
    means: dict[str, Aggregation | None] = {
        "mean": None, "norm bound": NormBound(), "trimmed mean": TrimmedMean(0.4),
        "median": Median(), "geometric median": GeometricMedian(),
        "multi-Krum": Krum(hostile, select=clients - 2 * hostile),
    }  # fmt: skip
    rounds, longer = (8, 20) if quick else (15, 60)
    found: dict[str, tuple[Algorithm, int, Aggregation | None]] = {
        f"FedAvg, {name}": (averaging, rounds, mean) for name, mean in means.items()
    }
    trusting, checked = (
        kind(Linear(), ball, penalty=1e-3, measure_every=0) for kind in (_Trusting, FedFW)
    )
    return found | {
        "FedFW, every point believed": (trusting, longer, None),
        "FedFW": (checked, longer, None),
        "FedFW, geometric median": (checked, longer, GeometricMedian()),
    }


def _some(rows: Data, seed: int) -> Data:
    """At most ROWS training rows, and as many test rows, at random."""
    rng = np.random.default_rng(seed)
    train, test = (rng.permutation(len(x))[:ROWS] for x in (rows.x_train, rows.x_test))
    x, y, x_test, y_test = (
        rows.x_train[train], rows.y_train[train], rows.x_test[test], rows.y_test[test],
    )  # fmt: skip
    return Data.from_arrays(x, y, x_test, y_test, classes=rows.classes, name=rows.name)


def audit_hostile(
    data: str = "digits",
    *,
    attacks: Sequence[str] | None = None,
    clients: int = 20,
    seed: int = 0,
    quick: bool = False,
) -> HostileAudit:
    """Train with every attack, part of hostile clients and method."""
    attacks = tuple(dict.fromkeys(attacks or ATTACKS))
    for attack in attacks:
        if attack not in ATTACKS:
            raise ConfigError(unknown("attack", attack, ATTACKS))
    rows = load(data)
    if rows.classes is None:
        raise ConfigError(
            f"{data} has values, not classes: hostile clients are measured by accuracy"
        )
    fed = split(_some(rows, seed), "dirichlet", clients=clients, alpha=1.0, seed=seed)
    parts, compared = PARTS[1::2] if quick else PARTS, methods(clients, quick)
    cells = [("", 0.0), *itertools.product(attacks, parts)]
    accuracy: dict[tuple[str, float, str], float | None] = {}
    for (attack, part), (name, trial) in itertools.product(cells, compared.items()):
        algorithm, rounds, mean = trial
        kind = cast("Attack", attack or ATTACKS[0])
        engine = Hostile(clients=part, attack=kind, strength=STRENGTH.get(attack))
        options: dict[str, Any] = {"evaluate_every": rounds, "progress": False}
        options |= {"seed": seed, "engine": engine, "aggregation": mean}
        try:
            last = run(algorithm, fed, rounds, **options)
            accuracy[attack, part, name] = last.records.last("accuracy")
        except FoedusError:  # it diverged, or too few replies were left
            accuracy[attack, part, name] = None
    return HostileAudit(rows.name, len(fed.rows), attacks, parts, tuple(compared), accuracy)
