"""How replies become one: robust means, differential privacy, secure aggregation."""

from foedus.aggregation.dp.accounting import noise_for
from foedus.aggregation.dp.mechanism import DifferentialPrivacy
from foedus.aggregation.robust import GeometricMedian, Krum, Median, NormBound, TrimmedMean
from foedus.aggregation.secure.protocol import SecureAggregation

__all__ = [
    "DifferentialPrivacy",
    "GeometricMedian",
    "Krum",
    "Median",
    "NormBound",
    "SecureAggregation",
    "TrimmedMean",
    "noise_for",
]
