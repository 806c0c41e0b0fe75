"""The search over a grid: runs in parallel workers, successive halving."""

from __future__ import annotations

import contextlib
import math
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foedus.base.threads import one_thread
from foedus.core.algorithm import Algorithm
from foedus.core.metrics import higher_is_better
from foedus.core.run import run
from foedus.engines.delayed import Delayed
from foedus.engines.local import Local
from foedus.errors import ConfigError, DivergenceError
from foedus.report.text import bar
from foedus.tuning.grid import shown_settings

if TYPE_CHECKING:
    import pandas as pd

    from foedus.data.federation import Federation


_PATIENCE = 4.0
"""Seconds: about the time to start a process with PyTorch."""


class _Outcome(NamedTuple):
    """The progress of a run."""

    score: float
    loss: float
    rounds: int
    seconds: float
    failed: str = ""
    at: int = 0
    """The round in which it failed."""


@dataclass(eq=False)
class Cell:
    """One combination of values, and the progress of its runs (one for each seed)."""

    number: int
    values: dict[str, Any]
    algorithm: Algorithm
    runs: list[_Outcome] = field(default_factory=list)

    @property
    def failure(self) -> _Outcome | None:
        return next((r for r in self.runs if r.failed), None)

    @property
    def score(self) -> float:
        return math.nan if self.failure else statistics.fmean(r.score for r in self.runs)

    @property
    def loss(self) -> float:
        return statistics.fmean(r.loss for r in self.runs)

    @property
    def rounds(self) -> int:
        return min(r.rounds for r in self.runs)

    def row(self) -> dict[str, Any]:
        scores, failure = [r.score for r in self.runs], self.failure
        return {
            **self.values,
            "score": self.score,
            "spread": statistics.stdev(scores) if len(scores) > 1 and not failure else math.nan,
            "rounds": self.rounds,
            "seconds": sum(r.seconds for r in self.runs),
            "failed": failure.failed if failure else "",
        }


@dataclass(eq=False)
class Search:
    """Successive halving of cells on the federations with validation rows, one for each seed."""

    held: dict[int, Federation]
    metric: str
    options: dict[str, Any]
    rungs: list[int]
    halving: int | None

    def race(
        self, cells: list[Cell], work: AbstractContextManager[_Work], progress: bool | None
    ) -> None:
        """Run all cells to the first rung, the best of them to the next, and so on."""
        total = planned(len(cells), self.rungs, self.halving) * len(self.held)
        temporary = tempfile.TemporaryDirectory(prefix="foedus-tune-")
        with temporary as name, bar(total, progress) as advance, work as pool:
            folder = Path(name)
            racing, behind = cells, list[Cell]()
            for rung in self.rungs:
                self.run(racing, rung, folder, pool, advance)
                # all of them failed: continue with cells that were cut before
                while not self.ranked(racing) and behind:
                    racing, behind = behind[: len(racing)], behind[len(racing) :]
                    self.run(racing, rung, folder, pool, advance)
                order = self.ranked(racing)
                if not order:
                    raise all_failed(cells)
                keep = len(racing)
                if self.halving is not None and rung != self.rungs[-1]:
                    keep = math.ceil(keep / self.halving)
                racing, behind = order[:keep], order[keep:] + behind

    def run(
        self, cells: list[Cell], rounds: int, folder: Path, pool: _Work, advance: Callable
    ) -> None:
        runs = [(cell, seed) for cell in cells for seed in self.held]
        jobs = []
        for cell, seed in runs:
            file = folder / f"{cell.number}-{seed}.safetensors" if len(self.rungs) > 1 else None
            job = (cell.algorithm, self.held[seed], rounds, seed, self.metric, file, self.options)
            jobs.append(job)
        for cell in cells:
            cell.runs = []
        for (cell, _), outcome in zip(runs, pool(jobs), strict=True):
            cell.runs.append(outcome)
            advance(f"{shown_settings(cell.values)}: round {rounds}", 1)

    def ranked(self, cells: list[Cell]) -> list[Cell]:
        """The cells that did not fail: the longest first, then by score, then by loss."""
        sign = -1 if higher_is_better(self.metric) else 1
        fine = [cell for cell in cells if not cell.failure]

        def rank(cell: Cell) -> tuple[float, ...]:  # accuracies on few rows are often equal
            return -cell.rounds, sign * cell.score, cell.loss, cell.number

        return sorted(fine, key=rank)

    def table(self, cells: list[Cell]) -> pd.DataFrame:
        import pandas as pd

        order = self.ranked(cells) + [cell for cell in cells if cell.failure]
        index = pd.Index([cell.number for cell in order], name="cell")
        table = pd.DataFrame([cell.row() for cell in order], index=index)
        for name in cells[0].values:  # None beside numbers would become NaN
            if any(cell.values[name] is None for cell in cells):
                table[name] = pd.Series([cell.values[name] for cell in order], index, dtype=object)
        return table


