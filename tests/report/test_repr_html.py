"""What notebooks show of results: numbers by hand, all text escaped, bounded in size and time."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.audit.leakage import Leakage
from foedus.base import markup
from foedus.report.compare import Comparison
from foedus.tuning.tune import Tuning
from tests.report.fakes import central, fake_run

HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>&amp;"


class Strict(HTMLParser):
    """Every tag is one of those that are meant, closed in order; tables are rows of texts."""

    TAGS = "div table thead tbody tr th td details summary svg polyline path rect text g"

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.bold: list[str] = []
        self.shades: dict[str, float] = {}
        self.curves: list[list[tuple[float, float]]] = []
        self.paths: list[tuple[float, list[str]]] = []
        self.labels: list[str] = []
        self.text = ""
        self.style = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in self.TAGS.split(), tag
        assert len({name for name, _ in attrs}) == len(attrs)
        found = dict(attrs)
        assert not any(name.startswith("on") or name in ("src", "href") for name in found)
        assert "#fff" not in found.get("style", "") and "background:white" not in str(attrs)
        self.open.append(tag)
        self.style = found.get("style", "")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "polyline":
            pairs = [p.split(",") for p in found["points"].split()]
            self.curves.append([(float(x), float(y)) for x, y in pairs])
        elif tag == "path":
            self.paths.append((float(found["fill-opacity"]), found["d"].split("M")[1:]))
        elif tag == "svg":
            self.labels.append(found["aria-label"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
            if self.open[-1] == "td" and "font-weight" in self.style:
                self.bold.append(data)
            if "rgba(61,139,212," in self.style:
                self.shades[data] = float(self.style.rpartition(",")[2].rstrip(")"))

    def handle_comment(self, data):
        raise AssertionError(data)

    handle_decl = unknown_decl = handle_pi = handle_comment


def shown(result) -> Strict:
    return Strict(result._repr_html_())


# -- by hand ---------------------------------------------------------------------------------------


def test_a_run_by_hand():
    run = fake_run([0.25, None, 0.5, 0.75], up=1_500_000, down=500_000, seconds=0.5)
    run.notes.append("stopped after round 3: enough")
    page = shown(run)
    # three rounds of 1.5 MB up and 0.5 MB down
    assert "FedAvg on toy: 3 rounds" in page.text
    assert "4.50 MB up, 1.50 MB down, 1.5 s of computing" in page.text
    assert page.text.endswith("stopped after round 3: enough")
    assert page.tables == [
        [
            ["metric", "first", "last", "by round"],
            ["loss", "1", "1", ""],
            ["accuracy", "0.25", "0.75", ""],
        ]
    ]
    # rounds 0, 2 and 3 of 0 .. 3 on 1 .. 119; accuracies of 0.25 .. 0.75 on 23 .. 1
    flat = [(1, 12), (79.7, 12), (119, 12)]
    assert page.curves == [flat, [(1, 23), (79.7, 12), (119, 1)]]
    assert page.labels[1] == "accuracy by round: 0.25 to 0.75"


def test_metrics_beyond_six_are_folded():
    run = fake_run([0.1, 0.2])
    run.records.extend({f"m{i}": float(i) for i in range(7)})
    page = shown(run)
    assert [row[0] for row in page.tables[0][1:]] == [
        "loss",
        "accuracy",
        *(f"m{i}" for i in range(4)),
    ]
    assert [row[0] for row in page.tables[1][1:]] == ["m4", "m5", "m6"]
    assert "3 more" in page.text


def test_ids_of_clients_are_no_metrics():
    run = fake_run([0.1, 0.2])
    run.records.extend({"auc_worst": 0.5, "auc_worst_client": 3})
    names = [row[0] for row in shown(run).tables[0][1:]]
    assert names == ["loss", "accuracy", "auc_worst"]


def test_a_federation_of_a_few_clients_by_hand():
    x = np.zeros((8, 1), np.float32)
    fed = fd.Federation.from_clients(
        {"north": (x[:4], [0, 0, 0, 1]), "south": (x[:2], [1, 1])},
        test={"north": (x[:1], [0]), "south": (x[:1], [1])},
        name="toy",
    )
    page = shown(fed)
    assert page.text.startswith("toy: 2 clients, given")
    assert "training rows: 6; a client has 2 to 4 (median 3)" in page.text
    assert page.tables == [
        [
            ["client", "name", "rows", "test_rows", "0", "1"],
            ["0", "north", "4", "1", "3", "1"],
            ["1", "south", "2", "1", "0", "2"],
        ]
    ]
    # 3 of 4 rows, 1 of 4, 2 of 2; an accent of 60% for the whole
    html = fed._repr_html_()
    assert [html.count(f"rgba(61,139,212,{v})") for v in ("0.45", "0.15", "0.60")] == [1, 1, 1]
    assert html.count("rgba") == 3


def test_a_heat_map_by_hand():
    # 13 clients, more than are listed: client i has a row of label 0 and i rows of label 1
    x = np.zeros((13, 1), np.float32)
    clients = [(x[: i + 1], [0] + [1] * i) for i in range(13)]
    page = shown(fd.Federation.from_clients(clients, classes=2))
    assert page.tables == []
    # the largest share is 1 (client 0); client i has 1/(i+1) and i/(i+1), in eighths rounded up
    cells = {
        cell.removesuffix("h1v1h-1z"): round(8 * opacity) for opacity, d in page.paths for cell in d
    }
    for i in range(13):
        assert cells[f"{i} 0"] == -(-8 // (i + 1))
        assert cells.get(f"{i} 1", 0) == -(-8 * i // (i + 1))
    assert len(cells) == 25  # client 0 has no row of label 1
    assert "rows: labels; columns: clients; darkest: 100% of a client's rows" in page.text


def test_many_clients_and_labels_are_averaged():
    # 400 clients on 80 labels: client i has only label i // 5
    clients = [(np.zeros((2, 1), np.float32), [i // 5] * 2) for i in range(400)]
    page = shown(fd.Federation.from_clients(clients, classes=80))
    # 100 columns of 4 clients and 40 rows of 2 labels, that is 10 clients: column j has clients
    # 4j .. 4j + 3, and those of row r are 10r .. 10r + 9
    cells = {
        cell.removesuffix("h1v1h-1z"): round(8 * opacity) for opacity, d in page.paths for cell in d
    }
    expected = {}
    for i in range(400):
        place = f"{i // 4} {i // 10}"
        expected[place] = expected.get(place, 0) + 2  # a quarter of the column's shares, in eighths
    assert cells == expected
    assert "by main label" in page.text


def test_regression_shows_means_of_targets():
    x = np.zeros((2, 1), np.float32)
    clients = [(x, np.array([1.0, 3.0], np.float32)), (x, np.array([4.0, 4.0], np.float32))]
    page = shown(fd.Federation.from_clients(clients))
    # means 2 and 4; deviations 1 and 0, of all rows
    assert page.tables[0][1:] == [["0", "2", "0", "2", "1"], ["1", "2", "0", "4", "0"]]
    many = fd.Federation.from_clients(clients * 20)
    assert shown(many).tables == [] and "40 clients" in shown(many).text


def test_a_comparison_by_hand():
    runs = {
        "A": [fake_run([0.2, 0.4]), fake_run([0.2, 0.6], seed=1)],
        "B": [fake_run([0.2, 0.7])],
        "all": [central([0.2, 1.0])],
    }
    page = shown(Comparison(runs, target=0.65))
    spread = 0.1414  # of 0.4 and 0.6: sqrt(0.1^2 + 0.1^2)
    assert page.text.startswith("toy: 3 algorithms, 1 round, 2 seeds")
    assert page.tables[0] == [
        [
            *("algorithm", "accuracy", "rounds to target", "MB to target", "MB in all", "seconds"),
            "accuracy by round",
        ],
        ["A", f"0.5000 ± {spread}", "–", "–", "1.50", "0.50", ""],
        ["B", "0.7000", "1.00", "1.50", "1.50", "0.50", ""],
        ["all", "1.0000", "1.00", "0", "0", "0.50", ""],
    ]
    assert page.bold == ["B", "0.7000"]  # the reference is no competitor
    # one scale for all: 0.2 .. 1.0 on 23 .. 1, so 0.5 is at 14.75 and 0.7 at 9.25
    ends = [c[-1][1] for c in page.curves]
    assert ends == [pytest.approx(14.75, abs=0.06), pytest.approx(9.25, abs=0.06), 1]
    assert "target: accuracy at least 0.65" in page.text
    assert "all: all data in one place" in page.text


def test_the_best_of_errors_is_the_least():
    runs = {n: [fake_run([9.0, v], name="mse")] for n, v in (("A", 2.0), ("B", 1.0))}
    assert Comparison(runs).best == "B"
    assert Comparison({"A": runs["A"]}).best is None  # alone, it is the best of nothing
    assert Comparison(runs | {"all": [central([9.0, 0.5], name="mse")]}).best == "B"


def test_a_tuning_by_hand():
    import pandas as pd

    rows = [(0.1, 0.9, 0.01, 4, 1.0, ""), (1.0, np.nan, np.nan, 0, 1.0, "diverged <b>")]
    table = pd.DataFrame(rows, columns=["lr", "score", "spread", "rounds", "seconds", "failed"])
    page = shown(Tuning(fd.FedAvg(), {"lr": 0.1}, "accuracy", table, (), "toy: 2 settings"))
    assert page.tables == [
        [
            ["lr", "validation accuracy", "rounds"],
            ["0.1", "0.9000 ± 0.0100", "4"],
            ["1", "failed", "–"],
        ]
    ]
    assert page.bold == ["0.1", "0.9000 ± 0.0100", "4"]
    assert "chosen: lr = 0.1" in page.text and "diverged <b>" in page.text


def test_leakage_by_hand():
    guess = SimpleNamespace(bytes=1234, psnr=[5.0, 10.0, 30.04])
    image = torch.zeros(1, 2, 2)
    leakage = Leakage("digits", 7, image, 3, {"gradient": guess}, 11.0, 14.0, 0)  # type: ignore[dict-item]
    page = shown(leakage)
    assert page.tables[0][1:] == [
        ["gradient", "1,234", "30.0", ""],
        ["none: average image", "0", "11.0", ""],
        ["label only: average of its class", "–", "14.0", ""],
    ]
    assert page.curves[0][0] == (1, 23) and page.curves[0][-1] == (119, 1)


def test_a_diagnosis_shows_advice_and_measures():
    fed = fd.split(fd.load("wine"), "iid", clients=3)
    found = fd.diagnose(fed, iterations=3)
    page = shown(found)
    advice, measures = page.tables
    assert [row[0] for row in advice[1:]] == [a.aim for a in found.advice]
    assert advice[1][1] == found.advice[0].code and advice[1][2] == found.advice[0].text
    assert [tuple(row) for row in measures[1:]] == found.measures()


# -- what is not to be trusted ---------------------------------------------------------------------


def hostile_federation(clients: int) -> fd.Federation:
    import pandas as pd

    rows = {"a": [1.0, 2.0, 3.0], "y": [f"{HOSTILE}1", f"{HOSTILE}2", f"{HOSTILE}1"]}
    tables = {f"{HOSTILE}{i}": pd.DataFrame(rows) for i in range(clients)}
    return fd.Federation.from_clients(tables, label="y", name=HOSTILE)


@pytest.mark.parametrize("clients", [2, 14])
def test_names_from_files_are_escaped(clients):
    page = shown(hostile_federation(clients))
    assert HOSTILE[:16] in page.text and "script" not in page.open


def test_what_a_loaded_run_holds_is_escaped(tmp_path):
    run = fake_run([0.1, 0.2])
    run.settings["federation"]["data"] = HOSTILE
    run.notes.append(f"{HOSTILE} \ud800\x00")
    run.records.extend({HOSTILE: 0.5, "word": HOSTILE, "nothing": None, "huge": 10**400})
    page = shown(run)
    assert page.text.count("<script>") == 3
    assert "\\ud800\\x00" in page.text
    page.text.encode()  # no surrogate is left
    assert [row[0] for row in page.tables[0][1:]] == ["loss", "accuracy", HOSTILE[:60] + "…"]


def test_names_of_a_comparison_are_escaped():
    cmp = Comparison({HOSTILE: [fake_run([0.1, 0.2])]}, left_out=[HOSTILE])
    page = shown(cmp)
    assert page.text.count("<script>") == 2
    assert page.labels == [f"accuracy of {HOSTILE} by round"[:60] + "…"]


# -- bounds ----------------------------------------------------------------------------------------


def test_large_results_stay_small():
    rng = np.random.default_rng(0)
    for clients, classes in ((1_000, 10), (100_000, 100)):
        x, y = np.zeros((2 * clients, 1), np.float32), rng.integers(0, classes, 2 * clients)
        data = fd.Data.from_arrays(x, y, x[:1], y[:1], classes=classes)
        ends, ids = np.arange(0, 2 * clients + 1, 2), np.arange(clients)
        fed = fd.Federation(data, np.arange(2 * clients), ends, [], np.zeros(clients + 1), ids)
        assert len(fed._repr_html_().encode()) < 100_000
    many = fake_run(rng.random(10_001).tolist())
    many.records.extend({f"{'m' * 300}{i}": 0.5 for i in range(100)})
    many.notes.extend(["n" * 10_000] * 1_000)
    assert len(many._repr_html_().encode()) < 100_000
    some = fake_run(rng.random(501).tolist())
    some.records.extend({f"{'m' * 300}{i}": 0.5 for i in range(100)})
    cmp = Comparison({f"{'a' * 300}{i}": [some] for i in range(40)}, left_out=["f" * 10_000] * 100)
    assert len(cmp._repr_html_().encode()) < 100_000


def test_curves_keep_their_ends_and_survive_extremes():
    points = [(t, float(t)) for t in range(10_000)]
    (line,) = Strict(markup.curve(points, "")).curves
    assert len(line) == 100 and line[0] == (1, 23) and line[-1] == (119, 1)
    assert markup.curve([(0, 1.0)], "") == "" == markup.curve([], "")
    assert markup.curve([(0, 1.0), (1, float("nan")), (None, 2.0)], "") == ""
    (line,) = Strict(markup.curve([(0, -1e299), (1, 1e299), (2, "x"), (3, 1e308)], "")).curves
    assert line == [(1, 23), (119, 1)]
    (line,) = Strict(markup.curve([(0, 0.5), (1, 9.0)], "", (0.0, 1.0))).curves
    assert line == [(1, 12), (119, 1)]  # beyond the limits it stays at the edge


def test_tables_say_what_they_leave_out():
    page = Strict(markup.table(["n"], [[i] for i in range(1_031)]))
    assert len(page.tables[0]) == 31 and page.text.endswith("and 1,001 more")


def test_nothing_draws_with_matplotlib():
    code = (
        "import sys, foedus as fd; fed = fd.split(fd.load('wine'), 'iid', clients=3)\n"
        "run = fd.run(fd.FedAvg(fd.Linear()), fed, rounds=1)\n"
        "from foedus.report.compare import Comparison\n"
        "for r in (fed, run, Comparison({'A': [run]}, fed)): assert r._repr_html_()\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
