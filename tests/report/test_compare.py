from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.report.compare import Comparison, compare
from foedus.report.curves import lines
from foedus.report.text import mean_and_spread
from tests.report.fakes import central, fake_run, independent


@pytest.fixture(scope="module")
def fed():
    return fd.split(fd.load("wine"), "iid", clients=4, seed=0)


# -- the table, by hand ----------------------------------------------------------------------------


def test_table_by_hand():
    cmp = Comparison(
        {
            "A": [fake_run([0.1, 0.5, 0.9], seed=0), fake_run([0.1, 0.8, 0.8], seed=1)],
            "alone": [independent([0.1, 0.2, 0.3], own=[0.1, 0.6, 0.7], seed=s) for s in (0, 1)],
            "all": [central([0.1, 1.0, 1.0], seed=s) for s in (0, 1)],
        },
        target=0.75,
    )
    table = cmp.table()
    assert list(table.index) == ["A", "alone", "all"]
    a = table.loc["A"]
    assert a["accuracy"] == pytest.approx(0.85)
    assert a["accuracy_std"] == pytest.approx(math.sqrt(0.05**2 + 0.05**2))  # ddof 1
    assert a["rounds_to_target"] == 1.5  # rounds 2 and 1
    assert a["mb_to_target"] == pytest.approx(1.5 * 1.5)  # 1.5 MB a round, up and down
    assert a["mb"] == pytest.approx(3.0)
    assert a["seconds"] == pytest.approx(1.0)
    assert a["seeds"] == 2
    assert math.isnan(a["own_accuracy"])
    alone = table.loc["alone"]
    assert (alone["accuracy"], alone["own_accuracy"]) == (pytest.approx(0.3), pytest.approx(0.7))
    assert alone["own_accuracy_std"] == 0
    assert math.isnan(alone["rounds_to_target"])
    assert math.isnan(alone["mb_to_target"])
    assert alone["mb"] == 0
    assert table.loc["all", "rounds_to_target"] == 1
    assert table.loc["all", "mb_to_target"] == 0
    assert table.loc["all", "remark"] == "all data in one place"
    assert table["accuracy"].dtype == float
    assert table["seeds"].dtype == int


def test_default_target_is_95_percent_of_the_best_without_pooled_data():
    runs = {
        "A": [fake_run([0.1, 0.6, 0.8])],
        "B": [fake_run([0.1, 0.2, 0.4])],
        "all": [central([0.1, 1.0, 1.0])],
    }
    cmp = Comparison(runs)
    assert cmp.target == pytest.approx(0.95 * 0.8)
    assert cmp.table()["rounds_to_target"].tolist()[::2] == [2, 1]
    assert math.isnan(cmp.table().loc["B", "rounds_to_target"])
    assert "95% of the best" in cmp.describe_target()
    # Only pooled algorithms: they are compared with each other.
    assert Comparison({"all": [central([0.1, 1.0])]}).target == pytest.approx(0.95)


def test_regression_targets_are_reached_from_above():
    cmp = Comparison(
        {"A": [fake_run([9.0, 4.0, 1.9], name="mse")], "B": [fake_run([9.0, 3.0, 2.5], name="mse")]}
    )
    assert cmp.metric == "mse"
    assert cmp.target == pytest.approx(1.9 / 0.95)
    assert cmp.table().loc["A", "rounds_to_target"] == 2
    assert math.isnan(cmp.table().loc["B", "rounds_to_target"])
    assert "mean squared error at most" in cmp.describe_target()


def test_target_needs_every_seed_and_says_how_many_reach_it():
    cmp = Comparison({"A": [fake_run([0, 0.9], seed=0), fake_run([0, 0.4], seed=1)]}, target=0.8)
    row = cmp.table().loc["A"]
    assert math.isnan(row["rounds_to_target"])
    assert row["remark"] == "1 of 2 seeds reach the target"


def test_one_seed_has_no_spread():
    cmp = Comparison({"A": [fake_run([0, 0.9])]})
    assert math.isnan(cmp.table().loc["A", "accuracy_std"])
    assert "±" not in repr(cmp)


def test_rounds_without_evaluation_are_skipped():
    cmp = Comparison({"A": [fake_run([0.1, None, 0.9, None])]}, target=0.5)
    assert cmp.table().loc["A", "accuracy"] == 0.9
    assert cmp.table().loc["A", "rounds_to_target"] == 2
    (line,) = lines(cmp)
    assert line.x["rounds"] == [0, 2]
    assert line.x["megabytes"] == [0, 3.0]


