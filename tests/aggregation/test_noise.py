"""Exact noise: distributions against their formulas, and draws that double precision cannot
decide.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from foedus.aggregation.dp import noise as sampling
from tests.aggregation.entropy import Counted


def chi_square(drawn: np.ndarray, values: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of what was drawn, with the rest in one bin."""
    seen = np.array([(drawn == v).sum() for v in values])
    seen, expected = (
        np.append(seen, len(drawn) - seen.sum()),
        np.append(expected, 1 - expected.sum()) * len(drawn),
    )
    keep = expected > 5
    return float(
        stats.chisquare(seen[keep], expected[keep] * seen[keep].sum() / expected[keep].sum()).pvalue
    )


@pytest.mark.parametrize("bits", [0, 2])
def test_a_rounded_gaussian_has_the_probabilities_of_its_cells(bits):
    drawn = sampling.rounded_gaussian(100_000, bits, Counted(b"cells"))
    cells = np.arange(-4 * 2**bits, 4 * 2**bits)
    assert (
        chi_square(drawn, cells, np.diff(stats.norm.cdf(np.append(cells, cells[-1] + 1) / 2**bits)))
        > 1e-3
    )


def test_moments_of_a_fine_one():
    drawn = (sampling.rounded_gaussian(200_000, 20, Counted(b"fine")) + 0.5) / 2**20
    assert abs(drawn.mean()) < 4 / np.sqrt(200_000)
    assert abs(drawn.var() - 1) < 4 * np.sqrt(2 / 200_000)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3


@pytest.mark.parametrize("bits", [3, 16])
def test_what_is_decided_with_many_digits_agrees_with_double_precision(bits):
    for tail in np.random.default_rng(0).integers(2**12, 2**63, 100).tolist():
        assert sampling._quantile(tail, bits, bytes) == int(
            -ndtri((tail + 0.5) * 2.0**-64) * 2**bits
        )


def test_tails_beyond_the_first_bits_are_reached():
    """A tail of 2^-64 is at 9.08 and that of 2^-128 at 12.98; more bits tell where below 2^-64 it
    is.
    """
    assert 9.07 < sampling._quantile(0, 10, lambda n: b"\xff" * n) / 2**10 < 9.09
    more = iter([bytes(8)] + [b"\xff" * 8] * 99)
    assert 12.9 < sampling._quantile(0, 10, lambda n: next(more)) / 2**10 < 13.1
    # the sign bit alone: both tails are 0
    words = (2**63).to_bytes(8, "little") + (0).to_bytes(8, "little")
    feed = iter([words, *[b"\xff" * 8] * 999])
    up, down = sampling.rounded_gaussian(2, 10, lambda n: next(feed))
    assert up / 2**10 > 9.07 and (down + 1) / 2**10 < -9.07


def test_a_draw_on_a_boundary_is_decided_by_more_bits():
    """At 1 bit, cells end at half numbers: the p of exactly 0.5 standard deviations, to 64 bits,
    could be on either side.
    """
    import mpmath

    with mpmath.workprec(400):
        edge = mpmath.ldexp(mpmath.erfc(mpmath.mpf(1) / 2 / mpmath.sqrt(2)) / 2, 64)
        tail, rest = (
            int(mpmath.floor(edge)),
            int(mpmath.floor(mpmath.ldexp(edge - mpmath.floor(edge), 64))),
        )
    word = (2**63 + tail).to_bytes(8, "little")
    for more, cell in ((rest - 1, 1), (rest + 1, 0)):  # less tail is further out
        feed = iter([word, more.to_bytes(8, "little")])
        assert sampling.rounded_gaussian(1, 1, lambda n, feed=feed: next(feed)).tolist() == [cell]


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(7, 2), 40])
def test_a_discrete_gaussian_has_its_probabilities(variance):
    drawn = sampling.discrete_gaussian(60_000, variance, Counted(b"discrete"))
    cells = np.arange(-25, 26)
    mass = np.exp(-(cells**2) / (2 * float(variance)))
    assert chi_square(drawn, cells, mass / mass.sum()) > 1e-3
    assert drawn.dtype == np.int64


def test_a_wide_discrete_gaussian_is_nearly_normal():
    drawn = sampling.discrete_gaussian(50_000, 10**8, Counted(b"wide"))
    assert abs(drawn.std() / 10**4 - 1) < 4 / np.sqrt(2 * 50_000)
    assert len(sampling.discrete_gaussian(0, 4)) == 0


def test_an_exponential_is_compared_with_as_many_digits_as_it_takes():
    import mpmath

    with mpmath.workprec(300):
        edge = mpmath.ldexp(mpmath.exp(-mpmath.mpf(2) / 3), 64)
        whole, rest = (
            int(mpmath.floor(edge)),
            int(mpmath.floor(mpmath.ldexp(edge - mpmath.floor(edge), 64))),
        )
    for more, below in ((rest - 1, True), (rest + 1, False)):
        feed = iter([whole.to_bytes(8, "little"), more.to_bytes(8, "little")])
        assert sampling._bernoulli_exp(
            np.array([2 / 3]), lambda i: Fraction(2, 3), lambda n, feed=feed: next(feed)
        ).tolist() == [below]


def test_who_takes_part():
    assert sampling.bernoulli(1.0, 5).all()
    drawn = sampling.bernoulli(0.3, 100_000, Counted(b"who"))
    assert abs(drawn.mean() - 0.3) < 4 * np.sqrt(0.21 / 100_000)
