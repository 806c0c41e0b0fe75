"""Algorithms from code that a plan, a worker or a policy names, never a message."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from foedus.core.algorithm import Algorithm
from foedus.errors import ConfigError


def algorithms_in(module: str | ModuleType, name: str, where: str) -> dict[str, Algorithm]:
    """The algorithm, or the dictionary of algorithms, that a module has under this name.

    module: its name, if it is to be imported. where: what errors begin with.
    """
    try:
        module = importlib.import_module(module) if isinstance(module, str) else module
    except (ImportError, ValueError) as error:  # ValueError: an empty name
        raise ConfigError(f"{where}: {error}") from error
    given: Any = getattr(module, name, None)
    algorithms = given if isinstance(given, dict) else {type(given).__name__: given}
    if not algorithms or not all(isinstance(a, Algorithm) for a in algorithms.values()):
        raise ConfigError(f"{where} is not an algorithm or a dictionary of algorithms")
    return algorithms
