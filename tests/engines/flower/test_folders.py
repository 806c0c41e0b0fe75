"""Folders of federations, servers, sites and the processes of a trial, without Flower's: what is
started with which words, and what is said when something fails.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import stat
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import foedus as fd

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.serialization import load_pem_private_key

from foedus.engines.flower import deploy, keys, loopback, server
from foedus.engines.flower.loopback import Loopback, ended_gently
from foedus.engines.flower.policy import Policy
from tests.engines.flower.test_site import COLUMNS, table, written

# -- what a folder says of the files at hand -------------------------------------------------------


def read(folder: Path) -> server.Plan:
    return server.read_plan(folder / "federation.toml")


def policy(folder: Path, name: str) -> Policy:
    return Policy.read(folder / "sites" / name / "policy.toml")


def test_columns_are_those_that_all_files_have(tmp_path):
    north, south = table(0), table(1).drop(columns="age").assign(weight=1.0)
    sites = {"north": written(tmp_path, "north", north), "south": written(tmp_path, "south", south)}
    deploy.init(tmp_path / "trial", sites, "outcome")
    assert read(tmp_path / "trial").fit.columns == ("pulse", "score")
    assert policy(tmp_path / "trial", "south").columns == ("pulse", "score")
    sites["east"] = written(tmp_path, "east", table(2)[["age", "outcome"]])
    with pytest.raises(fd.DataError, match="the files have no column in common"):
        deploy.init(tmp_path / "none", sites, "outcome")


def test_numbers_to_predict_are_no_classes(tmp_path):
    sites = {"north": written(tmp_path, "north", table(0).drop(columns="outcome"))}
    deploy.init(tmp_path / "trial", sites, "score")
    assert read(tmp_path / "trial").classes is None
    assert policy(tmp_path / "trial", "north").classes is None


def test_without_files_there_is_something_to_be_edited(tmp_path):
    deploy.init(tmp_path / "trial", {"north": None, "south": None})
    plan = read(tmp_path / "trial")
    assert (plan.fit.columns, plan.classes) == (("first", "second"), ("0", "1"))
    assert (plan.clients, plan.min_clients) == (2, 1)
    assert policy(tmp_path / "trial", "south").sections["site"]["data"] == "/path/to/south.csv"


def test_a_folder_has_what_the_server_and_each_site_needs(tmp_path):
    """The server has all public keys; each site has its own secret key and no other."""
    sites = {"north": None, "south": None, "far-west_2": None}
    deploy.init(tmp_path / "trial", sites, host="fed.example.org", port=4711)
    trial = tmp_path / "trial"
    files = {str(path.relative_to(trial)) for path in trial.rglob("*") if path.is_file()}
    own = {"ca.pem", "peers.toml", "policy.toml"}
    assert files == (
        {"federation.toml", "README.md", "tls/ca.pem", "tls/server.pem", "tls/server.key"}
        | {f"admitted/{name}.pub" for name in sites}
        | {f"sites/{name}/{file}" for name in sites for file in own}
        | {f"sites/{name}/{name}.{kind}" for name in sites for kind in ("key", "sign")}
    )
    for secret in [*trial.glob("sites/*/*.key"), *trial.glob("sites/*/*.sign")]:
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert {stat.S_IMODE(path.stat().st_mode) for path in (trial / "sites").iterdir()} == {0o700}
    assert read(trial).listen == "0.0.0.0:4711"
    peers = {name: (trial / "sites" / name / "peers.toml").read_text() for name in sites}
    assert len(set(peers.values())) == 1
    for number, name in enumerate(sites):
        found = policy(trial, name)
        assert found.sections["site"]["client"] == number
        assert found.sections["server"]["address"] == "fed.example.org:4711"
        assert (
            found.file("server", "certificates").read_bytes()
            == (trial / "tls" / "ca.pem").read_bytes()
        )
        key = load_pem_private_key(found.file("signing", "key").read_bytes(), None)
        peer = tomllib.loads(peers[name])[str(number)]
        assert peer == key.public_key().public_bytes_raw().hex()
        assert found.limit("evaluations") == 20 and found.budget is None
        assert found.node_config()["secure_clients"] == 3


@pytest.mark.parametrize(
    ("sites", "why"),
    [
        ({}, "name at least one site"),
        ({"a b": None}, "the site name 'a b' may have letters, digits, - and _ only"),
        ({"../x": None}, "may have letters, digits"),
        ({"north": Path("nowhere.csv")}, r"site north: .*nowhere\.csv"),
    ],
    ids=["none", "a space", "a path", "no file"],
)
def test_sites_that_there_cannot_be(sites, why, tmp_path):
    with pytest.raises(fd.FoedusError, match=why):
        deploy.init(tmp_path / "trial", sites)
    assert not (tmp_path / "trial").exists()


def test_a_folder_is_not_written_over(tmp_path):
    deploy.init(tmp_path / "trial", {"north": None})
    with pytest.raises(fd.ConfigError, match="is not empty; choose a new folder"):
        deploy.init(tmp_path / "trial", {"north": None})


# -- the server, and a trial on one machine --------------------------------------------------------


@pytest.fixture
def trial(tmp_path) -> Path:
    sites = {n: written(tmp_path, n, table(k)) for k, n in enumerate(("north", "south"))}
    deploy.init(tmp_path / "trial", sites, "outcome")
    return tmp_path / "trial"


@pytest.fixture
def started(monkeypatch) -> SimpleNamespace:
    """What is started; `run()` is what the run does."""
    found = SimpleNamespace(nodes=[], keys=[], linked=False, trained=[], closed=0)
    found.run = lambda: {"FedAvg": "a run"}

    class Recorder:
        def __init__(self, folder, fleet):
            found.folder, found.fleet = folder, fleet

        def start_link(self):
            found.linked = True

        def register(self, keys):
            assert found.linked
            found.keys = keys

        def start_node(self, *about):
            found.nodes.append(about)

        def serve(self):
            assert found.keys  # nobody waits for sites that cannot connect
            return "the grid"

        def close(self):
            found.closed += 1

    def train(*how):
        found.trained.append(how)
        return found.run()

    monkeypatch.setattr(deploy, "Loopback", Recorder)
    monkeypatch.setattr(deploy, "train", train)
    return found


def test_a_trial_starts_a_server_and_a_node_for_each_site(trial, started):
    said: list[str] = []
    assert deploy.up(trial, said.append) == trial / "results"
    listen, tls = started.fleet
    assert started.folder == (trial / "server").resolve() and tls == (trial / "tls").resolve()
    assert re.fullmatch(r"127\.0\.0\.1:\d+", listen) and started.closed == 1
    assert started.keys == [trial / "admitted" / f"{name}.pub" for name in ("north", "south")]
    own = trial.resolve() / "sites"
    assert started.nodes == [
        (name, listen, own / name / "ca.pem", own / name / f"{name}.key", "",
         ["", str(own / name / "policy.toml")])
        for name in ("north", "south")
    ]  # fmt: skip
    [(grid, plan, folder)] = started.trained
    assert (grid, folder) == ("the grid", trial / "results") and plan.fit.columns == COLUMNS
    assert said[:3] == [
        f"server at {listen}, with TLS; 2 sites are admitted",
        f"site north: {trial.resolve().parent / 'north.csv'}",
        f"site south: {trial.resolve().parent / 'south.csv'}",
    ]
    assert re.fullmatch(rf"1 done in \d+ s; results in {trial / 'results'}", said[3])


def test_a_server_starts_no_site(trial, started):
    said: list[str] = []
    assert deploy.server(trial, said.append) == trial / "results"
    assert started.fleet[0] == "127.0.0.1:9091" and started.nodes == [] and started.closed == 1
    assert len(said) == 2
    deploy.server(trial, said.append, "127.0.0.1:5")
    assert started.fleet[0] == "127.0.0.1:5"


@pytest.mark.parametrize("error", [fd.TooFewClients("round 1"), KeyboardInterrupt()], ids=repr)
def test_a_trial_that_fails_or_is_stopped_ends_its_processes(error, trial, started):
    def stop():
        raise error

    started.run = stop
    with pytest.raises(type(error)):
        deploy.up(trial, lambda line: None)
    assert started.closed == 1


def test_policies_that_cannot_be_read_start_nothing(trial, started):
    (trial / "sites" / "south" / "policy.toml").write_text("[site\n")
    with pytest.raises(fd.ConfigError, match=r"south/policy\.toml: not valid TOML: "):
        deploy.up(trial)
    assert not started.linked and started.closed == 0


def test_a_server_that_admits_nobody(trial, started):
    for path in (trial / "admitted").iterdir():
        path.unlink()
    with pytest.raises(fd.ConfigError, match="admitted has no keys"):
        deploy.server(trial)
    assert not started.linked


def test_a_folder_of_something_else(tmp_path, started):
    with pytest.raises(fd.ConfigError, match=r"no federation\.toml: make the folder with"):
        deploy.up(tmp_path)
    assert not started.linked


# -- a site ----------------------------------------------------------------------------------------


@pytest.fixture
def north(trial, monkeypatch) -> SimpleNamespace:
    """The site north: it is asked three times whether its two processes are there, of which one
    has then ended; after the third start somebody presses Ctrl-C.
    """
    found = SimpleNamespace(path=trial / "sites" / "north" / "policy.toml", events=[])

    class Recorder:
        def __init__(self, folder):
            found.folder = folder

        def start_node(self, *about):
            found.events.append("start")
            found.about, polls = about, [None, None, 1]
            return [
                SimpleNamespace(poll=lambda: None),
                SimpleNamespace(poll=lambda: polls.pop(0)),
            ]

        def close(self):
            found.events.append("close")

    def sleep(seconds):
        if seconds == 0.2:
            return
        found.events.append(f"pause {seconds:g}")
        if found.events.count("start") == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(deploy, "Processes", Recorder)
    monkeypatch.setattr(deploy, "stop", lambda running, how: found.events.append(f"stop {how:d}"))
    monkeypatch.setattr(deploy.time, "sleep", sleep)
    return found


def test_a_site_starts_again_what_has_ended(north):
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        deploy.site(north.path, said.append, pause=7)
    again = ["start", f"stop {signal.SIGTERM:d}", "pause 7"]
    assert north.events == [*again, *again, *again, "close"]
    own = north.path.resolve().parent
    assert north.folder == own / "cache" / "processes"
    assert north.about == (
        "north", "127.0.0.1:9091", own / "ca.pem", own / "north.key", "",
        ["", str(own / "policy.toml")],
    )  # fmt: skip
    assert said == [
        f"north answers 127.0.0.1:9091; its log: foedus deploy log {north.path}",
        *["the connection to 127.0.0.1:9091 has ended; trying again in 7 s"] * 3,
    ]


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("ca.pem", "server.certificates"), ("north.key", "server.key"),
        ("north.sign", "signing.key"), ("peers.toml", "signing.peers"),
        ("../../../north.csv", "site.data"),
    ],
)  # fmt: skip
def test_a_site_says_which_file_is_missing(file, key, north):
    (north.path.parent / file).unlink()
    with pytest.raises(fd.ConfigError, match=rf"{key}: there is no file .*{Path(file).name}"):
        deploy.site(north.path)
    assert north.events == []


def test_a_site_does_not_start_with_code_that_was_changed(north):
    (north.path.parent / "own.py").write_text("algorithms = {}")
    with north.path.open("a") as file:
        file.write('[code]\nfile = "own.py"\nname = "algorithms"\nsha256 = "0"\n')
    with pytest.raises(fd.ConfigError, match=r"own\.py has another hash; it is not loaded"):
        deploy.site(north.path)
    assert north.events == []


# -- processes -------------------------------------------------------------------------------------

SCRIPT = """import os, sys
print(*sys.argv[1:])
if "fail" in sys.argv: sys.exit("no such run\\nat all")
for name in ("FOEDUS_FLEET", "FOEDUS_PARENT"):
    if sys.argv[1] == "superlink" and name in os.environ: print(name, os.environ[name])
