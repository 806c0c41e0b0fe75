"""What griffe is told of our docstrings, before mkdocstrings shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
from api import escaped, linked_names  # which the hooks have imported


class Docstrings(griffe.Extension):
    """Sections called Example, as in our docstrings, and links from names to their entries."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = linked_names("\n".join(prose_escaped(text.split("\n"))))


def prose_escaped(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, escaped but for formulas and examples, which stand apart."""
    described = False
    for line in lines:
        if line and not line.startswith(" "):
            described = line in ("Args:", "Attributes:", "Raises:", "Returns:")
        is_code = line.startswith("    ") and not described
        yield line if is_code else escaped(line)
