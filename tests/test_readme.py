"""The README's example runs and prints what the README says; its numbers are stored results."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from foedus.cli.app import app
from tests.pages import ROOT, read_page, run_page

TEXT = (ROOT / "README.md").read_text()
DEMO = json.loads((ROOT / "results/demo.json").read_text())["sections"]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?%?")


def test_the_example_prints_what_it_says(tmp_path, monkeypatch):
    page = read_page(ROOT / "README.md")
    shown = [block for block in page.blocks if block.language == "python"]
    assert shown and all(block.output is not None and block.is_run() for block in shown)
    run_page(page, tmp_path, monkeypatch)
    assert (tmp_path / "scaffold.safetensors").exists()


def test_the_sentences_of_the_demo_are_those_stored():
    (block,) = [b for b in re.findall(r"```\n(.*?)```", TEXT, re.S) if b.startswith("FFGB: ")]
    parts = [part.strip().split("\n", 1) for part in block.strip().split("\n\n")]
    assert [" ".join(text.split()) for _, text in parts] == [s["sentence"] for s in DEMO.values()]
    assert all(section["holds"] for section in DEMO.values())


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of a section's table."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", section, re.M)[1:]
    return [row.split(" | ") for row in rows if not set(row) <= set("-| ")]


def test_the_numbers_of_the_families_are_those_of_the_demo():
    rows = table("The five families")
    assert len(rows) == 5
    for name, *_, shown in rows:
        family = re.match(r"\[(\w+)\]", name)[1].lower()
        known = NUMBER.findall(DEMO[family]["sentence"])
        found = NUMBER.findall(shown)
        assert found and not set(found) - set(known), f"{family}: {found} of {known}"


def test_the_megabytes_of_ffgb_are_those_of_the_demo():
    sent = {row["method"]: row["megabytes"] for row in DEMO["ffgb"]["rows"]}
    trees, network = re.search(r"with (\d+) MB, against (\d+) MB", TEXT).groups()
    assert (int(trees), int(network)) == (
        round(sent["FFGB, trees"]), round(sent["FedAvg, network"])
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "workload"),
    [("softmax regression", "w3"), ("MLP", "w2"), ("CNN for CIFAR", "w5")],
)
def test_the_seconds_of_frameworks_are_those_stored(row, workload):
    stored = json.loads((ROOT / f"benchmarks/results/peers-{workload}.json").read_text())["text"]
    cells = [line.split(" | ") for line in stored.splitlines()[2:]]
    seconds = {tool: value.split()[0] for _, tool, value, *_ in cells if value[0].isdigit()}
    expected = [
        min((float(v) for k, v in seconds.items() if k.startswith(name)), default=None)
        for name in ("foedus", "Flower", "NVFlare", "pfl-research", "FedJAX")
    ]
    (shown,) = [cells for cells in table("Other frameworks") if row in cells[0]]
    for text, value in zip(shown[1:], expected, strict=True):
        assert text == ("not measured" if value is None else f"{value:.3f}")


def test_the_first_result_comes_within_two_screens():
    """A screen has about fifty lines."""
    lines = TEXT.splitlines()
    assert next(i for i, line in enumerate(lines) if line.startswith("![")) < 30
    assert lines.index("FFGB: trees cannot be averaged, but added") < 100


@pytest.mark.slow
def test_the_stored_numbers_are_those_of_the_demo(tmp_path):
    """`foedus demo`, whose numbers.json is stored as results/demo.json."""
    made = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    found = json.loads((tmp_path / "numbers.json").read_text())["sections"]
    for name, section in DEMO.items():
        stored, new = (NUMBER.sub("#", s[name]["sentence"]) for s in (DEMO, found))
        assert stored == new
        for a, b in zip(section["rows"], found[name]["rows"], strict=True):
            assert (a["method"], a["rounds"]) == (b["method"], b["rounds"])
            assert b["score"] == pytest.approx(a["score"], abs=0.01)
            assert b["megabytes"] == pytest.approx(a["megabytes"], rel=0.01)
