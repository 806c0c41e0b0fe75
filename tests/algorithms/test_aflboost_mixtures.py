"""AFLBoost with sets of mixtures of domains beyond boxes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus.algorithms.fedboost.settings import common_point
from tests.algorithms.test_fedboost import labels


@pytest.fixture(scope="module")
def three():
    """Three unequal clients, of which the last is the worst off with these predictors."""
    members = fd.Densities([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]])
    return labels([9, 1, 0], [1, 8, 1], [1, 1, 15]), members


@given(seed=st.integers(0, 300), kind=st.sampled_from(["ball", "box", "permutahedron"]))
@settings(deadline=None, max_examples=30)
def test_the_common_point_is_the_closest(seed, kind):
    """The variational inequality <x - p, z - p> <= 0 for points z of both sets, by rejection."""
    rng = np.random.default_rng(seed)
    domain = {
        "ball": fd.L2Ball(0.7),
        "box": fd.Box((0.0, 0.1, 0.0), (0.5, 0.6, 0.9)),
        "permutahedron": fd.Permutahedron((0.6, 0.3, 0.1)),
    }[kind]
    x = torch.from_numpy(rng.normal(size=3))
    p = common_point(x, domain, 0.05, 0.8)
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    assert bool(domain.contains(p, 1e-5))
    assert p.min() >= 0.05 - 1e-6 and p.max() <= 0.8 + 1e-6
    others = torch.from_numpy(rng.dirichlet(np.ones(3), 2000))
    inside = (
        domain.contains(others, 1e-9, batch=1) & (others >= 0.05).all(1) & (others <= 0.8).all(1)
    )
    assert inside.any() or kind == "permutahedron"
    assert bool((((x - p) * (others[inside] - p)).sum(1) <= 1e-5).all())


def test_domains_in_a_ball(three):
    """Three domains by one client each: lambda never leaves the ball of 0.6, and meets its edge."""
    fed, members = three
    algorithm = fd.AFLBoost(
        members, sampling="all", mixtures=fd.L2Ball(0.6), step_domains=5.0, measure_every=0
    )
    run = fd.run(algorithm, fed, 6, evaluate_every=0)
    assert float(run.state.lam.norm()) == pytest.approx(0.6, abs=1e-4)
    assert float(run.state.lam.sum()) == pytest.approx(1, abs=1e-6)
    free = fd.run(replace(algorithm, mixtures=None, mirror_domains=fd.Euclidean()), fed, 6,
                  evaluate_every=0)  # fmt: skip
    assert float(free.state.lam.norm()) > 0.61


def test_a_box_of_mixtures_is_that_of_low_and_high(three):
    fed, members = three
    options = {"sampling": "all", "step_domains": 0.7, "measure_every": 0}
    box = fd.AFLBoost(members, mixtures=fd.Box(0.2, 0.5), **options)
    bounds = fd.AFLBoost(members, low=0.2, high=0.5, mirror_domains=fd.Euclidean(), **options)
    ours, theirs = (fd.run(a, fed, 5, evaluate_every=0).state for a in (box, bounds))
    assert torch.allclose(ours.lam, theirs.lam, atol=1e-8)
    assert torch.allclose(ours.alpha, theirs.alpha, atol=1e-8)


def test_mixtures_that_cannot_be(three):
    fed, members = three
    with pytest.raises(fd.ConfigError, match="has no point in common"):
        fd.run(fd.AFLBoost(members, sampling="all", mixtures=fd.L2Ball(0.4)), fed, 1)
    with pytest.raises(fd.ConfigError, match="leave mirror_domains out"):
        fd.AFLBoost(members, sampling="all", mixtures=fd.L2Ball(0.9), mirror_domains=fd.Entropy())
