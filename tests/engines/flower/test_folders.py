"""Folders of federations and the processes of a trial, without Flower's: what is started with which
words, and what is said when something fails.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import foedus as fd

pytest.importorskip("flwr")

from foedus.engines.flower import deploy, loopback, server
from foedus.engines.flower.loopback import Loopback, ended_gently
from tests.engines.flower.test_site import table, written

# -- what a folder says of the files at hand -------------------------------------------------------


def read(folder: Path) -> server.Plan:
    return server.read_plan(folder / "app" / "federation" / "federation.toml")


def test_columns_are_those_that_all_files_have(tmp_path):
    north, south = table(0), table(1).drop(columns="age").assign(weight=1.0)
    sites = {"north": written(tmp_path, "north", north), "south": written(tmp_path, "south", south)}
    deploy.init(tmp_path / "trial", sites, "outcome")
    assert read(tmp_path / "trial").columns == ("pulse", "score")
    sites["east"] = written(tmp_path, "east", table(2)[["age", "outcome"]])
    with pytest.raises(fd.DataError, match="the files have no column in common"):
        deploy.init(tmp_path / "none", sites, "outcome")


def test_numbers_to_predict_are_no_classes(tmp_path):
    sites = {"north": written(tmp_path, "north", table(0).drop(columns="outcome"))}
    deploy.init(tmp_path / "trial", sites, "score")
    assert read(tmp_path / "trial").classes is None


def test_without_files_there_is_something_to_be_edited(tmp_path):
    deploy.init(tmp_path / "trial", {"north": None, "south": None})
    plan = read(tmp_path / "trial")
    assert (plan.columns, plan.classes) == (("first", "second"), ("0", "1"))
    assert (plan.clients, plan.min_clients) == (2, 1)
    assert 'data = "/path/to/south.csv"' in (tmp_path / "trial" / "sites.toml").read_text()


# -- a trial on one machine ------------------------------------------------------------------------


@pytest.fixture
def trial(tmp_path) -> Path:
    sites = {n: written(tmp_path, n, table(k)) for k, n in enumerate(("north", "south"))}
    deploy.init(tmp_path / "trial", sites, "outcome")
    return tmp_path / "trial"


@pytest.fixture
def started(monkeypatch) -> SimpleNamespace:
    """What `up` starts; `run()` is what the run does besides printing a line."""
    found = SimpleNamespace(nodes=[], keys=[], words=None, closed=0, run=lambda: None)

    class Recorder:
        address = "127.0.0.1:1"

        def __init__(self, folder, supervised, tls, cwd):
            found.folders, found.supervised = (folder, tls, cwd), supervised

        def start_link(self):
            found.linked = True

        def register(self, keys):
            assert found.linked
            found.keys = keys

        def start_node(self, key, config):
            found.nodes.append((key, config))

        def stream(self, *words):
            found.words = words
            yield "round 1"
            found.run()

        def close(self):
            found.closed += 1

    monkeypatch.setattr(deploy, "Loopback", Recorder)
    return found


def results(folder: Path) -> Path:
    return folder / "results" / "FedAvg.sites.json"


def finish(folder: Path) -> None:
    results(folder).parent.mkdir(exist_ok=True)
    fresh = results(folder).with_suffix(".new")
    fresh.write_text("[]")
    fresh.replace(results(folder))


def test_a_trial_starts_a_server_and_a_node_for_each_site(trial, started):
    started.run = lambda: finish(trial)
    said: list[str] = []
    assert deploy.up(trial, said.append) == trial / "results"
    assert started.folders == (trial.resolve() / "loopback", trial / "tls", trial)
    assert started.supervised and started.closed == 1
    assert started.keys == [trial / "keys" / "north.pub", trial / "keys" / "south.pub"]
    (key, north), (_, south) = started.nodes
    assert key == trial / "keys" / "north"
    assert f'cache="{(trial / "cache" / "north").resolve()}"' in north
    assert 'name="north" ' in north and " client=0 " in north and " client=1 " in south
    assert started.words == ("run", (trial / "app").resolve(), "loopback", "--stream")
    assert said[:2] == [
        "SuperLink at 127.0.0.1:1, with TLS",
        f"SuperNode of north: {trial.parent / 'north.csv'}",
    ]
    assert said[3] == "round 1"
    assert re.fullmatch(rf"done in \d+ s; results in {trial / 'results'}", said[4])


@pytest.mark.parametrize("before", [False, True])
def test_a_trial_that_does_not_finish(before, trial, started):
    """Results of an earlier run are not those of this one."""
    if before:
        finish(trial)
    with pytest.raises(fd.ConfigError) as info:
        deploy.up(trial, lambda line: None)
    assert str(info.value) == (
        f"the run did not finish (0 of 1 algorithms); see {trial}/loopback/link.log"
    )
    assert started.closed == 1


def test_results_that_are_written_again_count(trial, started):
    finish(trial)
    started.run = lambda: finish(trial)
    assert deploy.up(trial, lambda line: None) == trial / "results"


def test_a_trial_that_is_stopped_ends_its_processes(trial, started):
    def stop():
        raise KeyboardInterrupt

    started.run = stop
    with pytest.raises(KeyboardInterrupt):
        deploy.up(trial, lambda line: None)
    assert started.closed == 1


def test_a_list_of_sites_that_cannot_be_read(trial, started):
    (trial / "sites.toml").write_text("[north\n")
    with pytest.raises(fd.ConfigError, match=r"sites\.toml: not valid TOML: "):
        deploy.up(trial)
    assert started.closed == 0


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    loopback.certificates(folder)
    return folder


@pytest.fixture
def link(tmp_path, tls, monkeypatch) -> Loopback:
    """A loopback whose commands print their words instead of being Flower's."""
    script = (
        "import sys\nprint(*sys.argv[1:])\nif 'fail' in sys.argv: sys.exit('no such run\\nat all')"
    )
    monkeypatch.setattr(loopback, "INSIDE", [sys.executable, "-S", "-c", script])
    return Loopback(tmp_path / "loopback", tls=tls)


