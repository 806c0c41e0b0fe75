"""A venv for each tool below `benchmarks/.venvs`, made when it is first asked for and whenever the
list of its packages changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".venvs"
# that of foedus' own constraints, so that tools differ and PyTorch does not
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """variants: command lines after `python` that are tried in the first repeat; the fastest is
    kept. passes: see `Job`. venv: whose, if not its own.
    """

    title: str
    packages: tuple[str, ...]
    variants: dict[str, tuple[str, ...]]
    passes: int = 3
    environment: dict[str, str] | None = None
    venv: str = ""


_FLOWER_PACKAGES = ("flwr[simulation]==1.41.0", TORCH)
_FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_FLOWER = ("-m", "benchmarks.peers.flower", "{job}")
_TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "benchmarks.peers.pfl",
)
PEERS = {
    "flower": Peer(
        "Flower",
        _FLOWER_PACKAGES,
        {"2 actors": _FLOWER},
        passes=1,
        environment=_FLOWER_SETTINGS,
    ),
    "flower-often": Peer(
        "Flower",
        _FLOWER_PACKAGES,
        {"2 actors, polling every 5 ms": (*_FLOWER, "0.005")},
        passes=1,
        environment=_FLOWER_SETTINGS,
        venv="flower",
    ),
    "pfl": Peer(
        "pfl-research",
        ("pfl==0.6.0", TORCH),
        {"2 processes": _TORCHRUN, "1 process": ("-m", "benchmarks.peers.pfl")},
        environment={"PFL_PYTORCH_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"},
    ),
    # FedJAX calls functions that JAX 0.6 has no longer.
    "fedjax": Peer(
        "FedJAX",
        ("fedjax==0.0.17", "jax==0.5.3"),
        {
            "jit": ("-m", "benchmarks.peers.fedjax", "{job}", "jit"),
            "pmap": ("-m", "benchmarks.peers.fedjax", "{job}", "pmap"),
        },
        environment={
            "JAX_PLATFORMS": "cpu",
            "PYTHONWARNINGS": "ignore",
            "JAX_TRACEBACK_FILTERING": "off",
        },
    ),
}


class UnavailableError(Exception):
    """Why a tool cannot be measured here."""


def python_of(name: str) -> Path:
    """The interpreter of a tool's venv, which is installed if it is not there; `UnavailableError`
    if that cannot be done.
    """
    packages, home = PEERS[name].packages, FOLDER / (PEERS[name].venv or name)
    done, python = home / "installed.txt", home / "bin" / "python"
    if done.exists() and done.read_text().split() == list(packages):
        return python
    shutil.rmtree(home, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    print(
        f"installing {', '.join(packages)} into {home.relative_to(FOLDER.parent.parent)}",
        file=sys.stderr,
        flush=True,
    )
    began = time.perf_counter()
    try:
        _quiet([sys.executable, "-m", "venv", str(home)])
        _quiet(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *packages,
            ]
        )
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(home, ignore_errors=True)
        said = getattr(error, "stderr", None) or str(error)
        lines = [line for line in said.strip().splitlines() if not line.startswith("WARNING")] or [
            str(error)
        ]
        raise UnavailableError(f"cannot be installed here: {lines[-1]}") from error
    done.write_text("\n".join(packages) + "\n")
    size = sum(f.stat().st_size for f in home.rglob("*") if f.is_file() and not f.is_symlink())
    print(
        f"installed in {time.perf_counter() - began:.0f} s, {size / 1e6:.0f} MB",
        file=sys.stderr,
        flush=True,
    )
    return python


def _quiet(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
