"""Checkpoints: whole or not at all, damage noticed, and the one before used in its place."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import testing
from foedus.storage import checkpoint

ALGORITHM = fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16)
NAME = "checkpoint.safetensors"


@pytest.fixture
def whole(fed) -> fd.Run:
    return fd.run(ALGORITHM, fed, 3)


def rounds(path: Path) -> int:
    return checkpoint.read(path)[1]["rounds_done"]


def test_the_one_before_is_kept(fed, tmp_path):
    fd.run(ALGORITHM, fed, 2, checkpoint=tmp_path)
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.previous"]
    assert (rounds(tmp_path / NAME), rounds(tmp_path / f"{NAME}.previous")) == (2, 1)


DAMAGES = {
    "cut": lambda b: b[: len(b) // 2],
    "empty": lambda b: b"",
    "zeros": lambda b: b"\x00" * 64,
    "shifted": lambda b: b"garbage" + b,
    "a bit of a number": lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:],
    "longer": lambda b: b + b"\x00",
    "the checksum": lambda b: re.sub(rb'"crc32":"(\w{8})"', b'"crc32":"0000000g"', b),
    "no checksum": lambda b: b.replace(b'"crc32"', b'"crc33"'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(fed, tmp_path, whole, damage):
    fd.run(ALGORITHM, fed, 2, checkpoint=tmp_path)
    path = tmp_path / NAME
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    with pytest.warns(
        UserWarning,
        match=r"damaged.* the run goes on from the checkpoint before it, .*previous of round 1",
    ):
        run = fd.run(ALGORITHM, fed, 3, checkpoint=tmp_path, resume=True)
    testing._same(whole, run, "a damaged checkpoint left a trace")
    assert len(run.notes) == 1 and "previous of round 1" in run.notes[0]
    assert (tmp_path / f"{NAME}.damaged").read_bytes() == bad
    assert (rounds(path), rounds(tmp_path / f"{NAME}.previous")) == (3, 2)
    run.save(tmp_path / "run.safetensors")
    assert fd.Run.load(tmp_path / "run.safetensors").notes == run.notes


def test_a_damaged_one_never_takes_the_place_of_a_good_one(fed, tmp_path):
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    path, previous = tmp_path / NAME, tmp_path / f"{NAME}.previous"
    path.write_bytes(b"")
    good = previous.read_bytes()
    with pytest.warns(UserWarning, match="of round 0"):
        fd.run(ALGORITHM, fed, 0, checkpoint=tmp_path, resume=True)
    assert previous.read_bytes() == good and not path.exists()
    with pytest.warns(UserWarning, match="there is no such file; the run goes on"):
        fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path, resume=True)
    assert previous.read_bytes() == good and rounds(path) == 1


def test_both_damaged_is_an_error_that_names_both(fed, tmp_path):
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    for name in (NAME, f"{NAME}.previous"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(fd.CheckpointError) as info:
        fd.run(ALGORITHM, fed, 2, checkpoint=tmp_path, resume=True)
    said = str(info.value)
    assert (
        f"{NAME} is not a foedus file, or it is damaged" in said
        and f"{NAME}.previous is not" in said
    )
    assert "remove both" in said
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.previous"]  # nothing is touched


def test_a_new_run_does_not_take_the_place_of_one_before(fed, tmp_path):
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    (tmp_path / NAME).unlink()
    with pytest.raises(
        fd.CheckpointError, match=r"previous holds a run at round 0; pass resume=True"
    ):
        fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)


def test_another_runs_checkpoint_is_no_damaged_one(fed, tmp_path):
    """Settings that differ are an error, not a reason to look further."""
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    with pytest.raises(fd.CheckpointError, match="belongs to another run"):
        fd.run(ALGORITHM, fed, 1, seed=1, checkpoint=tmp_path, resume=True)
    assert not (tmp_path / f"{NAME}.damaged").exists()


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_change_of_bytes_is_noticed(tmp_path, data):
    path, bad = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    if not path.exists():
        tree = {"w": torch.arange(5.0), "n": [1, "text", None], "s": fd.State(x=torch.zeros(2, 0))}
        checkpoint.write(path, {"state": tree}, {"kind": "x", "rounds_done": 7})
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        changed = good[:at]
    else:
        piece = data.draw(st.binary(min_size=1, max_size=4))
        changed = good[:at] + piece + good[at + len(piece) :]
    bad.write_bytes(changed)
    if changed == good:
        checkpoint.read(bad)
    else:
        with pytest.raises(fd.CheckpointError):
            checkpoint.read(bad)


def test_the_checksum_is_that_of_the_file(tmp_path):
    """By another way: the digits set to zero, over all of the file."""
    path = tmp_path / "a.safetensors"
    checkpoint.write(path, {"state": torch.arange(3)}, {"a": '"crc32":"deadbeef"'})
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    digits = json.loads(data[8 : 8 + length])["__metadata__"]["crc32"]
    assert f"{zlib.crc32(data.replace(digits.encode(), b'00000000')):08x}" == digits
    assert checkpoint.read(path)[1] == {"a": '"crc32":"deadbeef"'}


def test_files_without_a_checksum_are_still_read(tmp_path):
    from safetensors.torch import save

    path, header = (
        tmp_path / "a.safetensors",
        {"version": 1, "forms": {"state": {"tensor": "t"}}, "meta": {"a": 1}},
    )
    path.write_bytes(save({"state/t": torch.arange(3)}, metadata={"foedus": json.dumps(header)}))
    trees, meta = checkpoint.read(path)
    assert torch.equal(trees["state"], torch.arange(3)) and meta == {"a": 1}
    header["version"] = 2  # which has one, so it was lost
    path.write_bytes(save({"state/t": torch.arange(3)}, metadata={"foedus": json.dumps(header)}))
    with pytest.raises(fd.CheckpointError):
        checkpoint.read(path)


def test_a_full_disk_leaves_the_last_checkpoint(fed, tmp_path, monkeypatch, whole):
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(
            fd.CheckpointError, match=rf"{NAME} cannot be written: No space left"
        ) as info:
            fd.run(ALGORITHM, fed, 3, checkpoint=tmp_path, resume=True)
    assert info.value.__notes__ == [
        "The checkpoint of round 1 is still good: resume=True goes on from it."
    ]
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before  # and nothing half written
    run = fd.run(ALGORITHM, fed, 3, checkpoint=tmp_path, resume=True)
    testing._same(whole, run, "a full disk left a trace")
    assert not run.notes


def test_what_a_killed_process_left_is_swept_away(fed, tmp_path):
    (tmp_path / f".{NAME}.abcdefgh.part").write_bytes(b"half")
    (tmp_path / "other.part").write_bytes(b"mine")
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.previous", "other.part"]


def test_what_a_process_killed_while_saving_left_is_swept_away(fed, tmp_path):
    left, other = tmp_path / ".run.safetensors.abc.part", tmp_path / ".other.safetensors.abc.part"
    for path in (left, other):
        path.write_bytes(b"half")
    fd.run(ALGORITHM, fed, 1).save(tmp_path / "run.safetensors")
    assert not left.exists() and other.exists()


def test_at_every_instant_there_is_a_checkpoint(tmp_path, monkeypatch):
    """Whichever of the system's calls is the last before a power cut."""
    path = tmp_path / NAME
    steps = {name: getattr(os, name) for name in ("replace", "link", "chmod", "fsync")}

    def looking(name):
        def call(*args):
            found = steps[name](*args)
            if writing:
                assert rounds(path) in writing
                assert rounds(checkpoint.previous_of(path)) in [
                    n - 1 for n in writing
                ] or writing == [0, 1]
            return found

        return call

    writing: list[int] = []
    for name in steps:
        monkeypatch.setattr(os, name, looking(name))
    for number in range(4):
        writing = [number - 1, number] if number > 1 else []
        checkpoint.write(
            path, {"state": torch.zeros(3)}, {"rounds_done": number}, checkpoint.previous_of(path)
        )


