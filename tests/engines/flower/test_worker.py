"""The resident worker of a site, without a SuperNode: the message of a task is answered by what is
installed here, and a child that is killed is reported and replaced.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foedus as fd

pytest.importorskip("flwr")

import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime import run_clientapp as runtime

from foedus.core.describe import to_config
from foedus.engines.flower import deploy, messages, worker
from foedus.engines.flower.worker import KILLED, Worker
from tests.engines.flower.test_site import table, written


class Stop(BaseException):
    """Ends a loop that does not end by itself."""


@pytest.fixture
def node(monkeypatch):
    """The SuperNode, as a worker sees it: the connections made, and what is pushed."""
    found = SimpleNamespace(connections=[], finished=[], pushed=[], tasks=[], refuse=False)

    def acquire(request):
        assert list(request.supported_task_types) == [TaskType.CLIENT_APP]
        if not found.tasks:
            raise Stop
        return found.tasks.pop(0)

    def connect(**settings):
        client = SimpleNamespace(AcquireTask=acquire, closed=0, settings=settings)
        client.close = lambda: setattr(client, "closed", client.closed + 1)
        found.connections.append(client)
        return client

    def finish(client, context, status, details):
        found.finished.append((client, context, status, details))
        if found.refuse:
            raise ConnectionError("the SuperNode is gone")

    monkeypatch.setattr(RuntimeHttpClient, "from_server_address", connect)
    monkeypatch.setattr(runtime, "push_task_output", finish)
    monkeypatch.setattr(runtime, "push_message", lambda *what: found.pushed.append(what))
    return found


# -- children --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scripted(Worker):
    """Its n-th child does what the n-th function says with the token; `folder` counts them."""

    folder: Path = Path()
    script: tuple[Any, ...] = ()

    def work(self, token: Any) -> None:
        number = len(list(self.folder.iterdir()))
        (self.folder / f"{number}").write_text(f"{os.getppid()}")
        self.script[number](token)


def killed(token: Any) -> None:
    token[:6] = b"task-1"
    os.kill(os.getpid(), signal.SIGKILL)


def failed(token: Any) -> None:
    token[:6] = b"task-2"
    raise ValueError("a bug")


def run(folder: Path, monkeypatch, *script: Any) -> list[float]:
    """Run a worker until its children have played the script; its pauses between two of them."""
    pauses: list[float] = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == len(script):
            raise Stop

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(Stop):
        Scripted("127.0.0.1:9", folder=folder, script=script).run()
    return pauses


@pytest.mark.parametrize("child", [killed, failed])
def test_a_child_that_is_gone_is_reported_and_the_next_is_forked(
    child, node, tmp_path, monkeypatch
):
    def idle(token):
        assert not token[:].strip(b"\0")  # it has no task of the child before it

    pauses = run(tmp_path, monkeypatch, child, idle, child)
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(os.getpid())}
    assert len(list(tmp_path.iterdir())) == 3
    assert [about[1:] for about in node.finished] == [(None, SubStatus.FAILED, KILLED)] * 2
    client = node.finished[0][0]
    _, token = client.settings["interceptors"]
    assert isinstance(token, RuntimeTokenHttpInterceptor)
    assert token._token == ("task-1" if child is killed else "task-2")
    # tried once: the child may have finished before it was killed
    assert client.settings["retry_invoker"].should_giveup(ValueError())
    assert all(0 <= pause <= 0.5 for pause in pauses)


def test_a_child_without_a_task_is_not_reported(node, tmp_path, monkeypatch):
    def die(token):
        os.kill(os.getpid(), signal.SIGKILL)

    run(tmp_path, monkeypatch, die, die)
    assert node.finished == [] and len(list(tmp_path.iterdir())) == 2


def test_no_failure_is_reported_to_a_supernode_that_is_gone_too(node, tmp_path, monkeypatch):
    node.refuse = True
    run(tmp_path, monkeypatch, killed, killed)
    assert len(node.finished) == 2


@pytest.mark.parametrize(("error", "expected"), [(ValueError("a bug"), 1), (worker.Ended(), 17)])
def test_a_child_never_returns_into_the_loop_of_its_parent(error, expected, monkeypatch):
    def exit_(code):
        assert code == expected
        raise Stop

    def work(self, token):
        raise error

    monkeypatch.setattr(Worker, "work", work)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "_exit", exit_)
    with pytest.raises(Stop):
        Worker("127.0.0.1:9").run()


def test_a_worker_ends_with_its_supernode(tmp_path, monkeypatch):
    """And does not begin child after child that finds nobody."""

    def end(self, token):
        (tmp_path / str(os.getpid())).touch()
        raise worker.Ended

    monkeypatch.setattr(Worker, "work", end)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    Worker("127.0.0.1:9").run()
    assert len(list(tmp_path.iterdir())) == 1


# -- tasks -----------------------------------------------------------------------------------------


def test_one_task_after_the_other(node, monkeypatch):
    token, answered, waits = mmap.mmap(-1, 4096), [], []
    node.tasks = [
        AcquireTaskResponse(token="first", task=Task(task_id=1)),
        AcquireTaskResponse(),
        AcquireTaskResponse(token="2nd", task=Task(task_id=2)),
    ]

    def answer(self, client):
        assert client is node.connections[-1]
        answered.append(token[:].rstrip(b"\0"))  # noted while it is at hand

    def wait(self):
        waits.append(token[:].rstrip(b"\0"))

    monkeypatch.setattr(Worker, "answer", answer)
    monkeypatch.setattr(Worker, "_wait", wait)
    with pytest.raises(Stop):
        Worker("127.0.0.1:9", b"secret").work(token)
    assert answered == [b"first", b"2nd"] and waits == [b""]
    assert not token[:].strip(b"\0")
    asking, first, second = node.connections
    assert asking.settings["server_address"] == "127.0.0.1:9" and asking.settings["insecure"]
    assert [type(i) for i in asking.settings["interceptors"]] == [
        RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    ]  # fmt: skip
    assert [c.settings["interceptors"][1]._token for c in (first, second)] == ["first", "2nd"]


def test_a_supernode_without_a_secret_is_asked_without(node):
    with pytest.raises(Stop):
        Worker("127.0.0.1:9").work(None)
    assert len(node.connections[0].settings["interceptors"]) == 1


def test_the_bell_wakes_a_worker():
    listen, ring = os.pipe()
    try:
        waiting = Worker("127.0.0.1:9", bell=listen, pause=60.0)
        os.write(ring, b"!!")
        began = time.monotonic()
        waiting._wait()
        assert time.monotonic() - began < 30
        began = time.monotonic()
        Worker("127.0.0.1:9", bell=listen, pause=0.05)._wait()  # all that was rung is heard
        assert time.monotonic() - began > 0.04
    finally:
        os.close(ring)
    with pytest.raises(worker.Ended):
        waiting._wait()
    os.close(listen)


def test_without_a_bell_a_worker_asks_again_after_a_pause(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    Worker("127.0.0.1:9", pause=0.7)._wait()
    assert slept == [0.7]


# -- answers ---------------------------------------------------------------------------------------


class Bundle:
    """The app bundle of a task: nobody may look at it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the bundle was touched: {name}")


