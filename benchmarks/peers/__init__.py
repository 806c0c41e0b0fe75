"""The same workloads by other tools, each in a venv and a process of its own: see `compare`.

Modules here import no foedus but `ours`.
"""
