"""Numbers and bars as text."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from foedus.report import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (99.96, "100"),
        (99.94, "99.9"),
        (9.996, "10.0"),
        (9.99, "9.99"),
        (0.0095, "0.01"),
        (0.0012345, "0.0012"),
        (float("nan"), "–"),
    ],
)
def test_numbers_have_three_digits_or_so(value, shown):
    assert text.number(value) == shown


def test_means_have_the_decimals_of_their_size():
    nan = float("nan")
    assert text.mean_and_spread(0.91234, 0.01) == "0.9123 ± 0.0100"
    assert text.mean_and_spread(1234.5, 10.25) == "1234.5 ± 10.2"
    assert text.mean_and_spread(0.5, nan) == "0.5000"
    assert text.mean_and_spread(nan, nan) == "–"


def test_a_bar_says_how_far_and_with_what(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    with text.bar(5, show=True) as advance:
        advance("FedAvg [seed 1]", 2)  # no markup
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "2/5" in shown and "FedAvg [seed 1]" in shown


@pytest.mark.parametrize("show", [False, None])
def test_a_bar_is_silent_without_a_terminal(show, capsys):
    with text.bar(5, show) as advance:
        advance("FedAvg", 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_a_narrow_table_keeps_its_first_column(width):
    """A table that is too wide goes on below, with the first column again; no cell is cut."""
    names = ["FedAvg", "FedProx, strong"]
    headings = ["algorithm", "accuracy", "rounds\nto\ntarget", "MB\nin all", "seconds", "remark"]
    rows = [[name, "0.9123 ± 0.0100", "12", "19.9", "1.32", "one two three"] for name in names]
    for table in (
        text.rich_table("title", headings, rows, []),
        text.Grid(headings, rows, ("algorithm", "remark"), {}),
    ):
        console = Console(width=width, file=io.StringIO())
        console.print(table)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        parts = sum(line.split()[:1] == ["algorithm"] for line in lines)
        assert sum("FedAvg" in line for line in lines) == parts
        assert parts == 1 if width == 160 else parts > (width < 60)
        for cell in ("0.9123 ± 0.0100", "19.9", "1.32", "seconds"):
            assert cell in console.file.getvalue(), (width, cell)


def test_brackets_in_a_table_are_not_markup():
    console = Console(width=80, file=io.StringIO())
    console.print(text.Grid(["name [b]", "x"], [["[red]", "1"]], ("name [b]",), {}))
    assert "name [b]" in console.file.getvalue() and "[red]" in console.file.getvalue()
