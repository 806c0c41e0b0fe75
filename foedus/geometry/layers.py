"""Sets of whole models: one set over all parameters, or one for each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from torch import Tensor

from foedus.base.settings import Means, Settings, check_settings
from foedus.errors import ConfigError, unknown
from foedus.geometry.domain import Domain, Point, Shape, dense
from foedus.wire.arrays import Sparse

Shapes = Mapping[str, Shape | Tensor]


def dims_of(value: Shape | Tensor) -> tuple[int, ...]:
    return tuple(value.shape if isinstance(value, Tensor) else value)


class ModelDomain(Settings):
    """Base of the sets of a model's parameters, dicts of tensors.

    Shapes are a dict of shapes or of tensors that have them.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, shapes: Shapes) -> None:
        """Refuse parameters that the set cannot hold, with the reason."""
        raise NotImplementedError

    def lmo(
        self, g: Mapping[str, Tensor], batch: int = 0, warm: Mapping[str, Tensor] | None = None
    ) -> Any:
        """An extreme point that minimizes <g, s>, in the form in which it is sent; see `dense`.

        warm: for tensors with a `NuclearBall`, a right vector to start from.
        """
        raise NotImplementedError

    def pairwise(self, g: Mapping[str, Tensor], x: Mapping[str, Tensor]) -> tuple[Any, Any, Tensor]:
        """A pairwise direction at x: see `Domain.pairwise`.

        Args:
            g: The gradient.
            x: Parameters in the set.

        Returns:
            Two points in the form in which they are sent, and the longest step.
        """
        raise NotImplementedError

    def dense(self, point: Any, like: Shapes) -> dict[str, Tensor]:
        """The dense parameters of an extreme point, or of an average of extreme points.

        like: shapes without batch dimensions, or tensors that have them; what the point has more
        are its batch dimensions.
        """
        raise NotImplementedError

    def project(self, x: Mapping[str, Tensor], batch: int = 0) -> dict[str, Tensor]:
        """The parameters in the set closest to x."""
        raise NotImplementedError

    def contains(self, x: Mapping[str, Tensor], tolerance: float = 1e-6, batch: int = 0) -> Tensor:
        """Whether x is in the set, for each batch entry."""
        raise NotImplementedError

    def diameter_of(self, shapes: Shapes) -> float:
        """The largest Euclidean distance of two points of the set."""
        raise NotImplementedError

    def start(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Zero if it is in the set, else its center."""
        raise NotImplementedError

    def largest_entry(self, shapes: Shapes) -> float:
        """The largest magnitude of a number that a point is sent with."""
        raise NotImplementedError

    def low_rank(self, shapes: Shapes) -> bool:
        """Whether extreme points are matrices of low rank, or some of their tensors are."""
        raise NotImplementedError


@dataclass(frozen=True)
class Whole(ModelDomain):
    """One set over all the tensors of a model as one vector.

    A single tensor keeps its shape. The extreme point is one point of that vector: a `Sparse` with
    indices into it, `Signs`, or a dense vector.

    Args:
        domain: The set.

    Example:
        >>> gradient = {"w": torch.tensor([[1.0, -4.0]]), "b": torch.tensor([2.0])}
        >>> whole = fd.Whole(fd.L1Ball(3.0))
        >>> whole.dense(whole.lmo(gradient), gradient)
        {'w': tensor([[0., 3.]]), 'b': tensor([0.])}
    """

    domain: Annotated[Domain, Means("a set such as L1Ball(10.0)")]

    def _shape(self, shapes: Shapes) -> tuple[int, ...]:
        each = [dims_of(s) for s in shapes.values()]
        if len(each) == 1:
            return each[0]
        if self.domain.matrix:
            raise ConfigError(
                f"{type(self.domain).__name__} needs a matrix, which {len(each)} tensors "
                f"({', '.join(shapes)}) laid end to end are not: use PerLayer(set), or "
                "PerLayer({name: set, ...}) if some of them are not matrices"
            )
        return (sum(map(math.prod, each)),)

    def check(self, shapes: Shapes) -> None:
        self.domain.check(self._shape(shapes))

    def lmo(
        self, g: Mapping[str, Tensor], batch: int = 0, warm: Mapping[str, Tensor] | None = None
    ) -> Point:
        near = {"warm": warm[next(iter(g))]} if warm else {}  # only a single matrix can have one
        return self.domain.lmo(self._join(g, batch), batch, **near)

    def pairwise(
        self, g: Mapping[str, Tensor], x: Mapping[str, Tensor]
    ) -> tuple[Sparse, Sparse, Tensor]:
        return self.domain.pairwise(self._join(g, 0), self._join(x, 0))

    def dense(self, point: Point, like: Shapes) -> dict[str, Tensor]:
        joined, each = dense(point), {name: dims_of(s) for name, s in like.items()}
        lead = joined.shape[: joined.dim() - len(self._shape(like))]
        flat = joined.reshape(*lead, math.prod(joined.shape[len(lead) :]))
        parts = flat.split([*map(math.prod, each.values())], -1)
        named = zip(each.items(), parts, strict=True)
        return {name: part.reshape((*lead, *s)) for (name, s), part in named}

    def project(self, x: Mapping[str, Tensor], batch: int = 0) -> dict[str, Tensor]:
        projected = self.domain.project(self._join(x, batch), batch)
        return self.dense(projected, {name: t.shape[batch:] for name, t in x.items()})

    def contains(self, x: Mapping[str, Tensor], tolerance: float = 1e-6, batch: int = 0) -> Tensor:
        return self.domain.contains(self._join(x, batch), tolerance, batch)

    def diameter_of(self, shapes: Shapes) -> float:
        return self.domain.diameter_of(self._shape(shapes))

    def start(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return self.dense(self.domain.start(self._shape(shapes), dtype), shapes)

    def largest_entry(self, shapes: Shapes) -> float:
        return self.domain.reach("linf", self._shape(shapes)) or 0.0

    def low_rank(self, shapes: Shapes) -> bool:
        return self.domain.matrix

    @staticmethod
    def _join(x: Mapping[str, Tensor], batch: int) -> Tensor:
        if len(x) == 1:
            return next(iter(x.values()))
        flat = [t.reshape(*t.shape[:batch], math.prod(t.shape[batch:])) for t in x.values()]
        return torch.cat(flat, -1)


@dataclass(frozen=True)
class PerLayer(ModelDomain):
    """A set for each tensor of a model.

    The extreme point is a dict of points, one for each tensor.

    Args:
        domains: The same set for all tensors, or {name: set} with every name.

    Example:
        >>> gradient = {"w": torch.tensor([[1.0, -4.0]]), "b": torch.tensor([2.0])}
        >>> each = fd.PerLayer(fd.L1Ball(3.0))
        >>> each.dense(each.lmo(gradient), gradient)
        {'w': tensor([[0., 3.]]), 'b': tensor([-3.])}
    """

    domains: Annotated[
        Domain | Annotated[Mapping[str, Domain], MinLen(1)],
        Means("a set such as L2Ball(10.0), or a dict {name: set}"),
    ]

    def _each(self, shapes: Shapes) -> Iterable[tuple[str, Domain, tuple[int, ...]]]:
        return [(name, d, dims_of(shapes[name])) for name, d in self.each(shapes).items()]

    def each(self, names: Iterable[str]) -> dict[str, Domain]:
        """The set of each tensor."""
        if not isinstance(self.domains, Mapping):
            return dict.fromkeys(names, self.domains)
        if missing := [name for name in names if name not in self.domains]:
            names = ", ".join(missing)
            raise ConfigError(f"PerLayer has no set for {names}: every tensor needs one")
        if extra := [name for name in self.domains if name not in names]:
            raise ConfigError(f"PerLayer: {unknown('tensor', extra[0], names)}")
        return {name: self.domains[name] for name in names}

    def check(self, shapes: Shapes) -> None:
        for name, domain, shape in self._each(shapes):
            try:
                domain.check(shape)
            except ConfigError as error:
                raise ConfigError(f"tensor {name!r}: {error}") from None

    def lmo(
        self, g: Mapping[str, Tensor], batch: int = 0, warm: Mapping[str, Tensor] | None = None
    ) -> dict[str, Point]:
        warm = warm or {}
        return {
            name: domain.lmo(g[name], batch, **({"warm": warm[name]} if name in warm else {}))
            for name, domain in self.each(g).items()
        }

    def pairwise(
        self, g: Mapping[str, Tensor], x: Mapping[str, Tensor]
    ) -> tuple[dict[str, Sparse], dict[str, Sparse], Tensor]:
        found = {name: domain.pairwise(g[name], x[name]) for name, domain in self.each(g).items()}
        toward = {name: s for name, (s, _, _) in found.items()}
        away = {name: v for name, (_, v, _) in found.items()}
        # one step for all tensors: as long as the shortest allows
        return toward, away, torch.stack([most for _, _, most in found.values()]).amin()

    def dense(self, point: Mapping[str, Point], like: Shapes) -> dict[str, Tensor]:
        return {name: dense(p) for name, p in point.items()}

    def project(self, x: Mapping[str, Tensor], batch: int = 0) -> dict[str, Tensor]:
        return {name: domain.project(x[name], batch) for name, domain in self.each(x).items()}

    def contains(self, x: Mapping[str, Tensor], tolerance: float = 1e-6, batch: int = 0) -> Tensor:
        held = [d.contains(x[name], tolerance, batch) for name, d in self.each(x).items()]
        return torch.stack(held).all(0)

    def diameter_of(self, shapes: Shapes) -> float:
        return math.hypot(*(d.diameter_of(shape) for _, d, shape in self._each(shapes)))

    def start(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return {name: d.start(shape, dtype) for name, d, shape in self._each(shapes)}

    def largest_entry(self, shapes: Shapes) -> float:
        return max(d.reach("linf", shape) or 0.0 for _, d, shape in self._each(shapes))

    def low_rank(self, shapes: Shapes) -> bool:
        return any(d.matrix for d in self.each(shapes).values())


def domain_of(domain: Any) -> ModelDomain:
    """A set of parameters from what the user passed; a set of one vector goes over all tensors."""
    if isinstance(domain, ModelDomain):
        return domain
    if isinstance(domain, Domain):
        return Whole(domain)
    given = repr(domain)
    if isinstance(domain, type):
        given = f"{domain.__name__} (the class: add parentheses)"
    allowed = "a set such as L1Ball(10.0) or PerLayer(L2Ball(1.0))"
    raise ConfigError(f"domain must be {allowed}, not {given}")
