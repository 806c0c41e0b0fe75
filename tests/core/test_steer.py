"""Runs that stop before their last round, the best of their models, and losses that grow."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.core.steer import GROWTH, Watch
from foedus.storage import checkpoint as files

ALGORITHM = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)


def watch(stop=None, keep_best=None, classes=2, y=()):
    return Watch(stop, keep_best, (), np.array(y), classes, "try a smaller step")


def rows_of(name, values):
    """Rounds from 0; None: a round that was not evaluated."""
    return [{"round": t, **({} if v is None else {name: v})} for t, v in enumerate(values)]


def stops(stop, name, values):
    """The rounds after which patience is at an end."""
    seen = watch(stop)
    return [row["round"] for row in rows_of(name, values) if seen.see(row)[0]]


@pytest.mark.parametrize(
    ("stop", "name", "values", "due"),
    [
        (fd.Patience(2), "loss", [3.0, 2.0, 2.0, 2.1, 1.0], [3]),
        (fd.Patience(2), "loss", [3.0, 2.0, 2.1, 1.9, 1.95, 1.9], [5]),
        (fd.Patience(2, "accuracy"), "accuracy", [0.5, 0.4, 0.6, 0.6, 0.55], [4]),
        (fd.Patience(2, minimum=0.5), "loss", [3.0, 2.6, 2.5, 2.4], [2]),  # 2.5: not more than 0.5
        (fd.Patience(2, minimum=0.5), "loss", [3.0, 2.6, 2.49, 2.4], []),
        (fd.Patience(3), "loss", [3.0, None, None, None, 3.1, None, 2.0], [4]),
        (fd.Patience(1), "loss", [3.0, math.nan, 2.0], []),  # a metric that is undefined
        (fd.Patience(2, "gap", maximize=True), "gap", [1.0, 0.5, 0.4], [2]),
    ],
)
def test_patience_by_hand(stop, name, values, due):
    assert stops(stop, name, values) == due


def test_the_best_round_by_hand():
    seen = watch(keep_best="accuracy")
    better = [seen.see(row)[1] for row in rows_of("accuracy", [0.2, 0.5, None, 0.5, 0.4, 0.6])]
    assert better == [True, True, False, False, False, True]  # of equal ones the first
    assert (seen.best_round, seen.best_value) == (5, 0.6)


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_stops_and_keeps_the_best_model(fed):
    stop = fd.Patience(3, "accuracy", minimum=0.02)
    run = fd.run(ALGORITHM, fed, 200, stop=stop)
    accuracy = run.records.values("accuracy")
    assert len(accuracy) < 100
    assert run.notes == [
        f"stopped after round {len(accuracy) - 1}: accuracy has not improved on "
        f"{accuracy[-4]:.6g} (round {len(accuracy) - 4}) for 3 rounds"
    ]
    # the best is that of all rounds, by however little
    assert run.best.round == int(np.argmax(accuracy))
    assert run.best.prepared.score(fed.data.x_test, fed.data.y_test) == max(accuracy)


@pytest.mark.parametrize(
    "algorithm",
    [
        ALGORITHM,
        fd.Scaffold(fd.MLP(8), lr=0.3),
        fd.FedDyn(fd.Linear(), lr=0.1),
        fd.FFGB(fd.Forest(trees=2, depth=3)),
        fd.FedNewton(fd.Identity(), solver="cg"),
        fd.FedFW(fd.Linear(), fd.L1Ball(3.0)),
    ],
    ids=lambda a: type(a).__name__,
)
def test_the_best_model_is_that_of_its_round(fed, algorithm):
    """Later rounds do not write into what is kept: the model of round 2 is kept up to round 5."""

    class Second(fd.Callback):
        def row(self, row):
            return row["round"] == 2

    def early(y, p):
        calls.append(0)
        return 1.0 if len(calls) == 3 else 0.0

    calls = []
    run = fd.run(algorithm, fed, 5, participation=0.6, metrics=[early], keep_best="early")
    due = fd.run(algorithm, fed, 5, participation=0.6, callbacks=[Second()])
    assert run.best.round == 2 and len(due.records) == 3
    x = torch.from_numpy(fed.data.x_test)
    assert torch.equal(run.best.outputs(x), due.model.outputs(x))
    assert not torch.equal(run.best.outputs(x), run.model.outputs(x))


def test_nothing_is_kept_unless_it_is_asked_for(fed):
    run = fd.run(ALGORITHM, fed, 2)
    assert run.best_of is None
    with pytest.raises(fd.FoedusError, match=r"no best model was kept; use .*keep_best='accuracy'"):
        _ = run.best
    assert fd.run(ALGORITHM, fed, 2, stop=fd.Patience(9), keep_best=False).best_of is None
    assert fd.run(ALGORITHM, fed, 2, stop=fd.Patience(9)).best_of.metric == "loss"


def test_the_best_model_is_saved_with_the_run(fed, tmp_path):
    run = fd.run(fd.FedAvg(lr=2.0), fed, 6, keep_best="accuracy")
    assert run.best.round < 6  # or this shows little
    run.save(tmp_path / "run.safetensors")
    again = fd.Run.load(tmp_path / "run.safetensors")
    assert again.best.round == run.best.round
    x = fed.data.x_test
    assert np.array_equal(again.best.predict_proba(x), run.best.predict_proba(x))
    assert not np.array_equal(again.best.predict_proba(x), again.model.predict_proba(x))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_resumed_run_stops_where_it_would_have(fed, tmp_path, at, every):
    algorithm = fd.FedAvg(lr=2.0, batch_size=16)
    options = {"stop": fd.Patience(4, "accuracy"), "evaluate_every": every}
    whole = fd.run(algorithm, fed, 60, **options)
    assert at < len(whole.records) - 1 < 60
    path = tmp_path / "c.safetensors"
    fd.run(algorithm, fed, at, checkpoint=path, **options)
    for _ in range(2):  # what has stopped stays so
        run = fd.run(algorithm, fed, 60, checkpoint=path, resume=True, **options)
        dropped = run.history.drop(columns="seconds")
        assert dropped.equals(whole.history.drop(columns="seconds"))
        assert run.notes == whole.notes
        assert run.best.round == whole.best.round
        x = fed.data.x_test
        assert np.array_equal(run.best.predict_proba(x), whole.best.predict_proba(x))
    longer = fd.run(
        algorithm, fed, len(run.records) + 1, checkpoint=path, resume=True, evaluate_every=every
    )
    assert len(longer.records) == len(run.records) + 2  # without patience it goes on


def test_a_model_that_was_the_best_only_because_the_run_ended_is_not_kept(fed, tmp_path):
    path, options = tmp_path / "c.safetensors", {"keep_best": "accuracy", "evaluate_every": 5}
    first = fd.run(ALGORITHM, fed, 3, checkpoint=path, **options)
    assert first.best.round == 3
    assert files.read(path)[1]["best"]["round"] == 0
    run = fd.run(ALGORITHM, fed, 4, checkpoint=path, resume=True, **options)
    assert run.best.round == 4


def test_a_checkpoint_without_the_best_model_says_so(fed, tmp_path):
    path, algorithm = tmp_path / "c.safetensors", fd.FedAvg(lr=2.0)
    first = fd.run(algorithm, fed, 6, checkpoint=path)
    assert np.argmax(first.records.values("accuracy")) < 6
    run = fd.run(algorithm, fed, 7, checkpoint=path, resume=True, keep_best="accuracy")
    assert run.best.round == 7
    assert any("run.best is that of the rounds after 6" in note for note in run.notes)


def test_personal_models(fed):
    algorithm = fd.Independent(fd.Linear(), lr=0.1)
    stop = fd.Patience(2, "own_accuracy", minimum=0.05)
    run = fd.run(algorithm, fed, 50, stop=stop)
    assert len(run.records) < 50 and run.best_of is None
    with pytest.raises(fd.ConfigError, match="Independent has no global model to keep"):
        fd.run(algorithm, fed, 1, keep_best="own_accuracy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 5}, r"stop=5 must be fd.Patience\(rounds, metric\)"),
        ({"stop": fd.Patience(5, "acuracy")}, "'acuracy' is not measured; did you mean 'accuracy'"),
        ({"stop": fd.Patience(5, "auc")}, r"others need metrics=\[...\]"),
        ({"stop": fd.Patience(5, "accuracy_worst")}, "over clients need per_client=True"),
        ({"keep_best": True}, "keep_best=True must be a metric, such as 'accuracy', or False"),
        ({"keep_best": "mse"}, "keep_best: metric 'mse' is not measured"),
        ({"stop": fd.Patience(5), "evaluate_every": 0}, "stop: 'loss' needs evaluation: test rows"),
        ({"stop_on_growth": "yes"}, "stop_on_growth='yes' must be True or False"),
    ],
)
def test_bad_arguments(fed, options, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.run(ALGORITHM, fed, 1, **options)


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"rounds": 2, "minimum": -1.0}])
def test_bad_patience(settings):
    with pytest.raises(fd.ConfigError, match="must be"):
        fd.Patience(**settings)


# -- callbacks -------------------------------------------------------------------------------------


class Until(fd.Callback):
    """Stops, or raises, after a round."""

    def __init__(self, round, error=None):
        self.round, self.error, self.told = round, error, []

    def row(self, row):
        self.told.append(row["round"])
        if row["round"] < self.round:
            return False
        if self.error is not None:
            raise self.error
        return True


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "Until asked for it"),
        (fd.Stop("enough"), "enough"),
        (fd.Stop(), "Until asked for it"),
    ],
)
@pytest.mark.parametrize("at", [0, 3])
def test_a_callback_stops_a_run(fed, tmp_path, error, why, at):
    path, other = tmp_path / "c.safetensors", Until(99)
    options = {"checkpoint": path, "checkpoint_every": 10, "evaluate_every": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fd.run(ALGORITHM, fed, 6, callbacks=[Until(at, error), other], **options)
    assert run.notes == [f"stopped after round {at}: {why}"]
    assert other.told == list(range(at + 1))  # everybody is told of the round
    assert len(run.records) == at + 1
    assert "accuracy" in run.records.rows[-1]  # evaluated: it is the last
    again = fd.run(ALGORITHM, fed, 6, resume=True, **options)
    whole = fd.run(ALGORITHM, fed, 6, evaluate_every=5)
    drop = [r.history.drop(columns="seconds") for r in (again, whole)]
    assert drop[0].equals(drop[1]) and again.notes == []


def test_a_callback_that_stops_in_the_last_round_stops_nothing(fed):
    assert fd.run(ALGORITHM, fed, 2, callbacks=[Until(2)]).notes == []


def test_a_callback_may_stop_before_the_first_round(fed):
    class Never(fd.Callback):
        def start(self, name, settings, rows):
            raise fd.Stop("not today")

    run = fd.run(ALGORITHM, fed, 2, callbacks=[Never()])
    assert len(run.records) == 1 and run.notes == ["stopped after round 0: not today"]


def test_compare_stops_each_run(fed):
    found = fd.compare({"a": ALGORITHM, "b": fd.FedAvg(lr=0.01)}, fed, 5, callbacks=[Until(2)])
    assert [len(r.records) for runs in found.runs.values() for r in runs] == [3, 3]


class Meant(Exception):  # noqa: N818 - as TrialPruned
    pass


class Pruner(Until):
    raises = (Meant,)


def trial_pruned():
    """As Optuna defines it."""
    base = type("OptunaError", (Exception,), {"__module__": "optuna.exceptions"})
    return type("TrialPruned", (base,), {"__module__": "optuna.exceptions"})("trial 3 was pruned")


@pytest.mark.parametrize("call", ["run", "compare"])
@pytest.mark.parametrize(
    ("kind", "error"), [(Pruner, Meant("prune")), (Until, trial_pruned())], ids=["listed", "optuna"]
)
def test_exceptions_that_are_meant_reach_the_caller(fed, tmp_path, kind, error, call):
    other, path = Until(99), tmp_path / "c.safetensors"
    callbacks = [kind(2, error), other]
    given = {"callbacks": callbacks}
    start = {
        "run": lambda: fd.run(ALGORITHM, fed, 5, checkpoint=path, **given),
        "compare": lambda: fd.compare({"a": ALGORITHM}, fed, 5, **given),
    }[call]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(error)) as caught:
            start()
    assert caught.value is error
    assert other.told == [0, 1, 2]
    if call == "run":
        assert files.read(path)[1]["rounds_done"] == 2


def test_other_exceptions_are_still_failures(fed):
    with pytest.warns(fd.CallbackWarning, match="Until failed in round 1"):
        run = fd.run(ALGORITHM, fed, 3, callbacks=[Until(1, Meant("no"))])
    assert len(run.records) == 4


# -- growth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "y", "name", "values", "grown"),
    [
        (2, (), "loss", [0.7, 690.0, 700.1], 2),  # log 2 = 0.693
        (2, (), "loss", [0.7, 690.0], None),
        (2, (), "own_loss", [0.7, 701.0], 1),
        (2, (), "loss", [1e-6, 600.0, 694.0], 2),  # a warm start
        (None, [1.0, 3.0], "mse", [1e-3, 4999.0], None),  # the mean of y^2 is 5
        (None, [1.0, 3.0], "mse", [1e-3, 5001.0], 1),
        (None, [1.0, 3.0], "mse", [7.0, 6999.0, 7001.0], 2),
    ],
)
def test_growth_by_hand(classes, y, name, values, grown):
    assert GROWTH == 1000
    seen = watch(classes=classes, y=y)
    found = None
    for row in rows_of(name, values):
        seen.see(row)
        found = row["round"] if found is None and seen.grown else found
    assert found == grown
    if grown:
        assert f"round {grown}: {name} is " in seen.grown and "try a smaller step" in seen.grown


@pytest.fixture(scope="module")
def diabetes():
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = x.astype(np.float32), y.astype(np.float32)
    data = fd.Data.from_arrays(x[:330], y[:330], x[330:], y[330:])
    return fd.split(data, "iid", clients=5, seed=0)


def test_a_step_that_is_too_large_is_noticed(diabetes):
    """FFGB with a step of 10 on a squared loss: 2.8e4 becomes more than 1e15."""
    algorithm = fd.FFGB(fd.Forest(trees=2, depth=3), step=10.0)
    with pytest.warns(fd.GrowthWarning) as caught:
        run = fd.run(algorithm, diabetes, 14)
    assert len(caught) == 1 and caught[0].filename == __file__
    mse = run.records.values("mse")
    assert mse[-1] > 1e15 and len(mse) == 15
    at = next(t for t, v in enumerate(mse) if v > 1000 * max(mse[0], 0))
    (note,) = run.notes
    assert note.startswith(f"round {at}: mse is ") and note.endswith("diverge; try a smaller step")
    assert str(caught[0].message) == f"{note} (stop_on_growth=True ends such a run)"
    with pytest.warns(fd.GrowthWarning):
        stopped = fd.run(algorithm, diabetes, 30, stop_on_growth=True)
    assert stopped.records.values("mse") == mse[: at + 1]
    assert stopped.notes == [note, f"stopped after round {at}: the loss has grown"]


def test_a_resumed_run_does_not_warn_again(diabetes, tmp_path):
    algorithm, path = fd.FFGB(fd.Forest(trees=2, depth=3), step=10.0), tmp_path / "c.safetensors"
    with pytest.warns(fd.GrowthWarning):
        fd.run(algorithm, diabetes, 12, checkpoint=path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fd.run(algorithm, diabetes, 13, checkpoint=path, resume=True)
        assert len(run.notes) == 1 and len(run.records) == 14
        ended = fd.run(algorithm, diabetes, 30, checkpoint=path, resume=True, stop_on_growth=True)
        assert len(ended.records) == 14
