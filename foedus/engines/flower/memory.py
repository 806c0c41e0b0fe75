"""Client states of a site between messages, each of which is a new process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context

from foedus import wire
from foedus.errors import FoedusError
from foedus.storage import checkpoint as files


class Memory:
    """Client states by version: all of this round, the last of each of the two rounds before."""

    def __init__(self, context: Context, session: str, cache: Path | None):
        self.records, self.session = context.state.config_records, session
        self.folder = cache / "states" if cache else None

    def _record(self, client: int) -> dict[str, Any]:
        """The record of a client in this run: Flower's, or the one on disk; an empty one if there
        is neither.
        """
        record = self.records.get(f"client-{client}")
        if record is not None and record["session"] == self.session:
            return dict(record)
        path = self.folder / f"{client}.bin" if self.folder else None
        if path is not None and path.is_file():
            with contextlib.suppress(FoedusError, KeyError, TypeError):
                record = wire.decode(path.read_bytes())
                if record["session"] == self.session:
                    states = [bytes(s.numpy()) for s in record["states"]]
                    return {
                        "session": self.session,
                        "versions": list(record["versions"]),
                        "states": states,
                    }
        return {"session": self.session, "versions": [], "states": []}

    def recall(self, client: int, version: int) -> Any:
        """The state of a client as it was after that exchange; `None` if it is not here."""
        record = self._record(client)
        if version not in record["versions"]:
            return None
        return wire.decode(record["states"][record["versions"].index(version)])

    def keep(self, client: int, state: Any, version: int, seen: int) -> None:
        """Keep a new state under the version of the exchange that made it.

        Of the rounds before, the one that the server has seen (`seen`) is kept, and that of a round
        before it, for a server that has to go back to its checkpoint before the last; of this
        round, all that came before.
        """
        old = self._record(client)
        pairs = [(v, s) for v, s in zip(old["versions"], old["states"], strict=True) if v < version]
        if seen >> 16 < version >> 16:
            further = max((v for v, _ in pairs if v >> 16 < seen >> 16), default=seen)
            pairs = [(v, s) for v, s in pairs if v in (seen, further)]
        pairs.append((version, wire.encode(state)))
        record: dict[str, Any] = {
            "session": self.session,
            "versions": [v for v, _ in pairs],
            "states": [s for _, s in pairs],
        }
        self.records[f"client-{client}"] = ConfigRecord(record)
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            as_tensors = [
                torch.from_numpy(np.frombuffer(s, np.uint8).copy()) for s in record["states"]
            ]
            files.replace(
                self.folder / f"{client}.bin", [wire.encode({**record, "states": as_tensors})]
            )
