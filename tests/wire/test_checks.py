"""What is looked at before a reply of an untrusted client is used."""

from __future__ import annotations

import torch

from foedus.wire import checks
from foedus.wire.arrays import LowRank, Signs, Sparse


def test_numbers_that_a_reply_stands_for():
    """A sparse tensor of 3 x 4, signs of 5 and a product of 6 x 1 and 1 x 7; dense tensors need no
    limit of their own.
    """
    sparse = Sparse(torch.zeros(1, dtype=torch.int64), torch.zeros(1), (3, 4))
    signs = Signs.pack(torch.ones(5), 1.0)
    low_rank = LowRank(torch.zeros(6, 1), torch.zeros(7, 1))
    assert (
        checks.dense_size({"a": sparse, "b": [signs, low_rank], "c": torch.zeros(100)})
        == 12 + 5 + 42
    )


def test_leading_dimensions_count():
    """Two sparse tensors of 3, two rows of 4 signs, two products of 5 x 0 and 0 x 6; and 2^31
    sparse tensors that take no bytes, since none of them has an entry.
    """
    assert checks.dense_size(Sparse(torch.zeros(2, 1).long(), torch.zeros(2, 1), (3,))) == 6
    assert checks.dense_size(Signs.pack(torch.ones(2, 4), torch.ones(2))) == 8
    assert checks.dense_size(LowRank(torch.zeros(2, 5, 0), torch.zeros(2, 6, 0))) == 60
    many = torch.zeros(1 << 31, 0)
    assert checks.dense_size(Sparse(many.int(), many, (4,))) == 1 << 33


def test_more_than_half_decide_about_the_form():
    vector, matrix = {"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}
    assert sorted(checks.misfits({0: vector, 1: matrix, 2: vector}, None)) == [1]
    assert sorted(checks.misfits({0: vector, 1: matrix}, None)) == [0, 1]
    assert sorted(checks.misfits({0: vector, 1: vector, 2: matrix}, checks.form_of(matrix))) == [
        0,
        1,
    ]


def test_which_replies_are_finite():
    """Both factors of the second are finite, and their product is not."""
    huge = LowRank(torch.tensor([[[1.0]], [[1e30]]]), torch.tensor([[[1.0]], [[1e30]]]))
    assert checks.finite({"a": huge, "b": torch.tensor([[0.0], [0.0]])}, 2).tolist() == [
        True,
        False,
    ]
    assert checks.finite({"a": torch.tensor([[0.0, 1.0], [0.0, torch.nan]])}, 2).tolist() == [
        True,
        False,
    ]
