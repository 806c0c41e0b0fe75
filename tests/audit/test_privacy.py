"""The studies of differential privacy, in small, and the noise of the leakage audit."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import foedus as fd
from foedus.audit import privacy
from foedus.audit.attack import blurred
from foedus.audit.privacy import leakage, membership, utility
from foedus.base import random
from foedus.cli.app import app


@pytest.fixture(autouse=True)
def _seeded_noise(monkeypatch):
    """The noise of a private run comes from the operating system; here from a seed, so that a bound
    on 60 guesses is not a lottery.
    """
    seeded = functools.partial(fd.DifferentialPrivacy, entropy=np.random.default_rng(0).bytes)
    monkeypatch.setattr(privacy, "DifferentialPrivacy", seeded)


def test_canaries_are_found_without_noise_and_not_with_much():
    table = membership(clients=40, canaries=60, epsilons=(math.inf, 0.2), repeats=1).set_index(
        "epsilon"
    )
    assert table.advantage[math.inf] > 0.6 > 0.35 > table.advantage[0.2]
    assert table.bound[math.inf] == 1.0
    assert table.bound[0.2] == pytest.approx(math.tanh(0.1), abs=1e-4)  # (e^x - 1) / (e^x + 1)


def test_utility_of_all_four():
    """At a generous epsilon all four keep most of what they learn without noise (the settings are
    for another set).
    """
    table = utility("digits", clients=150, epsilons=(math.inf, 50.0), repeats=1).set_index(
        "algorithm"
    )
    assert set(table.index) == {"FedAvg", "FedFW", "FedBoost", "FedNewton"}
    assert (table["50"] > 0.7 * table["no noise"]).all(), table


def test_a_message_with_noise_hides_the_image():
    table = leakage(noises=(0.0, 0.3), iterations=25)
    clean, noisy = table.gradient
    assert clean > noisy + 10


def test_message_noise_is_relative_to_the_norm():
    seen = {
        "a": torch.full((200, 100), 3.0, dtype=torch.float64),
        "b": torch.zeros(5000, dtype=torch.float64),
    }
    norm = 3.0 * math.sqrt(20_000)
    noise = torch.cat(
        [(t - seen[k]).flatten() for k, t in blurred(seen, 0.1, random.key(0)).items()]
    )
    assert float(noise.std()) == pytest.approx(0.1 * norm, rel=0.03)
    assert blurred(seen, 0.0, random.key(0)) is seen
    with pytest.raises(fd.ConfigError, match="message_noise=-1"):
        fd.audit_leakage("digits", 0, message_noise=-1.0)


def test_the_command():
    result = CliRunner().invoke(app, ["audit", "privacy", "leakage", "--quick"])
    assert result.exit_code == 0, result.output
    assert "PSNR" in result.output and "L1 ball" in result.output
    assert CliRunner().invoke(app, ["audit", "privacy", "utilty"]).exit_code != 0
