"""The contract between algorithms and engines, and `fd.run`."""
