"""Experiments as TOML files: everything is checked, with file and key in the message, before any
work starts.

    [data]
    name = "digits"                       # or path = "rows.csv"; further keys are the arguments of
                                          # fd.load

    [split]
    scheme = "dirichlet"                  # further keys are the options of the scheme
    clients = 10
    alpha = 0.3

    [run]
    rounds = 30
    seeds = 3                             # for `foedus run`: seed = 0
    participation = 0.5                   # or { poisson = 0.5 }
    metrics = ["auc", "f1"]               # more columns of the history
    stop = { rounds = 5, metric = "auc" } # the settings of fd.Patience

    [algorithms.FedAvg]                   # for `foedus run`: [algorithm] with type = "FedAvg"
    lr = 0.1
    model = { type = "MLP", hidden = [64] }

    [algorithms."FedProx, strong"]
    type = "FedProx"                      # needed where the name is not that of the class
    mu = 1.0

    [tune]                                # for `foedus tune`, with [algorithm]: lists of values of
                                          # its settings
    lr = [0.01, 0.1, 1.0]
    model.hidden = [[32], [64]]
    weight_decay = { loguniform = [1e-5, 1e-1] }

    [tune.options]                        # those of fd.tune
    trials = 8

    [aggregation]                         # how replies are averaged, if not by adding them up
    type = "SecureAggregation"            # further keys are its settings

    [aggregation.privacy]                 # for SecureAggregation: noise as well
    type = "DifferentialPrivacy"
    clip = 1.0
    noise = 1.0
    delta = 1e-5

    [engine]                              # settings of fd.Local; or type = "Ray", and those of
                                          # fd.Ray
    [output]                              # run = FILE, runs = FOLDER, report = PAGE
    [track]                               # tensorboard = FOLDER, mlflow = { experiment = NAME,
                                          # uri = ADDRESS }

"none" stands for Python's None. Paths are relative to the current folder.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foedus.config.reader import Number, Reader, entries, hint_of, hints_of, kind_of, leaves_of
from foedus.core.algorithm import Algorithm
from foedus.core.callbacks import Callback
from foedus.data import catalog, partition, preprocess
from foedus.data.federation import Federation
from foedus.data.loading import load
from foedus.engines.local import Local
from foedus.engines.ray.engine import Ray
from foedus.errors import DataError, SplitError, unknown
from foedus.trackers import MLflow, TensorBoard
from foedus.tuning.grid import loguniform, setting_names

_MOST_SEEDS = 1 << 20

_RUN_KEYS: dict[str, Any] = {
    "rounds": int,
    "seed": int,
    "seeds": int | tuple[int, ...],
    "participation": Number | dict,
    "evaluate_every": int,
    "target": Number,
    "metrics": tuple[str, ...],
    "per_client": bool,
    "stop": dict,
    "keep_best": str | Literal[False],
    "stop_on_growth": bool,
    "quantise": Literal["float16", "bfloat16", "int8"] | None,
    "checkpoint": str,
    "checkpoint_every": int,
    "resume": bool | Literal["auto"],
}
_MEASURES = ("metrics", "per_client", "stop", "keep_best", "stop_on_growth")
_OUTPUT_KEYS: dict[str, Any] = {"run": str, "runs": str, "report": str}
_SECTIONS = (
    "data",
    "split",
    "run",
    "aggregation",
    "engine",
    "algorithm",
    "algorithms",
    "tune",
    "output",
    "track",
)
_TUNE_KEYS: dict[str, Any] = {
    "trials": int,
    "seed": int,
    "seeds": int | tuple[int, ...],
    "validation": Number,
    "halving": int | None,
    "metric": str,
    "workers": int,
}


@dataclass(frozen=True)
class Experiment:
    """What a file asks for. `options` are keyword arguments of `fd.run`; `output` says where
    results go.

    For `foedus tune`, `grid` and `tune_options` are arguments of `fd.tune`.
    """

    path: Path
    data: dict[str, Any]
    split: dict[str, Any]
    rounds: int
    seeds: list[int]
    target: float | None
    options: dict[str, Any]
    algorithms: dict[str, Algorithm]
    output: dict[str, str]
    grid: dict[str, Any] = field(default_factory=dict)
    tune_options: dict[str, Any] = field(default_factory=dict)

    def federation(self) -> Federation:
        """Load the data and divide it; errors name the file, and the key where one is to blame."""
        try:
            data = load(**self.data)
        except DataError as error:
            raise DataError(f"{self.path}: data: {error}") from error
        try:
            return partition.split(data, **self.split)
        except SplitError as error:
            key = re.match(r"(\w+)=", str(error))
            where = f"split.{key[1]}" if key and key[1] in self.split else "split"
            raise SplitError(f"{self.path}: {where}: {error}") from error


def read_config(path: str | os.PathLike, command: str = "compare") -> Experiment:
    """Read and check a file for `foedus run`, `compare`, `tune` or `diagnose`, to which data and
    split are enough.
    """
    return ExperimentReader(Path(path), command).experiment()


def algorithm_section(algorithm: Algorithm, named: Iterable[str] = ()) -> str:
    """The section [algorithm] of a file that describes this algorithm.

    Settings at their defaults are left out, unless they are among `named` (with dots, those of its
    parts).
    """
    return "\n".join(
        ["[algorithm]", *(f"{k} = {v}" for k, v in entries(algorithm, list(named)).items())]
    )


class ExperimentReader(Reader):
    """The sections of an experiment."""

    def experiment(self) -> Experiment:
        for name in self.table:
            if name not in _SECTIONS:
                self.fail(name, unknown("section", name, _SECTIONS))
        algorithms = self.algorithms()
        data, split = self.data(), self.split()
        needed = self.command != "diagnose"
        options = self.settings(
            "run", self.section("run", needed), _RUN_KEYS, required=["rounds"] if needed else []
        )
        rounds, target = options.pop("rounds", 0), options.pop("target", None)
        seeds = self.seeds(options)
        self.check_run(rounds, options)
        self.stop(options)
        if self.command in ("tune", "diagnose"):
            for key in _MEASURES:
                if key in options:
                    self.fail(
                        f"run.{key}", f"foedus {self.command} does not take this; leave it out"
                    )
        output = self.settings("output", self.section("output", needed=False), _OUTPUT_KEYS)
        for name in output:
            if name == {"run": "runs", "compare": "run"}.get(self.command):
                allowed = [k for k in _OUTPUT_KEYS if k != name]
                self.fail(
                    f"output.{name}",
                    f"foedus {self.command} does not write this (allowed: {', '.join(allowed)})",
                )
        if "aggregation" in self.table:
            if self.command == "tune":
                self.fail(
                    "aggregation",
                    "foedus tune does not take this section; leave it to the run with what was "
                    "chosen",
                )
            options["aggregation"] = self.aggregation()
        engine = self.section("engine", needed=False)
        if engine:
            options["engine"] = self.build(
                {"type": "Local", **engine}, {"Local": Local, "Ray": Ray}, "engine"
            )
        if self.command != "diagnose" and (callbacks := self.trackers()):
            options["callbacks"] = callbacks
        grid, tune_options = self.tune(algorithms[""]) if self.command == "tune" else ({}, {})
        return Experiment(
            self.path,
            data,
            split,
            rounds,
            seeds,
            target,
            options,
            algorithms,
            output,
            grid,
            tune_options,
        )

    def data(self) -> dict[str, Any]:
        section = self.section("data")
        hints = hints_of(load)
        known = inspect.signature(load).parameters
        keys = {k: hints[k] for k in known if k not in ("source", "name")}
        keys["test"] = float | str  # no DataFrame
        values = self.settings("data", section, {"name": str, "path": str, **keys})
        if ("name" in values) == ("path" in values):
            self.fail(
                "data",
                "give either name, a set that `foedus data list` shows, or path, a file or folder",
            )
        for key, allowed in (("scale", preprocess.SCALES), ("impute", preprocess.IMPUTES)):
            if values.get(key) is not None and values[key] not in allowed:
                self.fail(f"data.{key}", unknown("value", values[key], [*allowed, "none"]))
        if "path" in values:
            path = Path(values.pop("path"))
            if not path.expanduser().exists():
                self.fail(
                    "data.path",
                    f"there is no file or folder {str(path)!r} (seen from the current folder)",
                )
            return {"source": path, **values}
        name = values.pop("name")
        if name not in catalog.known_names():
            self.fail("data.name", unknown("data set", name, catalog.known_names()))
        return {"source": name, **values}

    def split(self) -> dict[str, Any]:
        section = self.section("split")
        schemes = partition.SCHEMES
        if "scheme" not in section:
            self.fail("split.scheme", f"is missing (allowed: {', '.join(schemes)})")
        scheme = self.value(section["scheme"], str, "split.scheme")
        if scheme not in schemes:
            self.fail("split.scheme", unknown("scheme", scheme, schemes))
        hints = hints_of(schemes[scheme])
        options = {
            p.name: hints.get(p.name, Any) for p in partition.scheme_options(schemes[scheme])
        }
        needed = [
            p.name
            for p in partition.scheme_options(schemes[scheme])
            if p.default is inspect.Parameter.empty
        ]
        if scheme != "natural":
            needed.append("clients")
        return self.settings(
            "split",
            section,
            {"scheme": str, "clients": int, "seed": int, "test": float, **options},
            required=needed,
        )

    def seeds(self, options: dict[str, Any]) -> list[int]:
        one, several = options.pop("seed", None), options.pop("seeds", None)
        if several is None:
            return [0 if one is None else one]
        if one is not None:
            self.fail("run.seeds", "give either seed or seeds, not both")
        if self.command in ("run", "tune"):
            self.fail(
                "run.seeds",
                f"foedus {self.command} takes one seed: seed = 0; foedus compare takes several",
            )
        if isinstance(several, int) and several > _MOST_SEEDS:
            self.fail("run.seeds", f"{several!r} seeds are too many; at most {_MOST_SEEDS}")
        seeds = list(range(several)) if isinstance(several, int) else list(several)
        if not seeds or len(set(seeds)) < len(seeds):
            self.fail(
                "run.seeds",
                f"{several!r} must be a number of seeds, at least 1, or a list of different seeds",
            )
        return seeds

    def tune(self, algorithm: Algorithm) -> tuple[dict[str, Any], dict[str, Any]]:
        """The grid, by dotted names of settings, and the options of the search."""
        section = dict(self.section("tune"))
        options = self.settings("tune.options", self.options(section), _TUNE_KEYS)
        grid = {}
        for name, values in leaves_of(section):
            at = f"tune.{name}"
            if name not in (known := setting_names(algorithm)):
                self.fail(
                    at, unknown(f"{type(algorithm).__name__} setting", name, [*known, "options"])
                )
            if isinstance(values, dict):
                ends = self.value(values["loguniform"], tuple[float, ...], f"{at}.loguniform")
                if len(ends) != 2:
                    self.fail(
                        f"{at}.loguniform",
                        f"{values['loguniform']!r} must be two numbers: [low, high]",
                    )
                grid[name] = self.attempt(f"{at}.loguniform", functools.partial(loguniform, *ends))
            elif isinstance(values, list):
                hint = hint_of(algorithm, name)
                grid[name] = [self.value(v, hint, f"{at}[{i}]") for i, v in enumerate(values)]
            else:
                self.fail(
                    at,
                    f"{values!r} is {kind_of(values)}, but must be a list of values, "
                    f"or {{ loguniform = [low, high] }}",
                )
        if not grid:
            self.fail("tune", "has nothing to try: add a list of values, such as lr = [0.01, 0.1]")
        return grid, options

    def options(self, section: dict[str, Any]) -> dict[str, Any]:
        options = section.pop("options", {})
        if not isinstance(options, dict):
            self.fail("tune.options", f"must be a section [tune.options], not {kind_of(options)}")
        return options

    def trackers(self) -> list[Callback]:
        section = self.settings(
            "track", self.section("track", needed=False), {"tensorboard": str, "mlflow": dict}
        )
        known = {"tensorboard": TensorBoard, "mlflow": MLflow}
        settings = {
            key: {"folder": value} if key == "tensorboard" else value
            for key, value in section.items()
        }
        return [
            self.build({"type": key, **value}, known, f"track.{key}")
            for key, value in settings.items()
        ]
