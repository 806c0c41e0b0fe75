"""Numbers and bars as text."""

from __future__ import annotations

import re

import pytest

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
