"""What messages tell about the rows they were made from, and how they tell less."""

from foedus.privacy.accounting import noise_for
from foedus.privacy.dp import DifferentialPrivacy
from foedus.privacy.leakage import Leakage, Reconstruction, audit_leakage
from foedus.privacy.protocol import SecureAggregation

__all__ = ["DifferentialPrivacy", "Leakage", "Reconstruction", "SecureAggregation", "audit_leakage", "noise_for"]
