"""`fd.tune`: a grid or random search for an algorithm's settings, on rows that every client holds out of its training rows.

Test rows take no part: the federation that cells run on does not even have them (`Federation.holdout`). With successive
halving, all cells run for a few rounds, the best of them go on from where they are for some more, and so forth. A cell that
goes on is resumed from its checkpoint, and a run does not know how many rounds it will have (a `horizon` is a field of the
algorithm, which stays as it is): its numbers are those of a run that was never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foedus.core.algorithm import Algorithm
from foedus.core.arguments import check_arguments, seed_list
from foedus.core.clients import Poisson
from foedus.core.run import run
from foedus.core.threads import one_thread
from foedus.engines.delay import Delayed
from foedus.engines.local import Local
from foedus.errors import ConfigError, DivergenceError, FoedusError, positive, unknown, whole_number
from foedus.report.text import bar, count, plain, rich_table

if TYPE_CHECKING:
    import pandas as pd

    from foedus.data.federation import Federation

_RESULTS = ("score", "spread", "rounds", "seconds", "failed")
"""Columns of the table besides the settings."""

_SHOWN = 10
"""Cells that are printed; all of them are in the table."""

_PATIENCE = 4.0
"""Seconds: about what it takes to start a process that has PyTorch."""


@dataclass(frozen=True)
class loguniform:  # noqa: N801 - written where a list of values could be
    """A range to draw from, uniformly in the logarithm; draws are rounded to three digits.

    Example:
        >>> fd.tune(fd.FedAvg(fd.Linear()), fed, rounds=20, grid={"lr": fd.loguniform(1e-3, 10)}, trials=12)
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        positive("low", self.low)
        positive("high", self.high)
        if self.low >= self.high:
            raise ConfigError(f"low={self.low!r} must be less than high={self.high!r}")

    def draw(self, rng: np.random.Generator) -> float:
        """One value."""
        value = float(f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.3g}")
        return min(max(value, self.low), self.high)


Grid = Mapping[str, Sequence[Any] | loguniform]


