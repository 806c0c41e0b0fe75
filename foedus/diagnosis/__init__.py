"""What a federation is like, and which algorithm fits it: `foedus diagnose`."""
