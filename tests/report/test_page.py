from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib import resources

import matplotlib
import pytest

import foedus as fd
from foedus.report import plots
from foedus.report.compare import Comparison
from foedus.report.page import render
from tests.report.fakes import central, fake_run, independent

_VOID = {"meta", "link", "br", "hr", "img", "input"}


class Checker(HTMLParser):
    """Notes tags that are not closed in order, ids that come twice, and every address that a
    browser would load.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.problems: list[str] = []
        self.text = ""
        self.attributes: set[str] = set()
        self.scripts: list[tuple[str | None, str]] = []  # the type of each, and what is in it

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in _VOID:
            self.stack.append(tag)
        self.handle_attributes(attrs)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.handle_attributes(attrs)

    def handle_attributes(self, attrs):
        if self.tags[-1] == "script":
            self.scripts.append((dict(attrs).get("type"), ""))
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.addresses.append(value)

    def handle_endtag(self, tag):
        if not self.stack or self.stack.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            kind, text = self.scripts.pop()
            self.scripts.append((kind, text + data))
        else:
            self.text += data


STATIC = resources.files("foedus.report") / "static"
SCRIPTS = ("d3.min.js", "plot.min.js", "kinds.js", "charts.js", "tables.js")


def check(page: str, links: Sequence[str] = ()) -> Checker:
    """What the page runs is ours, and nothing else is; links: to other pages."""
    for name in (*SCRIPTS, "NOTICE"):
        page = page.replace((STATIC / name).read_text(encoding="utf-8"), "")
    parser = Checker()
    parser.feed(page)
    parser.close()
    assert parser.problems == []
    assert parser.stack == []
    assert len(set(parser.ids)) == len(parser.ids)
    assert all(a.startswith(("#", "data:", *links)) for a in parser.addresses), parser.addresses
    assert {a[1:] for a in parser.addresses if a.startswith("#")} <= set(parser.ids)
    for kind, text in parser.scripts:
        if kind == "application/json":
            assert json.loads(text)["kind"] in ("lines", "bars", "dots", "cells")
        else:
            assert kind in (None, "text/plain") and not text.strip()
    assert not any(name.startswith("on") or name == "style" for name in parser.attributes)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    assert "http://" not in page
    assert "https://" not in page
    return parser


@pytest.fixture(scope="module")
def comparison():
    runs = {
        "<script>alert(1)</script> & co": [
            fake_run([0.1, 0.7, 0.9], seed=0),
            fake_run([0.1, 0.6, 0.8], seed=1),
        ],
        "alone": [independent([0.1, 0.2, 0.3], own=[0.1, 0.6, 0.7])],
        "all": [central([0.1, 0.95, 0.95])],
        "$lost$": [fake_run([0.1, 0.2])],
    }
    fed = fd.split(fd.load("wine"), "dirichlet", clients=4, alpha=0.3, seed=0)
    return Comparison(runs, fed, None, {"$lost$": {0: "round 2: the loss is <nan>"}})


@pytest.fixture(scope="module")
def page(comparison):
    return render(comparison, "A <b>title</b>")


def test_page_is_well_formed_and_loads_nothing(page):
    parser = check(page)
    assert parser.tags.count("figure") == 2  # curves and holdings
    assert parser.tags.count("svg") == 4 + 4 + 1  # of rows of the table, of the curves, of holdings
    assert "viewport" in page
    assert page.startswith("<!DOCTYPE html>")


def test_everything_of_the_user_is_escaped(page):
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in page
    assert "<title>A &lt;b&gt;title&lt;/b&gt;</title>" in page
    assert "the loss is &lt;nan&gt;" in page


@pytest.mark.parametrize("kind", ["comparison", "diagnosis"])
def test_names_in_the_data_are_escaped(kind, tmp_path):
    """The name of a file and those of classes, columns and algorithms, in text, in figures and in
    attributes.
    """
    file, names = tmp_path / 'rows <script>"&.csv', ["<script>a", "</svg><script>b", '"><script>c']
    rows = [f"{i % 7},{i % 5},{names[i % 3]}" for i in range(60)]
    with file.open("w", newline="") as out:
        csv.writer(out).writerows(
            [["<script>one", "two", "class"], *(row.split(",") for row in rows)]
        )
    fed = fd.split(fd.load(file, label="class"), "iid", clients=3)
    if kind == "comparison":
        label = "</svg><script>alert(1)</script>"
        report = fd.compare({label: fd.FedAvg(), "B": fd.FedProx()}, fed, rounds=2).report
    else:
        report = fd.diagnose(fed, iterations=3).report
    page = report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>one" not in page and "rows &lt;script&gt;&#34;&amp;" in page
    check(page)


def test_page_has_numbers_settings_and_versions(page):
    text = check(page).text
    for wanted in (
        "0.8500 ± 0.0707",
        "0.7000",
        "diverged in round 2",
        "server_momentum",
        "model.type",
        "min_rows",
        "dirichlet",
    ):
        assert wanted in text, wanted
    assert f"foedus {fd.version.__version__}" in text
    assert "0, 1" in text  # the seeds
    assert "torch 2" in text


def test_report_writes_one_file_and_leaves_the_plots_of_the_caller_alone(comparison, tmp_path):
    before = dict(matplotlib.rcParams)
    path = comparison.report(tmp_path / "new" / "page.html")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["page.html"]
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert dict(matplotlib.rcParams) == before


def test_page_of_saved_runs_without_a_federation():
    check(render(Comparison({"A": [fake_run([0.1, 0.5])]})))


def test_page_without_evaluation():
    assert "nothing to draw" in render(Comparison({"A": [fake_run([None, None])]}))


def test_page_of_a_regression_and_of_many_algorithms():
    fed = fd.split(fd.load("diabetes"), "iid", clients=3)
    runs = {
        f"algorithm number {i} of many": [fake_run([9.0, 3.0 + i / 10], name="mse")]
        for i in range(14)
    }
    assert "mean squared error" in check(render(Comparison(runs, fed))).text


def test_styles_differ_in_grey_too():
    names = [str(i) for i in range(12)]
    found = plots.styles(names, pooled=["3"])
    assert len({(s.colour, str(s.dash)) for s in found.values()}) == 12
    first = [found[n] for n in names[:6]]
    assert len({str(s.dash) for s in first}) == len({s.marker for s in first}) == 6


def test_pages_are_the_same_every_time(comparison):
    assert render(comparison) == render(comparison)
