"""Recorded runs: every algorithm in every setting, held against the numbers of an earlier version.

    python -m tests.recorded                       compare all runs with what is recorded
    python -m tests.recorded "int8" "half/Fed*"    some: globs of scenario or scenario/algorithm
    python -m tests.recorded --write               record new runs and the changes of changes.toml

Each scenario has one JSON file in this folder: for every algorithm the columns of the history,
round by round, a digest of the final server state, and outputs of the final model on five rows. A
digest holds the sum, the norm and four entries of a tensor.
"""