def tune(
    algorithm: Algorithm | Callable[..., Algorithm],
    fed: Federation,
    rounds: int,
    *,
    grid: Grid,
    trials: int | None = None,
    seed: int = 0,
    seeds: int | Sequence[int] = 1,
    validation: float = 0.2,
    halving: int | None = 3,
    metric: str | None = None,
    engine: Any = None,
    participation: float | Poisson = 1.0,
    quantise: str | None = None,
    workers: int | None = None,
    progress: bool | None = None,
) -> Tuning:
    """Choose settings of an algorithm by what it reaches on validation rows after `rounds` rounds.

    algorithm: one whose fields take the values of the grid, or a function (or class) that makes one of them,
    `algorithm(**values)`. grid: {name: values}; the field of a field has a dot in its name, "features.bandwidth". Instead of
    a list, `fd.loguniform(low, high)` is a range to draw from. trials: None tries all combinations, a number tries so many of
    them, drawn at random with `seed`.
    seeds: runs of each combination, as in `fd.compare`. The validation rows are this part (`validation`) of each client's
    training rows, others for each seed (`fed.holdout(validation, seed)`); the score is the mean over seeds.
    halving: as long as more than so many combinations are left, only the best 1/halving of them go on after 1/halving of
    the rounds; None runs all of them to the end.
    metric: "accuracy" or "mse", or "loss"; where clients end up with models of their own, by default "own_accuracy" or
    "own_mse", that on their own validation rows. Of equal accuracies, that with the smaller loss is better.
    engine, participation, quantise: as in `fd.run`. workers: processes that share the work (1: none but this one); by default
    one for each core, once it has taken longer than they take to start. Every run computes with one thread, and the result
    does not depend on where.

    Example:
        >>> newton = fd.FedNewton(fd.RandomFourier(300), solver="cg")
        >>> found = fd.tune(newton, fed, rounds=6, grid={"features.bandwidth": [1, 2, 4, 8], "reg": [1e-5, 1e-4, 1e-3]})
        >>> print(found)
        >>> fd.run(found.best, fed, rounds=6)
    """
    for name, value, least in (("trials", trials, 1), ("workers", workers, 1), ("halving", halving, 2)):
        if value is not None:
            whole_number(name, value, least)
    whole_number("seed", seed, 0)
    if isinstance(validation, bool) or not isinstance(validation, Real) or not 0 < validation < 1:
        raise ConfigError(f"validation={validation!r} must be a part of the rows, more than 0 and less than 1, such as 0.2")
    seeds, grid = seed_list(seeds), _checked(grid)
    cells = [_Cell(i, v, _build(algorithm, v)) for i, v in enumerate(_combinations(grid, trials, seed))]
    for cell in cells:
        check_arguments(
            cell.algorithm, fed, rounds, seed=max(seeds), engine=engine, participation=participation, evaluate_every=1,
            target=None, quantise=quantise, aggregation=None, checkpoint=None, checkpoint_every=1, resume=False, callbacks=(),
        )  # fmt: skip
        cell.algorithm.check(fed.spec)
    metric = _metric(metric, fed, all(cell.algorithm.personal for cell in cells))
    rungs = _rungs(len(cells), int(rounds), halving)
    # Evaluated after the last round only, which is that of the rung.
    options = {"engine": engine, "participation": participation, "quantise": quantise, "evaluate_every": max(rungs[-1], 1)}
    held = {s: fed.holdout(validation, seed=s) for s in seeds}
    search = _Search(held, metric, options, rungs, halving)
    try:
        search.race(cells, _share_work(workers, engine), progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the run's own advice to resume it: its checkpoint is gone
    best = search.ranked(cells)[0]
    what = type(best.algorithm).__name__
    title = (
        f"{fed.data.name}: {count(len(cells), 'setting')} of {what}, {count(rungs[-1], 'round')}, {count(len(seeds), 'seed')}"
    )
    return Tuning(best.algorithm, best.values, metric, search.table(cells), _border(grid, best.values), title)


@dataclass(eq=False, repr=False)
class Tuning:
    """What a search found: `best` (the algorithm), `values` (its settings from the grid), `table`, and `print(tuning)`.

    `table` has a row for each combination, best first (after those that ran to the end, those that halving left behind):
    its values, `score` and `spread` (mean and standard deviation over seeds of the metric on validation rows; NaN if it
    failed), `rounds` that it ran, `seconds` of all its runs, and why it `failed`. `border` names the numbers that were chosen
    at the end of their list, of three values or more: better ones may lie beyond.
    """

    best: Algorithm
    values: dict[str, Any]
    metric: str
    table: pd.DataFrame
    border: tuple[str, ...]
    title: str

    def __rich__(self) -> Any:
        rows = self.table.to_dict("records")
        names, shown = list(self.values), rows[:_SHOWN]
        text = [[_short(r[n]) for n in names] + [self._score(r), "–" if r["failed"] else f"{r['rounds']}"] for r in shown]
        notes = [f"chosen: {_settings(self.values)}"]
        notes += [
            f"{n} = {_short(self.values[n])} is at the end of its list: better values may lie beyond" for n in self.border
        ]
        if len(rows) > len(shown):
            notes.append(f"{len(rows) - len(shown)} more in .table")
        failed = [r for r in rows if r["failed"]]
        if failed:
            first = _settings({n: failed[0][n] for n in names})
            notes.append(f"{len(failed)} of {len(rows)} failed; {first}: {failed[0]['failed']}")
        return rich_table(self.title, [*names, f"validation\n{self.metric}", "rounds"], text, notes)

    def _score(self, row: dict[str, Any]) -> str:
        if row["failed"]:
            return "failed"
        form = ".4f" if self.metric.endswith("accuracy") else ".4g"
        spread = "" if math.isnan(row["spread"]) else f" ± {row['spread']:{form}}"
        return f"{row['score']:{form}}{spread}"

    def __repr__(self) -> str:
        return plain(self.__rich__())


# -- the search --------------------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """Where a run has come to."""

    score: float
    loss: float
    rounds: int
    seconds: float
    failed: str = ""
    at: int = 0
    """The round in which it failed."""


@dataclass(eq=False)
class _Cell:
    """One combination of values, and how its runs (one for each seed) stand."""

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
class _Search:
    """Successive halving of cells on the federations with validation rows, one for each seed."""

    held: dict[int, Federation]
    metric: str
    options: dict[str, Any]
    rungs: list[int]
    halving: int | None

    def race(self, cells: list[_Cell], work: contextlib.AbstractContextManager[_Work], progress: bool | None) -> None:
        """Run all cells to the first rung, the best of them to the next, and so on."""
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foedus-tune-")))
            advance = stack.enter_context(bar(_planned(len(cells), self.rungs, self.halving) * len(self.held), progress))
            pool = stack.enter_context(work)
            racing, behind = cells, []
            for rung in self.rungs:
                self.run(racing, rung, folder, pool, advance)
                while not self.ranked(racing) and behind:  # all of them failed on the way: those cut before take their place
                    racing, behind = behind[: len(racing)], behind[len(racing) :]
                    self.run(racing, rung, folder, pool, advance)
                order = self.ranked(racing)
                if not order:
                    raise _all_failed(cells)
                keep = len(racing) if rung == self.rungs[-1] else math.ceil(len(racing) / self.halving)
                racing, behind = order[:keep], order[keep:] + behind

    def run(self, cells: list[_Cell], rounds: int, folder: Path, pool: _Work, advance: Callable) -> None:
        file = lambda cell, seed: folder / f"{cell.number}-{seed}.safetensors" if len(self.rungs) > 1 else None  # noqa: E731
        runs = [(cell, seed) for cell in cells for seed in self.held]
        jobs = [(c.algorithm, self.held[s], rounds, s, self.metric, file(c, s), self.options) for c, s in runs]
        for cell in cells:
            cell.runs = []
        for (cell, _), outcome in zip(runs, pool(jobs), strict=True):
            cell.runs.append(outcome)
            advance(f"{_settings(cell.values)}: round {rounds}", 1)

    def ranked(self, cells: list[_Cell]) -> list[_Cell]:
        """Those that did not fail: the longest first, then by score, then by loss (accuracies on few rows are often equal)."""
        sign = -1 if self.metric.endswith("accuracy") else 1
        fine = [cell for cell in cells if not cell.failure]
        return sorted(fine, key=lambda cell: (-cell.rounds, sign * cell.score, cell.loss, cell.number))

    def table(self, cells: list[_Cell]) -> pd.DataFrame:
        import pandas as pd

        order = self.ranked(cells) + [cell for cell in cells if cell.failure]
        index = pd.Index([cell.number for cell in order], name="cell")
        table = pd.DataFrame([cell.row() for cell in order], index=index)
        for name in cells[0].values:  # None beside numbers would become NaN
            if any(cell.values[name] is None for cell in cells):
                table[name] = pd.Series([cell.values[name] for cell in order], index, dtype=object)
        return table


def _advance(
    algorithm: Algorithm, fed: Federation, rounds: int, seed: int, metric: str, file: Path | None, options: dict[str, Any]
) -> _Outcome:
    """Run a cell, or go on with it, until so many rounds are done."""
    checkpoint = {} if file is None else {"checkpoint": file, "checkpoint_every": max(rounds, 1), "resume": True}
    with one_thread():
        try:
            records = run(algorithm, fed, rounds, seed=seed, progress=False, **checkpoint, **options).records
        except (DivergenceError, ConfigError) as error:  # of the second kind is a system that is singular, for example
            at = getattr(error, "round", 0)
            seconds = error.run.records.last("seconds") if hasattr(error, "run") else math.nan
            return _Outcome(math.nan, math.nan, max(at - 1, 0), 0.0 if math.isnan(seconds) else seconds, str(error), at)
    if metric not in records.columns:
        name = type(algorithm).__name__
        raise ConfigError(
            f"metric={metric!r} is not measured: {name} makes no model that could be evaluated on validation rows"
        )
    score, loss = records.last(metric), records.last(metric.replace("accuracy", "loss").replace("mse", "loss"))
    failed = "" if math.isfinite(score) else f"round {rounds}: the {metric} on the validation rows is {score}"
    return _Outcome(score, loss, rounds, records.last("seconds"), failed, rounds)


def _all_failed(cells: list[_Cell]) -> DivergenceError:
    first = next(cell for cell in cells if cell.failure)
    what = "every combination of the grid" if len(cells) > 1 else "the only combination of the grid"
    return DivergenceError(f"{what} failed; {_settings(first.values)}: {first.failure.failed}", first.failure.at)


def _rungs(cells: int, rounds: int, halving: int | None) -> list[int]:
    """After how many rounds cells are compared; at the end at most `halving` of them, if there are rounds enough."""
    rungs = [rounds]
    while halving is not None and cells > halving and rungs[0] > 1:
        rungs.insert(0, math.ceil(rungs[0] / halving))
        cells = math.ceil(cells / halving)
    return rungs


def _planned(cells: int, rungs: list[int], halving: int | None) -> int:
    """Cells of all rungs together."""
    return sum(itertools.accumulate(rungs[1:], lambda n, _: math.ceil(n / halving), initial=cells))


# -- processes ---------------------------------------------------------------------------------------------------------


_Work = Callable[[list[tuple]], Iterator[_Outcome]]
"""From the arguments of `_advance` to its results, in the same order."""


def _share_work(workers: int | None, engine: Any) -> contextlib.AbstractContextManager[_Work]:
    inner = engine.engine if isinstance(engine, Delayed) else engine
    if inner is not None and not isinstance(inner, Local):  # its workers or sites belong to this process
        if workers not in (None, 1):
            raise ConfigError(
                f"workers={workers} cannot share engine={engine!r}, which has workers of its own; leave workers out"
            )
        return _pool(1)
    if workers is not None:
        return _pool(workers)
    from joblib import cpu_count

    return _pool(cpu_count(), _PATIENCE)


@contextlib.contextmanager
def _pool(workers: int, patience: float = 0.0) -> Iterator[_Work]:
    """Processes that share the work after so many seconds; what is done before is done here."""
    if workers == 1:
        yield lambda jobs: (_advance(*job) for job in jobs)
        return
    from joblib import Parallel, delayed, parallel_config

    # joblib's processes do not run the caller's script again, take what it defines, and share large arrays in memory
    # ("c": as if they were their own).
    began, options = time.monotonic(), {"return_as": "generator", "mmap_mode": "c"}
    with parallel_config(backend="loky", inner_max_num_threads=1), Parallel(workers, **options) as parallel:

        def work(jobs: list[tuple]) -> Iterator[_Outcome]:
            here = 0
            while here < len(jobs) and time.monotonic() - began < patience:
                yield _advance(*jobs[here])
                here += 1
            yield from parallel(delayed(_advance)(*job) for job in jobs[here:])

        try:
            yield work
        except pickle.PicklingError as error:
            why = str(error.__cause__ or error).strip('"\n').splitlines()[-1]  # of a whole traceback
            raise ConfigError(
                f"workers={workers}: the algorithm cannot be sent to another process ({why}); use workers=1"
            ) from error


# -- the grid ----------------------------------------------------------------------------------------------------------


def _checked(grid: Any) -> dict[str, list[Any] | loguniform]:
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError(
            f"grid={grid!r} must be a dictionary {{name: values}} with at least one entry, such as {{'lr': [0.01, 0.1]}}"
        )
    found: dict[str, list[Any] | loguniform] = {}
    for name, values in grid.items():
        if not isinstance(name, str):
            raise ConfigError(f"grid has the key {name!r}; keys are names of settings")
        if name in _RESULTS:
            raise ConfigError(
                f"grid: the name {name!r} is that of a column of the table ({', '.join(_RESULTS)}); choose another"
            )
        if isinstance(values, loguniform):
            found[name] = values
            continue
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence | np.ndarray):
            raise ConfigError(f"grid[{name!r}]={values!r} must be a list of values, or fd.loguniform(low, high)")
        if len(values) == 0:
            raise ConfigError(f"grid[{name!r}] is empty: give at least one value")
        found[name] = [v.item() if isinstance(v, np.generic) else v for v in values]
    for name in found:
        if inside := [other for other in found if other.startswith(f"{name}.")]:
            raise ConfigError(f"grid has {name!r} and {inside[0]!r}, which is a part of it; give one of them")
    return found


