"""Faults of one process with a checkpoint: kill -9, damaged checkpoints, a full disk, a clock that
jumps.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import foedus as fd
from foedus.storage import checkpoint, history_file
from tests.faults.subject import (
    ALGORITHMS,
    BROKEN,
    DONE,
    ERROR,
    REFUSED,
    RESUMED,
    SAME,
    Tally,
    difference,
    federation,
    forked,
    kill,
    wait,
)

ROUNDS = 24
OPTIONS = {"participation": 0.5, "progress": False}


class Subject:
    """An algorithm, the result that it must come to, and the seconds that it takes to."""

    def __init__(self, name: str, folder: Path, rounds: int = ROUNDS):
        self.name, self.algorithm, self.rounds, self.fed = (
            name,
            ALGORITHMS[name],
            rounds,
            federation(),
        )
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        began = time.monotonic()
        self.whole = self.finish(self.folder / "whole")
        self.seconds = time.monotonic() - began

    def start(self, at: Path, rounds: int | None = None) -> int:
        """Run or go on, in a process of its own."""
        at.mkdir(parents=True, exist_ok=True)

        def work() -> None:
            history_file.KEPT = 4  # so that there is a history beside it
            path = at / "c.safetensors"
            run = fd.run(
                self.algorithm,
                self.fed,
                rounds or self.rounds,
                checkpoint=path,
                resume="auto",
                **OPTIONS,
            )
            run.save(at / "result.safetensors")

        return forked(work, at / "said.txt")

    def finish(self, at: Path) -> fd.Run:
        code = wait(self.start(at))
        assert code == DONE, (at / "said.txt").read_text()
        return fd.Run.load(at / "result.safetensors")

    def compare(self, at: Path) -> str | None:
        """What is wrong with a result, if anything."""
        found = difference(fd.Run.load(at / "result.safetensors"), self.whole)
        left = [p.name for p in at.iterdir() if p.name.startswith(".")]
        return f"{self.name}: {found}" if found else f"files left behind: {left}" if left else None


def killed(tally: Tally, subjects: list[Subject], kills: int, rng: Random) -> None:
    """Kill the process at a random moment, one to six times a run, and go on each time."""
    run = 0
    while tally.kills < kills:
        subject = subjects[run % len(subjects)]
        at, run, more = subject.folder / f"kill{run}", run + 1, rng.randint(1, 6)
        while True:
            pid = subject.start(at)
            code = wait(pid, rng.uniform(0, 0.6 * subject.seconds) if more else None)
            if code is None and kill(pid):
                tally.kills += 1
                tally.injected += 1
                more -= 1
            else:
                break
        if code not in (DONE, None):
            tally.end(ERROR, f"{subject.name}: {(at / 'said.txt').read_text()}")
        else:
            tally.end(SAME, subject.compare(at))
        shutil.rmtree(at)


# -- damaged checkpoints ---------------------------------------------------------------------------


def damaged(data: bytes, rng: Random) -> bytes:
    """Bits flipped, bytes overwritten, a piece cut off or lost, zeros in the place of a block: what
    disks and copies do.
    """
    bad = bytearray(data)
    kind = rng.randrange(5)
    at = rng.randrange(len(bad))
    if kind == 0:
        for _ in range(rng.choice((1, 1, 3, 50))):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        bad[at : at + 16] = rng.randbytes(len(bad[at : at + 16]))
    elif kind == 2:
        del bad[at:]
    elif kind == 3:
        del bad[at : at + rng.choice((1, 8, 512))]
    else:
        bad[at : at + 512] = bytes(len(bad[at : at + 512]))
    return bytes(bad) if bytes(bad) != data else data[:-1]


def looked_at(tally: Tally, subject: Subject, count: int, rng: Random) -> None:
    """Every damage is noticed on reading, to a checkpoint and, every second time, to the history
    beside it.
    """
    folder = subject.folder / "bad"
    folder.mkdir()
    names = ("c.safetensors", "c.safetensors.history")
    for name in names:
        shutil.copy(subject.folder / "whole" / name, folder)
    for number in range(count):
        path = folder / names[number % 2]
        data = path.read_bytes()
        bad = damaged(data, rng)
        path.write_bytes(bad)
        tally.injected += 1
        try:
            checkpoint.newest(folder / "c.safetensors")
            tally.end(ERROR, f"damage was not noticed: {len(bad)} of {len(data)} bytes of {path}")
        except fd.CheckpointError as error:
            unnamed = None if path.name in str(error) else f"{path.name} is not named: {error}"
            tally.end(ERROR, unnamed)
        path.write_bytes(data)


def corrupted(tally: Tally, subjects: list[Subject], runs: int, rng: Random) -> None:
    """Stop halfway, damage the newest checkpoint, every fifth time also the one before it, or the
    history that both need, and go on.
    """
    for number in range(runs):
        subject = subjects[number % len(subjects)]
        at, both = subject.folder / f"damage{number}", number % 5 == 4
        assert wait(subject.start(at, rng.randint(5, subject.rounds - 1))) == DONE
        paths = [at / "c.safetensors"] + [at / "c.safetensors.previous"] * both
        if both and number % 10 == 9:
            paths = [at / "c.safetensors.history"]
        for path in paths:
            path.write_bytes(damaged(path.read_bytes(), rng))
        tally.injected += 1
        code = wait(subject.start(at))
        said = (at / "said.txt").read_text() if (at / "said.txt").exists() else ""
        if both:
            fine = code == REFUSED and "CheckpointError" in said and "remove both" in said
            tally.end(ERROR, None if fine else f"both damaged: {code} {said}")
        elif code != DONE:
            tally.end(SAME, f"{subject.name}: {said}")
        else:
            notes = fd.Run.load(at / "result.safetensors").notes
            silent = (
                None
                if len(notes) == 1 and "goes on from the checkpoint before it" in notes[0]
                else f"not said: {notes}"
            )
            tally.end(SAME, subject.compare(at) or silent)
        shutil.rmtree(at)


# -- a full disk -----------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(at: Path, size: int) -> Iterator[bool]:
    """Mount a file system of `size` bytes at a folder; False if this user may not mount one."""
    at.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True
    )
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(at)], check=True)


def full_disk(tally: Tally, subjects: list[Subject], runs: int, rng: Random) -> None:
    """A disk with room for one to three checkpoints; then room is made, and the run goes on."""
    for number in range(runs):
        subject = subjects[number % len(subjects)]
        at, size = (
            subject.folder / f"disk{number}",
            (subject.folder / "whole" / "c.safetensors").stat().st_size,
        )
        room = int(rng.uniform(0.3, 2.9) * size)
        with small_disk(at, room) as mounted:
            tally.notes["tmpfs" if mounted else "RLIMIT_FSIZE in the place of a full disk"] += 1
            pid = subject.start(at) if mounted else _limited(subject, at, rng.randint(1000, size))
            tally.injected += 1
            code = wait(pid)
            # The file that says why is on the same disk; without room for it, the process could
            # only say it in its code.
            said = (at / "said.txt").read_text() if (at / "said.txt").exists() else ""
            left = [p.name for p in at.iterdir() if p.name.startswith(".")] if at.exists() else []
            if code == BROKEN and mounted and not said:
                code = REFUSED
            if code != REFUSED or left or (said and "cannot be written" not in said):
                tally.end(ERROR, f"{subject.name}: ended with {code}, left {left}, said {said}")
                continue
            if mounted:
                subprocess.run(["mount", "-o", "remount,size=64m", str(at)], check=True)
            code = wait(subject.start(at))
            wrong = subject.compare(at) if code == DONE else (at / "said.txt").read_text()
            tally.end(RESUMED, wrong)


def _limited(subject: Subject, at: Path, most: int) -> int:
    """The run in a process that cannot write files of more than `most` bytes."""

    def work() -> None:
        history_file.KEPT = 4
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        fd.run(
            subject.algorithm,
            subject.fed,
            subject.rounds,
            checkpoint=at / "c.safetensors",
            resume="auto",
            **OPTIONS,
        )

    return forked(work, at / "said.txt")


# -- clocks ----------------------------------------------------------------------------------------


COMPILER = shutil.which("cc")
DAY = 86400
JUMPS = (3600, -3600, 30 * DAY, -2 * DAY, 0, 3652 * DAY, -5)


class Clock:
    """A wall clock that jumps, for processes with this environment: a library of ours in the place
    of the system's.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        library, source = folder / "clock.so", Path(__file__).with_name("clock.c")
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True
        )
        self.offset = folder / "offset"
        self.offset.write_bytes(bytes(8))
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "CAMPAIGN_CLOCK": str(self.offset),
        }

    def jump(self, seconds: int) -> None:
        # processes have it in their memory: it must never be shorter
        with open(self.offset, "r+b") as f:
            f.write(seconds.to_bytes(8, sys.byteorder, signed=True))


