"""`foedus deploy up` as people run it: the commands, a server that is killed, and the hospitals."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

import foedus as fd
from foedus.engines.flower import deploy
from foedus.storage import checkpoint as files
from tests.engines.flower.test_site import patients, table, written

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "examples"


def trial(folder: Path, data: Path) -> Path:
    sites = {n: written(data, n, table(k, 80)) for k, n in enumerate(("north", "south"))}
    deploy.init(folder, sites, "outcome")
    plan = folder / "federation.toml"
    text = (
        plan.read_text()
        .replace('type = "FedAvg"', 'type = "Scaffold"')
        .replace("rounds = 20", "rounds = 5")
    )
    plan.write_text(text)
    return folder


def up(folder: Path) -> subprocess.Popen:
    command = [str(Path(sys.executable).parent / "foedus"), "deploy", "up", str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_a_server_that_is_killed_goes_on_to_the_same_result(tmp_path):
    undisturbed = trial(tmp_path / "a", tmp_path / "data")
    process = up(undisturbed)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert "done in" in said and "Scaffold: north" in said

    folder = trial(tmp_path / "b", tmp_path / "data")
    process, checkpoint = up(folder), folder / "results" / "Scaffold.checkpoint.safetensors"
    end = time.monotonic() + 300
    while time.monotonic() < end and not (
        checkpoint.exists() and files.read(checkpoint)[1]["rounds_done"] >= 2
    ):
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    done = files.read(checkpoint)[1]["rounds_done"]
    assert 2 <= done < 5

    process = up(folder)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    a, b = (fd.Run.load(f / "results" / "Scaffold.safetensors") for f in (undisturbed, folder))
    for name in ("w", "c"):
        for k in a.state[name]:
            assert torch.equal(a.state[name][k], b.state[name][k])
    columns = [c for c in a.history.columns if c != "seconds"]
    assert a.history[columns].equals(b.history[columns])


NEW_ROWS = """
import sys
import pandas as pd
import foedus as fd

rows = pd.read_csv(sys.argv[2])
said = fd.Run.load(sys.argv[1]).model.predict(rows)
print((said == rows.outcome).mean())
"""


@pytest.mark.parametrize("secure", [False, True])
def test_from_raw_tables_to_a_model_for_raw_rows(secure, tmp_path):
    """Real processes: categories, missing values and text labels; a model that a new process asks
    about the raw rows of a new site; and metrics of all test rows in the history.
    """
    names = ("north", "south", "west")
    sites = {n: written(tmp_path / "data", n, patients(k, 150)) for k, n in enumerate(names)}
    folder = tmp_path / "trial"
    deploy.init(folder, sites, "outcome")
    plan = folder / "federation.toml"
    text = plan.read_text().replace("rounds = 20", "rounds = 8").replace("lr = 0.1", "lr = 0.5")
    assert 'categories = ["smokes"]' in text
    text = text.replace('# metrics = ["auc", "f1"]', 'metrics = ["auc", "f1"]')
    for name in names:
        policy = folder / "sites" / name / "policy.toml"
        said = policy.read_text().replace('# metrics = ["f1", "auc"]', 'metrics = ["f1", "auc"]')
        policy.write_text(said.replace("required = false", "required = true") if secure else said)
    if secure:
        text = text.replace("# [aggregation]  ", "[aggregation]  ")
        text = text.replace('# type = "SecureAggregation"', 'type = "SecureAggregation"')
    plan.write_text(text)
    process = up(folder)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    written(
        tmp_path / "data",
        "new",
        patients(9, 500)[["outcome", "smokes", "ward", "pressure", "age", "insured"]],
    )
    model = folder / "results" / "FedAvg.safetensors"
    command = [sys.executable, "-W", "ignore", "-c", NEW_ROWS, model, tmp_path / "data" / "new.csv"]
    fresh = subprocess.run(command, capture_output=True, text=True, check=True)
    table = json.loads((folder / "results" / "FedAvg.sites.json").read_text())
    scores = [e["accuracy"] for e in table if "accuracy" in e]
    assert scores and abs(float(fresh.stdout) - sum(scores) / len(scores)) < 0.08
    assert float(fresh.stdout) > 0.85
    assert "smokes" in (folder / "results" / "FedAvg.md").read_text()
    history = pd.read_csv(folder / "results" / "FedAvg.csv")
    last = history.iloc[-1]
    assert len(history) == 9 and (history["test_rows"] == history["test_rows"][0]).all()
    assert last["f1"] > 0.8 and last["auc"] > 0.9 and last["auc_bin_error"] < 0.01
    rows = [e.get("test_rows", 0) for e in table if e["site"] != "all" and "accuracy" in e]
    if not secure:  # otherwise sites keep their own scores
        weighted = sum(e["accuracy"] * e["test_rows"] for e in table) / sum(rows)
        assert last["accuracy"] == pytest.approx(weighted) and last["test_rows"] == sum(rows)
    else:
        assert last["accuracy"] == pytest.approx(scores[0], abs=1e-6)
    assert f"auc {last['auc']:.4f} +- " in said


@pytest.mark.real
def test_the_hospitals(real, tmp_path):
    """The table of the example's README, to the digits that it shows."""
    found = runpy.run_path(str(EXAMPLES / "hospitals" / "run.py"))["main"](tmp_path)
    shown = (EXAMPLES / "hospitals" / "README.md").read_text()
    for name, row in found.iterrows():
        cells = " | ".join(f"{v:.3f}" for v in row)
        assert cells in shown, f"{name}: {cells}"
    said = json.loads((tmp_path / "federation" / "results" / "FedAvg.sites.json").read_text())
    assert [e["site"] for e in said] == ["cleveland", "hungarian", "switzerland", "va"]
