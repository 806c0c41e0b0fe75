"""Trees on disk: safetensors for the numbers, JSON for their form. Loading one never executes code."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foedus.core import tree
from foedus.errors import CheckpointError

VERSION = 1


def write(path: str | os.PathLike, trees: dict[str, tree.Tree], meta: dict[str, Any]) -> None:
    """Write named trees and JSON-able `meta` to one file, atomically: a reader sees the old file or the new one, whole."""
    from safetensors.torch import save

    forms, tensors = {}, {}
    for name, t in trees.items():
        form, flat = tree.dissolve(t)
        forms[name] = form
        # safetensors refuses tensors that share memory, and keeps only contiguous ones.
        tensors.update({f"{name}/{k}": v.detach().contiguous().clone() for k, v in flat.items()})
    header = {"foedus": json.dumps({"version": VERSION, "forms": forms, "meta": meta}, allow_nan=True)}
    data = save(tensors or {"empty": torch.zeros(0)}, metadata=header)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # as any other new file; mkstemp's are private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: str | os.PathLike) -> tuple[dict[str, tree.Tree], dict[str, Any]]:
    """The trees and the meta of a file that `write` made."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as f:
            header = json.loads((f.metadata() or {})["foedus"])
            # Copied, because tensors lie in a file at any address, and some products round differently where memory is not aligned.
            tensors: dict[str, Tensor] = {k: f.get_tensor(k).clone() for k in f.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a foedus file, or it is damaged: {error}") from error
    if header.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {header.get('version')!r}; this foedus reads version {VERSION}")
    trees = {
        name: tree.restore(form, {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")})
        for name, form in header["forms"].items()
    }
    return trees, header["meta"]
