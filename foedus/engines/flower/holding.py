"""The rows of a node, values prepared from them, and scores of a model on them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from foedus.core.algorithm import Algorithm
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.engines.flower.questions import Question
from foedus.engines.flower.score import scored
from foedus.engines.flower.site import Site, read_shard, read_site
from foedus.engines.local import LocalSession
from foedus.errors import CheckpointError, ConfigError, ReplyError
from foedus.storage import checkpoint as files
from foedus.version import __version__

_PREPARED = 8
"""The number of files to keep: one for each seed of a server."""


class Holding:
    """The rows of this node: of one site, or of some clients of a simulation."""

    def __init__(self, question: Question, config: dict[str, Any]):
        self.question, self.config = question, config
        self.shards = Path(config["shards"]) if "shards" in config else None
        self.site: Site | None = None
        if self.shards is not None:
            if question.shard is None:
                raise ConfigError("the server sends no shard: this node has clients of simulations")
            return
        if question.schema is None:
            raise ConfigError("the server sends no schema: sites with files of their own need one")
        if question.shard is not None:
            raise ConfigError(f"shard={question.shard!r}: this site has a file of its own")
        self.site = read_site(config, question.schema)

    @property
    def cache(self) -> Path | None:
        """Where this node may keep what must outlive a process."""
        if "cache" in self.config:
            return Path(str(self.config["cache"]))
        return self.shards / "cache" if self.shards else None

    def federation(self) -> Federation:
        if self.site is None:
            assert self.shards is not None and self.question.shard is not None
            return read_shard(self.shards, self.question.shard)
        if self.question.preprocess is None:
            raise ConfigError("the server sends no preprocessing of the columns")
        return self.site.federation(self.question.preprocess)

    def raw(self) -> Federation:
        """The rows before any preprocessing."""
        return self.federation() if self.site is None else self.site.federation()

    def tested(self) -> Federation:
        """The test rows, in place of training rows."""
        fed = self.federation()
        data, offsets = fed.data, fed.test_offsets
        if not len(fed.test_rows) or (np.diff(offsets) == 0).any():
            raise ReplyError("there are no test rows here")
        x, y = data.x_test, data.y_test
        swapped = Data.from_arrays(x, y, x[:0], y[:0], classes=data.classes, name=data.name)
        none = np.zeros(0, np.int64)
        return Federation(swapped, fed.test_rows, offsets, none, np.zeros_like(offsets), fed.ids)

    def test_count(self) -> int:
        """The number of test rows."""
        return len(self.federation().test_rows if self.site is None else self.site.y_test)

    def check_ids(self, ids: list[int]) -> None:
        """Refuse to answer for clients of other nodes."""
        here = self.federation().ids.tolist() if self.site is None else [self.site.client]
        strange = sorted(set(ids) - set(here))
        if strange:
            raise ReplyError(
                f"ids: client {strange[0]} is not here; this node has {sorted(here)[:10]}"
            )

    def hello(self) -> dict[str, Any]:
        """The clients of this node, and their numbers of rows."""
        if self.site is None:
            fed = self.federation()
            return {
                "clients": fed.ids.tolist(),
                "rows": fed.sizes.tolist(),
                "name": "shard",
                "foedus": __version__,
            }
        site = self.site
        about = {
            "name": site.name,
            "checksum": site.checksum(self._key()),
            "foedus": __version__,
        }
        return {
            "clients": [site.client],
            "rows": [len(site.y)],
            "test_rows": [len(site.y_test)],
            **about,
        }

    def _key(self) -> bytes:
        """The key of checksums that leave this site, made once: without it they would confirm a
        guess at its rows.
        """
        if self.cache is None:
            return b""
        path = self.cache / "checksum.key"
        self.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(f"{path}.lock", mode=0o600):
            if not path.is_file():
                files.replace(path, [os.urandom(32)])
        return path.read_bytes()

    def try_model(self, file: bytes, algorithm: Algorithm) -> dict[str, Any]:
        """Score the final model on this site's test rows, and keep it if there is a cache."""
        fed = self.federation()
        found = scored(file, algorithm, fed.spec, fed.data.x_test, fed.data.y_test)
        if self.cache:
            files.replace(self.cache / "model.safetensors", [file])
        return found

    # -- what `Algorithm.prepare` makes of the rows ------------------------------------------------

    def load_prepared(self, session: LocalSession) -> None:
        """Load what an earlier process has prepared."""
        path = self._prepared_file()
        if session.prepares and path is not None and path.is_file():
            try:
                session.load_prepared(files.read(path)[0]["prepared"])
            except CheckpointError:
                path.unlink(missing_ok=True)  # it is computed again

    def keep_prepared(self, session: LocalSession) -> None:
        """Write what was prepared, once."""
        path = self._prepared_file()
        if session.prepares and path is not None and not path.is_file():
            with contextlib.suppress(CheckpointError):  # a full disk: it is only a cache
                files.write(path, {"prepared": session.save_prepared()}, {})
                kept = sorted(path.parent.glob("prepared-*"), key=lambda p: p.stat().st_mtime)
                for old in kept[:-_PREPARED]:
                    old.unlink(missing_ok=True)

    def _prepared_file(self) -> Path | None:
        if self.cache is None:
            return None
        q, site = self.question, self.site
        made = None if q.preprocess is None else q.preprocess.to_json()
        rows = q.shard if site is None else [site.checksum(b""), made]
        about = json.dumps([__version__, q.algorithm, q.seed, rows], sort_keys=True)
        name = hashlib.sha256(about.encode()).hexdigest()[:32]
        return self.cache / f"prepared-{name}.safetensors"
