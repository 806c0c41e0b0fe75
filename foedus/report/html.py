"""HTML pages from the templates in `templates/`; all that is filled in is escaped.

A page holds its scripts and its style sheet, and a content security policy that allows these alone,
by their hashes: what is in the data cannot run, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foedus.version import __version__

# what Observable Plot puts into each chart, word for word, so that the policy can allow it
_PLOT_STYLE = """:where(.plot) {
  --plot-background: white;
  display: block;
  height: auto;
  height: intrinsic;
  max-width: 100%;
}
:where(.plot text),
:where(.plot tspan) {
  white-space: pre;
}"""


@functools.cache
def _static(name: str) -> Markup:
    """A file of `static/`."""
    text = (resources.files("foedus.report") / "static" / name).read_text(encoding="utf-8")
    return Markup(text)


def _scripts(charts: bool) -> list[Markup]:
    """What runs in a page: Observable Plot and what uses it only where there are charts."""
    names = ["tables.js"]
    if charts:
        names = ["d3.min.js", "plot.min.js", "kinds.js", "charts.js", *names]
    return [_static(name) for name in names]


def _policy(scripts: Sequence[str]) -> str:
    """The content security policy of a page with these scripts."""
    style = _hashes([_static("page.css"), _PLOT_STYLE])
    parts = ["default-src 'none'", "img-src data:", f"style-src {style}"]
    return "; ".join(
        [*parts, f"script-src {_hashes(scripts)}", "base-uri 'none'", "form-action 'none'"]
    )


def _hashes(texts: Sequence[str]) -> str:
    digests = (hashlib.sha256(t.encode()).digest() for t in texts)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)


_TEMPLATES = Environment(
    loader=PackageLoader("foedus.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["capital"] = lambda text: text[:1].upper() + text[1:]
_TEMPLATES.globals |= {"page_scripts": _scripts, "policy": _policy}


def render(template: str, **values: Any) -> str:
    """One page that needs nothing else, as text. `base.html.j2` wants a title and a subtitle."""
    static = {"style": _static("page.css"), "notice": _static("NOTICE")}
    return _TEMPLATES.get_template(template).render(values | static)


def macro(template: str, name: str) -> Any:
    """A macro of a template, as a function."""
    return getattr(_TEMPLATES.get_template(template).module, name)


def write_page(path: str | os.PathLike, text: str) -> Path:
    """Write a page, in a new folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    return path


def versions() -> str:
    """With which software and on what machine a page was made."""
    found = {"foedus": __version__, "Python": platform.python_version()}
    for package in ("torch", "numpy", "pandas", "matplotlib"):
        found[package] = metadata.version(package)
    software = ", ".join(f"{k} {v}" for k, v in found.items())
    return f"{software}. {platform.system()} {platform.machine()}, {os.cpu_count()} processors."
