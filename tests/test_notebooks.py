"""The notebooks: their cells run and show what is stored, and the files are what Jupyter writes."""

from __future__ import annotations

import copy
import html
import importlib.util
import re
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the notebooks draw")
pytest.importorskip("cryptography", reason="a notebook uses foedus[secure]")
pytest.importorskip("dp_accounting", reason="a notebook uses foedus[private]")

from tests.pages import ROOT, compare_output, no_network, read_page

FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_of_the_docs", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def visible(made: str) -> str:
    """The text that a browser shows of HTML: a row of a table is a line."""
    made = re.sub(r"<style.*?</style>", "", made, flags=re.S)
    made = re.sub(r"</(?:tr|div|summary|details)>", "\n", made)
    return html.unescape(re.sub(r"<[^>]*>", " ", made))


def text_of(outputs: list[dict[str, Any]]) -> str:
    """What outputs show, as text; of a picture, that there is one."""
    texts = []
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        shown = {kind: "".join(text) for kind, text in data.items()}
        texts += [output["output_type"], *sorted(shown), shown["text/plain"]]
        texts.append(visible(shown.get("text/html", "")))
    return "\n".join(texts)


def compare(cell: dict[str, Any], outputs: list[dict[str, Any]], place: str) -> None:
    """Compare the outputs of a cell with those that are stored in it."""
    compare_output(
        text_of(outputs), text_of(cell["outputs"]), place, cell["metadata"].get("varies")
    )


@pytest.mark.parametrize("name", NAMES)
def test_cells_run_and_show_what_is_stored(name, script, tmp_path, monkeypatch):
    notebook = script.read(name)
    monkeypatch.chdir(tmp_path)
    with no_network():
        found = script.run(notebook, name)
    for number, (cell, outputs) in enumerate(
        zip(script.code_cells(notebook), found, strict=True), 1
    ):
        compare(cell, outputs, f"{name}.ipynb, cell of code {number}")


@pytest.mark.parametrize("name", NAMES)
def test_files_are_notebooks_of_format_4_5(name, script):
    notebook = script.read(name)
    assert script.text_of(notebook) == (FOLDER / f"{name}.ipynb").read_text()
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", i) for i in ids)
    for cell in notebook["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | code
        assert cell["metadata"].keys() <= {"varies"}
    counts = [cell["execution_count"] for cell in script.code_cells(notebook)]
    assert counts == [*range(1, len(counts) + 1)]


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_small_and_say_where_to_go_next(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 300_000
    page = read_page(path)
    assert page.headings(2)[-1].startswith("Where next") and len(page.headings(1)) == 1
    assert len(page.prose.split("## Where next")[1].split("](")) > 3
    assert not [line for line in page.text.splitlines() if len(line) > 100]


# The tools themselves must notice what is wrong.


def cell_of(source: str, **metadata: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": [source], "metadata": metadata}


def run_cell(script: ModuleType, source: str, **metadata: str) -> dict[str, Any]:
    """A cell with its outputs."""
    cell = cell_of(source, **metadata)
    (outputs,) = script.run({"cells": [cell]}, "test")
    return {**cell, "outputs": outputs}


def test_outputs_are_those_that_jupyter_shows(script):
    source = "import pandas as pd\nprint('a')\nprint('b')\npd.DataFrame({'n': [1]})"
    printed, value = run_cell(script, source)["outputs"]
    assert printed == {"name": "stdout", "output_type": "stream", "text": ["a\n", "b\n"]}
    assert (value["output_type"], value["execution_count"]) == ("execute_result", 1)
    assert value["data"]["text/plain"] == ["   n\n", "0  1"]
    assert "dataframe" in "".join(value["data"]["text/html"])
    for source in ("x = 1", "None", "1;", ""):
        assert run_cell(script, source)["outputs"] == []


def test_figures_are_shown_once_and_always_the_same(script):
    source = "import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 1]);"
    outputs = run_cell(script, source)["outputs"]
    assert [list(output["data"]) for output in outputs] == [["text/plain", "image/svg+xml"]]
    assert outputs == run_cell(script, source)["outputs"]
    assert run_cell(script, "1")["outputs"][0]["data"] == {"text/plain": ["1"]}


def test_cells_share_a_namespace_that_notebooks_do_not(script):
    first, second = cell_of("x = 2"), cell_of("print(x)")
    assert script.run({"cells": [first, second]}, "test")[1][0]["text"] == ["2\n"]
    with pytest.raises(NameError):
        script.run({"cells": [second]}, "test")


def test_warnings_are_errors(script):
    with pytest.raises(UserWarning, match="careful"):
        run_cell(script, "import warnings\nwarnings.warn('careful')")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("print(1)", "print(2)"),
        ("print(1.0)", "print(1.02)"),
        ("print('a b')", "print('a c')"),
        ("1", "print(1)"),
        ("1", "1;"),
        ("import pandas as pd\npd.Series([1])", "import pandas as pd\npd.DataFrame([1])"),
    ],
)
def test_another_output_is_noticed(before, after, script):
    with pytest.raises(AssertionError):
        compare(run_cell(script, before), run_cell(script, after)["outputs"], "test")


def test_text_of_html_is_compared(script):
    source = (
        "class Shown:\n    def __repr__(self): return 'x'\n"
        "    def _repr_html_(self): return '<tr><td title=\"3\">{} s</td></tr>'\nShown()"
    )
    first, other = (run_cell(script, source.format(seconds)) for seconds in (1, 2))
    with pytest.raises(AssertionError, match="where the page shows"):
        compare(first, other["outputs"], "test")
    compare({**first, "metadata": {"varies": r"\d s"}}, other["outputs"], "test")


def test_what_varies_is_left_out_and_the_rest_is_not(script):
    stored = run_cell(script, "print('3.1 s, 7 rows')", varies=r"[\d.]+ s")
    compare(stored, run_cell(script, "print('5.2 s, 7 rows')")["outputs"], "test")
    with pytest.raises(AssertionError):
        compare(stored, run_cell(script, "print('3.1 s, 8 rows')")["outputs"], "test")
    stored["metadata"] = {"varies": "hours"}
    with pytest.raises(AssertionError, match="is not found"):
        compare(stored, copy.deepcopy(stored["outputs"]), "test")


def test_make_stores_outputs_and_nothing_else(script, tmp_path, monkeypatch):
    notebook = {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": ["# A title"]},
            {**cell_of("2 + 2"), "outputs": [], "execution_count": 7},
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    monkeypatch.setattr(script, "HERE", tmp_path)
    (tmp_path / "one.ipynb").write_text(script.text_of(notebook))
    assert script.names() == ["one"]
    script.make("one")
    made = script.read("one")
    assert [cell["source"] for cell in made["cells"]] == [["# A title"], ["2 + 2"]]
    assert [cell["id"] for cell in made["cells"]] == ["cell-1", "cell-2"]
    assert made["cells"][1]["execution_count"] == 1
    assert made["cells"][1]["outputs"][0]["data"] == {"text/plain": ["4"]}
    assert "outputs" not in made["cells"][0]
    before = (tmp_path / "one.ipynb").read_bytes()
    script.make("one")
    assert (tmp_path / "one.ipynb").read_bytes() == before