def _combinations(grid: dict[str, list[Any] | loguniform], trials: int | None, seed: int) -> list[dict[str, Any]]:
    ranges = [name for name, values in grid.items() if isinstance(values, loguniform)]
    rng = np.random.default_rng(seed)
    if ranges:
        if trials is None:
            raise ConfigError(f"grid[{ranges[0]!r}] is a range, so trials= must say how many values to draw from it")
        pick = lambda v: v.draw(rng) if isinstance(v, loguniform) else v[int(rng.integers(len(v)))]  # noqa: E731
        return [{name: pick(values) for name, values in grid.items()} for _ in range(trials)]
    shape = [len(values) for values in grid.values()]
    size = math.prod(shape)
    if trials is not None and trials > size:
        raise ConfigError(f"trials={trials} is more than the {size} combinations of the grid; leave trials out to try them all")
    numbers = range(size) if trials is None else np.sort(rng.choice(size, trials, replace=False)).tolist()
    places = (np.unravel_index(n, shape) for n in numbers)
    return [{name: values[p] for (name, values), p in zip(grid.items(), at, strict=True)} for at in places]


def _build(algorithm: Any, values: dict[str, Any]) -> Algorithm:
    """The algorithm with these values."""
    if isinstance(algorithm, Algorithm):
        for name in values:
            if name not in (known := setting_names(algorithm)):
                raise ConfigError(f"grid: {unknown(f'{type(algorithm).__name__} setting', name, known)}")
        make = lambda: _replaced(algorithm, values)  # noqa: E731
    elif callable(algorithm):
        make = lambda: algorithm(**values)  # noqa: E731
    else:
        raise ConfigError(
            f"algorithm={algorithm!r} must be a foedus algorithm, or a function that makes one of the grid's values"
        )
    try:
        made = make()
    except FoedusError as error:
        raise ConfigError(f"grid: {_settings(values)}: {error}") from error
    if not isinstance(made, Algorithm):
        raise ConfigError(f"algorithm(**values) returned {made!r}; it must return a foedus algorithm")
    return made


