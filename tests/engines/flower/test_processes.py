"""What is changed inside Flower, without its processes: heartbeats, forked clients that are killed,
answers for them, and processes that end with the one that started them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import foedus as fd

pytest.importorskip("flwr")

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from foedus.engines.flower import processes


def status_error(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://127.0.0.1")
    return httpx.HTTPStatusError(
        f"status {code}", request=request, response=httpx.Response(code, request=request)
    )


# -- this process as the server --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "settled"),
    [
        (None, True),
        (httpx.ConnectError("nobody there"), False),
        (status_error(503), False),  # busy: to be asked again
        (status_error(504), False),
        (status_error(401), True),  # the run has ended: the next message finds out
    ],
    ids=str,
)
def test_a_heartbeat_that_fails_sends_no_signal(error, settled):
    sent = []

    def beat(request):
        sent.append(request)
        if error is not None:
            raise error

    assert processes.say_alive(SimpleNamespace(SendTaskHeartbeat=beat)) is settled
    assert len(sent) == 1


def test_a_superlink_that_does_not_start_the_run(monkeypatch):
    asked = []

    def acquire(request):
        asked.append(list(request.supported_task_types))
        return AcquireTaskResponse()

    client = SimpleNamespace(AcquireTask=acquire)
    monkeypatch.setattr(RuntimeHttpClient, "from_server_address", lambda **settings: client)
    with pytest.raises(fd.FoedusError, match=r"has not started the run within 0\.12 s"):
        processes.become_server("127.0.0.1:1", b"", patience=0.12)
    assert len(asked) >= 2 and asked[0] == [TaskType.SERVER_APP]


# -- commands --------------------------------------------------------------------------------------


def test_several_commands_in_one_process(monkeypatch):
    import flwr.cli.app

    called = []
    monkeypatch.setattr(
        flwr.cli.app, "app", lambda words, standalone_mode: called.append((words, standalone_mode))
    )
    monkeypatch.setattr(sys, "argv", ["flwr", "run", "app", "--then", "stop", "7"])
    processes.commands()
    assert called == [(["run", "app"], False), (["stop", "7"], False)]


def test_every_role_runs_its_command(monkeypatch):
    import flwr.superlink.cli
    import flwr.supernode.cli

    called = []
    for module, name in (
        (flwr.superlink.cli, "flower_superlink"),
        (flwr.supernode.cli, "flower_supernode"),
    ):
        monkeypatch.setattr(module, name, lambda name=name: called.append(name))
    processes.ROLES["superlink"]()
    processes.ROLES["plain-supernode"]()
    assert called == ["flower_superlink", "flower_supernode"]


@pytest.fixture
def restored(monkeypatch):
    """Whatever is changed inside Flower is undone."""
    for place, name in (
        (heartbeat, "HEARTBEAT_DEFAULT_INTERVAL"),
        (fleet_http_connection, "HEARTBEAT_DEFAULT_INTERVAL"),
        (start_client_internal, "time"),
        (InMemoryNodeState, "finish_task"),
        (InMemoryNodeState, "get_messages_legacy"),
        (run_superexec, "get_executor"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    return monkeypatch


def test_an_eager_supernode_looks_again_soon(restored):
    seen = []

    def supernode():
        slept = time.monotonic()
        start_client_internal.time.sleep(3)
        seen.append(time.monotonic() - slept)
        seen.append(start_client_internal.time.monotonic is time.monotonic)

    import flwr.supernode.cli.flower_supernode  # noqa: F401 - the module, not the function in it

    restored.setattr(
        sys.modules["flwr.supernode.cli.flower_supernode"], "flower_supernode", supernode
    )
    processes.eager_supernode(pause=0.05, beat=7)
    assert 0.05 <= seen[0] < 2.0 and seen[1]
    assert heartbeat.HEARTBEAT_DEFAULT_INTERVAL == 7
    assert fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL == 7
    assert InMemoryNodeState.finish_task.__module__ == processes.__name__


# -- clients that are forked -----------------------------------------------------------------------


@pytest.fixture
def executor(restored):
    """The executor that forks; `children.run` is what a child does in the place of a ClientApp."""
    import flwr.supernode.runtime.run_clientapp as runtime

    children = SimpleNamespace(run=lambda *task: None, reported=[], closed=0)

    class Client:
        def close(self):
            children.closed += 1

    def connect(**settings):
        # whoever reports for a child tries once: the child may have finished before it was killed
        assert settings["retry_invoker"].should_giveup(ValueError())
        assert settings["server_address"] == "127.0.0.1:9" and settings["insecure"]
        return Client()

    def report(client, context, status, details):
        children.reported.append((context, status, details))
        if children.refuse:
            raise httpx.ConnectError("the SuperNode is gone")

    children.refuse = False
    module = importlib.import_module("flwr.supercore.cli.flower_superexec")
    restored.setattr(module, "flower_superexec", lambda: None)
    restored.setattr(runtime, "run_clientapp", lambda *task: children.run(*task))
    restored.setattr(runtime, "push_task_output", report)
    restored.setattr(RuntimeHttpClient, "from_server_address", connect)
    processes.forking_executor()
    children.executor = run_superexec.get_executor("any", config=None)
    return children


SPEC = ExecutionSpec(
    task_type=TaskType.CLIENT_APP, runtime_api_address="127.0.0.1:9", token="secret", insecure=True,
    root_certificates_path=None, runtime_dependency_install=False, parent_pid=None,
    suppress_output=False, task_id=1,
)  # fmt: skip


def launch(executor, monkeypatch) -> int:
    """Fork a child and collect it; other children of this process are left alone. Its status."""
    fork, wait, children, found = os.fork, os.waitpid, [], []

    def fork_known():
        children.append(fork())
        return children[-1]

    def wait_for_it(pid, how):
        assert (pid, how) == (-1, os.WNOHANG)
        pid, status = wait(children[0], how)
        found.extend([status] if pid else [])
        return pid, status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", fork_known)
        patch.setattr(os, "waitpid", wait_for_it)
        assert executor.executor.launch(SPEC) == LaunchResult.accepted()
        end = time.monotonic() + 20
        while not found and time.monotonic() < end:
            time.sleep(0.01)
            executor.executor.reconcile()
        executor.executor.reconcile()  # nobody is left
    return os.waitstatus_to_exitcode(found[0])


def test_a_forked_client_runs_its_task(executor, tmp_path, monkeypatch):
    def work(address, token, insecure, certificates):
        (tmp_path / "task").write_text(f"{os.getppid()} {address} {token} {insecure}")

    executor.run = work
    assert launch(executor, monkeypatch) == 0
    assert (tmp_path / "task").read_text() == f"{os.getpid()} 127.0.0.1:9 secret True"
    assert executor.reported == []


def test_a_forked_client_that_fails_has_reported_it_itself(executor, monkeypatch):
    def fail(*task):
        raise ValueError("a bug")

    executor.run = fail
    assert launch(executor, monkeypatch) == 1
    assert executor.reported == []


@pytest.mark.parametrize("refuse", [False, True])
def test_a_forked_client_that_is_killed_is_reported(executor, refuse, monkeypatch):
    executor.refuse = refuse
    executor.run = lambda *task: os.kill(os.getpid(), signal.SIGKILL)
    assert launch(executor, monkeypatch) == -signal.SIGKILL
    assert executor.reported == [(None, SubStatus.FAILED, processes.KILLED)]
    assert executor.closed == 1


# -- answers for clients that were killed ----------------------------------------------------------


@pytest.fixture
def node(restored):
    """A SuperNode's memory with one message of run 5, of which task `task` is to answer."""
    for name in ("run_id", "task_id", "node_id"):
        restored.setattr(TaskIdentity, f"_{name}", 5)
    processes.answer_for_the_killed()
    state = InMemoryNodeState(ObjectStoreFactory().store())
    asked = Message(RecordDict({"c": ConfigRecord({"a": 1})}), dst_node_id=9, message_type="train")
    asked.metadata.__dict__["_message_id"] = asked.object_id
    state.store_message(asked)
    state.record_message_processing_start(asked.object_id)
    task = state.create_task(TaskType.CLIENT_APP, 5)
    state.claim_task(task)
    return SimpleNamespace(state=state, asked=asked, task=task)


