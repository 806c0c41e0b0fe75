"""Convex sets with linear minimization oracles and projections, and mirror maps."""

from foedus.geometry.containment import inside
from foedus.geometry.domain import Corner, Domain, dense
from foedus.geometry.groups import GroupBall
from foedus.geometry.layers import ModelDomain, PerLayer, Whole, domain_of
from foedus.geometry.matrices import Birkhoff, NuclearBall
from foedus.geometry.mirror import Entropy, Euclidean, Mirror, PNorm, best_step
from foedus.geometry.permutahedron import Permutahedron
from foedus.geometry.vectors import Box, KSparse, L1Ball, L2Ball, LInfBall, Simplex

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
