"""Write into a distribution what the repository does not hold: the address of the project.

`make dist URL=https://...` unpacks the source distribution, calls this file on the copy, and builds
what is published from the copy:

    pyproject.toml   [project.urls], the links beside the description on a package index
    DESCRIPTION.md   the description: README.md, in which a relative link leads to
                     URL/blob/vVERSION/PATH, and a picture comes from URL/raw/vVERSION/PATH:
                     where GitHub has the files of the tag vVERSION
    CITATION.cff     repository-code

Without an address the copy is left as it is, and the links that stay relative are counted.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import tarfile
from pathlib import Path

_TARGET = re.compile(
    r"""^[ ]*(?P<fence>```|~~~).*?^[ ]*(?P=fence)[ ]*$   # code, in which nothing is a link
    | `[^`\n]+`
    | (?P<before>\]\( | \b(?:href|src|srcset)=" | ^\[[^\]]+\]:[ ]+)(?P<target>[^\s()"]+)
    """,
    re.M | re.S | re.X,
)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.I)
"""How a target begins that is an address already, or a heading of the same page."""
_PICTURES = (".gif", ".jpg", ".jpeg", ".png", ".svg", ".webp")


def relative_links(text: str) -> list[str]:
    """The targets in a page that are paths: of links and pictures, in Markdown and HTML."""
    targets = (found["target"] for found in _TARGET.finditer(text))
    return [target for target in targets if target and not _ELSEWHERE.match(target)]


def absolute(text: str, url: str, version: str) -> str:
    """A page of the top folder with addresses in the place of paths."""

    def replaced(found: re.Match) -> str:
        target = found["target"]
        if not target or _ELSEWHERE.match(target):
            return found.group()
        path, mark, anchor = target.partition("#")
        kind = "raw" if path.lower().endswith(_PICTURES) else "blob"
        return f"{found['before']}{url}/{kind}/v{version}/{posixpath.normpath(path)}{mark}{anchor}"

    return _TARGET.sub(replaced, text)


def urls(url: str, version: str) -> dict[str, str]:
    """The project's links on a package index."""
    files = f"{url}/blob/v{version}"
    return {
        "Homepage": url,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Source": url,
        "Issues": f"{url}/issues",
    }


def checked(url: str) -> str:
    """An address without the slash at its end; anything else than https://HOST/PATH is an error."""
    if not re.fullmatch(r"https://[\w.-]+(:\d+)?(/[\w.~-]+)+/?", url):
        raise ValueError(f"URL={url} must be the address of the project, https://HOST/PATH")
    return url.rstrip("/")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution; returns the one folder in it."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def write_address(folder: Path, url: str, version: str) -> None:
    """Write the address of the project into an unpacked source distribution."""
    description = absolute((folder / "README.md").read_text(), url, version)
    (folder / "DESCRIPTION.md").write_text(description)
    project = folder / "pyproject.toml"
    text, replaced = re.subn(
        r'^readme = "README.md"$', 'readme = "DESCRIPTION.md"', project.read_text(), flags=re.M
    )
    if replaced != 1 or "[project.urls]" in text:
        raise ValueError(f"{project} has an address already, or another description")
    links = "".join(f'{name} = "{there}"\n' for name, there in urls(url, version).items())
    project.write_text(f"{text}\n[project.urls]\n{links}")
    with (folder / "CITATION.cff").open("a") as file:
        file.write(f'repository-code: "{url}"\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, help="the source distribution, NAME-VERSION.tar.gz")
    parser.add_argument("folder", type=Path, help="where it is unpacked")
    parser.add_argument("--url", default="", help="the address of the project, https://HOST/PATH")
    given = parser.parse_args()
    version = given.archive.name.removesuffix(".tar.gz").rpartition("-")[2]
    try:
        url = given.url and checked(given.url)
    except ValueError as error:
        parser.error(str(error))
    folder = unpack(given.archive, given.folder)
    links = relative_links((folder / "README.md").read_text())
    if url:
        write_address(folder, url, version)
        print(f"{url}: written to the metadata and to {len(links)} links of the description")
    else:
        print(
            f"No URL: the metadata names no address, and {len(links)} links of the description "
            "stay relative, so that they lead nowhere on a package index "
            "(make dist URL=https://...)"
        )


if __name__ == "__main__":
    main()
