"""Callbacks of `fd.run`: what they are told and when, resumed runs, and that none of them can harm
a run.
"""

from __future__ import annotations

import pytest

import foedus as fd
from foedus.storage import checkpoint as files

ALGORITHM = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)


class Notes(fd.Callback):
    """A tracker that keeps all it is told; `fails` is the name of the method that raises."""

    def __init__(self, fails: str = "", error: BaseException | None = None):
        self.calls, self.fails, self.error = [], fails, error or OSError("no space left")

    def note(self, name, *what):
        self.calls.append((name, *what))
        if name == self.fails:
            raise self.error

    def start(self, name, settings, rows):
        self.note("start", name, settings, rows)

    def row(self, row):
        self.note("row", row)

    def end(self, run, error):
        self.note("end", run, error)

    @property
    def rows(self):
        return [call[1] for call in self.calls if call[0] == "row"]

    @property
    def names(self):
        return [call[0] for call in self.calls]


def test_the_order_of_calls(fed):
    notes = Notes()
    run = fd.run(ALGORITHM, fed, 3, seed=5, callbacks=[notes])
    assert notes.names == ["start", "row", "row", "row", "row", "end"]
    assert notes.calls[0][1:] == ("FedAvg-seed5", run.settings, [])
    assert notes.rows == run.records.rows
    assert notes.calls[-1][1:] == (run, None)


def test_a_callback_may_define_one_method_and_gets_copies(fed):
    class Spoil(fd.Callback):
        def start(self, name, settings, rows):
            settings["algorithm"]["lr"] = 7

        def row(self, row):
            row.clear()

    plain, spoilt = fd.run(ALGORITHM, fed, 2), fd.run(ALGORITHM, fed, 2, callbacks=[Spoil()])
    assert spoilt.settings == plain.settings
    assert [r["loss"] for r in spoilt.records.rows] == [r["loss"] for r in plain.records.rows]


def test_callbacks_of_a_resumed_run_see_every_round_once(fed, tmp_path):
    path = tmp_path / "c.safetensors"
    first, second = Notes(), Notes()
    fd.run(ALGORITHM, fed, 3, checkpoint=path, callbacks=[first])
    run = fd.run(ALGORITHM, fed, 5, checkpoint=path, resume=True, callbacks=[second])
    assert second.calls[0][3] == run.records.rows[:4]
    assert first.rows == run.records.rows[:4]
    assert second.rows == run.records.rows[4:]
    done = Notes()
    fd.run(ALGORITHM, fed, 5, checkpoint=path, resume=True, callbacks=[done])
    assert done.names == ["start", "end"]
    assert done.calls[0][3] == run.records.rows


def test_an_evaluation_of_the_end_only_is_not_passed_on_resume(fed, tmp_path):
    path = tmp_path / "c.safetensors"
    fd.run(ALGORITHM, fed, 3, checkpoint=path, evaluate_every=2)
    notes = Notes()
    fd.run(ALGORITHM, fed, 4, checkpoint=path, evaluate_every=2, resume=True, callbacks=[notes])
    assert ["loss" in row for row in notes.calls[0][3]] == [True, False, True, False]


def test_rows_follow_the_checkpoint(fed, tmp_path):
    path = tmp_path / "c.safetensors"

    class Look(fd.Callback):
        def row(self, row):
            _, meta = files.read(path)
            seen.append((row["round"], meta["rounds_done"]))

    seen = []
    fd.run(ALGORITHM, fed, 3, checkpoint=path, callbacks=[Look()])
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("method", ["start", "row", "end"])
def test_a_failure_warns_once_and_costs_nothing(fed, tmp_path, method):
    path = tmp_path / "c.safetensors"
    bad, good = Notes(fails=method), Notes()
    with pytest.warns(fd.CallbackWarning, match="Notes failed .*no space left") as caught:
        run = fd.run(ALGORITHM, fed, 3, checkpoint=path, callbacks=[bad, good])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert bad.names.count(method) == 1 and bad.names[-1] == method
    assert good.names == ["start", "row", "row", "row", "row", "end"]
    assert run.records.rows[-1]["round"] == 3
    # What was missed is told again, and the run is where it was.
    again = Notes()
    fd.run(ALGORITHM, fed, 3, checkpoint=path, resume=True, callbacks=[again])
    assert again.calls[0][3] == run.records.rows


def test_an_interrupt_is_no_failure(fed, tmp_path):
    path, other = tmp_path / "c.safetensors", Notes()
    with pytest.raises(KeyboardInterrupt):
        fd.run(
            ALGORITHM, fed, 3, checkpoint=path, callbacks=[other, Notes("row", KeyboardInterrupt())]
        )
    assert isinstance(other.calls[-1][2], KeyboardInterrupt)
    assert len(fd.run(ALGORITHM, fed, 3, checkpoint=path, resume=True).records) == 4


def test_callbacks_see_divergence_and_the_rounds_before_it(fed):
    notes = Notes()
    with pytest.raises(fd.DivergenceError) as caught:
        fd.run(fd.FedAvg(fd.MLP(8), lr=1e30), fed, 3, callbacks=[notes])
    name, run, error = notes.calls[-1]
    assert (name, run, error) == ("end", caught.value.run, caught.value)
    assert notes.rows == run.records.rows


def test_what_never_began_has_no_end(fed, tmp_path):
    path, notes = tmp_path / "c.safetensors", Notes()
    fd.run(ALGORITHM, fed, 1, checkpoint=path)
    with pytest.raises(fd.CheckpointError, match="pass resume=True"):
        fd.run(ALGORITHM, fed, 1, checkpoint=path, callbacks=[notes])
    assert notes.calls == []


def test_compare_passes_the_names_of_its_table_to_callbacks(fed):
    notes = Notes()
    cmp = fd.compare(
        {"plain": ALGORITHM, "slow, really": fd.FedAvg(lr=0.01)}, fed, 1, seeds=2, callbacks=[notes]
    )
    started = [call[1] for call in notes.calls if call[0] == "start"]
    assert started == ["plain-seed0", "plain-seed1", "slow, really-seed0", "slow, really-seed1"]
    assert notes.rows == [
        row for runs in cmp.runs.values() for run in runs for row in run.records.rows
    ]
    with pytest.warns(fd.CallbackWarning, match="^Notes failed"):
        fd.compare({"plain": ALGORITHM}, fed, 1, callbacks=[Notes(fails="start")])


@pytest.mark.parametrize("call", ["run", "compare"])
@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ("runs", r"callbacks='runs' must be a list of callbacks"),
        (Notes(), "must be a list of callbacks"),
        (
            [print],
            r"callbacks\[0\] must be a fd.Callback such as fd.TensorBoard\('runs'\), not <built-in "
            r"function print>",
        ),
        ([Notes(), Notes], r"callbacks\[1\] must be .* not the class Notes: add parentheses"),
    ],
)
def test_bad_callbacks(fed, call, callbacks, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.run(ALGORITHM, fed, 1, callbacks=callbacks) if call == "run" else fd.compare(
            {"a": ALGORITHM}, fed, 1, callbacks=callbacks
        )
