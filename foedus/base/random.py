"""Random numbers as a function of a key: the same on every engine, batch size and device.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
2011), compiled if possible (`foedus.kernels`), otherwise in NumPy's integer operations: most draws
are small, and for those NumPy is much faster than tensor operations. A *key* is an int64 tensor of
two 32-bit words; word `i` of the stream of a key depends only on the key and on `i`, so a longer
draw begins with the shorter one and padding changes nothing. `fold` makes a new key from a key and
integers: foedus keys every client step by (seed, round, exchange, client).

All functions work under `torch.func.vmap` with a batched key, and with leading batch dimensions on
the key: a key of shape `(c, 2)` gives draws of shape `(c, *shape)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foedus import kernels
from foedus.errors import ConfigError

_MASK = 0xFFFFFFFF
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.arange(10, dtype=np.uint32)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
"""What is added to the key in each of the ten rounds."""


def _philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32: counter (4, ...), key (2, ...) -> words (..., 4), all in int64."""
    shape = np.broadcast_shapes(counter.shape[1:], key.shape[1:])
    if not shape:
        return _philox(counter[:, None], key[:, None])[0]
    counter, key = (
        a.reshape(len(a), *[1] * (len(shape) - a.ndim + 1), *a.shape[1:]).astype(np.uint32)
        for a in (counter, key)
    )
    ones = [1] * len(shape)
    keys, multiplier = key + _WEYL.reshape(10, 2, *ones), _MULTIPLIERS.reshape(2, *ones)
    products = np.empty((2, 2, *shape), np.uint64)  # of this round and of the one before
    halves = products.view(np.uint32)[:, ::-1]  # of 64 bits, the lower 32 first
    low, high = halves[..., ::2], halves[..., 1::2]
    even, odd = np.empty((2, *shape), np.uint32), counter[1::2]
    even[:] = counter[::2]
    for i in range(10):
        now = i & 1
        np.multiply(even, multiplier, out=products[now])
        np.bitwise_xor(high[now], odd, out=even)
        even ^= keys[i]
        odd = low[now]
    out = np.empty((*shape, 4), np.int64)
    out[..., 0], out[..., 2] = even
    out[..., 1], out[..., 3] = odd
    return out


def _one_block(counter: list[int], key: list[int]) -> list[int]:
    """The first two words of `_philox` in Python's integers: faster than arrays for one block."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & _MASK, (p >> 32) ^ d ^ m, p & _MASK
        k, m = (k + 0x9E3779B9) & _MASK, (m + 0xBB67AE85) & _MASK
    return [a, b]


def _first(t: Tensor) -> np.ndarray:
    """Move the last dimension to the front."""
    return t.movedim(-1, 0).numpy()


class _Words(torch.autograd.Function):
    """The stream of a key; under vmap it sees the whole batch of keys at once."""

    @staticmethod
    def forward(key: Tensor, count: int) -> Tensor:
        if kernels.ready:
            return torch.from_numpy(kernels.words(key.numpy(), count))
        blocks = -(-count // 4)
        counter = np.zeros((4, blocks), np.int64)
        counter[0] = np.arange(blocks)
        words = _philox(counter, _first(key)[..., None])
        return torch.from_numpy(words.reshape(*key.shape[:-1], 4 * blocks)[..., :count])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info, in_dims, key: Tensor, count: int):
        return _Words.apply(key.movedim(in_dims[0], 0), count), 0


class _Fold(torch.autograd.Function):
    """One block of Philox with the values as counter, their number as last word: the new key."""

    @staticmethod
    def forward(key: Tensor, values: Tensor) -> Tensor:
        if kernels.ready:
            return torch.from_numpy(kernels.fold(key.numpy(), values.numpy()))
        words = _philox(_first(values), _first(key))
        return torch.from_numpy(words[..., :2])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info, in_dims, key: Tensor, values: Tensor):
        key, values = (
            t.unsqueeze(0) if d is None else t.movedim(d, 0)
            for t, d in zip((key, values), in_dims, strict=True)
        )
        return _Fold.apply(*_aligned(key, values)), 0


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """Insert dimensions of size 1 after the batch dimensions, for broadcasting."""
    rank = max(t.dim() for t in tensors)
    return [t.reshape(t.shape[0], *[1] * (rank - t.dim()), *t.shape[1:]) for t in tensors]


def _call(function: type[torch.autograd.Function], *args) -> Tensor:
    """Outside of vmap, call the plain function: `apply` costs more than a small draw."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return function.forward(*args)


def key(seed: int) -> Tensor:
    """The key of a seed (any integer of 64 bits)."""
    return torch.tensor([seed & _MASK, (seed >> 32) & _MASK], dtype=torch.int64)


def fold(key: Tensor, *values: int | Tensor) -> Tensor:
    """A new, independent key from a key and one to three integers in 0 .. 2^32 - 1.

    A one-dimensional tensor of integers gives a batch of keys.
    """
    if not 1 <= len(values) <= 3:
        raise TypeError(f"fold takes one to three integers, not {len(values)}")
    integers = [v for v in values if isinstance(v, int)]
    if len(integers) == len(values):
        numbers = [*integers, *[0] * (3 - len(values)), len(values)]
        if key.dim() == 1 and not torch._C._are_functorch_transforms_active():
            return torch.tensor(_one_block(numbers, key.tolist()))
        counter = torch.tensor(numbers, device=key.device)
    elif (
        len(shapes := {v.shape for v in values if isinstance(v, Tensor)}) == 1
        and not torch._C._are_functorch_transforms_active()
    ):
        counter = torch.empty(*shapes.pop(), 4, dtype=torch.int64)
        for i, v in enumerate((*values, *[0] * (3 - len(values)), len(values))):
            counter[..., i] = v
    else:
        like = next(v for v in values if isinstance(v, Tensor))
        entries = (*values, *[0] * (3 - len(values)), len(values))
        words = [
            v.to(torch.int64)
            if isinstance(v, Tensor)
            else torch.full_like(like, v, dtype=torch.int64)
            for v in entries
        ]
        if any(w.shape != like.shape for w in words):
            words = list(torch.broadcast_tensors(*words))
        counter = torch.stack(words, -1)
    return _call(_Fold, key, counter)


