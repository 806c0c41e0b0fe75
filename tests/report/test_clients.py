"""Charts of clients: their scores by round, and what they hold."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.core.measures import PerClient
from foedus.report import clients, holdings
from foedus.report.compare import Comparison
from tests.report.fakes import central, fake_run


def measured(accuracies, **options):
    """A run of three clients, with an accuracy of each in rounds 0 and 1."""
    run = fake_run([0.1, 0.5], **options)
    run.kept = PerClient(np.array([4, 7, 9]), np.array([5, 5, 0]))
    for t, values in enumerate(accuracies):
        run.kept.add(t, {"accuracy": np.array(values)})
        worst = int(np.nanargmin(values))
        run.records.rows[t]["accuracy_worst"] = values[worst]
        run.records.rows[t]["accuracy_worst_client"] = [4, 7, 9][worst]
    return run


def test_quantiles_and_the_worst_client_by_round():
    runs = {"A": [measured([(0.2, 0.1, 0.9), (0.5, 0.7, np.nan)])], "all": [central([0.1, 1.0])]}
    chart = clients.by_round(Comparison(runs))
    (line,) = chart.lines  # of pooled rows nothing was kept
    assert chart.axes == (["rounds", "megabytes", "seconds"], ["accuracy", "worst accuracy"])
    assert chart.labels["worst accuracy"] == "accuracy, worst"
    assert line.x == {"rounds": [0, 1], "megabytes": [0.0, 1.5], "seconds": [0.0, 0.5]}
    # of 0.1 0.2 0.9: places 0.2, 1 and 1.8; of 0.5 0.7: places 0.1, 0.5 and 0.9
    assert line.low["accuracy"] == pytest.approx([0.12, 0.52])
    assert line.y["accuracy"] == pytest.approx([0.2, 0.6])
    assert line.high["accuracy"] == pytest.approx([0.76, 0.68])
    assert line.y["worst accuracy"] == [0.1, 0.5]
    assert line.remarks["worst accuracy"] == ["client 7", "client 4"]


def test_one_round_and_runs_without_scores_have_no_chart_by_round():
    assert clients.by_round(Comparison({"A": [measured([(0.2, 0.1, 0.9)])]})) is None
    assert clients.by_round(Comparison({"A": [fake_run([0.1, 0.5])]})) is None


def test_targets_in_ranges_of_equal_width():
    x = np.zeros((3, 1), np.float32)
    y = [np.array(v, np.float32) for v in ([0.0, 1.0, 12.0], [11.5, 11.9, 6.1])]
    chart = holdings.chart(fd.Federation.from_clients([(x, v) for v in y]))
    assert chart.columns[0] == "0 to 1" and chart.columns[-1] == "11 to 12"
    # twelve ranges of width 1, with the left end; the last with both
    assert chart.values == [[1, 1, *[0] * 9, 1], [*[0] * 6, 1, *[0] * 4, 2]]


def test_many_clients_are_means_of_groups_that_hold_alike():
    # client i has i % 2 as its only label, and two rows: 100 groups of 3 of one label
    sites = [(np.zeros((2, 1), np.float32), [i % 2] * 2) for i in range(300)]
    chart = holdings.chart(fd.Federation.from_clients(sites))
    assert chart.values == [[2.0, 0.0]] * 50 + [[0.0, 2.0]] * 50
    assert chart.rows[0] == "3 clients like 0" and chart.rows[50] == "3 clients like 1"