def answer(node, sent: bool) -> str:
    """Store an answer of the client; of its two objects, both are there or only the first."""
    reply = Message(RecordDict({"c": ConfigRecord({"b": 2})}), reply_to=node.asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    session = node.state.start_session(5)
    _, missing = node.state.store_message_and_object_tree(reply, get_object_tree(reply), session)
    objects = get_all_nested_objects(reply)
    assert len(missing) >= 2
    for name in missing if sent else missing[:1]:
        node.state.store_object(5, session, name, objects[name].deflate())
    return reply.object_id


def killed(node) -> list[Message]:
    """The answers that the SuperNode gives out when the client process was killed."""
    assert node.state.finish_task(node.task, SubStatus.FAILED, processes.KILLED)
    return list(node.state.get_messages_legacy(is_reply=True))


@pytest.mark.parametrize("taken", [False, True], ids=["not taken up", "taken up"])
def test_a_message_is_answered_for_a_client_that_was_killed(node, taken):
    if taken:
        assert len(node.state.get_messages_legacy(is_reply=False)) == 1
    [error] = killed(node)
    assert error.has_error() and error.error.reason == "ClientApp stopped responding."
    assert error.metadata.reply_to_message_id == node.asked.object_id


def test_an_answer_of_which_a_part_is_missing_is_replaced(node):
    name = answer(node, sent=False)
    assert node.state.get_messages_legacy(is_reply=True) == []  # not before it is whole
    [error] = killed(node)
    assert error.has_error()
    assert name not in node.state.msg_store
    assert node.state.object_store.get(name) is None


def test_a_whole_answer_stands(node):
    name = answer(node, sent=True)
    [reply] = killed(node)
    assert reply.metadata.message_id == name and not reply.has_error()


def test_a_client_that_fails_by_itself_is_not_answered_for(node):
    node.state.get_messages_legacy(is_reply=False)
    assert node.state.finish_task(node.task, SubStatus.FAILED, "a bug")
    assert node.state.get_messages_legacy(is_reply=True) == []
    assert not node.state.finish_task(node.task, SubStatus.FAILED, processes.KILLED)  # already
    assert node.state.get_messages_legacy(is_reply=True) == []


# -- processes that end with their parent ----------------------------------------------------------


@pytest.mark.parametrize("leader", [True, False])
def test_a_process_ends_soon_after_its_parent(leader, monkeypatch):
    """The leader of a group takes the group with it."""
    parents, calls, watchers, getppid = [70, 70, 1], [], [], os.getppid
    here = threading.current_thread()
    monkeypatch.setattr(
        os, "getppid", lambda: parents.pop(0) if threading.current_thread() is here else getppid()
    )
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() if leader else 3)
    monkeypatch.setattr(os, "killpg", lambda *how: calls.append(("killpg", *how)))
    monkeypatch.setattr(os, "_exit", lambda code: calls.append(("exit", code)))
    monkeypatch.setattr(
        processes.threading,
        "Thread",
        lambda target, daemon: SimpleNamespace(start=lambda: watchers.append((target, daemon))),
    )
    processes.end_with(70, every=0.01)
    [(watch, daemon)] = watchers
    assert daemon and calls == []
    watch()
    assert parents == []
    group = [("killpg", os.getpid(), signal.SIGKILL)] if leader else []
    assert calls == [*group, ("exit", 1)]
