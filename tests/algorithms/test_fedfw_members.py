"""A point outside of the set is provably hostile: honest points always pass, others do not, on
every way that points take.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import foedus as fd
from foedus.algorithms.fedfw.points import MEMBER
from foedus.core.reduce import Accumulator
from foedus.geometry import Corner, domain_of
from tests.geometry.test_domains import SETS

SHAPES = {"weight": (3, 4), "bias": (3,)}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(SETS)), st.floats(-30, 30), st.data())
def test_points_of_the_oracle_are_members(name, size, data):
    """In float32, with gradients of any size."""
    domain, shape = SETS[name]
    g = data.draw(
        arrays(np.float32, (2, *shape), elements=st.floats(-1, 1, width=32))
    ) * np.float32(10.0**size)
    whole = domain_of(domain)
    points = whole.lmo({"x": torch.from_numpy(g.astype(np.float32))}, batch=1)
    accept = fd.FedFW(fd.Linear(), domain).outside({"x": torch.empty(shape)})
    assert accept(torch.arange(2), points) == {}


@pytest.mark.parametrize("size", [10**4, 10**6])
def test_so_are_long_ones(size):
    g = {"x": torch.from_numpy(np.random.default_rng(0).normal(size=(1, size)).astype(np.float32))}
    for domain in (fd.L2Ball(3.0), fd.L1Ball(3.0), fd.GroupBall(3.0, size), fd.LInfBall(3.0)):
        whole = domain_of(domain)
        assert whole.contains(
            whole.dense(whole.lmo(g, batch=1), {"x": torch.empty(size)}), MEMBER, batch=1
        ).all()


@pytest.fixture(scope="module")
def fed() -> fd.Federation:
    digits = fd.load("digits")
    few = fd.Data.from_arrays(
        digits.x_train[:300],
        digits.y_train[:300],
        digits.x_test[:100],
        digits.y_test[:100],
        classes=10,
    )
    return fd.split(few, "dirichlet", clients=6, alpha=1.0, seed=0)


RANK = fd.PerLayer({"weight": fd.NuclearBall(5.0), "bias": fd.L2Ball(1.0)})
WAYS = {
    "one entry": {"domain": fd.L1Ball(10.0)},
    "dense": {"domain": fd.L2Ball(5.0)},
    "signs": {"domain": fd.LInfBall(0.5)},
    "low rank": {"domain": RANK},
    "augmented": {"domain": fd.L1Ball(10.0), "variant": "augmented"},
    "stochastic": {"domain": RANK, "variant": "stochastic"},
    "superset": {"domain": fd.L1Ball(5.0), "supersets": {4: fd.L2Ball(5.0)}},
}


@pytest.mark.parametrize("participation", [1.0, 0.99999])
@pytest.mark.parametrize("way", WAYS)
def test_who_sends_points_outside_is_dropped_named_and_counted(fed, way, participation):
    algorithm = fd.FedFW(fd.Linear(), penalty=1e-3, measure_every=0, **WAYS[way])
    engine = fd.Hostile(clients=[1, 4], attack="scale", strength=1.01)
    options = {
        "evaluate_every": 0,
        "participation": participation if participation == 1 else fd.Poisson(participation),
    }
    run = fd.run(algorithm, fed, 3, engine=engine, **options)
    assert run.history.dropped.tolist()[1:] == [2, 2, 2]
    assert (
        run.history.left_out[1]
        == "1: its point lies outside of the set; 4: its point lies outside of the set"
    )
    # they are left out as well
    nan = fd.run(algorithm, fed, 3, engine=fd.Hostile(clients=[1, 4], attack="nan"), **options)
    for k in run.state.center:
        torch.testing.assert_close(run.state.center[k], nan.state.center[k])
    honest = fd.run(algorithm, fed, 3, engine=fd.Hostile(clients=0.0), **options)
    assert honest.history.dropped.tolist()[1:] == [0, 0, 0]


def test_under_delay_points_are_looked_at_when_they_arrive(fed):
    algorithm = fd.FedFW(fd.Linear(), fd.L1Ball(10.0), penalty=1e-3, measure_every=0)
    engine = fd.Delayed(fd.Hostile(clients=[2], attack="scale"), up=[0, 0, 2, 0, 0, 0])
    run = fd.run(algorithm, fed, 4, engine=engine, evaluate_every=0)
    assert run.history.dropped.tolist()[1:] == [0, 0, 1, 1]


def test_a_hostile_point_inside_stays_inside(fed):
    """-s is a member: nobody can prove anything, and the center stays in the set."""
    algorithm = fd.FedFW(fd.Linear(), fd.L1Ball(10.0), penalty=1e-3)
    run = fd.run(algorithm, fed, 5, engine=fd.Hostile(clients=0.5, attack="sign_flip"))
    assert run.history.dropped.tolist()[1:] == [0] * 5 and bool(
        algorithm.set.contains(run.state.center)
    )


def test_a_robust_mean_and_the_check_go_together(fed):
    algorithm = fd.FedFW(fd.Linear(), fd.L2Ball(5.0), penalty=1e-3, measure_every=0)
    run = fd.run(
        algorithm,
        fed,
        3,
        engine=fd.Hostile(clients=[0], attack="scale"),
        aggregation=fd.GeometricMedian(),
    )
    assert run.history.dropped.tolist()[1:] == [1, 1, 1]


def test_the_scale_of_a_corner_is_only_a_sign():
    """A scale of 1000 from an untrusted client would pass as a member, and must count as one."""
    corner = fd.Box(-1.0, 2.0).lmo(torch.tensor([[1.0, -1.0, 3.0], [1.0, 1.0, -1.0]]), batch=1)
    signs = corner.signs
    loud = Corner(
        type(signs)(signs.bits, torch.tensor([1000.0, -3.0]), signs.shape), corner.lo, corner.hi
    )
    assert corner.dense().tolist() == [[-1, 2, -1], [-1, -1, 2]]
    assert loud.dense().tolist() == [[-1, 2, -1], [2, 2, -1]]
    total = Accumulator()
    total.add(loud, torch.tensor([0.25, 0.75]), 1, torch.arange(2))
    assert total.result().tolist() == [1.25, 2.0, -1.0]
