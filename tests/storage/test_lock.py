"""One run at a time on a checkpoint: the second is refused, and a killed process holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

import foedus as fd
from foedus.storage.lock import lock

ALGORITHM = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)

HOLD = """
import sys
from pathlib import Path
from foedus.storage.lock import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen:
    """Another process that holds the checkpoint until its standard input ends."""
    environment = {**os.environ, "PYTHONPATH": str(Path(fd.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    return process


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_second_process_is_refused_and_touches_nothing(fed, tmp_path):
    path = tmp_path / "c.safetensors"
    fd.run(ALGORITHM, fed, 1, checkpoint=path)
    (tmp_path / ".c.safetensors.abc.part").write_bytes(b"half of what the first is writing")
    opened = []

    class Engine(fd.Local):
        def open(self, *about):
            opened.append(1)
            return super().open(*about)

    first = holder(path)
    before = contents(tmp_path)
    try:
        for resume in (False, True, "auto"):
            with pytest.raises(
                fd.CheckpointError,
                match=r"c\.safetensors is in use by another run, .* c\.safetensors\.lock: wait .*"
                r"another checkpoint$",
            ):
                fd.run(ALGORITHM, fed, 2, checkpoint=path, resume=resume, engine=Engine())
            assert contents(tmp_path) == before and not opened
    finally:
        first.communicate()
    assert not (tmp_path / "c.safetensors.lock").exists()
    assert len(fd.run(ALGORITHM, fed, 2, checkpoint=path, resume=True).history) == 3


def test_a_killed_process_holds_no_lock(fed, tmp_path):
    path = tmp_path / "c.safetensors"
    first = holder(path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdin.close()
    first.stdout.close()
    assert (tmp_path / "c.safetensors.lock").exists()  # but nobody has locked it
    fd.run(ALGORITHM, fed, 1, checkpoint=path)
    assert sorted(contents(tmp_path)) == ["c.safetensors", "c.safetensors.previous"]


def test_the_first_goes_on_when_a_second_is_refused(fed, tmp_path):
    """Also in one process."""
    path, refused = tmp_path / "c.safetensors", []

    class Again(fd.Callback):
        def row(self, row):
            try:
                fd.run(ALGORITHM, fed, 3, checkpoint=path, resume=True)
            except fd.CheckpointError as error:
                refused.append(str(error))

    run = fd.run(ALGORITHM, fed, 2, checkpoint=path, callbacks=[Again()])
    assert len(refused) == 3 and all("is in use by another run" in text for text in refused)
    whole = fd.run(ALGORITHM, fed, 2)
    assert run.history.loss.tolist() == whole.history.loss.tolist()


def test_the_lock_goes_with_a_run_that_fails(fed, tmp_path):
    with pytest.raises(fd.ConfigError):
        fd.run(
            ALGORITHM, fed, 1, checkpoint=tmp_path,
            aggregation=fd.DifferentialPrivacy(clip=1.0, noise=1.0, delta=0.9),
        )  # fmt: skip
    assert not contents(tmp_path)
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)


def test_a_lock_that_was_removed_while_it_was_waited_for_is_not_held(tmp_path, monkeypatch):
    """Opened just before its holder removed it: only a lock on the file that is there counts."""
    path, opened = tmp_path / "c.safetensors.lock", os.open
    release = lock(path)

    def slow(*args):
        handle = opened(*args)
        if len(seen) == 0:
            release()
        seen.append(os.fstat(handle).st_ino)
        return handle

    seen = []
    monkeypatch.setattr(os, "open", slow)
    second = lock(path)
    monkeypatch.undo()
    assert len(seen) == 2 and path.stat().st_ino == seen[1]
    assert lock(path) is None
    second()
    assert not path.exists()


def test_only_one_of_many_threads_gets_it(tmp_path):
    got, together = [], threading.Barrier(8)

    def take():
        together.wait()
        got.append(lock(tmp_path / "lock"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(release is not None for release in got) == 1


def test_without_locks_the_run_warns(fed, tmp_path, monkeypatch):
    import fcntl

    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match=r"lock cannot be locked \(Function not implemented\)"):
        run = fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    assert len(run.history) == 2


def test_a_folder_that_cannot_be_written_is_named(fed, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with warnings.catch_warnings(), pytest.raises(fd.CheckpointError, match="cannot be written"):
        fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path / "file" / "c.safetensors")
