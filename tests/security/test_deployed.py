"""Attacks on a deployed federation, at real Flower processes: code that others send is not run.

The attacker has what everybody has who can reach the server: its address and its `ca.pem`.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

import foedus as fd
from foedus.core.describe import to_config
from foedus.engines.flower import keys, messages, processes
from foedus.engines.flower.loopback import INSIDE, Loopback, free_port, write_app
from foedus.engines.flower.server import wait_for
from foedus.engines.flower.session import Line
from tests.engines.flower.test_site import table, written

pytestmark = pytest.mark.slow


class Federation:
    """A server with one admitted site, and the public address that an attacker knows."""

    def __init__(self, folder: Path):
        self.folder, self.public = folder, f"127.0.0.1:{free_port()}"
        keys.certificates(folder / "tls")
        self.link = Loopback(folder / "server", (self.public, folder / "tls"))
        self.link.start_link()
        private, public = keys.node_key(folder / "site" / "north")
        self.link.register([public])
        rows = written(folder / "site", "rows", table(0))
        config = f'data="{rows}" label="outcome" client=0'
        self.link.start_node("north", self.public, folder / "tls" / "ca.pem", private, config, [""])

    def attack(self, *words: str) -> str:
        """A command of `flwr`, from a machine that has `ca.pem` and no more."""
        home = self.folder / "attacker"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "target"\n\n[superlink.target]\naddress = "{self.public}"\n'
            f'root-certificates = "{self.folder / "tls" / "ca.pem"}"\n'
        )
        environment = {**self.link.environment, "FLWR_HOME": str(home)}
        environment.pop(processes.PARENT)
        done = subprocess.run(
            [*INSIDE, "flwr", *words], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode != 0, done.stdout
        return done.stdout + done.stderr

    def evil_app(self) -> Path:
        """An app whose ClientApp and ServerApp leave a mark when they are loaded."""
        app = write_app(self.folder / "evil")
        code = f"open({str(self.mark)!r}, 'w').close()\napp = None\n"
        (app / "federation" / "nothing.py").write_text(code)
        return app

    @property
    def mark(self) -> Path:
        return self.folder / "mark"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    federation = Federation(tmp_path_factory.mktemp("deployed"))
    yield federation
    federation.link.close()


def test_nobody_starts_a_run_over_the_network(federation):
    said = federation.attack("run", str(federation.evil_app()), "target")
    assert "403" in said or "for the sites of a federation" in said
    assert not federation.mark.exists()


def test_nobody_admits_a_site_over_the_network(federation):
    _, public = keys.node_key(federation.folder / "attacker" / "own")
    said = federation.attack("supernode", "register", str(public), "target")
    assert "403" in said or "for the sites of a federation" in said


def test_a_key_that_is_not_admitted_does_not_connect(federation):
    private, _ = keys.node_key(federation.folder / "attacker" / "other")
    ca = federation.folder / "tls" / "ca.pem"
    node, _ = federation.link.start_node("foreign", federation.public, ca, private, "", [""])
    end = time.monotonic() + 60
    while node.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    assert node.poll() is not None
    assert "Failed to activate SuperNode" in federation.link.log("foreign")


def test_a_site_does_not_run_the_app_of_its_own_server(federation):
    """The server's operator has changed the app; the site answers with its own foedus."""
    app = federation.evil_app()
    federation.link.flwr("run", app.resolve(), "loopback")
    ca = federation.link.tls["ca"].read_bytes()
    grid = processes.become_server(federation.link.address, ca)
    nodes = wait_for(grid, 1, 1, 60.0)
    line = Line(grid, {}, timeout=60.0, min_clients=1)
    schema = {"columns": ["age", "pulse", "score"], "classes": ["ill", "well"]}
    question = {"schema": schema, "algorithm": to_config(fd.FedAvg()), "seed": 0}
    question |= {"foedus": fd.__version__, "session": "", "secure": None}
    answer = line.post("query.hello", dict.fromkeys(nodes, question))[nodes[0]]
    assert messages.header(answer).get("name") == "rows", messages.header(answer)
    answer = line.post("query.anything", dict.fromkeys(nodes, question))[nodes[0]]
    assert "does not know messages of type" in messages.header(answer)["error"]
    assert not federation.mark.exists()
    grid.beat.stop()
    grid.close()
