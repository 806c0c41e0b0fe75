"""Trees on disk: safetensors for the numbers, JSON for their form. Loading one never executes code.

The header of a file holds a CRC-32 of all of it, so that bytes that a disk or a copy has changed
are noticed. That is against accidents; who can write to the file can also write another checksum.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foedus.base import tree
from foedus.errors import CheckpointError

VERSION = 2  # 1 had no checksum, and is still read
# quotes within names and texts are escaped, so the field stands alone
_FIELD, _DIGITS = b'"crc32":"', b"00000000"
_UNFINISHED = ".part"
_MALFORMED = (KeyError, ValueError, TypeError, AttributeError, RecursionError)


class Damaged(CheckpointError):  # noqa: N818 - says it all
    """A file that is missing or not whole."""


def write(
    path: str | os.PathLike,
    trees: dict[str, tree.Tree],
    meta: dict[str, Any],
    previous: Path | None = None,
) -> None:
    """Write named trees and JSON-able `meta` to one file, atomically.

    previous: where the old file is kept.
    """
    from safetensors.torch import save

    forms, tensors = {}, {}
    for name, t in trees.items():
        form, flat = tree.dissolve(t)
        forms[name] = form
        # safetensors refuses tensors that share memory, and keeps only contiguous ones.
        tensors.update({f"{name}/{k}": v.detach().contiguous().clone() for k, v in flat.items()})
    text = json.dumps({"version": VERSION, "forms": forms, "meta": meta}, allow_nan=True)
    header = {"foedus": text, "crc32": _DIGITS.decode()}
    data = save(tensors or {"empty": torch.zeros(0)}, metadata=header)
    at, view = _place(data), memoryview(data)
    assert at is not None  # the header has the digits
    replace(path, (view[:at], b"%08x" % zlib.crc32(data), view[at + len(_DIGITS) :]), previous)


def _place(data: bytes | mmap.mmap) -> int | None:
    """Where in a file the digits of the checksum are: in its header, whose length comes first."""
    at = data.find(_FIELD, 8, min(8 + int.from_bytes(data[:8], "little"), len(data)))
    return None if at < 0 else at + len(_FIELD)


def replace(path: str | os.PathLike, chunks: Iterable[Any], previous: Path | None = None) -> None:
    """Put a file in the place of another atomically, with the old one kept as `previous`."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(_UNFINISHED, f".{path.name}.", path.parent)
        with os.fdopen(handle, "wb") as f:
            for chunk in chunks:
                f.write(chunk)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # as any other new file; mkstemp's are private
        if previous is not None and path.exists():
            _keep(path, previous)
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)  # gone already, unless something failed


def _keep(path: Path, previous: Path) -> None:
    link = previous.with_name(f".{previous.name}.{os.getpid()}{_UNFINISHED}")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links: for an instant there is only the previous one
        os.replace(path, previous)
    else:
        os.replace(link, previous)


