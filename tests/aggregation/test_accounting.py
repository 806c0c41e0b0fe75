"""Epsilon against formulas that do not come from the library that computes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from foedus.aggregation.dp.accounting import ORDERS, epsilon, noise_for
from foedus.errors import ConfigError


def analytic(noise: float, delta: float) -> float:
    """The Gaussian mechanism's exact epsilon: Balle and Wang 2018, Theorem 8."""

    def excess(e: float) -> float:
        return (
            norm.cdf(0.5 / noise - e * noise)
            - math.exp(e) * norm.cdf(-0.5 / noise - e * noise)
            - delta
        )

    return brentq(excess, 0, 500)


@pytest.mark.parametrize(("noise", "exchanges", "rounds"), [(1.0, 1, 1), (2.0, 1, 5), (0.5, 2, 2)])
def test_without_sampling_it_is_the_analytic_gaussian(noise, exchanges, rounds):
    exact = analytic(noise / math.sqrt(exchanges * rounds), 1e-5)
    found = epsilon({(1.0, noise, exchanges): rounds}, 1e-5)
    assert found == pytest.approx(exact, rel=1e-9)
    # by distributions of the loss, to the safe side
    nearly = epsilon({(1 - 1e-12, noise, exchanges): rounds}, 1e-5)
    assert exact <= nearly <= exact * 1.001


def test_renyi_without_sampling_is_the_known_line():
    """Order a has a / (2 z^2); to epsilon by Canonne, Kamath and Steinke 2020, Proposition 12."""
    delta, rho = 1e-5, 8 / (2 * 3.0**2)
    best = min(a * rho + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in ORDERS)
    assert epsilon({(1.0, 3.0, 1): 8}, delta, "rdp") == pytest.approx(best)
    assert epsilon({(1.0, 3.0, 2): 4}, delta, "rdp") == pytest.approx(best)


def test_a_sampled_round_against_the_integral():
    """delta(epsilon) of one Poisson-sampled Gaussian is an integral; epsilon is where it is delta,
    in the worse direction.
    """
    q, noise, delta = 0.2, 1.3, 1e-4
    x = np.linspace(-15, 17, 200_001)
    without = norm.pdf(x, 0, noise)
    one_more = (1 - q) * without + q * norm.pdf(x, 1, noise)
    step = x[1] - x[0]
    hockey = lambda a, b, e: np.maximum(a - math.exp(e) * b, 0).sum() * step  # noqa: E731
    exact = max(
        brentq(lambda e, a=a, b=b: hockey(a, b, e) - delta, 0, 20, xtol=1e-6)
        for a, b in ((one_more, without), (without, one_more))
    )
    found = epsilon({(q, noise, 1): 1}, delta)
    assert exact - 1e-5 <= found <= exact * 1.002
    assert found <= epsilon({(q, noise, 1): 1}, delta, "rdp")


def test_exchanges_of_one_cohort_are_not_independent_samples():
    """A round of two exchanges is one sample of the mechanism with half the variance, which costs
    more than two rounds.
    """
    both = epsilon({(0.2, 1.5, 2): 10}, 1e-5)
    assert both == pytest.approx(epsilon({(0.2, 1.5 / math.sqrt(2), 1): 10}, 1e-5))
    assert both > 1.2 * epsilon({(0.2, 1.5, 1): 20}, 1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_more_costs_more_in_whatever_order_it_is_asked(accountant):
    times = [3, 1, 2, 4, 3]
    found = [epsilon({(1.0, 2.0, 1): 1, (0.3, 2.0, 1): t}, 1e-5, accountant) for t in times]
    assert found[1] < found[2] < found[0] < found[3]
    assert found[0] == found[4]
    assert epsilon({}, 1e-5, accountant) == 0
    assert epsilon({(0.3, 2.0, 0): 7}, 1e-5, accountant) == 0


def test_the_noise_for_an_epsilon():
    noise = noise_for(2.0, 1e-5, rounds=10, probability=0.3, start=1)
    spent = lambda z: epsilon({(1.0, z, 1): 1, (0.3, z, 1): 10}, 1e-5)  # noqa: E731
    assert spent(noise) <= 2.0 < spent(noise * 0.99)
    assert noise_for(1.0, 1e-5, rounds=4) == pytest.approx(
        brentq(lambda z: analytic(z / 2, 1e-5) - 1.0, 1, 50), rel=3e-3
    )


def test_an_unknown_accountant():
    with pytest.raises(ConfigError, match="accountant"):
        epsilon({(1.0, 1.0, 1): 1}, 1e-5, "moments")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_that_is_not_quite_normal(accountant):
    """Two rounds of three exchanges and one of all clients, each off by 0.01: h = 0.07."""
    spent = {(0.5, 2.0, 3): 2, (1.0, 2.0, 1): 1}
    expected = epsilon(spent, 1e-5 * math.exp(-0.14), accountant) + 0.14
    assert epsilon(spent, 1e-5, accountant, apart=0.01) == pytest.approx(expected, rel=1e-12)
    assert epsilon({}, 1e-5, accountant, apart=0.01) == 0
