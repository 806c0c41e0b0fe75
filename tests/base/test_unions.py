"""Unions of sets of strings, from lists and from sums alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus.base import unions

STRINGS = st.sets(st.binary(max_size=unions.LONGEST), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(STRINGS, min_size=1, max_size=5))
def test_the_union_is_read_from_the_sum_of_tables(sets):
    union = sorted(set().union(*sets))
    total = sum(unions.table(strings, 192) for strings in sets)
    assert unions.peeled(total) == union
    # a sum in fixed point, whose rounding errors add up
    noise = torch.empty(total.shape).uniform_(-2e-4, 2e-4, generator=torch.Generator())
    assert unions.peeled(total + noise) == union
    assert set().union(*(unions.read_list(unions.listed(s)) for s in sets)) == set(union)


def test_a_table_by_hand():
    """One string at two clients: three rows hold 2, twice its length and bytes, twice its check."""
    total = unions.table({b"ab"}, 9) + unions.table({b"ab"}, 9)
    rows = torch.nonzero(total[:, 0]).flatten().tolist()
    assert [row // 3 for row in rows] == [0, 1, 2]  # one in each third
    assert (total[rows, :5] * 1024).tolist() == [[2, 4, 2 * ord("a"), 2 * ord("b"), 0]] * 3
    assert unions.peeled(total) == [b"ab"]


def test_a_row_of_two_strings_is_not_read_as_one():
    """b"a" and b"c" in one row are twice b"b", but for the check; elsewhere each is alone."""
    rows = 12
    texts = [bytes([k]) for k in range(256)]
    pairs = (
        (a, b)
        for a in texts
        for b in texts[a[0] + 2 :: 2]
        if [p == q for p, q in zip(*(unions._places(t, rows) for t in (a, b)), strict=True)]
        == [False, False, True]
        and not ((unions._numbers(a) + unions._numbers(b)) % 2).any()
        and unions._places(bytes([(a[0] + b[0]) // 2]), rows)[2] == unions._places(a, rows)[2]
    )
    chosen = list(itertools.islice(pairs, 5))
    assert len(chosen) == 5
    for pair in chosen:
        assert unions.peeled(unions.table(pair, rows)) == sorted(pair)


def test_too_few_rows_are_noticed():
    many = {f"text {i}".encode() for i in range(50)}
    assert unions.peeled(unions.table(many, 30)) is None
    assert unions.peeled(unions.table(many, 96)) == sorted(many)
    assert unions.peeled(torch.zeros(9, 68)) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_sum_that_nobody_made_ends(seed):
    junk = torch.randn(48, 68, generator=torch.Generator().manual_seed(seed)) / 100
    found = unions.peeled(junk)
    assert found is None or found == []


def test_strings_that_are_too_long():
    with pytest.raises(fd.ReplyError, match="a text is longer than the 62 bytes"):
        unions.table({b"x" * 63}, 9)


@pytest.mark.parametrize(
    "sent",
    [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), "text",
     torch.tensor([5, 0, 65], dtype=torch.uint8), torch.tensor([1], dtype=torch.uint8)],
    ids=["floats", "a matrix", "no tensor", "cut off", "half a length"],
)  # fmt: skip
def test_lists_of_untrusted_clients(sent):
    with pytest.raises(fd.ReplyError, match="its list of texts"):
        unions.read_list(sent)
