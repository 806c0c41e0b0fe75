"""Bodies of messages: cut by lengths, and split into those of groups and what comes behind them."""

from __future__ import annotations

import pytest

import foedus as fd
from foedus.engines.flower import messages


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
