"""A connection to Ray, its worker processes, and the replacement of lost ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from foedus.base.tree import Tree
from foedus.engines.ray.worker import Answer, Worker
from foedus.errors import CheckpointError, ConfigError, FoedusError

PATIENCE = 60.0
"""Seconds to wait for workers that the cluster has room for."""

TRIES = 3
"""How often a worker may be lost in one exchange: repeated losses have a systematic cause."""

_connections = 0
"""The number of engines that use the connection; the last one closes it."""


def load_ray() -> Any:
    """The ray module, imported only when it is needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # otherwise Ray warns
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"fd.Ray needs Ray, which is not there ({error}): pip install 'foedus[ray]'"
        ) from error
    return ray


class Cluster:
    """Ray, started here or attached to; closing it ends the workers, and Ray only if it was started
    here.
    """

    def __init__(
        self, address: str | None, workers: int | None, resources: dict[str, float] | None
    ):
        self.ray = load_ray()
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        own = address is None and not self.ray.is_initialized()
        # On a single machine the workers share its cores; on a cluster a worker takes one, unless
        # `resources` says otherwise.
        share = max(1, cores // (workers or cores)) if own else 1
        self.resources = {"CPU": share, **(resources or {})}
        self.threads = max(1, int(self.resources["CPU"]))
        self.idle: list[Any] = []
        self.connected = self._connect(
            address, (workers or cores) * self.resources["CPU"] if own else None
        )
        try:
            self.workers = self._room(workers)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None, cpus: float | None) -> bool:
        """Connect if necessary; returns whether the connection was made here."""
        global _connections
        ray = self.ray
        if ray.is_initialized():
            there = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", there):
                raise ConfigError(
                    f"address={address!r}: this process is connected to the Ray cluster at {there} "
                    "already"
                )
            if _connections == 0:
                return False  # not ours: its owner closes it
            _connections += 1
            return True
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if address is None:
                assert cpus is not None
                ray.init("local", num_cpus=max(1, round(cpus)), include_dashboard=False, **quiet)
            else:
                _reach(address)
                ray.init(address, **quiet)
        # Ray raises bare ones, for example if it does not start in time
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"address={address!r}: cannot connect to Ray: {brief(error)}"
            ) from error
        _connections = 1
        return True

    def _room(self, workers: int | None) -> int:
        """The number of workers; raises if the cluster is too small for them even when idle."""
        need = {k: v for k, v in self.resources.items() if v}
        nodes = [n["Resources"] for n in self.ray.nodes() if n["Alive"]]
        room = sum(
            min(int(n.get(k, 0) / v + 1e-9) for k, v in need.items()) if need else 1 << 20
            for n in nodes
        )
        if room < (workers or 1):
            has = "; ".join(
                ", ".join(f"{k} {n[k]:g}" for k in sorted(n) if ":" not in k and "memory" not in k)
                for n in nodes
            )
            raise ConfigError(
                f"workers={workers!r} with resources={need} each: the Ray cluster has room for "
                f"{room}; its nodes have {has}{self._share(nodes)}"
            )
        return workers or room

    def _share(self, nodes: list[dict[str, float]]) -> str:
        """The remedy for too few GPUs."""
        if not self.resources.get("GPU"):
            return ""
        if not any(n.get("GPU") for n in nodes):
            return "; there is no GPU: use device='cpu'"
        return "; ask for fewer workers, or let them share GPUs: resources={'GPU': 0.5}"

    def hire(self, count: int) -> list[Any]:
        """`count` workers, ready to work."""
        ray, found = self.ray, [self.idle.pop() for _ in range(min(count, len(self.idle)))]
        other = {k: v for k, v in self.resources.items() if k not in ("CPU", "GPU", "memory")}
        options = {
            "num_cpus": self.resources["CPU"],
            "num_gpus": self.resources.get("GPU", 0),
            "memory": self.resources.get("memory"),
            "resources": other,
            "scheduling_strategy": "SPREAD",
        }
        new = [ray.remote(Worker).options(**options).remote() for _ in range(count - len(found))]
        if not new:
            return found
        calls = [w.__ray_ready__.remote() for w in new]
        done, waiting = ray.wait(calls, num_returns=len(calls), timeout=PATIENCE)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            self.dismiss(new)
            raise ConfigError(f"a Ray worker cannot start: {brief(error)}") from error
        if waiting:
            self.dismiss(new)
            raise ConfigError(
                f"resources={self.resources}: the Ray cluster gave {len(found) + len(done)} of "
                f"{count} workers within "
                f"{PATIENCE:g} seconds; wait until others are done, or ask for less"
            )
        return found + new

    def dismiss(self, workers: list[Any]) -> None:
        """End workers."""
        for worker in workers:
            self.ray.kill(worker)

    def close(self) -> None:
        """End the workers, and the connection if it was made here and no other engine uses it."""
        global _connections
        if self.ray.is_initialized():
            self.dismiss(self.idle)
        self.idle = []
        if self.connected:
            self.connected = False
            _connections -= 1
            if _connections == 0:
                self.ray.shutdown()


