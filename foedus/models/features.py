"""Feature maps: what turns a row into the numbers that a linear method works on.

A map is known to everybody: it is part of the algorithm, so nothing of it travels. Random ones are
given by their seed alone.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Self

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from foedus.base import random
from foedus.base.settings import Means, Remedy, Settings, check_settings
from foedus.base.spec import Spec
from foedus.errors import ConfigError, ModelError

_MOST = 1_000_000
"""More features than this are a mistake: one vector of them is 8 MB."""


_ROWS = 2048
"""Rows whose features are made at once: few enough for the cache, enough for a fast product."""


class FeatureMap(Settings):
    """Base of the maps: frozen dataclasses with `size` and `__call__`."""

    def __post_init__(self) -> None:
        check_settings(self)

    def size(self, spec: Spec) -> int:
        """M, how many features a row has."""
        raise NotImplementedError

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        """Features (n, M) of rows (n, *shape). `out` is room for them, which a map may use."""
        raise NotImplementedError

    def rough_size(self, numbers: int) -> int:
        """About how many features a row of `numbers` numbers has: for planning memory."""
        return self.size(Spec((numbers,), None, 1))

    def seeded(self, seed: int) -> Self:
        """The map itself, with what it draws at random fixed by a seed, unless it was already."""
        return self

    def check(self, spec: Spec) -> None:
        """Refuse rows that the map cannot take, and sizes that no system of equations can have."""
        size = self.size(spec)
        if not 1 <= size <= _MOST:
            given = f"{self} gives {size:,} features for rows of shape {spec.shape}"
            raise ConfigError(f"{given}; the limit is {_MOST:,}")


@dataclass(frozen=True)
class Identity(FeatureMap):
    """phi(x) = x: linear models.

    `intercept` adds a feature that is always 1 (it is regularised like the others).
    """

    intercept: bool = False

    def size(self, spec: Spec) -> int:
        return spec.features + self.intercept

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        x = x.flatten(1).to(dtype)
        return torch.cat((x, x.new_ones(len(x), 1)), 1) if self.intercept else x


@dataclass(frozen=True)
class Polynomial(FeatureMap):
    """All monomials of the features up to a degree: (1, x_1, .., x_d, x_1^2, x_1 x_2, ..).

    There are (d + degree)! / (d! degree!) of them.
    """

    degree: Annotated[int, Ge(1)] = 2

    def size(self, spec: Spec) -> int:
        return math.comb(spec.features + self.degree, self.degree)

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        x = x.flatten(1).to(dtype)
        ones = x.new_ones(len(x), 1)
        # with the constant as a feature, all monomials are products of `degree` factors
        x = torch.cat((ones, x), 1)
        first, *others = _factors(x.shape[1], self.degree).unbind(-1)
        phi = x[:, first]
        for column in others:
            phi *= x[:, column]
        return phi

    def factors(self, features: int) -> Tensor:
        """The factors of each monomial (M, degree); 0 is the constant, j + 1 the feature j."""
        return _factors(features + 1, self.degree)


@lru_cache(maxsize=8)
def _factors(features: int, degree: int) -> Tensor:
    return torch.tensor(list(itertools.combinations_with_replacement(range(features), degree)))


@dataclass(frozen=True)
class RandomFourier(FeatureMap):
    """Random Fourier features of the Gaussian kernel (Rahimi and Recht, NIPS 2007).

        phi(x) = s cos(Omega^T x + b),   Omega_ij ~ N(0, 1 / bandwidth^2),   b_j ~ U[0, 2 pi)

    dim: M, their number. bandwidth: the standard deviation of the kernel k(x, z) = exp(-|x - z|^2 /
    (2 bandwidth^2)): rows much closer than it look alike, rows much farther apart have nothing to
    do with each other. unbiased: False, the FedNewton paper's s = 1 / sqrt(M), with which phi(x) .
    phi(z) has the mean k(x, z) / 2; True, s = sqrt(2 / M), with which it is k itself. Going from
    False to True doubles every product of features, so the same solution then needs twice the
    `reg`. seed: what Omega and b are drawn from, the same at every client; `None`: the seed of the
    run. Only the seed is ever shared. The first features of a map are those of a smaller one with
    the same seed.

    The FedNewton paper writes Omega ~ N(0, 1 / sigma^2), but the sigma^2 column of its Table 2
    makes sense only as the variance of Omega itself (dna: 0.001 on 180 binary features): `bandwidth
    = column ** -0.5`.
    """

    dim: Annotated[int, Ge(1)]
    bandwidth: Annotated[float, Gt(0), Remedy("it is the width of the kernel")] = 1.0
    seed: Annotated[int | None, Means("an integer, or None for the seed of the run")] = None
    unbiased: bool = False

    def size(self, spec: Spec) -> int:
        return self.dim

    def seeded(self, seed: int) -> Self:
        return self if self.seed is not None else replace(self, seed=seed)

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        x = x.flatten(1)
        waves = self.waves(x.shape[1], dtype)
        used = (x != 0).any(0)
        # what is 0 in all of these rows, such as an image's margin, takes no part in the product
        if not bool(used.all()):
            x = x[:, used]
            waves = waves[torch.cat((used, used.new_ones(1)))]
        phi = waves.new_empty(len(x), self.dim) if out is None else out
        for some, part in zip(x.split(_ROWS), phi.split(_ROWS), strict=True):
            with_one = waves.new_ones(len(some), len(waves))
            with_one[:, :-1] = some
            torch.mm(with_one, waves, out=part).cos_().mul_(self.scale)
        return phi

    @property
    def scale(self) -> float:
        """s."""
        return math.sqrt((2 if self.unbiased else 1) / self.dim)

    def waves(self, features: int, dtype: torch.dtype) -> Tensor:
        """Omega (features, M) and, as the last row, b."""
        if self.seed is None:
            raise ConfigError(
                "these random features have no seed yet: a run gives them its own; outside of one "
                "pass seed=..."
            )
        return _waves(features, self.dim, self.bandwidth, self.seed, dtype)


@lru_cache(maxsize=4)
def _waves(features: int, dim: int, bandwidth: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Frequencies (d, M) and, as the last row, phases: those of a feature that is always 1."""
    key = random.fold(random.key(seed), 0xF0)
    frequencies = random.normal(random.fold(key, 0), (dim, features), torch.float64).mT / bandwidth
    phases = 2 * math.pi * random.uniform(random.fold(key, 1), dim, torch.float64)
    return torch.cat((frequencies, phases.unsqueeze(0))).to(dtype)


