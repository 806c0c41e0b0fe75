"""Ray without its processes: workers are objects of this process, and what is sent to them and back
is pickled, as it is between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ray import cloudpickle, exceptions

DIED = "The actor died unexpectedly before finishing this task."


class Ref:
    """What Ray's object store holds: pickled bytes, or the error that getting it raises."""

    def __init__(self, value: Any = None, error: Exception | None = None):
        self.bytes, self.error = cloudpickle.dumps(value), error

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return cloudpickle.loads(self.bytes)


class Actor:
    """A worker: `actor.method.remote(...)`; `dead` once it was killed."""

    def __init__(self, here: HereRay, kind: type):
        self.here, self.object, self.dead = here, kind(), False

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class Method:
    """A method of a worker; it is done when it is called, and its answer waits to be fetched."""

    def __init__(self, actor: Actor, name: str, streaming: bool = False):
        self.actor, self.name, self.streaming = actor, name, streaming

    def options(self, num_returns: str) -> Method:
        assert num_returns == "streaming"
        return Method(self.actor, self.name, True)

    def remote(self, *args: Any) -> Ref | list[Ref]:
        found = list(self._answers(args))
        return found if self.streaming else found[0]

    def _answers(self, args: tuple) -> Iterator[Ref]:
        actor, here = self.actor, self.actor.here
        try:
            here.disturb(actor, self.name, 0)
            if actor.dead:
                raise exceptions.RayActorError(error_msg=DIED)
            if self.name == "__ray_ready__":
                yield Ref(True)
                return
            given = [a.get() if isinstance(a, Ref) else cloudpickle.loads(cloudpickle.dumps(a))
                     for a in args]  # fmt: skip
            answer = getattr(actor.object, self.name)(*given)
            for number, one in enumerate(answer if self.streaming else [answer], start=1):
                here.disturb(actor, self.name, number)
                if actor.dead:
                    raise exceptions.RayActorError(error_msg=DIED)
                yield Ref(one)
        except exceptions.RayError as error:
            yield Ref(error=error)


class HereRay:
    """All of Ray's interface that foedus uses, with one node.

    `disturb(actor, method, number)` is called before a worker starts on a method (number 0) and
    before each of its answers leaves it (from 1): it may kill the worker, or raise. `slow` workers
    are never ready.
    """

    exceptions = exceptions

    def __init__(self, cpus: float = 4.0, connected: bool = True, slow: int = 0):
        self.resources = {"CPU": cpus, "memory": 1e9, "node:here": 1.0}
        self.connected, self.slow = connected, slow
        self.inits: list[tuple[Any, dict[str, Any]]] = []
        self.actors: list[Actor] = []
        self.asked_for: list[dict[str, Any]] = []
        self.disturb: Callable[[Actor, str, int], None] = lambda actor, method, number: None

    # -- the cluster -------------------------------------------------------------------------------

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, address: str, **options: Any) -> None:
        self.inits.append((address, options))
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def nodes(self) -> list[dict[str, Any]]:
        gone = {"Alive": False, "Resources": {"CPU": 1000.0}}
        return [{"Alive": True, "Resources": self.resources}, gone]

    def get_runtime_context(self) -> Any:
        return type("Context", (), {"gcs_address": "127.0.0.1:6379"})

    # -- objects -----------------------------------------------------------------------------------

    def put(self, value: Any) -> Ref:
        return Ref(value)

    def get(self, refs: Ref | list[Ref]) -> Any:
        return [r.get() for r in refs] if isinstance(refs, list) else refs.get()

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list, list]:
        assert num_returns == len(refs)
        return refs[self.slow :], refs[: self.slow]

    # -- workers -----------------------------------------------------------------------------------

    def remote(self, kind: type) -> Any:
        def options(**asked: Any) -> Any:
            self.asked_for.append(asked)
            return type("Options", (), {"remote": lambda: self._start(kind)})

        return type("Remote", (), {"options": staticmethod(options)})

    def _start(self, kind: type) -> Actor:
        self.actors.append(Actor(self, kind))
        return self.actors[-1]

    def kill(self, actor: Actor) -> None:
        actor.dead = True

    @property
    def alive(self) -> list[Actor]:
        return [a for a in self.actors if not a.dead]
