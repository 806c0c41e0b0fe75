"""The campaigns in small, within seconds: some kills, damages and mutations.

`make faults` and `make fuzz` are the whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

import foedus as fd
from tests.faults import alone, fuzz
from tests.faults.subject import Tally, difference

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the campaign forks")
def test_faults_in_small():
    """In a process of its own, which has no threads when it forks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "tests.faults.faults",
        "--only",
        "kill",
        "damage",
        "resume",
        "--quick",
        "--kills",
        "3",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == [
        "| kill -9 of the process of a run",
        "| a damaged checkpoint is read",
        "| a damaged checkpoint, then resume",
    ]
    assert all(row[6] == "0" for row in rows[1:])  # other outcome
    assert int(rows[1][1]) >= 3 and rows[2][5] == "200"  # kills; damages that were noticed


def test_a_difference_is_found(fed):
    """The judge of the campaign: another seed, or one bit, is not the same result."""
    run, other = (fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, 1, seed=seed) for seed in (0, 1))
    assert difference(run, run) is None
    assert "row" in difference(run, other)
    changed = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, 1)
    changed.state["w"]["weight"].view(-1)[0] += 1e-6
    assert "a tensor of the state differs" in difference(changed, run)
    short = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, 0)
    assert "rows of history" in difference(short, run)


@pytest.mark.skipif(
    alone.COMPILER is None or sys.platform != "linux", reason="needs a C compiler, and Linux"
)
def test_a_clock_that_jumps(tmp_path):
    """Other processes see another time; the clock by which waiting is measured goes on."""
    clock = alone.Clock(tmp_path / "clock")
    script = (
        "import time\nprint(time.time(), time.monotonic(), "
        "flush=True)\ninput()\nprint(time.time(), time.monotonic())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    wall, steady = map(float, process.stdout.readline().split())
    assert abs(wall - time.time()) < 60
    clock.jump(-30 * alone.DAY)
    out, _ = process.communicate("\n", timeout=60)
    later, steadily = map(float, out.split())
    assert abs(later - wall + 30 * alone.DAY) < 60 and 0 < steadily - steady < 60


def test_what_is_wrong_is_counted_apart():
    tally = Tally("x")
    tally.end("same result")
    tally.end("same result", "it differs")
    assert tally.row().split(" | ")[2:7] == ["2", "1", "0", "0", "1"]


@pytest.mark.parametrize(
    ("name", "cases"),
    [("wire", 3000), ("secure", 150), ("checkpoint", 300), ("skops", 30), ("config", 150)],
)
def test_mutated_messages_and_files(name, cases, tmp_path):
    target = fuzz.fuzz(fuzz.targets(tmp_path)[name](), cases, seed=1, room=1 << 30)
    assert not target.kinds, "\n".join(target.kinds)
    assert target.accepted + target.refused == cases and target.refused


def test_the_driver_sees_what_goes_wrong(monkeypatch):
    """A decoder that breaks, that hangs, and that believes lengths, is found out."""
    monkeypatch.setattr(fuzz, "PATIENCE", 0.2)

    def feed(case: bytes) -> None:
        if case == b"break":
            raise KeyError(case)
        if case == b"hang":
            while True:
                pass
        if case == b"swell":
            bytearray(1 << 33)
        raise fd.WireError("no")

    cases = iter([b"fine"] * 20 + [b"break", b"hang", b"swell", b"fine"])
    target = fuzz.fuzz(fuzz.Target(lambda rng: next(cases), feed, 1.0), 4, seed=0, room=1 << 30)
    assert (target.failed, target.refused) == (3, 1)
    assert set(target.kinds.values()) == {b"break", b"hang", b"swell"}


def test_mutations_come_from_the_seed():
    make = fuzz.wire_target().make
    a, b = Random(5), Random(5)
    assert [make(a) for _ in range(50)] == [make(b) for _ in range(50)]
