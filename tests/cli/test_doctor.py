"""`foedus doctor`: every finding, with a remedy for what is missing, within 80 columns."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
import warnings
from pathlib import Path

import joblib
import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from foedus import kernels
from foedus.cli import doctor
from foedus.cli.app import app
from foedus.version import __version__

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def printed() -> str:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def versions(monkeypatch):
    """Versions of packages other than those that are installed; None: not installed."""
    given: dict[str, str | None] = {}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n: given[n] if n in given else real(n))
    return given


@pytest.fixture
def requirements(monkeypatch):
    """Those of pyproject.toml, as the metadata of a wheel has them."""
    lines = PROJECT["dependencies"] + [
        f'{line}; extra == "{extra}"' for extra, asked in EXTRAS.items() for line in asked
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)


def test_what_is_there(monkeypatch, tmp_path, requirements, versions):
    versions["flwr"] = "1.41.0"
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "toy.npz").touch()
    monkeypatch.setenv("FOEDUS_DATA", str(tmp_path / "sets"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = printed()
    flat = re.sub(r"\s+", " ", shown)
    assert f"ok foedus {__version__} in " in flat
    assert re.search(r"^ok packages        torch \S+, numpy \S+, scipy", shown, re.M)
    assert f"ok FOEDUS_DATA {tmp_path / 'sets'} (1 sets)" in flat
    assert f"ok data cache {tmp_path / 'foedus'} (0 sets; foedus data get NAME" in flat
    assert ("ok compiled loops  there" in shown) == kernels.ready
    assert "ok [flower]        flwr 1.41.0\n" in shown


@pytest.mark.parametrize("loops", ["0", "missing", "other", "windows"])
def test_compiled_loops_that_are_missing(monkeypatch, loops):
    monkeypatch.setattr(kernels, "ready", False)
    monkeypatch.delenv("FOEDUS_COMPILED", raising=False)
    if loops == "0":
        monkeypatch.setenv("FOEDUS_COMPILED", "0")
    if loops == "windows":
        monkeypatch.setattr(doctor, "_on_posix", lambda: False)
    files = [Path("_compiled.abi3.so")] if loops == "other" else []
    monkeypatch.setattr(doctor, "_compiled_files", lambda: files)
    finding = doctor._loops()
    assert not finding.well
    again = "foedus again: pip install --force-reinstall --no-deps --no-cache-dir foedus"
    assert (
        finding.remedy
        == {
            "0": "unset FOEDUS_COMPILED",
            "missing": f"install a C compiler (gcc or clang), then {again}",
            "other": f"install {again}",
            "windows": "use WSL: they are written for Linux and macOS",
        }[loops]
    )


@pytest.mark.parametrize("extra", sorted(doctor._EXTRAS))
def test_every_extra_that_is_missing_has_a_remedy(extra, versions, requirements):
    names = [Requirement(line).name for line in EXTRAS[extra]]
    versions |= dict.fromkeys(names)
    finding = doctor._extra(extra, doctor._EXTRAS[extra])
    assert not finding.well and finding.remedy == f"pip install 'foedus[{extra}]'"
    for name in names:
        assert f"{name} is missing" in finding.found


def test_versions_that_do_not_match(versions, requirements):
    versions |= {"flwr": "1.40.0", "torch": "2.4.1", "numpy": "1.26.0"}
    finding = doctor._extra("flower", "engine=fd.Flower()")
    assert finding.found == "no engine=fd.Flower(): flwr 1.40.0 is not <2,>=1.41"
    finding = doctor._packages()
    assert finding.found == "torch 2.4.1 is not <3,>=2.5"  # numpy 1.26.0 is the oldest that will do
    assert finding.remedy == "pip install 'torch<3,>=2.5'"
    versions["torch"] = "2.5.0+cpu"
    assert doctor._packages().well


def test_without_an_installation(versions, monkeypatch):
    """The folder of a clone on PYTHONPATH has no metadata."""

    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    versions["foedus"] = None
    finding = doctor._packages()
    assert "foedus itself is not installed" in finding.found and not finding.well
    assert "pip install -e ." in finding.remedy
    assert not doctor._extra("ray", "engine=fd.Ray()").well


@pytest.mark.parametrize(
    ("threads", "usable", "all_", "found", "remedy"),
    [
        (2, 2, 2, "2 of PyTorch, on 2 processors", ""),
        (1, 4, 4, "1 of PyTorch, on 4 processors", ""),
        (8, 3, 16, "8 of PyTorch, on 3 processors of 16, by the", "set OMP_NUM_THREADS=3"),
    ],
)
def test_threads(monkeypatch, threads, usable, all_, found, remedy):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(joblib, "cpu_count", lambda: usable)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: all_)
    finding = doctor._threads()
    assert finding.found.startswith(found) and finding.remedy == remedy
    assert finding.well == (remedy == "")


def no_gpu(monkeypatch, cuda: str | None, tool: bool):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/x" if tool else None)


@pytest.mark.parametrize(
    ("cuda", "tool", "found", "remedy"),
    [
        (None, False, "none found", "and a build of PyTorch for it"),
        ("13.0", False, "none found", "none is needed; for one, install its driver"),
        (None, True, "is a build for the CPU", "install a build for CUDA"),
        ("13.0", True, "no device answers", "update the driver"),
    ],
)
def test_a_gpu_that_is_missing(monkeypatch, cuda, tool, found, remedy):
    no_gpu(monkeypatch, cuda, tool)
    finding = doctor._gpu()
    assert not finding.well and found in finding.found and remedy in finding.remedy


def test_what_torch_warns_about_is_the_reason(monkeypatch):
    no_gpu(monkeypatch, "13.0", True)

    def warn() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old. Please update", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert doctor._gpu().found.endswith(": The NVIDIA driver on your system is too old")


def test_a_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"card {i}")
    assert doctor._gpu() == doctor.Finding("GPU", "cuda:0 card 0, cuda:1 card 1")


def test_data_folders(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOEDUS_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a file: no folder fits in
    given, cache = doctor._data()
    assert given.found == f"{tmp_path / 'nothing'} is no folder"
    assert given.remedy == "set FOEDUS_DATA to a folder with NAME.npz files, or unset it"
    assert not cache.well and "set XDG_CACHE_HOME" in cache.remedy
    monkeypatch.setenv("FOEDUS_DATA", str(tmp_path))
    given, _ = doctor._data()
    assert "(0 sets)" in given.found and not given.well


@pytest.mark.parametrize(
    ("system", "posix", "well", "remedy"),
    [
        ("Linux", True, True, ""),
        ("Darwin", True, False, "foedus is tested on Linux only"),
        ("Windows", False, False, "use WSL"),
    ],
)
def test_systems(monkeypatch, system, posix, well, remedy):
    monkeypatch.setattr(doctor.platform, "system", lambda: system)
    monkeypatch.setattr(doctor, "_on_posix", lambda: posix)
    finding = doctor._system()
    assert finding.well == well and remedy in finding.remedy


def test_lines_are_at_most_80_wide_when_everything_is_missing(monkeypatch, requirements, versions):
    monkeypatch.setattr(kernels, "ready", False)
    monkeypatch.setattr(doctor, "_compiled_files", list)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Windows")
    monkeypatch.setattr(doctor, "_on_posix", lambda: False)
    no_gpu(monkeypatch, None, True)
    versions |= {Requirement(line).name: None for lines in EXTRAS.values() for line in lines}
    shown = printed().splitlines()
    assert sum(line.startswith("--") for line in shown) >= 3 + len(doctor._EXTRAS)
    for line in shown:
        assert len(line) <= 80 or len(line.split()[-1]) > 50, line  # a path may be longer
        assert re.match(r"(ok|--) \S|" + " " * 19 + r"\S|" + " " * 27 + r"\S", line), line


def test_every_extra_for_users_is_known():
    """Those that are not: what they add up to, and the tools of who develops foedus."""
    assert {*doctor._EXTRAS, "dev", "docs", "all"} == set(EXTRAS)
    (all_,) = map(Requirement, EXTRAS["all"])
    assert all_.name == "foedus" and all_.extras == set(doctor._EXTRAS)
