"""The engine of a real federation, on loopback: for tests and notebooks.

See `foedus.engines.flower` for sites on several machines.
"""

from __future__ import annotations

import atexit
import tempfile
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.base.settings import Settings, check_value
from foedus.core.algorithm import Algorithm
from foedus.core.describe import to_config
from foedus.data.federation import Federation
from foedus.engines.flower import require_posix
from foedus.errors import ConfigError, FoedusError


class Flower(Settings):
    """Flower's SuperLink and SuperNodes, started on this machine with TLS and keys.

    Clients are divided among the nodes. The processes start with the first run and stay until
    `close()`, or until the end of a `with` block; starting takes some ten seconds. A run with a
    checkpoint keeps the states of its clients beside it, in CHECKPOINT.sites, and can be resumed in
    another process. Keys are in a temporary folder: `close()` removes it, and the next start those
    of processes that were killed.

    Args:
        nodes: Number of SuperNodes, among which the clients are divided (at most one for each
            client).
        timeout: Seconds that a node may take for an exchange.
        min_clients: A run continues while at least this number of clients answer.
        code: "module:name" of an algorithm (or a dictionary of them) that text cannot describe,
            such as one with a `torch.nn.Module`, importable on every node.

    Example:
        >>> with fd.Flower(nodes=2) as engine:  # doctest: +SKIP
        ...     fd.run(fd.FedAvg(fd.Linear()), fed, rounds=5, engine=engine)
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        timeout: float = 120.0,
        min_clients: int = 1,
        code: str | None = None,
    ):
        check_value("nodes", nodes, Annotated[int, Ge(1)])
        check_value("timeout", timeout, Annotated[float, Gt(0)])
        check_value("min_clients", min_clients, Annotated[int, Ge(1)])
        if code is not None and (not isinstance(code, str) or ":" not in code):
            raise ConfigError(
                f"code={code!r} must be 'module:name', of an algorithm or a dictionary of "
                "algorithms"
            )
        self.count, self.timeout, self.min_clients, self.code = (
            nodes,
            float(timeout),
            min_clients,
            code,
        )
        self.loopback: Any = None
        self.grid: Any = None
        self.line: Any = None

    def __repr__(self) -> str:
        return f"Flower(nodes={self.count})"

    def start(self) -> None:
        """Start the processes if they are not running."""
        if self.loopback is not None:
            return
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        require_posix("fd.Flower")
        try:
            from foedus.engines.flower import keys as keys_
            from foedus.engines.flower import loopback
        except ImportError as error:
            raise FoedusError(
                f"fd.Flower needs flwr: pip install 'foedus[flower]' ({error})"
            ) from None
        self.temporary, release = loopback.temporary_folder()
        folder = Path(self.temporary.name)
        self.loopback = loopback.Loopback(folder)
        self._end = weakref.finalize(self, _close, self.loopback, self.temporary, release)
        atexit.register(self._end)
        self.loopback.start_link()
        keys = [keys_.node_key(folder / "keys" / f"node{number}") for number in range(self.count)]
        self.loopback.register([public for _, public in keys])
        for number, (key, _) in enumerate(keys):
            shards = folder / "shards" / str(number)
            shards.mkdir(parents=True)
            self.loopback.add_node(key, f'shards="{shards}"', self.code)
        self._serve()

    def _serve(self) -> None:
        """Start a Flower run, and become its server."""
        from foedus.engines.flower.session import linked

        self._leave()
        with linked():
            self.grid = self.loopback.serve()

    def _leave(self) -> None:
        """Stop being the server."""
        if self.grid is not None:
            if self.grid.beat.is_running:
                self.grid.beat.stop()
            self.grid.close()
            self.grid = None

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> Any:
        """Divide the clients, greet the nodes, and open the session."""
        if fed.spec.weighted:
            raise ConfigError(
                "fd.Flower does not carry the weights of rows; use fd.Local() or fd.Ray(), or drop "
                "weight= where the data is loaded"
            )
        if algorithm.pooled:
            raise ConfigError(
                f"{type(algorithm).__name__} needs all rows in one place; in a federation, sites "
                "keep theirs"
            )
        self.start()
        from foedus.engines.flower.kept import KeptSession
        from foedus.engines.flower.server import greet, wait_for
        from foedus.engines.flower.session import Line, LinkLost
        from foedus.engines.flower.site import write_shard
        from foedus.version import __version__

        try:
            if self.grid is None:  # as after a renewal that failed
                self._serve()
            nodes = wait_for(self.grid, self.count, 1, 60.0)
        except LinkLost:  # Flower has ended its run; its nodes are still there
            self._serve()
            nodes = wait_for(self.grid, self.count, 1, 60.0)
        name = uuid.uuid4().hex
        order = np.argsort(fed.ids, kind="stable")
        places: dict[int, Path] = {}
        for number in range(self.count):
            mine = order[number :: self.count]
            states = Path(self.temporary.name) / "shards" / str(number) / "cache" / "states"
            places |= dict.fromkeys(fed.ids[mine].tolist(), states)
            if len(mine):
                write_shard(
                    Path(self.temporary.name) / "shards" / str(number) / f"{name}.npz",
                    fed.select(mine),
                )
        low, high = seed_key.tolist()
        question = {
            "shard": name,
            "algorithm": to_config(algorithm),
            "seed": low | high << 32,
            "foedus": __version__,
            "session": "",
        }
        self.line = Line(
            self.grid,
            {},
            timeout=max(self.timeout, 60.0),
            min_clients=self.min_clients,
            common={"shard": name},
        )
        # the first message waits until the nodes have imported what they need
        greetings = greet(self.line, nodes, question)
        self.line.timeout = self.timeout
        missing = sorted(set(fed.ids.tolist()) - set(self.line.nodes))
        if missing:
            raise FoedusError(
                f"no node has client {missing[0]}; {len(greetings)} of {self.count} nodes answered "
                "(see the warnings)"
            )
        return KeptSession(places, self.line, algorithm, question["seed"], fed.spec)

    def close(self) -> None:
        """End all processes that were started."""
        if self.loopback is not None:
            self._leave()
            self._end()
            atexit.unregister(self._end)
            self.loopback = None

    def __enter__(self) -> Flower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(
    loopback: Any, temporary: tempfile.TemporaryDirectory, release: Callable[[], None]
) -> None:
    loopback.close()
    temporary.cleanup()
    release()
