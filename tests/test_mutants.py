"""The list of mutants fits the sources and the tests; the runner tells killed from surviving ones
(`make mutants` runs all).
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.mutants import __main__ as runner
from tests.mutants.listing import ROOT, check, load

MUTANTS = load()
FEDDYN = next(m for m in MUTANTS if m.id == "feddyn-h-not-kept")


def test_every_place_is_found_once_and_every_test_exists():
    assert check(MUTANTS) == []


def test_every_package_has_mutants():
    modules = {
        p for p in (ROOT / "foedus").iterdir() if p.is_dir() and (p / "__init__.py").exists()
    }
    assert {p.name for p in modules} <= {m.package for m in MUTANTS}
    assert len(MUTANTS) >= 400


@pytest.mark.parametrize("family", ["fedfw", "fedres", "fedboost", "fednewton", "ffgb"])
def test_every_family_has_fifteen(family):
    assert sum(m.file.startswith(f"foedus/algorithms/{family}/") for m in MUTANTS) >= 15


@pytest.mark.parametrize("module", ["held", "delays", "network", "clients"])
def test_the_contract_has_five_a_module(module):
    assert sum(m.file == f"foedus/core/{module}.py" for m in MUTANTS) >= 5


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"old": "h / self.beta"}, "occurs 0 times"),
        ({"old": "state"}, "times in foedus/algorithms/feddyn.py, expected exactly once"),
        ({"new": FEDDYN.old}, "same program"),
        ({"new": "state.replace(w=w"}, "'(' was never closed"),
        ({"file": "foedus/algorithms/nowhere.py"}, "there is no file foedus/algorithms/nowhere.py"),
        ({"tests": ("tests/test_nowhere.py::test_it",)}, "there is no file tests/test_nowhere.py"),
        ({"tests": ("tests/test_mutants.py::test_nothing",)}, "has no test test_nothing"),
        ({"tests": ()}, "no tests are named"),
    ],
)
def test_entries_that_no_longer_fit_are_named(changes, complaint):
    (problem,) = dataclasses.replace(FEDDYN, **changes).problems()
    assert problem.startswith(FEDDYN.id) and complaint in problem


def test_a_pattern_that_matches_nothing_is_an_error():
    said = []
    assert runner.main(["no-such-mutant"], said.append) == 2
    assert said == ["error: no mutant matches 'no-such-mutant'"]


def test_the_check_alone():
    said = []
    assert runner.main(["--check", "feddyn-*"], said.append) == 0
    assert said[0].startswith("5 mutants")


def test_percentages_leave_equivalent_mutants_out():
    results = [(FEDDYN, "killed")] * 3 + [(FEDDYN, "survived"), (FEDDYN, "equivalent")]
    assert runner.percentage(results) == 75.0
    assert runner.table(results).splitlines()[-1].split() == ["all", "3", "1", "1", "0"]


def test_a_mutant_is_a_module_compiled_from_other_text():
    hook = runner.Hook(FEDDYN)
    assert hook.find_spec("foedus.algorithms.fedavg") is None
    spec = hook.find_spec("foedus.algorithms.feddyn")
    assert spec.loader is hook and spec.origin == str(ROOT / FEDDYN.file)
    text = (ROOT / FEDDYN.file).read_text()
    assert hook.text == text.replace("state.replace(w=w, h=h)", "state.replace(w=w)") != text
    assert not hook.loaded and hook.get_code(spec.name).co_filename == spec.origin and hook.loaded
