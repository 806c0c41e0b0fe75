"""The user's torch modules in an algorithm: saved with a run, and made again from allowed code.

A file names the class of each module and holds its tensors. Nothing is imported because a file says
so: a class is looked up in Python modules that the caller of `Run.load` passes.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from foedus.base.tree import Tree
from foedus.errors import ConfigError

ImportFrom = ModuleType | str | Iterable[ModuleType | str]


def modules_in(value: Any, where: str = "algorithm") -> dict[str, nn.Module]:
    """All torch modules in an algorithm, by place, as `from_config` names places."""
    if isinstance(value, nn.Module):
        return {where: value}
    inner: dict[str, Any] = {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {f"{where}.{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, list | tuple):
        inner = {f"{where}[{i}]": v for i, v in enumerate(value)}
    elif isinstance(value, dict):
        inner = {f"{where}.{k}": v for k, v in value.items()}
    return {place: m for at, v in inner.items() for place, m in modules_in(v, at).items()}


def described(algorithm: Any) -> tuple[list[dict[str, Any]], list[list[Tensor]]]:
    """The description of an algorithm's modules that a file holds, and their tensors."""
    notes, tensors = [], []
    for place, module in modules_in(algorithm).items():
        state, cls = module.state_dict(), type(module)
        if not all(_plain(v) for v in state.values()):
            continue
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        kind = f"{cls.__module__}:{cls.__qualname__}"
        notes.append({"place": place, "class": kind, "names": list(state), "frozen": frozen})
        tensors.append([v.detach().cpu() for v in state.values()])
    return notes, tensors


def _plain(value: Any) -> bool:
    """Whether a file can hold a value."""
    known = isinstance(value, Tensor) and value.layout == torch.strided
    return known and not value.is_quantized and not value.is_complex()


def restored(
    notes: list[dict[str, Any]], tensors: Tree, homes: list[ModuleType]
) -> dict[str, nn.Module]:
    """The modules of a file by place, of classes from Python modules that the caller allows."""
    return {note["place"]: _made(note, tensors[i], homes) for i, note in enumerate(notes)}


def imported(import_from: ImportFrom) -> list[ModuleType]:
    """Python modules from what the caller passed: modules, or their names."""
    allowed = [import_from] if isinstance(import_from, ModuleType | str) else list(import_from)
    homes = []
    for home in allowed:
        try:
            homes.append(importlib.import_module(home) if isinstance(home, str) else home)
        except ImportError as error:
            raise ConfigError(f"import_from={home!r} cannot be imported: {error}") from error
        if not isinstance(homes[-1], ModuleType):
            raise ConfigError(f"import_from={home!r} must be a Python module or its name")
    return homes


def _made(note: dict[str, Any], values: list[Tensor], homes: list[ModuleType]) -> nn.Module:
    place, cls = note["place"], find_class(note["class"], homes)
    try:
        with torch.random.fork_rng(devices=[]):  # random initial weights are replaced
            module = cls()
        module.load_state_dict(dict(zip(note["names"], values, strict=True)))
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"{place}: {cls.__name__}() cannot be made without arguments, or does not fit the "
            f"saved tensors: {error}"
        ) from error
    for name, p in module.named_parameters():
        p.requires_grad_(name not in note["frozen"])
    return module


def find_class(name: str, homes: list[ModuleType]) -> type[nn.Module]:
    """The class `module:Qualified.name` in one of these Python modules.

    If none of them has the class of that very module, the only class of that name is taken: a class
    of a script was in `__main__` when it was saved.
    """
    home, _, path = name.partition(":")
    candidates: list[type[nn.Module]] = []
    for module in homes:
        found: Any = module
        for part in path.split("."):
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
            if isinstance(found, ModuleType):  # contents of other Python modules are not allowed
                found = None
        if isinstance(found, type) and issubclass(found, nn.Module):
            candidates.append(found)
    chosen = {c for c in candidates if c.__module__ == home} or set(candidates)
    if len(chosen) != 1:
        names = ", ".join(m.__name__ for m in homes) or "no module"
        count = f"{len(chosen)} classes" if chosen else "no class"
        raise ConfigError(f"the run has a module of the class {name}; {names} has {count} for it")
    return chosen.pop()
