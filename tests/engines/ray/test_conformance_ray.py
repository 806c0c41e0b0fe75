"""Conformance on Ray, on the cluster of the other tests of this folder."""

from __future__ import annotations

import pytest

from foedus import testing
from tests.conformance import ALGORITHMS, ALL_CHECKS_ON_RAY

CASES = [
    pytest.param(name, check, marks=[] if name in ALL_CHECKS_ON_RAY else pytest.mark.slow)
    for name in ALGORITHMS
    for check in testing.CHECKS
    if name in ALL_CHECKS_ON_RAY or check is testing.check_batched_equals_looped
]


@pytest.mark.parametrize(
    ("name", "check"),
    CASES,
    ids=lambda v: v if isinstance(v, str) else v.__name__.removeprefix("check_"),
)
def test_algorithm(name, check, fed, ray_engine):
    check(ALGORITHMS[name], fed, ray_engine)