if bell := os.environ.get("FOEDUS_BELL"):
    if sys.argv[1] == "supernode": os.write(int(bell), b"a task")
    else: print("rung:", os.read(int(bell), 9), os.read(int(bell), 9))
"""


@pytest.fixture
def link(tmp_path, monkeypatch) -> Iterator[Loopback]:
    """A loopback whose commands print their words instead of being Flower's."""
    monkeypatch.setattr(loopback, "INSIDE", [sys.executable, "-S", "-c", SCRIPT])
    found = Loopback(tmp_path / "loopback")
    yield found
    found.close()


def test_commands_of_flower(link):
    assert link.flwr("ls", 7) == "flwr ls 7\n"
    with pytest.raises(fd.FoedusError) as info:
        link.flwr("stop", 7, "loopback", "fail")
    assert str(info.value) == "flwr stop 7 loopback failed: no such run\nat all\n"


def test_commands_reach_the_link_on_loopback_alone(link):
    written = tomllib.loads((link.folder / "flwr" / "config.toml").read_text())["superlink"]
    assert written["loopback"]["address"] == link.address
    assert link.address.startswith("127.0.0.1:")
    assert Path(written["loopback"]["root-certificates"]).read_bytes() == (
        link.tls["ca"].read_bytes()
    )
    assert link.environment["FLWR_HOME"] == str((link.folder / "flwr").resolve())
    assert link.environment["FLWR_TELEMETRY_ENABLED"] == "0"


