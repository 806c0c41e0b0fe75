"""Whether one set contains another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from foedus.errors import ConfigError
from foedus.geometry.domain import Domain, Shape, dense
from foedus.geometry.groups import GroupBall
from foedus.geometry.layers import ModelDomain, PerLayer, Shapes, Whole, dims_of, domain_of
from foedus.geometry.matrices import _ROUNDING, NuclearBall
from foedus.geometry.vectors import Box, KSparse, L1Ball, L2Ball, LInfBall, Simplex


def inside(outer: Any, inner: Any, shape: Shape | Shapes) -> bool:
    """Whether `outer` contains `inner`, for tensors of this shape (of a model: a dict of shapes).

    Outer sets of norms are decided by the largest norm in the inner set (`reach`), boxes by its
    `bounds`, the simplex by these and its largest and least sum. Raises `ConfigError` where no
    closed form decides.
    """
    if isinstance(outer, ModelDomain) or isinstance(inner, ModelDomain):
        return _inside_model(domain_of(outer), domain_of(inner), cast("Shapes", shape))
    shape = cast("Shape", shape)
    outer.check(shape)
    inner.check(shape)
    if outer == inner:
        return True
    norms = {L1Ball: "l1", L2Ball: "l2", LInfBall: "linf"}
    if type(outer) in norms:
        return _at_most(inner.reach(norms[type(outer)], shape), outer.radius)
    if isinstance(outer, KSparse):
        whole, entry = inner.reach("l1", shape), inner.reach("linf", shape)
        return _at_most(whole, outer.k * outer.radius) and _at_most(entry, outer.radius)
    if isinstance(outer, Box | Simplex):
        (low, high), (lo, hi) = outer.bounds(shape), inner.bounds(shape)
        slack = _ROUNDING * torch.maximum(low.abs(), high.abs())
        if isinstance(outer, Box):
            return bool(((lo >= low - slack) & (hi <= high + slack)).all())
        ones = torch.ones(tuple(shape), dtype=torch.float64)
        sums = [float(dense(inner.lmo(g)).sum()) for g in (ones, -ones)]
        close = all(math.isclose(s, outer.radius, rel_tol=_ROUNDING) for s in sums)
        return bool((lo >= -slack).all()) and close
    if isinstance(outer, NuclearBall | GroupBall):
        return _by_frobenius(outer, inner, shape)
    raise _undecided(outer, inner)


def _at_most(value: float, limit: float) -> bool:
    return value <= limit * (1 + _ROUNDING)


def _undecided(outer: Any, inner: Any) -> ConfigError:
    return ConfigError(
        f"whether {type(outer).__name__} contains {type(inner).__name__} cannot be decided: "
        "use an L1Ball, L2Ball, LInfBall or Box as the outer set"
    )


def _by_frobenius(outer: NuclearBall | GroupBall, inner: Domain, shape: Shape) -> bool:
    """By the closed form, else by |x|_2 <= |x| <= min(|x|_1, sqrt(q) |x|_2) for these norms.

    q is the number of singular values or of groups.
    """
    if isinstance(outer, NuclearBall):
        value, parts = inner.reach("nuclear", shape), min(shape)
    else:
        value, parts = None, outer.count(shape)
    if value is not None:
        return _at_most(value, outer.radius)
    lower, upper = inner.reach("l2", shape), inner.reach("l1", shape)
    assert lower is not None and upper is not None  # only the nuclear norm may have no closed form
    if _at_most(min(upper, math.sqrt(parts) * lower), outer.radius):
        return True
    if not _at_most(lower, outer.radius):
        return False
    raise _undecided(outer, inner)


class _Product(Domain):
    """The set of a `PerLayer` as one of the vector that `Whole` sees."""

    def __init__(self, parts: list[tuple[Domain, tuple[int, ...]]]):
        self.parts = parts

    def lmo(self, g: Tensor, batch: int = 0) -> Tensor:
        pieces = zip(self.parts, g.split([math.prod(s) for _, s in self.parts]), strict=True)
        points = [dense(d.lmo(piece.reshape(shape))) for (d, shape), piece in pieces]
        return torch.cat([p.flatten() for p in points])

    def bounds(self, shape: Shape) -> tuple[Tensor, Tensor]:
        ends = [[b.expand(s).flatten() for b in d.bounds(s)] for d, s in self.parts]
        return torch.cat([low for low, _ in ends]), torch.cat([high for _, high in ends])

    def _reach(self, norm: str, shape: tuple[int, ...]) -> float:
        values = [cast("float", d.reach(norm, s)) for d, s in self.parts]  # never the nuclear norm
        return sum(values) if norm == "l1" else math.hypot(*values)


def _inside_model(outer: ModelDomain, inner: ModelDomain, shapes: Shapes) -> bool:
    if not isinstance(shapes, Mapping):
        raise ConfigError(f"the shape of a model's parameters is a dict of shapes, not {shapes!r}")
    outer.check(shapes)
    inner.check(shapes)
    each = {name: dims_of(s) for name, s in shapes.items()}
    outers, inners = (d.each(each) if isinstance(d, PerLayer) else {} for d in (outer, inner))
    if len(each) == 1:  # then Whole and PerLayer are the same
        name = next(iter(each))
        outers, inners = outers or {name: _whole(outer)}, inners or {name: _whole(inner)}
    if outers and inners:
        return all(inside(outers[name], inners[name], shape) for name, shape in each.items())
    if outers:
        domain = _whole(inner)
        return all(inside(outers[name], _shadow(domain, s), s) for name, s in each.items())
    flat = (sum(map(math.prod, each.values())),)
    product = _Product([(inners[n], s) for n, s in each.items()]) if inners else _whole(inner)
    return inside(_whole(outer), product, flat)


def _whole(domain: ModelDomain) -> Domain:
    assert isinstance(domain, Whole)
    return domain.domain


def _shadow(domain: Domain, shape: tuple[int, ...]) -> Domain:
    """The set of values of one tensor within a set of the whole vector, if the others are free."""
    if isinstance(domain, KSparse):
        return replace(domain, k=min(domain.k, math.prod(shape)))
    ends = (domain.lo, domain.hi) if isinstance(domain, Box) else ((),)
    numbers = not any(isinstance(end, tuple) for end in ends)
    if numbers or isinstance(domain, L1Ball | L2Ball | LInfBall):
        return domain
    raise ConfigError(
        f"whether PerLayer contains {type(domain).__name__} over the whole model cannot be "
        "decided: use Whole as the outer set"
    )
