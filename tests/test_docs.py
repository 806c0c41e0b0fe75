"""What the documentation says is true: its code runs and prints what is shown, its links, names,
settings and commands exist.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import foedus as fd
from foedus import testing
from foedus.cli.app import app
from tests.conformance import ENGINES
from tests.pages import ROOT, Page, read_page, run_page

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))  # run by tests/test_notebooks.py
DOCS = [p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "papers"] + NOTEBOOKS
PAGES = {
    p.relative_to(ROOT).as_posix(): read_page(p)
    for p in [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
}
OWN_TESTS = ("README.md", "docs/how-to/your-algorithm.md")  # tests/test_readme.py, and one below
RUN = [
    name
    for name, page in PAGES.items()
    if name not in OWN_TESTS
    and page.path not in NOTEBOOKS
    and any(block.is_run() for block in page.blocks)
]
SLOW = [
    name for name, page in PAGES.items() if any(b.marker.startswith("slow: ") for b in page.blocks)
]
FAMILIES = ("fednewton", "fedfw", "fedboost", "fedres", "ffgb")

# Every block of Python that no test runs, by page and reason. There should be no more of them.
NOT_RUN = {
    ("docs/how-to/engines.md", "needs a Ray cluster"),
}

SECTIONS = [
    "When to use it",
    "The idea",
    "The mathematics",
    "What travels and what it reveals",
    "Settings",
    "An example",
]


@pytest.mark.parametrize("name", RUN)
def test_blocks_run_and_print_what_is_shown(name, tmp_path, monkeypatch):
    run_page(PAGES[name], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_slow_blocks_run_and_print_what_is_shown(name, tmp_path, monkeypatch):
    run_page(PAGES[name], tmp_path, monkeypatch, slow=True)


def test_blocks_that_are_not_run_are_listed():
    left = {
        (n, b.marker.removeprefix("not run: "))
        for n, p in PAGES.items()
        for b in p.blocks
        if b.marker.startswith("not run")
    }
    assert left == NOT_RUN


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    for link in page.links():
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), f"{name} links to {link}, which does not exist"
        if anchor:
            known = read_page(target).anchors()
            assert anchor in known, f"{name} links to {link}; {target.name} has {sorted(known)}"


def test_every_page_is_in_the_list_of_pages():
    index = PAGES["docs/index.md"]
    pages = dataclasses.replace(index, prose=index.prose.split("\n## All pages\n")[1])
    listed = [link.partition("#")[0] for link in pages.links()]
    for path in DOCS:
        name = path.relative_to(ROOT / "docs").as_posix()
        if name != "index.md":
            assert listed.count(name) == 1, f"docs/index.md must list {name} once"
    assert "docs/index.md" in PAGES["README.md"].links()


def test_the_layers_that_are_shown_are_those_that_lint_checks():
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    shown = [b.text.splitlines() for b in PAGES["CONTRIBUTING.md"].blocks]
    assert lint["contracts"][0]["layers"] in shown


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_same_sections(name):
    page = PAGES[f"docs/explanation/{name}.md"]
    assert page.headings(2)[: len(SECTIONS)] == SECTIONS
    lead = page.prose.split("\n\n")[1].replace("\n", " ")
    assert re.match(r"\*\*(\w+) (is|are) good for [^.]+\.\*\*", lead), (
        f"{name} begins with {lead!r}"
    )
    example = page.prose.splitlines().index("## An example") + 1
    after = [b for b in page.blocks if b.line > example and b.language == "python"]
    assert after and after[0].output is not None and after[0].is_run()


def test_the_worked_examples_are_right(fed, tmp_path, monkeypatch):
    """What your-algorithm.md builds passes every check on every engine, and counts what there
    is to count.
    """
    scope = run_page(PAGES["docs/how-to/your-algorithm.md"], tmp_path, monkeypatch)
    for check in testing.CHECKS:
        check(scope["SignSGD"](), fed, ENGINES["Local"])
    testing.check_batched_equals_looped(scope["SignSGD"](), fed, ENGINES["Delayed by nothing"])
    share = fd.run(scope["LabelCounts"](), fed, 1, evaluate_every=0).state.share
    expected = np.bincount(fed.data.y_train, minlength=10) / len(fed.data.y_train)
    assert share.numpy() == pytest.approx(expected, abs=1e-6)


# Names


def resolved(start: Any, dotted: str) -> Any:
    """What a dotted name stands for; an AttributeError if it stands for nothing."""
    for part in dotted.split("."):
        if inspect.ismodule(start) and not hasattr(start, part) and start.__name__ != "foedus":
            importlib.import_module(f"{start.__name__}.{part}")
        if dataclasses.is_dataclass(start) and part in {f.name for f in dataclasses.fields(start)}:
            return None
        start = getattr(start, part)
    return start


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name):
    text = PAGES[name].text
    for dotted in sorted(set(re.findall(r"\bfd\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", text))):
        if dotted == "Name":  # any name
            continue
        resolved(fd, dotted)
    for dotted in sorted(set(re.findall(r"`(foedus(?:\.[A-Za-z_]\w*)+)", text))):
        first, _, rest = dotted.removeprefix("foedus.").partition(".")
        module = (
            importlib.import_module(f"foedus.{first}")
            if importlib.util.find_spec(f"foedus.{first}")
            else getattr(fd, first)
        )
        if rest:
            resolved(module, rest)


@pytest.mark.parametrize("name", PAGES)
def test_keywords_in_the_text_exist(name):
    """`fd.FFGB(local_steps=K)` in a sentence names a setting that there is."""
    for code in PAGES[name].inline():
        for called, inside in re.findall(r"\bfd\.(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)", code):
            parameters = inspect.signature(getattr(fd, called)).parameters
            if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                continue
            for keyword in re.findall(r"(?:^|,\s*)(\w+)=", re.sub(r"\([^()]*\)", "", inside)):
                assert keyword in parameters, f"{name}: {code}: fd.{called} has no {keyword}"


SETTINGS = [
    (name, before, rows)
    for name, page in PAGES.items()
    for before, rows in page.tables()
    if rows[0][:2] == ["setting", "default"]
]


def default_of(owner: Any, setting: str) -> Any:
    if dataclasses.is_dataclass(owner):
        fields = {f.name: f for f in dataclasses.fields(owner)}
        assert setting in fields, f"{owner.__name__} has no {setting}"
        default, factory = fields[setting].default, fields[setting].default_factory
        return factory() if factory is not dataclasses.MISSING else default
    parameters = inspect.signature(owner).parameters
    assert setting in parameters, f"{owner.__name__} has no {setting}"
    return parameters[setting].default


@pytest.mark.parametrize(
    ("name", "before", "rows"), SETTINGS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(SETTINGS)]
)
def test_settings_have_the_defaults_that_are_shown(name, before, rows):
    """A table of settings stands below a line that begins with whose they are: `fd.Name`."""
    owner = re.match(r"`fd\.(\w+)`", before)
    assert owner, (
        f"{name}: the line above the table must begin with whose settings these are, `fd.Name`; it "
        f"is {before!r}"
    )
    for row in rows[1:]:
        for setting in re.findall(r"`(\w+)`", row[0]):
            found = default_of(getattr(fd, owner.group(1)), setting)
            if row[1] == "required":
                assert found in (dataclasses.MISSING, inspect.Parameter.empty), (
                    f"{name}: {setting} has a default"
                )
            else:
                shown = eval(row[1].strip("`"), {"fd": fd})
                assert found == shown, (
                    f"{name}: the default of {setting} is {found!r}, not {row[1]}"
                )


def test_families_show_their_settings():
    assert {f"docs/explanation/{f}.md" for f in FAMILIES} <= {name for name, *_ in SETTINGS}


# Commands


COMMAND = typer.main.get_command(app)


def check_foedus(words: list[str]) -> None:
    command, options = COMMAND, {o for p in COMMAND.params for o in p.opts}
    for i, word in enumerate(words):
        if word.startswith("-"):
            assert word.partition("=")[0] in {*options, "--help", "-h"}, (
                f"foedus {' '.join(words)}: no option {word}"
            )
        elif hasattr(command, "commands"):
            if i and re.fullmatch(r"[A-Z.]+", word):  # a placeholder
                return
            assert word in command.commands, f"foedus {' '.join(words)}: no command {word!r}"
            command = command.commands[word]
            options = {o for p in command.params for o in p.opts}


def check_make(words: list[str]) -> None:
    targets = set(
        re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1).split()
    )
    assert words[0] in targets, f"make {words[0]}: no such target"
    if words[0] == "bench":
        check_benchmarks(" ".join(words[1:]).removeprefix("ARGS=").strip("'").split())


def check_benchmarks(items: list[str]) -> None:
    source = (ROOT / "benchmarks" / "__main__.py").read_text()
    for item in items:
        if not item.startswith("-"):
            assert re.search(rf"\b{item}\b", source), f"no benchmark {item!r}"


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name):
    for program, *words in PAGES[name].commands():
        if program == "foedus":
            check_foedus(words)
        elif program == "make":
            check_make(words)
        elif words[1] == "benchmarks":
            check_benchmarks(words[2:])
        elif words[1].startswith(("tests.faults.", "foedus.")):
            assert importlib.util.find_spec(words[1]), f"{name}: there is no module {words[1]}"


@pytest.mark.parametrize("name", PAGES)
def test_toml_is_valid(name):
    for block in PAGES[name].blocks:
        if block.language == "toml":
            tomllib.loads(block.text)


def test_the_federation_file_is_one(tmp_path):
    pytest.importorskip("flwr")
    from foedus.engines.flower.server import read_plan

    (block,) = [b for b in PAGES["docs/how-to/deploy.md"].blocks if b.language == "toml"]
    (tmp_path / "federation.toml").write_text(block.text)
    assert read_plan(tmp_path / "federation.toml").clients == 4


# The tools themselves must notice what is wrong.


def page_of(folder: Path, text: str) -> Page:
    (folder / "page.md").write_text(text)
    return dataclasses.replace(read_page(folder / "page.md"), path=ROOT / "page.md")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```python\nprint(1)\n```\n\n```\n2\n```\n", "where the page shows"),
        ("```python\nprint(1.0)\n```\n\n```\n1.02\n```\n", "where the page shows"),
        ("```python\nprint('a b')\n```\n\n```\na c\n```\n", "where the page shows"),
        ("```python\nprint(1)\n```\n\nSome text.\n\n```\n1\n```\n", "does not show"),
        ("```python\nx = 1\n```\n\n```\n1\n```\n", "where the page shows"),
        (
            "```python\nprint('1 s')\n```\n\n<!-- varies: \\d+ h -->\n```\n1 s\n```\n",
            "is not found",
        ),
    ],
)
def test_a_wrong_output_is_noticed(text, wrong, tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match=wrong):
        run_page(page_of(tmp_path, text), tmp_path, monkeypatch)


def test_what_varies_is_left_out_and_the_rest_is_not(tmp_path, monkeypatch):
    text = (
        "```python\nprint('done in 3.1 s, 7 rows')\n```\n\n<!-- varies: [\\d.]+ s "
        "-->\n```\ndone in 5 s, {} rows\n```\n"
    )
    run_page(page_of(tmp_path, text.format(7)), tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        run_page(page_of(tmp_path, text.format(8)), tmp_path, monkeypatch)


def test_blocks_share_a_namespace_and_markers_count(tmp_path, monkeypatch):
    text = (
        "```python\nx = 2\n```\n\n<!-- not run: never -->\n```python\nx = "
        "3\n```\n\n```python\nprint(x)\n```\n\n```\n2\n```\n"
    )
    assert run_page(page_of(tmp_path, text), tmp_path, monkeypatch)["x"] == 2
    with pytest.raises(AssertionError, match="none of"):
        page_of(tmp_path, "<!-- skip -->\n```python\n```\n")


def test_a_network_is_refused(tmp_path, monkeypatch):
    text = "```python\nimport socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)\n```\n"
    with pytest.raises(ConnectionRefusedError, match="without a network"):
        run_page(page_of(tmp_path, text), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("[a](nothing.md)", test_links_lead_somewhere),
        ("[a](docs/reference/wire.md#nothing)", test_links_lead_somewhere),
        ("`fd.Nothing`", test_names_exist),
        ("`fd.Run.nothing`", test_names_exist),
        ("`foedus.core.nothing`", test_names_exist),
        ("`fd.FFGB(lr=1)`", test_keywords_in_the_text_exist),
        ("`foedus fly`", test_commands_exist),
        ("`foedus deploy down`", test_commands_exist),
        ("`foedus run x.toml --fast`", test_commands_exist),
        ("`make tea`", test_commands_exist),
        ("`make bench ARGS=tea`", test_commands_exist),
        ("`python -m foedus.papers.nothing`", test_commands_exist),
    ],
)
def test_what_does_not_exist_is_noticed(text, check, tmp_path, monkeypatch):
    monkeypatch.setitem(PAGES, "page.md", page_of(tmp_path, text + "\n"))
    with pytest.raises((AssertionError, AttributeError, ModuleNotFoundError)):
        check("page.md")


@pytest.mark.parametrize("row", [["`reg`", "`1e-3`"], ["`rag`", "`1e-4`"], ["`reg`", "required"]])
def test_a_wrong_default_is_noticed(row):
    with pytest.raises(AssertionError):
        test_settings_have_the_defaults_that_are_shown(
            "page.md", "`fd.FedNewton`", [["setting", "default"], row]
        )
