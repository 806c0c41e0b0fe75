"""The list of mutants: one TOML file a package in `catalog/`, one table a mutant under the path of
the file that it changes.

    [["foedus/algorithms/feddyn.py"]]
    id = "feddyn-h-times-alpha"
    old = '''h / self.alpha'''                      occurs exactly once in the file
    new = '''h * self.alpha'''
    tests = ["tests/algorithms/test_averaging.py::test_feddyn"]

tests: pytest node ids; or a single entry "FILE -k EXPRESSION". equivalent: why no test can tell the
mutant from the original (it is then not run). A file that is moved takes its mutants along by a
change of the headers.
"""

from __future__ import annotations

import ast
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CATALOG = Path(__file__).parent / "catalog"
KEYS = {"id", "old", "new", "tests", "equivalent"}


@dataclass(frozen=True)
class Mutant:
    """One fault, and the tests that should notice it."""

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str | None = None

    @property
    def package(self) -> str:
        """`core`, `algorithms`, ...; `foedus` for the modules at the top."""
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else parts[0]

    @property
    def module(self) -> str:
        """The name by which the file is imported."""
        parts = Path(self.file).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The tests, as arguments of pytest."""
        return tuple(word for test in self.tests for word in arguments(test))

    def source(self) -> str:
        """The text of the mutated file.

        Raises ValueError where `old` does not occur exactly once.
        """
        return self._original().replace(self.old, self.new)

    def _original(self) -> str:
        path = ROOT / self.file
        if not path.is_file():
            raise ValueError(f"there is no file {self.file}")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"`old` occurs {count} times in {self.file}, expected exactly once")
        return text

    def problems(self) -> list[str]:
        """What is wrong with the entry, if anything."""
        found = []
        if self.equivalent is None and not self.tests:
            found.append("no tests are named")
        try:
            statement = _statement(self._original(), self.old)
            changed = ast.dump(ast.parse(statement.replace(self.old, self.new)))
            if changed == ast.dump(ast.parse(statement)):
                found.append("`new` is the same program as `old`")
        except (ValueError, SyntaxError) as error:
            found.append(str(error) or repr(error))
        if len(self.tests) > 1 and any(" -k " in test for test in self.tests):
            found.append("a test with -k must be the only one")
        found += [problem for test in self.tests if (problem := missing(test))]
        return [f"{self.id}: {problem}" for problem in found]


def arguments(test: str) -> list[str]:
    """An entry of `tests`, as arguments of pytest."""
    file, k, expression = test.partition(" -k ")
    return [file, "-k", " ".join(shlex.split(expression))] if k else [test]


def missing(test: str) -> str | None:
    """Why a test cannot be run, if its file or its function does not exist."""
    file, _, node = test.partition(" -k ")[0].partition("::")
    if not (ROOT / file).is_file():
        return f"there is no file {file}"
    if node and node.partition("[")[0] not in _functions(ROOT / file):
        return f"{file} has no test {node}"
    return None


def _statement(text: str, place: str) -> str:
    """The method or the top-level statements that hold a place in a file, on the same lines.

    To parse and compare the whole file for each of its mutants takes ten times as long.
    """
    first = text.count("\n", 0, text.index(place)) + 1
    last = first + place.count("\n")
    lines, (statements, methods) = text.split("\n"), _spans(text)
    for start, end in methods:
        if start <= first and last <= end:
            return "\n" * (start - 2) + "\n".join(("class _:", *lines[start - 1 : end]))
    start = max((start for start, _ in statements if start <= first), default=1)
    end = min((end for _, end in statements if last <= end), default=len(lines))
    return "\n" * (start - 1) + "\n".join(lines[start - 1 : end])


@cache
def _spans(text: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The first and last lines of a file's top-level statements, and of its classes' methods."""
    body = ast.parse(text).body
    members = [m for c in body if isinstance(c, ast.ClassDef) for m in c.body]
    return [_span(s) for s in body], [_span(m) for m in members if isinstance(m, ast.FunctionDef)]


def _span(item: ast.stmt) -> tuple[int, int]:
    first = min(part.lineno for part in (item, *getattr(item, "decorator_list", ())))
    return first, item.end_lineno or first


@cache
def _functions(path: Path) -> frozenset[str]:
    """The tests of a file, as `function` or `Class::method`."""
    names = set()
    for item in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(item, ast.FunctionDef):
            names.add(item.name)
        elif isinstance(item, ast.ClassDef):
            names |= {f"{item.name}::{f.name}" for f in item.body if isinstance(f, ast.FunctionDef)}
    return frozenset(names)


def load(patterns: Sequence[str] = ()) -> list[Mutant]:
    """All mutants, or those whose id, file or package matches one of the patterns.

    Raises ValueError on bad entries.
    """
    mutants = []
    for path in sorted(CATALOG.glob("*.toml")):
        for file, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
            for entry in entries:
                if strange := set(entry) - KEYS:
                    raise ValueError(
                        f"{path.name}: {entry.get('id')} has unknown keys {sorted(strange)}"
                    )
                mutants.append(
                    Mutant(file=file, **{**entry, "tests": tuple(entry.get("tests", []))})
                )
    ids = [mutant.id for mutant in mutants]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"ids occur twice: {', '.join(twice)}")
    for pattern in patterns:
        if not any(_matches(mutant, pattern) for mutant in mutants):
            raise ValueError(f"no mutant matches {pattern!r}")
    return [m for m in mutants if not patterns or any(_matches(m, pattern) for pattern in patterns)]


def _matches(mutant: Mutant, pattern: str) -> bool:
    return any(fnmatch(name, pattern) for name in (mutant.id, mutant.file, mutant.package))


def check(mutants: Sequence[Mutant]) -> list[str]:
    """Every problem of every entry."""
    return [problem for mutant in mutants for problem in mutant.problems()]