def words(key: Tensor, count: int) -> Tensor:
    """The first `count` 32-bit words of a key's stream, as int64."""
    return _call(_Words, key, count)


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def uniform(
    key: Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform on [0, 1), with the random bits of the mantissa: 53 for float64, 24 for float32."""
    shape = _shape(shape)
    n = math.prod(shape)
    batch = key.shape[:-1]
    if dtype == torch.float64:
        w = words(key, 2 * n).reshape(*batch, n, 2)
        bits = (w[..., 0] >> 5) * (1 << 26) + (w[..., 1] >> 6)
        return (bits.to(dtype) * 2.0**-53).reshape((*batch, *shape))
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)  # more would round up to 1
    numbers = (words(key, n) >> (32 - digits)).to(torch.float32) * 2.0**-digits
    return numbers.to(dtype).reshape((*batch, *shape))


def normal(
    key: Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard normal, by Box and Muller's transform of pairs of uniforms."""
    shape = _shape(shape)
    n = math.prod(shape)
    pairs = -(-n // 2)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    u, v = uniform(key, (pairs, 2), precise).unbind(-1)
    radius = torch.log1p(-u).mul_(-2.0).sqrt_()
    angle = v * (2.0 * math.pi)
    z = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1).flatten(-2)
    return z[..., :n].to(dtype).reshape((*key.shape[:-1], *shape))


def integers(key: Tensor, shape: int | Sequence[int], high: int | Tensor) -> Tensor:
    """Integers uniform on 0 .. high - 1 (below 2^32; a tensor bounds each batch entry)."""
    shape = _shape(shape)
    draw = words(key, math.prod(shape)).reshape((*key.shape[:-1], *shape))
    if isinstance(high, Tensor):
        high = high.reshape((*high.shape, *[1] * len(shape)))
    # multiply-shift (Lemire): bias below high / 2^32; the product wraps but keeps its 64 bits
    return ((draw * high) >> 32) & _MASK


def permutation(key: Tensor, n: int, valid: Tensor | None = None) -> Tensor:
    """A uniform permutation of 0 .. n - 1; positions where `valid` is false go last, in order.

    The order of the valid positions does not depend on how many invalid ones follow them.
    """
    _check_places(n)
    return _call(_Order, key, valid if valid is not None else torch.ones((), dtype=torch.bool), n)


_MANY = 1 << 13
"""From this size on, drawing a word for each element is slower than drawing a few elements one by
one."""


def subset(key: Tensor, n: int, size: int) -> Tensor:
    """`size` different elements of 0 .. n - 1, uniform over all subsets, in ascending order.

    A few of many are drawn one by one, skipping repetitions; otherwise they are the first of a
    `permutation`, without sorting all of it.
    """
    if n >= _MANY and 4 * size <= n:
        count = size + size * size // n + 64
        while True:
            drawn = integers(key, count, n).numpy()
            new = np.sort(np.unique(drawn, return_index=True)[1])
            if len(new) >= size:
                return torch.from_numpy(np.sort(drawn[new[:size]]))
            count *= 2
    _check_places(n)
    ranks = _ranks(words(key, n).numpy())
    chosen = ranks if size >= n else np.partition(ranks, size - 1)[:size]
    return torch.from_numpy(np.sort(chosen & _PLACE))


_PLACE_BITS = 30
_PLACE = (1 << _PLACE_BITS) - 1


def _check_places(n: int) -> None:
    if n > _PLACE:
        raise ConfigError(f"cannot permute {n} things; at most {_PLACE}")


def _ranks(drawn: np.ndarray) -> np.ndarray:
    """Words with their positions in the low bits of one integer: sorting it is faster than
    `argsort`.

    Equal words, one pair in 2^32, keep their order: a negligible bias.
    """
    return (drawn << _PLACE_BITS) | np.arange(drawn.shape[-1])


class _Order(torch.autograd.Function):
    """The positions 0 .. n - 1 in the order of a key's words, invalid ones last."""

    @staticmethod
    def forward(key: Tensor, valid: Tensor, n: int) -> Tensor:
        if kernels.ready:
            mask = valid.numpy() if valid.dim() else None
            return torch.from_numpy(kernels.order(key.numpy(), n, mask))
        ranks = _ranks(_Words.forward(key, n).numpy())
        if valid.dim():
            ranks = np.where(valid.numpy(), ranks, np.arange(1 << 62, (1 << 62) + n))
        ranks.sort(axis=-1)
        ranks &= _PLACE
        return torch.from_numpy(ranks)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info, in_dims, key: Tensor, valid: Tensor, n: int):
        key, valid = (
            t if d is None else t.movedim(d, 0)
            for t, d in zip((key, valid), in_dims[:2], strict=True)
        )
        if in_dims[0] is not None and in_dims[1] is not None:
            key, valid = _aligned(key, valid)
        return _Order.apply(key, valid, n), 0
