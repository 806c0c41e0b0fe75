"""Convex sets with linear minimisation oracles and projections, and mirror maps."""

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
from foedus.geometry.mirror import Entropy, Euclidean, Mirror, PNorm, best_step
from foedus.geometry.models import Birkhoff, ModelDomain, NuclearBall, PerLayer, Whole, domain_of, inside

__all__ = [
    "Birkhoff",
    "Box",
    "Corner",
    "Domain",
    "Entropy",
    "Euclidean",
    "GroupBall",
    "KSparse",
    "L1Ball",
    "L2Ball",
    "LInfBall",
    "Mirror",
    "ModelDomain",
    "NuclearBall",
    "PNorm",
    "PerLayer",
    "Permutahedron",
    "Simplex",
    "Whole",
    "best_step",
    "dense",
    "domain_of",
    "inside",
]
