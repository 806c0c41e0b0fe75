"""The page of a search: the score by each setting, every combination, how to search again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foedus.base.toml import quoted, section
from foedus.config.reader import as_toml, entries
from foedus.core.algorithm import Algorithm
from foedus.core.describe import flatten, to_config
from foedus.core.metrics import higher_is_better
from foedus.errors import ConfigError, is_number
from foedus.report import charts, html
from foedus.report import reproduction as files
from foedus.report.charts import Bar, Bars, Cells, Chart, Line, Lines
from foedus.report.compare import words
from foedus.report.text import count
from foedus.tuning.grid import loguniform, shorten

if TYPE_CHECKING:
    import pandas as pd

    from foedus.data.federation import Federation
    from foedus.tuning.tune import Tuning

_BARS = 30


def render(tuning: Tuning, title: str | None = None) -> str:
    """The page as text."""
    headings, rows, notes = tuning.cells(len(tuning.table))
    extra = tuning.table[["seconds", "failed"]].itertuples(index=False)
    rows = [
        [*row, charts.written(s, "cost"), why] for row, (s, why) in zip(rows, extra, strict=True)
    ]
    if not any(row[-1] for row in rows):
        rows, end = [row[:-1] for row in rows], ["seconds"]
    else:
        end = ["seconds", "failed"]
    kind = type(tuning.best).__name__
    chosen = "\n".join(
        ["[algorithm]", *(f"{k} = {v}" for k, v in entries(tuning.best, [*tuning.values]).items())]
    )
    return html.render(
        "tuning.html.j2",
        title=title or f"Settings of {kind}",
        subtitle=tuning.title,
        notes=notes[1:],
        chosen=chosen,
        charts=[charts.figure(chart) for chart in _charts(tuning)],
        headings=[*headings, *end],
        rows=rows,
        again=tuning.again,
        versions=html.versions(),
    )


def _charts(tuning: Tuning) -> Iterator[Chart]:
    frame, score = tuning.table[tuning.table["failed"] == ""], f"validation {words(tuning.metric)}"
    varied = [n for n in tuning.values if len(set(map(str, tuning.table[n]))) > 1]
    most = int(frame["rounds"].max())
    part = " Grey: dropped after fewer rounds." if (frame["rounds"] < most).any() else ""
    bars = [
        Bar(", ".join(shorten(row[n]) for n in varied) or "the only one", row["score"],
            f"after {count(row['rounds'], 'round')}", row["rounds"] < most)
        for row in frame[:_BARS].to_dict("records")
    ]  # fmt: skip
    which = f"The best {_BARS} of {len(frame)} combinations." if len(frame) > _BARS else ""
    title = f"{score[:1].upper()}{score[1:]}"
    caption = f"A bar for each {', '.join(varied)}, from best to worst.{part} {which}".strip()
    yield Bars(title, caption, score, bars)
    if len(varied) == 2 and all(frame[n].map(str).nunique() <= 40 for n in varied):
        yield _pairs(frame, varied[0], varied[1], score)
    for name in varied:
        yield _by_setting(tuning, frame, name, score)


def _pairs(frame: pd.DataFrame, one: str, other: str, score: str) -> Cells:
    """The score of every pair of values."""
    rows, columns = (_sorted(frame[n]) for n in (one, other))
    found = {(str(r[one]), str(r[other])): r["score"] for r in frame.to_dict("records")}
    values = [[found.get((str(a), str(b)), math.nan) for b in columns] for a in rows]
    finite = [v for row in values for v in row if math.isfinite(v)]
    names = [shorten(v) for v in rows], [shorten(v) for v in columns]
    caption = "Grey: not tried, or failed. Dropped combinations have the score of fewer rounds."
    limits = (min(finite), max(finite))
    return Cells(f"{one} and {other}", caption, score, *names, values, (one, other), limits)


def _by_setting(tuning: Tuning, frame: pd.DataFrame, name: str, score: str) -> Chart:
    """The best score at each value of a setting: lines for numbers, bars for others."""
    best = max if higher_is_better(tuning.metric) else min
    values = _sorted(frame[name])
    caption = "The best score at each value, over all values of other settings."
    if not all(map(is_number, values)):
        scores = [best(frame["score"][frame[name].map(str) == str(v)]) for v in values]
        bars = [Bar(shorten(v), s) for v, s in zip(values, scores, strict=True)]
        return Bars(f"Score by {name}", caption, score, bars)
    lines = []
    for rounds in sorted(set(frame["rounds"]), reverse=True):
        part = frame[frame["rounds"] == rounds]
        scores = part.groupby(name)["score"].agg(best)
        x, y = {"value": [*map(float, scores.index)]}, {"score": scores.tolist()}
        lines.append(Line(f"after {count(int(rounds), 'round')}", x, y))
    labels = {"value": name, "score": score}
    log = ["value"] if charts.wide([float(v) for v in values if v > 0]) else []
    log = log if all(v > 0 for v in values) else []
    return Lines(f"Score by {name}", caption, lines, labels, log=log, levels=False)


def _sorted(column: pd.Series) -> list[Any]:
    """The different values, numbers in rising order."""
    values = [*{str(v): v for v in column}.values()]
    return sorted(values) if all(map(is_number, values)) else values


def reproduction(
    algorithm: Any,
    fed: Federation,
    grid: Mapping[str, Any],
    run_options: Mapping[str, Any],
    search_options: Mapping[str, Any],
    engine: Any,
) -> files.Reproduction:
    """How a search is made again by `foedus tune`."""
    try:
        if not isinstance(algorithm, Algorithm):
            raise ConfigError("the algorithm is made by a function, which no file can hold")
        part = files.participation(run_options["participation"])
        defaults = {"participation": 1.0, "quantise": None, "trials": None, "seed": 0,
                    "seeds": [0], "validation": 0.2, "halving": 3}  # fmt: skip
        run_section = {**run_options, "participation": part}
        parts = [
            section("run", _chosen(run_section, defaults)),
            *files.engine_section(engine),
            files.algorithm_section("algorithm", algorithm),
            "\n".join(["[tune]", *(f"{_dotted(k)} = {_values(v)}" for k, v in grid.items())]),
        ]
        if options := _chosen(search_options, defaults):
            parts.append(section("tune.options", options))
        text = files.joined(getattr(fed, "origin", None), parts)
    except ConfigError as error:
        return files.Reproduction(missing=str(error))
    return files.Reproduction(f"foedus tune {files.FILE} --out page.html", text)


def _chosen(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in defaults or v != defaults[k]}


def _dotted(name: str) -> str:
    return ".".join(map(quoted, name.split(".")))


def _values(values: Any) -> str:
    """The values of a setting as they stand in a file."""
    if isinstance(values, loguniform):
        return f"{{ loguniform = [{values.low!r}, {values.high!r}] }}"
    if any("opaque" in key.split(".") for v in values for key in flatten(to_config({"v": v}))):
        raise ConfigError("the grid has values that no file can hold")
    return as_toml(values)
