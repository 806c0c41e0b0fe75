"""The log of a site: who asked what, what was answered or refused, and why.

One JSON object a line, appended and never rewritten. Each line has the SHA-256 of the line before
it, so a line that was changed or removed later is detected (`read`). A line that was truncated,
because the process was killed while it wrote, stays as it is, and the next line records that.
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
    """Add a line. The file and its folder are readable by this user only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(f"{path}.lock", mode=0o600):
        before, cut = _last(path)
        if cut:
            entry["after_cut"] = True
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, **entry, "before": before}, ensure_ascii=False) + "\n"
        line = "\n" * cut + line
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            left = memoryview(line.encode())
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)


def _last(path: Path) -> tuple[str, bool]:
    """The hash of the last line, and whether its end is missing."""
    if not path.is_file() or not path.stat().st_size:
        return _START, False
    with path.open("rb") as file:
        size, block = file.seek(0, os.SEEK_END), 1 << 16
        file.seek(max(0, size - block))
        tail = file.read()
        while tail.count(b"\n") < 2 and len(tail) < size:
            block *= 4
            file.seek(max(0, size - block))
            tail = file.read()
    return _hash(tail.removesuffix(b"\n").rpartition(b"\n")[2]), not tail.endswith(b"\n")


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The entries, oldest first; a truncated line as `{"cut": its text}`.

    Raises CheckpointError at the first line that does not follow from the one before it.
    """
    before, cut = _START, None  # an invalid line, until the next one records that it was truncated
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            entry = _entry(line)
            if cut is not None:
                if entry is None or not entry.get("after_cut"):
                    raise _broken(path, number - 1)
                yield {"cut": cut.decode(errors="replace")}
            if entry is None:
                cut = line.removesuffix(b"\n")
            elif entry.pop("before", None) == before:
                cut = None
                yield entry
            else:
                raise _broken(path, number)
            before = _hash(line.removesuffix(b"\n"))
    if cut is not None:
        if line.endswith(b"\n"):
            raise _broken(path, number)
        yield {"cut": cut.decode(errors="replace")}


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _broken(path: Path, number: int) -> CheckpointError:
    return CheckpointError(
        f"{path.name}, line {number}: does not follow from the line before it; the log was changed "
        "here"
    )
