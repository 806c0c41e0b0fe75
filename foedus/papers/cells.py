"""Finished cells of a study, kept in a file: a study that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Cells:
    """Results by name; with a path, they are read from it and written to it whenever one is added."""

    def __init__(self, path: Path | None):
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of a name; made only if it is not there."""
        if name not in self.found:
            self.found[name] = make()
            if self.path:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(self.found, indent=1))
        return self.found[name]
