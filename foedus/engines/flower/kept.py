"""Client states of `fd.Flower`, stored beside a checkpoint, so that another process can resume the
run.

Nodes on loopback keep the states of their clients in a temporary folder, which goes with the
engine. A session with a checkpoint copies them to CHECKPOINT.sites (0700) whenever the checkpoint
is written: `7-65537.bin` is the state of client 7 after its answer of that version. Keys and states
of secure aggregation are never copied.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from foedus.base.tree import Tree
from foedus.engines.flower.session import FlowerSession
from foedus.errors import CheckpointError
from foedus.storage import checkpoint as files


class KeptSession(FlowerSession):
    """A session whose clients' states are files on this machine: `places[client]` is the folder."""

    def __init__(self, places: dict[int, Path], *about: Any):
        super().__init__(*about)
        self.places = places
        self.folder: Path | None = None
        self.copied: dict[int, int] = {}  # the version of each client that is in the folder
        self.referred: list[set[str]] = []  # the files of the last checkpoints

    def keep(self, folder: Path) -> None:
        self.folder = folder

    def save(self) -> Tree:
        saved = super().save()
        if self.folder is not None:
            states = {i: self.places[i] / f"{i}.bin" for i in self.seen}
            kept = {i: path for i, path in states.items() if path.is_file()}
            self._copy(kept)
            saved["sites"]["kept"] = sorted(kept)
        return saved

    def _copy(self, kept: dict[int, Path]) -> None:
        assert self.folder is not None
        if kept:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        for i, path in kept.items():
            if self.copied.get(i) != self.seen[i]:
                put(path, self._file(i))
                self.copied[i] = self.seen[i]
        names = {self._file(i).name for i in kept}
        if not self.referred or names != self.referred[-1]:
            # what this checkpoint, the newest on disk and the one before that refer to
            self.referred = [*self.referred[-2:], names]
        if len(self.referred) == 3:
            for path in self.folder.glob("*.bin"):
                if not any(path.name in names for names in self.referred):
                    path.unlink(missing_ok=True)

    def _file(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}-{self.seen[client]}.bin"

    def load(self, saved: Tree) -> None:
        super().load(saved)
        for i in saved["sites"].get("kept", []) if self.folder is not None else []:
            path = self._file(i)
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, which holds what client {i} remembers: the folder "
                    f"{path.parent.name} belongs to the checkpoint"
                )
            self.places[i].mkdir(mode=0o700, parents=True, exist_ok=True)
            put(path, self.places[i] / f"{i}.bin")


def put(source: Path, target: Path) -> None:
    """Put a file in the place of another atomically; files are never changed, so a link will do."""
    link = target.with_name(f".{target.name}.part")
    try:
        link.unlink(missing_ok=True)
        os.link(source, link)
        os.replace(link, target)
    except OSError:  # another file system, or one without links
        files.replace(target, [source.read_bytes()])
    finally:
        link.unlink(missing_ok=True)  # still there if both were one file