def test_keys_are_registered_in_one_process(link, monkeypatch):
    called = []
    monkeypatch.setattr(link, "flwr", lambda *words: called.append(words))
    link.register([link.folder / "a.pub", link.folder / "b.pub"])
    one, two = ((link.folder / f"{n}.pub").resolve() for n in "ab")
    assert called == [
        ("supernode", "register", one, "loopback", "--then", "supernode", "register", two,
         "loopback")
    ]  # fmt: skip


def test_a_run_of_an_empty_app_makes_this_process_the_server(link, monkeypatch):
    def become_server(address, certificate):
        assert (address, certificate) == (link.address, link.tls["ca"].read_bytes())
        return "the grid"

    monkeypatch.setattr(loopback, "become_server", become_server)
    called = []
    monkeypatch.setattr(link, "flwr", lambda *words: called.append(words))
    assert link.serve() == "the grid"
    [(command, app, where)] = called
    assert (command, where) == ("run", "loopback")
    parts = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert parts["components"]["clientapp"] == "federation.nothing:app"
    assert (app / "federation" / "nothing.py").read_text() == "app = None\n"


def test_a_node_is_a_supernode_and_its_worker_who_hears_its_bell(link):
    (link.folder / "key").touch()
    assert link.add_node(link.folder / "key", 'shards="x"', "mine:ALGORITHMS") == 0
    assert link.add_node(link.folder / "key", 'shards="y"') == 1
    for process in link.processes:
        assert process.wait(20) == 0
    words = link.log("node0").split()
    assert words[0] == "supernode" and words[words.index("--superlink") + 1] == link.address
    assert words[words.index("--node-config") + 1] == 'shards="x"'
    assert words[words.index("--isolation") + 1] == "process"
    key = words[words.index("--auth-supernode-private-key") + 1]
    assert key == str((link.folder / "key").resolve())
    secret = Path(words[words.index("--superexec-auth-secret-file") + 1])
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and len(secret.read_bytes()) == 32
    port = words[words.index("--port") + 1]
    # the second read ends with the SuperNode: nobody else has its end of the pipe
    assert link.log("node0.worker") == (
        f"worker 127.0.0.1:{port} {secret} mine:ALGORITHMS\nrung: b'a task' b''\n"
    )
    assert link.log("node1.worker").startswith("worker 127.0.0.1:")
    assert "mine" not in link.log("node1.worker")
    assert secret.read_bytes() != (link.folder / "node1.secret").read_bytes()


