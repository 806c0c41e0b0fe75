"""The examples in the docstrings of the public names are run, and print what they show.

`fd`, `np`, `pd` and `torch` are there; everything else an example makes itself, on bundled data, in
about a fifth of a second.
"""

from __future__ import annotations

import doctest
import re
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import foedus as fd
from tests.pages import no_network
from tests.public import PUBLIC, documented_parts

GIVEN = {"fd": fd, "np": np, "pd": pd, "torch": torch}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

NOT_RUN = {
    "Flower": "starts a federation of several processes; tests/engines/flower has runs",
    "MLflow": "needs a tracking server; tests/test_trackers.py has runs",
    "Ray": "needs a Ray cluster; tests/engines/ray has runs",
}
"""Names with an example that is not run."""

EXAMPLES = {
    f"{name}.{part}".rstrip("."): doc
    for name, value in PUBLIC.items()
    for part, doc in documented_parts(value).items()
    if ">>>" in doc
}


class Checker(doctest.OutputChecker):
    """Compares what NumPy 2 shows, `np.True_` and `np.float64(0.5)`, with what NumPy 1 showed."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        got = re.sub(r"\bnp\.(True|False)_", r"\1", got)
        got = re.sub(r"\bnp\.(?:float|int)\d+\(([^()]*)\)", r"\1", got)
        return super().check_output(want, got, optionflags)


def run_example(name: str, doc: str, **given: Any) -> None:
    """Run the example of a docstring; an AssertionError where it prints something else."""
    test = doctest.DocTestParser().get_doctest(doc, {**GIVEN, **given}, name, None, 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(Checker(), verbose=False, optionflags=FLAGS)
    with no_network(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example(name, EXAMPLES[name])


def test_examples_that_are_not_run_are_listed():
    skipped = {name for name, doc in EXAMPLES.items() if "doctest: +SKIP" in doc}
    assert skipped == set(NOT_RUN)


@pytest.mark.parametrize(
    "doc", [">>> 1 + 1\n3", ">>> np.float64(0.5)\n0.6", ">>> fd.nothing", ">>> x = 1 +"]
)
def test_a_wrong_example_is_noticed(doc):
    with pytest.raises(AssertionError):
        run_example("wrong", doc)


def test_numbers_of_numpy_are_compared_as_numbers():
    run_example("right", ">>> np.float64(0.5), np.int64(2), np.float32(1) > 0\n(0.5, 2, True)")
