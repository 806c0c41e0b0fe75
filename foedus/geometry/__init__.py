"""Convex sets with linear minimisation oracles and projections."""

from foedus.geometry.domains import (
    Box,
    Corner,
    Domain,
    GroupBall,
    KSparse,
    L1Ball,
    L2Ball,
    LInfBall,
    Permutahedron,
    Simplex,
    dense,
)
from foedus.geometry.models import Birkhoff, ModelDomain, NuclearBall, PerLayer, Whole, domain_of, inside

__all__ = [
    "Birkhoff",
    "Box",
    "Corner",
    "Domain",
    "GroupBall",
    "KSparse",
    "L1Ball",
    "L2Ball",
    "LInfBall",
    "ModelDomain",
    "NuclearBall",
    "PerLayer",
    "Permutahedron",
    "Simplex",
    "Whole",
    "dense",
    "domain_of",
    "inside",
]
