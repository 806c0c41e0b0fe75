"""Run the notebooks of this folder and store their outputs: `python docs/notebooks/make.py [NAME]`.

The cells of a notebook are run in order, in a namespace of their own and in an empty folder. Stored
is what Jupyter would show: printed text, the value of the last line as text and HTML, and figures
(as SVG). No time stamps are stored, so a second run changes nothing but measured seconds.

A cell whose output contains such a number says so in its metadata: {"varies": REGEX} (in Jupyter:
Common Tools, Cell Metadata). Matches of the expression are not compared by
`tests/test_notebooks.py`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
SVG = {"svg.hashsalt": "foedus", "svg.fonttype": "path"}


def names() -> list[str]:
    """The notebooks of this folder, without their ending."""
    return sorted(path.stem for path in HERE.glob("*.ipynb"))


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.ipynb").read_text(encoding="utf-8"))


def text_of(notebook: dict[str, Any]) -> str:
    """The file of a notebook, as Jupyter would write it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """The outputs of every cell of code. They are run in the current folder; a warning that Jupyter
    would show is an error.
    """
    if "matplotlib.pyplot" in sys.modules:  # figures that others left open are not the notebook's
        sys.modules["matplotlib.pyplot"].close("all")
    module = types.ModuleType("notebook")
    before = sys.modules.get("notebook")
    sys.modules["notebook"] = module  # where a dataclass looks for the names in its annotations
    # tables as text are as wide as in Jupyter, and not as wide as this terminal
    tables = pd.option_context("display.max_columns", 20, "display.width", 80)
    with warnings.catch_warnings(), drawn_without_a_screen(), tables:
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        try:
            return [
                outputs_of("".join(cell["source"]), f"{name}, cell {number}", number, vars(module))
                for number, cell in enumerate(code_cells(notebook), 1)
            ]
        finally:
            sys.modules.pop("notebook")
            if before is not None:
                sys.modules["notebook"] = before


@contextlib.contextmanager
def drawn_without_a_screen() -> Iterator[None]:
    before = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"
    try:
        yield
    finally:
        os.environ.pop("MPLBACKEND")
        if before is not None:
            os.environ["MPLBACKEND"] = before


def outputs_of(source: str, place: str, number: int, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; what it shows."""
    body = ast.parse(source, place).body
    last: ast.expr | None = None
    if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = body.pop().value  # type: ignore[attr-defined]
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), place, "exec", dont_inherit=True), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last), place, "eval", dont_inherit=True), scope)
    outputs = []
    if printed.getvalue():
        text = lines(printed.getvalue())
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    outputs += [shown(data) for data in figures()]
    if value is not None:
        outputs.append(shown(forms(value), number))
    return outputs


def lines(text: str) -> list[str]:
    """A text as it stands in the file of a notebook."""
    return text.splitlines(keepends=True)


def shown(data: dict[str, list[str]], number: int | None = None) -> dict[str, Any]:
    output: dict[str, Any] = {"data": data, "metadata": {}, "output_type": "display_data"}
    if number is not None:
        output |= {"execution_count": number, "output_type": "execute_result"}
    return output


def forms(value: Any) -> dict[str, list[str]]:
    """A value as text, and as HTML if it has that."""
    data = {"text/plain": lines(repr(value))}
    if (html := getattr(value, "_repr_html_", lambda: None)()) is not None:
        data["text/html"] = lines(html)
    return data


def figures() -> Iterator[dict[str, list[str]]]:
    """The open figures of matplotlib, which are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return
    import matplotlib
    import matplotlib.pyplot as plt

    for number in plt.get_fignums():
        figure, file = plt.figure(number), io.StringIO()
        with matplotlib.rc_context(SVG):
            figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
        text = f"<Figure with {len(figure.axes)} Axes>"
        plt.close(figure)
        yield {"text/plain": [text], "image/svg+xml": lines(file.getvalue())}


def make(name: str) -> None:
    """Run a notebook and store its outputs."""
    notebook = read(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = run(notebook, name)
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), found, strict=True), 1):
        cell |= {"execution_count": number, "outputs": outputs}
    for number, cell in enumerate(notebook["cells"], 1):
        cell.setdefault("id", f"cell-{number}")
    (HERE / f"{name}.ipynb").write_text(text_of(notebook), encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or names():
        make(Path(each).stem)
