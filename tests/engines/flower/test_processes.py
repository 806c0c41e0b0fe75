"""What is changed inside Flower, without its processes: heartbeats, the two addresses of a
SuperLink, answers for clients that were killed, and processes that end with their parent.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import ssl
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import foedus as fd

pytest.importorskip("flwr")

import httpx
import uvicorn
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import serde
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from foedus.engines.flower import keys, processes
from foedus.engines.flower.loopback import free_port
from foedus.engines.flower.worker import KILLED, Worker, main


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


@pytest.fixture
def server(monkeypatch):
    """The server of a run that waits at a SuperLink from the second question on."""
    answers = [AcquireTaskResponse(), AcquireTaskResponse(token="the token", task=Task(task_id=4))]
    found = SimpleNamespace(closed=0, beats=[], acquired=0)

    def acquire(request):
        found.acquired += 1
        return answers.pop(0)

    def close():
        found.closed += 1

    def connect(**settings):
        found.settings = settings
        return SimpleNamespace(AcquireTask=acquire, close=close)

    class Grid:
        def __init__(self, **settings):
            assert settings["token"] == "the token" and not settings["insecure"]
            give_up = None if found.patient else (lambda error: "enough" in str(error))
            self._retry_invoker = SimpleNamespace(should_giveup=give_up)
            run = SimpleNamespace(run_id=5)
            task = SimpleNamespace(run=run, task_id=4, context=SimpleNamespace(node_id=6))
            self._runtime_client = SimpleNamespace(
                PullTaskInput=lambda request: task, SendTaskHeartbeat=found.beats.append
            )

        def set_run(self, run):
            found.run = run

    class Beat:
        def __init__(self, beat):
            self.beat = beat

        def start(self):
            assert self.beat()

    found.patient = False
    monkeypatch.setattr(RuntimeHttpClient, "from_server_address", connect)
    monkeypatch.setattr(http_grid, "HttpGrid", Grid)
    monkeypatch.setattr(heartbeat, "HeartbeatSender", Beat)
    monkeypatch.setattr(serde, "run_from_proto", lambda run: ("read", run.run_id))
    for name in ("run_id", "task_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 0)
    return found


def test_this_process_becomes_the_server_of_a_run(server):
    grid = processes.become_server("127.0.0.1:1", b"certificate")
    assert server.settings["root_certificates"] == b"certificate"
    assert not server.settings["insecure"]
    assert (server.acquired, server.closed, server.run) == (2, 1, ("read", 5))
    assert len(server.beats) == 1 and grid.beat is not None
    grid.speak()
    assert (TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id) == (5, 4, 6)


@pytest.mark.parametrize("patient", [False, True])
def test_a_run_that_has_ended_is_not_asked_for_again(patient, server):
    """Nor what Flower gives up by itself; everything else is tried again."""
    server.patient = patient
    grid = processes.become_server("127.0.0.1:1", b"")
    give_up = grid._retry_invoker.should_giveup
    assert give_up(status_error(401))
    assert not give_up(status_error(503)) and not give_up(httpx.ConnectError("nobody there"))
    assert give_up(ValueError("enough")) is not patient


def test_errors_of_a_link_that_is_lost():
    assert issubclass(httpx.ConnectError, processes.link_errors())
    assert issubclass(RunNotRunningException, processes.link_errors())
    assert not issubclass(ValueError, processes.link_errors())


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


def test_a_worker_is_given_its_words_and_its_bell(monkeypatch, tmp_path):
    made = []
    (tmp_path / "secret").write_bytes(b"secret")
    monkeypatch.setattr(Worker, "run", lambda worker: made.append(worker))
    monkeypatch.setenv(processes.BELL, "7")
    monkeypatch.setattr(sys, "argv", ["worker", "127.0.0.1:9", str(tmp_path / "secret"), "a:b"])
    processes.ROLES["worker"]()
    assert made == [Worker("127.0.0.1:9", b"secret", "a:b", None, 7)]
    assert processes.BELL not in os.environ  # not for what it starts
    main(["127.0.0.1:9", str(tmp_path / "secret"), "", "policy.toml"])
    assert made[1] == Worker("127.0.0.1:9", b"secret", None, Path("policy.toml"), None)


# -- one address for operators, another for sites --------------------------------------------------


@pytest.fixture
def command(monkeypatch):
    """Flower's command, which serves its app; what it is served by is undone."""
    module = importlib.import_module("flwr.superlink.cli.flower_superlink")
    monkeypatch.setattr(module, "uvicorn", module.uvicorn)
    monkeypatch.setattr(
        module, "flower_superlink", lambda: module.uvicorn.run("the app", host="127.0.0.1", port=8)
    )
    return module


def test_a_superlink_without_sites_elsewhere_is_flowers_own(command, monkeypatch):
    monkeypatch.delenv(processes.FLEET, raising=False)
    served = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **how: served.append((app, how)))
    processes.ROLES["superlink"]()
    assert served == [("the app", {"host": "127.0.0.1", "port": 8})]


def test_a_superlink_with_an_address_for_sites(command, monkeypatch):
    served = []
    monkeypatch.setattr(
        processes, "serve_twice", lambda fleet, app, **how: served.append((fleet, app, how))
    )
    monkeypatch.setenv(processes.FLEET, json.dumps(["::1:9091", "a.pem", "a.key"]))
    processes.ROLES["superlink"]()
    fleet = {"host": "::1", "port": 9091, "ssl_certfile": "a.pem", "ssl_keyfile": "a.key"}
    assert served == [(fleet, "the app", {"host": "127.0.0.1", "port": 8})]
    assert processes.FLEET not in os.environ


def asked(scope: dict) -> list[dict]:
    """What `FleetOnly` sends for a request; its app sends its own scope."""
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"passed on": scope["path"]})

    asyncio.run(processes.FleetOnly(app)(scope, None, send))
    return sent


