"""The command line, a module for each group of commands.

Commands import heavy packages themselves, so that `--help` need not wait for PyTorch.
"""

from foedus.cli import demo, run, diagnose, paper, data, audit, deploy, doctor  # noqa: I001 - the order of commands in --help
from foedus.cli.app import app, main

__all__ = ["app", "audit", "data", "demo", "deploy", "diagnose", "doctor", "main", "paper", "run"]
