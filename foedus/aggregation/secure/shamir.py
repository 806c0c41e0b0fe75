"""Shamir's secret sharing, for secrets of 32 bytes.

A secret is nine numbers of 30 bits, each a field element modulo the prime p = 2^31 - 1. For each of
them a random polynomial of degree t - 1 has it as its value at 0; holder i = 1 .. m gets the value
at i (Shamir, "How to share a secret", 1979):

    f(x) = s + a_1 x + ... + a_(t-1) x^(t-1) mod p
    s = sum_i f(x_i) prod_(j != i) x_j / (x_j - x_i) mod p

from any t values. Fewer values reveal nothing: whatever the secret, they are uniform. That holds in
any field with more elements than holders, so a small one does: products of two elements fit into 64
bits, and NumPy works on all holders and numbers at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from foedus.errors import SecureError

P = 2**31 - 1
SECRET, LIMBS, _BITS = 32, 9, 30

Entropy = Callable[[int], bytes]
"""Returns this number of random bytes, like `os.urandom`."""


def split(secrets: Sequence[bytes], threshold: int, holders: int, entropy: Entropy) -> np.ndarray:
    """Shares (holders, secrets, 9) of secrets of 32 bytes; any `threshold` of them rebuild the
    secrets.
    """
    limbs = np.array([_limbs(s) for s in secrets], np.uint64).reshape(-1)
    coefficients = _uniform((threshold - 1) * len(limbs), entropy).reshape(
        threshold - 1, len(limbs)
    )
    return _values(limbs, coefficients, holders).reshape(holders, len(secrets), LIMBS)


def combine(points: np.ndarray, shares: np.ndarray) -> bytes:
    """The secret from shares (t, 9) of the holders at these points.

    Altered shares give another secret, or an error.
    """
    weights = np.frombuffer(_weights(np.asarray(points, np.uint64).tobytes()), np.uint64)
    limbs = (weights[:, None] * shares.astype(np.uint64) % P).sum(0) % P
    number = sum(int(limb) << _BITS * i for i, limb in enumerate(limbs))
    if int(limbs.max()) >> _BITS or number >> 8 * SECRET:
        raise SecureError("the shares do not belong to one secret: some of them were altered")
    return number.to_bytes(SECRET, "little")


def _limbs(secret: bytes) -> list[int]:
    number = int.from_bytes(secret, "little")
    return [number >> _BITS * i & (1 << _BITS) - 1 for i in range(LIMBS)]


def _uniform(count: int, entropy: Entropy) -> np.ndarray:
    """Numbers below p, exactly uniform: 31 random bits, drawn again if they equal p."""
    numbers = np.frombuffer(entropy(4 * count), np.uint32) & P
    while (again := numbers == P).any():
        numbers[again] = np.frombuffer(entropy(4 * int(again.sum())), np.uint32) & P
    return numbers.astype(np.uint64)


def _values(secret: np.ndarray, coefficients: np.ndarray, holders: int) -> np.ndarray:
    """The polynomials with these values at 0 and these coefficients a_1, a_2, ..., at 1 .. holders
    (Horner).
    """
    x = np.arange(1, holders + 1, dtype=np.uint64)[:, None]
    y = np.zeros((holders, len(secret)), np.uint64)
    for row in coefficients[::-1]:
        y = (y + row) * x % P
    return ((y + secret) % P).astype(np.int32)


@functools.lru_cache(maxsize=4096)
def _weights(points: bytes) -> bytes:
    """Lagrange's weights at 0, prod_(j != i) x_j / (x_j - x_i) mod p."""
    x = np.frombuffer(points, np.uint64)
    above, below = np.tile(x, (len(x), 1)), (x[None, :] + P - x[:, None]) % P
    for matrix in (above, below):
        np.fill_diagonal(matrix, 1)
    inverses = np.array([pow(int(d), -1, P) for d in _product(below)], np.uint64)
    return (_product(above) * inverses % P).tobytes()


def _product(matrix: np.ndarray) -> np.ndarray:
    """The product of each row, mod p."""
    while matrix.shape[1] > 1:
        if matrix.shape[1] % 2:
            matrix = np.concatenate([matrix, np.ones((len(matrix), 1), np.uint64)], 1)
        matrix = matrix[:, ::2] * matrix[:, 1::2] % P
    return matrix[:, 0]
