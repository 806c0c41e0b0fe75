"""Downloads of data sets, with progress and checksums."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foedus.errors import DataError

SPEECHES = "shakespeare_by_speaker.json.gz"


def cache_dir() -> Path:
    """The folder of downloaded sets."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "foedus"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "foedus" / "cache"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "foedus"


# Download


@dataclass(frozen=True)
class Source:
    """One file of a set at its home, with the MD5 that is published for it, if there is one."""

    url: str
    md5: str | None = None
    keep: bool = False  # an archive of several sets stays in the cache
    former: str | None = None  # where the home had the same file before it moved it


_TIMEOUT = 30  # seconds without an answer


def file_name(name: str) -> str:
    return SPEECHES if name == "shakespeare" else f"{name}.npz"


def download(source: Source, folder: Path) -> tuple[Path, str]:
    """Fetch one file and check it; a file that fails the check is never kept. Also its SHA-256."""
    file = source.url.rsplit("/", 1)[-1]
    kept = cache_dir() / "downloads" / file
    if source.keep and kept.exists():
        digests = _digests(kept)
        _check(source, *digests)
        return kept, digests[1]
    target = folder / file
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with _answer(source) as answer, target.open("wb") as out:
        size = int(answer.headers.get("Content-Length") or 0)
        received = 0
        with _Progress(file, size) as advance:
            while chunk := answer.read(1 << 18):
                out.write(chunk)
                md5.update(chunk)
                sha256.update(chunk)
                received += len(chunk)
                advance(len(chunk))
    if size and received != size:
        raise OSError(f"{source.url} ended after {received} of {size} bytes")
    _check(source, md5.hexdigest(), sha256.hexdigest())
    if source.keep:
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(target, kept)
        target = kept
    return target, sha256.hexdigest()


def _answer(source: Source) -> http.client.HTTPResponse:
    """The answer for a file, from where it is or where it was."""

    def ask(url: str) -> http.client.HTTPResponse:
        return urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "foedus"}), timeout=_TIMEOUT)

    try:
        return ask(source.url)
    except urllib.error.HTTPError as error:
        if source.former is None or error.code not in (404, 410):
            raise
    return ask(source.former)


def _digests(path: Path) -> tuple[str, str]:
    with path.open("rb") as file:
        md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        file.seek(0)
        return md5, hashlib.file_digest(file, "sha256").hexdigest()


def _check(source: Source, md5: str, sha256: str) -> None:
    """Compare with the published MD5; where none is published, with the SHA-256 of the first download."""
    if source.md5 is not None:
        if md5 != source.md5:
            raise DataError(
                f"{source.url}: MD5 is {md5}, but {source.md5} is published; the file is damaged or was changed, "
                "so it was not kept. Try again later"
            )
        return
    record, known = _recorded()
    first = known.get(source.url, sha256)
    if first != sha256:
        raise DataError(
            f"{source.url}: SHA-256 is {sha256}, but the first download had {first}; the file is damaged or was changed. "
            f"If its publisher changed it, remove its line from {record} and load again"
        )


def record_digest(source: Source, sha256: str) -> None:
    """Record the SHA-256 of a first download, where no MD5 is published."""
    if source.md5 is not None:
        return
    record, known = _recorded()
    if source.url not in known:
        with tempfile.NamedTemporaryFile("w", dir=record.parent, prefix=".checksums-", delete=False) as draft:
            json.dump({**known, source.url: sha256}, draft, indent=1, sort_keys=True)
        os.replace(draft.name, record)


def _recorded() -> tuple[Path, dict[str, str]]:
    """The file of checksums of first downloads, and what it holds."""
    record = cache_dir() / "checksums.json"
    try:
        known = json.loads(record.read_text()) if record.exists() else {}
    except ValueError:
        known = None
    if not isinstance(known, dict):
        raise DataError(f"{record} is damaged: not a JSON object of checksums; remove it to record them anew")
    return record, known


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, file: str, size: int):
        self.file, self.size, self.bar = file, size, None

    def __enter__(self) -> Callable[[int], None]:
        if not sys.stderr.isatty():
            return lambda count: None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.bar.start()
        task = self.bar.add_task(self.file, total=self.size or None)
        return lambda count: self.bar.advance(task, count)

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.stop()
