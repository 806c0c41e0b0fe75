"""What griffe is told of our docstrings, before mkdocstrings shows them."""

from __future__ import annotations

import re
from typing import Any

import griffe
from api import linked_names  # which the hooks have imported


class Docstrings(griffe.Extension):
    """Sections called Example, as in our docstrings, and links from names to their entries."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = linked_names(text)
