"""The smoothness of losses against second derivatives by autograd."""

from __future__ import annotations

import pytest
import torch

import foedus as fd
from foedus.models.smoothness import LONGEST_MOVE, smoothness, smoothness_nearby

L = fd.losses
CASES = {
    "cross-entropy": (L.CrossEntropy(), 4, torch.tensor([1]), 0.5),
    "weighted": (L.WeightedCrossEntropy([1.0, 6.0, 2.0]), 3, torch.tensor([1]), 3.0),
    "soft labels": (L.SoftLabels(), 3, torch.tensor([[0.25, 0.25, 0.5]]), 0.5),
    "squared": (L.Squared(), 2, torch.tensor([[1.0, -3.0]]), 1.0),
    "huber": (L.Huber(0.7), 2, torch.tensor([[1.0, -3.0]]), 1.0),
    "logistic": (L.Logistic(), 3, torch.tensor([2]), 0.25),
    "binary": (L.BinaryCrossEntropy(), 4, torch.tensor([[1.0, 0.0, 1.0, 0.5]]), 1 / 16),
}


def largest(loss, f, y):
    """The largest eigenvalue of the second derivative at one row's outputs f, in float64."""
    hessian = torch.func.hessian(lambda f: loss.value(f.unsqueeze(0), y.double()
                                 if y.is_floating_point() else y).sum())(f.double())  # fmt: skip
    return float(torch.linalg.eigvalsh(hessian)[-1])


@pytest.mark.parametrize("name", CASES)
def test_no_second_derivative_is_larger_and_one_comes_near(name):
    loss, k, y, want = CASES[name]
    assert smoothness(loss, k) == pytest.approx(want)
    draws = torch.Generator().manual_seed(0)
    points = [3 * torch.randn(k, generator=draws) for _ in range(200)]
    # two classes of one half each, where cross-entropy bends most; and the target itself
    points.append(torch.tensor([0.0, 0.0, *[-40.0] * (k - 2)]))
    points += [torch.zeros(k), y[0].float().expand(k) if y.dim() == 1 else y[0].float()]
    found = [largest(loss, f, y) for f in points]
    assert want * 0.999 <= max(found) <= want * (1 + 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_one_over_it_goes_down_by_the_square_of_the_slope(name):
    """loss(f - slope / L) <= loss(f) - |slope|^2 / (2 L)."""
    loss, k, y, want = CASES[name]
    f = 4 * torch.randn(300, k, generator=torch.Generator().manual_seed(1))
    y = y.expand(300, *y.shape[1:])
    slope = loss.slope(f, y, torch.ones(300))
    down = loss.value(f, y) - slope.square().sum(-1) / (2 * want)
    assert bool((loss.value(f - slope / want, y) <= down + 1e-4).all())


def test_no_bound_where_there_is_none():
    for loss in (L.PoissonNLL(), L.Quantile(0.3), L.Focal(), lambda f, y: f.square()):
        assert smoothness(loss, 2) is None
        assert smoothness_nearby(L.Squared(), torch.zeros(1, 2)) is None


def test_counts_are_smooth_as_long_as_no_output_rises_by_more():
    """exp(f + d) - y (f + d) <= exp(f) - y f + slope d + bound/2 |d|^2 for d <= 0.7; not beyond."""
    loss = L.PoissonNLL()
    draws = torch.Generator().manual_seed(2)
    f = torch.randn(500, 2, generator=draws, dtype=torch.float64)
    y = torch.poisson(f.exp() * 3, generator=draws)
    bound = smoothness_nearby(loss, f)
    assert torch.allclose(bound, f.amax(1).exp() * 2.0137527, rtol=1e-6)  # exp(0.7)
    slope = loss.slope(f, y, torch.ones(500))

    def above(d):
        line = (slope * d).sum(1) + bound / 2 * d.square().sum(1)
        return loss.value(f + d, y) - loss.value(f, y) - line

    d = LONGEST_MOVE - 3 * torch.rand(500, 2, generator=draws, dtype=torch.float64)
    assert bool((above(d) <= 1e-12).all())
    assert bool((above(torch.full_like(f, 4.0)) > 0).any())
