"""Downloads of data sets, with progress and checksums."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foedus.errors import DataError

SPEECHES = "shakespeare_by_speaker.json.gz"


def cache_dir() -> Path:
    """The folder of downloaded sets."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "foedus"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "foedus" / "cache"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "foedus"


@dataclass(frozen=True)
class Source:
    """One file of a set at its source, with its published MD5, if there is one."""

    url: str
    md5: str | None = None
    keep: bool = False  # an archive of several sets stays in the cache
    former: str | None = None  # the former address of the file


_TIMEOUT = 30  # seconds without an answer


def file_name(name: str) -> str:
    return SPEECHES if name == "shakespeare" else f"{name}.npz"


def download(source: Source, folder: Path) -> tuple[Path, str]:
    """Fetch one file and check it; returns its path and its SHA-256.

    A file that fails the check is never kept.
    """
    file = source.url.rsplit("/", 1)[-1]
    kept = cache_dir() / "downloads" / file
    if source.keep and kept.exists():
        return kept, _check(source, kept)
    target = folder / file
    _retrieve(source, target)
    sha256 = _check(source, target)
    if source.keep:
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(target, kept)
        target = kept
    return target, sha256


def _retrieve(source: Source, target: Path) -> None:
    """Fetch a file from its present address or, if it has gone, from its former one.

    A truncated answer is an error of urllib3's.
    """
    from pooch import HTTPDownloader
    from requests import HTTPError

    # Without content encoding: checksums are those of the files.
    headers = {"User-Agent": "foedus", "Accept-Encoding": "identity"}
    bar = _Bar(target.name) if sys.stderr.isatty() else None
    fetch = HTTPDownloader(
        progressbar=bar or False, chunk_size=1 << 18, timeout=_TIMEOUT, headers=headers
    )
    try:
        for url in filter(None, (source.url, source.former)):
            try:
                return fetch(url, str(target), None)
            except HTTPError as error:
                failed = error
                if error.response is None or error.response.status_code not in (404, 410):
                    break
        raise failed
    finally:
        if bar is not None:
            bar.close()


def _check(source: Source, path: Path) -> str:
    """Compare with the published MD5, or with the first download's SHA-256; returns the SHA-256."""
    from pooch import file_hash

    sha256 = file_hash(str(path), alg="sha256")
    if source.md5 is not None:
        if (md5 := file_hash(str(path), alg="md5")) != source.md5:
            raise DataError(
                f"{source.url}: MD5 is {md5}, but {source.md5} is published; the file is damaged "
                "or was changed, so it was not kept. Try again later"
            )
        return sha256
    record, known = _recorded()
    first = known.get(source.url, sha256)
    if first != sha256:
        raise DataError(
            f"{source.url}: SHA-256 is {sha256}, but the first download had {first}; the file is "
            "damaged or was changed. "
            f"If its publisher changed it, remove its line from {record} and load again"
        )
    return sha256


def record_digest(source: Source, sha256: str) -> None:
    """Record the SHA-256 of a first download, where no MD5 is published."""
    if source.md5 is not None:
        return
    record, known = _recorded()
    if source.url not in known:
        options: dict[str, Any] = {"dir": record.parent, "prefix": ".checksums-"}
        with tempfile.NamedTemporaryFile("w", delete=False, **options) as draft:
            json.dump({**known, source.url: sha256}, draft, indent=1, sort_keys=True)
        os.replace(draft.name, record)


def _recorded() -> tuple[Path, dict[str, str]]:
    """The file of checksums of first downloads, and its content."""
    record = cache_dir() / "checksums.json"
    try:
        known = json.loads(record.read_text()) if record.exists() else {}
    except ValueError:
        known = None
    if not isinstance(known, dict):
        raise DataError(
            f"{record} is damaged: not a JSON object of checksums; remove it to record them anew"
        )
    return record, known


class _Bar:
    """A progress bar of rich with the interface that pooch expects.

    pooch sets `total` and calls the methods.
    """

    total = 0

    def __init__(self, file: str):
        from rich import progress
        from rich.console import Console

        text, bar = progress.TextColumn("{task.description}"), progress.BarColumn()
        speed = (progress.DownloadColumn(), progress.TransferSpeedColumn())
        console = Console(stderr=True)
        self.bar = progress.Progress(text, bar, *speed, console=console, transient=True)
        self.task = self.bar.add_task(file, total=None)

    def update(self, count: int) -> None:
        self.bar.start()
        self.bar.update(self.task, advance=count, total=self.total or None)

    def reset(self) -> None:
        self.bar.reset(self.task)

    def close(self) -> None:
        self.bar.stop()
