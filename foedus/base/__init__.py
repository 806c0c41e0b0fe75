"""What everything else stands on: trees of tensors, keyed random numbers, rows, batching."""