def test_a_node_is_stopped_at_once_with_its_worker(link, monkeypatch):
    script = "import time; time.sleep(60)"
    monkeypatch.setattr(loopback, "INSIDE", [sys.executable, "-S", "-c", script])
    (link.folder / "key").touch()
    number = link.add_node(link.folder / "key", "")
    link.stop_node(number)
    assert [p.returncode for p in link.nodes[number]] == [-signal.SIGKILL] * 2


def test_processes_that_do_not_end_when_they_are_asked_are_killed(link, monkeypatch):
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(60)"
    monkeypatch.setattr(loopback, "INSIDE", [sys.executable, "-S", "-c", script])
    process = link.start("deaf", "role")
    while not link.log("deaf"):
        time.sleep(0.01)
    times = iter(range(0, 1000, 2))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    link.close()
    assert process.returncode == -signal.SIGKILL
    link.close()  # who has ended is left alone


def test_a_superlink_that_ends_at_once(link):
    with pytest.raises(fd.FoedusError, match=r"the SuperLink has ended: superlink --ssl-certfile="):
        link.start_link()
    assert "--isolation process" in link.log("link") and "--enable-supernode" in link.log("link")
    assert "FOEDUS_FLEET" not in link.log("link")
    assert f"FOEDUS_PARENT {os.getpid()}" in link.log("link")
    assert link.log("nobody") == ""


