"""Feature maps: functions that turn a row into the features of a linear method.

A map is part of the algorithm, so all clients know it and nothing of it is sent. Random maps are
determined by their seed.
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
"""Rows per block of features: few enough for the cache, enough for a fast product."""


class FeatureMap(Settings):
    """Base of the feature maps: frozen dataclasses with `size` and `__call__`.

    Example:
        >>> phi = fd.Polynomial(degree=2)
        >>> isinstance(phi, fd.FeatureMap), phi(torch.ones(3, 4)).shape
        (True, torch.Size([3, 15]))
    """

    def __post_init__(self) -> None:
        check_settings(self)

    def size(self, spec: Spec) -> int:
        """M, the number of features of a row.

        Args:
            spec: The form of the data.
        """
        raise NotImplementedError

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        """The features of rows.

        Args:
            x: Rows (n, *shape).
            dtype: The precision of the features.
            out: A tensor (n, M) that the map may write the features to.

        Returns:
            A tensor (n, M).
        """
        raise NotImplementedError

    def rough_size(self, numbers: int) -> int:
        """The approximate number of features of a row, for planning memory.

        Args:
            numbers: The number of entries of a row.
        """
        return self.size(Spec((numbers,), None, 1))

    def seeded(self, seed: int) -> Self:
        """The map with its random draws fixed by a seed, unless they already were.

        Args:
            seed: The seed of the run.
        """
        return self

    def check(self, spec: Spec) -> None:
        """Check that the map can take the rows and has a size that systems of equations can have.

        Args:
            spec: The form of the data.

        Raises:
            ConfigError: There are no features, or more than a million.
        """
        size = self.size(spec)
        if not 1 <= size <= _MOST:
            given = f"{self} gives {size:,} features for rows of shape {spec.shape}"
            raise ConfigError(f"{given}; the limit is {_MOST:,}")


@dataclass(frozen=True)
class Identity(FeatureMap):
    """The features themselves, phi(x) = x: linear models.

    Args:
        intercept: Whether to add a feature that is always 1 (regularized like the others).

    Example:
        >>> fd.Identity(intercept=True)(torch.zeros(1, 2)).tolist()
        [[0.0, 0.0, 1.0]]
    """

    intercept: bool = False

    def size(self, spec: Spec) -> int:
        """M, the number of features of a row.

        Args:
            spec: The form of the data.
        """
        return spec.features + self.intercept

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        x = x.flatten(1).to(dtype)
        return torch.cat((x, x.new_ones(len(x), 1)), 1) if self.intercept else x


@dataclass(frozen=True)
class Polynomial(FeatureMap):
    """All monomials of the features up to a degree.

        phi(x) = (1, x_1, .., x_d, x_1^2, x_1 x_2, ..)

    There are (d + degree)! / (d! degree!) of them.

    Args:
        degree: The largest degree.

    Example:
        >>> fd.Polynomial(degree=2)(torch.tensor([[2.0, 3.0]])).tolist()
        [[1.0, 2.0, 3.0, 4.0, 6.0, 9.0]]
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
        """The factors of each monomial, (M, degree): 0 is the constant, j + 1 the feature j.

        Args:
            features: The number of features d.
        """
        return _factors(features + 1, self.degree)


@lru_cache(maxsize=8)
def _factors(features: int, degree: int) -> Tensor:
    return torch.tensor(list(itertools.combinations_with_replacement(range(features), degree)))


@dataclass(frozen=True)
class RandomFourier(FeatureMap):
    """Random Fourier features of the Gaussian kernel k(x, z) = exp(-|x - z|^2 / (2 bandwidth^2)).

        phi(x) = s cos(Omega^T x + b),   Omega_ij ~ N(0, 1 / bandwidth^2),   b_j ~ U[0, 2 pi)

    Only the seed is ever shared. The first features of a map are those of a smaller map with the
    same seed.

    The FedNewton paper writes Omega ~ N(0, 1 / sigma^2), but the sigma^2 column of its Table 2
    makes sense only as the variance of Omega itself (dna: 0.001 on 180 binary features): `bandwidth
    = column ** -0.5`.

    Args:
        dim: M, the number of features.
        bandwidth: The standard deviation of the kernel: rows much closer than this have nearly
            equal features, rows much farther apart nearly uncorrelated ones.
        seed: The seed of Omega and b, the same at all clients; `None`: the seed of the run.
        unbiased: `False`: the FedNewton paper's s = 1 / sqrt(M), with which phi(x) . phi(z) has the
            mean k(x, z) / 2. `True`: s = sqrt(2 / M), with which the mean is k(x, z). Changing
            `False` to `True` doubles all products of features, so the same solution needs twice the
            `reg`.

    Raises:
        ConfigError: A setting is out of range; or, when called, there is no seed.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [0.3, 0.4]])
        >>> phi = fd.RandomFourier(5000, bandwidth=1.0, seed=0, unbiased=True)(x)
        >>> abs(float(phi[0] @ phi[1]) - 0.8825) < 0.05  # exp(-0.5^2 / 2)
        True

    Reference:
        Rahimi and Recht, "Random features for large-scale kernel machines", NIPS 2007.
    """

    dim: Annotated[int, Ge(1)]
    bandwidth: Annotated[float, Gt(0), Remedy("it is the width of the kernel")] = 1.0
    seed: Annotated[int | None, Means("an integer, or None for the seed of the run")] = None
    unbiased: bool = False

    def size(self, spec: Spec) -> int:
        """M, the number of features of a row.

        Args:
            spec: The form of the data.
        """
        return self.dim

    def seeded(self, seed: int) -> Self:
        return self if self.seed is not None else replace(self, seed=seed)

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float64, out: Tensor | None = None
    ) -> Tensor:
        x = x.flatten(1)
        waves = self.waves(x.shape[1], dtype)
        used = (x != 0).any(0)
        # columns of zeros, such as the margins of images, are left out of the product
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
        """The factor s."""
        return math.sqrt((2 if self.unbiased else 1) / self.dim)

    def waves(self, features: int, dtype: torch.dtype) -> Tensor:
        """Omega (features, M) with b as the last row.

        Args:
            features: The number of features d of a row.
            dtype: The precision.

        Raises:
            ConfigError: The map has no seed.
        """
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
    """The outputs of a `torch.nn.Module` as features: fixed and in evaluation mode.

    They are computed in the module's own precision.

    Args:
        module: The module; it must be a function of each row alone.
    """

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
        """The precision of the module's parameters; `None`: it has none."""
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
    """A feature map from the user's argument: a foedus map, or any `torch.nn.Module`."""
    if isinstance(features, FeatureMap):
        return features
    if isinstance(features, nn.Module):
        return ModuleFeatures(features)
    given = repr(features)
    if isinstance(features, type):
        given = f"{features.__name__} (the class: add parentheses)"
    allowed = "a foedus feature map (such as RandomFourier(500)) or a torch.nn.Module"
    raise ModelError(f"features must be {allowed}, not {given}")
