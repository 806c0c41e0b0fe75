"""What a study printed is kept in `benchmarks/results/NAME.json`; `docs/performance.md` is written from these files."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import sys
import time
from collections.abc import Iterator
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
    """Print as usual, and store what was printed when the study has come to its end."""
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
    """The machine, in the words that its numbers need."""
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


def write_docs(page: Path, order: dict[str, str]) -> None:
    """The page of all studies that are stored. order: their names, in turn, and what stands above each."""
    parts = [(Path(__file__).parent / "performance.md").read_text().rstrip()]
    for name, title in order.items():
        file = FOLDER / f"{name}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        how = f"`make bench ARGS={name}`: {found['machine']}, torch {found['versions']['torch']}, {found['repeats']} repeats, {found['seconds'] / 60:.0f} min."
        parts.append(f"## {title}\n\n{how}\n\n{found['text']}")
    page.write_text("\n\n".join(parts) + "\n")
