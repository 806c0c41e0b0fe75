"""The Ray engine with its workers in this process: the numbers of `Local`, workers that are lost at
the worst moments, and connections.
"""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch

import foedus as fd
from foedus import testing
from foedus.base import random
from foedus.core.exchange import Ask
from foedus.engines.ray import cluster, worker
from foedus.engines.ray import engine as engine_module
from tests.conformance import Everything

pytest.importorskip("ray")

from tests.engines.ray.here import Actor, HereRay

SCAFFOLD = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)


@pytest.fixture
def here(monkeypatch) -> HereRay:
    """The Ray that this process is connected to, with four CPUs."""
    return install(HereRay(), monkeypatch)


def install(ray: HereRay, monkeypatch) -> HereRay:
    monkeypatch.setattr(cluster, "load_ray", lambda: ray)
    monkeypatch.setattr(cluster, "_connections", 0)
    return ray


@pytest.fixture(scope="module")
def undisturbed(fed) -> fd.Run:
    with pytest.MonkeyPatch.context() as patch:
        install(HereRay(), patch)
        return fd.run(Everything(), fed, 3, engine=fd.Ray(workers=2))


class Loss:
    """Kills the worker at the given calls of a method, counted over all workers; with `after`, once
    it has sent that number of answers.
    """

    def __init__(self, ray: HereRay, method: str, calls: set[int], after: int = 0):
        self.ray, self.method, self.calls, self.after, self.seen = ray, method, calls, after, 0
        ray.disturb = self

    def __call__(self, actor: Actor, method: str, number: int) -> None:
        if method == self.method and not actor.dead:
            self.seen += number == 0
            if self.seen in self.calls and number == self.after:
                self.ray.kill(actor)


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [SCAFFOLD, Everything()], ids=lambda a: type(a).__name__)
def test_the_numbers_of_local(algorithm, fed, here):
    options = {"participation": 0.6, "seed": 3}
    local = fd.run(algorithm, fed, 3, **options)
    far = fd.run(algorithm, fed, 3, engine=fd.Ray(workers=2), **options)
    columns = [c for c in local.history if c != "seconds"]
    for name in columns:
        assert far.history[name].tolist() == pytest.approx(
            local.history[name].tolist(), rel=1e-5, nan_ok=True
        ), name
    assert here.alive == [] and len(here.actors) == 2
    assert here.connected  # somebody else's connection is left alone


@pytest.mark.parametrize(
    ("method", "after"),
    [
        ("open", 0),
        ("reduce", 0),
        ("reduce", 1),
        ("exchange", 0),
        ("exchange", 1),
        ("exchange", 2),
        ("evaluate_own", 1),
        ("evaluate_global", 1),
        ("copy", 0),
        ("copy", 1),
        ("restore", 0),
    ],
)
def test_a_worker_lost_at_any_moment_changes_nothing(
    method, after, undisturbed, fed, here, monkeypatch
):
    """Before a step or after it, with some of the replies sent, or when it is copied."""
    monkeypatch.setattr(engine_module, "COPY_EVERY", 3)
    monkeypatch.setattr(worker, "_CHUNK", 1)  # a message for each batch of replies
    if method == "restore":  # lost once more while it takes up its states
        first, second = Loss(here, "reduce", {5}), Loss(here, "restore", {1})
        here.disturb = lambda *call: (first(*call), second(*call))
    else:
        Loss(here, method, {2, 5}, after)
    disturbed = fd.run(Everything(), fed, 3, engine=fd.Ray(workers=2))
    testing._same(undisturbed, disturbed, f"the loss of a worker in {method} left a trace")
    assert len(here.actors) > 2  # somebody was replaced
    assert here.alive == []


def test_delays_are_passed_to_the_worker_that_takes_over(fed, here):
    late = fd.Delayed(fd.Ray(workers=2), up=[0, 1, 2, 0, 1])
    algorithm = fd.FedRes(step=0.05)
    undisturbed = fd.run(algorithm, fed, 4, engine=late)
    Loss(here, "reduce", {4})
    testing._same(undisturbed, fd.run(algorithm, fed, 4, engine=late), "the delays were lost")


def test_a_step_that_kills_every_worker_is_given_up(fed, here):
    Loss(here, "reduce", set(range(1, 100)))
    with pytest.raises(fd.FoedusError) as info:
        fd.run(SCAFFOLD, fed, 1, engine=fd.Ray(workers=1))
    assert str(info.value) == (
        "the worker of clients 0 to 4 was lost 3 times in a row in one exchange (The actor died "
        "unexpectedly before finishing this task.); a step that takes more memory than there is, "
        "or that crashes its process, would do that"
    )
    assert len(here.actors) == 3 and here.alive == []


