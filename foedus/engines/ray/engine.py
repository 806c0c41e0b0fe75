"""The engine for more clients or data than one process holds: Ray workers, each with some of the
clients.

A worker gets its clients' rows once and runs the Local engine on them; keys depend on clients' ids,
so the numbers are those of `fd.Local()`. Sums are computed on the workers, and the workers' sums
are added in order of client id. Client states stay on the workers.

A worker that is lost is replaced. Client steps are pure functions, so its clients' part of the
exchange is repeated from the states before it: those of the last copy, which the workers send every
few exchanges, plus the exchanges since then. The results of the other workers are kept. The result
is that of an undisturbed run, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, MinLen
from torch import Tensor

from foedus.base import tree
from foedus.base.settings import Means, Settings, check_settings
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.delays import Delays
from foedus.core.exchange import Ask
from foedus.core.reduce import Accumulator, diverged
from foedus.core.session import Reduced, Session
from foedus.data.federation import Federation
from foedus.engines.ray.cluster import Call, Cluster, Shard
from foedus.engines.ray.shards import (
    cut,
    join_states,
    pack,
    part_of,
    split_states,
    unpack,
    unpacked_sum,
)
from foedus.errors import ConfigError, DivergenceError

COPY_EVERY = 8
"""States are copied after this number of exchanges (and evaluations): fewer copies, but more to
repeat when a worker is lost.
"""


_GPUS = ("cuda", "xpu")
"""Devices that Ray assigns as its resource "GPU"."""


@dataclass(frozen=True)
class Ray(Settings):
    """Clients spread over the worker processes of a Ray cluster.

    Every run starts its workers and ends them; within a `with` block, runs share workers and one
    start of Ray.

    Args:
        address: Address of a running cluster, "HOST:PORT" or "auto"; without one, Ray is started on
            this machine for the run, unless this process is connected to a cluster already.
        workers: Number of workers; by default as many as the machine has cores, or as the cluster
            has room for.
        resources: What Ray must reserve for each worker, such as {"CPU": 4}; a worker computes with
            as many threads as it has CPUs. By default the machine's cores are divided evenly, and
            on a cluster a worker takes one.
        state_memory: Bytes of client states that a worker keeps in memory; the rest is on disk.
        batch: As in `fd.Local`, on the workers.
        memory: As in `fd.Local`, on the workers.
        device: As in `fd.Local`, on the workers: this process needs none. With "cuda" or "xpu" each
            worker has its own GPU, and there are as many workers as GPUs; resources={"GPU": 0.25}
            lets four of them share one.

    Example:
        >>> with fd.Ray(workers=4) as engine:  # doctest: +SKIP
        ...     fd.compare({"FedAvg": fd.FedAvg(), "Scaffold": fd.Scaffold()}, fed, rounds=20,
        ...                engine=engine)
    """

    address: Annotated[
        Annotated[str, MinLen(1)] | None,
        Means("'HOST:PORT' of a running Ray cluster, 'auto' or None"),
    ] = None
    workers: Annotated[int, Ge(1)] | None = None
    resources: dict[str, Annotated[float, Gt(0)]] | None = None
    state_memory: Annotated[int, Ge(1)] | None = None
    batch: bool | Literal["auto"] = "auto"
    memory: Annotated[int | float, Ge(1), Means("a positive number of bytes")] = 1 << 30
    device: str = "cpu"
    _held: list[Cluster] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        check_settings(self)
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(
                f"device={self.device!r} is not a device of PyTorch; use 'cuda', 'mps', 'xpu' or "
                "'cpu'"
            ) from error
        if device.type in _GPUS and device.index is not None:
            raise ConfigError(
                f"device={self.device!r}: Ray says which GPU is a worker's, and a worker sees no "
                f"other; use device={device.type!r}"
            )
        gpus = (self.resources or {}).get("GPU", 0)
        if gpus > 1 and gpus != int(gpus):
            raise ConfigError(
                f"resources['GPU']={gpus} must be a part of a GPU, such as 0.5, or an integer"
            )

    def __enter__(self) -> Ray:
        self._held.append(self._cluster())
        return self

    def _cluster(self) -> Cluster:
        gpu = {"GPU": 1} if torch.device(self.device).type in _GPUS else {}
        return Cluster(self.address, self.workers, {**gpu, **(self.resources or {})})

    def __exit__(self, *_: object) -> None:
        self._held.pop().close()

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> RaySession:
        """Start the workers, and place the data."""
        cluster = self._held[-1] if self._held else self._cluster()
        try:
            return RaySession(self, cluster, algorithm, fed, seed_key)
        except BaseException:
            if not self._held:
                cluster.close()
            raise


class RaySession(Session):
    """One run of one algorithm on Ray."""

    def __init__(
        self, engine: Ray, cluster: Cluster, algorithm: Algorithm, fed: Federation, seed_key: Tensor
    ):
        self.engine, self.cluster, self.algorithm, self.ray = (
            engine,
            cluster,
            algorithm,
            cluster.ray,
        )
        self.ids = torch.from_numpy(np.sort(fed.ids))
        self._rows: tuple[Tensor, Tensor, Any] | None = None
        self.absorbs = type(algorithm).absorb is not Algorithm.absorb
        remembers = algorithm.stateful
        nodes = [n for n in tree.NODES.values() if not n.__module__.startswith("foedus.")]
        try:
            shared = self.ray.put(algorithm)
        except TypeError as error:
            raise ConfigError(
                f"{type(algorithm).__name__} cannot be sent to Ray workers: "
                f"{error.__cause__ or error}"
            ) from error
        local = {"batch": engine.batch, "memory": engine.memory, "device": engine.device}
        parts = cut(fed, cluster.workers)
        self.shards: list[Shard] = []
        for worker, positions in zip(cluster.hire(len(parts)), parts, strict=True):
            opening = (
                shared,
                self.ray.put(part_of(fed, positions)),
                pack(seed_key),
                cluster.threads,
                engine.state_memory,
                nodes,
                local,
            )
            self.shards.append(Shard(cluster, worker, fed.ids[positions], opening, remembers))
        self.ends = torch.tensor([len(p) for p in parts]).cumsum(0)
        try:
            self._all([(s, s.start("open", *s.opening)) for s in self.shards])
        except BaseException:
            self.close()
            raise

    # -- the exchange ------------------------------------------------------------------------------

    def _asked(self, ask: Ask, method: str, *more: Tensor) -> list[tuple[Shard, Call]]:
        """Ask the workers that hold clients of an exchange.

        The payload is put into the object store once, and goes to each node once.
        """
        payload = self.ray.put(pack(ask.arguments))
        holder = torch.searchsorted(self.ends, torch.searchsorted(self.ids, ask.ids), right=True)
        calls = []
        for k in holder.unique().tolist():
            mine = holder == k
            own = ask.of(ask.ids[mine])
            some = {
                f.name: getattr(own, f.name)
                for f in fields(ask)
                if f.name not in ("payload", "held", "updates")
            }
            some["updates"] = own.updates if self.absorbs else []
            args, shard = (pack(some), payload), self.shards[k]
            call = shard.start(
                method, *args, *(pack(t[mine]) for t in more), repeat=("repeat", args)
            )
            shard.asked += int(mine.sum())
            calls.append((shard, call))
        return calls

    def reduce(self, ask: Ask, weights: Tensor) -> Reduced:
        """The weighted sum of the replies: each worker's, added up in order of client id."""
        whole = Reduced(Accumulator(self.algorithm.remedy))
        calls = self._asked(ask, "reduce", weights)
        for (shard, _), part in zip(calls, map(unpacked_sum, self._all(calls)), strict=True):
            whole.total.merge(part.total, ask.round, torch.from_numpy(shard.ids))
            whole.clients += part.clients
            whole.sent.bytes_up += part.sent.bytes_up
            whole.sent.messages_up += part.sent.messages_up
        self._copy()
        return whole

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        """The replies, in batches, worker after worker; all workers are at work meanwhile."""
        errors = []
        for shard, call in self._asked(ask, "exchange"):
            for done, found in shard.stream(call):
                if not done:
                    errors.append(found)
                elif not errors:
                    yield from (tuple(unpack(batch)) for batch in found)
        _raise(errors, self.algorithm.remedy)
        self._copy()

    def _all(self, calls: list[tuple[Shard, Call]]) -> list[Any]:
        """The workers' answers, in order; their errors are raised here."""
        answers = [shard.finish(call) for shard, call in calls]
        _raise([found for done, found in answers if not done], self.algorithm.remedy)
        return [found for _, found in answers]

    def _copy(self) -> None:
        """Copy the states, if a copy is due."""
        due = [(s, s.asked > 2 * len(s.ids)) for s in self.shards if len(s.since) >= COPY_EVERY]
        calls = [s.start("copy", whole) for s, whole in due]
        for (shard, whole), call in zip(due, calls, strict=True):
            shard.copied(call, whole)

    # -- delays ------------------------------------------------------------------------------------

    def delay(self, delays: Delays) -> None:
        """Tell every worker's clients."""
        super().delay(delays)
        calls, first = [], 0
        for shard in self.shards:
            mine = slice(first, first + len(shard.ids))
            shard.delays = (pack((delays.up[mine], delays.down[mine])), delays.longest)
            calls.append((shard, shard.start("delay", *shard.delays)))
            first = mine.stop
        self._all(calls)

    # -- evaluation of personal models -------------------------------------------------------------

    def evaluate_own(self, metrics: Sequence[str] = ()) -> dict[str, Tensor]:
        """Where the algorithm is personal: each client's model on its own test rows.

        Sums by client, in id order; metrics: the metrics that need the outputs of all rows, client
        after client, if any.
        """
        return self._evaluated("evaluate_own", metrics)

    def evaluate_global(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """If the algorithm is personal: each client's model on the same rows, which are sent once
        for all rounds.
        """
        kept = self._rows
        if (
            kept is None
            or kept[0].data_ptr() != x.data_ptr()
            or kept[1].data_ptr() != y.data_ptr()
            or len(kept[0]) != len(x)
        ):
            rows = (x, y) if weight is None else (x, y, weight)
            self._rows = kept = x, y, self.ray.put(pack(rows))
        return self._evaluated("evaluate_global", kept[2])

    def _evaluated(self, method: str, *args: Any) -> dict[str, Tensor]:
        calls = [(s, s.start(method, *args, repeat=(method, args))) for s in self.shards]
        parts = [unpack(part) for part in self._all(calls)]
        self._copy()
        return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self) -> Tree:
        """All client states, in the form that `fd.Local()` gives them; also the copy from which
        lost ones are restored.
        """
        calls = [(s, s.start("copy", True)) for s in self.shards]
        return join_states([unpack(shard.copied(call, True))["saved"] for shard, call in calls])

    def load(self, saved: Tree) -> None:
        """Restore the client states of a checkpoint of any engine."""
        for shard, part in zip(
            self.shards, split_states(saved, [len(s.ids) for s in self.shards]), strict=True
        ):
            shard.copies, shard.since, shard.asked = (
                [self.ray.put((True, pack({"saved": part})))],
                [],
                0,
            )
        self._all([(s, s.start("restore", *s.copies)) for s in self.shards])

    def close(self) -> None:
        """End the workers, or let them wait for another run."""
        workers = [s.worker for s in self.shards]
        self.shards = []
        if self.cluster in self.engine._held:
            for worker in workers:
                worker.release.remote()
            self.cluster.idle += workers
        else:
            if self.ray.is_initialized():
                self.cluster.dismiss(workers)
            self.cluster.close()


def _raise(errors: list[Exception], remedy: str) -> None:
    """Raise the errors of the workers: the first one, or one for all clients whose numbers are not
    finite.
    """
    not_finite = [e for e in errors if isinstance(e, DivergenceError) and hasattr(e, "what")]
    if 1 < len(errors) == len(not_finite) and len({e.what for e in not_finite}) == 1:
        clients = sorted(i for e in not_finite for i in e.clients)
        raise diverged(not_finite[0].what, not_finite[0].round, clients, remedy)
    if errors:
        raise errors[0]
