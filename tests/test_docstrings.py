"""The docstrings of the public names begin with one sentence, describe every setting and argument,
and have an example.
"""

from __future__ import annotations

import dataclasses
from textwrap import indent

import pytest

import foedus as fd
from foedus.base.settings import Settings
from tests.public import (
    PUBLIC,
    described,
    descriptions,
    is_problem,
    parameters,
    section,
)


def problems(name: str) -> list[str]:
    """What the docstring of a public name lacks."""
    value = PUBLIC[name]
    doc = value.__doc__ or ""
    first, *others = doc.strip().split("\n\n")[0].splitlines() or [""]
    missing = sorted(set(parameters(value)) - set(descriptions(value)))
    has_example = ">>>" in section(doc, "Example", "Examples")
    found = []
    if others or not first.endswith((".", ":")):
        found.append("it must begin with one sentence on one line")
    if missing:
        found.append(f"its Args do not describe {', '.join(missing)}")
    if not has_example and not is_problem(value):
        found.append("it has no Example")
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_lacks_nothing(name):
    assert not problems(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_description_is_of_an_argument(name):
    """Of an argument, and only once."""
    value = PUBLIC[name]
    names = described("Args:\n" + indent(section(value.__doc__ or "", "Args"), " " * 4))
    assert set(names) <= set(parameters(value))
    assert len(names) == len(set(names))


def test_what_is_described_is_found():
    """Of a class and its bases; an example has no arguments."""

    @dataclasses.dataclass(frozen=True)
    class Base(Settings):
        """A base.

        Args:
            lr: Step size: 0.1
                or so.
            other: No setting.

        Example:
            >>> x: int = 1
        """

        lr: float = 0.1
        name: str = ""
        _hidden: int = 0

    class Derived(Base):
        """Another.

        Args:
            name: What it is called.
        """

    def f(x, *rest, key=None, **options):
        """A function.

        Args:
            x: A number.
            *rest: Numbers.
            key (str): A key.

        Returns:
            options: They are not described here.
        """

    assert descriptions(Base) == ["lr", "other"] and parameters(Base) == ["lr", "name"]
    assert descriptions(Derived) == ["name", "lr", "other"]
    assert descriptions(f) == ["x", "rest", "key"]
    assert parameters(f) == ["x", "rest", "key", "options"]
    assert parameters(fd.run)[:3] == ["algorithm", "fed", "rounds"]


def test_a_docstring_that_lacks_something_is_noticed(monkeypatch):
    def f(x, y):
        """A sentence
        on two lines.

        Args:
            x: A number.
        """

    monkeypatch.setitem(PUBLIC, "f", f)
    assert [problem.split()[0:2] for problem in problems("f")] == [
        ["it", "must"],
        ["its", "Args"],
        ["it", "has"],
    ]
    assert problems("f")[1].endswith("describe y")