def test_a_superlink_that_sites_elsewhere_reach(link, tmp_path):
    keys.certificates(tmp_path / "tls")
    other = Loopback(tmp_path / "other", ("0.0.0.0:4711", tmp_path / "tls"))
    with pytest.raises(fd.FoedusError, match="the SuperLink has ended"):
        other.start_link()
    said = other.log("link")
    assert f"--host 127.0.0.1 --port {other.address.split(':')[1]} " in said  # for its operator
    fleet = ["0.0.0.0:4711", *(str(tmp_path / "tls" / f"server.{k}") for k in ("pem", "key"))]
    assert f"FOEDUS_FLEET {json.dumps(fleet)}\n" in said


def test_a_certificate_that_has_expired_is_not_served(tmp_path):
    keys.certificates(tmp_path / "tls", days=-1)
    with pytest.raises(fd.FoedusError, match=r"the certificate server\.pem expired on 20"):
        Loopback(tmp_path / "link", ("127.0.0.1:1", tmp_path / "tls"))


def test_a_superlink_that_answers(link, monkeypatch):
    """It is there once it has shown a certificate of the link's own authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(link.tls["certificate"], link.tls["key"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        link.address = f"127.0.0.1:{server.getsockname()[1]}"
        asked = []

        def answer():
            for _ in range(2):
                connection, _ = server.accept()
                asked.append(1)
                with connection:
                    if len(asked) == 2:  # the first is not answered
                        context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        alive = SimpleNamespace(poll=lambda: None)
        monkeypatch.setattr(link, "start", lambda *words, environment: alive)
        link.start_link()
        thread.join(10)
    assert len(asked) == 2


def test_a_superlink_that_does_not_answer(link, monkeypatch):
    tried = []

    def connect(address, timeout):
        tried.append(address)
        raise ConnectionRefusedError

    alive = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(link, "start", lambda *words, environment: alive)
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