@dataclass(frozen=True, eq=False)
class ModuleFeatures(FeatureMap):
    """A `torch.nn.Module`'s outputs as features: fixed, in evaluation mode, its own precision."""

    module: nn.Module

    @cached_property
    def frozen(self) -> nn.Module:
        return copy.deepcopy(self.module).eval().requires_grad_(False)

    def size(self, spec: Spec) -> int:
        try:
            return self(torch.zeros(2, *spec.shape)).shape[1]
        except Exception as error:
            raise ModelError(
                f"the feature map {type(self.module).__name__} cannot take rows of shape "
                f"{spec.shape}: {error}"
            ) from error

    def rough_size(self, numbers: int) -> int:
        return max([numbers, *(p.shape[0] for p in self.module.parameters() if p.dim())])

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        with torch.no_grad():
            return self.frozen(x.to(self.precision or x.dtype)).flatten(1).to(dtype)

    @property
    def precision(self) -> torch.dtype | None:
        """Of the module's parameters; `None`: it has none."""
        return next((p.dtype for p in self.frozen.parameters() if p.is_floating_point()), None)

    def check(self, spec: Spec) -> None:
        super().check(spec)
        x = random.normal(random.key(0), (5, *spec.shape))
        together, alone = self(x), torch.cat([self(row[None]) for row in x])
        if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4 * float(together.abs().max())):
            raise ModelError(
                f"the feature map {type(self.module).__name__} gives a row other features alone "
                "than among others, "
                "or draws random numbers; a feature map must be a function of the row"
            )


def features_of(features: FeatureMap | nn.Module) -> FeatureMap:
    """A feature map from what the user passed: one of ours, or any `torch.nn.Module`."""
    if isinstance(features, FeatureMap):
        return features
    if isinstance(features, nn.Module):
        return ModuleFeatures(features)
    given = repr(features)
    if isinstance(features, type):
        given = f"{features.__name__} (the class: add parentheses)"
    allowed = "a foedus feature map (such as RandomFourier(500)) or a torch.nn.Module"
    raise ModelError(f"features must be {allowed}, not {given}")
