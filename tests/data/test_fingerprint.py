"""Checksums of federations."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from foedus.data import Data, Federation, fingerprint


def test_a_checksum_is_that_of_the_bytes_one_after_the_other():
    a, b = np.arange(5, dtype=np.float32), np.array([[1, 2], [3, 4]])
    assert fingerprint.checksum(a, b) == zlib.crc32(a.tobytes() + b.tobytes())
    assert fingerprint.checksum(b.T) == zlib.crc32(b.T.tobytes())  # as it reads, not as it lies


def test_of_a_large_array_blocks_are_read_and_no_copy_is_made(monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE", 1000)
    a = np.zeros((1 << 20) + 7, np.uint8)
    value = fingerprint.checksum(a)
    for place in (0, len(a) // 2, len(a) - 1):  # the blocks cover an array of this size
        changed = a.copy()
        changed[place] = 1
        assert fingerprint.checksum(changed) != value


def federation(**changed) -> Federation:
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    given = {"x": x, "y": np.arange(12) % 2, "x_test": x[:3], "y_test": np.array([0, 1, 0])}
    given |= changed
    data, owner = Data.from_arrays(*given.values(), name="d"), np.arange(12) % 3
    return Federation.from_owners(data, owner, np.arange(3), np.arange(3), "given", {})


@pytest.mark.parametrize(
    ("changed", "differ"),
    [
        ({}, set()),
        ({"x": np.arange(24, dtype=np.float32)[::-1].reshape(12, 2)}, {"training rows"}),
        ({"y": 1 - np.arange(12) % 2}, {"training rows"}),
        ({"x_test": np.ones((3, 2))}, {"test rows"}),
        ({"y_test": np.array([0, 1, 1])}, {"test rows"}),
    ],
)
def test_what_differs_is_named(changed, differ):
    first, second = federation().fingerprint, federation(**changed).fingerprint
    assert {k for k in first if first[k] != second[k]} == differ


def test_equal_bytes_of_another_shape_are_other_rows():
    x = np.arange(24, dtype=np.float32)
    flat, image = (
        federation(x=x.reshape(12, *shape), x_test=x[:6].reshape(3, *shape)).fingerprint
        for shape in ((2,), (1, 2))
    )
    assert flat["training rows"] != image["training rows"]


def test_pooled_rows_are_those_of_the_federation_and_selected_ones_are_not():
    fed = federation()
    first, pooled, part = (f.fingerprint for f in (fed, fed.pool(), fed.select([0, 1])))
    assert {k for k in first if first[k] != pooled[k]} == {"clients"}
    assert {k for k in first if first[k] != part[k]} == {"clients", "training rows"}
    others = fed.select([1, 2]).pool().fingerprint
    assert others["training rows"] != fed.select([0, 1]).pool().fingerprint["training rows"]


def test_of_sites_the_server_has_checksums_in_the_place_of_rows():
    """Made by the sites with keys of their own; nothing else stands for their rows."""
    from foedus.base.spec import Spec
    from foedus.core.loop import Loop
    from foedus.engines.flower.server import Sites

    ids, sizes, sent = np.array([0, 4]), np.array([30, 20]), np.array([123, 456])
    loop = object.__new__(Loop)
    loop.fed = Sites(ids, sizes, Spec((3,), 2, 2), sent)
    assert loop.fingerprint == {
        "clients": fingerprint.checksum(ids, np.array([0, 30, 50]), sizes),
        "data": fingerprint.checksum(sent, sizes),
        "test rows": 0,
    }
