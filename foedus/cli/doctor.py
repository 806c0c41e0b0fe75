"""`foedus doctor`: what is installed, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from foedus.cli.app import app
from foedus.version import __version__

_EXTRAS = {
    "ray": "engine=fd.Ray() on a cluster",
    "flower": "engine=fd.Flower() and foedus deploy",
    "onnx": "run.model.to_onnx",
    "report": "pages with pictures, foedus demo",
    "lora": "adapters of peft (LoRA)",
    "secure": "fd.SecureAggregation",
    "private": "fd.DifferentialPrivacy",
    "tensorboard": "fd.TensorBoard",
    "mlflow": "fd.MLflow",
}
"""The extras of pyproject.toml, and what each is for."""


@dataclass(frozen=True)
class Finding:
    """One line of what `foedus doctor` prints."""

    about: str
    found: str
    well: bool = True
    remedy: str = ""


def version_line() -> str:
    """Versions of foedus and its platform, and whether compiled loops are available; PyTorch is not
    loaded."""
    loops = "compiled loops" if _compiled_files() else "no compiled loops"
    return (
        f"foedus {__version__} (Python {platform.python_version()}, torch {_version('torch')}, "
        f"{loops}; foedus doctor says more)"
    )


def _compiled_files() -> list[Path]:
    folder = Path(__file__).parents[1] / "kernels"
    return [p for p in folder.glob("_compiled*") if p.suffix in (".so", ".pyd")]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they are printed."""
    yield Finding("foedus", f"{__version__} in {Path(__file__).parents[1]}")
    yield _system()
    yield Finding("Python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield _packages()
    yield _loops()
    yield _devices()
    for extra, use in _EXTRAS.items():
        yield _extra(extra, use)
    yield from _data()


def _system() -> Finding:
    found = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    remedy = "foedus is tested on Linux; use WSL, where it is Linux"
    return Finding("system", found, os.name == "posix", "" if os.name == "posix" else remedy)


def _packages() -> Finding:
    names = ("torch", "numpy", "scipy", "scikit-learn", "pandas")
    missing = [name for name in names if not _version(name)]
    found = ", ".join(f"{name} {_version(name) or 'missing'}" for name in names)
    return Finding("packages", found, not missing, "pip install foedus" if missing else "")


def _loops() -> Finding:
    from foedus import kernels

    if kernels.ready:
        return Finding("compiled loops", "there")
    if os.environ.get("FOEDUS_COMPILED") == "0":
        why, remedy = "left out by FOEDUS_COMPILED=0", "unset FOEDUS_COMPILED"
    elif _compiled_files():
        why = "of another version of foedus, or not for this Python"
        remedy = "install foedus again: pip install --force-reinstall --no-deps foedus"
    else:
        why = "not there: the same results, several times slower"
        remedy = "install a C compiler (gcc or clang), then foedus again"
    return Finding("compiled loops", why, False, remedy)


def _devices() -> Finding:
    import torch

    found = [f"CPU ({torch.get_num_threads()} threads)"]
    found += [
        f"cuda:{i} {torch.cuda.get_device_name(i)}"
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    if torch.backends.mps.is_available():
        found.append("mps")
    return Finding("devices", ", ".join(found))


def _extra(extra: str, use: str) -> Finding:
    lines = importlib.metadata.requires("foedus") or []
    asked = [line for line in lines if re.search(rf"""extra == ["']{extra}["']""", line)]
    names = [re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0] for line in asked]
    missing = [name for name in names if not _version(name)]
    if missing:
        remedy = f"pip install 'foedus[{extra}]'"
        return Finding(f"[{extra}]", f"not installed: no {use}", False, remedy)
    return Finding(f"[{extra}]", ", ".join(f"{name} {_version(name)}" for name in names))


def _data() -> Iterator[Finding]:
    from foedus.data.download import cache_dir

    given = os.environ.get("FOEDUS_DATA")
    if given:
        sets = sorted(p.stem for p in Path(given).glob("*.npz"))
        remedy = "" if sets else "set FOEDUS_DATA to a folder with NAME.npz files, or unset it"
        yield Finding("FOEDUS_DATA", f"{given} ({len(sets)} sets)", bool(sets), remedy)
    cache = cache_dir()
    above = next(p for p in (cache, *cache.parents) if p.exists())
    well = os.access(above, os.W_OK)
    kept = len(list(cache.glob("*.npz")))
    remedy = "" if well else "make it writable, or set XDG_CACHE_HOME: downloads are kept there"
    yield Finding("data cache", f"{cache} ({kept} sets)", well, remedy)


@app.command("doctor")
def doctor_command() -> None:
    """Show what is installed, what is missing, and how to fix it.

    Example: foedus doctor
    """
    for finding in examine():
        typer.echo(f"{'ok' if finding.well else '--':<3}{finding.about:<16}{finding.found}")
        if finding.remedy:
            typer.echo(f"{'':<19}remedy: {finding.remedy}")
