"""The rows of a history beside the checkpoint: only added to, fitting at every instant, damage
named.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from pathlib import Path

import pytest

import foedus as fd
from foedus import testing
from foedus.core.history import History
from foedus.storage import checkpoint, history_file
from tests.storage.test_checkpoint import DAMAGES

ALGORITHM = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)
NAME = "checkpoint.safetensors"
BESIDE = f"{NAME}.history"


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(history_file, "KEPT", 3)


@pytest.fixture(scope="module")
def whole(fed) -> fd.Run:
    return fd.run(ALGORITHM, fed, 9)


def meta(path: Path) -> dict:
    return checkpoint.read(path)[1]


def test_a_checkpoint_holds_few_rows_and_says_where_the_others_are(fed, tmp_path):
    run = fd.run(ALGORITHM, fed, 6, checkpoint=tmp_path)
    # 3 rows are too many: after rounds 2, 4 and 6 all but the last go to the file
    history = meta(tmp_path / NAME)["history"]
    assert [row["round"] for row in history["latest"]] == [6]
    data = (tmp_path / BESIDE).read_bytes()
    assert [json.loads(line) for line in data.splitlines()] == run.records.rows[:6]
    assert history["earlier"] == {"rows": 6, "size": len(data), "crc32": zlib.crc32(data)}
    before = meta(tmp_path / f"{NAME}.previous")["history"]
    assert [row["round"] for row in before["latest"]] == [4, 5] and before["earlier"]["rows"] == 4


def test_few_rows_need_no_file(fed, tmp_path):
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.previous"]


def test_what_is_written_a_round_does_not_grow(fed, tmp_path, monkeypatch):
    """The bytes of all files that are written, over 60 rounds."""
    fast, written, pwrite = fd.FedAvg(fd.Linear(), lr=0.1), [], os.pwrite

    def counting(handle, data, at):
        written[-1] += len(data)
        return pwrite(handle, data, at)

    replace = checkpoint.replace

    def counted(path, chunks, previous=None):
        chunks = list(chunks)
        written[-1] += sum(map(len, chunks))
        replace(path, chunks, previous)

    class Round(fd.Callback):
        def row(self, row):
            written.append(0)

    monkeypatch.setattr(os, "pwrite", counting)
    monkeypatch.setattr(checkpoint, "replace", counted)
    written.append(0)
    fd.run(fast, fed, 60, checkpoint=tmp_path, callbacks=[Round()], evaluate_every=0)
    assert max(written[50:60]) < 1.05 * max(written[4:14])


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_resumed_run_has_all_rows(fed, tmp_path, whole, every):
    options = {"checkpoint": tmp_path, "checkpoint_every": every}
    fd.run(ALGORITHM, fed, 4, **options)
    fd.run(ALGORITHM, fed, 7, resume=True, **options)
    testing._same(whole, fd.run(ALGORITHM, fed, 9, resume=True, **options), "rows are lost")


def test_what_was_evaluated_only_at_the_end_does_not_stay(fed, tmp_path):
    options = {"evaluate_every": 4}
    parts = [4, 5, 6, 7, 9]
    for rounds in parts:
        run = fd.run(ALGORITHM, fed, rounds, checkpoint=tmp_path, resume="auto", **options)
    expected = fd.run(ALGORITHM, fed, 9, **options)
    testing._same(expected, run, "what was evaluated only at the end has stayed")
    assert run.history.loss.notna().tolist() == [n % 4 == 0 or n == 9 for n in range(10)]


def test_old_checkpoints_with_all_rows_are_resumed(fed, tmp_path, whole):
    fd.run(ALGORITHM, fed, 4, checkpoint=tmp_path)
    trees, about = checkpoint.read(tmp_path / NAME)
    about["history"] = fd.run(ALGORITHM, fed, 4).records.rows
    (tmp_path / BESIDE).unlink()
    checkpoint.write(tmp_path / NAME, trees, about)
    run = fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    testing._same(whole, run, "an old checkpoint is not gone on from")
    again = fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    testing._same(whole, again, "nor is what was made of it")


def test_a_file_of_a_run_whose_checkpoints_were_removed_is_of_no_consequence(fed, tmp_path, whole):
    (tmp_path / BESIDE).write_bytes(b"something else\n" * 1000)
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    assert not (tmp_path / BESIDE).exists()
    run = fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    testing._same(whole, run, "another file left a trace")


# -- damage ----------------------------------------------------------------------------------------

BESIDE_DAMAGES = {name: DAMAGES[name] for name in ("cut", "empty", "zeros", "shifted")} | {
    "a bit": lambda b: b[:9] + bytes([b[9] ^ 1]) + b[10:],
    "missing": None,
}


@pytest.mark.parametrize("damage", BESIDE_DAMAGES.values(), ids=BESIDE_DAMAGES.keys())
def test_a_damaged_file_is_named(fed, tmp_path, damage):
    fd.run(ALGORITHM, fed, 6, checkpoint=tmp_path)
    path = tmp_path / BESIDE
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(fd.CheckpointError) as info:
        fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    assert f"{BESIDE} is damaged (" in str(info.value) and "remove both" in str(info.value)
    assert f"so {NAME} cannot be used" in str(info.value)
    assert f"so {NAME}.previous cannot be used" in str(info.value)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before  # nothing is touched


def test_damage_to_rows_of_the_newest_alone_is_a_reason_to_use_the_one_before(fed, tmp_path, whole):
    """After round 6 the newest has 6 rows in the file, the one before it 4."""
    fd.run(ALGORITHM, fed, 6, checkpoint=tmp_path)
    path = tmp_path / BESIDE
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"round": 5', b'"round": 7'))
    with pytest.warns(
        UserWarning, match=rf"{BESIDE} is damaged .*{NAME} cannot be used .*of round 5"
    ):
        run = fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    testing._same(whole, run, "a damaged file left a trace")
    assert len(run.notes) == 1
    testing._same(
        whole, fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True), "and leaves one now"
    )


def test_a_damaged_checkpoint_gives_way_with_the_rows_of_the_one_before(fed, tmp_path, whole):
    """The file has rows of the newest, which are overwritten."""
    fd.run(ALGORITHM, fed, 6, checkpoint=tmp_path)
    (tmp_path / NAME).write_bytes(b"")
    with pytest.warns(UserWarning, match="of round 5"):
        run = fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    testing._same(whole, run, "a damaged checkpoint left a trace")
    again = fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    testing._same(whole, again, "a damaged checkpoint left a trace in the file")


@pytest.mark.parametrize(
    "earlier",
    [None, [], {"rows": 4}, {"rows": 5, "size": 1, "crc32": 0, "more": 1}, {"size": "x"}, "wrong"],
    ids=str,
)
def test_a_forged_pointer_is_refused_with_a_readable_error(fed, tmp_path, earlier):
    fd.run(ALGORITHM, fed, 4, checkpoint=tmp_path)
    trees, about = checkpoint.read(tmp_path / NAME)
    if earlier == "wrong":
        earlier = {**about["history"]["earlier"], "rows": 3}
    about["history"]["earlier"] = earlier
    checkpoint.write(tmp_path / NAME, trees, about)
    (tmp_path / f"{NAME}.previous").unlink()
    with pytest.raises(fd.CheckpointError, match="damaged"):
        fd.run(ALGORITHM, fed, 5, checkpoint=tmp_path, resume=True)


def test_a_full_disk_leaves_the_file_as_it_was(fed, tmp_path, monkeypatch, whole):
    fd.run(ALGORITHM, fed, 3, checkpoint=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    pwrite = os.pwrite

    def full(handle, data, at):
        if len(data) > 10:
            return pwrite(handle, data[:10], at)
        raise OSError(28, "No space left on device")

    def short(handle, data, at):
        return pwrite(handle, data[:100], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(fd.CheckpointError, match=rf"{BESIDE} cannot be written: No space") as e:
            fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
        assert "The checkpoint of round 3 is still good" in e.value.__notes__[0]
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    monkeypatch.setattr(os, "pwrite", short)  # less than was asked for is no error
    run = fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, resume=True)
    testing._same(whole, run, "a full disk left a trace")


def test_a_file_that_somebody_cuts_meanwhile_is_no_basis_for_a_checkpoint(fed, tmp_path):
    class Cut(fd.Callback):
        def row(self, row):
            if row["round"] == 3:
                (tmp_path / BESIDE).write_bytes(b"")

    with pytest.raises(fd.CheckpointError, match=rf"{BESIDE} cannot be written: it has become"):
        fd.run(ALGORITHM, fed, 9, checkpoint=tmp_path, callbacks=[Cut()])


def test_at_every_instant_there_is_a_checkpoint_to_go_on_from(fed, tmp_path, monkeypatch):
    """Whichever of the system's calls is the last, whole or by half, state and history fit."""
    fast, at = fd.FedAvg(fd.Linear(), lr=0.1, server_momentum=0.5), tmp_path / "run"
    whole = fd.run(fast, fed, 7)
    steps = {n: getattr(os, n) for n in ("pwrite", "ftruncate", "fsync", "link", "replace")}
    seen: dict[tuple, Path] = {}

    def look():
        files = sorted((p.name, p.read_bytes()) for p in at.iterdir() if p.suffix != ".lock")
        if tuple(files) not in seen and files:
            seen[tuple(files)] = shutil.copytree(at, tmp_path / f"killed{len(seen)}")

    def looking(name):
        def call(*args):
            if name == "pwrite":
                steps[name](args[0], args[1][: len(args[1]) // 2], args[2])
                look()
            found = steps[name](*args)
            look()
            return found

        return call

    with monkeypatch.context() as patch:
        for name in steps:
            patch.setattr(os, name, looking(name))
        fd.run(fast, fed, 7, checkpoint=at)
    torn = [files for files in seen if any(n == BESIDE and not b.endswith(b"\n") for n, b in files)]
    assert len(seen) > 25 and torn
    for folder in seen.values():
        (folder / f"{NAME}.lock").unlink(missing_ok=True)
        run = fd.run(fast, fed, 7, checkpoint=folder, resume="auto")
        testing._same(whole, run, f"{folder.name} differs")
        assert not run.notes


# -- the history itself ----------------------------------------------------------------------------


def test_the_latest_value_and_the_columns_are_those_of_all_rows():
    rows = [
        {"round": 0, "loss": 3.0, "why": "a"},
        {"round": 1, "loss": math.nan, "late": math.nan},
        {"round": 2, "more": 1.0, "accuracy": 0.5},
    ]
    history = History(rows)
    assert history.columns == ["round", "loss", "accuracy", "why", "late", "more"]
    assert (history.last("loss"), history.last("why"), history.last("round")) == (3.0, "a", 2)
    assert math.isnan(history.last("late")) and math.isnan(history.last("nothing"))
    history.append({"late": 2.0})
    assert history.last("late") == 2.0
