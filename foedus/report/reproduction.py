"""The command and the file that make the runs of a page again."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foedus.base.toml import quoted, section
from foedus.config.reader import entries
from foedus.core.aggregation import Aggregation
from foedus.core.algorithm import Algorithm
from foedus.core.describe import from_config, subclasses, to_config
from foedus.core.facts import origin_of
from foedus.core.metrics import CLASSIFICATION, REGRESSION
from foedus.core.participation import Poisson
from foedus.core.result import Run, known_algorithm
from foedus.errors import ConfigError

if TYPE_CHECKING:
    from foedus.report.compare import Comparison

FILE = "experiment.toml"
"""What the file is called in the command."""

NO_DATA = (
    "a file can name neither these rows nor their division: use fd.load with a name or a path, "
    "and fd.split with the name of a scheme"
)


@dataclass(frozen=True)
class Reproduction:
    """How the numbers of a page are made again.

    Args:
        command: The command to type.
        file: The text of the file that it reads, if it reads one.
        missing: Why there is no command.
    """

    command: str = ""
    file: str = ""
    missing: str = ""


UNKNOWN = Reproduction(missing="how it was made was not recorded")


def of_comparison(comparison: Comparison) -> Reproduction:
    """How the runs of a comparison are made again: by `foedus run` if it is one."""
    try:
        return _of_comparison(comparison)
    except ConfigError as error:
        return Reproduction(missing=str(error))


def _of_comparison(comparison: Comparison) -> Reproduction:
    names = sorted(comparison.runs, key=comparison.is_pooled)
    first = comparison.runs[names[0]][0]
    options = _run_section(comparison, first)
    seeds = [run.settings.get("seed", 0) for run in comparison.runs[names[0]]]
    for name, runs in comparison.runs.items():
        if [run.settings.get("seed", 0) for run in runs] != seeds:
            raise ConfigError(f"the seeds of {names[0]} and {name} differ")
    single = len(names) == 1 and len(seeds) == 1
    options |= {"seed": seeds[0]} if single else {"seeds": seeds}
    parts = [section("run", options), *aggregation_section(first), *engine_section(first.engine)]
    for name, runs in comparison.runs.items():
        title = "algorithm" if single else f"algorithms.{quoted(name)}"
        parts.append(algorithm_section(title, runs[0].settings["algorithm"]))
    command = "run" if single else "compare"
    parts.append(section("output", {"report": "page.html"}))
    return Reproduction(f"foedus {command} {FILE}", joined(origin_of(first), parts))


def joined(origin: str | None, parts: Sequence[str]) -> str:
    """The text of a file.

    Raises:
        ConfigError: No file can name the rows of the federation.
    """
    if origin is None:
        raise ConfigError(NO_DATA)
    text = "\n\n".join([origin, *parts]) + "\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"a setting cannot be written to a file: {error}") from error
    return text


def algorithm_section(title: str, algorithm: Any) -> str:
    """An algorithm, as it was given or as it was recorded; settings at their defaults are left out.

    Raises:
        ConfigError: It has a setting that no file can hold.
    """
    config = to_config(algorithm) if isinstance(algorithm, Algorithm) else algorithm
    return dataclass_section(title, known_algorithm(config))


def dataclass_section(title: str, value: Any) -> str:
    """The settings of an object; those at their defaults are left out."""
    return "\n".join([f"[{title}]", *(f"{k} = {v}" for k, v in entries(value, []).items())])


def _run_section(comparison: Comparison, first: Run) -> dict[str, Any]:
    """The options of `fd.run` that all runs share; those on pooled rows have no participation."""
    shared = [
        {k: v for k, v in run.settings.items() if k not in ("algorithm", "federation", "seed")}
        for name, runs in comparison.runs.items()
        if not comparison.is_pooled(name) or runs[0] is first
        for run in runs
    ]
    for other in shared:
        if differing := [k for k in {**shared[0], **other} if shared[0].get(k) != other.get(k)]:
            raise ConfigError(f"the runs differ in {', '.join(differing)}")
    options = run_options(shared[0])
    finished = [run for name in comparison.runs for run in comparison.finished(name)]
    rounds = {len(run.records) - 1 for run in finished}
    if len(rounds) != 1:
        raise ConfigError("the runs have different numbers of rounds")
    options = {"rounds": rounds.pop(), **options}
    return options if comparison.default_target else {**options, "target": comparison.target}


def run_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was recorded of a run, as in the section [run]; defaults are left out."""
    if settings.get("start") is not None:
        raise ConfigError("the run starts from the model of another (start=)")
    part = participation(settings.get("participation", 1.0))
    options = {} if part == 1 else {"participation": part}
    defaults: dict[str, Any] = {
        "evaluate_every": 1,
        "quantise": None,
        "metrics": [],
        "per_client": False,
    }
    chosen = {k: settings.get(k, v) for k, v in defaults.items()}
    own = set(chosen["metrics"]) - {*CLASSIFICATION, *REGRESSION}
    if own:
        raise ConfigError(f"{', '.join(sorted(own))} is a function, which no file can hold")
    return options | {k: v for k, v in chosen.items() if v != defaults[k]}


def participation(value: Any) -> Any:
    """A fraction, or that of Poisson sampling, as it stands in a file."""
    if isinstance(value, Poisson):
        return {"poisson": value.probability}
    return {"poisson": value["probability"]} if isinstance(value, Mapping) else value


def aggregation_section(run: Run) -> list[str]:
    """The section [aggregation], if replies are not just added up."""
    config = run.settings.get("aggregation")
    if config is None:
        return []
    made = from_config(config, subclasses(Aggregation), "aggregation")
    return [dataclass_section("aggregation", made)]


def engine_section(engine: Any) -> list[str]:
    """The section [engine], if it is not the default."""
    if engine is None:
        return []
    if type(engine).__name__ not in ("Local", "Ray"):
        raise ConfigError(f"no file can name the engine {type(engine).__name__}")
    default = list(entries(engine, [])) == ["type"] and type(engine).__name__ == "Local"
    return [] if default else [dataclass_section("engine", engine)]
