"""HTML pages from the templates in `templates/`; all that is filled in is escaped."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from foedus.version import __version__

_TEMPLATES = Environment(
    loader=PackageLoader("foedus.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["capital"] = lambda text: text[:1].upper() + text[1:]


def render(template: str, **values: Any) -> str:
    """One page that needs nothing else, as text. `base.html.j2` wants a title and a subtitle."""
    return _TEMPLATES.get_template(template).render(values)


def write_page(path: str | os.PathLike, text: str) -> Path:
    """Write a page, in a new folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def versions() -> str:
    """With which software and on what machine a page was made."""
    found = {"foedus": __version__, "Python": platform.python_version()}
    for package in ("torch", "numpy", "pandas", "matplotlib"):
        found[package] = metadata.version(package)
    software = ", ".join(f"{k} {v}" for k, v in found.items())
    return f"{software}. {platform.system()} {platform.machine()}, {os.cpu_count()} processors."
