"""Every algorithm computes what it computed when it was recorded; see `tests.recorded`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from tests.recorded import compare as recorded
from tests.recorded import scenarios


def parameters(scenario, name):
    marks = [pytest.mark.slow] if scenarios.slow(scenario, name) else []
    return pytest.param(scenario, name, id=f"{scenario}/{name}", marks=marks)


RUNS = [parameters(scenario, name) for scenario, name in scenarios.runs()]


@pytest.fixture(scope="module")
def engines():
    """Engines that serve several runs, started when they are first needed."""
    with contextlib.ExitStack() as stack:
        started = {}

        def engine_of(scenario):
            if scenario not in started:
                started[scenario] = stack.enter_context(scenarios.engine_of(scenario))
            return started[scenario]

        yield engine_of


@pytest.mark.parametrize(("scenario", "name"), RUNS)
def test_run(scenario, name, engines):
    if scenario == "ray":
        pytest.importorskip("ray")
    before = recorded.load(scenario).get(name)
    assert before is not None, "not recorded: python -m tests.recorded --write"
    now = scenarios.record(scenario, name, engines(scenario))
    differences = recorded.compare(scenario, name, before, now)
    wrong = [str(d) for d in differences if d.kind == "differs"]
    assert not wrong, "\n".join(wrong)


def test_everything_recorded_is_run():
    for scenario in scenarios.SCENARIOS:
        assert set(recorded.load(scenario)) == {a for s, a in scenarios.runs() if s == scenario}


def test_changes_name_runs_and_reasons():
    for change in recorded.load_changes():
        runs = [(s, a) for s, a in scenarios.runs() if change.covers(s, a, change.columns[0])]
        assert runs, f"{change} is about no run"


# The comparison itself.

OLD = {
    "columns": {"round": [0, 1], "loss": [2.0, 1.0], "bytes_up": [0, 100], "clients": [0, 5]},
    "state": {"w": [1.0, 2.0, 0.5]},
    "outputs": {},
}


def changed(**columns):
    state = columns.pop("state", OLD["state"])
    return OLD | {"columns": OLD["columns"] | columns, "state": state}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (changed(), []),
        (changed(loss=[2.0, 1.0 + 1.9e-6]), []),
        (changed(loss=[2.0, 1.0 + 2.1e-6]), ["s/A, round 1, loss: recorded 1.0, now 1.0000021"]),
        (changed(loss=[2.0, "nan"]), ["s/A, round 1, loss: recorded 1.0, now 'nan'"]),
        (changed(loss=[2.0, float("inf")]), ["s/A, round 1, loss: recorded 1.0, now inf"]),
        (changed(clients=[0, 4]), ["s/A, round 1, clients: recorded 5, now 4"]),
        (changed(bytes_up=[0, 101]), ["s/A, round 1, bytes_up: recorded 100, now 101"]),
        (changed(bytes_up=[0]), ["s/A, bytes_up: recorded [0, 100], now [0]"]),
        (changed(mse=[0.0, 0.0]), ["s/A, mse: recorded None, now [0.0, 0.0]"]),
        (
            changed(state={"w": [1.0, 2.0, 0.6]}),
            ["s/A, state.w: recorded [1.0, 2.0, 0.5], now [1.0, 2.0, 0.6]"],
        ),
        (changed(state={}), ["s/A, state.w: recorded [1.0, 2.0, 0.5], now None"]),
    ],
)
def test_differences_are_found_and_described(now, said):
    assert [str(d) for d in recorded.compare("s", "A", OLD, now)] == said


def test_rows_with_two_largest_probabilities_may_count_either_way():
    """Four rows: the second has a tie, the others are 0.2 and more apart."""
    given = np.array([[0.6, 0.4], [0.5, 0.5], [0.1, 0.9], [0.3, 0.7]])
    assert scenarios.doubtful(np.zeros(4), given) == 0.25
    assert scenarios.doubtful(np.zeros(2), np.array([1.0, 2.0])) == 0.0  # numbers to predict
    old = changed(accuracy=[0.5, 0.5], own_accuracy=[0.5, 0.5], own_accuracy_worst=[0.5, 0.5])

    def said(now, **doubtful):
        found = recorded.compare("s", "A", old, now | {"doubtful": doubtful})
        return [d.column for d in found]

    now = changed(accuracy=[0.75, 0.5], own_accuracy=[0.5, 0.25], own_accuracy_worst=[0.5, 0.0])
    assert said(now) == ["accuracy", "own_accuracy", "own_accuracy_worst"]
    assert said(now, doubtful=[0.25, 0.0], own_doubtful=[0.0, 0.25]) == []
    assert said(now, doubtful=[0.2, 0.0], own_doubtful=[0.0, 0.25]) == ["accuracy"]
    assert said(now, doubtful=[0.25, 0.0], own_doubtful=[0.25, 0.2]) == ["own_accuracy"]
    assert said(now, doubtful=[0.0, 0.25], own_doubtful=[0.0, 0.25]) == ["accuracy"]  # by round
    worse = changed(**now["columns"] | {"loss": [2.0, 0.9]})
    assert said(worse, doubtful=[1.0, 1.0], own_doubtful=[1.0, 1.0]) == ["loss"]
    assert "doubtful" not in recorded.merge("s", "A", None, now | {"doubtful": {}}, [])[0]


def test_fewer_bytes_are_no_failure():
    (found,) = recorded.compare("s", "A", OLD, changed(bytes_up=[0, 90]))
    assert found.kind == "fewer" and (found.recorded, found.now) == (100, 90)


def test_an_error_is_compared_by_its_class():
    old = {"error": {"class": "ConfigError", "message": "no"}}
    now = {"error": {"class": "ConfigError", "message": "No."}}
    (found,) = recorded.compare("s", "A", old, now)
    assert found.kind == "wording"
    now = {"error": {"class": "ReplyError", "message": "no"}}
    (found,) = recorded.compare("s", "A", old, now)
    assert str(found) == "s/A, error.class: recorded 'ConfigError', now 'ReplyError'"
    assert {d.kind for d in recorded.compare("s", "A", old, OLD)} == {"differs"}


def test_writing_needs_a_change_with_a_reason():
    now = changed(loss=[2.0, 0.9], bytes_up=[0, 90], clients=[0, 4], mse=[1.0, 1.0])
    change = recorded.Change("A*", "s", ("loss", "bytes_*"), "because")
    merged, refused = recorded.merge("s", "A", OLD, now, [])
    assert {d.column for d in refused} == {"loss", "bytes_up", "clients"}
    assert merged == changed(mse=[1.0, 1.0])  # what is new is recorded
    merged, refused = recorded.merge("s", "A", OLD, now, [change])
    assert [d.column for d in refused] == ["clients"]
    assert merged == changed(loss=[2.0, 0.9], bytes_up=[0, 90], mse=[1.0, 1.0])
    assert recorded.merge("t", "A", OLD, now, [change])[0] == changed(mse=[1.0, 1.0])
    assert recorded.merge("s", "A", OLD, changed(loss=[2.0, 1.0 + 1e-7]), [change])[0] == OLD
    assert recorded.merge("s", "A", None, OLD, []) == (OLD, [])


def test_a_run_that_becomes_an_error_is_written_only_if_all_of_it_is_covered():
    now = {"error": {"class": "ConfigError", "message": "no"}}
    assert recorded.merge("s", "A", OLD, now, [])[0] == OLD
    every = recorded.Change("A", "s", ("*",), "refused since it never worked")
    assert recorded.merge("s", "A", OLD, now, [every]) == (now, [])


@pytest.mark.parametrize(
    "text",
    [
        '[[change]]\nalgorithm = "A"\nscenario = "*"\ncolumns = ["loss"]\n',
        '[[change]]\nalgorithm = "A"\nscenario = "*"\ncolumns = ["loss"]\nreason = " "\n',
        '[[change]]\nalgorithm = "A"\nscenario = "*"\ncolumns = []\nreason = "r"\n',
        '[[change]]\nalgorithm = "A"\nscenario = "*"\ncolumns = "loss"\nreason = "r"\n',
    ],
)
def test_a_change_without_a_reason_is_refused(text, tmp_path: Path):
    path = tmp_path / "changes.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"changes.toml"):
        recorded.load_changes(path)


def test_files_hold_every_digit(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    run = changed(loss=[1 / 3, 2e-300], state={})
    recorded.save("s", {"A": run, "B": {"error": {"class": "E", "message": '"'}}})
    assert recorded.load("s") == {"A": run, "B": {"error": {"class": "E", "message": '"'}}}
