"""The log of a site: who asked what, what was answered or refused, and why.

One JSON object a line, appended and never rewritten. Each line has the SHA-256 of the line before
it, so that a line that was changed or taken out afterwards is found (`read`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from foedus.errors import CheckpointError

_START = "0" * 64


def append(path: Path, **entry: Any) -> None:
    """Add a line. The file and its folder are for this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(f"{path}.lock", mode=0o600):
        before = _last(path)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, **entry, "before": before}, ensure_ascii=False) + "\n"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            left = memoryview(line.encode())
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)


def _last(path: Path) -> str:
    """The hash of the last line."""
    if not path.is_file() or not path.stat().st_size:
        return _START
    with path.open("rb") as file:
        size, block = file.seek(0, os.SEEK_END), 1 << 16
        file.seek(max(0, size - block))
        tail = file.read()
        while tail.count(b"\n") < 2 and len(tail) < size:
            block *= 4
            file.seek(max(0, size - block))
            tail = file.read()
    return _hash(tail.rstrip(b"\n").rpartition(b"\n")[2])


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The entries, oldest first.

    Raises CheckpointError at the first line that does not follow from the one before it.
    """
    before = _START
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                fits = isinstance(entry, dict) and entry.pop("before", None) == before
            except ValueError:
                fits = False
            if not fits:
                raise CheckpointError(
                    f"{path.name}, line {number}: does not follow from the line before it; the log "
                    "was changed here, or cut short by a crash"
                )
            before = _hash(line.rstrip(b"\n"))
            yield entry
