"""Hand-made mutants of foedus, and the tests that should kill them: see `python -m tests.mutants
--help`.
"""
