"""`fd.compare`: several algorithms on the same federation and seeds, as a table and a page."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from foedus.base import markup
from foedus.core.algorithm import Algorithm
from foedus.core.arguments import seed_list, without_fingerprint
from foedus.core.callbacks import Named, check_callbacks
from foedus.core.describe import flatten
from foedus.core.result import Run
from foedus.core.run import run
from foedus.errors import CheckpointError, ConfigError, DivergenceError, unknown
from foedus.report.text import bar, count, digits, mean_and_spread, number, plain, rich_table
from foedus.storage import checkpoint as files

if TYPE_CHECKING:
    import pandas as pd

    from foedus.data.federation import Federation

_NEAR_BEST = 0.95
"""The default target: this part of the best final accuracy (the least error divided by it)."""

_POOLED_KEYS = ("scheme", "clients", "fingerprint.clients")
"""What is recorded of a federation and is lost where its rows are pooled."""

_RUN_FILE = re.compile(r"(.+)-seed\d+")


def compare(
    algorithms: Mapping[str, Algorithm],
    fed: Federation,
    rounds: int,
    *,
    seeds: int | Sequence[int] = (0,),
    target: float | None = None,
    progress: bool | None = None,
    **run_options: Any,
) -> Comparison:
    """Run every algorithm on the same federation with the same seeds.

    A run that diverges is kept up to the round before, with a remark; the others go on.

    Args:
        algorithms: By the name that tables and plots show.
        fed: The federation.
        rounds: Rounds of each run.
        seeds: A list, or n for the seeds 0 .. n - 1.
        target: The value of the metric whose cost in rounds and megabytes the table states; it does
            not stop a run. By default 95% of the best final accuracy that an algorithm without
            pooled data reaches (for regression, the least error divided by 0.95).
        progress: Whether to show a bar; by default only on a terminal.
        **run_options: Those of `fd.run`; `checkpoint` names a folder here, with one file for each
            run, and `resume=True` needs that of one of them: the others begin.

    Returns:
        All runs, their table and their page.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> algorithms = {"FedAvg": fd.FedAvg(), "Scaffold": fd.Scaffold()}
        >>> found = fd.compare(algorithms, fed, rounds=3, seeds=2)
        >>> found.table().seeds.to_dict()
        {'FedAvg': 2, 'Scaffold': 2}
    """
    algorithms = _checked(algorithms, fed, run_options)
    seeds = seed_list(seeds)
    folder, callbacks = run_options.pop("checkpoint", None), run_options.pop("callbacks", ())
    check_callbacks(callbacks)
    if run_options.get("resume") is True and folder is not None:
        paths = [Path(folder) / _file_name(name, seed) for name in algorithms for seed in seeds]
        if not any(map(files.exists, paths)):
            raise CheckpointError(
                f"{folder}: none of the {len(paths)} runs has a checkpoint to go on from; check "
                'the path, or use resume="auto" to begin where there is none'
            )
        run_options["resume"] = "auto"  # those that were not reached begin
    runs: dict[str, list[Run]] = {name: [] for name in algorithms}
    diverged: dict[str, dict[int, str]] = {}
    with bar(len(algorithms) * len(seeds), progress) as advance:
        for name, algorithm in algorithms.items():
            for seed in seeds:
                advance(f"{name}, seed {seed}", 0)
                file = None if folder is None else Path(folder) / _file_name(name, seed)
                own: dict[str, Any] = {"seed": seed, "checkpoint": file, "progress": False}
                own["callbacks"] = [Named(c, f"{name}-seed{seed}") for c in callbacks]
                try:
                    result = run(algorithm, fed, rounds, **own, **run_options)
                except DivergenceError as error:
                    diverged.setdefault(name, {})[len(runs[name])] = str(error)
                    result = error.run
                runs[name].append(result)
                advance(f"{name}, seed {seed}", 1)
    return Comparison(runs, fed, target, diverged)


@dataclass(eq=False, repr=False)
class Comparison:
    """Runs of several algorithms on one federation: a table, curves and a page.

    Args:
        runs: By algorithm, a list of runs, one a seed.
        fed: The federation.
        target: The value of the metric whose cost in rounds and megabytes the table states; by
            default close to the best.
        diverged: By algorithm, the message of each run that diverged, by its index in `runs[name]`.
        left_out: Which files of a folder could not be read, and why.

    Raises:
        ConfigError: The runs are of different federations, whose numbers cannot be compared.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> runs = {"FedAvg": [fd.run(fd.FedAvg(), fed, rounds=2)],
        ...         "Central": [fd.run(fd.Central(), fed, rounds=2)]}
        >>> fd.Comparison(runs, fed).table().index.tolist()
        ['FedAvg', 'Central']
    """

    runs: dict[str, list[Run]]
    fed: Federation | None = None
    target: float | None = None
    diverged: dict[str, dict[int, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    metric: str = field(init=False)
    own_metric: str | None = field(init=False)
    more_metrics: list[str] = field(init=False)
    default_target: bool = field(init=False)

    def __post_init__(self) -> None:
        if not self.runs or not all(self.runs.values()):
            raise ConfigError("a comparison needs at least one run of each algorithm")
        _check_one_federation(self.runs)
        self.metric, self.own_metric = _metrics([r for runs in self.runs.values() for r in runs])
        self.more_metrics = _asked([r for runs in self.runs.values() for r in runs])
        self.default_target = self.target is None
        if self.default_target:
            self.target = self._near_best()

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def higher_is_better(self) -> bool:
        return self.metric.endswith("accuracy")

    @property
    def single(self) -> Run | None:
        """The run, if there is only one."""
        runs = [run for of_name in self.runs.values() for run in of_name]
        return runs[0] if len(runs) == 1 else None

    @property
    def several(self) -> bool:
        """Whether an algorithm has run with more than one seed."""
        return max(map(len, self.runs.values())) > 1

    def is_pooled(self, name: str) -> bool:
        """Whether the algorithm sees all rows in one place: a reference, not a competitor."""
        first = self.runs[name][0]
        scheme = first.settings.get("federation", {}).get("scheme")
        return first.algorithm.pooled or scheme == "pool"

    def finished(self, name: str) -> list[Run]:
        """The runs that did not diverge."""
        return [r for i, r in enumerate(self.runs[name]) if i not in self.diverged.get(name, {})]

    def final(self, name: str, metric: str | None = None) -> list[float]:
        """The last value of a metric in each run that did not diverge."""
        values = [r.records.last(metric or self.metric) for r in self.finished(name)]
        return [v for v in values if not math.isnan(v)]

    def reached(self, run: Run) -> dict[str, float] | None:
        """The first row of the history whose metric is at the target."""
        if self.target is None:
            return None
        for row in run.records.rows:
            value = row.get(self.metric, math.nan)
            if value >= self.target if self.higher_is_better else value <= self.target:
                return row
        return None

    def _near_best(self) -> float | None:
        federated = [n for n in self.runs if not self.is_pooled(n)] or list(self.runs)
        finals = [statistics.fmean(f) for f in map(self.final, federated) if f]
        if not finals:
            return None
        return max(finals) * _NEAR_BEST if self.higher_is_better else min(finals) / _NEAR_BEST

    @property
    def best(self) -> str | None:
        """The algorithm with the best final metric, of two or more without pooled data."""
        means = {n: _mean(self.final(n)) for n in self.runs if not self.is_pooled(n)}
        means = {n: v for n, v in means.items() if not math.isnan(v)}
        if len(means) < 2:
            return None
        return (max if self.higher_is_better else min)(means, key=means.__getitem__)

    def table(self) -> pd.DataFrame:
        """One row an algorithm: the final metric, the cost to reach the target, and the whole cost.

        Columns: the metric and `_std` (NaN with one seed), the same on clients' own test rows where
        an algorithm is personal, and of the runs' `metrics=[...]`; `rounds_to_target` and
        `mb_to_target` (means over seeds; NaN unless every seed reaches it), `mb` and `seconds` of a
        whole run, `seeds` that finished, and a `remark`. A megabyte is 10^6 bytes, up and down
        together.
        """
        import pandas as pd

        table = pd.DataFrame({name: self._row(name) for name in self.runs}).T
        return table.infer_objects().rename_axis("algorithm")

    def _row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for metric in filter(None, (self.metric, self.own_metric, *self.more_metrics)):
            values = self.final(name, metric)
            row[metric] = _mean(values)
            row[f"{metric}_std"] = statistics.stdev(values) if len(values) > 1 else math.nan
        finished = self.finished(name)
        reached = [r for r in map(self.reached, finished) if r is not None]
        everyone = bool(reached) and len(reached) == len(self.runs[name])
        at_target = reached if everyone else []
        row["rounds_to_target"] = _mean([r["round"] for r in at_target])
        row["mb_to_target"] = _mean([megabytes(r) for r in at_target])
        ends = [r.records.rows[-1] for r in finished or self.runs[name] if r.records.rows]
        row["mb"] = _mean([megabytes(e) for e in ends])
        row["seconds"] = _mean([e["seconds"] for e in ends])
        return row | {"seeds": len(finished), "remark": self._remark(name, len(reached))}

    def _remark(self, name: str, reached: int) -> str:
        total, parts = len(self.runs[name]), []
        if self.is_pooled(name):
            parts.append("all data in one place")
        if lost := self.diverged.get(name):
            last = sorted({len(self.runs[name][i].records) for i in lost})
            where = f"round {last[0]}" if len(last) == 1 else f"rounds {last[0]} to {last[-1]}"
            seeds = "" if total == 1 else f"{len(lost)} of {total} seeds "
            parts.append(f"{seeds}diverged in {where}")
        if 0 < reached < total:
            parts.append(f"{reached} of {total} seeds reach the target")
        return "; ".join(parts)

    # -- words -------------------------------------------------------------------------------------

    def describe_target(self) -> str:
        """The target in words."""
        if self.target is None:
            return "no target: nothing was evaluated"
        sign, why = "at most", f" (the best / {_NEAR_BEST})"
        if self.higher_is_better:
            sign, why = "at least", f" ({_NEAR_BEST:.0%} of the best without pooled data)"
        text = f"target: {words(self.metric)} {sign} {digits(self.target, self.target)}"
        return text + (why if self.default_target else "")

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table as text: headings (with line breaks) and rows, the name first."""
        table = self.table()
        metrics = [m for m in (self.metric, self.own_metric, *self.more_metrics) if m]
        headings = ["algorithm", *(words(m).replace(", ", ",\n") for m in metrics)]
        headings += ["rounds\nto\ntarget", "MB\nto\ntarget", "MB\nin all", "seconds", "remark"]
        rows = []
        for name, row in zip(table.index, table.to_dict("records"), strict=True):
            means = [mean_and_spread(row[m], row[f"{m}_std"]) for m in metrics]
            costs = [number(row[c]) for c in ("rounds_to_target", "mb_to_target", "mb", "seconds")]
            rows.append([str(name), *means, *costs, row["remark"]])
        if not any(row[-1] for row in rows):
            headings, rows = headings[:-1], [row[:-1] for row in rows]
        return headings, rows

    def __rich__(self) -> Any:
        return rich_table(self.title(), *self._cells_and_notes())

    def _cells_and_notes(self) -> tuple[list[str], list[list[str]], list[str]]:
        headings, rows = self.cells()
        notes = [self.describe_target()]
        if headings[-1] == "remark":  # below the table, which then fits 80 columns
            notes += [f"{row[0]}: {row[-1]}" for row in rows if row[-1]]
            headings, rows = headings[:-1], [row[:-1] for row in rows]
        return headings, rows, notes + [f"left out: {message}" for message in self.left_out]

    def _repr_html_(self) -> str:
        """What notebooks show: the table with the best in bold, and curves on one scale."""
        from foedus.report.curves import lines

        headings, rows, notes = self._cells_and_notes()
        curves, best = {c.name: c for c in lines(self) if self.metric in c.y}, self.best
        every = [v for c in curves.values() for v in c.y[self.metric] if math.isfinite(v)]
        limits = (min(every), max(every)) if every else None
        table: list[list[object]] = []
        for name, *cells in rows:
            drawn = markup.Markup()
            if (c := curves.get(name)) is not None:
                label = f"{self.metric} of {name} by round"
                points = zip(c.x["rounds"], c.y[self.metric], strict=True)
                drawn = markup.curve(points, label, limits)
            bold = name == best
            table.append(
                [*(markup.Cell(v, bold=bold) for v in (name, cells[0])), *cells[1:], drawn]
            )
        top = [h.replace("\n", " ") for h in headings]
        shown = markup.table([*top, f"{words(self.metric)} by round"], table)
        return markup.box(self.title(), shown, markup.lines(notes))

    def title(self) -> str:
        """One line: on what, for how long, how often."""
        most = max(len(r.records) - 1 for runs in self.runs.values() for r in runs)
        seeds = max(len(runs) for runs in self.runs.values())
        data = self.federation_settings().get("data", "")
        counted = {"algorithm": len(self.runs), "round": most, "seed": seeds}
        return f"{data}: {', '.join(count(n, noun) for noun, n in counted.items())}".lstrip(": ")

    def federation_settings(self) -> dict[str, Any]:
        """The recorded split of the data; of a run on pooled data only where there is no other."""
        names = sorted(self.runs, key=self.is_pooled)
        return self.runs[names[0]][0].settings.get("federation", {})

    def __repr__(self) -> str:
        return plain(self.__rich__())

    # -- files -------------------------------------------------------------------------------------

    def report(self, path: str | os.PathLike, title: str | None = None) -> Path:
        """Write one self-contained HTML page: table, curves, the split, every setting.

        Needs matplotlib.

        Args:
            path: The file.
            title: Of the page; by default what was compared.

        Returns:
            The path of the file.
        """
        from foedus.report.html import write_page
        from foedus.report.page import render

        return write_page(path, render(self, title))

    def save(self, folder: str | os.PathLike) -> list[Path]:
        """Write each run that did not diverge to `folder/NAME-seedN.safetensors`."""
        written = []
        for name in self.runs:
            for r in self.finished(name):
                written.append(Path(folder) / _file_name(name, r.settings["seed"]))
                r.save(written[-1], card=False)
        return written

    @classmethod
    def load(cls, *paths: str | os.PathLike, target: float | None = None) -> Comparison:
        """A comparison of saved runs: files, or folders of them.

        Runs that differ only in the seed belong together. They are called as in the file name
        NAME-seedN, otherwise by the algorithm and by the settings in which they differ. A file of a
        folder that cannot be read is left out, and named in `left_out`.
        """
        groups: dict[str, dict[int, Run]] = {}
        names: dict[str, str | None] = {}
        left_out: list[str] = []
        for file in (found := _run_files(paths)):
            try:
                loaded = _load_run(file)
            except CheckpointError as error:
                if file in map(Path, paths):  # named by the user, and not one of a folder
                    raise
                left_out.append(str(error))
                continue
            settings = {k: v for k, v in _plain_settings(loaded).items() if k != "seed"}
            match = _RUN_FILE.fullmatch(file.stem)
            name, seed = match and unquote(match[1]), loaded.settings.get("seed", 0)
            key = json.dumps([name, settings], sort_keys=True)
            names[key] = name
            if seed in groups.setdefault(key, {}):
                _check_one_federation({"the first": [groups[key][seed]], str(file): [loaded]})
                raise ConfigError(
                    f"{file}: a run with these settings and seed {seed} is already among the runs"
                )
            groups[key][seed] = loaded
        if not groups:
            raise CheckpointError(
                f"none of the {count(len(found), 'file')} can be read: {'; '.join(left_out)}"
            )
        firsts = {key: _plain_settings(next(iter(runs.values()))) for key, runs in groups.items()}
        labels = _labels(firsts, names)
        runs = {labels[key]: [runs[s] for s in sorted(runs)] for key, runs in groups.items()}
        return cls(runs, None, target, left_out=left_out)