@dataclass(eq=False)
class Call:
    """A call to a worker; `before` counts the calls since the last copy of its states."""

    method: str
    args: tuple
    before: int
    answer: Any


class Shard:
    """Some clients on a worker, with everything needed to move them to another one if it is
    lost."""

    def __init__(
        self, cluster: Cluster, worker: Any, ids: np.ndarray, opening: tuple, remembers: bool
    ):
        self.cluster, self.ray, self.worker = cluster, cluster.ray, worker
        self.ids, self.opening, self.remembers = ids, opening, remembers
        self.clients = f"client {ids[0]}" if len(ids) == 1 else f"clients {ids[0]} to {ids[-1]}"
        self.delays: tuple | None = None
        self.copies: list[Any] = []  # copies of the states: all of them, then the changes
        self.asked = 0  # clients that may have changed since all were copied
        self.since: list[tuple[str, tuple]] = []  # calls that changed states since the last copy
        self.lost = (
            self.ray.exceptions.RayActorError,
            self.ray.exceptions.ObjectLostError,
            self.ray.exceptions.NodeDiedError,
            self.ray.exceptions.WorkerCrashedError,
        )

    def start(self, method: str, *args: Any, repeat: tuple[str, tuple] | None = None) -> Call:
        """Call the worker; `repeat` is the call that reproduces the resulting states."""
        call = Call(method, args, len(self.since), self._send(method, args))
        if repeat is not None and self.remembers:
            self.since.append(repeat)
        return call

    def _send(self, method: str, args: tuple) -> Any:
        bound = getattr(self.worker, method)
        return (
            bound.options(num_returns="streaming").remote(*args)
            if method == "exchange"
            else bound.remote(*args)
        )

    def finish(self, call: Call) -> Answer:
        """The worker's answer."""
        return next(self._persist(call, lambda answer: iter([self.ray.get(answer)])))

    def stream(self, call: Call) -> Iterator[Answer]:
        """The worker's answers as they come."""
        return self._persist(call, lambda answers: (self.ray.get(a) for a in answers))

    def _persist(self, call: Call, read: Any) -> Iterator[Answer]:
        """All answers to a call, each once, although workers may be lost and replaced."""
        seen = 0
        reason: BaseException | None = None
        for _ in range(TRIES):
            try:
                if reason is not None:
                    self._replace()
                    for method, args in self.since[: call.before]:
                        self._send(method, args)
                    call.answer = self._send(call.method, call.args)
                for i, answer in enumerate(read(call.answer)):
                    if i >= seen:
                        seen += 1
                        yield answer
                return
            except self.lost as error:
                reason = error
            except self.ray.exceptions.RayTaskError as error:
                raise ConfigError(
                    f"a Ray worker cannot use what it was sent: {brief(error)}"
                ) from error
        assert reason is not None
        raise FoedusError(
            f"the worker of {self.clients} was lost {TRIES} times in a row in one exchange "
            f"({brief(reason)}); a step that takes "
            "more memory than there is, or that crashes its process, would do that"
        ) from reason

    def _replace(self) -> None:
        """Another worker for the same clients, with their states as they were at the last copy."""
        self.cluster.dismiss([self.worker])
        [self.worker] = self.cluster.hire(1)
        self.ray.get(self._send("open", self.opening))
        if self.delays is not None:
            self._send("delay", self.delays)
        if not self.copies:
            return
        try:
            done, error = self.ray.get(self._send("restore", tuple(self.copies)))
        except self.ray.exceptions.RayActorError:
            raise  # lost again
        except self.ray.exceptions.RayError as lost:
            done, error = False, brief(lost)
        if not done:
            raise CheckpointError(
                f"the worker of {self.clients} was lost, and the states of these clients cannot be "
                f"restored: their last copy is lost too ({error}); fd.run(..., checkpoint=PATH, "
                "resume=True) goes on from what is on disk"
            )

    def copied(self, call: Call, whole: bool) -> Tree:
        """Store a copy of the states: earlier calls are no longer needed to restore them."""
        done, found = self.finish(call)
        if not done:
            raise found
        self.copies = [call.answer] if whole else [*self.copies, call.answer]
        self.asked, self.since = 0 if whole else self.asked, []
        return found


def _reach(address: str) -> None:
    """Raise immediately for an address without a listener: Ray itself would retry for a long
    time."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise ConfigError(
            f"address={address!r} must be 'HOST:PORT' of a running Ray cluster, or 'auto'"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(
            f"address={address!r}: no answer ({error}); is the Ray cluster running?"
        ) from error


def brief(error: BaseException) -> str:
    """Ray's error message without the trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
