"""Pages of every kind in Chromium: quiet, readable at all widths, by keyboard, without scripts."""

from __future__ import annotations

import json
import math
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

import foedus as fd
from foedus.audit import pages
from foedus.audit.attack import Reconstruction
from foedus.audit.hostility import HostileAudit
from foedus.audit.leakage import Leakage
from foedus.papers.pages import write_pages
from foedus.report.html import write_page
from tests.report.browser import chromium

ROOT = Path(__file__).parents[2]


def make_compare(path):
    fed = fd.split(fd.load("wine"), "dirichlet", clients=4, alpha=0.5)
    algorithms = {"FedAvg": fd.FedAvg(), "strong": fd.FedProx(mu=1.0), "Central": fd.Central()}
    return fd.compare(algorithms, fed, 3, seeds=2, per_client=True, metrics=["auc"]).report(path)


def make_run(path):
    fed = fd.split(fd.load("diabetes"), "quantity", clients=5)
    return fd.run(fd.FedAvg(lr=0.01), fed, rounds=3, per_client=True).report(path)


def make_tune(path):
    fed = fd.split(fd.load("wine"), "iid", clients=4)
    grid = {"lr": [0.01, 0.1, 1.0], "model.bias": [True, False]}
    return fd.tune(fd.FedAvg(fd.Linear()), fed, 3, grid=grid, workers=1).report(path)


def make_diagnose(path):
    fed = fd.split(fd.load("wine"), "dirichlet", clients=4, alpha=0.5)
    return fd.diagnose(fed, iterations=3).report(path)


def make_paper(path):
    folder = path.parent / "results"
    folder.mkdir()
    for name in ("fedboost-figure4", "fedfw-figure1", "fednewton-figure2", "fedres-figure1"):
        for file in (ROOT / "results").rglob(f"{name}.json"):
            target = folder / file.relative_to(ROOT / "results")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    write_pages(folder)
    return folder / "fednewton.html"


def leakage():
    image, guess = torch.eye(4)[None], torch.full((1, 4, 4), 0.25)
    shots = {0: guess, 2: image}
    made = Reconstruction(
        128, [5.0, 12.3456, 30.0], [1.0, 0.5, 0.1], image, shots, 3, True, True, 0
    )
    return Leakage("digits", 7, image, 3, {"gradient": made}, 11.0, 14.0, 100)


def make_leakage(path):
    return leakage().report(path, command="foedus audit leakage --out page.html")


def make_hostile(path):
    accuracy = {("", 0.0, m): 0.9 for m in ("mean", "median")}
    accuracy |= {(a, 0.4, m): 0.25 for a in ("scale", "nan") for m in ("mean", "median")}
    accuracy["nan", 0.4, "mean"] = None
    found = HostileAudit("digits", 100, ("scale", "nan"), (0.4,), ("mean", "median"), accuracy)
    return found.report(path)


def make_privacy(path):
    import pandas as pd

    utility = pd.DataFrame([{"algorithm": "FedAvg", "no noise": 0.9, "8": 0.8, "0.5": 0.4}])
    columns = ["epsilon", "advantage", "auc", "chance", "bound", "accuracy"]
    rows = [[math.inf, 0.9, 0.95, 0.2, 1.0, 0.9], [1.0, 0.1, 0.5, 0.2, 0.46, 0.7]]
    rebuilt = pd.DataFrame({"noise": [0.0, 0.03, 0.3], "gradient": [50.0, 9.0, 4.0]})
    studies = {"utility": utility, "membership": pd.DataFrame(rows, columns=columns)}
    return write_page(path, pages.privacy(studies | {"leakage": rebuilt}, None, ""))


