"""One run at a time: locks of the operating system on files."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from foedus.errors import CheckpointError


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold the checkpoint at `path`, if there is one; raise if another run, here or in another
    process, holds it.

    The lock is the operating system's, on a file beside the checkpoint: it ends with its process,
    even if that is killed.
    """
    if path is None:
        yield
        return
    beside = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        release = lock(beside)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    if release is None:
        raise CheckpointError(
            f"{path} is in use by another run, which holds {beside.name}: wait until it has ended "
            "or end it, or give this run another checkpoint"
        )
    try:
        yield
    finally:
        release()


def lock(path: Path) -> Callable[[], None] | None:
    """Lock a file; returns a function that releases it, or `None` if another process holds it."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file that is open cannot be removed
        from filelock import FileLock, Timeout

        other = FileLock(path)
        try:
            other.acquire(timeout=0)
        except Timeout:
            return None
        return other.release
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:  # a file system without locks
            warnings.warn(
                f"{path} cannot be locked ({error.strerror}): make sure that no other run uses "
                "this checkpoint",
                stacklevel=4,
            )
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)  # its holder has removed it since it was opened: lock the next one

    def release() -> None:
        path.unlink(missing_ok=True)  # while it is locked: a process that has opened it will notice
        os.close(handle)

    return release
