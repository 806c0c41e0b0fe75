"""`fd.Flower` goes on in another process: states beside the checkpoint, and no keys left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import foedus as fd

pytest.importorskip("flwr")

from foedus.engines.flower import loopback
from foedus.storage import checkpoint
from tests.engines.flower.test_engine import grids  # noqa: F401 - a fixture

SCAFFOLD = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)
COLUMNS = ("loss", "accuracy", "bytes_up", "bytes_down", "messages_up", "clients")


def same(a: fd.Run, b: fd.Run) -> None:
    for name in COLUMNS:
        np.testing.assert_allclose(a.history[name], b.history[name], rtol=1e-6, err_msg=name)
    assert "left_out" not in a.records.columns


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A checkpoint; temporary folders are made in a folder of the test."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "run" / "c.safetensors"


def parts(algorithm, fed, path, rounds, nodes=2, **options) -> fd.Run:
    """Each part in an engine of its own, whose temporary folder goes with it."""
    for number, most in enumerate(rounds):
        with fd.Flower(nodes=nodes + number) as engine:
            run = fd.run(
                algorithm, fed, most, engine=engine, checkpoint=path, resume="auto", **options
            )
    return run


@pytest.mark.parametrize("every", [1, 3])
def test_another_engine_goes_on_with_what_clients_remember(fed, grids, path, every):  # noqa: F811
    """On another number of nodes, too."""
    options = {"participation": 0.6, "checkpoint_every": every}
    run = parts(SCAFFOLD, fed, path, (2, 3, 6), **options)
    same(run, fd.run(SCAFFOLD, fed, 6, participation=0.6))
    folder = checkpoint.sites_of(path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.parent.parent.glob("tmp/*"))  # and nothing else is left


def test_a_run_that_dies_between_checkpoints_goes_back(fed, grids, path):  # noqa: F811
    """Round 5 was made, the checkpoint is of round 2: further back than nodes remember."""

    class Dead(fd.Callback):
        def row(self, row):
            if row["round"] == 5:
                raise KeyboardInterrupt

    options = {"participation": 0.6, "checkpoint": path}
    with fd.Flower(nodes=2) as engine:
        fd.run(SCAFFOLD, fed, 2, engine=engine, **options)
        options |= {"resume": True, "checkpoint_every": 6, "callbacks": [Dead()]}
        with pytest.raises(KeyboardInterrupt):
            fd.run(SCAFFOLD, fed, 6, engine=engine, **options)
    assert checkpoint.read(path)[1]["rounds_done"] == 2
    run = parts(SCAFFOLD, fed, path, (6,), participation=0.6)
    same(run, fd.run(SCAFFOLD, fed, 6, participation=0.6))


def test_the_checkpoint_before_the_newest_can_be_gone_on_from(fed, grids, path):  # noqa: F811
    parts(SCAFFOLD, fed, path, (5,), participation=0.6)
    path.write_bytes(b"")
    with pytest.warns(UserWarning, match="of round 4"):
        run = parts(SCAFFOLD, fed, path, (6,), participation=0.6)
    same(run, fd.run(SCAFFOLD, fed, 6, participation=0.6))


def test_only_what_checkpoints_refer_to_stays(fed, grids, path):  # noqa: F811
    """Three versions of each of 5 clients: of the newest, the one before, and one more."""
    parts(SCAFFOLD, fed, path, (9,))
    names = [p.name for p in checkpoint.sites_of(path).iterdir()]
    versions = {(round << 16) + 1 for round in (7, 8, 9)}
    assert sorted(names) == sorted(f"{i}-{v}.bin" for i in range(5) for v in versions)


def test_a_state_that_is_missing_is_named(fed, grids, path):  # noqa: F811
    parts(SCAFFOLD, fed, path, (2,))
    gone = checkpoint.sites_of(path) / f"3-{(2 << 16) + 1}.bin"
    gone.unlink()
    with pytest.raises(fd.CheckpointError, match=rf"{gone.name} is missing, .* client 3 remembers"):
        parts(SCAFFOLD, fed, path, (3,))


def test_without_states_or_without_a_checkpoint_there_is_no_folder(fed, grids, path):  # noqa: F811
    parts(fd.FedAvg(fd.Linear(), lr=0.1), fed, path, (1, 2))
    assert not checkpoint.sites_of(path).exists()
    with fd.Flower(nodes=2) as engine:
        same(fd.run(SCAFFOLD, fed, 2, engine=engine), fd.run(SCAFFOLD, fed, 2))
    assert not list(path.parent.glob("*.sites"))


def test_another_file_system(fed, grids, path, monkeypatch):  # noqa: F811
    def none(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", none)
    run = parts(SCAFFOLD, fed, path, (2, 4))
    same(run, fd.run(SCAFFOLD, fed, 4))


# -- keys ------------------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_removed(path):
    temporary = path.parents[1] / "tmp"
    names = ("dead", "older", "other")
    dead, older, other = (temporary / f"{loopback.PREFIX}{name}" for name in names)
    for folder in (dead, older, other):
        (folder / "keys").mkdir(parents=True)
        (folder / "keys" / "node0").write_text("secret")
    (dead / "lock").write_bytes(b"")
    living, release = loopback.temporary_folder()
    assert not dead.exists()
    assert older.exists() and other.exists()  # without a lock: nobody knows whether it is in use
    second, release_second = loopback.temporary_folder()
    assert Path(living.name).exists()  # its process lives
    for folder, end in ((living, release), (second, release_second)):
        folder.cleanup()
        end()


def test_folders_of_other_users_are_not_touched(path, monkeypatch):
    folder = path.parents[1] / "tmp" / f"{loopback.PREFIX}other"
    folder.mkdir()
    (folder / "lock").write_bytes(b"")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    loopback.remove_leftovers()
    assert folder.exists()


SCRIPT = """
import sys, time
import foedus as fd
from tests.faults.subject import federation
from tests.engines.flower.test_kept import SCAFFOLD