def test_without_links_there_is_still_one_of_the_two(tmp_path, monkeypatch):
    path = tmp_path / NAME

    def none(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    for number in range(3):
        checkpoint.write(
            path, {"state": torch.zeros(3)}, {"rounds_done": number}, checkpoint.previous_of(path)
        )
    assert (rounds(path), rounds(checkpoint.previous_of(path))) == (2, 1)


def test_files_are_as_readable_as_any_other(tmp_path):
    checkpoint.replace(tmp_path / "a", [b"1"])
    (tmp_path / "b").write_bytes(b"1")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "b").stat().st_mode
    )


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"version": 2},
        {"version": 2, "forms": [], "meta": {}},
        {"version": 2, "forms": {"state": {"state": 3}}, "meta": {}},
        {"version": 2, "forms": {"state": {"dict": [[[], {"value": 1}]]}}, "meta": {}},
        {
            "version": 2,
            "forms": {"state": {"node": "Sparse", "parts": [], "static": {}}},
            "meta": {},
        },
        {"version": 2, "forms": {"state": {"node": [], "parts": {}, "static": {}}}, "meta": {}},
        {"version": 2, "forms": {"state": {"tensor": []}}, "meta": {}},
        {"version": 2, "forms": {"state": {"value": 1}}, "meta": 3},
    ],
    ids=str,
)
def test_a_forged_header_is_refused_with_a_readable_error(tmp_path, header):
    """With a checksum that is right: nothing but `CheckpointError` comes out."""
    path = tmp_path / "a.safetensors"
    original = checkpoint.json.dumps
    try:
        checkpoint.json.dumps = lambda *a, **k: original(header)
        checkpoint.write(path, {"state": torch.from_numpy(np.zeros(2))}, {})
    finally:
        checkpoint.json.dumps = original
    with pytest.raises(fd.CheckpointError):
        checkpoint.read(path)
