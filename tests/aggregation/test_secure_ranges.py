"""Ranges of fixed-point numbers that follow what algorithms say they send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import foedus as fd
from foedus.aggregation.secure.fixedpoint import FixedPoint
from tests.conformance import ALGORITHMS


@pytest.mark.parametrize(
    ("bits", "bound", "range_", "exchanged"),
    [
        (24, None, 16.0, 24),
        (24, 5.0, 16.0, 24),
        (24, 16.0, 32.0, 25),  # rounding may add to a bound: 16 does not fit into 16
        (24, 28.9, 32.0, 25),  # 16 * 2
        (24, 100.0, 128.0, 27),  # 16 * 8
        (24, math.inf, 16.0 * 65536, 40),  # 40 bits are 16 more
        (39, 100.0, 128.0, 40),  # one bit more and not three: the step is 4 times as long
        (40, math.inf, 16.0, 40),  # no bits are left: the range with that step
    ],
)
def test_the_range_grows_and_the_step_stays(bits, bound, range_, exchanged):
    settings = fd.SecureAggregation(bits=bits).bounded_by(bound)
    assert (settings.range, settings.bits) == (range_, exchanged)
    if exchanged - bits == math.log2(range_ / 16):
        assert settings.fixed_point.step == FixedPoint(16.0, bits).step
    assert fd.SecureAggregation(range=7.0).bounded_by(bound).range == 7.0  # as the user says


@pytest.fixture(scope="module")
def fed():
    return fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3, seed=0)


def runs(algorithm, fed, **more):
    """Under secure aggregation, or why that is not for the algorithm."""
    try:
        secure = fd.SecureAggregation()
        return fd.run(algorithm, fed, 2, evaluate_every=0, aggregation=secure, **more)
    except fd.ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_starts_with_the_default_range(name, fed):
    """Or the server wants to see single replies, which has nothing to do with ranges."""
    result = runs(ALGORITHMS[name], fed)
    if isinstance(result, str):
        assert "own reply" in result or "leave no mixture" in result


def test_defaults_of_fedfw_on_long_gaps(fed):
    """The gap at the start is 28.9 at one client, and points of this ball are 100 long."""
    for domain in (fd.L1Ball(30.0), fd.L1Ball(100.0), fd.LInfBall(100.0)):
        plain = fd.run(fd.FedFW(fd.Linear(), domain), fed, 2, evaluate_every=0)
        secure = runs(fd.FedFW(fd.Linear(), domain), fed)
        for name, value in plain.state.center.items():
            assert torch.allclose(secure.state.center[name], value, atol=1e-3)


def test_points_of_supersets_count(fed):
    x = fd.FedFW(fd.Linear(), fd.L1Ball(5.0), supersets={2: fd.L2Ball(40.0)})
    assert x.reply_bound("step", fed.spec) == 40.0
    assert x.reply_bound("scale", fed.spec) == math.inf
    assert fd.NaiveFW(fd.Linear(), fd.LInfBall(0.25)).reply_bound("point", fed.spec) == 0.25
    each = fd.PerLayer({"weight": fd.Box(-3.0, 7.0), "bias": fd.L2Ball(2.0)})
    assert fd.FedFW(fd.Linear(), each, begin="domain").reply_bound("step", fed.spec) == 7.0


@dataclass(frozen=True)
class Large(fd.Algorithm):
    """Replies of 30, by two steps, of which one says so."""

    def said(self, client):
        return torch.full((3,), 30.0), None

    def unsaid(self, client):
        return torch.full((3,), 30.0), None

    def reply_bound(self, step, spec):
        return 30.0 if step == "said" else None

    def start(self, clients):
        return fd.State(m=clients.mean(self.said))

    def round(self, clients, state):
        return fd.State(m=clients.mean(self.unsaid))


def test_the_bound_is_that_of_the_step(fed):
    secure = fd.SecureAggregation()
    run = fd.run(Large(), fed, 0, aggregation=secure, evaluate_every=0)
    assert run.state.m.tolist() == [30.0] * 3
    with pytest.raises(fd.ReplyError, match=r"outside -16 .. 16"):
        fd.run(Large(), fed, 1, aggregation=secure, evaluate_every=0)
