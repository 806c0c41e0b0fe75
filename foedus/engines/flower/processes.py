"""All code that uses internals of flwr, because its public interface lacks a function. Everything
else goes through `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and its commands.

Six things: this process as the ServerApp of a run (so that `fd.run` in a notebook can be the
server), a worker that answers a SuperNode's messages (`foedus.engines.flower.worker`), a SuperNode
that looks for messages more often, several commands of `flwr` in one process, processes that do not
outlive the one that started them, and an answer for client processes that were killed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
import types
from typing import Any

from foedus.engines.flower.worker import KILLED, main

PARENT = "FOEDUS_PARENT"
"""Environment variable: the id of the process whose end ends this one."""

BELL = "FOEDUS_BELL"
"""Environment variable: the file descriptors of the pipe between a SuperNode and its worker."""

FLEET = "FOEDUS_FLEET"
"""Environment variable: [HOST:PORT, certificate, key] at which sites reach a SuperLink."""

FOR_SITES = (
    "This address is for the sites of a federation. Runs are started and sites admitted by its "
    "operator, at the server itself.\n"
)


def become_server(address: str, certificate: bytes, patience: float = 60.0) -> Any:
    """Take the ServerApp task that waits at a SuperLink (with `--isolation process`), and return
    its Grid.
    """
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.heartbeat import HeartbeatSender
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid.http_grid import HttpGrid

    from foedus.errors import FoedusError

    look_again_soon()
    client = RuntimeHttpClient.from_server_address(
        server_address=address, insecure=False, root_certificates=certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        retry_invoker=make_simple_http_retry_invoker(),
    )  # fmt: skip
    began, token = time.monotonic(), ""
    while not token:
        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        token = found.token if found.HasField("task") else ""
        if not token and time.monotonic() - began > patience:
            raise FoedusError(f"Flower's SuperLink has not started the run within {patience:g} s")
        time.sleep(0.05)
    client.close()
    grid = HttpGrid(
        runtime_api_address=address, insecure=False, root_certificates=certificate, token=token
    )
    give_up = grid._retry_invoker.should_giveup
    grid._retry_invoker.should_giveup = lambda error: (
        refused(error) or (give_up is not None and give_up(error))
    )
    task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    grid.set_run(run_from_proto(task.run))
    beat = HeartbeatSender(lambda: say_alive(grid._runtime_client))
    beat.start()

    def speak() -> None:
        """Messages read the id of their run from a global: set it before creating messages."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            task.task_id,
            task.run.run_id,
            task.context.node_id,
        )

    vars(grid).update(beat=beat, speak=speak)  # for as long as the grid is there
    return grid


def link_errors() -> tuple[type[BaseException], ...]:
    """The exceptions of Flower's Grid when its SuperLink cannot be reached or has ended the run;
    one of them is not an `Exception`.
    """
    import httpx
    from flwr.supercore.run import RunNotRunningException

    return httpx.HTTPError, RunNotRunningException


def refused(error: Exception) -> bool:
    """Whether the SuperLink has ended the run; Flower's own sends SIGINT to this process."""
    return getattr(getattr(error, "response", None), "status_code", None) == 401


def say_alive(client: Any) -> bool:
    """Send a heartbeat to the SuperLink; returns whether it was answered.

    Flower's own version sends SIGINT to this process when the SuperLink has ended the run. Here the
    next message detects it (`foedus.engines.flower.session.LinkLost`).
    """
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except httpx.TransportError:
        return False
    except httpx.HTTPStatusError as error:
        return error.response.status_code not in (503, 504)  # it is busy, and may be asked again
    return True


def eager_supernode(busy: float = 0.2, idle: float = 0.3, beat: int = 10) -> None:
    """`flower-supernode`, but it polls for messages more often than every three seconds: every
    `busy` seconds after a message, and every `idle` seconds after a while without one. It signals
    its worker when there is a task, and takes the answer immediately.

    It sends a heartbeat every `beat` seconds, not every 30: a SuperLink considers a node dead, and
    lets it register again, only after two intervals without one.
    """
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = beat
    answer_for_the_killed()
    look_again_soon()
    pull, bell = start_client_internal._pull_and_store_message, int(os.environ.pop(BELL))
    last = time.monotonic()

    def pull_message(**how: Any) -> int | None:
        nonlocal last
        run = pull(**how)
        if run is not None:  # all of it is here
            last = time.monotonic()
            os.write(bell, b"!")
        return run

    def sleep(seconds: float) -> None:
        if seconds < 3:  # for an answer of the worker, which is in this process when it is there
            time.sleep(min(seconds, 0.01))
        else:
            time.sleep(busy if time.monotonic() - last < 5 else idle)

    vars(start_client_internal)["_pull_and_store_message"] = pull_message
    quick = types.ModuleType("time")
    quick.__dict__.update({**vars(time), "sleep": sleep})
    start_client_internal.time = quick
    flower_supernode()