class Tell(fd.Callback):
    def row(self, row):
        print(row["round"], flush=True)
        if row["round"] == int(sys.argv[2]):
            time.sleep(600)

if __name__ == "__main__":
    with fd.Flower(nodes=2, timeout=60) as engine:
        run = fd.run(SCAFFOLD, federation(), 4, engine=engine, checkpoint=sys.argv[1],
                     resume="auto", participation=0.7, callbacks=[Tell()], progress=False)
        run.save(sys.argv[1] + ".run")
"""


@pytest.mark.slow
def test_a_killed_process_is_gone_on_from_by_another(tmp_path):
    from tests.faults.subject import difference, federation

    (tmp_path / "tmp").mkdir()
    path, root = tmp_path / "c.safetensors", Path(fd.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path / "tmp")}

    def start(stop: int, path: Path = path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path), str(stop)],
            stdout=subprocess.PIPE, text=True, env=environment, cwd=root,
        )  # fmt: skip

    first = start(2)
    for line in first.stdout:
        if line == "2\n":
            break
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    first.stdout.close()
    (folder,) = (tmp_path / "tmp").glob(f"{loopback.PREFIX}*")  # with keys, until the next start
    time.sleep(1)
    second = start(-1)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0 and said.split() == ["3", "4"]
    assert not folder.exists() and not list((tmp_path / "tmp").glob(f"{loopback.PREFIX}*"))
    run = fd.Run.load(f"{path}.run")
    whole = fd.run(SCAFFOLD, federation(), 4, participation=0.7, engine=fd.Local(batch=False))
    same(run, whole)
    other = start(-1, tmp_path / "whole.safetensors")  # to the last bit
    other.communicate(timeout=300)
    assert difference(run, fd.Run.load(f"{tmp_path}/whole.safetensors.run")) is None
    secrets = [p for p in tmp_path.rglob("*") if p.suffix == ".key" or "keys" in p.parts]
    assert not secrets
