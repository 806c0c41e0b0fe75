"""`foedus demo`: what it says is what its runs have measured, in words that follow the numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import foedus as fd
from foedus.cli import demo
from foedus.cli.app import app
from foedus.cli.demo import claims, examples, page, sections
from foedus.cli.demo.claims import Claim
from foedus.cli.demo.sections import SECTIONS, Row, Section
from foedus.report.charts import Bar, Bars
from tests.report.browser import chromium
from tests.report.fakes import fake_run
from tests.report.test_page import check

# Sentences


@pytest.mark.parametrize(
    ("name", "good", "text", "bad"),
    [
        (
            "ffgb",
            (0.976, 0.936, 0.982, 0.82),
            "At clients with unlike labels, FFGB's trees reach accuracy 0.976 in 10 rounds, "
            "bagging as many trees 0.820, and FedAvg of a network 0.936 (0.982 after 50 rounds).",
            [(0.93, 0.936, 0.962, 0.82), (0.93, 0.92, 0.962, 0.94), (0.9, 0.9, 0.9, 0.8)],
        ),
        (
            "fednewton",
            (0.00204, 0.0235, 1.444, 0.26),
            "After 4 rounds FedNewton's predictions differ by 0.20% from those of the pooled "
            "solution, FedAvg's by 2.4% after 50 rounds; plain Newton diverges (144% after 4).",
            [(0.03, 0.0235, 1.444, 0.26), (0.00204, 0.0235, 0.01, 0.26)],
        ),
        (
            "fedfw",
            (20.96, 36237.0, 0.958, 0.944, 89, 9052),
            "An upload of FedFW has 21 bytes and one of FedAvg 36,237; FedFW ends with accuracy "
            "0.958 (FedAvg 0.944) and 89 of 9,052 weights that are not zero.",
            [
                (3700.0, 36237.0, 0.958, 0.944, 89, 9052),
                (20.96, 36237.0, 0.92, 0.944, 89, 9052),
                (20.96, 36237.0, 0.958, 0.944, 906, 9052),
            ],
        ),
        (
            "fedres",
            (0.974, 0.959, 0.959, 0.881),
            "A shared and a private model together predict 97.4% of the clients' own test rows "
            "correctly, and 95.9% if messages are 7 rounds late; clients alone 95.9%, one model "
            "for all 88.1%.",
            [
                (0.95, 0.96, 0.951, 0.881),
                (0.974, 0.94, 0.959, 0.881),
                (0.974, 0.97, 0.959, 0.972),
            ],
        ),
        (
            "fedboost",
            (0.983, 0.92, 0.734, 0.925, 2.725, 0.2236),
            "Of twelve given classifiers, three were fitted to upright digits: they get 98% of "
            "the weight, and accuracy goes from 0.734 with equal weights to 0.920 (0.925 if all "
            "are sent) with 2.7 sent a round, 22% of the megabytes.",
            [
                (0.4, 0.92, 0.734, 0.925, 2.725, 0.2236),
                (0.983, 0.73, 0.734, 0.74, 2.725, 0.2236),
                (0.983, 0.9, 0.734, 0.925, 2.725, 0.2236),
                (0.983, 0.92, 0.734, 0.925, 2.725, 1.1),
            ],
        ),
        (
            "averaging",
            ("Scaffold", 0.971, 0.962, 0.374, 0.976),
            "Scaffold ends with accuracy 0.971, FedAvg with 0.962; models of clients alone have "
            "0.374 on everybody's rows and 0.976 on their own.",
            [("Scaffold", 0.3, 0.2, 0.374, 0.976)],
        ),
    ],
)
def test_a_sentence_claims_only_what_its_numbers_show(name, good, text, bad):
    """Each of the others breaks one of the conditions of the claim."""
    say = getattr(claims, name)
    assert say(*good) == Claim(True, text)
    for numbers in bad:
        found = say(*numbers)
        assert not found.holds
        assert found.text.startswith("It does not hold in this run that ")
        # the same sentence, with its own numbers
        frame = re.sub(r"[\d.,]*\d", "#", text).replace("diverges", "D")
        assert (
            re.sub(r"[\d.,]*\d", "#", found.text)
            .replace("does not diverge", "D")
            .replace("diverges", "D")
            .endswith(f"Measured: {frame}")
        )


def test_the_best_method_is_not_compared_with_itself():
    text = claims.averaging("FedAvg", 0.97, 0.97, 0.4, 0.9).text
    assert text.startswith("FedAvg ends with accuracy 0.970; models of clients alone")


# Sections, from histories made by hand


def test_ffgb_compares_after_ten_rounds(monkeypatch):
    fed = fd.split(fd.load("wine"), "iid", clients=3, seed=0)
    trees = replace(fake_run([t / 12 for t in range(11)]), fed=fed)  # 10/12 at the end
    network = fake_run([t / 60 for t in range(51)])  # 10/60 after 10 rounds, 50/60 at the end
    runs = {"FFGB, trees": trees, "FedAvg, network": network}
    monkeypatch.setattr(examples, "ffgb", lambda seed: runs)
    bagged = [(0.25, 2_000_000)] * 99 + [(0.5, 2_000_000)]
    monkeypatch.setattr(sections, "bagging_by_round", lambda fed, rounds, seed: bagged)
    found = sections.ffgb(0)
    assert found.claim == claims.ffgb(10 / 12, 10 / 60, 50 / 60, 0.5)
    assert found.claim.holds
    # a round of the runs costs 1 MB up and 0.5 down; bagging 2 MB, up and to the two others
    assert [(r.method, r.rounds, r.megabytes) for r in found.rows] == [
        ("FFGB, trees", 10, 15.0),
        ("FedAvg, network", 50, 75.0),
        ("bagging, trees", 100, pytest.approx(600.0)),
    ]
    assert [line.x["megabytes"][-1] for line in found.chart.lines] == pytest.approx([15, 75, 600])
    assert found.rows[0].seconds == 5.0 and np.isnan(found.rows[2].seconds)


def with_column(run, **columns):
    for name, values in columns.items():
        for row, value in zip(run.records.rows, values, strict=True):
            row[name] = value
        run.records.seen[name] = values[-1]
    return run


def test_fednewton_says_how_far_the_predictions_are_at_the_end(monkeypatch):
    runs = {
        "FedNewton, cg": with_column(fake_run([0.5, 0.9]), distance=[0.25, 0.01]),
        "FedAvg": with_column(fake_run([0.5, 0.8, 0.9]), distance=[0.25, 0.2, 0.1]),
        "plain Newton": with_column(fake_run([0.5, 0.1]), distance=[0.25, 0.3]),
        "pooled rows": fake_run([0.9]),
    }
    monkeypatch.setattr(examples, "fednewton", lambda seed: runs)
    found = sections.fednewton(0)
    assert found.claim == claims.fednewton(0.01, 0.1, 0.3, 0.25) and found.claim.holds
    assert [line.name for line in found.chart.lines] == [*runs][:3]
    assert found.chart.lines[1].y == {"distance": [0.25, 0.2, 0.1]}
    assert found.rows[3] == Row("pooled rows", 0.9, 0, 0.0, 0.0)


def test_fedfw_counts_the_weights_that_are_not_zero(monkeypatch):
    """Of 30 weights two are not zero; in round t, t messages of 20 and of 1,000,000 bytes."""
    model = torch.nn.Linear(9, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.weight[1, 4], model.bias[2] = 0.5, -2.0
    sparse = fake_run([0.1, 0.6, 0.79], up=20)
    sparse = SimpleNamespace(
        history=sparse.history,
        records=sparse.records,
        model=SimpleNamespace(to_torch=lambda: model),
    )
    runs = {"FedFW": sparse, "FedAvg": fake_run([0.1, 0.8])}
    monkeypatch.setattr(examples, "fedfw", lambda seed: runs)
    found = sections.fedfw(0)
    assert found.claim == claims.fedfw(20, 1_000_000, 0.79, 0.8, 2, 30) and found.claim.holds
    assert found.chart.lines[0].x["megabytes"] == [0, 2e-5, 4e-5]  # up alone
    assert found.rows[0].megabytes == pytest.approx(2 * (20 + 500_000) / 1e6)


def test_fedres_scores_clients_on_their_own_rows(monkeypatch):
    own = {"FedRes": 0.9, "late": 0.8, "Independent": 0.7, "Central": 0.6}
    runs = {
        n: with_column(fake_run([0.1, 0.2], own=[0.5, v]), online_loss=[1, v])
        for n, v in own.items()
    }
    monkeypatch.setattr(examples, "fedres", lambda seed: runs)
    found = sections.fedres(0)
    assert found.claim == claims.fedres(0.9, 0.8, 0.7, 0.6) and found.claim.holds
    assert [row.score for row in found.rows] == [*own.values()]
    assert found.chart.lines[3].y == {"own_accuracy": [0.5, 0.6], "online_loss": [1, 0.6]}


def test_fedboost_adds_up_the_weights_of_the_first_three(monkeypatch):
    """Weights of 1/2, 1/8 and 1/8 are three quarters; 3 and 1 sent in two rounds are 2 a round."""
    alpha = torch.tensor([0.5, 0.125, 0.125, 0.25, *[0.0] * 8])
    few = with_column(fake_run([0.5, 0.7, 0.9], up=0, down=10**6), sent=[np.nan, 3, 1])
    few = replace(few, state=SimpleNamespace(alpha=alpha))
    runs = {"FedBoost": few, "all sent": fake_run([0.5, 0.7, 0.91], up=0, down=4 * 10**6)}
    runs["equal weights"] = fake_run([0.5])
    monkeypatch.setattr(examples, "fedboost", lambda seed: runs)
    found = sections.fedboost(0)
    assert found.claim == claims.fedboost(0.75, 0.9, 0.5, 0.91, 2.0, 0.25) and found.claim.holds
    bars = found.chart.bars
    assert [bar.value for bar in bars] == alpha.tolist()
    assert [bar.reference for bar in bars] == [False] * 3 + [True] * 9
    assert bars[3].name == "turned by 90°, 1"


@pytest.mark.parametrize("name", demo.NAMES)
def test_the_code_on_the_page_needs_nothing_else(name):
    """All names in it are its own, imported in it, or Python's."""
    claim, chart = Claim(True, ""), Bars("", "", "", [Bar("", 1)])
    code = Section(name, "", "", claim, chart, []).code
    space: dict = {}
    exec(compile(code, name, "exec"), space)
    inner = [space[name].__code__]
    while inner:
        one = inner.pop()
        inner += [c for c in one.co_consts if hasattr(c, "co_code")]
        for used in re.findall(r"LOAD_GLOBAL +\d+ \((?:NULL \+ )?(\w+)\)", listing(one)):
            assert used in space or used in vars(__import__("builtins")), used