def _advance(
    algorithm: Algorithm,
    fed: Federation,
    rounds: int,
    seed: int,
    metric: str,
    file: Path | None,
    options: dict[str, Any],
) -> _Outcome:
    """Run or continue a cell until `rounds` rounds are done."""
    options = {"seed": seed, "progress": False, **options}
    if file is not None:
        options |= {"checkpoint": file, "checkpoint_every": max(rounds, 1), "resume": "auto"}
    with one_thread():
        try:
            records = run(algorithm, fed, rounds, **options).records
        # the second kind: a singular system, for example
        except (DivergenceError, ConfigError) as error:
            at = getattr(error, "round", 0)
            seconds = error.run.records.last("seconds") if hasattr(error, "run") else math.nan
            seconds = 0.0 if math.isnan(seconds) else seconds
            return _Outcome(math.nan, math.nan, max(at - 1, 0), seconds, str(error), at)
    if metric not in records.columns:
        name = type(algorithm).__name__
        raise ConfigError(
            f"metric={metric!r} is not measured: {name} makes no model that could be evaluated on "
            "validation rows"
        )
    score = records.last(metric)
    loss = records.last("own_loss" if metric.startswith("own_") else "loss")
    wrong = f"round {rounds}: the {metric} on the validation rows is {score}"
    failed = "" if math.isfinite(score) else wrong
    return _Outcome(score, loss, rounds, records.last("seconds"), failed, rounds)


# -- processes -------------------------------------------------------------------------------------


_Work = Callable[[list[tuple]], Iterator[_Outcome]]
"""From the arguments of `_advance` to its results, in the same order."""


def share_work(workers: int | None, engine: Any) -> AbstractContextManager[_Work]:
    inner = engine.engine if isinstance(engine, Delayed) else engine
    # its workers or sites belong to this process
    if inner is not None and not isinstance(inner, Local):
        if workers not in (None, 1):
            raise ConfigError(
                f"workers={workers} cannot share engine={engine!r}, which has workers of its own; "
                "leave workers out"
            )
        return _pool(1)
    if workers is not None:
        return _pool(workers)
    from joblib import cpu_count

    return _pool(cpu_count(), _PATIENCE)


@contextlib.contextmanager
def _pool(workers: int, patience: float = 0.0) -> Iterator[_Work]:
    """Processes that share the work after `patience` seconds; until then this process works
    alone."""
    if workers == 1:
        yield lambda jobs: (_advance(*job) for job in jobs)
        return
    from joblib import Parallel, delayed, parallel_config

    # joblib's processes do not run the caller's script again, take what it defines, and share large
    # arrays in memory ("c": as if they were their own).
    began, options = time.monotonic(), {"return_as": "generator", "mmap_mode": "c"}
    config = parallel_config(backend="loky", inner_max_num_threads=1)
    with config, Parallel(workers, **options) as parallel:

        def work(jobs: list[tuple]) -> Iterator[_Outcome]:
            here = 0
            while here < len(jobs) and time.monotonic() - began < patience:
                yield _advance(*jobs[here])
                here += 1
            yield from parallel(delayed(_advance)(*job) for job in jobs[here:])

        try:
            yield work
        except pickle.PicklingError as error:
            # of a whole traceback
            why = str(error.__cause__ or error).strip('"\n').splitlines()[-1]
            raise ConfigError(
                f"workers={workers}: the algorithm cannot be sent to another process ({why}); use "
                "workers=1"
            ) from error


def all_failed(cells: list[Cell]) -> DivergenceError:
    first, failure = next((cell, cell.failure) for cell in cells if cell.failure)
    what = "every combination of the grid" if len(cells) > 1 else "the only combination of the grid"
    text = f"{what} failed; {shown_settings(first.values)}: {failure.failed}"
    return DivergenceError(text, failure.at)


def planned(cells: int, rungs: list[int], halving: int | None) -> int:
    """Cells of all rungs together."""
    counts = [cells]
    for _ in rungs[1:]:
        assert halving is not None  # one rung otherwise
        counts.append(math.ceil(counts[-1] / halving))
    return sum(counts)