def _plain_settings(run: Run) -> dict[str, Any]:
    """What was chosen for a run; of its rows nothing."""
    return without_fingerprint(run.settings) if run.settings.get("federation") else run.settings


def words(metric: str) -> str:
    """A metric's name for people."""
    own = metric.startswith("own_")
    name = metric.removeprefix("own_") if own else metric
    if own:
        return f"{'error' if name == 'mse' else name}, own rows"
    return "mean squared error" if name == "mse" else name


# Arguments


def _checked(
    algorithms: Mapping[str, Algorithm], fed: Federation, options: dict[str, Any]
) -> dict[str, Algorithm]:
    """Refuse, before any run starts, what one of the runs would refuse."""
    if not isinstance(algorithms, Mapping) or not algorithms:
        raise ConfigError(
            "algorithms must be a dictionary {name: algorithm} with at least one entry"
        )
    own = ("algorithm", "fed", "rounds", "seed", "target", "progress")
    allowed = [p for p in inspect.signature(run).parameters if p not in own]
    for option in options:
        if option == "seed":
            raise ConfigError("compare takes seeds=[...] or seeds=n, not seed=")
        if option not in allowed:
            raise ConfigError(unknown("option", option, [*allowed, "seeds", "target", "progress"]))
    for name, algorithm in algorithms.items():
        if not isinstance(algorithm, Algorithm):
            kind = "a foedus algorithm such as fd.FedAvg()"
            raise ConfigError(f"algorithms[{name!r}] must be {kind}, not {algorithm!r}")
        if hasattr(fed, "spec"):
            algorithm.check_data(fed.spec)
    return {str(name): algorithm for name, algorithm in algorithms.items()}


