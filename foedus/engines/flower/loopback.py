"""A whole federation on one machine: a SuperLink and SuperNodes as processes of their own, with TLS
and keys, on loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foedus.engines.flower.keys import certificates, expired, shared_secret
from foedus.engines.flower.processes import PARENT
from foedus.errors import FoedusError

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
name = "{name}"
version = "1.0.0"
description = "A federation with foedus"
license = "Apache-2.0"
dependencies = ["foedus[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "foedus"

[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"

[tool.flwr.app.config]
{config}
"""


def write_app(
    folder: Path, name: str, server: str, config: dict[str, str], client: str = ""
) -> Path:
    """A Flower app folder whose ClientApp is foedus' own, and whose ServerApp is made by the line
    `server`.
    """
    package = folder / name
    package.mkdir(parents=True, exist_ok=True)
    settings = "\n".join(f'{k} = "{v}"' for k, v in config.items())
    (folder / "pyproject.toml").write_text(APP.format(name=name, config=settings))
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text(f'"""The server."""\n\n{server}\n')
    (package / "client.py").write_text(
        client
        or '"""The sites."""\n\nfrom foedus.engines.flower import client\n\napp = client.app\n'
    )
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Loopback:
    """Processes of a federation that keep their files under one folder: a SuperLink, and one
    SuperNode for each node config.

    They end with `close()`, or soon after this process, even if it is killed.

    supervised: the SuperLink starts ServerApps itself; otherwise this process can become the server
        (`processes.become_server`).
    tls: a folder of certificates; without it, new ones are made. cwd: where the processes run.
    """

    def __init__(
        self,
        folder: Path,
        supervised: bool = False,
        tls: Path | None = None,
        cwd: Path | None = None,
    ):
        self.folder, self.supervised, self.cwd = folder, supervised, cwd or folder
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen] = []
        self.nodes: list[list[subprocess.Popen]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.tls = (
            {
                n: tls / f
                for n, f in (("ca", "ca.pem"), ("certificate", "server.pem"), ("key", "server.key"))
            }
            if tls
            else (certificates(folder / "tls"))
        )
        if end := expired(self.tls["certificate"]):
            raise FoedusError(
                f"the certificate {self.tls['certificate'].name} expired on {end:%Y-%m-%d %H:%M} "
                "UTC; make a new one"
            )
        self.environment = {
            **os.environ, **SETTINGS, "FLWR_HOME": str(folder / "flwr"), "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            PARENT: str(os.getpid()),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }  # fmt: skip
        (folder / "flwr").mkdir(exist_ok=True)
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
        how = ["--isolation", "subprocess" if self.supervised else "process"]
        link = self._start(
            "link",
            [
                *INSIDE,
                "superlink",
                *tls,
                "--enable-supernode-auth",
                "--host",
                host,
                "--port",
                port,
                *how,
            ],
        )
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

    def start_node(
        self, key: Path, config: str, resident: bool = True, code: str | None = None
    ) -> int:
        """Start a SuperNode with a node config; returns its number.

        resident: with a worker that answers messages (`foedus.engines.flower.worker`); otherwise as
        Flower's own command does, which runs the app that the server sends. code: "module:name" of
        the worker's own algorithms.
        """
        number, port = len(self.nodes), free_port()
        name = f"node{number}"
        words = ["--root-certificates", self.tls["ca"].resolve(), "--superlink", self.address]
        words += ["--auth-supernode-private-key", key.resolve(), "--node-config", config]
        words += ["--host", "127.0.0.1", "--port", port]
        if resident:
            secret = shared_secret(self.folder / f"{name}.secret")
            words += ["--isolation", "process", "--superexec-auth-secret-file", secret.resolve()]
            started = [self._start(name, [*INSIDE, "supernode", *words])]
            worker = ["worker", f"127.0.0.1:{port}", secret.resolve(), code or ""]
            started.append(self._start(f"{name}.worker", [*INSIDE, *worker]))
        else:
            started = [self._start(name, [*INSIDE, "plain-supernode", *words])]
        self.nodes.append(started)
        return number

    def flwr(self, *words: Any) -> str:
        """Run `flwr` commands (several, separated by "--then") against this SuperLink."""
        command = [*INSIDE, "flwr", *map(str, words)]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, cwd=self.cwd
        )
        if done.returncode:
            raise FoedusError(
                f"flwr {' '.join(map(str, words[:3]))} failed: "
                f"{(done.stderr or done.stdout)[-500:]}"
            )
        return done.stdout

    def stream(self, *words: Any) -> Iterator[str]:
        """The same, line by line as they come."""
        command = [*INSIDE, "flwr", *map(str, words)]
        with subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            self.processes.append(process)
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip()

    def _start(self, name: str, command: list[Any]) -> subprocess.Popen:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(c) for c in command], stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env=self.environment, cwd=self.cwd,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        """What a process has printed."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop_node(self, number: int) -> None:
        """End a SuperNode at once, as a power cut would."""
        stop(self.nodes[number], signal.SIGKILL)

    def close(self) -> None:
        """End all processes that were started here, and theirs."""
        stop(list(reversed(self.processes)), signal.SIGTERM)


@contextlib.contextmanager
def ended_gently() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, so that processes that were started are ended,
    too; once is enough.
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
