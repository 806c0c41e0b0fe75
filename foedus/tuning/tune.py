"""`fd.tune`: a grid or random search for an algorithm's settings, on held-out training rows.

Test rows are not used: the federation of the cells does not contain them (`Federation.holdout`).
With successive halving, all cells run for a few rounds, the best of them continue for some more,
and so forth. A cell that continues is resumed from its checkpoint, and nothing in a run depends on
its number of rounds (a `horizon` is a field of the algorithm, which does not change), so its
numbers are those of an uninterrupted run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Lt

from foedus.base import markup
from foedus.base.settings import Means, check_value
from foedus.core.algorithm import Algorithm
from foedus.core.arguments import check_arguments, seed_list
from foedus.core.metrics import CLASSIFICATION, REGRESSION, higher_is_better
from foedus.core.participation import Poisson
from foedus.errors import ConfigError, is_number, unknown
from foedus.report.reproduction import UNKNOWN, Reproduction
from foedus.report.text import count, plain, rich_table
from foedus.tuning.grid import shorten, shown_settings

if TYPE_CHECKING:
    import pandas as pd

    from foedus.data.federation import Federation

from foedus.tuning.grid import Grid, build, combinations, loguniform
from foedus.tuning.page import render, reproduction
from foedus.tuning.search import Cell, Search, share_work

_RESULTS = ("score", "spread", "rounds", "seconds", "failed")
"""Columns of the table besides the settings."""

_SHOWN = 10
"""Cells that are printed; all of them are in the table."""


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
    """Choose settings of an algorithm by its score on validation rows after `rounds` rounds.

    Every run computes with one thread, and the result does not depend on the process. Of equal
    accuracies, that with the smaller loss is better.

    Args:
        algorithm: One whose fields take the values of the grid, or a function (or class) that makes
            one of them, `algorithm(**values)`.
        fed: The federation; its test rows are not used.
        rounds: Rounds of a run.
        grid: {name: values}; the field of a field has a dot in its name, "features.bandwidth". In
            place of a list, `fd.loguniform(low, high)` is a range to draw from.
        trials: Number of combinations, drawn at random; `None` tries all.
        seed: Seed of the drawn combinations.
        seeds: Runs of each combination, as in `fd.compare`; the score is their mean.
        validation: The share of each client's training rows on which runs are scored, other rows
            for each seed (`fed.holdout(validation, seed)`).
        halving: As long as more than `halving` combinations remain, only the best 1/halving of them
            continue after 1/halving of the rounds; `None` runs all of them to the end.
        metric: "accuracy" or "mse", "loss", or one of `metrics` of `fd.run`, such as "auc"; for
            personal models, by default "own_accuracy" or "own_mse", on the clients' own validation
            rows.
        engine: As in `fd.run`.
        participation: As in `fd.run`.
        quantise: As in `fd.run`.
        workers: Processes that share the work (1: only this one); by default one for each core,
            once the search has taken longer than they take to start.
        progress: Whether to show a bar; by default only on a terminal.

    Returns:
        The best algorithm and the table of all combinations.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> newton = fd.FedNewton(fd.RandomFourier(100), solver="cg")
        >>> grid = {"features.bandwidth": [1.0, 4.0], "reg": [1e-4, 1e-2]}
        >>> found = fd.tune(newton, fed, rounds=2, grid=grid, workers=1)
        >>> found.values["features.bandwidth"], len(found.table)
        (4.0, 4)
    """
    check_value("trials", trials, Annotated[int, Ge(1)] | None)
    check_value("workers", workers, Annotated[int, Ge(1)] | None)
    check_value("halving", halving, Annotated[int, Ge(2)] | None)
    check_value("seed", seed, Annotated[int, Ge(0)])
    part = Means("a part of the rows, above 0 and below 1, such as 0.2")
    check_value("validation", validation, Annotated[float, Gt(0), Lt(1), part])
    seeds, grid = seed_list(seeds), _checked(grid)
    tried = combinations(grid, trials, seed)
    cells = [Cell(i, values, build(algorithm, values)) for i, values in enumerate(tried)]
    for cell in cells:
        check_arguments(
            cell.algorithm, fed, rounds, seed=max(seeds), engine=engine,
            participation=participation, evaluate_every=1, target=None, quantise=quantise,
            aggregation=None, checkpoint=None, checkpoint_every=1, resume=False, callbacks=(),
        )  # fmt: skip
        cell.algorithm.check_data(fed.spec)
    metric, more = _metric(metric, fed, all(cell.algorithm.personal for cell in cells))
    rungs = _rungs(len(cells), int(rounds), halving)
    options = {"engine": engine, "participation": participation, "quantise": quantise}
    if more:
        options["metrics"] = more
    options["evaluate_every"] = max(rungs[-1], 1)  # the last round only, which is that of the rung
    held = {s: fed.holdout(validation, seed=s) for s in seeds}
    search = Search(held, metric, options, rungs, halving)
    try:
        search.race(cells, share_work(workers, engine), progress)
    except KeyboardInterrupt:
        # without the run's own advice to resume it: its checkpoint is gone
        raise KeyboardInterrupt from None
    best, table = search.ranked(cells)[0], search.table(cells)
    settings = f"{count(len(cells), 'setting')} of {type(best.algorithm).__name__}"
    counts = f"{count(rungs[-1], 'round')}, {count(len(seeds), 'seed')}"
    title, border = f"{fed.data.name}: {settings}, {counts}", _border(grid, best.values)
    search_options = {
        "trials": trials, "seed": seed, "seeds": seeds, "validation": validation,
        "halving": halving, "metric": metric,
    }  # fmt: skip
    run_options = {"rounds": int(rounds), "participation": participation, "quantise": quantise}
    again = reproduction(algorithm, fed, grid, run_options, search_options, engine)
    return Tuning(best.algorithm, best.values, metric, table, border, title, again)


@dataclass(eq=False, repr=False)
class Tuning:
    """The result of a search; it prints its table.

    Attributes:
        best: The best algorithm.
        values: Its settings.
        metric: The metric of the score.
        table: A row for each combination, best first (after those that ran to the end, those that
            halving dropped): its values, `score` and `spread` (mean and standard deviation over
            seeds of the metric on validation rows; NaN if it failed), `rounds` that it ran,
            `seconds` of all its runs, and why it `failed`.
        border: The names of numbers that were chosen at the end of their list, of three values or
            more: better ones may lie beyond.
        title: One line: what was searched.
        again: The command and the file that search again.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> found = fd.tune(fd.FedAvg(fd.Linear()), fed, 3, grid={"lr": [1e-4, 0.1]}, workers=1)
        >>> found.best.lr
        0.1
    """

    best: Algorithm
    values: dict[str, Any]
    metric: str
    table: pd.DataFrame
    border: tuple[str, ...]
    title: str
    again: Reproduction = UNKNOWN

    def report(self, path: str | os.PathLike, title: str | None = None) -> Path:
        """Write one self-contained HTML page: the score by each setting, every combination.

        Needs matplotlib.

        Args:
            path: The file.
            title: Of the page; by default the algorithm and the data.

        Returns:
            The path of the file.
        """
        from foedus.report.html import write_page

        return write_page(path, render(self, title))

    def __rich__(self) -> Any:
        return rich_table(self.title, *self.cells())

    def _repr_html_(self) -> str:
        """For notebooks: the table with the chosen settings in bold."""
        headings, (best, *others), notes = self.cells()
        top = [h.replace("\n", " ") for h in headings]
        rows: list[list[Any]] = [[markup.Cell(v, bold=True) for v in best], *others]
        return markup.box(self.title, markup.table(top, rows), markup.lines(notes))

    def cells(self, most: int = _SHOWN) -> tuple[list[str], list[list[str]], list[str]]:
        """The first rows of the table as text: headings, rows and notes."""
        rows = self.table.to_dict("records")
        names, shown = list(self.values), rows[:most]
        text = [[*(shorten(r[n]) for n in names), *self._result(r)] for r in shown]
        notes = [f"chosen: {shown_settings(self.values)}"]
        end = "is at the end of its list: better values may lie beyond"
        notes += [f"{n} = {shorten(self.values[n])} {end}" for n in self.border]
        if len(rows) > len(shown):
            notes.append(f"{len(rows) - len(shown)} more in .table")
        failed = [r for r in rows if r["failed"]]
        if failed:
            first = shown_settings({n: failed[0][n] for n in names})
            notes.append(f"{len(failed)} of {len(rows)} failed; {first}: {failed[0]['failed']}")
        return [*names, f"validation\n{self.metric}", "rounds"], text, notes

    def _result(self, row: dict[Any, Any]) -> tuple[str, str]:
        """Score and rounds."""
        if row["failed"]:
            return "failed", "–"
        form = ".4f" if higher_is_better(self.metric) else ".4g"
        spread = "" if math.isnan(row["spread"]) else f" ± {row['spread']:{form}}"
        return f"{row['score']:{form}}{spread}", str(row["rounds"])

    def __repr__(self) -> str:
        return plain(self.__rich__())


def _rungs(cells: int, rounds: int, halving: int | None) -> list[int]:
    """The rounds after which cells are compared; at the end at most `halving` are left."""
    rungs = [rounds]
    while halving is not None and cells > halving and rungs[0] > 1:
        rungs.insert(0, math.ceil(rungs[0] / halving))
        cells = math.ceil(cells / halving)
    return rungs


# -- the grid --------------------------------------------------------------------------------------


def _checked(grid: Any) -> dict[str, list[Any] | loguniform]:
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError(
            f"grid={grid!r} must be a dictionary {{name: values}} with at least one entry, such as "
            f"{{'lr': [0.01, 0.1]}}"
        )
    found: dict[str, list[Any] | loguniform] = {}
    for name, values in grid.items():
        if not isinstance(name, str):
            raise ConfigError(f"grid has the key {name!r}; keys are names of settings")
        if name in _RESULTS:
            raise ConfigError(
                f"grid: the name {name!r} is that of a column of the table "
                f"({', '.join(_RESULTS)}); choose another"
            )
        if isinstance(values, loguniform):
            found[name] = values
            continue
        single = isinstance(values, str | bytes | Mapping)
        if single or not isinstance(values, Sequence | np.ndarray):
            raise ConfigError(
                f"grid[{name!r}]={values!r} must be a list of values, or fd.loguniform(low, high)"
            )
        if len(values) == 0:
            raise ConfigError(f"grid[{name!r}] is empty: give at least one value")
        found[name] = [v.item() if isinstance(v, np.generic) else v for v in values]
    for name in found:
        if inside := [other for other in found if other.startswith(f"{name}.")]:
            raise ConfigError(
                f"grid has {name!r} and {inside[0]!r}, which is a part of it; give one of them"
            )
    return found


def _metric(metric: str | None, fed: Federation, personal: bool) -> tuple[str, list[str]]:
    """The column of the history to choose by, and the metrics that it takes."""
    usual = ["accuracy" if fed.spec.classes else "mse", "loss"]
    more = list(CLASSIFICATION if fed.spec.classes else REGRESSION)
    own = [f"own_{m}" for m in (*usual, *more)] if personal else []
    # metrics of personal models are measured on the clients' own rows only
    allowed = [*own, *usual] if personal else [*usual, *more]
    if metric is None:
        return allowed[0], []
    if metric not in allowed:
        raise ConfigError(unknown("metric", metric, allowed))
    name = metric.removeprefix("own_")
    return metric, [name] if name in more else []


def _border(grid: dict[str, list[Any] | loguniform], values: dict[str, Any]) -> tuple[str, ...]:
    found = []
    for name, tried in grid.items():
        if isinstance(tried, loguniform):
            continue
        numeric = all(map(is_number, tried))
        if numeric and len(set(tried)) >= 3 and values[name] in (min(tried), max(tried)):
            found.append(name)
    return tuple(found)