# Saved runs


def _file_name(name: str, seed: int) -> str:
    return f"{quote(name, safe=' ')}-seed{seed}.safetensors"


def _run_files(paths: Sequence[str | os.PathLike]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not found:
            raise CheckpointError(f"{path}: there is no saved run (*.safetensors) in this folder")
        files += [f for f in found if f not in files]
    if not files:
        raise ConfigError("give at least one saved run")
    return files


def _load_run(file: Path) -> Run:
    try:
        return Run.load(file)
    except CheckpointError as error:
        if not isinstance(error.__cause__, ConfigError):
            raise
        # A user's own algorithm cannot be built from text; a table needs only what was recorded.
        return Run.load(file, algorithm=Algorithm())


def _labels(settings: dict[str, dict[str, Any]], names: dict[str, str | None]) -> dict[str, str]:
    """A different name for each group of runs: as short as it can be."""
    flat = {key: flatten(s) for key, s in settings.items()}
    short = {key: names[key] or str(f.get("algorithm.type", "run")) for key, f in flat.items()}
    labels: dict[str, str] = {}
    for key, name in short.items():
        alike = [flat[k] for k in short if short[k] == name]
        fields = sorted({f for s in alike for f in s if any(s.get(f) != o.get(f) for o in alike)})
        detail = ", ".join(f"{f.rsplit('.', 1)[-1]}={flat[key].get(f)}" for f in fields)
        label = f"{name} ({detail})" if detail else name
        labels[key] = label if label not in labels.values() else f"{label} #{len(labels) + 1}"
    return labels


def _check_one_federation(runs: Mapping[str, Sequence[Run]]) -> None:
    """Refuse runs whose recorded data, or division of it, differ."""
    recorded = [
        (name, flatten(r.settings["federation"]))
        for name, of_name in runs.items()
        for r in of_name
        if r.settings.get("federation")
    ]
    # of pooled rows less is known, and of older runs
    recorded.sort(
        key=lambda e: (e[1].get("scheme") == "pool", "fingerprint.training rows" not in e[1])
    )
    differing: dict[str, str] = {}
    for name, federation in recorded:
        reference, expected = recorded[0]
        # all rows in one place are still those of one federation
        pooled = "pool" in (federation.get("scheme"), expected.get("scheme"))
        keys = [k for k in {**expected, **federation} if not pooled or k not in _POOLED_KEYS]
        for k in keys:
            here, there = federation.get(k), expected.get(k)
            if k.startswith("fingerprint.") and here != there:
                if None not in (here, there):  # older runs have none
                    what = k.removeprefix("fingerprint.")
                    text = f"the {what} of {reference!r} and {name!r} differ"
                    differing.setdefault(f"{name} {k}", text)
            elif here != there:
                text = f"{k} is {there!r} in {reference!r} and {here!r} in {name!r}"
                differing.setdefault(f"{name} {k}", text)
    if differing:
        shown = list(differing.values())
        more = f" (and {len(shown) - 5} more)" if len(shown) > 5 else ""
        raise ConfigError(
            "runs of different federations cannot be put into one table: "
            f"{'; '.join(shown[:5])}{more}; compare or report those of each federation alone"
        )


# Numbers


def _metrics(runs: list[Run]) -> tuple[str, str | None]:
    """The metric to compare by, and the one on clients' own rows if it is another."""
    base = {"accuracy" if r.spec.classes else "mse" for r in runs}
    if len(base) > 1:
        raise ConfigError(
            "classification and regression cannot be compared: the runs have accuracy and mse"
        )
    name = base.pop()
    columns = {c for r in runs for c in r.records.columns}
    metric = next((c for c in (name, f"own_{name}") if c in columns), name)
    own = f"own_{name}"
    return metric, own if own in columns and own != metric else None


def _asked(runs: list[Run]) -> list[str]:
    """The columns of the metrics that runs were asked for."""
    names = dict.fromkeys(m for r in runs for m in r.settings.get("metrics", []))
    columns = {c for r in runs for c in r.records.columns}
    return [c for m in names for c in (m, f"own_{m}") if c in columns]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def megabytes(row: dict[str, float]) -> float:
    """What a row of a history has cost so far, up and down."""
    return (row["bytes_up"] + row["bytes_down"]) / 1e6
