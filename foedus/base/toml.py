"""Plain data as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np


def quoted(name: str) -> str:
    """A key, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def section(name: str, values: Mapping[str, Any]) -> str:
    """A section of a file: its name, then a line for each value."""
    return "\n".join([f"[{name}]", *(f"{quoted(k)} = {toml(v)}" for k, v in values.items())])


def toml(value: Any) -> str:
    """A value on one line; "none" stands for Python's None."""
    if isinstance(value, dict):
        items = (f"{quoted(str(k))} = {toml(v)}" for k, v in value.items())
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if value is None or isinstance(value, str):
        return _string("none" if value is None else value)
    value = value.item() if isinstance(value, np.generic) else value
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _string(text: str) -> str:
    """A text in quotes."""
    found = json.dumps(text, ensure_ascii=False)
    return found.replace("\x7f", "\\u007f")  # a control character in TOML, but not in JSON
