"""Feature maps against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.preprocessing import PolynomialFeatures
from torch import nn

import foedus as fd
from foedus.base.spec import Spec
from foedus.models import features
from foedus.models.features import ModuleFeatures, features_of


def test_random_fourier_features_estimate_the_gaussian_kernel():
    """phi(x) . phi(z) -> exp(-|x - z|^2 / (2 bandwidth^2)), or half of it with the paper's 1 /
    sqrt(M).
    """
    x = torch.tensor(np.random.default_rng(0).normal(size=(6, 3)))
    kernel = torch.exp(-torch.cdist(x, x).square() / (2 * 1.7**2))
    error = 4 / 20_000**0.5  # four standard deviations of a mean of 20,000 terms of at most 2
    unbiased = fd.RandomFourier(20_000, bandwidth=1.7, seed=3, unbiased=True)(x)
    torch.testing.assert_close(unbiased @ unbiased.mT, kernel, rtol=0, atol=error)
    paper = fd.RandomFourier(20_000, bandwidth=1.7, seed=3)(x)
    torch.testing.assert_close(paper @ paper.mT, kernel / 2, rtol=0, atol=error)


def test_random_fourier_has_the_stated_frequencies():
    """At x = e_i a feature is cos(Omega_i + b) / sqrt(M), at 0 it is cos(b) / sqrt(M)."""
    phi = fd.RandomFourier(50_000, bandwidth=10.0, seed=0)
    at = phi(torch.cat((torch.zeros(1, 2), torch.eye(2)))) * 50_000**0.5
    assert at.abs().max() <= 1
    # For narrow Omega the difference is -sin(b) Omega_i, whose mean square is (1/2) (1 /
    # bandwidth^2) to first order.
    assert float((at[1] - at[0]).square().mean()) == pytest.approx(0.5 / 10**2, rel=0.03)
    assert float(at[0].mean()) == pytest.approx(0, abs=0.02)


def test_columns_of_zeros_change_no_feature():
    x = torch.randn(5, 6, dtype=torch.float64)
    x[:, [0, 3]] = 0
    phi = fd.RandomFourier(40, seed=2)
    # the last row has no zeros, so no column is left out
    full = torch.cat((x, torch.ones(1, 6, dtype=torch.float64)))
    torch.testing.assert_close(phi(x), phi(full)[:5], rtol=0, atol=1e-14)
    assert torch.equal(phi(torch.zeros(2, 6))[0], phi(torch.zeros(1, 6))[0])


def test_random_fourier_is_its_seed():
    x = torch.randn(4, 5)
    assert torch.equal(fd.RandomFourier(8, seed=1)(x), fd.RandomFourier(8, seed=1)(x))
    assert not torch.equal(fd.RandomFourier(8, seed=1)(x), fd.RandomFourier(8, seed=2)(x))
    small, large = (
        fd.RandomFourier(8, seed=1)(x) * 8**0.5,
        fd.RandomFourier(20, seed=1)(x) * 20**0.5,
    )
    torch.testing.assert_close(small, large[:, :8])
    assert fd.RandomFourier(8).seeded(5) == fd.RandomFourier(8, seed=5)
    assert fd.RandomFourier(8, seed=1).seeded(5) == fd.RandomFourier(8, seed=1)
    with pytest.raises(fd.ConfigError, match="no seed yet"):
        fd.RandomFourier(8)(x)


def test_float32_features_are_the_float64_ones_rounded():
    x = torch.randn(4, 5)
    phi = fd.RandomFourier(30, bandwidth=2.0, seed=0)
    torch.testing.assert_close(phi(x, torch.float32).double(), phi(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_polynomial_is_scikit_learns(degree):
    x = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    phi = fd.Polynomial(degree)
    want = PolynomialFeatures(degree).fit_transform(x.astype(np.float64))
    got = phi(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert phi.size(Spec((4,), None, 1)) == want.shape[1]


def test_identity_and_modules():
    x = torch.arange(12.0).view(2, 2, 3)
    assert torch.equal(fd.Identity()(x), x.flatten(1).double())
    assert torch.equal(fd.Identity(intercept=True)(x)[:, -1], torch.ones(2, dtype=torch.float64))
    assert fd.Identity(intercept=True).size(Spec((2, 3), None, 1)) == 7
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Dropout(0.5), nn.Tanh())
    phi = features_of(net)
    want = torch.tanh(net[1](x.flatten(1))).double()
    torch.testing.assert_close(phi(x), want)  # evaluation mode: no dropout
    assert net.training
    assert phi.size(Spec((2, 3), None, 1)) == 4
    phi.check(Spec((2, 3), None, 1))


def test_bad_maps():
    spec = Spec((6,), None, 1)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(fd.ConfigError, match="dim="):
            fd.RandomFourier(wrong)
    with pytest.raises(fd.ConfigError, match="bandwidth=0"):
        fd.RandomFourier(5, bandwidth=0)
    with pytest.raises(fd.ConfigError, match="seed='a'"):
        fd.RandomFourier(5, seed="a")
    with pytest.raises(fd.ConfigError, match="limit is 1,000,000"):
        fd.Polynomial(9).check(Spec((100,), None, 1))
    with pytest.raises(fd.ModelError, match="cannot take rows of shape"):
        ModuleFeatures(nn.Linear(5, 2)).check(spec)
    with pytest.raises(fd.ModelError, match="add parentheses"):
        features_of(fd.Identity)

    class Mixes(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    with pytest.raises(fd.ModelError, match="function of the row"):
        ModuleFeatures(Mixes()).check(spec)


def test_phases_are_uniform_on_the_whole_circle():
    phases = torch.cat(
        [features._waves(3, 100, 1.0, seed, torch.float64)[-1] for seed in range(40)]
    ) / (2 * np.pi)
    assert scipy.stats.kstest(phases.numpy(), "uniform").pvalue > 1e-3