def sweep(path: Path) -> None:
    """Remove what a process that was killed has left half written beside a file."""
    for left in path.parent.glob(f".{path.name}.*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            left.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: str | os.PathLike) -> tuple[dict[str, tree.Tree], dict[str, Any]]:
    """The trees and the meta of a file that `write` made."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise Damaged(f"{path}: there is no such file")
    try:
        checked = _checked(path)
        with safe_open(path, framework="pt") as f:
            header = json.loads((f.metadata() or {})["foedus"])
            version, forms, meta = (header[k] for k in ("version", "forms", "meta"))
            if version not in (1, VERSION):
                raise CheckpointError(
                    f"{path} has version {version!r}; this foedus reads version {VERSION}"
                )
            if version == VERSION and not checked:
                raise Damaged(f"{path} is damaged: its checksum is gone")
            # copied: a file's tensors are not aligned in memory, and some products then round
            # differently
            tensors: dict[str, dict[str, Tensor]] = {name: {} for name in forms}
            for key in f.keys():  # noqa: SIM118 - not a dict
                name, _, path_inside = key.partition("/")
                tensors.setdefault(name, {})[path_inside] = f.get_tensor(key).clone()
        trees = {name: tree.restore(form, tensors[name]) for name, form in forms.items()}
        return trees, dict(meta)
    except CheckpointError:
        raise
    except (*_MALFORMED, SafetensorError, OSError) as error:
        raise Damaged(f"{path} is not a foedus file, or it is damaged: {error}") from error


def _checked(path: Path) -> bool:
    """Whether a file has a checksum; an error if it is not that of the file."""
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = _place(data)
        if at is None:
            return False
        with memoryview(data) as view:
            end = at + len(_DIGITS)
            crc = zlib.crc32(view[end:], zlib.crc32(_DIGITS, zlib.crc32(view[:at])))
            if view[at:end] != b"%08x" % crc:
                raise Damaged(f"{path} is damaged: its checksum does not match")
    return True


# -- the checkpoint of a run and the one before it -------------------------------------------------


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold the checkpoint at `path`, if there is one; raise if another run, here or in another
    process, holds it.

    The lock is the operating system's, on a file beside the checkpoint: it ends with its process,
    however that ends.
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
    """Lock a file; how to release it, or `None` if somebody else holds it."""
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
        path.unlink(missing_ok=True)  # while it is locked: whoever has opened it will see that
        os.close(handle)

    return release


def sites_of(path: Path) -> Path:
    """Where an engine whose clients keep files may keep those that belong to a checkpoint."""
    return path.with_name(f"{path.name}.sites")


def previous_of(path: Path) -> Path:
    """Where the checkpoint before this one is."""
    return path.with_name(f"{path.name}.previous")


KEPT = 64
"""A checkpoint holds fewer rows of the history than this; those before are in a file beside it."""


class Earlier:
    """The earlier rows of a run's history, in a file beside its checkpoint that is only added to.

    A checkpoint says how many rows and bytes of the file are its own, and their CRC-32. What lies
    behind them was written for a checkpoint that was never finished, or for one that is damaged,
    and is overwritten. So a file serves the checkpoint and the one before it, at every instant.
    """

    def __init__(self, checkpoint: Path, rows: int = 0, size: int = 0, crc32: int = 0):
        self.path = checkpoint.with_name(f"{checkpoint.name}.history")
        self.rows, self.size, self.crc32 = rows, size, crc32

    def save(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint holds of all rows of a history: the latest, and where the others are.

        The last row always is among the latest: it may change when the run goes on.
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
            os.fsync(handle)  # before the checkpoint that counts on it
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, self.size)
            raise

    def read(self) -> list[dict[str, Any]]:
        """The rows, if the file is what it was."""
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


def _resumable(file: Path, checkpoint: Path) -> tuple[dict[str, tree.Tree], dict[str, Any]]:
    """The trees and the meta of a checkpoint, or of the one before it, with all rows of its
    history; `meta["earlier"]` says how many of them are in the file beside it.
    """
    trees, meta = read(file)
    meta["earlier"], history = {}, meta.get("history")
    if isinstance(history, dict):  # it used to be all rows
        try:
            earlier = Earlier(checkpoint, **history["earlier"])
            rows = [*earlier.read(), *history["latest"]]
        except (*_MALFORMED, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            beside = Earlier(checkpoint).path
            raise Damaged(f"{beside} is damaged ({why}), so {file.name} cannot be used") from error
        meta |= {"history": rows, "earlier": history["earlier"]}
    return trees, meta


def exists(path: Path) -> bool:
    """Whether there is a checkpoint, or the one before it."""
    return path.exists() or previous_of(path).exists()


def newest(path: Path) -> tuple[Path, dict[str, tree.Tree], dict[str, Any], str | None]:
    """The file that a run can go on from, its trees and meta, and a note if it is an older one.

    That is `path`, or if it or its history is damaged or missing, the one before it; a damaged one
    is moved aside, so that it never takes the place of a good one.
    """
    previous = previous_of(path)
    try:
        return path, *_resumable(path, path), None
    except Damaged as error:
        if not previous.is_file():
            raise
        try:
            trees, meta = _resumable(previous, path)
        except CheckpointError as second:
            raise CheckpointError(
                f"{error}; nor can the one before it be used: {second}; remove both to begin again"
            ) from second
        aside = ""
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.damaged"))
            aside = f" (now {path.name}.damaged)"
        older = f"{previous.name} of round {meta.get('rounds_done')}"
        note = f"{error}{aside}; the run goes on from the checkpoint before it, {older}"
        return previous, trees, meta, note
