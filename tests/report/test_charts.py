"""What charts say to JavaScript, and what they draw without it."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from foedus.report import charts
from foedus.report.charts import Bar, Bars, Cells, Dots, Line, Lines, as_data, figure, written
from foedus.report.html import render

LABELS = {"rounds": "round", "megabytes": "MB", "loss": "the loss", "accuracy": "share"}
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&\u2028\u2029'


def two_lines(**options):
    rounds = {"rounds": [0, 1, 2], "megabytes": [0.0, 1.0, 2.0]}
    lines = [
        Line("A", rounds, {"accuracy": [0.1, math.nan, 0.5], "loss": [2.0, 1.0, 0.5]}),
        Line("B", rounds | {"megabytes": [0.0] * 3}, {"loss": [3.0, 2.0, 1.5]}, reference=True),
    ]
    return Lines("Two", "Of two.", lines, LABELS, **options)


def every_kind(name="north"):
    return {
        "lines": Lines(name, name, [Line(name, {"rounds": [0, 1]}, {"loss": [2.0, 1.0]})], LABELS),
        "bars": Bars(name, name, name, [Bar(name, 21, name), Bar("b", 3, reference=True)]),
        "dots": Dots(name, name, name, {name: {"one": 0.5, name: 0.25}, "none": {}}),
        "cells": Cells(name, name, name, [name, "s"], ["x", name], [[1, 2], [3, 4]], (name, "c")),
    }


def data_of(text):
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    return json.loads(found)


def test_axes_are_in_the_order_of_their_labels_and_values_that_are_not_finite_are_null():
    chart = two_lines(target=0.4)
    assert chart.axes == (["rounds", "megabytes"], ["loss", "accuracy"])
    data = data_of(figure(chart))
    assert data["axes"] == {"x": ["rounds", "megabytes"], "y": ["loss", "accuracy"]}
    assert data["lines"][0]["y"]["accuracy"] == [0.1, None, 0.5]
    forms = {"rounds": "count", "megabytes": "cost", "loss": "metric", "accuracy": "metric"}
    assert data["forms"] == forms
    assert data["target"] == 0.4
    assert data["looks"]["B"]["color"] == "currentColor"  # a reference, in the ink of the page


def test_megabytes_are_on_a_logarithmic_axis_where_they_range_widely():
    def of(*sent):
        line = Line("A", {"megabytes": sent}, {"loss": [1.0] * len(sent)})
        return as_data(Lines("", "", [line], LABELS))["log"]

    assert of(0.0, 1.0, 31.0) == []  # 10 ** 1.5 is 31.6
    assert of(0.0, 1.0, 32.0) == ["megabytes"]
    assert of(0.0, 0.0) == []


def test_the_worst_or_the_best_of_a_group_is_named():
    members = {"a": 0.2, "b": 0.9, "c": math.nan, "d": 0.4, "e": 0.5, "f": 0.7}
    lowest = as_data(Dots("", "", "", {"g": members}))["groups"][0]
    highest = as_data(Dots("", "", "", {"g": members}, lowest=False))["groups"][0]
    assert lowest["extreme"] == "a" and highest["extreme"] == "b"
    # of 0.2 0.4 0.5 0.7 0.9: places 0.4, 2 and 3.6 from the first
    assert lowest["quantiles"] == pytest.approx([0.2 + 0.4 * 0.2, 0.5, 0.7 + 0.6 * 0.2])
    assert as_data(Dots("", "", "", {"g": {}}))["groups"][0]["extreme"] is None


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1234567, "count", "1,234,567"),
        (0.9, "metric", "0.9000"),
        (0.0, "metric", "0.0000"),
        (0.00012345, "metric", "1.23e-04"),
        (1234.5678, "metric", "1234.6"),
        (99.96, "cost", "100"),
        (0.0012, "cost", "0.0012"),
        (math.nan, "metric", "–"),
        (None, "count", "–"),
    ],
)
def test_numbers_as_text(value, form, text):
    assert written(value, form) == text


def test_json_cannot_end_its_script():
    text = charts.as_json({HOSTILE: [HOSTILE, np.float64(0.5), np.arange(2), math.inf]})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {HOSTILE: [HOSTILE, 0.5, [0, 1], None]}


@pytest.mark.parametrize("kind", ["lines", "bars", "dots", "cells"])
def test_a_figure_has_its_data_and_a_picture_without_names_that_are_markup(kind):
    text = figure(every_kind(HOSTILE)[kind])
    assert data_of(text)["kind"] == kind
    assert "<script>" not in text and "<img" not in text
    assert text.count("</script>") == 1  # of the data
    assert "&lt;/script&gt;&lt;script&gt;" in text  # the title
    assert "<svg viewBox=" in text and " style=" not in text and "<style" not in text
    assert text == figure(every_kind(HOSTILE)[kind])


def test_lines_are_drawn_once_for_each_x_axis_and_close_up():
    text = figure(two_lines())
    assert text.count("<svg ") == 2
    assert 'aria-label="the loss against round"' in text
    # text is drawn as shapes, which have it beside them as comments
    for label in ("<!-- round -->", "<!-- MB -->", "<!-- the loss -->", "<!-- A -->"):
        assert label in text
    assert figure(two_lines(close_up=(0.3, 0.6))).count("<svg ") == 3


def test_ids_of_figures_differ_and_colors_follow_the_page():
    texts = [figure(chart) for chart in every_kind().values()]
    ids = [re.findall(r'\bid="([^"]*)"', text) for text in texts]
    assert all(ids) and len({i for of in ids for i in of}) == sum(map(len, ids))
    assert "#000000" not in "".join(texts) and 'class="grid"' in texts[0]


def test_a_name_looks_the_same_in_all_charts_of_a_page():
    alone = Dots("", "", "", {"B": {"x": 1.0, "y": 2.0}})
    names = ["A", "B"]
    assert data_of(figure(alone, names))["looks"]["B"] == data_of(figure(two_lines()))["looks"][
        "B"
    ] | {"color": "#D55E00", "dash": "10 3", "symbol": "square"}
    assert data_of(figure(alone))["looks"]["B"]["color"] == "#0072B2"


def test_a_page_without_charts_has_no_charting_library():
    page = render("papers.html.j2", title="t", subtitle="s", results=[])
    assert len(page) < 20_000 and "Bostock" not in page
    assert page.count("<script>") == 1
