"""Speed of foedus, as ratios measured in one run: python -m benchmarks --help."""
