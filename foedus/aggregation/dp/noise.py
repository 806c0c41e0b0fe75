"""Random draws for privacy: from the operating system's generator, and exact.

A proof of privacy is about real numbers. Ordinary floating-point noise has gaps that can reveal the
number to which it was added (Mironov, "On significance of the least significant bits for
differential privacy", 2012). Here the noise consists of integers, drawn with exactly the
probabilities of the proof: nearly every draw is decided in double precision, with a margin for
rounding errors, and the few that are too close (about one in 10^9) are decided with as many more
random bits and digits as needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from foedus.aggregation.secure.shamir import Entropy

_MARGIN = 2.0**-44  # of `ndtri`, which is good to about 2^-50 here, and of what goes into it
_CLOSE = 2.0**-48  # of an exponential


def words(size: int, entropy: Entropy = os.urandom) -> np.ndarray:
    """Uniform integers of 64 bits."""
    return np.frombuffer(entropy(8 * size), np.uint64)


def bernoulli(probability: float, size: int, entropy: Entropy = os.urandom) -> np.ndarray:
    """Independent booleans, true with this probability, to 2^-64."""
    if probability >= 1:
        return np.ones(size, bool)
    return words(size, entropy) < np.uint64(math.ceil(Fraction(probability) * 2**64))


def rounded_gaussian(size: int, bits: int, entropy: Entropy = os.urandom) -> np.ndarray:
    """floor(2^bits Z) for independent standard normal Z: integers (int64), exactly
    distributed.

    For an integer s, s + floor(y) = floor(s + y). So a sum of integers plus this noise is a
    function of the sum plus a normal number of standard deviation 2^bits, and at least as private:
    results for normal noise apply. The mean is -1/2.

    By inversion: |Z| >= z has probability 2 Q(z), so Q(|Z|) = p with p uniform on (0, 1/2). The
    first 63 bits of p are drawn.
    """
    drawn = words(size, entropy)
    above = (drawn >> np.uint64(63)).astype(bool)
    from scipy.special import ndtri

    tail = drawn & np.uint64(2**63 - 1)  # p lies between this and this + 1, over 2^64
    whole = tail.astype(np.float64)
    with np.errstate(divide="ignore"):
        y = -ndtri((whole + 0.5) * 2.0**-64) * 2.0**bits
        # dz = dp / density(z), and Q(z) / density(z) is at most sqrt(pi / 2).
        apart = (_MARGIN + 1.2534 * 0.5 / whole) * 2.0**bits + y * 2.0**-50
    result = np.floor(y)
    undecided = np.flatnonzero((np.floor(y - apart) != np.floor(y + apart)) | (tail < 2**10))
    result[undecided] = 0.0  # may be beyond what an integer holds
    result = result.astype(np.int64)
    for i in undecided:
        result[i] = _quantile(int(tail[i]), bits, entropy)
    return np.where(above, result, -1 - result)


def _quantile(tail: int, bits: int, entropy: Entropy) -> int:
    """The integer n with Q((n + 1) / 2^bits) < p <= Q(n / 2^bits), where p has the first 64 binary
    digits `tail`.
    """
    import mpmath

    known = 64

    def reaches(n: int) -> bool:
        nonlocal tail, known
        while True:
            with mpmath.workprec(known + 64):
                limit = mpmath.ldexp(
                    mpmath.erfc(mpmath.ldexp(n, -bits) / mpmath.sqrt(2)) / 2, known
                )
                slack = mpmath.ldexp(limit, -known - 32)
                if tail + 1 <= limit - slack:
                    return True
                if tail >= limit + slack:
                    return False
            tail, known = (tail << 64) | int.from_bytes(entropy(8), "little"), known + 64

    low, high = 0, 1 << bits
    while reaches(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low


def discrete_gaussian(
    size: int, variance: Fraction | int, entropy: Entropy = os.urandom
) -> np.ndarray:
    """Independent integers x (int64) with probabilities proportional to exp(-x^2 / (2
    variance)), exactly.

    Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020,
    Algorithm 3: a discrete Laplace number of scale t = floor(sigma) + 1, accepted with probability
    exp(-(|x| - variance / t)^2 / (2 variance)).
    """
    variance = Fraction(variance)
    scale = math.isqrt(math.floor(variance)) + 1
    around = variance / scale
    parts: list[np.ndarray] = []
    missing = size
    while missing > 0:
        x = _discrete_laplace(2 * missing + 16, scale, entropy)
        gamma = (np.abs(x) - float(around)) ** 2 / (2 * float(variance))
        exact = lambda i, x=x: (abs(int(x[i])) - around) ** 2 / (2 * variance)  # noqa: E731
        parts.append(x[_bernoulli_exp(gamma, exact, entropy)][:missing])
        missing -= len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _discrete_laplace(size: int, scale: int, entropy: Entropy) -> np.ndarray:
    """At most `size` integers with probabilities proportional to exp(-|x| / scale) (Algorithm
    2).
    """
    drawn = words(size, entropy)
    # so that every remainder has the same chance
    drawn = drawn[drawn < np.uint64(2**64 - 1 - (2**64 - 1) % scale)]
    u = (drawn % np.uint64(scale)).astype(np.int64)
    u = u[_bernoulli_exp(u / scale, lambda i: Fraction(int(u[i]), scale), entropy)]
    v, going = np.zeros_like(u), np.arange(len(u))
    while len(going):
        going = going[_bernoulli_exp(np.ones(len(going)), lambda i: Fraction(1), entropy)]
        v[going] += 1
    x = u + scale * v
    minus = bernoulli(0.5, len(x), entropy)
    keep = ~(minus & (x == 0))
    return np.where(minus, -x, x)[keep]


def _bernoulli_exp(
    gamma: np.ndarray, exact: Callable[[int], Fraction], entropy: Entropy
) -> np.ndarray:
    """Booleans, true with probability exp(-gamma); exact(i) is gamma[i] without rounding."""
    drawn = words(len(gamma), entropy)
    gap = np.exp(-gamma) - drawn.astype(np.float64) * 2.0**-64
    truth = gap > 0
    for i in np.flatnonzero(np.abs(gap) < _CLOSE):
        truth[i] = _below_exp(int(drawn[i]), exact(int(i)), entropy)
    return truth


def _below_exp(drawn: int, gamma: Fraction, entropy: Entropy) -> bool:
    """Whether a uniform number, of which the first 64 binary digits are drawn, is below
    exp(-gamma).
    """
    import mpmath

    known = 64
    while True:
        with mpmath.workprec(known + 64):
            limit = mpmath.ldexp(
                mpmath.exp(-mpmath.mpf(gamma.numerator) / gamma.denominator), known
            )
            slack = mpmath.ldexp(limit, -known - 16)
            if drawn + 1 <= limit - slack:
                return True
            if drawn >= limit + slack:
                return False
        drawn, known = (drawn << 64) | int.from_bytes(entropy(8), "little"), known + 64
