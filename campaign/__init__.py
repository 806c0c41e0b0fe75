"""What foedus survives, by experiment: `python -m campaign.faults` (make faults) and `python -m campaign.fuzz` (make fuzz)."""