def setting_names(owner: Any, at: str = "") -> list[str]:
    """The fields of an algorithm, and with dots those of its fields."""
    if not dataclasses.is_dataclass(owner) or isinstance(owner, type):
        return []
    own = [f.name for f in dataclasses.fields(owner) if f.init]
    inside = [name for f in own for name in setting_names(getattr(owner, f), f"{at}{f}.")]
    return [f"{at}{f}" for f in own] + inside


def _replaced(owner: Any, values: dict[str, Any]) -> Any:
    """All at once: the values of one field may be allowed only with those of another."""
    changes = {name: value for name, value in values.items() if "." not in name}
    for part in dict.fromkeys(name.split(".")[0] for name in values if "." in name):
        inner = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{part}.")}
        changes[part] = _replaced(getattr(owner, part), inner)
    return dataclasses.replace(owner, **changes)


def _metric(metric: str | None, fed: Federation, personal: bool) -> str:
    """The column of the history to choose by."""
    usual = "accuracy" if fed.spec.classes else "mse"
    allowed = [f"own_{usual}", "own_loss", usual, "loss"] if personal else [usual, "loss"]
    if metric is None:
        return allowed[0]
    if metric not in allowed:
        raise ConfigError(unknown("metric", metric, allowed))
    return metric


def _border(grid: dict[str, list[Any] | loguniform], values: dict[str, Any]) -> tuple[str, ...]:
    found = []
    for name, tried in grid.items():
        numeric = isinstance(tried, list) and all(isinstance(v, Real) and not isinstance(v, bool) for v in tried)
        if numeric and len(set(tried)) >= 3 and values[name] in (min(tried), max(tried)):
            found.append(name)
    return tuple(found)


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
