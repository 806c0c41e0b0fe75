"""What foedus survives, by experiment: `python -m tests.faults.faults` (make faults) and `python -m
tests.faults.fuzz` (make fuzz).
"""
