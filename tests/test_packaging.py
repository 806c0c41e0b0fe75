"""What is installed: constraints.txt, requirements.lock and the bill of materials agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
DEPLOYED = ("flower", "secure", "private")
"""The extras of a deployment."""


def constraints() -> dict[str, Version]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").open())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def lock() -> dict[str, tuple[Version, list[str]]]:
    """By name: version and hashes."""
    text = re.sub(r"^#.*\n", "", (ROOT / "requirements.lock").read_text(), flags=re.M)
    found = {}
    for entry in re.split(r"(?<!\\)\n", text.strip()):
        requirement, *hashes = [part.strip() for part in entry.split("\\\n")]
        name, version = requirement.split("==")
        found[canonicalize_name(name)] = (Version(version), hashes)
    return found


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_entry_of_the_lock_has_the_version_of_the_constraints_and_a_hash():
    pinned = constraints()
    for name, (version, hashes) in lock().items():
        # the build of torch ("+cpu") differs from index to index
        assert pinned[name] == Version(version.public), name
        assert hashes, f"{name} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for h in hashes), name


def test_the_lock_has_what_a_deployment_needs_and_not_foedus():
    locked, extras = lock(), project()["optional-dependencies"]
    needed = project()["dependencies"] + [r for extra in DEPLOYED for r in extras[extra]]
    for requirement in map(Requirement, needed):
        version, _ = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement
    assert "foedus" not in locked and "pytest" not in locked


def test_constraints_pin_what_pyproject_asks_for():
    pinned, extras = constraints(), project()["optional-dependencies"]
    asked = project()["dependencies"] + [r for extra in extras.values() for r in extra]
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name != "foedus":
            assert requirement.specifier.contains(pinned[name]), requirement


def test_no_index_is_named():
    for name in ("constraints.txt", "requirements.lock", "Makefile", "pyproject.toml"):
        # the links of the project are written at the end of pyproject.toml when it is released
        text = (ROOT / name).read_text().partition("\n[project.urls]\n")[0]
        assert not re.search(r"index-url|find-links|https?://", text), name


@pytest.mark.slow
def test_the_bill_of_materials_is_valid_and_names_what_is_installed(tmp_path):
    """The command of `make sbom`; the tool checks what it writes against CycloneDX's schema."""
    (command,) = re.findall(
        r"^\t\$\(BIN\)/cyclonedx-py (.*)$", (ROOT / "Makefile").read_text(), re.M
    )
    path = tmp_path / "bom.json"
    arguments = command.replace("$(BIN)/python", sys.executable)
    arguments = arguments.replace("$(ARGS)", "--validate").replace("sbom.json", str(path)).split()
    tool = Path(sys.executable).with_name("cyclonedx-py")
    subprocess.run([tool, *arguments], cwd=ROOT, check=True, timeout=900)
    bom = json.loads(path.read_text())
    assert bom["bomFormat"] == "CycloneDX"
    assert bom["metadata"]["component"]["name"] == "foedus"
    versions = {canonicalize_name(c["name"]): c["version"] for c in bom["components"]}
    pinned = constraints()
    for name in ("torch", "numpy", "flwr", "cryptography"):
        assert Version(Version(versions[name]).public) == pinned[name]
