"""Large arrays: they stay where they are, and are checked in blocks."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

import foedus as fd
from foedus.data import finite
from foedus.data.formats import npz


@pytest.fixture
def mapped(tmp_path):
    """Rows on the disk, and their labels."""
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(40, 3))
    rows[:] = np.arange(120).reshape(40, 3) / 60 - 1
    rows.flush()
    return np.memmap(tmp_path / "rows", np.float32, "r", shape=(40, 3)), np.arange(40) % 2


def test_one_array_is_not_copied(mapped):
    x, y = mapped
    data = fd.Data.from_arrays(x, y, groups=np.repeat([0, 1], 20))
    assert np.shares_memory(data.x_train, x)
    assert np.shares_memory(fd.Federation.from_clients([(x, y)]).data.x_train, x)
    fed = fd.split(data, "natural", test=0.2)
    assert np.shares_memory(fed.data.x_train, x)
    session = fd.Local().open(fd.FedAvg(), fed, fd.base.random.key(0))
    assert np.shares_memory(session.train.x.numpy(), x)
    assert fd.run(fd.FedAvg(), fed, 2).history.accuracy.notna().all()


def test_neighboring_slices_of_one_array_are_not_copied(mapped):
    x, y = mapped
    ends = [0, 7, 25, 40]
    parts = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)]
    fed = fd.Federation.from_clients(parts)
    assert np.shares_memory(fed.data.x_train, x) and fed.sizes.tolist() == [7, 18, 15]
    assert (fed.data.x_train == x).all()


def test_single_rows_of_one_array_stay_what_they_are():
    """A row with a new dimension in front has a stride of 0 there."""
    x = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    fed = fd.Federation.from_clients([(row[None], [k % 2]) for k, row in enumerate(x)])
    assert (fed.data.x_train == x).all() and np.shares_memory(fed.data.x_train, x)


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [0, 2]], ids=["swapped", "twice", "a gap"])
def test_other_slices_are_copied_in_their_order(mapped, order):
    x, y = mapped
    slices = [(x[:10], y[:10]), (x[10:20], y[10:20]), (x[30:], y[30:])]
    fed = fd.Federation.from_clients([slices[k] for k in order])
    assert not np.shares_memory(fed.data.x_train, x)
    assert (fed.data.x_train == np.concatenate([slices[k][0] for k in order])).all()


def test_large_arrays_of_an_archive_stay_on_the_disk(tmp_path, monkeypatch, mapped):
    x, y = np.array(mapped[0]), mapped[1]
    monkeypatch.setattr(npz, "MAPPED", 400)
    parts = {"x_train": x, "y_train": y, "x_test": x[:5], "y_test": y[:5]}
    np.savez(tmp_path / "plain.npz", **parts)
    np.savez_compressed(tmp_path / "small.npz", **parts)
    plain, small = (fd.load(tmp_path / f"{k}.npz", scale=None) for k in ("plain", "small"))

    def on_disk(array):
        while array is not None and not isinstance(array, np.memmap):
            array = array.base
        return array is not None

    assert on_disk(plain.x_train) and not on_disk(plain.x_test) and not on_disk(small.x_train)
    assert (plain.x_train == x).all() and (small.x_train == x).all()
    monkeypatch.setattr(npz, "MAPPED", 0)
    np.savez(tmp_path / "columns.npz", **(parts | {"x_train": np.asfortranarray(x)}))
    assert (fd.load(tmp_path / "columns.npz", scale=None).x_train == x).all()


def test_numbers_are_checked_in_blocks(monkeypatch):
    monkeypatch.setattr(finite, "_BLOCK", 7)  # three rows of two numbers
    x = np.zeros((10, 2), np.float32)
    assert finite.first_not_finite(x) is None
    x[4, 1], x[9, 0] = np.nan, -np.inf
    assert finite.first_not_finite(x) == (2, 4, 1)
    assert finite.first_not_finite(np.full((1, 20), np.inf)) == (20, 0, 0)


def test_the_check_takes_no_memory_of_the_size_of_the_data():
    x = np.zeros((1 << 18, 64), np.float32)  # 64 MB
    x[-1, 3] = np.nan
    tracemalloc.start()
    try:
        assert finite.first_not_finite(x) == (1, len(x) - 1, 3)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
