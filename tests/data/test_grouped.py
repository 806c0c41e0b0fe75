"""Whole groups are held out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foedus.data.grouped import held_out_groups
from foedus.errors import DataError


@settings(max_examples=100, deadline=None)
@given(data=st.data(), part=st.floats(0.01, 0.99), seed=st.integers(0, 1000))
def test_no_group_is_on_both_sides(data, part, seed):
    rows = data.draw(st.integers(2, 300))
    groups = np.random.default_rng(seed).integers(0, data.draw(st.integers(2, rows)), rows)
    groups[:2] = [0, 1]
    strata = groups % 3 if data.draw(st.booleans()) else None
    held = held_out_groups(groups, part, seed, strata)
    assert held.dtype == bool and held.shape == groups.shape
    assert not set(groups[held]) & set(groups[~held])
    assert held.any() and not held.all()
    assert np.array_equal(held, held_out_groups(groups, part, seed, strata))


def test_the_part_is_met_up_to_half_a_group():
    rng = np.random.default_rng(0)
    groups, strata = rng.integers(0, 300, 6000), None
    largest = np.bincount(groups).max()
    for seed in range(5):
        held = held_out_groups(groups, 0.25, seed)
        assert abs(held.sum() - 1500) <= largest / 2
    strata = groups % 4  # of one stratum each
    held = held_out_groups(groups, 0.25, 1, strata)
    for k in range(4):
        assert abs(held[strata == k].sum() - 0.25 * (strata == k).sum()) <= largest / 2
    assert not np.array_equal(held, held_out_groups(groups, 0.25, 2, strata))


def test_a_group_of_several_labels_counts_for_the_most_of_them():
    """Group 0 has labels 1, 1, 0 and is of stratum 1; group 3 has a tie, and is of stratum 0."""
    groups = np.array([0, 0, 0, 1, 1, 2, 2, 3, 3])
    strata = np.array([1, 1, 0, 1, 1, 0, 0, 0, 1])
    for seed in range(20):
        held = held_out_groups(groups, 0.5, seed, strata)
        assert held[groups == 0][0] != held[groups == 1][0]
        assert held[groups == 2][0] != held[groups == 3][0]


def test_texts_are_groups():
    names = np.array(["ann", "ben", "ann", "cy"])
    assert held_out_groups(names, 0.25).tolist() == [False, False, False, True]


def test_refusals():
    for arguments, words in (
        ((np.zeros(5), 0.2), "at least two groups, and there is 1"),
        ((np.arange(5), 0.0), "part=0.0"),
        ((np.arange(5), 1.0), "part=1.0"),
        ((np.arange(5), 0.5, -1), "seed=-1"),
        ((np.zeros((2, 2)), 0.5), "one entry a row"),
        ((np.arange(5), 0.5, 0, np.arange(4)), "one entry a row"),
    ):
        with pytest.raises(DataError, match=words):
            held_out_groups(*arguments)
