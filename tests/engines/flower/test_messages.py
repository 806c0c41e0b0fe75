"""Messages: headers and bodies that cannot be read, bodies cut by lengths, and split into those of
groups and what comes behind them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import foedus as fd
from foedus.engines.flower import messages


def of(content: dict[str, Any]) -> Any:
    """What is read of a message from a peer."""
    return SimpleNamespace(content=RecordDict(content))


def test_headers_and_bodies_are_read_as_they_were_written():
    sent = SimpleNamespace(content=messages.content({"round": 3, "ids": [1, 2]}, b"body"))
    assert messages.header(sent) == {"round": 3, "ids": [1, 2]}
    assert messages.body(sent) == b"body"
    empty = SimpleNamespace(content=messages.content({}))
    assert (messages.header(empty), messages.body(empty)) == ({}, b"")


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ({}, "no readable header: KeyError"),
        ({"foedus": ConfigRecord({"text": "{}"})}, "no readable header: KeyError"),
        ({"foedus": ConfigRecord({"json": 7})}, "no readable header: TypeError('it is a int')"),
        ({"foedus": ConfigRecord({"json": "{"})}, "no readable header: JSONDecodeError"),
        ({"foedus": ConfigRecord({"json": "[" * 100_000})}, "no readable header: RecursionError"),
        ({"foedus": ConfigRecord({"json": "[1]"})}, "the header of the message is not a table"),
        (
            {"foedus": ConfigRecord({"json": " " * ((1 << 24) + 1)})},
            "the header of the message has 16777217 characters; at most 16777216 are read",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_headers_that_cannot_be_read(records, why):
    with pytest.raises(fd.ReplyError) as info:
        messages.header(of(records))
    assert why in str(info.value)


def test_a_header_of_bytes_is_read():
    assert messages.header(of({"foedus": ConfigRecord({"json": b'{"a": 1}'})})) == {"a": 1}


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (ArrayRecord({"1": Array(np.zeros(1))}), "KeyError('0')"),
        (MetricRecord({"0": 1.5}), "TypeError('it is a float')"),
    ],
    ids=["another name", "no array"],
)
def test_bodies_that_cannot_be_read(record, why):
    with pytest.raises(fd.ReplyError) as info:
        messages.body(of({"wire": record}))
    assert str(info.value) == f"the body of the message cannot be read: {why}"


# -- parts -----------------------------------------------------------------------------------------


def test_a_message_for_each_group_and_the_rest():
    parts = [b"a", b"b", b"c", b"d"]
    assert messages.split(parts, [[3], [1, 2]], [1, 2, 3]) == ([b"a", b"b"], [b"c", b"d"])
    assert messages.split(parts[:1], [[1, 2]], [2, 1]) == ([b"a"], [])


@pytest.mark.parametrize(
    "groups",
    [
        None,
        3,
        [1, 2, 3],
        [[1, 2]],
        [[1, 2], [2, 3]],
        [[1, 2, 3, 4]],
        [[1], [2], [3]],
        [[1.0, 2, 3]],
        [[True, 2, 3]],
    ],
    ids=repr,
)
def test_groups_that_are_not_those_who_are_asked(groups):
    with pytest.raises(fd.ReplyError, match="the groups of clients in the header"):
        messages.split([b"a", b"b"], groups, [1, 2, 3])


def test_bodies_are_cut_by_their_lengths():
    assert messages.cut(b"abcde", [2, 0, 3]) == [b"ab", b"", b"cde"]


@pytest.mark.parametrize("lengths", [None, 5, [4], [3, 3], [6, -1], [5.0], [True] * 5], ids=repr)
def test_lengths_that_do_not_fit(lengths):
    with pytest.raises(fd.ReplyError, match="the lengths of its parts"):
        messages.cut(b"abcde", lengths)