MAKERS = {k.removeprefix("make_"): v for k, v in globals().items() if k.startswith("make_")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every kind of page, made when it is first asked for."""
    folder, found = tmp_path_factory.mktemp("pages"), {}

    def get(kind: str) -> Path:
        if kind not in found:
            found[kind] = MAKERS[kind](folder / f"{kind}.html")
        return found[kind]

    return get


@pytest.fixture(scope="module")
def tab():
    with chromium() as page:
        yield page


every_page = pytest.mark.parametrize("kind", list(MAKERS))
CHART = "document.querySelectorAll('figure.chart')[{}]"


def tip(tab, number):
    """What the tooltip of a chart says, line by line."""
    at = CHART.format(number)
    return tab.run(f"[...{at}.querySelectorAll('.tip > *')].map((e) => e.textContent)")


def focus(tab, number):
    tab.run(f"{CHART.format(number)}.querySelector('.plotted').focus()")


def table_under(tab, heading):
    """The cells of the first table under a heading."""
    rows = (
        f"[...[...document.querySelectorAll('section')].find((s) => "
        f"s.querySelector('h2').textContent === {json.dumps(heading)}).querySelector('table').rows]"
    )
    return tab.run(f"{rows}.map((r) => [...r.cells].map((c) => c.textContent.trim()))")


# -- every kind ------------------------------------------------------------------------------------


@every_page
def test_it_is_quiet_loads_nothing_and_is_small(kind, made, tab):
    tab.problems.clear(), tab.requests.clear()
    tab.open(made(kind))
    charts = tab.run("document.querySelectorAll('figure.chart').length")
    assert charts and charts == tab.run("document.querySelectorAll('figure.chart.live').length")
    assert tab.problems == []
    assert not [r for r in tab.requests if not r.startswith(("file:", "data:"))]
    assert made(kind).stat().st_size < 2_000_000


@every_page
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_it_does_not_scroll_sideways(kind, width, made, tab):
    tab.open(made(kind), width=width)
    tab.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert tab.run("document.documentElement.scrollWidth") <= width


@every_page
def test_it_is_dark_where_the_system_is(kind, made, tab):
    def brightness(what):
        style = f"getComputedStyle(document.body).{what}"
        return sum(map(int, re.findall(r"\d+", tab.run(style))[:3]))

    try:
        tab.media(prefers_color_scheme="dark")
        tab.open(made(kind))
        assert brightness("backgroundColor") < 150 < 500 < brightness("color")
        # no text of a chart is darker than its page
        texts = "[...document.querySelectorAll('.plotted svg text')]"
        texts += ".map((t) => getComputedStyle(t).fill)"
        fills = {sum(map(int, re.findall(r"\d+", f)[:3])) for f in tab.run(texts)}
        cells = tab.run("document.querySelectorAll('[aria-label=cell]').length")
        assert cells or min(fills) > 200  # numbers in cells are dark on bright colors
    finally:
        tab.media()


@every_page
def test_every_value_can_be_read_by_keyboard(kind, made, tab):
    """Arrow keys go through a chart, and say aloud what the tooltip shows."""
    tab.open(made(kind))
    for number in range(tab.run("document.querySelectorAll('figure.chart').length")):
        focus(tab, number)
        tab.key("ArrowRight")
        tab.key("ArrowRight")
        said = tip(tab, number)
        assert len(said) >= 2 and all(said)
        aloud = tab.run(f"{CHART.format(number)}.querySelector('.announced').textContent")
        assert aloud == ", ".join(
            line.replace(": ", " ", 1) if i else line for i, line in enumerate(said)
        )
        tab.key("Escape")
        assert tab.run(f"{CHART.format(number)}.querySelector('.tip').hidden")


@every_page
def test_every_control_is_native_named_and_shows_its_focus(kind, made, tab):
    tab.open(made(kind))
    unnamed = (
        "[...document.querySelectorAll('button, select, input')].filter((e) => "
        "!(e.textContent.trim() || e.closest('label')?.textContent.trim())).length"
    )
    assert tab.run(unnamed) == 0
    tab.key("Tab")
    seen = set()
    for _ in range(200):
        about = tab.run(
            "(() => { const e = document.activeElement, look = getComputedStyle(e); "
            "return e === document.body ? null : "
            "[e.tagName, look.outlineStyle, parseFloat(look.outlineWidth)] })()"
        )
        if about is None:
            break
        seen.add(about[0])
        assert about[1] != "none" and about[2] >= 1, about
        tab.key("Tab")
    assert "DIV" in seen  # charts and tables that scroll


@every_page
def test_the_pictures_are_there_without_javascript_and_in_print(kind, made, tab):
    """One static picture at least for every figure, or for a figure of several charts."""
    seen = (
        "[...document.querySelectorAll('.static')].filter((s) => s.querySelector('svg') && "
        "s.querySelector('svg').getBoundingClientRect().height > 50).length"
    )
    needed = (
        "[...document.querySelectorAll('.static')].filter((s) => s.querySelector('svg')).length"
    )
    try:
        tab.ask("Emulation.setScriptExecutionDisabled", value=True)
        tab.open(made(kind))
        assert tab.run(needed) and tab.run(seen) == tab.run(needed)
        assert tab.run("document.querySelectorAll('.plotted, th button').length") == 0
        tab.ask("Emulation.setScriptExecutionDisabled", value=False)
        tab.open(made(kind))
        assert tab.run(seen) == 0  # the live charts are there instead
        tab.media("print")
        assert tab.run(seen) == tab.run(needed)
        assert not tab.run("[...document.querySelectorAll('.plotted')].some((p) => p.offsetHeight)")
    finally:
        tab.ask("Emulation.setScriptExecutionDisabled", value=False)
        tab.media()


# -- values in tooltips are those of tables --------------------------------------------------------


def test_the_last_point_of_a_curve_is_the_number_of_the_table(made, tab):
    tab.open(made("compare"))
    rows = {row[0]: row for row in table_under(tab, "Results")[1:]}
    lines = tab.run(
        f"[...{CHART.format(0)}.querySelectorAll('.legend button')].map((b) => b.textContent)"
    )
    assert lines == list(rows) == ["FedAvg", "strong", "Central"]
    focus(tab, 0)
    for name in lines:
        tab.key("End" if name == "FedAvg" else "ArrowDown")
        tab.key("End")
        title, value, *others = tip(tab, 0)
        assert title == name
        assert value.partition(": ")[2] == rows[name][1].partition(" ± ")[0]
        assert others[-1] == "round: 3"


def test_the_worst_client_is_named_by_round_as_in_the_table_of_clients(made, tab):
    tab.open(made("run"))
    table = table_under(tab, "Every client")
    at = table[0].index("mse")
    worst = max(table[1:], key=lambda row: float(row[at]))
    chart = CHART.format(1)
    choose = f"{chart}.querySelector('select')"
    options = tab.run(f"[...{choose}.options].map((o) => o.textContent)")
    assert options[:2] == ["mean squared error, median client", "mean squared error, worst"]
    tab.run(f"{choose}.focus()")
    tab.key("ArrowDown")
    focus(tab, 1)
    tab.key("ArrowRight")
    tab.key("End")
    assert tip(tab, 1)[1:] == [
        f"mean squared error, worst: {worst[at]}",
        f"client {worst[0]}",
        "round: 3",
    ]
    assert f"worst: client {worst[0]} ({worst[at]})" in tab.run(
        f"{CHART.format(2)}.querySelector('.plotted').textContent"
    )


def test_bars_of_a_search_are_the_rows_of_its_table(made, tab):
    tab.open(made("tune"))
    table = table_under(tab, "Every combination")[1:]
    focus(tab, 0)
    tab.key("ArrowRight")
    for row in table:
        title, score, rounds = tip(tab, 0)
        assert title == ", ".join(row[:2])
        assert score == f"validation accuracy: {row[2]}"
        assert rounds == f"after {row[3]} round{'s' * (row[3] != '1')}"
        tab.key("ArrowDown")


def test_curves_of_hostile_clients_end_where_runs_stop(made, tab):
    tab.open(made("hostile"))
    table = table_under(tab, "Accuracy")
    assert table[1:] == [
        ["scale", "mean", "0.9000", "0.2500"], ["scale", "median", "0.9000", "0.2500"],
        ["nan", "mean", "0.9000", "stops"], ["nan", "median", "0.9000", "0.2500"],
    ]  # fmt: skip
    tab.run(f"{CHART.format(0)}.querySelector('select').focus()")
    tab.key("ArrowDown")
    focus(tab, 0)
    tab.key("ArrowRight")
    tab.key("End")
    said = tip(tab, 0)
    assert said == [
        "mean",
        "accuracy under the attack nan: 0.9000",
        "part of the clients that are hostile: 0.0000",
    ]


def test_images_of_leakage_are_there(made, tab):
    tab.open(made("leakage"))
    assert tab.run("[...document.images].map((i) => [i.alt, i.naturalWidth])") == [
        ["gradient, original", 4], ["gradient, iteration 0", 4], ["gradient, iteration 2", 4],
    ]  # fmt: skip
    focus(tab, 0)
    tab.key("End")
    tab.key("ArrowRight")
    assert tip(tab, 0) == ["gradient", "PSNR, dB: 12.346", "iteration: 1"]


def test_a_pointer_shows_the_point_below_it(made, tab):
    tab.open(made("compare"))
    mark = f"{CHART.format(0)}.querySelector('.plotted svg [aria-label=dot] :first-child')"
    tab.run(f"{mark}.scrollIntoView({{block: 'center'}})")
    box = tab.run(
        f"(() => {{ const b = {mark}.getBoundingClientRect(); "
        "return [b.x + b.width / 2, b.y + b.height / 2] })()"
    )
    tab.point_at(*box)
    assert tip(tab, 0)[-1] == "round: 0"


# -- controls --------------------------------------------------------------------------------------


def test_a_line_is_hidden_and_shown_by_keyboard(made, tab):
    tab.open(made("compare"))
    button = f"{CHART.format(0)}.querySelectorAll('.legend button')[1]"
    drawn = f"{CHART.format(0)}.querySelectorAll('.plotted [aria-label=line]').length"
    before = tab.run(drawn)
    tab.run(f"{button}.focus()")
    for key, pressed, count in ((" ", "false", before - 1), ("Enter", "true", before)):
        tab.key(key)
        assert tab.run(f"{button}.getAttribute('aria-pressed')") == pressed
        assert tab.run(drawn) == count


def test_axes_are_chosen_by_keyboard(made, tab):
    tab.open(made("compare"))
    chart = CHART.format(0)
    label = f"{chart}.querySelector('.plotted').textContent"
    selects = f"{chart}.querySelectorAll('select')"
    options = tab.run(f"[...{selects}].map((s) => [...s.options].map((o) => o.textContent))")
    assert options[1] == ["round", "megabytes, up and down", "seconds of computing"]
    assert {"accuracy, test rows", "loss, test rows", "auc"} <= set(options[0])
    tab.run(f"{selects}[1].focus()")
    tab.key("ArrowDown")
    assert "megabytes, up and down" in tab.run(label)
    tab.run(f"{selects}[0].focus()")
    tab.key("ArrowDown")
    assert options[0][1] in tab.run(label)
    labels = f"[...{chart}.querySelectorAll('label')]"
    log = f"{labels}.find((l) => l.textContent === 'log y').querySelector('input')"
    ticks = f"[...{chart}.querySelectorAll('[aria-label=\"y-axis tick label\"] text')]"
    ticks += ".map((t) => t.textContent)"
    before = tab.run(ticks)
    tab.run(f"{log}.focus()")
    tab.key(" ")
    assert tab.run(f"{log}.checked") and tab.run(ticks) != before


def test_tables_are_sorted_by_keyboard(made, tab):
    tab.open(made("compare"))
    heading = "document.querySelector('table').tHead.rows[0].cells[1]"
    tab.run(f"{heading}.querySelector('button').focus()")
    for direction in ("descending", "ascending"):
        tab.key("Enter")
        assert tab.run(f"{heading}.getAttribute('aria-sort')") == direction
        column = [float(row[1].split()[0]) for row in table_under(tab, "Results")[1:]]
        assert column == sorted(column, reverse=direction == "descending")


def test_what_is_copied_is_the_file(made, tab):
    tab.open(made("compare"))
    text = unescape(
        re.findall(r'<pre class="copy">(\[data\].*?)</pre>', made("compare").read_text(), re.S)[0]
    )
    button = "[...document.querySelectorAll('.copied')].at(-1).querySelector('button')"
    tab.run(f"{button}.focus()")
    tab.key("Enter")
    tab.wait(f"{button}.textContent !== 'Copy'")
    assert tab.run("getSelection().toString()").strip() == text.strip()


def test_settings_that_differ_come_first(made, tab):
    tab.open(made("compare"))
    rows = table_under(tab, "Settings")
    assert ["mu", "–", "1", "–"] in rows
    assert not any(len(set(row[1:])) == 1 for row in rows[1:])
    np.testing.assert_equal(rows[0][1:], ["FedAvg", "strong", "Central"])
