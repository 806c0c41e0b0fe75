"""`foedus doctor`: what is installed, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from packaging.requirements import Requirement

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


def _on_posix() -> bool:
    return os.name == "posix"


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
    yield _threads()
    yield _gpu()
    for extra, use in _EXTRAS.items():
        yield _extra(extra, use)
    yield from _data()


def _system() -> Finding:
    found = f"{platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        return Finding("system", found)
    if _on_posix():
        remedy = "foedus is tested on Linux only; if something fails here, try it there"
    else:
        remedy = "use WSL, which is Linux: foedus is tested on Linux only, and fd.Flower and "
        remedy += "foedus deploy do not run on Windows"
    return Finding("system", found, False, remedy)


def _requirements() -> list[Requirement]:
    """What pyproject.toml asks for, as it was when foedus was installed."""
    try:
        return [Requirement(line) for line in importlib.metadata.requires("foedus") or []]
    except importlib.metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        return []


def _unmet(requirements: list[Requirement]) -> list[str]:
    """Those that are missing or have another version, in words."""
    unmet = []
    for requirement in requirements:
        version = _version(requirement.name)
        if version is None:
            unmet.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return unmet


def _packages() -> Finding:
    names = ("torch", "numpy", "scipy", "scikit-learn", "pandas")
    found = ", ".join(f"{name} {_version(name) or 'missing'}" for name in names)
    if not _version("foedus"):
        remedy = "pip install -e . in its folder, so that pip knows what foedus needs"
        return Finding("packages", f"{found}; foedus itself is not installed", False, remedy)
    needed = [r for r in _requirements() if r.marker is None or r.marker.evaluate({"extra": ""})]
    unmet = _unmet(needed)
    if not unmet:
        return Finding("packages", found)
    asked = " ".join(f"'{r.name}{r.specifier}'" for r in needed if _unmet([r]))
    return Finding("packages", "; ".join(unmet), False, f"pip install {asked}")


def _loops() -> Finding:
    from foedus import kernels

    again = "foedus again: pip install --force-reinstall --no-deps --no-cache-dir foedus"
    if kernels.ready:
        return Finding("compiled loops", "there")
    if os.environ.get("FOEDUS_COMPILED") == "0":
        why, remedy = "left out by FOEDUS_COMPILED=0", "unset FOEDUS_COMPILED"
    elif _compiled_files():
        why = "of another version of foedus, or not for this Python"
        remedy = f"install {again}"
    elif _on_posix():
        why = "not there: slower, with the same results up to rounding"
        remedy = f"install a C compiler (gcc or clang), then {again}"
    else:
        why = "not there: slower, with the same results up to rounding"
        remedy = "use WSL: they are written for Linux and macOS"
    return Finding("compiled loops", why, False, remedy)


def _threads() -> Finding:
    """Threads beyond the processors that this process may use wait for each other."""
    import torch
    from joblib import cpu_count

    threads, usable, all_ = torch.get_num_threads(), cpu_count(), os.cpu_count() or 1
    limits = f" of {all_}, by the container's quota or the affinity" if usable < all_ else ""
    found = f"{threads} of PyTorch, on {usable} processors{limits}"
    remedy = f"set OMP_NUM_THREADS={usable}" if threads > usable else ""
    return Finding("threads", found, not remedy, remedy)


def _gpu() -> Finding:
    import torch

    with warnings.catch_warnings(record=True) as caught:  # a driver that is too old, say
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if there:
        count = torch.cuda.device_count()
        named = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(count)]
        return Finding("GPU", ", ".join(named))
    if torch.backends.mps.is_available():
        return Finding("GPU", "mps")
    build = f"PyTorch {torch.__version__}"
    of_a_gpu = torch.version.cuda or torch.version.hip
    if shutil.which("nvidia-smi") is None:
        remedy = "none is needed; for one, install its driver"
        remedy += "" if of_a_gpu else " and a build of PyTorch for it (pytorch.org)"
        return Finding("GPU", "none found", False, remedy)
    if not of_a_gpu:
        remedy = "install a build for CUDA: pytorch.org has the command"
        return Finding("GPU", f"not used: {build} is a build for the CPU", False, remedy)
    why = str(caught[0].message).split(". ")[0] if caught else "no device answers"
    remedy = "update the driver (nvidia-smi shows its version); start containers with --gpus all"
    return Finding("GPU", f"not used by {build}: {why}", False, remedy)


def _extra(extra: str, use: str) -> Finding:
    asked = [r for r in _requirements() if r.marker and r.marker.evaluate({"extra": extra})]
    remedy = f"pip install 'foedus[{extra}]'"
    unmet = _unmet(asked)
    if unmet or not asked:
        return Finding(f"[{extra}]", f"no {use}: {'; '.join(unmet) or 'unknown'}", False, remedy)
    return Finding(f"[{extra}]", ", ".join(f"{r.name} {_version(r.name)}" for r in asked))


def _data() -> Iterator[Finding]:
    from foedus.data.download import cache_dir

    given = os.environ.get("FOEDUS_DATA")
    if given:
        sets = sorted(p.stem for p in Path(given).glob("*.npz"))
        found = f"{given} ({len(sets)} sets)" if Path(given).is_dir() else f"{given} is no folder"
        remedy = "" if sets else "set FOEDUS_DATA to a folder with NAME.npz files, or unset it"
        yield Finding("FOEDUS_DATA", found, bool(sets), remedy)
    cache = cache_dir()
    above = next(p for p in (cache, *cache.parents) if p.exists())
    well = above.is_dir() and os.access(above, os.W_OK)
    kept = len(list(cache.glob("*.npz")))
    remedy = "" if well else "make it writable, or set XDG_CACHE_HOME: downloads are kept there"
    hint = "" if kept or not well else "; foedus data get NAME downloads one"
    yield Finding("data cache", f"{cache} ({kept} sets{hint})", well, remedy)


def _lines(finding: Finding) -> list[str]:
    """A finding and its remedy, at most 80 columns wide unless a word is longer."""
    head = f"{'ok' if finding.well else '--':<3}{finding.about:<16}"
    how: dict[str, Any] = {"width": 80, "break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(head + finding.found, subsequent_indent=" " * 19, **how)
    if finding.remedy:
        first, more = " " * 19 + "remedy: ", " " * 27
        lines += textwrap.wrap(finding.remedy, initial_indent=first, subsequent_indent=more, **how)
    return lines


@app.command("doctor")
def doctor_command() -> None:
    """Show what is installed, what is missing, and how to fix it.

    Example: foedus doctor
    """
    for finding in examine():
        typer.echo("\n".join(_lines(finding)))
