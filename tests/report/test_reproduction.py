"""The command and the file on a page make its numbers again."""

from __future__ import annotations

import re
import shlex
from html import unescape

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import foedus as fd
from foedus.cli.app import app
from foedus.report.compare import Comparison
from foedus.report.reproduction import of_comparison
from tests.report.fakes import fake_run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fed():
    return fd.split(fd.load("wine", scale="minmax"), "dirichlet", clients=4, alpha=0.5, seed=3)


def again(page: str) -> str:
    """Do what the page says; the page that this makes."""
    command, *file = map(
        unescape, re.findall(r'<pre class="copy">(foedus .*?|\[data.*?)</pre>', page, re.S)
    )
    for text in file:
        with open("experiment.toml", "w") as out:
            out.write(text)
    program, *words = shlex.split(command)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert program == "foedus" and result.exit_code == 0, result.output
    with open("page.html") as made:
        return made.read()


def tables(page: str) -> list[list[str]]:
    """The rows of all tables, without times."""
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", r, re.S)
        for r in re.findall(r"<tr>(.*?)</tr>", page, re.S)
    ]
    kept, drop = [], None
    for row in rows:
        if "seconds" in row:
            drop = row.index("seconds")
        elif drop is not None and drop >= len(row):
            drop = None
        kept.append([cell for i, cell in enumerate(row) if i != drop])
    return kept


def check(page: str) -> None:
    made = again(page)
    assert len(tables(page)) >= 5
    assert tables(made) == tables(page)
    assert again(made)


def written(result) -> str:
    return result.report("first.html").read_text()


def test_a_comparison(fed):
    algorithms = {
        "FedAvg": fd.FedAvg(fd.MLP((8,)), lr=0.3, weight_decay=0.01),
        "with a prox, “strong”": fd.FedProx(mu=0.7),
        "Central": fd.Central(epochs=2),
    }
    options = {"seeds": [1, 4], "participation": fd.Poisson(0.6), "evaluate_every": 2}
    options |= {"metrics": ["auc"], "per_client": True, "quantise": "int8", "target": 0.7}
    check(written(fd.compare(algorithms, fed, 4, **options)))


def test_a_run_with_robust_means_and_an_engine(fed):
    options = {"seed": 5, "aggregation": fd.TrimmedMean(0.3), "engine": fd.Local(batch=False)}
    check(written(fd.run(fd.FedFW(fd.Linear(), fd.L1Ball(20.0)), fed, 3, **options)))


def test_a_saved_run_and_held_out_rows(fed):
    fed = fd.split(fd.load("diabetes", test=0.1, seed=2), "quantity", clients=3, test=0.3)
    fd.run(fd.FedNewton(fd.RandomFourier(20), reg=0.1), fed, 2).save("run.safetensors", card=False)
    page = written(Comparison.load("run.safetensors"))
    made = again(page)
    first, second = (
        re.findall(r'class="number best">(.*?)<|class="number">(0.*?)<', p)[:1]
        for p in (page, made)
    )
    assert first == second


def test_a_table_from_a_file():
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'yes' if a > b else 'no'}" for a, b in rng.normal(size=(60, 2))]
    with open("rows.csv", "w") as out:
        out.write("\n".join(["one,two,ill", *rows]))
    fed = fd.split(fd.load("rows.csv", label="ill", test=0.2), "iid", clients=3)
    assert fed.origin.startswith('[data]\npath = "rows.csv"\ntest = 0.2\nlabel = "ill"\n')
    check(written(fd.run(fd.FedAvg(fd.Linear()), fed, 2)))


def test_a_search(fed):
    grid = {"lr": fd.loguniform(0.01, 1.0), "model": [fd.Linear(), fd.MLP((4,))]}
    options = {
        "trials": 4,
        "seed": 3,
        "validation": 0.3,
        "seeds": 2,
        "halving": None,
        "metric": "loss",
    }
    check(written(fd.tune(fd.FedAvg(epochs=2), fed, 3, grid=grid, workers=1, **options)))


def test_a_diagnosis(fed):
    found = fd.diagnose(fed, fd.FedNewton(fd.RandomFourier(10)), iterations=3, seed=2)
    check(written(found))


def test_an_audit():
    command = [
        "audit",
        "leakage",
        "--iterations",
        "3",
        "--restarts",
        "1",
        "--message",
        "l1",
        "--message",
        "l2",
    ]
    assert CliRunner().invoke(app, [*command, "--out", "first.html"]).exit_code == 0
    page = open("first.html").read()  # noqa: SIM115
    assert (
        "foedus audit leakage --message l1 --message l2 --iterations 3 --restarts 1 --out page.html"
        in page
    )
    made = again(page)
    assert tables(made) == tables(page)


def missing(result) -> str:
    found = of_comparison(
        result if isinstance(result, Comparison) else Comparison({"A": [result]}, result.fed)
    )
    assert not found.command and not found.file
    return found.missing


def test_what_no_file_can_hold(fed):
    def small(algorithm=None, of=fed, **options):
        return fd.run(algorithm or fd.FedAvg(fd.Linear()), of, rounds=1, **options)

    made = fd.Federation.from_clients(
        [(np.eye(3, dtype=np.float32), [0, 1, 0])] * 2, classes=2, test=0.34
    )
    assert "name neither these rows" in missing(small(of=made))
    for other in (fed.holdout(0.2), fed.select([0, 1])):  # of them, only a part
        assert other.origin is None and "name neither these rows" in missing(small(of=other))
    module = torch.nn.Linear(13, 3)
    assert "cannot be built from text" in missing(small(fd.FedAvg(module)))
    assert "the engine Delayed" in missing(small(engine=fd.Delayed()))
    assert "starts from the model" in missing(small(start=small()))

    def share(y, p):
        return float((p.argmax(1) == y).mean())

    assert "share is a function" in missing(small(metrics=[share]))
    runs = {"A": [small()], "B": [small(participation=0.5)]}
    assert "differ in participation" in missing(Comparison(runs, fed))
    runs = {"A": [small(seed=0)], "B": [small(seed=1)]}
    assert "seeds of A and B differ" in missing(Comparison(runs, fed))
    runs = {"A": [small()], "B": [fd.run(fd.FedAvg(fd.Linear()), fed, rounds=2)]}
    assert "different numbers of rounds" in missing(Comparison(runs, fed))
    assert "name neither these rows" in missing(Comparison({"A": [fake_run([0.1, 0.2])]}))


def test_origins_have_what_was_asked_and_no_more():
    plain = fd.split(fd.load("digits"), "iid", clients=3)
    assert (
        plain.origin == '[data]\nname = "digits"\n\n[split]\nscheme = "iid"\nclients = 3\nseed = 0'
    )
    turned = fd.split(fd.load("digits"), "rotations", clients=3, angles=np.float64(45))
    assert turned.origin.endswith('scheme = "rotations"\nclients = 3\nseed = 0\nangles = 45.0')
    data = fd.load("digits")
    shorter = fd.Data.from_arrays(data.x_train, data.y_train, data.x_test, data.y_test)
    assert shorter.origin is None and fd.split(shorter, "iid", clients=3).origin is None
    assert fd.load("digits", name="mine").origin is None