def look_again_soon(first: float = 0.02) -> None:
    """Make this process retry after `first` seconds, not after one, while a message is on its
    way."""
    from flwr.supercore.inflatable import inflatable_utils as parts

    for pull in (parts.pull_objects, parts.pull_and_inflate_object_from_tree):
        (pull.__kwdefaults__ or {})["initial_backoff"] = first


def answer_for_the_killed() -> None:
    """Make a SuperNode answer immediately, with an error, on behalf of a killed client process.

    Flower's own version waits for a minute, or forever if the process had not yet taken its
    message, or had sent a part of its answer.
    """
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supernode.nodestate.in_memory_nodestate import (
        CLIENT_APP_CRASHED_ERROR,
        InMemoryNodeState,
    )

    finish, get = InMemoryNodeState.finish_task, InMemoryNodeState.get_messages_legacy

    def partial(self: Any) -> list[str]:
        """Answers that are not complete yet."""
        replies = [
            name
            for name, entry in self.msg_store.items()
            if entry.message.metadata.reply_to_message_id
        ]
        trees = {
            name: iterate_object_tree(self.object_store.get_object_tree(name)) for name in replies
        }
        return [
            name
            for name, tree in trees.items()
            if any(self.object_store.get(o.object_id) == b"" for o in tree)
        ]

    def get_messages(self: Any, *, is_reply: bool | None = None, **more: Any) -> Any:
        """Return answers when they are complete: there is one at a time."""
        with self._lock_object_push_sessions, self.lock_msg_store:
            if is_reply and partial(self):
                return []
        return get(self, is_reply=is_reply, **more)

    def finish_task(self: Any, task_id: int, sub_status: str, details: str) -> bool:
        finished = finish(self, task_id, sub_status, details)
        if finished and details == KILLED:
            with self._lock_object_push_sessions, self.lock_msg_store:
                for name in partial(self):
                    del self.msg_store[name]
                    self.object_store.delete(name)
                for entry in self.msg_store.values():
                    if not entry.message.metadata.reply_to_message_id:
                        entry.is_retrieved = True  # otherwise it would not be answered
            self._store_error_replies(
                {t.run_id for t in self.get_tasks(task_ids=[task_id])}, CLIENT_APP_CRASHED_ERROR
            )
        return finished

    for name, method in ("finish_task", finish_task), ("get_messages_legacy", get_messages):
        setattr(InMemoryNodeState, name, method)


def commands() -> None:
    """Several `flwr` commands, separated by `--then`: importing flwr takes longer than most of
    them.
    """
    from flwr.cli.app import app

    command: list[str] = []
    for word in [*sys.argv[1:], "--then"]:
        if word != "--then":
            command.append(word)
            continue
        app(command, standalone_mode=False)
        command = []


def superlink() -> None:
    """`flower-superlink`, with a second listener if the environment has a `FLEET` address.

    Flower serves the routes of operators (start a run, admit a site), of server processes and of
    sites on one address, and authenticates only sites. Here that address is on loopback; the
    network reaches only the routes of sites (`FleetOnly`).
    """
    import importlib

    command = importlib.import_module("flwr.superlink.cli.flower_superlink")
    if FLEET in os.environ:
        address, certificate, key = json.loads(os.environ.pop(FLEET))
        host, _, port = address.rpartition(":")
        fleet = {"host": host, "port": int(port), "ssl_certfile": certificate, "ssl_keyfile": key}
        vars(command)["uvicorn"] = types.SimpleNamespace(run=functools.partial(serve_twice, fleet))
    command.flower_superlink()


class FleetOnly:
    """An ASGI app that passes on requests of sites, and refuses all others."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        allowed = scope["type"] == "http" and scope["path"].startswith("/v1/fleet/")
        if allowed:
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": FOR_SITES.encode()})


def serve_twice(fleet: dict[str, Any], app: Any, **how: Any) -> None:
    """Serve an ASGI app as `uvicorn.run` would, and its routes for sites as `fleet` says, too."""
    import asyncio
    import contextlib

    import uvicorn

    inside = uvicorn.Server(uvicorn.Config(app, **how))
    outside = uvicorn.Server(uvicorn.Config(FleetOnly(app), **how | fleet, lifespan="off"))
    vars(outside)["capture_signals"] = contextlib.nullcontext  # one of them is enough

    async def both() -> None:
        other = asyncio.create_task(outside.serve())
        try:
            await inside.serve()
        finally:
            outside.should_exit = True
            await other

    asyncio.run(both())


def end_with(parent: int, every: float = 0.5) -> None:
    """End this process and its children soon after its parent, which may be killed before it can do
    so itself.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def resident_worker() -> None:
    """`foedus.engines.flower.worker`."""
    look_again_soon()
    main(sys.argv[1:], int(os.environ.pop(BELL)))


ROLES = {
    "superlink": superlink,
    "supernode": eager_supernode,
    "worker": resident_worker,
    "flwr": commands,
}

if __name__ == "__main__":
    role = sys.argv.pop(1)
    if PARENT in os.environ:
        end_with(int(os.environ.pop(PARENT)))
    ROLES[role]()