def test_the_worker_of_one_client_is_named_so(fed, here):
    Loss(here, "reduce", set(range(1, 100)))
    with pytest.raises(fd.FoedusError, match="the worker of client 3 was lost 3 times"):
        fd.run(SCAFFOLD, fed.select([3]), 1, engine=fd.Ray(workers=1))


def test_what_a_worker_cannot_read_is_an_error_of_the_settings(fed, here):
    def disturb(actor, method, number):
        if method == "reduce":
            raise here.exceptions.RayTaskError("reduce", "Traceback\nImportError: no mine", None)

    here.disturb = disturb
    with pytest.raises(fd.ConfigError) as info:
        fd.run(SCAFFOLD, fed, 1, engine=fd.Ray(workers=1))
    assert str(info.value).startswith("a Ray worker cannot use what it was sent: ")
    assert str(info.value).endswith("ImportError: no mine")


@pytest.mark.parametrize(
    ("how", "why"), [("the store", "about the failure"), ("the worker", "no attribute 'session'")]
)
def test_states_that_cannot_be_restored_say_what_helps(how, why, fed, here, monkeypatch):
    monkeypatch.setattr(engine_module, "COPY_EVERY", 1)
    first = Loss(here, "reduce", {2})

    def disturb(actor, method, number):
        first(actor, method, number)
        if method == "restore" and number == 0:
            if how == "the store":
                raise here.exceptions.ObjectLostError("ab", None, "")
            actor.object.release()

    here.disturb = disturb
    with pytest.raises(fd.CheckpointError) as info:
        fd.run(SCAFFOLD, fed, 3, engine=fd.Ray(workers=1))
    text = str(info.value)
    assert text.startswith("the worker of clients 0 to 4 was lost, and the states of these clients")
    assert "their last copy is lost too (" in text and why in text
    assert text.endswith("fd.run(..., checkpoint=PATH, resume=True) goes on from what is on disk")


def test_a_copy_that_fails_is_an_error(fed, here):
    session = fd.Ray(workers=1).open(SCAFFOLD, fed, random.key(0))
    session.shards[0].worker.object.release()
    with pytest.raises(AttributeError, match="session"):
        session.save()
    session.close()


def test_checkpoints_are_those_of_local(fed, here, tmp_path):
    path, options = tmp_path / "run.safetensors", {"participation": 0.6}
    fd.run(SCAFFOLD, fed, 2, checkpoint=path, **options)
    resumed = fd.run(
        SCAFFOLD, fed, 4, engine=fd.Ray(workers=2), checkpoint=path, resume=True, **options
    )
    local = fd.run(SCAFFOLD, fed, 4, **options)
    for name in ("loss", "accuracy", "bytes_up"):
        assert resumed.history[name].tolist() == pytest.approx(local.history[name].tolist())


def test_workers_wait_for_the_next_run(fed, here):
    with fd.Ray(workers=2) as engine:
        for _ in range(2):
            fd.run(SCAFFOLD, fed, 1, engine=engine)
        assert len(here.alive) == len(here.actors) == 2
        assert not hasattr(here.actors[0].object, "session")  # its clients are let go
        [held] = engine._held
        assert len(held.idle) == 2
        assert len(held.hire(3)) == 3 and len(here.actors) == 3 and held.idle == []
        held.idle += here.actors
    assert here.alive == []


def test_a_session_is_closed_where_opening_fails(fed, here):
    def disturb(actor, method, number):
        if method == "open" and number == 0:
            raise here.exceptions.RayTaskError("open", "Traceback\nImportError: no mine", None)

    here.disturb = disturb
    with pytest.raises(fd.ConfigError, match="cannot use what it was sent"):
        fd.Ray(workers=2).open(SCAFFOLD, fed, random.key(0))
    assert here.alive == []


def test_rows_are_sent_once_for_all_rounds(fed, here, monkeypatch):
    session = fd.Ray(workers=2).open(Everything(), fed, random.key(0))
    ask = Ask("top", {}, session.ids, random.key(0), 1, 0)
    assert session.reduce(ask, torch.ones(5, dtype=torch.float64)).clients == 5
    x, y = (torch.from_numpy(a) for a in (fed.data.x_test, fed.data.y_test))
    sent, put = [], here.put
    monkeypatch.setattr(here, "put", lambda value: sent.append(value) or put(value))
    first = session.evaluate_global(x, y)["loss"]
    assert torch.equal(session.evaluate_global(x, y)["loss"], first) and len(sent) == 1
    session.evaluate_global(x[:50], y[:50])
    assert len(sent) == 2
    session.close()


# -- connections -----------------------------------------------------------------------------------


