"""What every tool is given and what it hands back: a folder with the data, the first weights and
the settings.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

Weights = list[np.ndarray]


@dataclass(frozen=True)
class Job:
    """A workload: `net` of `benchmarks.nets`, one epoch of batches at each of `cohort` clients, the
    mean of what they learned.

    passes: how often the rounds are timed, always from the first weights. check: also do the round
    that has one result only.
    """

    workload: str
    net: str
    clients: int
    rows: int
    cohort: int
    batch: int
    lr: float
    rounds: int
    passes: int = 1
    check: bool = False
    folder: str = ""

    def path(self, name: str) -> Path:
        return Path(self.folder) / name

    @classmethod
    def read(cls, file: str | None = None) -> Job:
        """The job that a command line names."""
        return cls(**json.loads(Path(file or sys.argv[1]).read_text()))

    def write(self, name: str) -> Path:
        self.path(name).write_text(json.dumps(asdict(self)))
        return self.path(name)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows (clients, rows, ...) and labels (clients, rows)."""
        return np.load(self.path("x.npy")), np.load(self.path("y.npy"))

    def weights(self) -> Weights:
        return load(self.path("first.npz"))


def load(file: Path) -> Weights:
    with np.load(file, allow_pickle=False) as found:
        return [found[f"arr_{i}"] for i in range(len(found.files))]


def measure(
    job: Job,
    rounds: Callable[[int], Weights],
    one_step: Callable[[], Weights],
    packages: tuple[str, ...],
    speaks: bool = True,
) -> None:
    """Time `rounds(n)`, which begins at the first weights, and print what was found as JSON.
    speaks: of several processes, only one.

    one_step: all clients, one step on each one's first batch; nothing is drawn, so every tool must
    find the same weights.
    """
    checked = one_step() if job.check else None
    rounds(1)
    seconds = []
    for _ in range(job.passes):
        began = time.perf_counter()
        rounds(0)  # what a run costs once, whatever its rounds, is taken off
        between = time.perf_counter()
        learned = rounds(job.rounds)
        seconds.append((time.perf_counter() - between - (between - began)) / job.rounds)
    if not speaks:
        return
    np.savez(job.path("learned.npz"), *learned)
    if checked is not None:
        np.savez(job.path("checked.npz"), *checked)
    versions = {p: metadata.version(p) for p in packages}
    print(json.dumps({"seconds": seconds, "versions": versions}), flush=True)
