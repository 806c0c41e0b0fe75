"""The public names, `fd.FedAvg` and `fd.losses.Focal`, and what their docstrings say."""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import ModuleType
from typing import Any

import foedus as fd

BASES = {"losses": fd.losses.Loss, "schedules": fd.schedules.Schedule}
"""Of the public modules of settings, the class of their members."""

SHORT = ("looped", "stacked", "Survey", "survey")
"""Other names of something public: `client_step` with its argument, and two former names."""


def public_names() -> dict[str, Any]:
    """Classes and functions by what is written after `fd.`."""
    found: dict[str, Any] = {}
    for name in fd.__all__:
        value = getattr(fd, name)
        if name in BASES:
            for inner, member in vars(value).items():
                if inner[0] != "_" and inspect.isclass(member) and issubclass(member, BASES[name]):
                    found[f"{name}.{inner}"] = member
        elif name not in SHORT and not isinstance(value, ModuleType | str):
            found[name] = value
    return found


PUBLIC = public_names()


def is_problem(value: Any) -> bool:
    """Whether it is an exception or a warning."""
    return inspect.isclass(value) and issubclass(value, Exception)


def documented_parts(value: Any) -> dict[str, str]:
    """Docstrings by name within the value: its own (under ""), and those of its public methods."""
    parts = {"": value.__doc__ or ""}
    if inspect.isclass(value):
        for base in value.__mro__:
            if not base.__module__.startswith("foedus."):
                continue
            for name, member in vars(base).items():
                doc = getattr(member, "__doc__", None)
                is_code = inspect.isroutine(member) or hasattr(member, "__get__")
                if name[0] != "_" and is_code and isinstance(doc, str):
                    parts.setdefault(name, doc)
    return parts


def section(doc: str, *titles: str) -> str:
    """The text below the first of these titles in a docstring, dedented; "" without one."""
    lines = inspect.cleandoc(doc).splitlines()
    for at, line in enumerate(lines):
        if line.removesuffix(":") in titles and line.endswith(":"):
            below = []
            for inner in lines[at + 1 :]:
                if inner.strip() and not inner.startswith(" "):
                    break
                below.append(inner)
            return inspect.cleandoc("\n" + "\n".join(below))
    return ""


def described(doc: str) -> list[str]:
    """The names that an Args or Attributes section describes."""
    text = "\n".join([section(doc, "Args"), section(doc, "Attributes")])
    return [name.lstrip("*") for name in re.findall(r"^(\*{0,2}\w+)(?: \([^)]*\))?: ", text, re.M)]


def parameters(value: Any) -> list[str]:
    """What somebody who calls it, or makes one of its class, may give."""
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value) if f.init and f.name[0] != "_"]
    if inspect.isclass(value):
        if not inspect.isfunction(value.__init__) or is_problem(value):  # that of a type in C
            return []
        names = [*inspect.signature(value.__init__).parameters][1:]
    else:
        names = [*inspect.signature(value).parameters]
    return [name for name in names if name[0] != "_"]


def descriptions(value: Any) -> list[str]:
    """The names that the docstring of a function, or of a class and its bases, describes."""
    classes = value.__mro__ if inspect.isclass(value) else [value]
    docs = [c.__doc__ or "" for c in classes]
    if inspect.isclass(value):
        docs += [c.__init__.__doc__ or "" for c in classes if "__init__" in vars(c)]
    return [name for doc in docs for name in described(doc)]