def clocks(tally: Tally, subjects: list[Subject], runs: int, rng: Random) -> None:
    """The wall clock jumps back and forth during the run."""
    for number in range(runs):
        subject = subjects[number % len(subjects)]
        at, clock = (
            subject.folder / f"clock{number}",
            Clock(subject.folder / f"clock{number}" / "clock"),
        )
        words = [
            sys.executable,
            "-m",
            "tests.faults.alone",
            subject.name,
            str(at),
            str(subject.rounds),
        ]
        with open(at / "said.txt", "wb") as said:
            process = subprocess.Popen(words, env=clock.environment, stdout=said, stderr=said)
            while process.poll() is None:
                time.sleep(rng.uniform(0.02, 0.2))
                clock.jump(rng.choice(JUMPS))
                tally.injected += 1
        tally.end(
            SAME,
            subject.compare(at)
            if process.returncode == 0
            else (at / "said.txt").read_text()[-500:],
        )


def _main() -> None:
    name, at, rounds = sys.argv[1:]
    run = fd.run(
        ALGORITHMS[name],
        federation(),
        int(rounds),
        checkpoint=Path(at) / "c.safetensors",
        **OPTIONS,
    )
    run.save(Path(at) / "result.safetensors")


if __name__ == "__main__":
    _main()
