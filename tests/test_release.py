"""What `make dist` writes into a distribution: the address of the project, and only there."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).parent.parent
URL = "https://example.org/lab/foedus"


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("[a](docs/x.md#y)", f"[a]({URL}/blob/v1.2/docs/x.md#y)"),
        ("[`code`](./S.md)", f"[`code`]({URL}/blob/v1.2/S.md)"),
        ("![p](docs/p.svg)", f"![p]({URL}/raw/v1.2/docs/p.svg)"),
        ("[![p](a.PNG)](b.md)", f"[![p]({URL}/raw/v1.2/a.PNG)]({URL}/blob/v1.2/b.md)"),
        ('<img src="a/b.png" alt="">', f'<img src="{URL}/raw/v1.2/a/b.png" alt="">'),
        ('<a href="docs">', f'<a href="{URL}/blob/v1.2/docs">'),
        ('[a](b.md "title")', f'[a]({URL}/blob/v1.2/b.md "title")'),
        ("[r]: docs/r.md\n", f"[r]: {URL}/blob/v1.2/docs/r.md\n"),
        ("[a](#heading) [b](https://x.y/z) [c](mailto:d@e.f) [g](//h.i)", None),
        ("`[a](b.md)` and `x[0](y)`", None),
        ('```python\nx[0](y)\nhref="z"\n```\n', None),
        ("- item\n\n  ```\n  [a](b.md)\n  ```\n", None),
    ],
)
def test_links(text, due):
    assert release.absolute(text, URL, "1.2") == (text if due is None else due)
    assert bool(release.relative_links(text)) == (due is not None)


def test_every_link_of_the_readme_leads_to_a_file():
    text = (ROOT / "README.md").read_text()
    before = release.relative_links(text)
    after = release.absolute(text, URL, "1.2")
    assert before and not release.relative_links(after)
    paths = re.findall(rf"{re.escape(URL)}/(?:blob|raw)/v1\.2/([^\s#)\"]+)", after)
    assert len(paths) == len(before)
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "url", ["example.org/a", "http://example.org/a", "https://example.org", 'https://e.org/a"b', ""]
)
def test_what_is_no_address_of_a_project(url):
    with pytest.raises(ValueError, match="must be the address of the project"):
        release.checked(url)
    assert release.checked("https://example.org/a/b/") == "https://example.org/a/b"


def test_an_address_that_cannot_be_used_ends_before_anything_is_unpacked(archive):
    command = [sys.executable, "-m", "tools.release", archive, archive.parent / "copy"]
    command += ["--url", "example.org"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "URL=example.org must be" in done.stderr
    assert not (archive.parent / "copy").exists()


@pytest.fixture
def archive(tmp_path) -> Path:
    """As much of a source distribution as its metadata depends on."""
    path = tmp_path / "foedus-1.2.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("README.md", "CITATION.cff", "LICENSE"):
            tar.add(ROOT / name, f"foedus-1.2/{name}")
        project = (ROOT / "pyproject.toml").read_text().partition("\n[project.urls]\n")[0]
        project = project.replace('"DESCRIPTION.md"', '"README.md"')
        made = {"pyproject.toml": project, "foedus/version.py": '__version__ = "1.2"\n'}
        for name, text in made.items():
            member = tarfile.TarInfo(f"foedus-1.2/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def written(archive: Path, *words: str) -> tuple[Path, str]:
    command = [sys.executable, "-m", "tools.release", archive, archive.parent / "copy", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return archive.parent / "copy" / "foedus-1.2", done.stdout


def test_without_an_address_nothing_is_written(archive):
    copy, said = written(archive, "--url", "")
    with tarfile.open(archive) as tar:
        for member in tar:
            held = tar.extractfile(member)
            assert held and (copy.parent / member.name).read_bytes() == held.read()
    assert not (copy / "DESCRIPTION.md").exists()
    count = len(release.relative_links((ROOT / "README.md").read_text()))
    assert f"{count} links of the description stay relative" in said


def test_the_metadata_and_the_description_have_the_address(archive):
    """What pip and package indexes show, as the build backend makes it."""
    copy, said = written(archive, "--url", f"{URL}/")
    assert said.startswith(f"{URL}: written to the metadata and to ")
    (copy / "out").mkdir()
    code = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('out')"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (path,) = copy.glob("out/*.dist-info/METADATA")
    metadata = Parser().parsestr(path.read_text())
    files = f"{URL}/blob/v1.2"
    assert dict(line.split(", ") for line in metadata.get_all("Project-URL")) == {
        "Homepage": URL,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Source": URL,
        "Issues": f"{URL}/issues",
    }
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "OS Independent" not in str(metadata.get_all("Classifier"))
    assert not release.relative_links(metadata.get_payload())
    assert f'repository-code: "{URL}"\n' in (copy / "CITATION.cff").read_text()
    assert (copy / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()
    with pytest.raises(ValueError, match="has an address already"):
        release.write_address(copy, URL, "1.2")


def test_the_citation_and_the_metadata_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r'"(.*)"', (ROOT / "foedus/version.py").read_text())
    assert version and f"\nversion: {version[1]}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    for author in project["authors"]:
        assert f'  - name: "{author["name"]}"\n' in citation
    for keyword in project["keywords"]:
        assert f"  - {keyword}\n" in citation
    assert re.search(rf"^## {re.escape(version[1])} \(", (ROOT / "CHANGELOG.md").read_text(), re.M)
    links = project.get("urls")  # written by make dist
    assert links is None or links == release.urls(links["Homepage"], version[1])


@pytest.mark.slow
def test_a_source_distribution_holds_what_is_in_the_repository(tmp_path):
    """All files that git tracks, but for those of continuous integration and of git itself."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    clone = tmp_path / "clone"
    for name in listed.splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path]
    subprocess.run([*command, clone], check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as tar:
        held = {member.name.partition("/")[2] for member in tar}
    left_out = {name for name in listed.splitlines() if name not in held}
    assert left_out <= {".gitignore", ".ci/run"}