def listing(code):
    import dis
    import io

    out = io.StringIO()
    dis.dis(code, file=out, depth=0)
    return out.getvalue()


# The command


@pytest.fixture
def cli(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments, code=0):
        result = CliRunner().invoke(app, ["demo", *arguments])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    return call


def toy(name, holds=True):
    """A section that takes no time."""

    def section(seed):
        chart = Bars(f"A chart of {name}", "Of two.", "weight", [Bar("a", 0.75), Bar("b", 0.25)])
        claim = Claim(holds, f"{name} with <seed> {seed}")
        return Section(name, f"The title of {name}", "A setting.", claim, chart, [
            Row("first", 0.5, 3, 1.25, 0.75), Row("second", 0.25, 0, 0.0, float("nan"))
        ])  # fmt: skip

    return section


@pytest.fixture
def toys(monkeypatch):
    for name in demo.NAMES:
        monkeypatch.setitem(SECTIONS, name, toy(name, holds=name != "fedfw"))


def test_every_example_is_shown_in_order_and_on_the_page(cli, toys, tmp_path):
    assert (*SECTIONS,) == demo.NAMES
    said = cli("--seed", "5", "--out", "d").output
    places = [said.index(f"The title of {n}\n  {n} with <seed> 5\n") for n in demo.NAMES]
    assert places == sorted(places)
    assert re.search(r"^second +averaging +0\.250 +0 +0 +–$", said, re.M)
    assert re.search(r"^first +ffgb +0\.500 +3 +1\.25 +0\.75$", said, re.M)
    assert page.BY_HAND in " ".join(said.split())
    assert "page: d/report.html (file://" in said
    text = (tmp_path / "d" / "report.html").read_text(encoding="utf-8")
    parser = check(text)
    assert parser.tags.count("figure") == 6
    assert "seed 5" in parser.text and page.BY_HAND in parser.text
    assert [n for n in parser.ids if n in demo.NAMES] == [*demo.NAMES]
    # a claim that does not hold is marked
    assert text.count('<p class="error">') == 1
    assert '<p class="error">fedfw with &lt;seed&gt; 5</p>' in text


