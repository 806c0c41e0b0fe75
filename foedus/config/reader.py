"""Checked reading of TOML sections into settings and dataclasses: every error names the file, the
key and the remedy.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from foedus.base.toml import quoted, toml
from foedus.core.aggregation import Aggregation
from foedus.core.algorithm import Algorithm
from foedus.core.describe import subclasses
from foedus.core.participation import Poisson
from foedus.core.steer import Patience
from foedus.errors import ConfigError, FoedusError, unknown

Number = int | float
hints_of = functools.cache(typing.get_type_hints)  # of every field of every class, time and again


def entries(value: Any, named: list[str]) -> dict[str, str]:
    found = {"type": as_toml(type(value).__name__)}
    for f in dataclasses.fields(value):
        inside = [name.partition(".")[2] for name in named if name.partition(".")[0] == f.name]
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        own = getattr(value, f.name)
        if f.init and (inside or _is_required(f) or own != default):
            found[f.name] = as_toml(own, inside)
    return found


def as_toml(value: Any, named: Sequence[str] = ()) -> str:
    """A value as it stands in a file."""
    if dataclasses.is_dataclass(value):
        items = entries(value, list(named))
        return "{ " + ", ".join(f"{k} = {v}" for k, v in items.items()) + " }"
    if isinstance(value, dict):
        items = {quoted(k): as_toml(v) for k, v in value.items()}
        return "{ " + ", ".join(f"{k} = {v}" for k, v in items.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return toml(value)


class Reader:
    """Walks a parsed file; every error names the file, the dotted key and the allowed values."""

    def __init__(self, path: Path, command: str):
        self.path, self.command = path, command
        try:
            self.table = tomllib.loads(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not a text file in UTF-8: {error}") from None
        except (
            ValueError,
            RecursionError,
            # of TOML; numbers of thousands of digits and deep nesting have no error of its own
        ) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None

    def fail(self, key: str, message: str) -> typing.NoReturn:
        raise ConfigError(f"{self.path}: {key}: {message}")

    def section(self, name: str, needed: bool = True) -> dict[str, Any]:
        if name not in self.table:
            if needed:
                present = ", ".join(f"[{s}]" for s in self.table) or "none"
                self.fail(name, f"the section [{name}] is missing (present: {present})")
            return {}
        if not isinstance(self.table[name], dict):
            self.fail(name, f"must be a section [{name}], not {kind_of(self.table[name])}")
        return self.table[name]

    def aggregation(self) -> Aggregation:
        return self.build(self.section("aggregation"), concrete(Aggregation), "aggregation")

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
            part = self.settings(
                "run.participation", part, {"poisson": Number}, required=["poisson"]
            )["poisson"]
            options["participation"] = self.attempt(
                "run.participation.poisson", lambda: Poisson(float(part))
            )
        elif not 0 < part <= 1:
            self.fail(
                "run.participation", f"{part!r} must be a fraction in (0, 1], or {{ poisson = p }}"
            )
        if options.get("resume") and "checkpoint" not in options:
            self.fail("run.resume", "needs run.checkpoint, the file to go on from")

    def stop(self, options: dict[str, Any]) -> None:
        """Make the settings of run.stop, if they are there."""
        if "stop" in options:
            options["stop"] = self.build(
                {"type": "Patience", **options["stop"]}, {"Patience": Patience}, "run.stop"
            )

    def algorithms(self) -> dict[str, Algorithm]:
        known = {
            n: c
            for n, c in concrete(Algorithm).items()
            if c.round is not Algorithm.round and not c.takes_raw
        }
        one, several = "algorithm" in self.table, "algorithms" in self.table
        if self.command == "diagnose" and not one and not several:
            return {}
        if self.command in ("run", "tune") or (self.command == "diagnose" and one):
            if several and not one:
                self.fail(
                    "algorithm",
                    "the section [algorithm] is missing; for the [algorithms] of this file use "
                    "foedus compare",
                )
            return {"": self.build(self.section("algorithm"), known, "algorithm")}
        if one and not several:
            self.fail(
                "algorithms",
                "sections [algorithms.NAME] are missing; for the [algorithm] of this file use "
                "foedus run",
            )
        found = {}
        for name, entry in self.section("algorithms").items():
            key = f"algorithms.{quoted(name)}"
            if not isinstance(entry, dict):
                self.fail(key, f"must be a section [algorithms.NAME], not {kind_of(entry)}")
            found[name] = self.build({"type": name, **entry}, known, key)
        if not found:
            self.fail(
                "algorithms",
                "holds no algorithm: add sections such as [algorithms.FedAvg] (allowed: "
                f"{', '.join(known)})",
            )
        return found

    def settings(
        self, at: str, section: dict[str, Any], hints: dict[str, Any], required: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The checked values of a section whose keys have these types."""
        for key in section:
            if key not in hints:
                self.fail(f"{at}.{quoted(key)}", unknown("key", key, hints))
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
        hints = hints_of(cls)
        fields = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
        required = [f.name for f in dataclasses.fields(cls) if f.init and _is_required(f)]
        given = {k: v for k, v in config.items() if k != "type"}
        # One of several values: the class itself explains best which they are.
        choices = {k: v for k, v in given.items() if v != "none" and _is_choice(v, fields.get(k))}
        others = {k: v for k, v in given.items() if k not in choices}
        values = choices | self.settings(
            at, others, fields, [k for k in required if k not in choices]
        )
        return self.attempt(at, lambda: cls(**values), fields)

    def attempt(self, at: str, make: Callable[[], Any], fields: Iterable[str] = ()) -> Any:
        """Build an object that checks its own values; its error usually begins with the name of the
        field.
        """
        try:
            return make()
        except (FoedusError, TypeError, ValueError) as error:
            field = re.match(r"(\w+)[ =[]", str(error))
            self.fail(f"{at}.{field[1]}" if field and field[1] in fields else at, str(error))

    def value(self, value: Any, hint: Any, at: str) -> Any:
        """The value converted to the type hint, or an error that states what is expected."""
        fits, result = self.fit(value, hint, at)
        if not fits:
            self.fail(at, f"{value!r} is {kind_of(value)}, but must be {_describe(hint)}")
        return result

    def fit(self, value: Any, hint: Any, at: str) -> tuple[bool, Any]:
        if hint is Any:
            return True, value
        if hint is None or hint is type(None):
            return value == "none", None
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            # None first: "none" would also fit text.
            several = len(set(inside) - {type(None)}) > 1
            if isinstance(value, dict) and "type" in value:
                known = {name: c for option in inside for name, c in _classes(option).items()}
                if known:
                    return True, self.build(value, known, at)
            elif isinstance(value, dict):  # by name, where that is an option
                inside = tuple(o for o in inside if _by_name(o)) or inside
            for option in sorted(inside, key=lambda o: o is not type(None)):
                known = _classes(option) if isinstance(value, str) and float in inside else {}
                if known and value not in known:  # a number in quotes is not the name of a class
                    continue
                # another option may fit, or all are described
                if several and typing.get_origin(option) is Literal:
                    fits, result = _is_one_of(value, option), value
                else:
                    fits, result = self.fit(value, option, at)
                if fits:
                    return True, result
            return False, None
        if origin is Literal:
            if isinstance(value, str) and value not in inside:
                self.fail(at, unknown("value", value, inside))
            return _is_one_of(value, hint), value
        if origin in (tuple, list) or hint in (tuple, list):
            if not isinstance(value, list):
                return False, None
            kind = inside[0] if inside else Any
            return True, tuple(self.value(v, kind, f"{at}[{i}]") for i, v in enumerate(value))
        if hint in (int, float):
            number = isinstance(value, int if hint is int else int | float) and not isinstance(
                value, bool
            )
            if number and isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                self.fail(at, f"{str(value)[:20]}... is too large: an integer has at most 64 bits")
            return number, hint(value) if number else None
        if hint in (bool, str, dict) or origin is dict:
            return isinstance(value, origin or hint), value
        if _by_name(hint) and isinstance(value, dict):
            return True, {
                k: self.value(v, inside[1], f"{at}.{quoted(k)}") for k, v in value.items()
            }
        known = _classes(hint)
        if known and isinstance(value, str):
            value = {"type": value}
        if known and isinstance(value, dict):
            return True, self.build(value, known, at)
        return False, None