def test_ray_is_started_once_and_ended_by_the_last(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    here = install(HereRay(cpus=6, connected=False), monkeypatch)
    first = cluster.Cluster(None, 2, None)
    # six cores for two workers: three each
    assert (first.resources, first.threads, first.workers) == ({"CPU": 3}, 3, 2)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    assert here.inits == [("local", {"num_cpus": 6, "include_dashboard": False, **quiet})]
    second = cluster.Cluster(None, 1, {"CPU": 2.5})  # in the same Ray
    assert (second.threads, second.workers) == (2, 1)
    assert len(here.inits) == 1
    first.close()
    first.close()  # nothing is left to close
    assert here.connected
    second.close()
    assert not here.connected


def test_an_address_is_connected_to(monkeypatch):
    here = install(HereRay(connected=False), monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = cluster.Cluster(address, None, None)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    assert here.inits == [(address, quiet)]
    assert (found.workers, found.threads) == (4, 1)  # one for each of its CPUs
    found.close()
    cluster.Cluster("auto", 1, None).close()
    assert here.inits[1:] == [("auto", quiet)]


def test_another_cluster_than_that_of_this_process_is_refused(here):
    with pytest.raises(fd.ConfigError) as info:
        cluster.Cluster("10.1.2.3:6379", 1, None)
    assert str(info.value) == (
        "address='10.1.2.3:6379': this process is connected to the Ray cluster at 127.0.0.1:6379 "
        "already"
    )
    cluster.Cluster("127.0.0.1:6379", 1, None)  # the very same


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (None, RuntimeError("\n  The node is busy\n\n"), "cannot connect to Ray: The node is busy"),
        ("auto", ConnectionError(), "cannot connect to Ray: ConnectionError"),
        ("auto", fd.ConfigError("not so"), "not so"),
    ],
)
def test_ray_that_cannot_be_started(address, error, message, monkeypatch):
    here = install(HereRay(connected=False), monkeypatch)

    def init(*args, **options):
        raise error

    here.init = init
    with pytest.raises(fd.ConfigError) as info:
        cluster.Cluster(address, 1, None)
    expected = message if message == "not so" else f"address={address!r}: {message}"
    assert str(info.value) == expected


@pytest.mark.parametrize("address", ["somewhere", "ray://a:1", ":6379", "a:b"])
def test_addresses_that_are_none(address):
    with pytest.raises(fd.ConfigError) as info:
        cluster._reach(address)
    assert str(info.value) == (
        f"address={address!r} must be 'HOST:PORT' of a running Ray cluster, or 'auto'"
    )


def test_an_address_at_which_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        cluster._reach(address)
    with pytest.raises(fd.ConfigError, match=r"no answer .* is the Ray cluster running"):
        cluster._reach(address)


def test_ray_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(fd.ConfigError, match=r"pip install 'foedus\[ray\]'"):
        cluster.load_ray()


# -- workers ---------------------------------------------------------------------------------------


def test_resources_are_those_asked_for(here):
    given = {"CPU": 2, "GPU": 0.5, "memory": 100, "chips": 3}
    here.resources.update(GPU=1.0, chips=6.0)
    cluster.Cluster(None, 2, given).hire(1)
    assert here.asked_for == [
        {"num_cpus": 2, "num_gpus": 0.5, "memory": 100, "resources": {"chips": 3},
         "scheduling_strategy": "SPREAD"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "resources", "room"),
    [(5, None, 4), (3, {"CPU": 1.5}, 2), (None, {"chips": 1}, 0)],
)
def test_workers_for_whom_there_is_no_room(workers, resources, room, here):
    need = {"CPU": 1, **(resources or {})}
    with pytest.raises(fd.ConfigError) as info:
        cluster.Cluster(None, workers, resources)
    assert str(info.value) == (
        f"workers={workers!r} with resources={need} each: the Ray cluster has room for {room}; "
        "its nodes have CPU 4"
    )


def test_a_worker_that_cannot_start(here):
    def disturb(actor, method, number):
        if method == "__ray_ready__":
            raise here.exceptions.RayTaskError("ready", "Traceback\nImportError: no mine", None)

    here.disturb = disturb
    with pytest.raises(fd.ConfigError, match=r"a Ray worker cannot start: .*ImportError: no mine"):
        cluster.Cluster(None, 2, None).hire(2)
    assert here.alive == []


def test_workers_that_others_keep_busy(monkeypatch):
    here = install(HereRay(slow=1), monkeypatch)
    with pytest.raises(fd.ConfigError) as info:
        cluster.Cluster(None, 3, {"CPU": 1}).hire(3)
    assert str(info.value) == (
        "resources={'CPU': 1}: the Ray cluster gave 2 of 3 workers within 60 seconds; wait until "
        "others are done, or ask for less"
    )
    assert here.alive == []
