from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from torch.func import vmap

from foedus.base import random

pytestmark = pytest.mark.usefixtures("compiled_or_not")


KEYS = random.fold(random.key(2024), torch.arange(7))
DRAWS = {
    "words": lambda k: random.words(k, 13),
    "uniform": lambda k: random.uniform(k, (3, 5)),
    "uniform64": lambda k: random.uniform(k, (3, 5), torch.float64),
    "normal": lambda k: random.normal(k, (3, 5)),
    "normal64": lambda k: random.normal(k, 15, torch.float64),
    "integers": lambda k: random.integers(k, (4, 3), 1000),
    "permutation": lambda k: random.permutation(k, 17),
    "fold": lambda k: random.fold(k, 3, 1),
    "scalar": lambda k: random.uniform(k),
    "scalars": lambda k: random.normal(k, (), torch.float64) + random.integers(k, (), 9),
}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert tuple(random._philox(np.array(counter), np.array(key))) == expected


def test_stream_counts_blocks_from_zero():
    assert random.words(random.key(0), 4).tolist() == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_equals_loop_equals_leading_batch(name):
    draw = DRAWS[name]
    looped = torch.stack([draw(k) for k in KEYS])
    assert torch.equal(vmap(draw)(KEYS), looped)
    assert torch.equal(draw(KEYS), looped)
    assert torch.equal(vmap(vmap(draw))(KEYS.reshape(7, 1, 2))[:, 0], looped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_longer_draw_begins_with_the_shorter_one(draw, dtype):
    full = draw(random.key(5), 1003, dtype)
    for n in (0, 1, 2, 3, 7, 8, 9, 31, 64, 100, 1001, 1002):
        assert torch.equal(draw(random.key(5), n, dtype), full[:n])


def test_longer_integers_and_words_begin_with_the_shorter_ones():
    for n in range(1, 20):
        assert torch.equal(random.words(random.key(5), n), random.words(random.key(5), 64)[:n])
        assert torch.equal(
            random.integers(random.key(5), n, 99), random.integers(random.key(5), 64, 99)[:n]
        )


def test_permutation_is_one_and_puts_invalid_positions_last_in_order():
    valid = torch.tensor([True, False, True, True, False, True])
    order = random.permutation(random.key(1), 6, valid)
    assert sorted(order.tolist()) == list(range(6))
    assert order[-2:].tolist() == [1, 4]


def test_permutation_does_not_depend_on_padding():
    for seed in range(20):
        tight = random.permutation(random.key(seed), 11)
        for padded in (11, 12, 32, 100):
            order = random.permutation(random.key(seed), padded, torch.arange(padded) < 11)
            assert torch.equal(order[:11], tight)
            assert order[11:].tolist() == list(range(11, padded))


@pytest.mark.parametrize(("n", "size"), [(1, 1), (7, 3), (1000, 40), (1000, 999), (50, 50)])
def test_a_subset_is_the_first_of_a_permutation(n, size):
    for seed in range(3):
        expected = random.permutation(random.key(seed), n)[:size].sort().values
        assert torch.equal(random.subset(random.key(seed), n, size), expected)


@pytest.mark.parametrize(("n", "size"), [(8192, 1), (8192, 2048), (100_000, 1000), (2**31, 500)])
def test_a_few_of_many_are_those_drawn_first(n, size):
    found = random.subset(random.key(3), n, size)
    seen: dict[int, None] = {}
    for word in random.words(random.key(3), 4 * size + 64).tolist():
        seen.setdefault(word * n >> 32)
        if len(seen) == size:
            break
    assert found.tolist() == sorted(seen)


def test_more_is_drawn_where_too_many_came_twice(monkeypatch):
    counts = []
    monkeypatch.setattr(
        random, "integers", lambda key, n, high: counts.append(n) or torch.arange(n) // 2
    )
    assert random.subset(random.key(0), 10_000, 100).tolist() == list(range(100))
    assert counts == [165, 330]


def test_permutation_sorts_the_words():
    words = random.words(KEYS, 33)
    assert torch.equal(random.permutation(KEYS, 33), torch.argsort(words, dim=-1, stable=True))


def test_permutation_valid_may_be_batched():
    valid = torch.arange(9) < torch.arange(2, 9).unsqueeze(1)
    looped = torch.stack([random.permutation(k, 9, v) for k, v in zip(KEYS, valid, strict=True)])
    assert torch.equal(random.permutation(KEYS, 9, valid), looped)
    assert torch.equal(vmap(lambda k, v: random.permutation(k, 9, v))(KEYS, valid), looped)


def test_permutations_are_uniform():
    keys = random.fold(random.key(8), torch.arange(24_000))
    orders = random.permutation(keys, 4)
    counts = np.unique((orders * torch.tensor([64, 16, 4, 1])).sum(1).numpy(), return_counts=True)[
        1
    ]
    assert len(counts) == 24
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_and_normal_have_their_distributions(dtype):
    u = random.uniform(random.key(11), 100_000, dtype).double().numpy()
    z = random.normal(random.key(12), 100_000, dtype).double().numpy()
    assert scipy.stats.kstest(u, "uniform").pvalue > 1e-3
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(z[::2], z[1::2])[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_stays_below_one(dtype):
    u = random.uniform(random.key(3), 200_000, dtype)
    assert u.dtype == dtype
    assert u.min() >= 0
    assert u.max() < 1


def test_integers_are_uniform_and_in_range():
    draw = random.integers(random.key(4), 70_000, 7)
    assert (draw.min(), draw.max()) == (0, 6)
    assert scipy.stats.chisquare(torch.bincount(draw, minlength=7).numpy()).pvalue > 1e-3
    big = random.integers(random.key(4), 10_000, (1 << 32) - 1)
    assert big.min() >= 0
    assert big.max() < (1 << 32) - 1
    assert big.max() > 1 << 31


def test_integers_have_a_bound_for_each_batch_entry():
    high = torch.arange(1, 8)
    looped = torch.stack(
        [random.integers(k, (7, 3), int(h)) for k, h in zip(KEYS, high, strict=True)]
    )
    assert torch.equal(random.integers(KEYS, (7, 3), high), looped)
    assert torch.equal(vmap(lambda k, h: random.integers(k, (7, 3), h))(KEYS, high), looped)


def test_streams_of_neighboring_keys_are_uncorrelated():
    draws = random.normal(random.fold(random.key(0), torch.arange(20)), 5000).numpy()
    off = np.corrcoef(draws)[~np.eye(20, dtype=bool)]
    assert np.abs(off).max() < 5 / np.sqrt(5000)


def test_folds_are_distinct():
    key = random.key(0)
    keys = [random.fold(key, i) for i in range(50)]
    keys += [random.fold(key, i, j) for i in range(10) for j in range(10)]
    keys += [random.fold(key, i, j, k) for i in range(5) for j in range(5) for k in range(5)]
    keys += [random.fold(random.key(1), 0), random.fold(random.fold(key, 0), 0), key]
    assert len({tuple(k.tolist()) for k in keys}) == len(keys)


def test_fold_of_a_tensor_is_a_batch_of_folds():
    batch = random.fold(random.key(9), 4, torch.arange(5))
    assert torch.equal(batch, torch.stack([random.fold(random.key(9), 4, i) for i in range(5)]))
    assert torch.equal(vmap(lambda i: random.fold(random.key(9), 4, i))(torch.arange(5)), batch)


def test_fold_takes_one_to_three_integers():
    for values in ((), (1, 2, 3, 4)):
        with pytest.raises(TypeError, match="one to three"):
            random.fold(random.key(0), *values)


def test_key_takes_seeds_of_64_bits():
    assert random.key(-1).tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    assert random.key((7 << 32) + 5).tolist() == [5, 7]


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for draw in DRAWS.values():
        draw(random.key(1))
        vmap(draw)(KEYS)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_fold_under_vmap_keeps_the_clients_in_front():
    """A batch of keys folded with several values inside vmap, also where the two sizes agree."""
    keys = random.fold(random.key(3), torch.arange(5))
    got = torch.func.vmap(lambda k: random.fold(k, torch.arange(5)))(keys)
    expected = torch.stack([random.fold(k, torch.arange(5)) for k in keys])
    assert torch.equal(got, expected)
    shared = torch.func.vmap(lambda v: random.fold(random.key(3), v))(torch.arange(4))
    assert torch.equal(shared, random.fold(random.key(3), torch.arange(4)))