Base = TypeVar("Base")


def concrete(base: type[Base]) -> dict[str, type[Base]]:
    """The classes of a kind that can be built from text."""
    import torch

    for package in (
        "foedus.algorithms",
        "foedus.geometry",
        "foedus.models",
        "foedus.aggregation",
    ):  # classes are known once they are loaded
        importlib.import_module(package)

    public = sys.modules["foedus"].__all__
    found = subclasses(base)
    if dataclasses.is_dataclass(base):
        found[base.__name__] = base
    return {
        name: cls
        for name, cls in sorted(found.items())
        if not name.startswith("_")
        and cls.__module__.startswith("foedus.")
        # helpers of a family
        and (name in public or not cls.__module__.startswith("foedus.algorithms."))
        and not any(hints_of(cls).get(f.name) is torch.nn.Module for f in dataclasses.fields(cls))
    }


def _classes(hint: Any) -> dict[str, type]:
    """The classes that a table with this type hint can be built as."""
    plain = (bool, int, float, str, dict, list, tuple, type(None))
    return concrete(hint) if isinstance(hint, type) and hint not in plain else {}


def _by_name(hint: Any) -> bool:
    """Whether a type hint is that of objects by name."""
    inside = typing.get_args(hint)
    return typing.get_origin(hint) is Mapping and inside[0] is str and bool(_classes(inside[1]))