def test_values_that_are_not_finite_are_no_points_of_a_curve():
    runs = [fake_run([0.1, math.inf, 0.9]), fake_run([0.3, 0.4, 0.5], seed=1)]
    (line,) = lines(Comparison({"A": runs}, target=0.5))
    assert line.x["rounds"] == [0, 1, 2] and line.y["loss"] == [1.0, 1.0, 1.0]
    assert line.y["accuracy"] == pytest.approx([0.2, math.nan, 0.7], nan_ok=True)


def test_numbers_as_text():
    assert mean_and_spread(0.5, 0.01) == "0.5000 ± 0.0100"
    assert mean_and_spread(1234.5, 20.0) == "1234.5 ± 20.0"
    assert (
        mean_and_spread(0.25, math.nan) == "0.2500" and mean_and_spread(math.nan, math.nan) == "–"
    )


def test_no_evaluation_at_all_still_counts_bytes():
    cmp = Comparison({"A": [fake_run([None, None])]})
    assert cmp.target is None
    assert math.isnan(cmp.table().loc["A", "accuracy"])
    assert cmp.table().loc["A", "mb"] == 1.5
    assert lines(cmp) == []


def test_curves_have_mean_and_range_over_seeds():
    cmp = Comparison(
        {"A": [fake_run([0.0, 0.4], seed=0), fake_run([0.2, 0.8], seed=1, seconds=1.5)]}
    )
    (line,) = lines(cmp)
    assert line.y["accuracy"] == pytest.approx([0.1, 0.6])
    assert line.low["accuracy"] == [0.0, 0.4]
    assert line.high["accuracy"] == [0.2, 0.8]
    assert line.x["seconds"] == [0.0, 1.0]


def test_diverged_runs_are_left_out_of_the_numbers_and_remarked():
    runs = [fake_run([0.1, 0.5, 0.9], seed=0), fake_run([0.1, 0.2], seed=1)]
    cmp = Comparison(
        {"A": runs, "B": [fake_run([0.1], seed=0), fake_run([0.1], seed=1)]},
        None,
        0.8,
        {"A": {1: "round 2: no"}, "B": {0: "round 1: no", 1: "round 1: no"}},
    )
    a, b = cmp.table().loc["A"], cmp.table().loc["B"]
    assert a["accuracy"] == 0.9
    assert a["seeds"] == 1
    assert math.isnan(a["rounds_to_target"])
    assert "1 of 2 seeds diverged in round 2" in a["remark"]
    assert math.isnan(b["accuracy"])
    assert b["seeds"] == 0
    assert "2 of 2 seeds diverged in round 1" in b["remark"]
    assert [line.note for line in lines(cmp)] == ["", "diverged"]


def test_text_table():
    cmp = Comparison(
        {"A[b]": [fake_run([0.1, 0.5, 0.9])], "all": [central([0.1, 1.0, 1.0])]}, target=0.75
    )
    text = repr(cmp)
    assert "A[b]" in text  # not taken for markup
    assert "0.9000" in text
    assert "target: accuracy at least 0.7500" in text
    assert "2 algorithms, 2 rounds, 1 seed" in text
    assert "\x1b" not in text


def test_mixed_kinds_cannot_be_compared():
    with pytest.raises(fd.ConfigError, match="classification and regression"):
        Comparison({"A": [fake_run([0.1])], "B": [fake_run([0.1], name="mse")]})


def test_runs_of_different_federations_are_not_in_one_table():
    """Named with what differs; runs on pooled rows have no clients of their own."""
    runs = {"A": [fake_run([0.1])], "all": [central([0.1])], "B": [fake_run([0.1], seed=1)]}
    Comparison(runs)
    federation = runs["B"][0].settings["federation"]
    federation["settings"] = {"clients": 2, "alpha": 0.3}
    with pytest.raises(fd.ConfigError, match=r"settings\.alpha is None in 'A' and 0.3 in 'B'"):
        Comparison(runs)
    federation["settings"] = {"clients": 2}
    federation["clients"] = 3
    with pytest.raises(fd.ConfigError, match="clients is 2 in 'A' and 3 in 'B'"):
        Comparison(runs)
    federation["clients"] = 2
    runs["all"][0].settings["federation"]["data"] = "other"
    with pytest.raises(fd.ConfigError, match="data is 'toy' in 'A' and 'other' in 'all'"):
        Comparison(runs)


