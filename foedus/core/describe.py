"""Settings as plain data: algorithms, models and engines to JSON and back."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch

from foedus.errors import ConfigError, FoedusError, shown, unknown


def to_config(value: Any) -> Any:
    """A JSON-able description of a dataclass tree: {"type": its name, field: value, ...}."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_config(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_config(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_config(v) for k, v in value.items()}
    # Cannot be constructed from text; the text shows what it was (a torch.nn.Module, a callable).
    # Memory addresses are removed: they differ between processes, so that no other process could
    # resume the run.
    return {"opaque": re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)), **_checksum(value)}


def _checksum(value: Any) -> dict[str, int]:
    """A checksum of a module's weights: two modules may look alike and hold different ones."""
    if not hasattr(value, "state_dict"):
        return {}
    arrays = [
        t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        for t in value.state_dict().values()
    ]
    return {"weights": reduce(lambda c, a: zlib.crc32(a, c), arrays, 0)}


def from_config(
    config: Any,
    known: dict[str, type],
    where: str = "config",
    opaque: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The inverse of `to_config`.

    Args:
        config: The description.
        known: The classes that may be constructed, by name.
        where: The place, for errors.
        opaque: By place, values that text cannot describe.
    """
    if isinstance(config, list):
        return tuple(from_config(v, known, f"{where}[{i}]", opaque) for i, v in enumerate(config))
    if not isinstance(config, dict):
        return config
    if "opaque" in config:
        if where in opaque:
            if to_config(opaque[where]) != config:
                raise ConfigError(f"{where} is not the {shown(config['opaque'])} that was saved")
            return opaque[where]
        first = str(config["opaque"]).partition("\n")[0]
        raise ConfigError(f"{where} holds {shown(first)}, which cannot be built from text")
    if "type" not in config:
        return {k: from_config(v, known, f"{where}.{k}", opaque) for k, v in config.items()}
    name = config["type"]
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{where}: {unknown('type', name, sorted(known))}")
    cls = known[name]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for k, v in config.items():
        if k == "type":
            continue
        if k not in fields:
            raise ConfigError(f"{where}: {unknown(f'{name} setting', k, sorted(fields))}")
        values[k] = from_config(v, known, f"{where}.{k}", opaque)
        if "local" in fields[k].metadata and values[k] != fields[k].default:
            raise ConfigError(
                f"{where}.{k}: what is trusted is never taken from a file or a message; make the "
                f"{name} in Python, and pass the algorithm itself"
            )
    try:
        return cls(**values)
    except FoedusError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {name} cannot be made of these settings: {error}") from error


def subclasses(*bases: type) -> dict[str, type]:
    """All classes derived from the bases that can be built, by name; those with an underscore are
    not for users.
    """
    found: dict[str, type] = {}
    for base in bases:
        derived: list[type] = base.__subclasses__()
        for cls in derived:
            if dataclasses.is_dataclass(cls) and not cls.__name__.startswith("_"):
                found[cls.__name__] = cls
            found.update(subclasses(cls))
    return found


def flatten(settings: Any, at: str = "") -> dict[str, Any]:
    """Nested settings as {dotted key: value}."""
    if isinstance(settings, dict) and settings:
        return {
            k: v
            for key, value in settings.items()
            for k, v in flatten(value, f"{at}.{key}".lstrip(".")).items()
        }
    return {at: settings}
