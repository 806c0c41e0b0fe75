"""The lowest layer: trees of tensors, keyed random numbers, rows, batching."""
