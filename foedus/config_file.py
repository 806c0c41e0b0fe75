"""Experiments as TOML files: everything is checked, with file and key in the message, before any work starts.

    [data]
    name = "digits"                       # or path = "rows.csv"; further keys are the arguments of fd.load

    [split]
    scheme = "dirichlet"                  # further keys are the options of the scheme
    clients = 10
    alpha = 0.3

    [run]
    rounds = 30
    seeds = 3                             # for `foedus run`: seed = 0
    participation = 0.5                   # or { poisson = 0.5 }

    [algorithms.FedAvg]                   # for `foedus run`: [algorithm] with type = "FedAvg"
    lr = 0.1
    model = { type = "MLP", hidden = [64] }

    [algorithms."FedProx, strong"]
    type = "FedProx"                      # needed where the name is not that of the class
    mu = 1.0

    [tune]                                # for `foedus tune`, with [algorithm]: lists of values of its settings
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

    [engine]                              # settings of fd.Local; or type = "Ray", and those of fd.Ray
    [output]                              # run = FILE, runs = FOLDER, report = PAGE
    [track]                               # tensorboard = FOLDER, mlflow = { experiment = NAME, uri = ADDRESS }

"none" stands for Python's None. Paths are relative to the current folder.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foedus.core.aggregation import Aggregation
from foedus.core.algorithm import Algorithm
from foedus.core.callbacks import Callback
from foedus.core.clients import Poisson
from foedus.core.config import subclasses
from foedus.data import datasets, partition
from foedus.data.federation import Federation
from foedus.engines.local import Local
from foedus.engines.ray import Ray
from foedus.errors import ConfigError, DataError, FoedusError, SplitError, unknown
from foedus.trackers import MLflow, TensorBoard
from foedus.tuning import loguniform, setting_names

Number = int | float
_MOST_SEEDS = 1 << 20
_hints = functools.cache(typing.get_type_hints)  # of every field of every class, time and again

_RUN_KEYS: dict[str, Any] = {
    "rounds": int,
    "seed": int,
    "seeds": int | tuple[int, ...],
    "participation": Number | dict,
    "evaluate_every": int,
    "target": Number,
    "quantise": Literal["float16", "bfloat16", "int8"] | None,
    "checkpoint": str,
    "checkpoint_every": int,
    "resume": bool,
}
_OUTPUT_KEYS: dict[str, Any] = {"run": str, "runs": str, "report": str}
_SECTIONS = ("data", "split", "run", "aggregation", "engine", "algorithm", "algorithms", "tune", "output", "track")
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
    """What a file asks for. `options` are keyword arguments of `fd.run`; `output` says where results go.

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
            data = datasets.load(**self.data)
        except DataError as error:
            raise DataError(f"{self.path}: data: {error}") from error
        try:
            return partition.split(data, **self.split)
        except SplitError as error:
            key = re.match(r"(\w+)=", str(error))
            where = f"split.{key[1]}" if key and key[1] in self.split else "split"
            raise SplitError(f"{self.path}: {where}: {error}") from error


def read_config(path: str | os.PathLike, command: str = "compare") -> Experiment:
    """Read and check a file for `foedus run`, `compare`, `tune` or `diagnose`, to which data and split are enough."""
    return _Reader(Path(path), command).experiment()


def algorithm_section(algorithm: Algorithm, named: Iterable[str] = ()) -> str:
    """The section [algorithm] of a file that describes this algorithm.

    Settings at their defaults are left out, unless they are among `named` (with dots, those of its parts).
    """
    return "\n".join(["[algorithm]", *(f"{k} = {v}" for k, v in _entries(algorithm, list(named)).items())])


def _entries(value: Any, named: list[str]) -> dict[str, str]:
    found = {"type": _toml(type(value).__name__)}
    for f in dataclasses.fields(value):
        inside = [name.partition(".")[2] for name in named if name.partition(".")[0] == f.name]
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        own = getattr(value, f.name)
        if f.init and (inside or _is_required(f) or own != default):
            found[f.name] = _toml(own, inside)
    return found


