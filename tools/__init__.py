"""What is run to release foedus."""
