"""Trees on disk: safetensors for the numbers, JSON for their form. Loading one never executes code.

The header of a file holds a CRC-32 of the whole file, which detects bytes that a disk or a copy has
changed. It protects against accidents, not attackers: they can also write a new checksum.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foedus.base import tree
from foedus.errors import CheckpointError
from foedus.storage.history_file import Earlier

VERSION = 2  # 1 had no checksum, and is still read
# quotes within names and texts are escaped, so the field is unique
_FIELD, _DIGITS = b'"crc32":"', b"00000000"
_UNFINISHED = ".part"
_MALFORMED = (KeyError, ValueError, TypeError, AttributeError, RecursionError)


class Damaged(CheckpointError):  # noqa: N818 - a readable name
    """A file that is missing or incomplete."""


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
    assert at is not None  # the header contains the digits
    replace(path, (view[:at], b"%08x" % zlib.crc32(data), view[at + len(_DIGITS) :]), previous)


def _place(data: bytes | mmap.mmap) -> int | None:
    """The position of the checksum's digits in a file: in its header, whose length comes first."""
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
        os.chmod(
            temporary, 0o666 & ~_umask()
        )  # permissions of a new file; those of mkstemp are private
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
    except OSError:  # a file system without links: briefly, only the previous file exists
        os.replace(path, previous)
    else:
        os.replace(link, previous)


def sweep(path: Path) -> None:
    """Remove incomplete files that a killed process has left beside a file."""
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


def sites_of(path: Path) -> Path:
    """The folder for the files of clients that belong to a checkpoint."""
    return path.with_name(f"{path.name}.sites")


def previous_of(path: Path) -> Path:
    """The path of the checkpoint before this one."""
    return path.with_name(f"{path.name}.previous")


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
    """Whether a checkpoint or the one before it exists."""
    return path.exists() or previous_of(path).exists()


def newest(path: Path) -> tuple[Path, dict[str, tree.Tree], dict[str, Any], str | None]:
    """The file from which a run can be resumed, its trees and meta, and a note if it is an older
    one.

    It is `path`, or, if that or its history is damaged or missing, the one before it; a damaged
    file is moved aside, so that it never replaces an intact one.
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