@pytest.fixture
def task(node, monkeypatch):
    """A task with a message; `context` is what Flower makes of the bundle and the node config."""
    for name in ("run_id", "task_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 5)
    question = {"algorithm": to_config(fd.FedAvg(fd.Linear())), "seed": 0, "session": ""}
    schema = {"columns": ["age", "pulse", "score"], "classes": ["ill", "well"]}
    asked = messages.content({**question, "schema": schema})
    message = Message(asked, dst_node_id=9, message_type="query.hello")
    message.metadata.__dict__["_message_id"] = "x"
    found = SimpleNamespace(beats=[], node=node)
    found.context = Context(
        run_id=5, node_id=9, node_config={"data": "/of/nobody"}, state=RecordDict(),
        run_config={"code": "os:system"},
    )  # fmt: skip

    class Beat:
        def __init__(self, beat):
            self.is_running = False

        def start(self):
            self.is_running = True
            found.beats.append(self)

        def stop(self):
            assert self.is_running
            self.is_running = False

    monkeypatch.setattr(heartbeat, "HeartbeatSender", Beat)
    monkeypatch.setattr(
        runtime, "pull_task_input", lambda client: (message, found.context, object(), Bundle())
    )
    return found


@pytest.fixture
def policy(tmp_path) -> Path:
    deploy.init(tmp_path / "trial", {"north": written(tmp_path, "north", table(0))}, "outcome")
    return tmp_path / "trial" / "sites" / "north" / "policy.toml"


def connection() -> SimpleNamespace:
    client = SimpleNamespace(closed=0)
    client.close = lambda: setattr(client, "closed", client.closed + 1)
    return client


def test_a_message_is_answered_by_the_policy_and_never_by_the_bundle(task, policy):
    client = connection()
    Worker("127.0.0.1:9", policy=policy).answer(client)
    assert task.context.run_config == {}  # the bundle's names code
    assert task.context.node_config["data"] == str(policy.parents[3] / "north.csv")
    [(pushed, answer, context)] = task.node.pushed
    assert messages.header(answer)["name"] == "north" and pushed is client
    assert answer.metadata.reply_to_message_id == "x" and context is task.context
    assert task.node.finished == [(client, task.context, SubStatus.COMPLETED, "")]
    assert client.closed == 1 and [beat.is_running for beat in task.beats] == [False]
    assert (policy.parent / "cache" / "log.jsonl").is_file()


def test_without_a_policy_the_node_config_counts(task, tmp_path):
    data = written(tmp_path, "south", table(1))
    task.context.node_config = {"data": str(data), "label": "outcome", "client": 3}
    Worker("127.0.0.1:9", code="tests.conformance:ALGORITHMS").answer(connection())
    assert task.context.run_config == {"code": "tests.conformance:ALGORITHMS"}
    [(_, answer, _)] = task.node.pushed
    assert messages.header(answer)["clients"] == [3]


def test_a_policy_that_cannot_be_read_answers_nothing(task, policy):
    """It is read for every message: a change counts from the next one on."""
    policy.write_text("[site\n")
    client = connection()
    with pytest.raises(fd.ConfigError, match="not valid TOML"):
        Worker("127.0.0.1:9", policy=policy).answer(client)
    assert task.node.pushed == task.node.finished == []
    assert client.closed == 1 and not task.beats[0].is_running


def test_a_heartbeat_that_has_ended_is_not_stopped_again(task, policy, monkeypatch):
    def end(client, answer, context):
        task.beats[0].is_running = False

    monkeypatch.setattr(runtime, "push_message", end)
    Worker("127.0.0.1:9", policy=policy).answer(connection())
    assert len(task.node.finished) == 1
