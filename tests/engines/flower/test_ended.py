"""A trial federation that is told to end, or killed, takes its processes with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from foedus.engines.flower import deploy
from tests.engines.flower.test_site import table, written

SCRIPT = """
import subprocess, sys, time
from pathlib import Path
from foedus.engines.flower import deploy
from foedus.engines.flower.loopback import Loopback

def start(self):
    self.processes.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    print(self.processes[-1].pid, flush=True)

Loopback.start_link = start
Loopback.register = lambda self, keys: time.sleep(600)
deploy.up(Path(sys.argv[1]), lambda line: None)
"""


def _there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_ends_what_was_started(tmp_path):
    deploy.init(tmp_path / "trial", {"north": written(tmp_path, "north", table(0))}, "outcome")
    environment = {**os.environ, "PYTHONPATH": str(Path(deploy.__file__).parents[3])}
    up = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "trial")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    pid = int(up.stdout.readline())
    assert _there(pid)
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) != 0
    for _ in range(100):
        if not _there(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the process that it had started is still there")


LINK = """
import sys, time
from pathlib import Path
from foedus.engines.flower.loopback import Loopback

loopback = Loopback(Path(sys.argv[1]))
loopback.start_link()
print(loopback.address, flush=True)
time.sleep(600)
"""


def test_kill_9_ends_what_was_started(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(deploy.__file__).parents[3])}
    server = subprocess.Popen(
        [sys.executable, "-c", LINK, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    host, port = server.stdout.readline().split(":")
    server.kill()
    server.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.1)
    raise AssertionError("its SuperLink still listens")
