"""Mixtures, step sizes and combinations of settings of FedBoost and AFLBoost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.errors import ConfigError
from foedus.geometry import Domain, Euclidean, Mirror

if TYPE_CHECKING:
    from foedus.algorithms.fedboost.fedboost import FedBoost


def pace(
    mirror: Mirror,
    step: float | None,
    horizon: int | None,
    g: Tensor,
    steepest: float,
    squares: float,
) -> tuple[float, float, float]:
    """eta, the largest gradient so far in the dual norm, and the sum of their squares: the steps of
    Theorem 2.
    """
    size = float(torch.linalg.vector_norm(g, mirror.dual))
    steepest, squares = max(steepest, size), squares + size**2
    if step is not None:
        return step, steepest, squares
    bound = horizon * steepest**2 if horizon else squares
    return (
        (math.sqrt(2 * mirror.sigma * mirror.reach(len(g)) / bound) if bound else 0.0),
        steepest,
        squares,
    )


def mixture(name: str, values: Any, size: int) -> tuple[float, ...]:
    """Mixture weights of `size` predictors; raises where they are no mixture."""
    try:
        values = tuple(float(v) for v in values)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={values!r} must be {size} numbers") from None
    if len(values) != size or not min(values) >= 0 or not abs(math.fsum(values) - 1) <= 1e-6:
        raise ConfigError(
            f"{name} must be {size} numbers that are not negative and sum to 1; these "
            f"{len(values)} sum to {math.fsum(values):.6g}, "
            f"the least is {min(values, default=0):.4g}"
        )
    return values


def common_point(x: Tensor, mixtures: Domain, low: float, high: float) -> Tensor:
    """The closest point to x of what a set has in common with {l in the simplex: low <= l <= high}.

    Dykstra's algorithm (Boyle and Dykstra, 1986): projections onto the two sets in turn, each of
    the last point plus what the projection onto the same set took away before. Its limit is the
    projection onto their common part.
    """
    simplex = Euclidean()
    at, taken, given = x, torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(_MOST):
        inner = mixtures.project(at + taken)
        taken = at + taken - inner
        after = simplex.project(inner + given, low, high)
        given = inner + given - after
        apart, moved = float((after - inner).abs().amax()), float((after - at).abs().amax())
        at = after
        if apart <= _CLOSE and moved <= _CLOSE:
            return at
    if apart <= _ENOUGH:
        return at
    raise ConfigError(
        f"mixtures={mixtures} has no point in common with the mixtures of {len(x)} domains between "
        f"low={low!r} and high={high!r}; use a larger set"
    )


_MOST, _CLOSE, _ENOUGH = 10_000, 1e-12, 1e-6


def check_together(settings: FedBoost) -> None:
    """Refuse settings that do not go together."""
    q, budget = len(settings.predictors), settings.budget
    if settings.sampling == "all" and budget not in (None, q):
        raise ConfigError(
            f"budget={budget!r} with sampling='all' sends all {q}; leave the budget out"
        )
    if settings.sampling != "all" and (budget is None or budget > q):
        raise ConfigError(
            f"budget={budget!r} must be above 0 and at most the {q} predictors (or sampling='all')"
        )
    if settings.bias_correction and settings.loss != "squared":
        raise ConfigError(
            "bias_correction is for loss='squared'; no unbiased gradient is known for "
            f"loss={settings.loss!r}"
        )
    if settings.bias_correction and not settings.reweigh:
        raise ConfigError(
            "bias_correction needs reweigh=True: without it the gradient is of another function"
        )
    if not settings.predictors.at_hand and (
        settings.cache or settings.repeats > 1 or settings.measure_every
    ):
        raise ConfigError(
            "predictors that are not at hand allow neither cache, nor repeats above 1, nor "
            "measure_every above 0"
        )