@pytest.mark.parametrize("path", ["/v1/fleet/activate-node", "/v1/fleet/"])
def test_what_sites_ask_is_passed_on(path):
    assert asked({"type": "http", "path": path}) == [{"passed on": path}]


@pytest.mark.parametrize(
    "path",
    ["/v1/control/start-run", "/v1/runtime/x", "/", "", "/v1/fleet", "/x/v1/fleet/", "//v1/fleet/"],
)
def test_what_operators_ask_is_refused_in_a_sentence(path):
    start, body = asked({"type": "http", "path": path})
    assert (start["type"], start["status"]) == ("http.response.start", 403)
    assert body["body"].startswith(b"This address is for the sites of a federation.")


@pytest.mark.parametrize("path", ["/v1/fleet/x", "/v1/control"])
def test_websockets_are_closed(path):
    close = {"type": "websocket.close", "code": 1008}
    assert asked({"type": "websocket", "path": path}) == [close]


def test_one_app_is_served_at_two_addresses(monkeypatch, tmp_path):
    """All of it on loopback, and with TLS what is for sites; both end together."""
    tls, servers, ports = keys.certificates(tmp_path), [], [free_port(), free_port()]

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": scope["path"].encode()})

    class Server(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Server)
    fleet = {"host": "127.0.0.1", "port": ports[1]}
    fleet |= {"ssl_certfile": str(tls["certificate"]), "ssl_keyfile": str(tls["key"])}
    how = {"host": "127.0.0.1", "port": ports[0], "log_level": "critical", "ws": "none"}
    thread = threading.Thread(target=processes.serve_twice, args=(fleet, app), kwargs=how)
    thread.start()
    end = time.monotonic() + 20
    while len(servers) < 2 or not all(s.started for s in servers):
        assert time.monotonic() < end
        time.sleep(0.01)
    context = ssl.create_default_context(cafile=str(tls["ca"]))
    with httpx.Client(verify=context) as client:
        inside, outside = f"http://127.0.0.1:{ports[0]}", f"https://127.0.0.1:{ports[1]}"
        assert client.get(f"{inside}/v1/control/x").text == "/v1/control/x"
        assert client.get(f"{outside}/v1/fleet/x").text == "/v1/fleet/x"
        refused = client.get(f"{outside}/v1/control/x")
        assert (refused.status_code, refused.text) == (403, processes.FOR_SITES)
    servers[0].should_exit = True
    thread.join(20)
    assert not thread.is_alive() and servers[1].should_exit


# -- a SuperNode that looks for messages more often ------------------------------------------------


@pytest.fixture
def restored(monkeypatch):
    """Whatever is changed inside Flower is undone."""
    for place, name in (
        (heartbeat, "HEARTBEAT_DEFAULT_INTERVAL"),
        (fleet_http_connection, "HEARTBEAT_DEFAULT_INTERVAL"),
        (start_client_internal, "time"),
        (InMemoryNodeState, "finish_task"),
        (InMemoryNodeState, "get_messages_legacy"),
        (start_client_internal, "_pull_and_store_message"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    return monkeypatch


@pytest.fixture
def supernode(restored):
    """A SuperNode that runs `found.work`; `slept` has the seconds that it really sleeps."""
    import flwr.supernode.cli.flower_supernode  # noqa: F401 - the module, not the function in it

    listen, ring = os.pipe()
    os.set_blocking(listen, False)
    found = SimpleNamespace(listen=listen, slept=[], now=100.0, runs=[], work=lambda: None)
    restored.setenv(processes.BELL, str(ring))
    command = sys.modules["flwr.supernode.cli.flower_supernode"]
    restored.setattr(command, "flower_supernode", lambda: found.work())
    restored.setattr(
        start_client_internal, "_pull_and_store_message", lambda **how: found.runs.pop(0)
    )
    clock = SimpleNamespace(**vars(time))
    clock.sleep, clock.monotonic = found.slept.append, lambda: found.now
    restored.setattr(processes, "time", clock)
    yield found
    os.close(listen)
    os.close(ring)


def test_an_eager_supernode_looks_again_soon(supernode):
    def work():
        sleep, pull = (
            start_client_internal.time.sleep,
            start_client_internal._pull_and_store_message,
        )
        sleep(3)  # it has just begun
        supernode.now += 5
        sleep(3)
        supernode.runs = [None, 8]
        assert pull(message=1) is None
        sleep(3)
        assert pull(message=1) == 8
        sleep(3)  # there may be another one soon
        sleep(0.5)  # for the answer of the worker
        sleep(0.001)

    supernode.work = work
    processes.eager_supernode(busy=0.05, idle=0.3, beat=7)
    assert supernode.slept == [0.05, 0.3, 0.3, 0.05, 0.01, 0.001]
    assert start_client_internal.time.perf_counter is time.perf_counter
    assert heartbeat.HEARTBEAT_DEFAULT_INTERVAL == 7
    assert fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL == 7
    assert InMemoryNodeState.finish_task.__module__ == processes.__name__


def test_an_eager_supernode_rings_when_a_message_is_there(supernode):
    def work():
        supernode.runs = [None, 8]
        start_client_internal._pull_and_store_message()
        with pytest.raises(BlockingIOError):
            os.read(supernode.listen, 9)
        start_client_internal._pull_and_store_message()
        assert os.read(supernode.listen, 9) == b"!"

    supernode.work = work
    processes.ROLES["supernode"]()
    assert processes.BELL not in os.environ


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
    assert node.state.finish_task(node.task, SubStatus.FAILED, KILLED)
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
    assert not node.state.finish_task(node.task, SubStatus.FAILED, KILLED)  # already
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
