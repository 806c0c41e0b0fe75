"""Files and client states: checkpoints, states in memory, states on disk."""
