"""How much privacy a run has spent: (epsilon, delta), by `dp-accounting`.

A release is the sum of one vector a client, each of norm at most c, plus normal noise of standard
deviation z c: a Gaussian mechanism whose sensitivity, where one client is added or removed, is c; z
is its noise multiplier. k releases about the same clients, chosen adaptively, are together at least
as private as one with noise multiplier z / sqrt(k).

If the clients of a round are drawn (each with probability q, in secret), the round is a
Poisson-sampled Gaussian mechanism. All exchanges of a round ask the same cohort, so a round of k
exchanges is one sampled mechanism with noise multiplier z / sqrt(k), not k independent ones with z.

    "pld"   the privacy loss distribution, composed numerically and rounded to the safe side
            (Koskela, Jalko and Honkela 2020; Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022)
    "rdp"   Renyi differential privacy of integer orders (Mironov, Talwar and Zhang 2019): looser,
            faster, and right for a discrete Gaussian as well: for integer orders its moments are
            those of the continuous one
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from foedus.base.settings import check_value
from foedus.errors import ConfigError, FoedusError

Accountant = Literal["pld", "rdp"]
ORDERS = (*range(2, 33), 36, 40, 48, 56, 64, 80, 96, 128, 192, 256, 512)

Spent = Mapping[tuple[float, float, int], int]
"""The number of rounds by (probability, noise multiplier, exchanges)."""


def _library() -> None:
    try:
        import dp_accounting  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "dp_accounting":
            raise
        raise FoedusError(
            "differential privacy needs dp-accounting: pip install 'foedus[private]'"
        ) from None


def epsilon(spent: Spent, delta: float, accountant: str = "pld", apart: float = 0.0) -> float:
    """The epsilon, at this delta, of all releases.

    apart: for noise that is not quite normal (`foedus.aggregation.dp.distributed`). What k
    exchanges release, with this noise or with normal noise, has probabilities within factors of
    exp(+-h), h = k apart, of each other, but for events that are together less likely than h delta
    exp(-e - h) / 2. So what is (e, delta exp(-2 h)) with normal noise is (e + 2 h, delta) with this
    one.
    """
    check_value("accountant", accountant, Accountant)
    together: Counter[tuple[float, float]] = Counter()
    certain = 0.0  # sum of k / z^2 over rounds with full participation
    for (probability, noise, exchanges), times in spent.items():
        if probability == 1:
            certain += times * exchanges / noise**2
        elif times and exchanges:
            together[probability, noise / math.sqrt(exchanges)] += times
    if certain:
        together[1.0, 1 / math.sqrt(certain)] += 1
    off = apart * sum(times * exchanges for (_, _, exchanges), times in spent.items())
    return (
        _epsilon(tuple(sorted(together.items())), delta * math.exp(-2 * off), accountant) + 2 * off
    )


@functools.lru_cache(maxsize=4096)
def _epsilon(
    rounds: tuple[tuple[tuple[float, float], int], ...], delta: float, accountant: str
) -> float:
    if not rounds:
        return 0.0
    _library()
    if accountant == "rdp":
        from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

        together = sum(times * _renyi(probability, noise) for (probability, noise), times in rounds)
        return float(compute_epsilon(ORDERS, together, delta)[0])
    # only Gaussian mechanisms: Balle and Wang 2018
    if len(rounds) == 1 and rounds[0][0][0] == 1:
        from dp_accounting import get_epsilon_gaussian

        return float(get_epsilon_gaussian(rounds[0][0][1] / math.sqrt(rounds[0][1]), delta))
    # A coarser grid for large losses; the error is always on the safe side.
    step = 1e-3 * max(1.0, *(noise**-2 for (_, noise), _ in rounds))
    parts = [_losses(probability, noise, step, times) for (probability, noise), times in rounds]
    return float(functools.reduce(lambda a, b: a.compose(b), parts).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _renyi(probability: float, noise: float) -> np.ndarray:
    """The Renyi divergence of one round, at every order."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    event = GaussianDpEvent(noise)
    event = event if probability == 1 else PoissonSampledDpEvent(probability, event)
    return np.asarray(RdpAccountant(ORDERS).compose(event)._rdp)  # which has no public name


_latest: dict[tuple[float, float, float], tuple[int, Any]] = {}


def _losses(probability: float, noise: float, step: float, times: int) -> Any:
    """The privacy loss distribution of a number of rounds.

    One more round than in the last call takes one convolution; a run asks for this in every round.
    """
    one, kind = _loss(probability, noise, step), (probability, noise, step)
    before, so_far = _latest.get(kind, (0, None))
    if before != times:
        so_far = so_far.compose(one) if times == before + 1 and before else one.self_compose(times)
        if len(_latest) >= 64:
            _latest.clear()
        _latest[kind] = (times, so_far)
    return so_far


@functools.lru_cache(maxsize=64)
def _loss(probability: float, noise: float, step: float) -> Any:
    """The privacy loss distribution of one round."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=probability, value_discretization_interval=step
    )


def noise_for(
    target: float,
    delta: float,
    rounds: int,
    *,
    probability: float = 1.0,
    exchanges: int = 1,
    start: int = 0,
    accountant: str = "pld",
) -> float:
    """The smallest noise multiplier that keeps a run within an epsilon.

    Args:
        target: The largest epsilon.
        delta: At which epsilon is given.
        rounds: Rounds of the run.
        probability: Of taking part in a round.
        exchanges: Averages in a round.
        start: Averages before the first round, of all clients.
        accountant: "pld" or "rdp".

    Returns:
        The noise multiplier z of `fd.DifferentialPrivacy`, to a thousandth.

    Raises:
        ConfigError: No noise is enough.

    Example:
        >>> round(fd.noise_for(2.0, 1e-5, rounds=30, probability=0.2), 1)
        2.5
    """

    def cost(noise: float) -> float:
        return epsilon(
            {(1.0, noise, start): 1, (probability, noise, exchanges): rounds}, delta, accountant
        )

    low, high = 0.0, 1.0
    while cost(high) > target:
        low, high = high, 2 * high
        if high > 1e6:
            raise ConfigError(
                f"epsilon={target!r} at delta={delta!r} is out of reach in {rounds} rounds"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    return high
