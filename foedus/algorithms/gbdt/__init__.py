"""Gradient boosted decision trees from sums of histograms."""
