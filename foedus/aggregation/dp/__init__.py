"""Differential privacy: mechanism, accounting, noise."""