def test_commands_of_flower(link):
    assert link.flwr("ls", 7) == "flwr ls 7\n"
    with pytest.raises(fd.FoedusError) as info:
        link.flwr("stop", 7, "loopback", "fail")
    assert str(info.value) == "flwr stop 7 loopback failed: no such run\nat all\n"


def test_keys_are_registered_in_one_process(link, monkeypatch):
    called = []
    monkeypatch.setattr(link, "flwr", lambda *words: called.append(words))
    link.register([link.folder / "a.pub", link.folder / "b.pub"])
    one, two = ((link.folder / f"{n}.pub").resolve() for n in "ab")
    assert called == [
        ("supernode", "register", one, "loopback", "--then", "supernode", "register", two,
         "loopback")
    ]  # fmt: skip


def test_lines_of_a_command_as_they_come(link):
    assert list(link.stream("run", "app")) == ["flwr run app"]
    # what it says of an error comes among them
    assert list(link.stream("fail")) == ["flwr fail", "no such run", "at all"]
    assert [p.returncode for p in link.processes] == [0, 1]


def test_a_superlink_that_ends_at_once(link):
    with pytest.raises(fd.FoedusError, match=r"the SuperLink has ended: superlink --ssl-certfile="):
        link.start_link()
    assert "--isolation process" in link.log("link")
    assert link.log("nobody") == ""


def test_a_superlink_that_does_not_answer(link, monkeypatch):
    tried = []

    def connect(address, timeout):
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(link, "_start", lambda name, words: SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(fd.FoedusError, match=r"^the SuperLink does not answer$"):
        link.start_link()
    assert len(tried) == 600 and ":".join(map(str, tried[0])) == link.address


# -- SIGTERM ---------------------------------------------------------------------------------------


def test_sigterm_is_ctrl_c_once():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ended_gently():  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # another one does not disturb the end
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with ended_gently():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
