"""Secure aggregation: the protocol, its two sides, and its arithmetic."""
