"""The examples run, print what they say, and show what they claim."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def lowrank():
    """The example's functions, its radius and its runs, at full size."""
    example = runpy.run_path(str(EXAMPLES / "lowrank.py"))
    fed, radius = example["federation"]()
    return example, radius, example["compare"](fed, radius)


def numbers(text: str) -> list[float]:
    return [float(v) for v in re.findall(r"\d+\.?\d*", text)]


@pytest.mark.slow
def test_lowrank_prints_what_it_says(lowrank):
    example, _, runs = lowrank
    comment = (EXAMPLES / "lowrank.py").read_text().split("# Expected output")[1]
    shown = "\n".join(line.removeprefix("#").strip() for line in comment.splitlines()[2:])
    printed = example["table"](runs)
    assert re.sub(r"\d+\.?\d*", "#", printed).split() == re.sub(r"\d+\.?\d*", "#", shown).split()
    # Two decimals, and another processor may round otherwise.
    assert numbers(printed) == pytest.approx(numbers(shown), rel=0.01)


@pytest.mark.slow
def test_lowrank_stays_in_the_ball(lowrank):
    _, radius, runs = lowrank
    constrained = {
        "FedFW": runs["FedFW"].state.center,
        "ProjectedFedAvg": runs["ProjectedFedAvg"].state.w,
    }
    for name, params in constrained.items():
        assert np.linalg.norm(params["weight"].double().numpy(), "nuc") <= radius * (1 + 1e-4), name
    # The bound is what makes the difference: without it, the weights are far outside.
    assert np.linalg.norm(runs["FedAvg"].state.w["weight"].numpy(), "nuc") > 2 * radius


@pytest.mark.slow
def test_lowrank_generalizes_and_sends_little(lowrank):
    _, _, runs = lowrank
    last = {name: run.history.iloc[-1] for name, run in runs.items()}
    fedfw, stopped = last["FedFW"], last["ProjectedFedAvg, to FedFW's mse"]
    # of all rounds, the last is far worse
    assert fedfw.mse < runs["FedAvg"].history.mse.min() - 0.2
    assert stopped.mse <= fedfw.mse
    pair, dense = 4 * (500 + 300), 4 * 500 * 300
    # A message is a pair of vectors (before the first round, each client sends one number for the
    # penalty).
    assert pair * 0.99 < fedfw.bytes_up / fedfw.messages_up < pair * 1.02
    assert last["FedAvg"].bytes_up / last["FedAvg"].messages_up > dense
    assert 4 * fedfw.bytes_up < stopped.bytes_up


def test_lowrank_takes_other_sizes():
    example = runpy.run_path(str(EXAMPLES / "lowrank.py"))
    fed, radius = example["federation"](features=40, tasks=70, rank=2, clients=3, rows=20)
    assert len(fed.sizes) == 3 and set(fed.sizes.tolist()) == {20}
    runs = example["compare"](fed, radius, rounds=30, averaging_rounds=10)
    assert (
        runs["FedFW"].history.bytes_up.iloc[-1]
        < runs["ProjectedFedAvg"].history.bytes_up.iloc[-1] / 5
    )
    assert np.linalg.norm(
        runs["FedFW"].state.center["weight"].double().numpy(), "nuc"
    ) <= radius * (1 + 1e-4)


@pytest.fixture(scope="module")
def batchnorm():
    return runpy.run_path(str(EXAMPLES / "batchnorm.py"))


def test_batchnorm_runs_and_keeps_what_it_has_run(batchnorm, tmp_path, monkeypatch):
    """The quick study: every policy in every division, and the bytes of what each sends."""
    store = batchnorm["stored"](tmp_path)
    found = batchnorm["study"](store, quick=True)
    assert len(found) == len(batchnorm["POLICIES"]) * len(batchnorm["SKEWS"])
    assert found["own"].between(0, 1).all() and (found["worst"] <= found["own"]).all()
    sent = found.groupby("policy")["bytes"].mean()
    # weights, biases and statistics of 7 BatchNorm layers on 3 x 4, 2 x 8 and 2 x 16 channels: 4
    # numbers a channel, of 4 bytes; names and shapes come on top
    channels = 3 * 4 + 2 * 8 + 2 * 16
    assert sent["alone"] == 0 and sent["silo"] == sent["frozen"] == sent["group"]
    assert 0 <= sent["average"] - sent["silo"] - 2 * 4 * channels < 14 * 40
    assert 0 <= sent["silo"] - sent["local"] - 2 * 4 * channels < 14 * 40
    globe = found.set_index(["policy", "skew"])["global"]
    assert globe["local"].isna().all() and globe["average"].notna().all()
    monkeypatch.setitem(batchnorm["study"].__globals__, "measure", None)  # nothing is run again
    again = batchnorm["study"](batchnorm["stored"](tmp_path), quick=True)
    assert batchnorm["tables"](again) == batchnorm["tables"](found)


def test_batchnorm_tables_are_those_of_the_results(batchnorm, monkeypatch):
    monkeypatch.setitem(batchnorm["study"].__globals__, "measure", None)
    found = batchnorm["study"](batchnorm["stored"]())
    page = (EXAMPLES.parent / "docs" / "how-to" / "your-model.md").read_text()
    assert batchnorm["tables"](found) in page


def test_batchnorm_shows_what_the_page_says(batchnorm, monkeypatch):
    monkeypatch.setitem(batchnorm["study"].__globals__, "measure", None)
    found = batchnorm["study"](batchnorm["stored"]())
    mean = found.groupby(["skew", "policy"])[["own", "worst", "global", "bytes"]].mean()
    spread = found.groupby(["skew", "policy"])["own"].std(ddof=0)
    own, worst = (mean[k] for k in ("own", "worst"))
    # Feature skew
    policies = ["local", "silo", "frozen", "group"]
    assert own["features"]["average"] < own["features"][policies].min() - 0.1
    three = own["features"][["group", "local", "silo"]]
    assert three.max() - three.min() <= spread["features"][["local", "silo"]].max() < 0.025
    assert worst["features"].idxmax() == "group"
    assert abs(own["features"]["alone"] - own["features"]["group"]) < spread["features"]["alone"]
    assert worst["features"]["alone"] < worst["features"]["group"] - 0.1
    # Label skew
    theirs, common = ["local", "silo"], ["average", "frozen", "group"]
    assert own["labels"][theirs].min() > own["labels"][common].max() + 0.05
    others = ["average, fine-tuned", "alone"]
    assert own["labels"][others].min() > own["labels"][theirs].max()
    # Without skew
    assert own["none"].idxmax() == "average"
    assert own["none"]["average"] - own["none"][theirs].max() == pytest.approx(0.1, abs=0.01)
    # Bytes
    sent = mean["bytes"]["features"]
    assert sent["silo"] == sent["frozen"] == sent["group"]
    assert sent["average"] / sent["silo"] == pytest.approx(1.017, abs=5e-4)
    assert sent["local"] / sent["silo"] == pytest.approx(1 - 0.016, abs=5e-4)


def test_drift_is_followed():
    example = runpy.run_path(str(EXAMPLES / "drift.py"))
    losses = example["drift"]()
    comment = (EXAMPLES / "drift.py").read_text().split("# Expected output")[1]
    shown = [line.removeprefix("#").strip() for line in comment.splitlines()[2:6]]
    for line, (name, found) in zip(shown, losses.items(), strict=True):
        assert line.startswith(name)
        assert numbers(line) == pytest.approx(found, abs=0.01)
    stale = losses["after, old weights"][0]
    assert losses["after, from old weights"][-1] < stale - 0.3