def arrays(seed=0, owner=(0,) * 10 + (1,) * 10):
    """Two clients of ten rows."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((20, 3)), np.arange(20) % 2
    data = fd.Data.from_arrays(x, y, x[:4], y[:4], name="site data")
    owners = np.array(owner), np.array([0, 0, 1, 1])
    return fd.Federation.from_owners(data, *owners, np.arange(2), "given", {})


def test_federations_of_equal_name_and_size_are_distinguished_by_their_rows(tmp_path):
    runs = {k: fd.run(fd.FedAvg(), arrays(k), 1) for k in (0, 1)}
    message = r"the training rows of 'a' and 'b' differ; the test rows of 'a' and 'b' differ"
    with pytest.raises(fd.ConfigError, match=message):
        Comparison({"a": [runs[0]], "b": [runs[1]]})
    again = fd.run(fd.FedAvg(), arrays(0), 1, seed=1)  # other objects, the same rows
    Comparison({"a": [runs[0]], "b": [again]})
    Comparison({"a": [runs[0]], "all": [fd.run(fd.Central(), arrays(0), 1)]})
    with pytest.raises(fd.ConfigError, match="the training rows of 'a' and 'all' differ"):
        Comparison({"a": [runs[0]], "all": [fd.run(fd.Central(), arrays(1), 1)]})
    for k, run in runs.items():
        run.save(tmp_path / f"{k}.safetensors")
    with pytest.raises(fd.ConfigError, match=r"the training rows of 'the first' and .*1.safet"):
        Comparison.load(tmp_path)


def test_other_owners_of_the_same_rows_are_another_federation():
    owners = {"a": [0, 1] * 10, "b": [1, 0] * 10}
    runs = {k: [fd.run(fd.FedAvg(), arrays(owner=o), 1)] for k, o in owners.items()}
    with pytest.raises(fd.ConfigError, match="the clients of 'a' and 'b' differ"):
        Comparison(runs)


def test_saved_runs_without_a_fingerprint_still_compare(tmp_path):
    old, new = (fd.run(fd.FedAvg(), arrays(), 1, seed=seed) for seed in (0, 1))
    del old.settings["federation"]["fingerprint"]
    for run in (old, new):
        run.save(tmp_path / f"avg-seed{run.settings['seed']}.safetensors")
    assert [len(runs) for runs in Comparison.load(tmp_path).runs.values()] == [2]
    other = fd.run(fd.FedAvg(), arrays(1), 1, seed=2)  # the oldest is not what others are held to
    with pytest.raises(fd.ConfigError, match="the training rows of 'b' and 'c' differ"):
        Comparison({"a": [old], "b": [new], "c": [other]})


# -- real runs -------------------------------------------------------------------------------------


def test_compare_runs_every_algorithm_on_every_seed(fed):
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    algorithms = {"avg": fd.FedAvg(), "alone": fd.Independent(), "all": fd.Central()}
    cmp = compare(algorithms, fed, 4, seeds=[3, 5], participation=0.5, target=0.0)
    assert {n: [r.settings["seed"] for r in runs] for n, runs in cmp.runs.items()} == {
        key: [3, 5] for key in algorithms
    }
    # The target is reached at once, and stops nothing.
    assert all(len(r.records) == 5 for runs in cmp.runs.values() for r in runs)
    assert cmp.table().loc["avg", "rounds_to_target"] == 0
    single = fd.run(fd.FedAvg(), fed, 4, seed=5, participation=0.5).history
    assert single["accuracy"].tolist() == cmp.runs["avg"][1].history["accuracy"].tolist()
    assert cmp.table().loc["avg", "mb"] == pytest.approx(
        (single["bytes_up"] + single["bytes_down"]).iloc[-1] / 1e6
    )
    assert not math.isnan(cmp.table().loc["alone", "own_accuracy"])
    assert torch.equal(state[0], torch.get_rng_state())
    assert np.array_equal(state[1], np.random.get_state()[1])


def test_a_run_that_diverges_does_not_spoil_the_others(fed):
    cmp = compare({"good": fd.FedAvg(), "bad": fd.FedAvg(fd.MLP((8,)), lr=1e30)}, fed, 3, seeds=2)
    table = cmp.table()
    assert table.loc["good", "seeds"] == 2
    assert table.loc["bad", "seeds"] == 0
    assert "2 of 2 seeds diverged in round" in table.loc["bad", "remark"]
    assert set(cmp.diverged["bad"]) == {0, 1}


def test_checkpoints_of_a_comparison_are_one_file_a_run(fed, tmp_path):
    algorithms = {"a/../b": fd.FedAvg()}
    first = compare(algorithms, fed, 3, seeds=2, checkpoint=tmp_path / "c")
    names = [f"a%2F..%2Fb-seed{seed}.safetensors" for seed in (0, 1)]  # and the one before, of each
    assert sorted(f.name for f in (tmp_path / "c").iterdir()) == [
        n + end for n in names for end in ("", ".previous")
    ]
    again = compare(algorithms, fed, 5, seeds=2, checkpoint=tmp_path / "c", resume=True)
    assert again.runs["a/../b"][1].records.rows[:4] == first.runs["a/../b"][1].records.rows


def test_a_comparison_that_was_stopped_goes_on_with_runs_that_were_not_reached(fed, tmp_path):
    folder = tmp_path / "c"
    with pytest.raises(fd.CheckpointError, match=r'c: none of the 2 runs .*resume="auto"'):
        compare({"a": fd.FedAvg()}, fed, 1, seeds=2, checkpoint=folder, resume=True)
    compare({"a": fd.FedAvg()}, fed, 1, seeds=[0], checkpoint=folder, resume="auto")
    both = compare({"a": fd.FedAvg()}, fed, 2, seeds=2, checkpoint=folder, resume=True)
    assert [len(r.records) for r in both.runs["a"]] == [3, 3]


def test_bad_arguments(fed):
    for arguments, message in (
        (({}, fed, 1), "at least one"),
        (([fd.FedAvg()], fed, 1), "dictionary"),
        (({"a": fd.FedAvg}, fed, 1), "must be a foedus algorithm"),
    ):
        with pytest.raises(fd.ConfigError, match=message):
            compare(*arguments)
    for options, message in (
        ({"seeds": 0}, "seeds=0"),
        ({"seeds": [1, 1]}, "different integers"),
        ({"seeds": "12"}, "different integers"),
        ({"seed": 1}, "seeds="),
        ({"particpation": 0.5}, "did you mean 'participation'"),
    ):
        with pytest.raises(fd.ConfigError, match=message):
            compare({"a": fd.FedAvg()}, fed, 1, **options)


def test_models_are_checked_before_the_first_run(fed):
    with pytest.raises(fd.ModelError):
        compare({"a": fd.FedAvg(), "b": fd.FedAvg(fd.CNN())}, fed, 10**9)


# -- saved runs ------------------------------------------------------------------------------------


def test_save_and_load_keep_names_and_numbers(fed, tmp_path):
    cmp = compare({"avg / 1": fd.FedAvg(lr=0.1), "Central": fd.Central()}, fed, 2, seeds=2)
    assert len(cmp.save(tmp_path)) == 4
    again = Comparison.load(tmp_path)
    assert set(again.runs) == {"avg / 1", "Central"}
    before, after = cmp.table(), again.table().loc[cmp.table().index]
    assert before.drop(columns="remark").equals(after.drop(columns="remark"))
    assert after.loc["Central", "remark"] == "all data in one place"


def test_loaded_runs_are_named_by_the_settings_that_differ(tmp_path):
    for i, run in enumerate(
        [
            fake_run([0, 1.0], algorithm=fd.FedAvg(lr=lr), seed=s)
            for lr in (0.1, 0.5)
            for s in (0, 1)
        ]
    ):
        run.save(tmp_path / f"{i}.safetensors", card=False)
    cmp = Comparison.load(*(tmp_path / f"{i}.safetensors" for i in range(4)))
    assert {n: len(r) for n, r in cmp.runs.items()} == {"FedAvg (lr=0.1)": 2, "FedAvg (lr=0.5)": 2}


def test_runs_with_a_torch_module_can_be_reported(fed, tmp_path):
    run = fd.run(fd.FedAvg(torch.nn.Linear(13, 3)), fed, 1)
    run.save(tmp_path / "m.safetensors", card=False)
    assert list(Comparison.load(tmp_path / "m.safetensors").runs) == ["FedAvg"]


def test_load_refuses_what_is_no_run(tmp_path):
    with pytest.raises(fd.CheckpointError, match="no saved run"):
        Comparison.load(tmp_path)
    with pytest.raises(fd.CheckpointError, match="no such file"):
        Comparison.load(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"garbage")
    with pytest.raises(fd.CheckpointError, match="damaged"):
        Comparison.load(tmp_path / "x.safetensors")
    with pytest.raises(fd.CheckpointError, match=r"none of the 1 file can be .*x\.safetensors"):
        Comparison.load(tmp_path)
    fake_run([0.5]).save(tmp_path / "y.safetensors", card=False)
    cmp = Comparison.load(tmp_path)
    assert len(cmp.left_out) == 1 and "x.safetensors" in cmp.left_out[0]
    assert f"left out: {cmp.left_out[0]}"[:60] in " ".join(repr(cmp).split())
    fake_run([0.5]).save(tmp_path / "x.safetensors", card=False)
    fake_run([0.5]).save(tmp_path / "y.safetensors", card=False)
    with pytest.raises(fd.ConfigError, match="already among the runs"):
        Comparison.load(tmp_path)


def test_importing_foedus_stays_light():
    heavy = ("matplotlib", "sklearn", "rich", "typer", "pandas.plotting", "ray", "flwr")
    code = f"import foedus, sys; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"
