"""The output of each study is stored in `benchmarks/results/NAME.json`;
`docs/results/performance.md` is written from these files.
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"
ROOT = FOLDER.parent.parent


class _Tee(io.TextIOBase):
    """Writes to the terminal and keeps a copy."""

    def __init__(self) -> None:
        self.kept = io.StringIO()

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        return self.kept.write(text)

    def flush(self) -> None:
        sys.__stdout__.flush()


@contextlib.contextmanager
def kept(name: str, repeats: int) -> Iterator[None]:
    """Print as usual, and store the output when the study is finished."""
    tee, began = _Tee(), time.perf_counter()
    with contextlib.redirect_stdout(tee):
        yield
    FOLDER.mkdir(exist_ok=True)
    found = {
        "text": tee.kept.getvalue().strip(),
        "repeats": repeats,
        "seconds": round(time.perf_counter() - began, 1),
        **where(),
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def where() -> dict[str, Any]:
    """The machine and the versions that the numbers depend on."""
    versions = {p: metadata.version(p) for p in ("torch", "numpy", "scikit-learn")}
    return {
        "machine": f"{_processor()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def joined(texts: list[str]) -> str:
    """Tables one below the other; tables with the same head become one table."""
    whole: list[str] = []
    head: list[str] | None = None
    for text in texts:
        lines = text.splitlines()
        if head is not None and lines[:2] == head:
            whole += lines[2:]
        else:
            whole += ["", *lines] if whole else lines
        head = lines[:2] if lines[0].startswith("|") else None
    return "\n".join(whole)


def wrapped(text: str) -> str:
    """The same text with lines of prose of at most 100 columns."""
    lines = text.splitlines()
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 100) for line in lines)


def page(sections: Mapping[str, Iterable[str]]) -> str:
    """The page of all stored studies. sections: titles, each with the names of its studies."""
    parts = [(Path(__file__).parent / "performance.md").read_text().rstrip()]
    for title, names in sections.items():
        found = {
            name: json.loads(file.read_text())
            for name in names
            if (file := FOLDER / f"{name}.json").exists()
        }
        if not found:
            continue
        whose = dict.fromkeys(
            f"{f['machine']}, torch {f['versions']['torch']}, {f['repeats']} repeats"
            for f in found.values()
        )
        minutes = sum(f["seconds"] for f in found.values()) / 60
        arguments = next(iter(found)) if len(found) == 1 else f"'{' '.join(found)}'"
        how = f"`make bench ARGS={arguments}` ({'; '.join(whose)}; {minutes:.1f} min)"
        tables = joined([f["text"] for f in found.values()])
        parts.append(f"## {title}\n\n{wrapped(how)}\n\n{wrapped(tables)}")
    return "\n\n".join(parts) + "\n"


def write_docs(sections: Mapping[str, Iterable[str]]) -> Path:
    """Write docs/results/performance.md."""
    path = ROOT / "docs" / "results" / "performance.md"
    path.write_text(page(sections))
    return path
