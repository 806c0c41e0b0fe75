"""What messages tell about the rows they were made from, and how they tell less."""

from foedus.privacy.leakage import Leakage, Reconstruction, audit_leakage
from foedus.privacy.protocol import SecureAggregation

__all__ = ["Leakage", "Reconstruction", "SecureAggregation", "audit_leakage"]
