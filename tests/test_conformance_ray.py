"""Every algorithm on Ray: in a file of its own, because files are what two test processes share out."""

from __future__ import annotations

import pytest

from foedus import testing
from tests.conformance import ALGORITHMS


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_algorithm(algorithm, check, fed, ray_engine):
    check(algorithm, fed, ray_engine)