def _toml(value: Any, named: Sequence[str] = ()) -> str:
    """A value as it stands in a file."""
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
        items = {_quoted(k): _toml(v) for k, v in value.items()} if isinstance(value, dict) else _entries(value, list(named))
        return "{ " + ", ".join(f"{k} = {v}" for k, v in items.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if value is None or isinstance(value, str):
        return json.dumps("none" if value is None else value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else repr(value)


class _Reader:
    """Walks a parsed file; every complaint names the file, the dotted key and what is allowed there."""

    def __init__(self, path: Path, command: str):
        self.path, self.command = path, command
        try:
            self.table = tomllib.loads(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not a text file in UTF-8: {error}") from None
        except (
            ValueError,
            RecursionError,
        ) as error:  # of TOML; numbers of thousands of digits and deep nesting have no error of its own
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None

    def fail(self, key: str, message: str) -> typing.NoReturn:
        raise ConfigError(f"{self.path}: {key}: {message}")

    def experiment(self) -> Experiment:
        for name in self.table:
            if name not in _SECTIONS:
                self.fail(name, unknown("section", name, _SECTIONS))
        algorithms = self.algorithms()
        data, split = self.data(), self.split()
        needed = self.command != "diagnose"
        options = self.settings("run", self.section("run", needed), _RUN_KEYS, required=["rounds"] if needed else [])
        rounds, target = options.pop("rounds", 0), options.pop("target", None)
        seeds = self.seeds(options)
        self.check_run(rounds, options)
        output = self.settings("output", self.section("output", needed=False), _OUTPUT_KEYS)
        for name in output:
            if name == {"run": "runs", "compare": "run"}.get(self.command):
                allowed = [k for k in _OUTPUT_KEYS if k != name]
                self.fail(f"output.{name}", f"foedus {self.command} does not write this (allowed: {', '.join(allowed)})")
        if "aggregation" in self.table:
            if self.command == "tune":
                self.fail("aggregation", "foedus tune does not take this section; leave it to the run with what was chosen")
            options["aggregation"] = self.aggregation()
        engine = self.section("engine", needed=False)
        if engine:
            options["engine"] = self.build({"type": "Local", **engine}, {"Local": Local, "Ray": Ray}, "engine")
        if self.command != "diagnose" and (callbacks := self.trackers()):
            options["callbacks"] = callbacks
        grid, tune_options = self.tune(algorithms[""]) if self.command == "tune" else ({}, {})
        return Experiment(self.path, data, split, rounds, seeds, target, options, algorithms, output, grid, tune_options)

    # -- sections ----------------------------------------------------------------------------------------------------

    def section(self, name: str, needed: bool = True) -> dict[str, Any]:
        if name not in self.table:
            if needed:
                present = ", ".join(f"[{s}]" for s in self.table) or "none"
                self.fail(name, f"the section [{name}] is missing (present: {present})")
            return {}
        if not isinstance(self.table[name], dict):
            self.fail(name, f"must be a section [{name}], not {_named(self.table[name])}")
        return self.table[name]

    def data(self) -> dict[str, Any]:
        section = self.section("data")
        hints = _hints(datasets.load)
        keys = {k: hints[k] for k in inspect.signature(datasets.load).parameters if k != "name_or_path"}
        values = self.settings("data", section, {"name": str, "path": str, **keys})
        if ("name" in values) == ("path" in values):
            self.fail("data", "give either name, a set that `foedus data list` shows, or path, a file or folder")
        for key, allowed in (("scale", datasets.SCALES), ("impute", datasets.IMPUTES)):
            if values.get(key) is not None and values[key] not in allowed:
                self.fail(f"data.{key}", unknown("value", values[key], [*allowed, "none"]))
        if "path" in values:
            path = Path(values.pop("path"))
            if not path.expanduser().exists():
                self.fail("data.path", f"there is no file or folder {str(path)!r} (seen from the current folder)")
            return {"name_or_path": path, **values}
        name = values.pop("name")
        if name not in datasets.known_names():
            self.fail("data.name", unknown("data set", name, datasets.known_names()))
        return {"name_or_path": name, **values}

    def split(self) -> dict[str, Any]:
        section = self.section("split")
        schemes: dict[str, Callable] = {**partition.SCHEMES, "tasks": partition._tasks, "natural": partition._natural}
        if "scheme" not in section:
            self.fail("split.scheme", f"is missing (allowed: {', '.join(schemes)})")
        scheme = self.value(section["scheme"], str, "split.scheme")
        if scheme not in schemes:
            self.fail("split.scheme", unknown("scheme", scheme, schemes))
        hints = _hints(schemes[scheme])
        options = {p.name: hints.get(p.name, Any) for p in partition.scheme_options(schemes[scheme])}
        needed = [p.name for p in partition.scheme_options(schemes[scheme]) if p.default is inspect.Parameter.empty]
        if scheme != "natural":
            needed.append("clients")
        return self.settings("split", section, {"scheme": str, "clients": int, "seed": int, **options}, required=needed)

    def aggregation(self) -> Aggregation:
        return self.build(self.section("aggregation"), _concrete(Aggregation), "aggregation")

    def seeds(self, options: dict[str, Any]) -> list[int]:
        one, several = options.pop("seed", None), options.pop("seeds", None)
        if several is None:
            return [0 if one is None else one]
        if one is not None:
            self.fail("run.seeds", "give either seed or seeds, not both")
        if self.command in ("run", "tune"):
            self.fail("run.seeds", f"foedus {self.command} takes one seed: seed = 0; foedus compare takes several")
        if isinstance(several, int) and several > _MOST_SEEDS:
            self.fail("run.seeds", f"{several!r} seeds are too many; at most {_MOST_SEEDS}")
        seeds = list(range(several)) if isinstance(several, int) else list(several)
        if not seeds or len(set(seeds)) < len(seeds):
            self.fail("run.seeds", f"{several!r} must be a number of seeds, at least 1, or a list of different seeds")
        return seeds

    def check_run(self, rounds: int, options: dict[str, Any]) -> None:
        for key, value, least in (
            ("rounds", rounds, 0),
            ("evaluate_every", options.get("evaluate_every", 1), 0),
            ("checkpoint_every", options.get("checkpoint_every", 1), 1),
        ):
            if value < least:
                self.fail(f"run.{key}", f"{value!r} must be at least {least}")
        part = options.get("participation", 1.0)
        if isinstance(part, dict):
            part = self.settings("run.participation", part, {"poisson": Number}, required=["poisson"])["poisson"]
            options["participation"] = self.attempt("run.participation.poisson", lambda: Poisson(float(part)))
        elif not 0 < part <= 1:
            self.fail("run.participation", f"{part!r} must be a fraction in (0, 1], or {{ poisson = p }}")
        if options.get("resume") and "checkpoint" not in options:
            self.fail("run.resume", "needs run.checkpoint, the file to go on from")

    def algorithms(self) -> dict[str, Algorithm]:
        known = {n: c for n, c in _concrete(Algorithm).items() if c.round is not Algorithm.round}
        one, several = "algorithm" in self.table, "algorithms" in self.table
        if self.command == "diagnose" and not one and not several:
            return {}
        if self.command in ("run", "tune") or (self.command == "diagnose" and one):
            if several and not one:
                self.fail(
                    "algorithm", "the section [algorithm] is missing; for the [algorithms] of this file use foedus compare"
                )
            return {"": self.build(self.section("algorithm"), known, "algorithm")}
        if one and not several:
            self.fail("algorithms", "sections [algorithms.NAME] are missing; for the [algorithm] of this file use foedus run")
        found = {}
        for name, entry in self.section("algorithms").items():
            key = f"algorithms.{_quoted(name)}"
            if not isinstance(entry, dict):
                self.fail(key, f"must be a section [algorithms.NAME], not {_named(entry)}")
            found[name] = self.build({"type": name, **entry}, known, key)
        if not found:
            self.fail(
                "algorithms", f"holds no algorithm: add sections such as [algorithms.FedAvg] (allowed: {', '.join(known)})"
            )
        return found

    def tune(self, algorithm: Algorithm) -> tuple[dict[str, Any], dict[str, Any]]:
        """The grid, by dotted names of settings, and the options of the search."""
        section = dict(self.section("tune"))
        options = self.settings("tune.options", self.options(section), _TUNE_KEYS)
        grid = {}
        for name, values in _leaves(section):
            at = f"tune.{name}"
            if name not in (known := setting_names(algorithm)):
                self.fail(at, unknown(f"{type(algorithm).__name__} setting", name, [*known, "options"]))
            if isinstance(values, dict):
                ends = self.value(values["loguniform"], tuple[float, ...], f"{at}.loguniform")
                if len(ends) != 2:
                    self.fail(f"{at}.loguniform", f"{values['loguniform']!r} must be two numbers: [low, high]")
                grid[name] = self.attempt(f"{at}.loguniform", lambda ends=ends: loguniform(*ends))
            elif isinstance(values, list):
                hint = _hint(algorithm, name)
                grid[name] = [self.value(v, hint, f"{at}[{i}]") for i, v in enumerate(values)]
            else:
                self.fail(
                    at, f"{values!r} is {_named(values)}, but must be a list of values, or {{ loguniform = [low, high] }}"
                )
        if not grid:
            self.fail("tune", "has nothing to try: add a list of values, such as lr = [0.01, 0.1]")
        return grid, options

    def options(self, section: dict[str, Any]) -> dict[str, Any]:
        options = section.pop("options", {})
        if not isinstance(options, dict):
            self.fail("tune.options", f"must be a section [tune.options], not {_named(options)}")
        return options

    def trackers(self) -> list[Callback]:
        section = self.settings("track", self.section("track", needed=False), {"tensorboard": str, "mlflow": dict})
        known = {"tensorboard": TensorBoard, "mlflow": MLflow}
        settings = {key: {"folder": value} if key == "tensorboard" else value for key, value in section.items()}
        return [self.build({"type": key, **value}, known, f"track.{key}") for key, value in settings.items()]

    # -- values ------------------------------------------------------------------------------------------------------

    def settings(self, at: str, section: dict[str, Any], hints: dict[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
        """The checked values of a section whose keys have these types."""
        for key in section:
            if key not in hints:
                self.fail(f"{at}.{_quoted(key)}", unknown("key", key, hints))
        for key in required:
            if key not in section:
                self.fail(f"{at}.{key}", f"is missing; it must be {_describe(hints[key])}")
        return {key: self.value(value, hints[key], f"{at}.{key}") for key, value in section.items()}

    def build(self, config: dict[str, Any], known: dict[str, type], at: str) -> Any:
        """An object of one of the known classes from {"type": name, field: value, ...}."""
        if "type" not in config:
            self.fail(f"{at}.type", f"is missing (allowed: {', '.join(known)})")
        name = config["type"]
        if not isinstance(name, str) or name not in known:
            self.fail(f"{at}.type", unknown("type", name, known))
        cls = known[name]
        hints = _hints(cls)
        fields = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
        required = [f.name for f in dataclasses.fields(cls) if f.init and _is_required(f)]
        values = self.settings(at, {k: v for k, v in config.items() if k != "type"}, fields, required)
        return self.attempt(at, lambda: cls(**values), fields)

    def attempt(self, at: str, make: Callable[[], Any], fields: Iterable[str] = ()) -> Any:
        """Build something that checks its own values; its complaint begins with the name of the field, as a rule."""
        try:
            return make()
        except (FoedusError, TypeError, ValueError) as error:
            field = re.match(r"(\w+)[ =]", str(error))
            self.fail(f"{at}.{field[1]}" if field and field[1] in fields else at, str(error))

    def value(self, value: Any, hint: Any, at: str) -> Any:
        """The value as the type hint wants it, or a complaint that says what is expected."""
        fits, result = self.fit(value, hint, at)
        if not fits:
            self.fail(at, f"{value!r} is {_named(value)}, but must be {_describe(hint)}")
        return result

    def fit(self, value: Any, hint: Any, at: str) -> tuple[bool, Any]:
        if hint is Any:
            return True, value
        if hint is None or hint is type(None):
            return value == "none", None
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            # None first: "none" would also fit text.
            for option in sorted(inside, key=lambda o: o is not type(None)):
                fits, result = self.fit(value, option, at)
                if fits:
                    return True, result
            return False, None
        if origin is Literal:
            if isinstance(value, str) and value not in inside:
                self.fail(at, unknown("value", value, inside))
            return value in inside, value
        if origin in (tuple, list) or hint in (tuple, list):
            if not isinstance(value, list):
                return False, None
            kind = inside[0] if inside else Any
            return True, tuple(self.value(v, kind, f"{at}[{i}]") for i, v in enumerate(value))
        if hint in (int, float):
            number = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
            if number and isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                self.fail(at, f"{str(value)[:20]}... is too large: a whole number has at most 64 bits")
            return number, hint(value) if number else None
        if hint in (bool, str, dict) or origin is dict:
            return isinstance(value, origin or hint), value
        known = _concrete(hint) if isinstance(hint, type) else {}
        if known and isinstance(value, str):
            value = {"type": value}
        if known and isinstance(value, dict):
            return True, self.build(value, known, at)
        return False, None


def _concrete(base: type) -> dict[str, type]:
    """The classes of a kind that can be built from text."""
    import torch

    for package in (
        "foedus.algorithms",
        "foedus.geometry",
        "foedus.models",
        "foedus.privacy",
    ):  # classes are known once they are loaded
        importlib.import_module(package)

    found = subclasses(base)
    if dataclasses.is_dataclass(base):
        found[base.__name__] = base
    return {
        name: cls
        for name, cls in sorted(found.items())
        if not name.startswith("_")
        and cls.__module__.startswith("foedus.")
        and not any(_hints(cls).get(f.name) is torch.nn.Module for f in dataclasses.fields(cls))
    }


def _leaves(section: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by dotted names; a table is one more level, unless it describes values."""
    for name, value in section.items():
        if isinstance(value, dict) and set(value) != {"loguniform"}:
            yield from _leaves(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def _hint(owner: Any, name: str) -> Any:
    """The type of a setting with dots in its name."""
    *parts, last = name.split(".")
    for part in parts:
        owner = getattr(owner, part)
    return _hints(type(owner))[last]


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _named(value: Any) -> str:
    """What kind of TOML value this is."""
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _describe(hint: Any) -> str:
    """What a type hint means in a TOML file."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if set(inside) == {int, float}:
            return "a number"
        parts = [_describe(o) for o in inside if o is not type(None) and o is not os.PathLike]
        return " or ".join(dict.fromkeys([*parts, *(['"none"'] if type(None) in inside else [])]))
    if origin is Literal:
        return "one of " + ", ".join(f'"{v}"' for v in inside)
    if origin in (tuple, list) or hint in (tuple, list):
        one = _describe(inside[0]) if inside else "values"
        return "a list of " + {"a whole number": "whole numbers", "a number": "numbers", "text": "texts"}.get(one, one)
    simple = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table"}
    if hint in simple:
        return simple[hint]
    if isinstance(hint, type) and (known := _concrete(hint)):
        return "a table { type = ... } with type one of " + ", ".join(known)
    return str(getattr(hint, "__name__", hint))