def leaves_of(section: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Entries by dotted names; a table is one more level, unless it describes values."""
    for name, value in section.items():
        if isinstance(value, dict) and set(value) != {"loguniform"}:
            yield from leaves_of(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def hint_of(owner: Any, name: str) -> Any:
    """The type of a setting with dots in its name."""
    *parts, last = name.split(".")
    for part in parts:
        owner = getattr(owner, part)
    kind: type = type(owner)
    return hints_of(kind)[last]


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_function(hint: Any) -> bool:
    """Whether a hint is that of functions, which no file can hold."""
    return typing.get_origin(hint) is Callable


def _is_one_of(value: Any, literal: Any) -> bool:
    return any(type(value) is type(v) and value == v for v in typing.get_args(literal))


def _is_choice(value: Any, hint: Any) -> bool:
    """Whether a hint lists allowed values of this type one by one."""
    literals = [o for o in (hint, *typing.get_args(hint)) if typing.get_origin(o) is Literal]
    return any(type(value) is type(v) for literal in literals for v in typing.get_args(literal))


def kind_of(value: Any) -> str:
    """What kind of TOML value this is."""
    kinds = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")


def _describe(hint: Any) -> str:
    """What a type hint means in a TOML file."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if set(inside) == {int, float}:
            return "a number"
        not_text = (type(None), os.PathLike)
        inside_text = [o for o in inside if o not in not_text and not _is_function(o)]
        parts = [_describe(o) for o in inside_text]
        return " or ".join(dict.fromkeys([*parts, *(['"none"'] if type(None) in inside else [])]))
    if origin is Literal:
        return "one of " + ", ".join(map(as_toml, inside))
    if origin in (tuple, list) or hint in (tuple, list):
        one = _describe(inside[0]) if inside else "values"
        return "a list of " + {
            "an integer": "integers",
            "a number": "numbers",
            "text": "texts",
        }.get(one, one)
    simple = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        dict: "a table",
    }
    if hint in simple:
        return simple[hint]
    if _by_name(hint):
        return "a table of them by name"
    known = _classes(hint)
    if known:
        return "a table { type = ... } with type one of " + ", ".join(known)
    return str(getattr(hint, "__name__", hint))
