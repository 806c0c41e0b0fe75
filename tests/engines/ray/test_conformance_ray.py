"""Conformance on Ray, on the cluster of the other tests of this folder."""

from __future__ import annotations

import pytest

from foedus import testing
from tests.conformance import ALGORITHMS, ONE_A_FAMILY

# What differs between algorithms on Ray: their numbers, and how their states travel. The other
# checks take the same path for all of them; in `make test` the two with most in them pass them.
EACH = (testing.check_batched_equals_looped, testing.check_resume)
ALL = ("Scaffold", "Everything the contract allows")


def quick(name, check) -> bool:
    return name in ALL or (name in ONE_A_FAMILY and check in EACH)


CASES = [
    pytest.param(name, check, marks=[] if quick(name, check) else pytest.mark.slow)
    for name in ALGORITHMS
    for check in testing.CHECKS
    if name in ONE_A_FAMILY or check is testing.check_batched_equals_looped
]


@pytest.mark.parametrize(
    ("name", "check"),
    CASES,
    ids=lambda v: v if isinstance(v, str) else v.__name__.removeprefix("check_"),
)
def test_algorithm(name, check, fed, ray_engine):
    check(ALGORITHMS[name], fed, ray_engine)
