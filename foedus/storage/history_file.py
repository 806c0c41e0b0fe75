"""The earlier rows of a run's history, beside its checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

from foedus.errors import CheckpointError

KEPT = 64
"""A checkpoint holds fewer rows of the history than this; earlier rows are in a file beside it."""


class Earlier:
    """The earlier rows of a run's history, in an append-only file beside its checkpoint.

    A checkpoint records how many rows and bytes of the file belong to it, and their CRC-32. Later
    bytes were written for a checkpoint that was never finished, or is damaged, and are overwritten.
    So the file is valid for the checkpoint and the one before it at every moment.
    """

    def __init__(self, checkpoint: Path, rows: int = 0, size: int = 0, crc32: int = 0):
        self.path = checkpoint.with_name(f"{checkpoint.name}.history")
        self.rows, self.size, self.crc32 = rows, size, crc32

    def save(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The part of a history in a checkpoint: the latest rows, and the position of the others.

        The last row is always among the latest: it may change when the run continues.
        """
        latest = rows[self.rows :]
        if len(latest) >= KEPT:
            self._add(latest[:-1])
            latest = latest[-1:]
        earlier = {"rows": self.rows, "size": self.size, "crc32": self.crc32}
        return {"earlier": earlier, "latest": latest}

    def _add(self, rows: list[dict[str, Any]]) -> None:
        text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if os.fstat(handle).st_size < self.size:
                    raise OSError("it has become shorter, or was removed")
                self._write(handle, text)
            finally:
                os.close(handle)
        except OSError as error:
            why = error.strerror or error
            raise CheckpointError(f"{self.path} cannot be written: {why}") from error
        self.rows, self.size = self.rows + len(rows), self.size + len(text)
        self.crc32 = zlib.crc32(text, self.crc32)

    def _write(self, handle: int, text: bytes) -> None:
        try:
            at, left = self.size, memoryview(text)
            while left:
                done = os.pwrite(handle, left, at)
                at, left = at + done, left[done:]
            os.ftruncate(handle, at)
            os.fsync(handle)  # before the checkpoint that refers to it
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, self.size)
            raise

    def read(self) -> list[dict[str, Any]]:
        """The rows; raises if the file has changed."""
        data = b""
        if self.size:
            with open(self.path, "rb") as f:
                data = f.read(self.size)
        if len(data) < self.size or zlib.crc32(data) != self.crc32:
            raise ValueError("its checksum does not match")
        rows = [json.loads(line) for line in data.splitlines()]
        if len(rows) != self.rows:
            raise ValueError(f"it holds {len(rows)} rows, not {self.rows}")
        return rows
