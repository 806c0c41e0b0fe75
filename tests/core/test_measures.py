"""Metrics in the history of a run, and scores of every client in every round."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import foedus as fd
from foedus.core import measures
from foedus.engines.local import LocalSession
from tests.core.test_weights import weighted

ALGORITHM = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)
CLASSES = ["auc", "balanced_accuracy", "f1", "log_loss", "brier", "ece"]


@pytest.fixture(scope="module")
def sick():
    """Two classes, five clients of unequal size, ids out of order; client 30 has one class only,
    client 11 no test rows.
    """
    rng = np.random.default_rng(4)
    sizes, tests = [30, 12, 25, 9, 40], [20, 0, 6, 9, 31]
    x = rng.standard_normal((sum(sizes), 5)).astype(np.float32)
    z = rng.standard_normal((sum(tests), 5)).astype(np.float32)
    slope = np.array([1.0, -1.0, 0.5, 0.0, 0.3])
    y, u = ((v @ slope + rng.standard_normal(len(v)) > 0).astype(np.int64) for v in (x, z))
    u[20:26] = 1  # all of client 30's
    data = fd.Data.from_arrays(x, y, z, u, classes=2)
    offsets, test_offsets = (np.concatenate(([0], np.cumsum(n))) for n in (sizes, tests))
    ids = np.array([21, 11, 30, 2, 13])
    return fd.Federation(data, np.arange(len(x)), offsets, np.arange(len(z)), test_offsets, ids)


def clients_of(fed):
    """(id, its test rows), in order of ids."""
    for place in np.argsort(fed.ids):
        yield int(fed.ids[place]), fed.test_client_rows(int(place))


def test_metrics_are_columns_of_the_history(sick):
    def positives(y, p):
        assert y.dtype == np.int64 and p.shape == (len(y), 2) and p.dtype == np.float64
        return float((p[:, 1] > 0.5).mean())

    run = fd.run(ALGORITHM, sick, 3, metrics=[*CLASSES, positives], participation=0.5)
    data, p = sick.data, run.model.predict_proba(sick.data.x_test)
    last = run.history.iloc[-1]
    assert last["auc"] == pytest.approx(sk.roc_auc_score(data.y_test, p[:, 1]))
    assert last["log_loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert last["f1"] == pytest.approx(sk.f1_score(data.y_test, p[:, 1] > 0.5))
    assert last["positives"] == (p[:, 1] > 0.5).mean()
    assert run.history[CLASSES].notna().all(axis=None)
    assert run.settings["metrics"] == [*CLASSES, "positives"]


def test_nothing_else_changes(sick):
    plain = fd.run(ALGORITHM, sick, 3, participation=0.5)
    more = fd.run(ALGORITHM, sick, 3, participation=0.5, metrics=CLASSES, per_client=True)
    assert plain.kept is None and not {"metrics", "per_client"} & set(plain.settings)
    for name in ("loss", "accuracy", "bytes_up", "bytes_down"):
        assert plain.records.values(name) == more.records.values(name)
    assert torch.equal(plain.state.w["weight"], more.state.w["weight"])


def test_every_client_in_every_round(sick):
    run = fd.run(ALGORITHM, sick, 2, metrics=["auc", "f1_macro"], per_client=True)
    for round in range(3):
        model = (run if round == 2 else fd.run(ALGORITHM, sick, round)).model
        table = run.per_client(round=round).set_index("client")
        assert table.index.tolist() == [2, 11, 13, 21, 30]
        assert table["test_rows"].tolist() == [9, 0, 31, 20, 6]
        for i, rows in clients_of(sick):
            y, p = sick.data.y_test[rows], model.predict_proba(sick.data.x_test[rows])
            found = table.loc[i]
            if not len(rows):
                assert found.drop("test_rows").isna().all()
                continue
            said = p.argmax(1)
            assert found["accuracy"] == pytest.approx((said == y).mean())
            assert found["loss"] == pytest.approx(sk.log_loss(y, p, labels=[0, 1]), rel=1e-5)
            due = sk.f1_score(y, said, average="macro", zero_division=0)
            assert found["f1_macro"] == pytest.approx(due)
            if i == 30:
                assert math.isnan(found["auc"])
            else:
                assert found["auc"] == pytest.approx(sk.roc_auc_score(y, p[:, 1]))
        row = run.history.iloc[round]
        accuracy, loss = table["accuracy"].dropna(), table["loss"].dropna()
        assert row["accuracy_mean"] == pytest.approx(accuracy.mean())
        assert row["accuracy_worst"] == accuracy.min()
        assert accuracy[row["accuracy_worst_client"]] == accuracy.min()
        assert row["accuracy_worst_decile"] == pytest.approx(accuracy.quantile(0.1))
        assert row["accuracy_spread"] == pytest.approx(accuracy.std(ddof=0))
        assert row["loss_worst"] == loss.max() and loss[row["loss_worst_client"]] == loss.max()
        assert row["loss_worst_decile"] == pytest.approx(loss.quantile(0.9))
        assert row["auc_mean"] == pytest.approx(table["auc"].mean())
    notes = [note for note in run.notes if "auc" in note]
    assert len(notes) == 1 and "undefined (NaN) for some clients" in notes[0]
    assert "their rows have one class only (round 0: 1 of 4)" in notes[0]
    assert run.per_client().equals(run.per_client(round=2))


def test_what_was_measured_is_what_per_client_measures(sick):
    asked, plain = (fd.run(ALGORITHM, sick, 2, per_client=p).per_client() for p in (True, False))
    np.testing.assert_allclose(asked, plain, rtol=1e-6)


def test_rounds_that_were_not_kept(sick, monkeypatch):
    run = fd.run(ALGORITHM, sick, 4, evaluate_every=2, per_client=True)
    with pytest.raises(fd.FoedusError, match=r"round=1 were not kept \(0, 2, 4\)"):
        run.per_client(round=1)
    with pytest.raises(fd.FoedusError, match=r"none: use fd.run\(..., per_client=True\)"):
        fd.run(ALGORITHM, sick, 1).per_client(round=1)
    monkeypatch.setattr(measures, "_KEPT", 2 * 5 * 2)  # two rounds of five clients' two scores
    assert list(fd.run(ALGORITHM, sick, 4, per_client=True).kept.rounds) == [3, 4]


def test_one_class_only_gives_nan_and_says_so_once():
    x = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    y = np.arange(20) % 2
    fed = fd.split(fd.Data.from_arrays(x, y, x[1:8:2], y[1:8:2], classes=2), "iid", clients=2)
    run = fd.run(ALGORITHM, fed, 3, metrics=["auc", "brier"])
    assert run.history["auc"].isna().all() and run.history["brier"].notna().all()
    assert run.notes == ["auc is NaN on all test rows: their rows have one class only"]


def test_weights_of_test_rows_count():
    fed = weighted()
    run = fd.run(fd.FedAvg(fd.Linear(), lr=0.37), fed, 2, metrics=["auc", "brier"], per_client=True)
    data, p = fed.data, run.model.prepared.predict_proba(fed.data.x_test)
    w, last = data.weights_test, run.history.iloc[-1]
    assert last["auc"] == pytest.approx(sk.roc_auc_score(data.y_test, p[:, 1], sample_weight=w))
    brier = [sk.brier_score_loss(data.y_test, p[:, 1], sample_weight=v) for v in (w, None)]
    assert last["brier"] == pytest.approx(brier[0], rel=1e-5)
    assert abs(brier[1] - brier[0]) > 1e-4  # weights matter here
    rows = fed.test_client_rows(1)
    due = sk.accuracy_score(data.y_test[rows], p[rows].argmax(1), sample_weight=w[rows])
    assert run.per_client(round=2)["accuracy"][1] == pytest.approx(due)


def test_functions_that_ignore_weights_are_named():
    def one(y, p):
        return 1.0

    run = fd.run(fd.FedAvg(fd.Linear()), weighted(), 1, metrics=[one])
    assert "one does not use weights" in run.notes


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_function_must_be_finite(sick, value):
    def own(y, p):
        return value

    with pytest.raises(fd.ConfigError, match=r"'own' on all test rows \(66 rows\) gave (nan|inf)"):
        fd.run(ALGORITHM, sick, 1, metrics=[own])


def test_a_function_may_be_undefined_for_a_client(sick):
    def share(y, p):
        return y.mean() if len(y) != 6 else np.float64("nan")

    run = fd.run(ALGORITHM, sick, 1, metrics=[share], per_client=True)
    assert run.per_client(round=1)["share"].isna().tolist() == [False, True, False, False, True]
    assert any(note.startswith("share is undefined (NaN) for some") for note in run.notes)


def test_regression(values):
    def largest(y, f):
        assert y.shape == f.shape == (len(y),)
        return np.abs(y - f).max()

    largest.greater_is_better = False
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1)
    run = fd.run(algorithm, values, 3, metrics=["mae", "r2", largest], per_client=True)
    data, f = values.data, run.model.predict(values.data.x_test)
    last = run.history.iloc[-1]
    assert last["mae"] == pytest.approx(sk.mean_absolute_error(data.y_test, f), rel=1e-6)
    assert last["r2"] == pytest.approx(sk.r2_score(data.y_test, f), rel=1e-6)
    table = run.per_client(round=3)
    assert last["largest_worst"] == table["largest"].max() == pytest.approx(last["largest"])
    assert last["mse_worst"] == table["mse"].max() and last["r2_worst"] == table["r2"].min()


PERSONAL = fd.Independent(fd.Linear(), lr=0.1, batch_size=16)


@pytest.mark.parametrize("batch", [True, False])
def test_personal_models_are_measured_at_home(sick, batch):
    run = fd.run(
        PERSONAL, sick, 2, metrics=["auc", "brier"], per_client=True, engine=fd.Local(batch=batch)
    )
    table, last = run.per_client(round=2).set_index("client"), run.history.iloc[-1]
    y, p = [], []
    for i, rows in clients_of(sick):
        own = run.model_of(i).predict_proba(sick.data.x_test[rows])
        y, p = [*y, *sick.data.y_test[rows]], [*p, *own[:, 1]]
        if len(rows):
            due = sk.brier_score_loss(sick.data.y_test[rows], own[:, 1])
            assert table.loc[i, "brier"] == pytest.approx(due, rel=1e-5)
    assert last["own_auc"] == pytest.approx(sk.roc_auc_score(y, p), rel=1e-6)
    assert last["own_brier"] == pytest.approx(sk.brier_score_loss(y, p), rel=1e-5)
    assert last["own_brier_worst"] == table["brier"].max()
    plain = fd.run(PERSONAL, sick, 2)
    assert last["own_accuracy_worst"] == plain.history["own_accuracy_worst"].iloc[-1]


def test_a_note_says_that_rows_at_their_sites_are_not_measured(sick, monkeypatch):
    whole = LocalSession.evaluate_own
    monkeypatch.setattr(LocalSession, "evaluate_own", lambda self, outputs=False: whole(self))
    run = fd.run(PERSONAL, sick, 2, metrics=["auc"], per_client=True)
    assert "own_auc" not in run.history and "own_accuracy_mean" in run.history
    assert sum("auc of clients' own models: not measured" in note for note in run.notes) == 1


def test_saved_runs_keep_the_scores_of_clients(sick, tmp_path):
    run = fd.run(ALGORITHM, sick, 2, metrics=["auc"], per_client=True)
    run.save(tmp_path / "run.safetensors")
    again = fd.Run.load(tmp_path / "run.safetensors")
    for round in (0, 1, 2):
        assert again.per_client(round=round).equals(run.per_client(round=round))


@pytest.mark.parametrize("algorithm", [ALGORITHM, PERSONAL])
def test_a_resumed_run_has_the_same_rows(sick, tmp_path, algorithm):
    options = {"metrics": ["auc", "ece"], "per_client": True, "evaluate_every": 2}
    whole = fd.run(algorithm, sick, 5, **options)
    fd.run(algorithm, sick, 3, checkpoint=tmp_path / "c.safetensors", **options)
    run = fd.run(algorithm, sick, 5, checkpoint=tmp_path / "c.safetensors", resume=True, **options)
    drop = run.history.drop(columns="seconds")
    assert drop.equals(whole.history.drop(columns="seconds"))
    assert list(run.kept.rounds) == list(whole.kept.rounds) == [0, 2, 4, 5]
    assert all(run.per_client(round=t).equals(whole.per_client(round=t)) for t in (0, 2, 4, 5))
    with pytest.raises(fd.CheckpointError, match=r"metrics was \['auc', 'ece'\], now None"):
        fd.run(algorithm, sick, 6, checkpoint=tmp_path / "c.safetensors", resume=True,
               evaluate_every=2, per_client=True)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["auc"], "evaluate_every": 0}, r"metrics=\['auc'\] needs evaluation"),
        ({"per_client": True, "evaluate_every": 0}, "per_client=True needs evaluation: test rows"),
        ({"per_client": 1}, "per_client=1 must be True or False"),
        ({"metrics": ["mae"]}, r"metrics\[0\]='mae' is for regression"),
    ],
)
def test_bad_arguments(sick, options, message):
    with pytest.raises(fd.ConfigError, match=message):
        fd.run(ALGORITHM, sick, 1, **options)


def test_comparisons_show_metrics(sick):
    found = fd.compare(
        {"all": ALGORITHM, "own": PERSONAL}, sick, 2, seeds=2, metrics=["auc"], per_client=True
    )
    table = found.table()
    due = [r.records.last("auc") for r in found.runs["all"]]
    assert table.loc["all", "auc"] == pytest.approx(np.mean(due))
    assert table.loc["all", "auc_std"] == pytest.approx(np.std(due, ddof=1))
    own = [r.records.last("own_auc") for r in found.runs["own"]]
    assert table.loc["own", "own_auc"] == pytest.approx(np.mean(own))
    assert math.isnan(table.loc["own", "auc"])
    assert "auc,\n" in found.cells()[0][4] and found.cells()[0][3] == "auc"


def test_settings_are_chosen_by_a_metric(sick):
    grid = {"lr": [1e-4, 0.1, 1.0]}
    found = fd.tune(fd.FedAvg(fd.Linear()), sick, 3, grid=grid, metric="log_loss", workers=1)
    assert found.table["score"].is_monotonic_increasing  # less is better
    found = fd.tune(fd.FedAvg(fd.Linear()), sick, 3, grid=grid, metric="auc", workers=1)
    assert found.table["score"].is_monotonic_decreasing
    own = fd.Independent(fd.Linear())
    assert fd.tune(own, sick, 2, grid=grid, metric="own_brier", workers=1).metric == "own_brier"
    with pytest.raises(fd.ConfigError, match="metric 'acu' is unknown; did you mean 'auc'"):
        fd.tune(fd.FedAvg(), sick, 3, grid=grid, metric="acu")
