"""What messages tell about the rows they were made from."""

from foedus.privacy.leakage import Leakage, Reconstruction, audit_leakage

__all__ = ["Leakage", "Reconstruction", "audit_leakage"]
