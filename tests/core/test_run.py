"""`fd.run`: participation, evaluation, stopping, checkpoints, saved runs, and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foedus as fd
from foedus.base import random, tree
from foedus.core.participation import cohort
from foedus.storage import checkpoint

ALGORITHM = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)


# -- participation ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.floats(0.001, 1.0), st.integers(0, 2**40))
def test_a_fraction_is_drawn_without_replacement(total, fraction, seed):
    got = cohort(fraction, total, random.key(seed)).tolist()
    assert len(got) == max(1, int(np.floor(fraction * total + 0.5)))
    assert got == sorted(set(got))
    assert 0 <= got[0] <= got[-1] < total


def test_fraction_is_fair():
    counts = np.zeros(20)
    for t in range(2000):
        counts[cohort(0.25, 20, random.fold(random.key(1), t))] += 1
    # 2000 draws of 5 from 20: mean 500, standard deviation 19.4.
    assert np.abs(counts - 500).max() < 5 * 19.4


def test_poisson_is_independent_with_probability_p():
    sizes = np.array(
        [len(cohort(fd.Poisson(0.3), 50, random.fold(random.key(2), t))) for t in range(2000)]
    )
    assert sizes.mean() == pytest.approx(15, abs=5 * (50 * 0.21 / 2000) ** 0.5)
    assert sizes.var() == pytest.approx(50 * 0.21, rel=0.2)


def test_a_round_without_clients_changes_nothing(fed):
    run = fd.run(ALGORITHM, fed, 8, participation=fd.Poisson(0.1), seed=3)
    clients = run.history["clients"].to_numpy()
    empty = [t for t in range(1, 9) if clients[t] == 0]
    assert empty, "choose a seed with an empty round"
    for t in empty:
        assert run.history["loss"][t] == run.history["loss"][t - 1]
        assert run.history["bytes_up"][t] == run.history["bytes_up"][t - 1]


# -- history and evaluation ------------------------------------------------------------------------


def test_history_of_a_run(fed):
    run = fd.run(ALGORITHM, fed, 3, participation=0.4)
    h = run.history
    assert h["round"].tolist() == [0, 1, 2, 3]
    assert list(h.columns[:5]) == ["round", "seconds", "bytes_up", "bytes_down", "messages_up"]
    assert h["messages_up"].tolist() == [0, 2, 4, 6]
    one = h["bytes_up"][1] / 2
    assert h["bytes_up"].tolist() == [0, 2 * one, 4 * one, 6 * one]
    assert one == pytest.approx(4 * 650, rel=0.05)
    assert (np.diff(h["seconds"]) > 0).all()
    assert h["loss"][0] == pytest.approx(np.log(10), rel=1e-4)


def test_evaluation_is_that_of_the_model(fed):
    run = fd.run(ALGORITHM, fed, 3)
    data = fed.data
    p = run.model.predict_proba(data.x_test)
    assert run.history["accuracy"].iloc[-1] == pytest.approx(
        (run.model.predict(data.x_test) == data.y_test).mean()
    )
    assert run.history["loss"].iloc[-1] == pytest.approx(
        -np.log(p[np.arange(len(p)), data.y_test]).mean(), rel=1e-4
    )
    assert isinstance(p, np.ndarray)
    assert p.shape == (len(data.x_test), 10)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)


def test_regression_is_measured_by_mse(values):
    run = fd.run(fd.FedAvg(lr=0.05, batch_size=8), values, 20)
    x, y = values.data.x_test, values.data.y_test
    assert run.history["mse"].iloc[-1] == pytest.approx(
        ((run.model.predict(x) - y) ** 2).mean(), rel=1e-4
    )
    assert run.model.predict(x).shape == y.shape
    with pytest.raises(AttributeError, match="for classification"):
        run.model.predict_proba(x)


def test_personal_models_are_measured_on_their_own_rows(fed):
    run = fd.run(fd.Independent(lr=0.1), fed, 3)
    hits = rows = 0
    everywhere = []
    for i in range(len(fed)):
        own = fed.test_client_rows(i)
        model = run.model_of(i)
        hits += (
            (model.predict(fed.data.x_test[own]) == fed.data.y_test[own]).sum() if len(own) else 0
        )
        rows += len(own)
        everywhere.append((model.predict(fed.data.x_test) == fed.data.y_test).mean())
    assert run.history["own_accuracy"].iloc[-1] == pytest.approx(hits / rows)
    assert run.history["accuracy"].iloc[-1] == pytest.approx(np.mean(everywhere))
    assert run.history["accuracy_worst"].iloc[-1] == pytest.approx(np.min(everywhere))
    with pytest.raises(fd.FoedusError, match="no global model"):
        _ = run.model
    with pytest.raises(fd.FoedusError, match="no client 77"):
        run.model_of(77)


@pytest.mark.parametrize("algorithm", [fd.FedAvg(lr=0.1), fd.Independent(lr=0.1)])
def test_per_client_adds_up(fed, algorithm):
    run = fd.run(algorithm, fed, 2)
    table = run.per_client()
    assert table["client"].tolist() == list(range(len(fed)))
    assert table["test_rows"].tolist() == [len(fed.test_client_rows(i)) for i in range(len(fed))]
    column = "own_accuracy" if algorithm.personal else "accuracy"
    some = table[table["test_rows"] > 0]
    assert np.average(some["accuracy"], weights=some["test_rows"]) == pytest.approx(
        run.history[column].iloc[-1]
    )


@pytest.mark.parametrize("algorithm", [fd.FedAvg(lr=0.1), fd.Independent(lr=0.1)])
def test_per_client_goes_by_id(fed, algorithm):
    tables = [
        fd.run(algorithm, f, 2, evaluate_every=0).per_client()
        for f in (fed, fed.select([3, 0, 4, 1, 2]))
    ]
    assert tables[1]["test_rows"].tolist() == fed.test_sizes.tolist()
    np.testing.assert_allclose(tables[0].to_numpy(), tables[1].to_numpy(), rtol=1e-5)


def test_evaluate_every_and_never(fed):
    h = fd.run(ALGORITHM, fed, 5, evaluate_every=2).history
    assert h["accuracy"].notna().tolist() == [True, False, True, False, True, True]
    assert "accuracy" not in fd.run(ALGORITHM, fed, 2, evaluate_every=0).history


def test_stops_at_the_target(fed, values):
    whole = fd.run(ALGORITHM, fed, 20)
    target = whole.history["accuracy"][5]
    first = int(np.argmax(whole.history["accuracy"] >= target))
    assert len(fd.run(ALGORITHM, fed, 20, target=target).history) == first + 1
    mse = fd.run(fd.FedAvg(lr=0.05), values, 100, target=0.5).history["mse"]
    assert mse.iloc[-1] <= 0.5 < mse.iloc[-2]


@dataclass(frozen=True)
class Logs(fd.FedAvg):
    def round(self, clients, state):
        clients.log(cohort=len(clients), half=torch.tensor(0.5))
        return super().round(clients, state)


def test_an_algorithm_adds_columns(fed):
    h = fd.run(Logs(lr=0.1), fed, 2).history
    assert h["cohort"].tolist()[1:] == [5.0, 5.0]
    assert h["half"].tolist()[1:] == [0.5, 0.5]
    assert np.isnan(h["cohort"][0])


# -- checkpoints and saved runs --------------------------------------------------------------------


def test_resume_goes_on_where_it_stopped(fed, tmp_path):
    path = tmp_path / "c.safetensors"
    fd.run(fd.Scaffold(lr=0.1), fed, 5, participation=0.5, checkpoint=path, checkpoint_every=2)
    assert checkpoint.read(path)[1]["rounds_done"] == 5
    done = fd.run(fd.Scaffold(lr=0.1), fed, 5, participation=0.5, checkpoint=path, resume=True)
    assert len(done.history) == 6


def test_a_resumed_run_has_the_numbers_of_one_that_was_never_stopped(fed, tmp_path):
    """Three rounds and three more: every column of the history (but seconds), the server's state
    and the clients'.
    """
    options = {"participation": 0.5, "evaluate_every": 2}
    whole = fd.run(fd.Scaffold(lr=0.1), fed, 6, **options)
    fd.run(fd.Scaffold(lr=0.1), fed, 3, checkpoint=tmp_path, **options)
    parts = fd.run(fd.Scaffold(lr=0.1), fed, 6, checkpoint=tmp_path, resume=True, **options)
    seconds = ["seconds"]
    assert whole.history.drop(columns=seconds).equals(parts.history.drop(columns=seconds))
    one, other = (tree.leaves((run.state.w, run.state.c, run.clients)) for run in (whole, parts))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_resume_refuses_other_rows(fed, tmp_path):
    """The settings are the same; who holds which rows, and the rows themselves, have checksums."""
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    other = dataclasses.replace(fed, data=dataclasses.replace(fed.data, x_train=-fed.data.x_train))
    with pytest.raises(fd.CheckpointError, match="the data of the federation differ"):
        fd.run(ALGORITHM, other, 2, checkpoint=tmp_path, resume=True)
    with pytest.raises(fd.CheckpointError, match="the clients of the federation differ"):
        fd.run(ALGORITHM, fed.select([1, 0, 2, 3, 4]), 2, checkpoint=tmp_path, resume=True)


def test_resume_refuses_other_test_rows(fed, tmp_path):
    """Rows before and after the stop would be scored on different rows."""
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    others = [
        dataclasses.replace(fed, data=dataclasses.replace(fed.data, x_test=-fed.data.x_test)),
        dataclasses.replace(fed, data=dataclasses.replace(fed.data, y_test=9 - fed.data.y_test)),
        dataclasses.replace(fed, test_rows=fed.test_rows[::-1].copy()),  # who holds which
    ]
    for other in others:
        with pytest.raises(fd.CheckpointError, match="the test rows of the federation differ"):
            fd.run(ALGORITHM, other, 2, checkpoint=tmp_path, resume=True)
    assert len(fd.run(ALGORITHM, fed, 2, checkpoint=tmp_path, resume=True).history) == 3


def test_checkpoints_without_a_checksum_of_the_test_rows_are_still_resumed(fed, tmp_path):
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    trees, meta = checkpoint.read(path)
    del meta["fingerprint"]["test rows"]
    checkpoint.write(path, trees, meta)
    assert len(fd.run(ALGORITHM, fed, 2, checkpoint=tmp_path, resume=True).history) == 3


def test_resume_needs_a_checkpoint(fed, tmp_path):
    path = tmp_path / "new" / "c.safetensors"
    with pytest.raises(
        fd.CheckpointError, match=rf'^{path}: there is no checkpoint .*resume="auto"'
    ):
        fd.run(ALGORITHM, fed, 2, checkpoint=path, resume=True)
    assert not path.parent.exists()
    for wrong in ("yes", 1, None):
        with pytest.raises(fd.ConfigError, match=f"resume={wrong!r} must be True, False or 'auto'"):
            fd.run(ALGORITHM, fed, 2, checkpoint=path, resume=wrong)
    with pytest.raises(fd.ConfigError, match="resume='auto' needs checkpoint=PATH"):
        fd.run(ALGORITHM, fed, 2, resume="auto")


def test_resume_auto_begins_and_goes_on(fed, tmp_path):
    path = tmp_path / "new" / "c.safetensors"
    fd.run(ALGORITHM, fed, 1, checkpoint=path, resume="auto")
    rows = []

    class Rows(fd.Callback):
        def row(self, row):
            rows.append(row["round"])

    run = fd.run(ALGORITHM, fed, 3, checkpoint=path, resume="auto", callbacks=[Rows()])
    assert rows == [2, 3] and len(run.history) == 4


def test_a_checkpoint_in_a_folder(fed, tmp_path):
    run = fd.run(ALGORITHM, fed, 2, checkpoint=tmp_path / "new" / "c.safetensors")
    assert len(run.history) == 3
    assert (tmp_path / "new" / "c.safetensors").is_file()
    assert (tmp_path / "folder").exists() is False
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path / "folder")
    assert (tmp_path / "folder" / "checkpoint.safetensors").is_file()


def test_resume_refuses_another_run(fed, tmp_path):
    fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    with pytest.raises(
        fd.CheckpointError, match=r"algorithm\.lr was 0\.1, now 0\.2; seed was 0, now 1"
    ):
        fd.run(
            fd.FedAvg(fd.Linear(), lr=0.2, batch_size=16),
            fed,
            2,
            seed=1,
            checkpoint=tmp_path,
            resume=True,
        )


def test_saved_run_comes_back(fed, tmp_path):
    run = fd.run(fd.FedAvg(fd.MLP((8, 5)), lr=0.1), fed, 2)
    run.save(tmp_path / "run.safetensors")
    again = fd.Run.load(tmp_path / "run.safetensors")
    assert again.algorithm == run.algorithm
    np.testing.assert_array_equal(
        again.model.predict(fed.data.x_test), run.model.predict(fed.data.x_test)
    )
    assert again.history.equals(run.history)
    assert again.settings == run.settings
    assert json.dumps(again.settings)


def test_a_saved_run_loads_in_a_new_process(fed, tmp_path):
    fd.run(fd.FedAvg(fd.MLP(3)), fed, 1).save(tmp_path / "run.safetensors")
    code = (
        "import foedus as fd; "
        f"print(fd.Run.load({str(tmp_path / 'run.safetensors')!r}).algorithm.model)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "MLP(hidden=(3,))"


def test_saved_personal_models_come_back(fed, tmp_path):
    run = fd.run(fd.Independent(lr=0.1), fed, 2)
    run.save(tmp_path / "run.safetensors")
    again = fd.Run.load(tmp_path / "run.safetensors")
    for i in (0, 3):
        np.testing.assert_array_equal(
            again.model_of(i).predict_proba(fed.data.x_test),
            run.model_of(i).predict_proba(fed.data.x_test),
        )


def test_a_module_cannot_come_from_a_file(fed, tmp_path):
    algorithm = fd.FedAvg(nn.Linear(64, 10), lr=0.1)
    run = fd.run(algorithm, fed, 1)
    run.save(tmp_path / "run.safetensors")
    with pytest.raises(fd.CheckpointError, match="pass the algorithm"):
        fd.Run.load(tmp_path / "run.safetensors")
    again = fd.Run.load(tmp_path / "run.safetensors", algorithm=algorithm)
    np.testing.assert_array_equal(
        again.model.predict(fed.data.x_test), run.model.predict(fed.data.x_test)
    )


def test_loading_never_builds_unknown_types(tmp_path):
    meta = {
        "kind": "run",
        "settings": {"algorithm": {"type": "os.system", "command": "touch owned"}},
        "history": [],
        "spec": {"shape": [1], "classes": 2, "outputs": 2},
    }
    checkpoint.write(tmp_path / "bad.safetensors", {"state": fd.State()}, meta)
    with pytest.raises(fd.CheckpointError, match=r"type 'os\.system' is unknown"):
        fd.Run.load(tmp_path / "bad.safetensors")


def test_runs_and_checkpoints_are_distinguished(fed, tmp_path):
    run = fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path)
    with pytest.raises(fd.CheckpointError, match="resume=True"):
        fd.Run.load(tmp_path / "checkpoint.safetensors")
    run.save(tmp_path / "checkpoint.safetensors")
    with pytest.raises(fd.CheckpointError, match="not a checkpoint"):
        fd.run(ALGORITHM, fed, 1, checkpoint=tmp_path, resume=True)
    with pytest.raises(fd.CheckpointError, match="no such file"):
        fd.Run.load(tmp_path / "nothing")


@dataclass(frozen=True)
class Interrupted(fd.FedAvg):
    """Sends itself a Ctrl-C in round 2."""

    def round(self, clients, state):
        if clients.round == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().round(clients, state)


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background, which
    ignores it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_a_usable_checkpoint(fed, tmp_path):
    algorithm = Interrupted(lr=0.1)
    with pytest.raises(KeyboardInterrupt, match="stopped after round 2"):
        fd.run(algorithm, fed, 5, participation=0.5, checkpoint=tmp_path, checkpoint_every=100)
    assert checkpoint.read(tmp_path / "checkpoint.safetensors")[1]["rounds_done"] == 2
    resumed = fd.run(algorithm, fed, 5, participation=0.5, checkpoint=tmp_path, resume=True)
    plain = fd.run(fd.FedAvg(lr=0.1), fed, 5, participation=0.5)
    columns = [c for c in plain.history if c != "seconds"]
    assert resumed.history[columns].equals(plain.history[columns])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_without_a_checkpoint_stops_at_once(fed):
    with pytest.raises(KeyboardInterrupt):
        fd.run(Interrupted(lr=0.1), fed, 5)


# -- divergence ------------------------------------------------------------------------------------


def test_divergence_stops_the_run_and_keeps_the_last_good_state(values, tmp_path):
    with pytest.raises(
        fd.DivergenceError, match=r"round \d+: .* is (not finite|inf|nan)"
    ) as caught:
        fd.run(fd.FedAvg(lr=50.0, batch_size=4, epochs=3), values, 50, checkpoint=tmp_path)
    error = caught.value
    assert error.clients
    assert len(error.run.history) == error.round
    assert "last good state" in "".join(error.__notes__)
    trees, meta = checkpoint.read(tmp_path / "checkpoint.safetensors")
    assert meta["rounds_done"] == error.round - 1
    assert torch.isfinite(trees["state"].w["weight"]).all()


@pytest.mark.parametrize("batch", [True, False])
def test_a_client_alone_that_diverges_is_named(values, batch):
    """Nothing is sent, yet the model that is no longer finite is found, with or without
    evaluation.
    """
    x = values.data.x_train.copy()
    x[values.client_rows(2)] *= 1e20
    data = fd.Data.from_arrays(x, values.data.y_train)
    fed = dataclasses.replace(
        values, data=data, test_rows=values.test_rows[:0], test_offsets=values.test_offsets * 0
    )
    with pytest.raises(fd.DivergenceError, match="the state of client 2 is not finite"):
        fd.run(fd.Independent(lr=0.1), fed, 5, engine=fd.Local(batch=batch), evaluate_every=0)


def test_reference_is_not_quantized(fed):
    plain, coarse = (fd.run(fd.Central(lr=0.1), fed, 1, quantise=q) for q in (None, "int8"))
    assert torch.equal(plain.state.w["weight"], coarse.state.w["weight"])


def test_a_client_that_never_took_part_has_no_model(fed):
    run = fd.run(fd.Independent(lr=0.1), fed, 1, participation=0.2, evaluate_every=0)
    absent = next(i for i in range(5) if run.clients["states"]["slot"][i] < 0)
    with pytest.raises(fd.FoedusError, match="has not taken part"):
        run.model_of(absent)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": fd.FedAvg}, r"not FedAvg \(the class: add parentheses\)"),
        ({"algorithm": "FedAvg"}, "algorithm must be a foedus algorithm"),
        ({"fed": "digits"}, "fed must be a federation"),
        ({"rounds": -1}, "rounds=-1"),
        ({"rounds": 2.5}, "rounds=2.5"),
        ({"participation": 0}, "participation=0 must be a fraction"),
        ({"participation": 1.5}, "participation=1.5"),
        ({"evaluate_every": -1}, "evaluate_every=-1"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"quantise": "int4"}, "quantise='int4'"),
        ({"resume": True}, "resume=True needs checkpoint"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": None}, "seed=None"),
        ({"seed": -1}, "seed=-1"),
        ({"engine": "local"}, r"engine='local' must be an engine such as fd.Local\(\)"),
        ({"engine": fd.Local}, "must be an engine"),
        ({"target": 90}, "target=90 is an accuracy"),
        ({"target": "0.9"}, "target='0.9'"),
        ({"target": 0.9, "evaluate_every": 0}, "needs evaluation"),
    ],
)
def test_bad_arguments(fed, change, message):
    options = {"algorithm": ALGORITHM, "fed": fed, "rounds": 1} | change
    with pytest.raises(fd.ConfigError, match=message):
        fd.run(**options)
    with pytest.raises(fd.ConfigError, match="Poisson"):
        fd.Poisson(0.0)


def test_prediction_of_the_wrong_shape(fed):
    run = fd.run(ALGORITHM, fed, 1)
    with pytest.raises(
        ValueError, match=r"shape \(2, 63\), the model expects rows of shape \(64,\)"
    ):
        run.model.predict(np.zeros((2, 63), np.float32))
    with pytest.raises(fd.DataError, match=r"for a single row pass x\[None\]"):
        run.model.predict(np.zeros(64))
    assert run.model.predict(np.zeros((0, 64), np.float32)).shape == (0,)
    assert run.model.predict(np.zeros((2, 64), int)).shape == (2,)


# -- import and progress ---------------------------------------------------------------------------


def test_import_is_light():
    code = (
        "import sys, foedus; [getattr(foedus, n) for n in foedus.__all__];"
        "heavy = [m for m in ('sklearn', 'matplotlib', 'ray', 'flwr', 'pandas', 'rich', 'typer', "
        "'scipy') if m in sys.modules];"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_is_shown_on_a_terminal_or_if_asked_for(fed, capsys):
    fd.run(ALGORITHM, fed, 1)
    assert capsys.readouterr() == ("", "")
    fd.run(ALGORITHM, fed, 1, progress=True)
    shown = capsys.readouterr().err
    assert "FedAvg" in shown
    assert "accuracy" in shown
    assert "MB" in shown


# -- nothing to test on ----------------------------------------------------------------------------


def without_tests():
    x = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]])
    return fd.Federation.from_clients([(x[:4], [0, 1, 0, 1]), (x[4:], [0, 1, 0, 1])])


def test_a_run_without_test_rows_says_so_and_what_to_do():
    with pytest.warns(UserWarning, match=r"no test rows.*fed.holdout\(0.25\)") as told:
        run = fd.run(ALGORITHM, without_tests(), 2)
    assert len(told) == 1 and told[0].filename == __file__
    assert len(run.notes) == 1 and "test=0.25 in fd.load" in run.notes[0]
    assert "accuracy" not in run.history


def test_a_run_that_goes_on_without_test_rows_notes_it_once(tmp_path):
    path = tmp_path / "c.safetensors"
    for rounds in (1, 2):
        with pytest.warns(UserWarning, match="no test rows"):
            run = fd.run(ALGORITHM, without_tests(), rounds, checkpoint=path, resume="auto")
    assert [note[:12] for note in run.notes] == ["no test rows"]


@dataclass(frozen=True)
class OnlyCounts(fd.Algorithm):
    """Makes no model."""

    def start(self, clients):
        return tree.State(n=torch.zeros(()))

    def round(self, clients, state):
        return state


@pytest.mark.filterwarnings("error:no test rows")
def test_no_warning_without_evaluation_or_with_test_rows():
    fed = without_tests()
    for run in (
        fd.run(ALGORITHM, fed, 1, evaluate_every=0),
        fd.run(OnlyCounts(), fed, 1),
        fd.run(ALGORITHM, fed.holdout(0.25), 1),
    ):
        assert run.notes == []
