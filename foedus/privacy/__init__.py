"""What messages tell about the rows they were made from."""

from foedus.privacy.accounting import noise_for
from foedus.privacy.dp import DifferentialPrivacy
from foedus.privacy.leakage import Leakage, Reconstruction, audit_leakage

__all__ = ["DifferentialPrivacy", "Leakage", "Reconstruction", "audit_leakage", "noise_for"]
