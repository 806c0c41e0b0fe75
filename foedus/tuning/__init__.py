"""`fd.tune`: search over settings of an algorithm."""
