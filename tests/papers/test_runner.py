"""The runner: cells that are run once, in any number of processes, and go on; claims; what is
shown.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import numpy as np
import pandas as pd
import pytest

import foedus as fd
from foedus.papers import markdown, pages, runner
from foedus.papers import results as render
from foedus.papers.item import Claim, Found, Item, Lines, Missing, Paper, Table, product, slope
from foedus.papers.store import Cell, Store, found_in
from tests.report.test_page import check

CALLS: list[dict] = []


def square(seed, x, method):
    CALLS.append({"x": x, "method": method, "seed": seed})
    return [{"value": x * x + 0.5 * seed}]


def needs(seed, x):
    return [{"value": x + 10 * seed}]


ITEMS = {
    "table": Item(
        title="Squares",
        cell=square,
        cells=lambda scale: product(x=(1, 2) if scale == "quick" else (1, 2, 3), method=("a", "b")),
        views=(
            Table(("x",), ("value",), columns=("method",), published={(1,): 1.0, (2,): 5.0}),
            Lines("x", "value", "method", caption="Curves"),
        ),
        claims=(
            Claim("they grow", lambda f: (f.mean("value", x=2) > f.mean("value", x=1), "4 > 1")),
            Claim("nine", lambda f: (f.mean("value", x=3) > 9, "")),
            Claim("they fall", lambda f: (f.mean("value", x=2) < f.mean("value", x=1), "")),
        ),
        seeds={"quick": 1, "usual": lambda s: 2 if s["method"] == "a" else 1, "full": 3},
    ),
    "base": Item(
        title="Base",
        cell=needs,
        cells=lambda scale: product(x=(1, 2)),
        views=(),
        seeds={"quick": 1, "usual": 1, "full": 1},
    ),
    "after": Item(
        title="After",
        cell=lambda seed, x, top: [{"value": x + top}],
        cells=lambda scale, base: [
            {"x": x, "top": base.mean("value", x=x)} for x in base.values("x")
        ],
        needs=("base",),
        views=(),
        seeds={"quick": 1, "usual": 1, "full": 1},
    ),
}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    CALLS.clear()
    module = types.ModuleType("foedus.papers.toy")
    module.PAPER = Paper(title="A toy", family="Toy", items=ITEMS)
    monkeypatch.setitem(sys.modules, "foedus.papers.toy", module)
    for reader in (runner, markdown, pages):
        monkeypatch.setattr(reader, "PAPERS", ("toy",))


def test_a_cell_is_run_once(tmp_path):
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    assert len(CALLS) == 4
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    assert len(CALLS) == 4
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1, fresh=True)
    assert len(CALLS) == 8


def test_one_more_seed_runs_only_that_seed(tmp_path):
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    cells = runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1, seeds=2)
    assert {c["seed"] for c in CALLS[4:]} == {1} and len(CALLS) == 8
    assert found_in(cells).mean("value", x=2, method="a") == 4.25


def test_what_was_stopped_goes_on(tmp_path, monkeypatch):
    def stops(seed, x, method):
        if x == 2:
            raise KeyboardInterrupt
        return square(seed, x, method)

    whole = ITEMS["table"]
    monkeypatch.setitem(ITEMS, "table", Item(title="", cell=stops, cells=whole.cells, views=()))
    with pytest.raises(KeyboardInterrupt):
        runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    assert [c["x"] for c in CALLS] == [1, 1]
    monkeypatch.setitem(ITEMS, "table", whole)
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    assert [c["x"] for c in CALLS] == [1, 1, 2, 2]


def test_a_device_is_handed_to_cells_that_can_use_it(tmp_path, monkeypatch):
    with pytest.raises(fd.ConfigError, match="toy table trains no large network"):
        runner.run_item("toy", "table", "quick", folder=tmp_path, device="cpu:0")
    with pytest.raises(fd.ConfigError, match="device='cudo' cannot be used"):
        runner.run_item("toy", "table", "quick", folder=tmp_path, device="cudo")
    said = []

    def cell(seed, x, method, device="cpu"):
        said.append(device)
        return [{"value": x}]

    monkeypatch.setitem(
        ITEMS, "table", Item(title="", cell=cell, cells=ITEMS["table"].cells, views=())
    )
    cells = runner.run_item("toy", "table", "quick", folder=tmp_path, device="cpu:0")
    assert said == ["cpu:0"] * 4 and "device" not in cells[0].settings
    runner.run_item("toy", "table", "quick", folder=tmp_path)
    assert len(said) == 4  # where it ran is no part of what it is


def test_seeds_may_depend_on_settings(tmp_path):
    found = found_in(runner.run_item("toy", "table", "usual", folder=tmp_path, workers=1))
    assert found.frame.groupby("method").seed.nunique().to_dict() == {"a": 2, "b": 1}


def test_what_an_item_needs_is_run_before_it(tmp_path):
    cells = runner.run_item("toy", "after", "usual", folder=tmp_path, workers=1)
    assert [c.rows for c in cells] == [[{"value": 2.0}], [{"value": 4.0}]]
    (one,) = runner.run_item("toy", "after", "usual", folder=tmp_path, workers=1, only={"x": "2"})
    assert one.settings == {"x": 2, "top": 2.0}


def test_processes_give_the_same_as_one(tmp_path, monkeypatch):
    monkeypatch.undo()  # processes know the real papers only
    one, two = (
        runner.run_item(
            "ffgb", "theorem43", "quick", folder=tmp_path / str(n), workers=n, only={"T": "4"}
        )
        for n in (1, 2)
    )
    assert [(c.settings, c.seed, c.rows) for c in one] == [
        (c.settings, c.seed, c.rows) for c in two
    ]
    assert all(c.seconds > 0 and c.versions["torch"] for c in two)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: runner.run_item("fedx", "table", folder=f), "NAME='fedx' is no paper"),
        (
            lambda f: runner.run_item("toy", "table9", folder=f),
            "ITEM='table9' is not of toy; it has table, base, after",
        ),
        (
            lambda f: runner.run_item("toy", "table", folder=f, only={"y": "1"}),
            "have no y; they have x, method",
        ),
        (
            lambda f: runner.run_item("toy", "table", folder=f, only={"x": "7"}),
            "x is one of 1, 2, 3",
        ),
        (
            lambda f: runner.run_item("toy", "table", folder=f, seeds=0),
            "seeds=0 must be at least 1",
        ),
        (
            lambda f: runner.run_item("toy", "table", "huge", folder=f),
            "scale='huge' must be one of",
        ),
    ],
)
def test_bad_input(tmp_path, call, words):
    with pytest.raises(fd.ConfigError, match=words.replace("(", r"\(")):
        call(tmp_path)
    assert not CALLS


def test_a_file_that_is_no_store_is_named(tmp_path):
    (tmp_path / "toy-table.json").write_text("[1")
    with pytest.raises(fd.FoedusError, match=r"toy-table\.json is not a file of results"):
        Store(tmp_path, "toy", "table", "usual")


def test_the_store_keeps_what_json_can(tmp_path):
    store = Store(tmp_path, "toy", "table", "usual")
    rows = [
        {
            "value": np.float32(0.1),
            "never": float("inf"),
            "count": np.int64(3),
            "list": [1.123456789],
        }
    ]
    store.add(Cell({"x": 1}, 0, rows, 1.26, {"torch": "1"}))
    (again,) = Store(tmp_path, "toy", "table", "usual").cells.values()
    assert again.rows == [{"value": 0.1, "never": None, "count": 3, "list": [1.123457]}]
    assert again.seconds == 1.3
    assert json.loads(store.path.read_text())["scale"] == "usual"


def test_claims_hold_or_do_not_or_were_not_measured(tmp_path):
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    result = render.stored(tmp_path, "toy", "table")
    assert [v for _, v, _ in result.verdicts] == ["holds", "not measured", "does not hold"]
    assert render.in_words(render.count(result.verdicts)) == "1 of 2 hold, 1 not measured"


def test_a_larger_scale_is_shown_once_it_is_complete(tmp_path):
    runner.run_item("toy", "table", "usual", folder=tmp_path, workers=1, only={"x": "1"})
    part = render.stored(tmp_path, "toy", "table")
    assert not part.complete and "Only 3 of 9 cells have run." in part.remarks
    runner.run_item("toy", "table", "usual", folder=tmp_path, workers=1, only={"x": "2"})
    assert [n for _, v, n in render.stored(tmp_path, "toy", "table").verdicts if v == "holds"] == [
        "4 > 1 (of 6 of 9 cells)"
    ]
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    assert render.stored(tmp_path, "toy", "table").scale == "quick"


def test_two_processes_may_add_to_one_store(tmp_path):
    one, two = (Store(tmp_path, "toy", "table", "usual") for _ in range(2))
    one.add(Cell({"x": 1}, 0, [{"value": 1.0}]))
    two.add(Cell({"x": 2}, 0, [{"value": 2.0}]))
    assert len(Store(tmp_path, "toy", "table", "usual").cells) == 2


def test_only_the_first_seed_of_what_is_needed_counts(tmp_path):
    runner.run_item("toy", "base", "usual", folder=tmp_path, workers=1, seeds=2)
    # of settings that have changed since
    Store(tmp_path, "toy", "base", "usual").add(Cell({"x": 9}, 0, [{"value": 9.0}]))
    assert [c.settings["x"] for c in runner.wanted("toy", "after", "usual", tmp_path)] == [1, 2]


def test_the_larger_scale_is_shown(tmp_path):
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    runner.run_item("toy", "table", "usual", folder=tmp_path, workers=1)
    assert render.stored(tmp_path, "toy", "table").scale == "usual"
    assert (
        render.stored(tmp_path, "toy", "table", ("quick",)).command
        == "foedus paper toy table --quick"
    )


def test_cells_of_settings_that_have_changed_are_not_shown(tmp_path):
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    store = Store(tmp_path, "toy", "table", "quick")
    store.add(Cell({"x": 50, "method": "a"}, 0, [{"value": 1.0}]))
    assert 50 not in render.stored(tmp_path, "toy", "table").found.values("x")


def test_a_table_has_the_paper_beside_ours():
    frame = pd.DataFrame(
        [
            {"x": x, "method": m, "seed": s, "value": x * x + s}
            for x in (1, 2)
            for m in ("a", "b")
            for s in (0, 1)
            if (x, m) != (2, "b")
        ]
    )
    headings, rows = render.table_of(
        Table(("x",), ("value",), columns=("method",), published={(1,): 1.25}, digits=2),
        Found(frame),
    )
    assert headings == ["x", "paper", "a", "b"]
    assert rows == [
        ["1", "1.25", "1.50 ± 0.50 (+0.25)", "1.50 ± 0.50 (+0.25)"],
        ["2", "–", "4.50 ± 0.50", "–"],
    ]


def test_a_table_with_a_number_of_the_paper_for_every_column():
    frame = pd.DataFrame(
        [
            {"x": None, "method": "a", "seed": 0, "n": 3.0},
            {"x": None, "method": "b", "seed": 0, "n": np.inf},
        ]
    )
    view = Table(
        ("x",),
        ("n",),
        columns=("method",),
        published={(None, "a"): 4, (None, "b"): np.inf},
        digits=0,
        never=("never", "> 100"),
    )
    assert render.table_of(view, Found(frame)) == (
        ["x", "a", "b"],
        [["–", "3 (4)", "never (> 100)"]],
    )


def test_spread_within_a_cell():
    frame = pd.DataFrame([{"x": 1, "seed": 0, "value": 2.0, "value spread": 0.25}])
    assert render.table_of(Table(("x",), ("value",)), Found(frame))[1] == [["1", "2.00 ± 0.25"]]


def test_points_of_curves():
    frame = pd.DataFrame(
        [{"x": x, "value": float(x), "line": "l", "seed": 0} for x in range(1, 101)]
    )
    headings, rows = render.table_of(Lines("x", "value", "line"), Found(frame))
    assert headings[1] == "x 1" and headings[-1] == "x 100" and len(headings) == 8
    assert rows == [
        [
            "l",
            *(
                h.split()[1] if int(h.split()[1]) < 10 else f"{h.split()[1]}.0"
                for h in headings[1:]
            ),
        ]
    ]


def test_found():
    found = Found(pd.DataFrame([{"a": 1, "v": 2.0}, {"a": 1, "v": 4.0}, {"a": 2, "v": None}]))
    assert found.mean("v", a=1) == 3.0 and found.values("a") == [1, 2]
    assert (
        Claim("", lambda f: (f.where(a=3).frame["v"].eq(0).all(), "")).judge(found)[0]
        == "not measured"
    )  # nothing is not zero
    with pytest.raises(Missing):
        slope(pd.Series([1.0], index=[1]))
    for where in ({"a": 2}, {"a": 3}, {"b": 1}):
        with pytest.raises(Missing):
            found.mean("v", **where)
    assert found.line("a", "v").to_dict() == {1: 3.0}
    assert slope(pd.Series([1.0, 0.5, 0.25], index=[1, 4, 16])) == pytest.approx(-0.5)


def test_pages_and_documents(tmp_path):
    runner.run_item("toy", "table", "usual", folder=tmp_path, workers=1)
    *_, index = pages.write_pages(tmp_path)
    page = (tmp_path / "toy.html").read_text()
    assert "foedus paper toy table" in page and "<svg" in page and "does not hold" in page
    check(page, links=["index.html"])
    assert 'href="toy.html#table"' in index.read_text()
    written = markdown.write_docs(tmp_path, tmp_path / "docs")
    text = (tmp_path / "docs" / "papers" / "toy.md").read_text()
    assert {p.name for p in written} == {"reproduction.md", "toy.md"}
    assert "| x | paper | a | b |" in text and "(toy-table.svg)" in text
    assert (tmp_path / "docs" / "papers" / "toy-table.svg").exists()
    summary = (tmp_path / "docs" / "reproduction.md").read_text()
    assert '- the papers\' claims, at scale "usual": **2 of 3 hold**\n' in summary
    assert "Claims that do not hold:\n\n- **table**: they fall. Our numbers" in summary


def test_cells_of_other_common_settings_are_run_again(tmp_path, monkeypatch):
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    whole = ITEMS["table"]
    monkeypatch.setitem(ITEMS, "table", dataclasses.replace(whole, fixed={"lr": "0.1"}))
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    assert len(CALLS) == 8
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    assert len(CALLS) == 8
    result = render.stored(tmp_path, "toy", "table")
    assert ("lr", "0.1") in render.settings_of(result)


def test_claims_of_ours_are_counted_apart(tmp_path, monkeypatch):
    whole = ITEMS["table"]
    grow, _, fall = whole.claims
    monkeypatch.setitem(
        ITEMS,
        "table",
        dataclasses.replace(whole, claims=(grow, dataclasses.replace(fall, ours=True))),
    )
    runner.run_item("toy", "table", "quick", folder=tmp_path, workers=1)
    markdown.write_docs(tmp_path, tmp_path / "docs", draw=False)
    text = (tmp_path / "docs" / "reproduction.md").read_text()
    papers, ours = (
        f'- {whose} claims, at scale "quick": **{n} of 1 hold**\n'
        for whose, n in (("the papers'", 1), ("our", 0))
    )
    assert papers + ours in text
    assert "Claims that do not hold:\n\n- **table**: they fall (ours). Our numbers" in text


def test_remarks_that_items_share_are_written_once(tmp_path, monkeypatch):
    for key in ("table", "base"):
        monkeypatch.setitem(ITEMS, key, dataclasses.replace(ITEMS[key], notes="Other rows."))
        runner.run_item("toy", key, "quick", folder=tmp_path, workers=1)
    markdown.write_docs(tmp_path, tmp_path / "docs", draw=False)
    text = (tmp_path / "docs" / "reproduction.md").read_text()
    assert text.endswith("experiments:\n\n- **table**, **base**: Other rows.\n")


def test_prose_is_wrapped():
    # 24 words of 3 letters and 24 spaces are 96 columns, and a word of four letters makes 100
    line = "abc " * 24 + "abcd"
    assert markdown.prose(f"{line} long-word") == f"{line}\nlong-word"
    assert markdown.prose(f"{line[2:]} two", bullet=True) == f"- {line[2:]}\n  two"


def test_a_mistake_in_a_claim_is_not_taken_for_a_missing_cell():
    with pytest.raises(KeyError):
        Claim("wrong", lambda f: (f.frame["no such column"].mean() > 0, "")).judge(
            Found(pd.DataFrame({"x": [1]}))
        )


def test_what_is_needed_is_that_of_the_first_seed(tmp_path):
    runner.run_item("toy", "base", "usual", folder=tmp_path, workers=1, seeds=2)
    assert runner._needed("toy", "base", "usual", tmp_path).values("seed") == [0]
