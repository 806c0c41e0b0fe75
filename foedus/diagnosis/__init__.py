"""Measures of a federation, and which algorithm fits it: `foedus diagnose`."""
