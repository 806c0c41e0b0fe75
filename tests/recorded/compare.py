"""Comparing runs with what is recorded, and recording anew what changes.toml allows."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TOLERANCE = 1e-6
"""Absolute, and relative to the recorded number."""
INTEGERS = ("round", "messages_up", "clients")
BYTES = ("bytes_up", "bytes_down")


# -- files -----------------------------------------------------------------------------------------


def load(scenario: str) -> dict[str, Any]:
    """By algorithm, what is recorded of a scenario."""
    path = FOLDER / f"{scenario}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(scenario: str, recorded: dict[str, Any]) -> None:
    """One line for each column or tensor."""
    blocks = []
    for name, run in recorded.items():
        parts = []
        for part, entries in run.items():
            lines = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()]
            inside = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
            parts.append(f"  {json.dumps(part)}: {inside}")
        blocks.append(f" {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    (FOLDER / f"{scenario}.json").write_text("{\n" + ",\n".join(blocks) + "\n}\n")


@dataclass(frozen=True)
class Change:
    """A deliberate change: these columns of these runs may be recorded anew."""

    algorithm: str
    scenario: str
    columns: tuple[str, ...]
    reason: str

    def covers(self, scenario: str, algorithm: str, column: str) -> bool:
        return (
            fnmatchcase(scenario, self.scenario)
            and fnmatchcase(algorithm, self.algorithm)
            and any(fnmatchcase(column, glob) for glob in self.columns)
        )


def load_changes(path: Path = FOLDER / "changes.toml") -> list[Change]:
    changes = []
    for entry in tomllib.loads(path.read_text()).get("change", []):
        if sorted(entry) != ["algorithm", "columns", "reason", "scenario"]:
            raise ValueError(f"{path.name}: {entry} needs algorithm, scenario, columns and reason")
        if not isinstance(entry["columns"], list) or not entry["columns"]:
            raise ValueError(f"{path.name}: columns={entry['columns']!r} must be a list of names")
        if not entry["reason"].strip():
            raise ValueError(f"{path.name}: the change of {entry['algorithm']} has no reason")
        changes.append(Change(**entry | {"columns": tuple(entry["columns"])}))
    return changes


# -- comparison ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """kind: "differs"; "fewer", bytes saved; or "wording", an error message in other words."""

    scenario: str
    algorithm: str
    column: str
    round: int | None
    recorded: Any
    now: Any
    kind: str = "differs"

    def __str__(self) -> str:
        where = f"{self.scenario}/{self.algorithm}"
        at = "" if self.round is None else f", round {self.round}"
        return f"{where}{at}, {self.column}: recorded {self.recorded!r}, now {self.now!r}"


def close(recorded: Any, now: Any, size: float = 0.0) -> bool:
    """Numbers within the tolerance, relative to the recorded one or to `size`; anything else
    equal.
    """
    both = (recorded, now)
    if any(isinstance(v, bool | str) or v is None for v in both):
        return recorded == now
    if any(math.isinf(v) for v in both):
        return recorded == now
    return abs(recorded - now) <= TOLERANCE + TOLERANCE * max(abs(recorded), size)


def flat(run: dict[str, Any]) -> dict[str, Any]:
    """Columns by their name; entries of the state, outputs and the error as "state.w", ..."""
    found = dict(run.get("columns", {}))
    for part in ("state", "outputs", "error"):
        found |= {f"{part}.{k}": v for k, v in run.get(part, {}).items()}
    return found


def compare(scenario: str, name: str, recorded: dict, now: dict) -> list[Difference]:
    """For each column, its first difference."""
    old, new, found = flat(recorded), flat(now), []
    for column in dict.fromkeys([*old, *new]):
        at = (scenario, name, column)
        if column not in old or column not in new:
            found.append(Difference(*at, None, old.get(column), new.get(column)))
        elif column == "error.message":
            if old[column] != new[column]:
                found.append(Difference(*at, None, old[column], new[column], "wording"))
        else:
            slack = unclear(column, now.get("doubtful", {}))
            if (difference := _values(at, old[column], new[column], slack)) is not None:
                found.append(difference)
    return found


def unclear(column: str, doubtful: dict[str, list[float]]) -> list[float]:
    """By round, how far an accuracy may be off, for the share of rows that can count either way.

    That of the worst client, and the mean over all clients' own models, may be anything where some
    of the clients' rows are like that.
    """
    own, common = doubtful.get("own_doubtful", []), doubtful.get("doubtful", [])
    if column == "own_accuracy":
        return own
    if column == "accuracy" and common:
        return common
    return [float(v > 0) for v in own] if "accuracy" in column else []


def _values(
    at: tuple[str, str, str], old: Any, new: Any, slack: list[float] | None = None
) -> Difference | None:
    column = at[2]
    rounds = not column.startswith(("state.", "outputs.", "error."))
    if not isinstance(old, list) or not isinstance(new, list):
        return None if old == new else Difference(*at, None, old, new)
    if len(old) != len(new):
        return Difference(*at, None, old, new)
    fewer = None
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        where = i if rounds else None
        # The first entry of a digest is a sum, whose terms may cancel: it is held against the norm,
        # the second.
        size = abs(old[1]) if not rounds and i == 0 and len(old) > 1 else 0.0
        same = a == b if column in INTEGERS + BYTES else close(a, b, size)
        numbers = isinstance(a, float) and isinstance(b, float)
        if same or (slack and numbers and abs(a - b) <= slack[i] + TOLERANCE):
            continue
        if column not in BYTES or b > a:
            shown = (a, b) if rounds else (old, new)
            return Difference(*at, where, *shown)
        fewer = Difference(*at, where, a, b, "fewer")  # of the last round: bytes are cumulative
    return fewer


# -- recording -------------------------------------------------------------------------------------


def merge(
    scenario: str,
    name: str,
    recorded: dict | None,
    now: dict,
    changes: list[Change],
) -> tuple[dict, list[Difference]]:
    """What to record, and the differences that no change covers: of those the recorded value stays.

    Numbers within the tolerance stay as they are, so that small differences cannot add up.
    """
    doubtful = now.get("doubtful", {})
    now = {part: entries for part, entries in now.items() if part != "doubtful"}
    if recorded is None:
        return now, []
    with_doubts = {**now, "doubtful": doubtful}
    differences = {d.column: d for d in compare(scenario, name, recorded, with_doubts)}
    old, new = flat(recorded), flat(now)
    covered = {c for c in differences if any(x.covers(scenario, name, c) for x in changes)}
    refused = [d for c, d in differences.items() if c in old and c not in covered]
    if ("error" in recorded) != ("error" in now):  # a run has either numbers or an error
        return (recorded, refused) if refused else (now, [])
    keep = {d.column for d in refused}
    merged: dict[str, Any] = {}
    for part in dict.fromkeys([*recorded, *now]):
        merged[part] = {}
        for key in dict.fromkeys([*recorded.get(part, {}), *now.get(part, {})]):
            column = key if part == "columns" else f"{part}.{key}"
            source = old if column in keep or column not in differences else new
            if column in source:  # else it is gone, and a change says so
                merged[part][key] = source[column]
    return merged, refused
