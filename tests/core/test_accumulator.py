"""Sums of replies, however they come."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foedus import wire
from foedus.core.exchange import map_tensors
from foedus.core.reduce import Accumulator
from foedus.errors import DivergenceError, ReplyError


def added(replies: torch.Tensor, weights: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The weighted sum of replies (c, ...) that come in batches of these sizes."""
    total, first = Accumulator(), 0
    for size in cuts:
        part = slice(first, first + size)
        total.add({"a": replies[part]}, weights[part], 1, torch.arange(first, first + size))
        first += size
    assert first == len(replies)
    return total.result()["a"]


@settings(deadline=None, max_examples=50)
@given(
    cuts=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    width=st.sampled_from([1, 7, 1000, 40_000]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
def test_a_sum_is_that_in_double_precision(cuts, width, dtype):
    generator = torch.Generator().manual_seed(sum(cuts))
    cuts = cuts if width < 40_000 else [min(c, 3) for c in cuts]
    replies = torch.randn(sum(cuts), width, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(sum(cuts), generator=generator, dtype=torch.float64)
    found = added(replies, weights, cuts)
    assert found.dtype == dtype
    exact = (weights.unsqueeze(1) * replies.double()).sum(0)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 1e-2}[dtype] * float(
        weights.sum()
    )
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)


def test_single_replies_are_added_exactly_to_single_precision():
    replies, weights = torch.full((1000, 3), 0.1), torch.full((1000,), 1e-3, dtype=torch.float64)
    # In single precision a thousand additions would be off by far more than the last digit.
    assert torch.equal(added(replies, weights, [1] * 1000), torch.full((3,), 0.1))


def test_replies_that_are_kept_by_others_are_not_changed():
    replies = torch.arange(6.0).view(2, 3)
    before = replies.clone()
    assert added(replies, torch.ones(2, dtype=torch.float64), [1, 1]).tolist() == [3.0, 5.0, 7.0]
    assert torch.equal(replies, before)


def test_a_single_reply_of_another_layout_is_the_same():
    wide = torch.arange(24.0).view(2, 3, 4)
    turned = wide.mT.contiguous().mT
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    found = added(turned, weights, [1, 1])
    assert found.is_contiguous()
    assert torch.equal(found, added(wide, weights, [2]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_single_reply_that_is_not_finite_is_traced(bad):
    total, one = Accumulator(), torch.ones(1, dtype=torch.float64)
    total.add({"a": torch.zeros(1, 5)}, one, 4, torch.tensor([3]))
    broken = torch.zeros(1, 5)
    broken[0, 2] = bad
    with pytest.raises(DivergenceError, match="round 4: the reply of client 8 is not finite"):
        total.add({"a": broken}, one, 4, torch.tensor([8]))
    assert torch.equal(total.result()["a"], torch.zeros(5))


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(1, 4)},
        {"b": torch.zeros(1, 5)},
        {"a": torch.zeros(1, 5), "b": torch.zeros(1, 5)},
    ],
)
def test_a_single_reply_of_another_structure_is_refused(other):
    total, one = Accumulator(), torch.ones(1, dtype=torch.float64)
    total.add({"a": torch.zeros(1, 5)}, one, 1, torch.tensor([0]))
    with pytest.raises(ReplyError, match=r"clients \[7\] replied with another structure"):
        total.add(other, one, 1, torch.tensor([7]))


def test_a_sum_that_its_precision_cannot_hold_is_refused():
    with pytest.raises(DivergenceError, match="not finite"):
        added(torch.full((2, 3), 3e38), torch.ones(2, dtype=torch.float64), [2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1 << 30))
def test_a_sum_is_rounded_once_however_its_terms_come(compiled_or_not, dtype, cuts, seed):
    """Exactly the sum of the products in double precision, each rounded by itself, in any batches
    and any order: numbers of very different size, half of which cancel.
    """
    generator = torch.Generator().manual_seed(seed)
    count = sum(cuts)
    replies = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    replies *= 2.0 ** torch.randint(-15, 15, (count, 5), generator=generator)
    replies = replies.to(dtype)
    replies[count // 2 :, :3] = -replies[: count - count // 2, :3]
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    weights[count // 2 :] = weights[: count - count // 2].clone()
    products = (weights.unsqueeze(1) * replies.double()).tolist()
    exact = [float(sum(map(Fraction, column))) for column in zip(*products, strict=True)]
    order = torch.randperm(count, generator=generator)
    for found in (
        added(replies, weights, cuts),
        added(replies, weights, [count]),
        added(replies[order], weights[order], cuts),
        added(replies[order], weights[order], [1] * count),
    ):
        assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).to(dtype))


def structured(kind: str, count: int) -> wire.Sparse | wire.LowRank | wire.Signs:
    generator = torch.Generator().manual_seed(count)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    if kind == "sparse":
        return wire.Sparse(
            torch.randint(0, 12, (count, 4), generator=generator), normal(count, 4), (3, 4)
        )
    if kind == "low rank":
        return wire.LowRank(normal(count, 3, 2), normal(count, 4, 2))
    return wire.Signs.pack(normal(count, 3, 4), normal(count).abs())


@pytest.mark.parametrize("kind", ["sparse", "low rank", "signs"])
def test_structured_arrays_are_summed_alike_in_any_batches(kind, compiled_or_not, monkeypatch):
    count = 40
    array = structured(kind, count)
    weights = torch.linspace(0.1, 1.7, count, dtype=torch.float64)

    def total(*batches: torch.Tensor) -> torch.Tensor:
        sums = Accumulator()
        for at in batches:
            some = map_tensors(lambda t, at=at: t[at], array)
            sums.add({"a": some}, weights[at], 1, at)
        return sums.result()["a"]

    everyone = torch.arange(count)
    whole = total(everyone)
    dense = torch.tensordot(weights, array.dense().double(), 1).float()
    torch.testing.assert_close(whole, dense, rtol=1e-5, atol=1e-5)
    assert whole.dtype == torch.float32
    assert torch.equal(total(*everyone.split(7)), whole)
    assert torch.equal(total(*everyone.flip(0).split(1)), whole)
    monkeypatch.setattr("foedus.core.reduce._CHUNK", 25)  # two clients at a time
    assert torch.equal(total(everyone), whole)


def test_ranks_are_not_rounded_before_they_are_summed(compiled_or_not):
    """1e8 + 1 has no place in single precision; less 1e8, it is 1."""
    left = torch.tensor([[[1e8, 1.0]], [[-1e8, 0.0]]])
    sums = Accumulator()
    sums.add(wire.LowRank(left, torch.ones(2, 1, 2)), torch.ones(2), 1, torch.arange(2))
    assert sums.result().tolist() == [[1.0]]


def test_a_sparse_reply_beyond_its_shape_is_refused():
    array = wire.Sparse(torch.tensor([[1, 12]]), torch.ones(1, 2), (3, 4))
    with pytest.raises((IndexError, RuntimeError)):
        Accumulator().add({"a": array}, torch.ones(1), 1, torch.tensor([0]))
