"""What messages tell about the rows they were made from, and how they tell less."""

from foedus.privacy.accounting import noise_for
from foedus.privacy.dp import DifferentialPrivacy
from foedus.privacy.leakage import Leakage, Reconstruction, audit_leakage
from foedus.privacy.protocol import SecureAggregation
from foedus.privacy.robust import GeometricMedian, Krum, Median, NormBound, TrimmedMean

__all__ = [
    "DifferentialPrivacy",
    "GeometricMedian",
    "Krum",
    "Leakage",
    "Median",
    "NormBound",
    "Reconstruction",
    "SecureAggregation",
    "TrimmedMean",
    "audit_leakage",
    "noise_for",
]