def test_some_of_the_examples(cli, toys, tmp_path):
    said = cli("--only", "fedres", "--only", "ffgb").output
    assert said.index("The title of ffgb") < said.index("The title of fedres")
    assert "fedboost" not in said
    assert (tmp_path / "foedus-demo" / "report.html").is_file()


def test_wrong_options(cli):
    message = cli("--only", "fedbost", code=2).stderr
    assert message.startswith("foedus: error: --only: ")
    assert "did you mean 'fedboost'" in message
    assert cli("--seed", "-1", code=2).exit_code == 2
    assert cli("--rounds", "3", code=2).exit_code == 2


def test_a_terminal_is_told_what_is_computed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with page.working("ffgb (1 of 6)"):
        pass
    captured = capsys.readouterr()
    assert "ffgb (1 of 6)" in captured.err and not captured.out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the command prints, and its page."""
    folder = tmp_path_factory.mktemp("demo")
    result = CliRunner().invoke(app, ["demo", "--out", str(folder / "d")])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output, folder / "d" / "report.html"


def test_all_claims_hold_as_it_comes(whole):
    said, path = whole
    assert "does not hold" not in said
    for name in ("FFGB", "FedNewton", "FedFW", "FedRes", "FedBoost", "Scaffold", "Central"):
        assert name in said
    assert "target: accuracy" in said
    parser = check(path.read_text(encoding="utf-8"))
    assert parser.tags.count("figure") == 5 + 3
    assert "<h1>foedus demo" in path.read_text(encoding="utf-8")
    assert path.stat().st_size < 2_000_000
    # sentences of the page are those of the terminal
    flat = " ".join(said.split())
    sentences = re.findall(r"</h2>\n<p>(.*?)</p>", path.read_text(encoding="utf-8"))
    assert len(sentences) == 6
    assert all(s.replace("&#39;", "'") in flat for s in sentences)


def test_the_page_in_a_browser(whole):
    with chromium() as tab:
        for width in (390, 1280):
            tab.open(whole[1], width)
            assert tab.run("document.documentElement.scrollWidth") == width
            assert tab.run("document.querySelectorAll('.plotted > svg').length") == 8
        tab.run("document.querySelector('#fedboost .plotted').focus()")
        tab.key("ArrowRight")
        shown = tab.run("document.querySelector('#fedboost .tip').textContent")
        data = tab.run("document.querySelector('#fedboost script').textContent")
        assert shown.startswith("upright, 1")
        assert f"{json.loads(data)['bars'][0]['value']:.4f}" in shown
        assert tab.problems == []
