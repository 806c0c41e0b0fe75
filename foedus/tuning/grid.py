"""Grids of settings: values, combinations, and the algorithms they make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt

from foedus.base.settings import check_settings
from foedus.core.algorithm import Algorithm
from foedus.errors import ConfigError, FoedusError, unknown


@dataclass(frozen=True)
class loguniform:  # noqa: N801 - written where a list of values could be
    """A range to draw from, uniformly in the logarithm; draws are rounded to three digits.

    Args:
        low: Least value, above 0.
        high: Largest value.

    Example:
        >>> rates = fd.loguniform(1e-3, 10)
        >>> 1e-3 <= rates.draw(np.random.default_rng(0)) <= 10
        True
    """

    low: Annotated[float, Gt(0)]
    high: Annotated[float, Gt(0)]

    def __post_init__(self) -> None:
        check_settings(self)
        if self.low >= self.high:
            raise ConfigError(f"low={self.low!r} must be less than high={self.high!r}")

    def draw(self, rng: np.random.Generator) -> float:
        """One value."""
        value = float(f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.3g}")
        return min(max(value, self.low), self.high)


Grid = Mapping[str, Sequence[Any] | loguniform]


def combinations(
    grid: dict[str, list[Any] | loguniform], trials: int | None, seed: int
) -> list[dict[str, Any]]:
    ranges = [name for name, values in grid.items() if isinstance(values, loguniform)]
    rng = np.random.default_rng(seed)
    if ranges:
        if trials is None:
            needed = "trials= must say how many values to draw from it"
            raise ConfigError(f"grid[{ranges[0]!r}] is a range, so {needed}")
        pick = lambda v: v.draw(rng) if isinstance(v, loguniform) else v[int(rng.integers(len(v)))]  # noqa: E731
        return [{name: pick(values) for name, values in grid.items()} for _ in range(trials)]
    lists = {name: values for name, values in grid.items() if not isinstance(values, loguniform)}
    shape = [len(values) for values in lists.values()]
    size = math.prod(shape)
    if trials is not None and trials > size:
        raise ConfigError(
            f"trials={trials} is more than the {size} combinations of the grid; leave trials out "
            "to try them all"
        )
    numbers = range(size) if trials is None else np.sort(rng.choice(size, trials, replace=False))
    places = (np.unravel_index(int(n), shape) for n in numbers)
    return [{k: lists[k][p] for k, p in zip(lists, at, strict=True)} for at in places]


def build(algorithm: Any, values: dict[str, Any]) -> Algorithm:
    """The algorithm with these values."""
    if isinstance(algorithm, Algorithm):
        kind = f"{type(algorithm).__name__} setting"
        for name in values:
            if name not in (known := setting_names(algorithm)):
                raise ConfigError(f"grid: {unknown(kind, name, known)}")
        make = lambda: _replaced(algorithm, values)  # noqa: E731
    elif callable(algorithm):
        make = lambda: algorithm(**values)  # noqa: E731
    else:
        raise ConfigError(
            f"algorithm={algorithm!r} must be a foedus algorithm, or a function that makes one of "
            "the grid's values"
        )
    try:
        made = make()
    except FoedusError as error:
        raise ConfigError(f"grid: {shown_settings(values)}: {error}") from error
    if not isinstance(made, Algorithm):
        raise ConfigError(
            f"algorithm(**values) returned {made!r}; it must return a foedus algorithm"
        )
    return made


def setting_names(owner: Any, at: str = "") -> list[str]:
    """The fields of an algorithm, and with dots those of its fields."""
    if not dataclasses.is_dataclass(owner) or isinstance(owner, type):
        return []
    own = [f.name for f in dataclasses.fields(owner) if f.init]
    inside = [name for f in own for name in setting_names(getattr(owner, f), f"{at}{f}.")]
    return [f"{at}{f}" for f in own] + inside


def _replaced(owner: Any, values: dict[str, Any]) -> Any:
    """All values together: the values of one field may be valid only with those of another."""
    changes = {name: value for name, value in values.items() if "." not in name}
    for part in dict.fromkeys(name.split(".")[0] for name in values if "." in name):
        prefix = f"{part}."
        inner = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        changes[part] = _replaced(getattr(owner, part), inner)
    return dataclasses.replace(owner, **changes)


def shown_settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {shorten(value)}" for name, value in values.items())


def shorten(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
