"""The processes of a federation: a SuperLink, and SuperNodes with workers, with TLS and keys."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foedus.engines.flower.keys import certificates, expired, shared_secret
from foedus.engines.flower.processes import BELL, FLEET, PARENT, become_server
from foedus.errors import FoedusError
from foedus.storage.lock import lock

PREFIX = "foedus-flower-"
"""The prefix of temporary folders."""

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""No telemetry, no question for updates, nothing installed at run time."""

INSIDE = [sys.executable, "-m", "foedus.engines.flower.processes"]

APP = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federation"
version = "1.0.0"
description = "A federation with foedus"
license = "Apache-2.0"
dependencies = ["foedus[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "foedus"

[tool.flwr.app.components]
serverapp = "federation.nothing:app"
clientapp = "federation.nothing:app"
"""


def write_app(folder: Path) -> Path:
    """An empty Flower app: Flower starts runs of apps, and foedus needs a run."""
    package = folder / "federation"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(APP)
    (package / "__init__.py").write_text("")
    (package / "nothing.py").write_text("app = None\n")
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Processes:
    """Processes that keep their files under one folder.

    They end with `close()`, or soon after this process, even if it is killed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: list[subprocess.Popen] = []
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # output may quote rows
        (folder / "flwr").mkdir(exist_ok=True)
        self.environment = {
            **os.environ, **SETTINGS, "FLWR_HOME": str((folder / "flwr").resolve()),
            "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid()),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }  # fmt: skip

    def start(
        self,
        name: str,
        role: str,
        *words: Any,
        pipe: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen:
        """Start a role of `foedus.engines.flower.processes`; its output goes to NAME.log."""
        own = dict(environment or {})
        if pipe is not None:
            own[BELL] = str(pipe)
        private = lambda path, flags: os.open(path, flags, 0o600)  # noqa: E731
        with open(self.folder / f"{name}.log", "ab", opener=private) as log:
            process = subprocess.Popen(
                [*INSIDE, role, *map(str, words)], stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env={**self.environment, **own},
                cwd=self.folder, start_new_session=True, pass_fds=() if pipe is None else (pipe,),
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_node(
        self, name: str, address: str, ca: Path, key: Path, config: str, worker: Sequence[str]
    ) -> list[subprocess.Popen]:
        """Start a SuperNode and its worker (`foedus.engines.flower.worker`)."""
        port, secret = free_port(), shared_secret(self.folder / f"{name}.secret")
        words = ["--root-certificates", ca.resolve(), "--superlink", address]
        words += ["--auth-supernode-private-key", key.resolve(), "--node-config", config]
        words += ["--host", "127.0.0.1", "--port", port, "--isolation", "process"]
        words += ["--superexec-auth-secret-file", secret]
        about = [f"127.0.0.1:{port}", secret, *worker]
        listen, ring = os.pipe()  # the SuperNode rings when there is a task
        try:
            return [
                self.start(name, "supernode", *words, pipe=ring),
                self.start(f"{name}.worker", "worker", *about, pipe=listen),
            ]
        finally:
            os.close(listen)
            os.close(ring)

    def log(self, name: str) -> str:
        """The output of a process."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End all processes that were started here, and their children."""
        stop(list(reversed(self.processes)), signal.SIGTERM)


class Loopback(Processes):
    """A SuperLink on loopback, SuperNodes, and the commands of its operator.

    This process can become the server (`processes.become_server`). fleet: the address, HOST:PORT,
    at which sites on other machines reach the SuperLink, and a folder with the certificate for it.
    """

    def __init__(self, folder: Path, fleet: tuple[str, Path] | None = None):
        super().__init__(folder)
        self.address, self.tls = f"127.0.0.1:{free_port()}", certificates(folder / "tls")
        self.fleet = {}
        if fleet is not None:
            address, tls = fleet
            if end := expired(tls / "server.pem"):
                raise FoedusError(
                    f"the certificate server.pem expired on {end:%Y-%m-%d %H:%M} UTC; make a new "
                    "one"
                )
            self.fleet = {
                FLEET: json.dumps([address, str(tls / "server.pem"), str(tls / "server.key")])
            }
        self.nodes: list[list[subprocess.Popen]] = []
        (folder / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = '
            f'"{self.address}"\n'
            f'root-certificates = "{self.tls["ca"].resolve()}"\n'
        )

    def start_link(self) -> None:
        """Start the SuperLink and wait until it answers."""
        host, port = self.address.split(":")
        tls = [
            f"--ssl-{n}={self.tls[k].resolve()}"
            for n, k in (("certfile", "certificate"), ("keyfile", "key"), ("ca-certfile", "ca"))
        ]
        words = [*tls, "--enable-supernode-auth", "--host", host, "--port", port]
        words += ["--isolation", "process"]
        link = self.start("link", "superlink", *words, environment=self.fleet)
        context = ssl.create_default_context(cafile=str(self.tls["ca"]))
        for _ in range(600):
            if link.poll() is not None:
                raise FoedusError(f"the SuperLink has ended: {self.log('link')[-500:]}")
            with contextlib.suppress(OSError):
                with socket.create_connection((host, int(port)), timeout=1) as raw:
                    context.wrap_socket(raw, server_hostname=host).close()
                return
            time.sleep(0.1)
        raise FoedusError("the SuperLink does not answer")

    def register(self, keys: list[Path]) -> None:
        """Tell the SuperLink of the public keys of nodes that may connect."""
        words: list[Any] = []
        for key in keys:
            words += ["--then"] * bool(words) + ["supernode", "register", key.resolve(), "loopback"]
        self.flwr(*words)

    def add_node(self, key: Path, config: str, code: str | None = None) -> int:
        """Start a SuperNode with a node config; returns its number.

        code: "module:name" of algorithms that its worker imports here.
        """
        number = len(self.nodes)
        about = (f"node{number}", self.address, self.tls["ca"], key, config, [code or ""])
        self.nodes.append(self.start_node(*about))
        return number

    def flwr(self, *words: Any) -> str:
        """Run `flwr` commands (several, separated by "--then") against this SuperLink."""
        command = [*INSIDE, "flwr", *map(str, words)]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, cwd=self.folder
        )
        if done.returncode:
            raise FoedusError(
                f"flwr {' '.join(map(str, words[:3]))} failed: "
                f"{(done.stderr or done.stdout)[-500:]}"
            )
        return done.stdout

    def serve(self) -> Any:
        """Start a run, and become its server: the Grid of the run."""
        app = write_app(self.folder / "app")
        self.flwr("run", app.resolve(), "loopback")
        return become_server(self.address, self.tls["ca"].read_bytes())

    def stop_node(self, number: int) -> None:
        """Kill a SuperNode, as a power failure would."""
        stop(self.nodes[number], signal.SIGKILL)


@contextlib.contextmanager
def ended_gently() -> Iterator[None]:
    """Within this context, SIGTERM acts like Ctrl-C, so that child processes are ended as well;
    later ones are ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not for this thread
        yield
        return

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(processes: list[subprocess.Popen], how: int) -> None:
    """End processes with all of their group, gently first unless told otherwise."""
    for kind in (how, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, kind)
        if kind == how and how != signal.SIGKILL:
            end = time.monotonic() + 3
            while time.monotonic() < end and any(p.poll() is None for p in processes):
                time.sleep(0.05)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def temporary_folder() -> tuple[tempfile.TemporaryDirectory, Callable[[], None]]:
    """A folder for keys, and a function that removes it; folders of killed processes are removed
    first.

    The lock inside ends with this process, however that ends.
    """
    remove_leftovers()
    while True:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        release = lock(Path(folder.name) / "lock")
        if release is not None:
            return folder, release


def remove_leftovers() -> None:
    """Remove the folders of this user that no process holds any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            mine = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if not mine or not (folder / "lock").is_file():
                continue
            release = lock(folder / "lock")
            if release is not None:
                shutil.rmtree(folder, ignore_errors=True)
                release()
