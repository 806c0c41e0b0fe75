"""Discrete Gaussian noise that clients add to their fixed-point numbers under secure
aggregation.
"""

from __future__ import annotations

import numpy as np
import torch

from foedus.aggregation.dp import noise as sampling
from foedus.aggregation.secure.simulated import SecureAggregation, aggregate
from tests.aggregation.entropy import Counted


def test_noise_of_all_clients_adds_up_under_the_masks():
    """Four clients add noise of variance 100 steps^2 each to zeros: the sum has 400, in whole
    steps.
    """
    entropy = Counted(b"masked")
    config = SecureAggregation(range=1.0, bits=16, headroom=200)
    replies = [{"a": torch.zeros(20_000)} for _ in range(4)]
    out = aggregate(
        replies, config=config, noise=lambda size: sampling.discrete_gaussian(size, 100, entropy)
    )
    steps = out.total.sum["a"].numpy() / config.fixed_point.step
    assert np.array_equal(steps, np.rint(steps))
    assert abs(steps.var() / 400 - 1) < 4 * np.sqrt(2 / 20_000)
