"""Plain data as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def quoted(name: str) -> str:
    """A key, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


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
        text = json.dumps("none" if value is None else value, ensure_ascii=False)
        return text.replace("\x7f", "\\u007f")  # a control character in TOML, but not in JSON
    return str(value).lower() if isinstance(value, bool) else repr(value)
