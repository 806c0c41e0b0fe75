"""FedNewton's experiments, small."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.papers import fednewton
from foedus.papers.item import Found


@pytest.fixture
def digits(monkeypatch):
    data = fd.load("digits")
    monkeypatch.setattr(fd, "load", lambda name: data)
    return data


def test_settings_are_chosen_without_the_test_rows(digits, monkeypatch):
    monkeypatch.setattr(fednewton, "BANDWIDTHS", (2.0, 8.0))
    before = fednewton.chosen(0, "digits", 60, 4, 1.0)
    digits.x_test[:] = 0
    digits.y_test[:] = 0
    assert fednewton.chosen(0, "digits", 60, 4, 1.0) == before
    found = {r["quantity"]: r["value"] for r in before}
    assert (
        found["features"] == 64 and found["classes"] == 10 and found["rows"] == len(digits.x_train)
    )
    assert found["bandwidth"] in (2.0, 8.0) and found["reg"] in 10.0 ** -np.arange(1, 10)


def test_the_chosen_reg_is_the_largest_within_one_standard_error(digits):
    """Against ridge regression by scikit-learn on the same features and rows."""
    from sklearn.linear_model import Ridge

    order = np.random.default_rng(0).permutation(len(digits.x_train))
    held, used = np.split(order, [len(order) // 5])
    bandwidth, reg = fednewton._by_krr(digits, used, held, 60, 0)
    scores = {}
    for b in fednewton.BANDWIDTHS:
        phi = fd.RandomFourier(60, b, seed=0)
        features = [
            phi(__import__("torch").from_numpy(digits.x_train[rows])).numpy()
            for rows in (used, held)
        ]
        for r in 10.0 ** -np.arange(1, 10):
            model = Ridge(alpha=r * len(used), fit_intercept=False, solver="svd").fit(
                features[0], np.eye(10)[digits.y_train[used]]
            )
            scores[r, b] = np.mean(model.predict(features[1]).argmax(1) == digits.y_train[held])
    best = max(scores.values())
    close = [k for k, v in scores.items() if v >= best - np.sqrt(best * (1 - best) / len(held))]
    assert reg == max(r for r, _ in close)
    assert scores[reg, bandwidth] == max(scores[r, b] for r, b in close if r == reg)


def test_accuracies_of_every_method(digits):
    rows = {
        r["method"]: r["accuracy"]
        for r in fednewton.accuracies(0, "digits", "dirichlet", 100, 4, 1.0, 8.0, 1e-2, 1e-3)
    }
    assert set(rows) == {*fednewton.PLAIN, *fednewton.NEWTON, "cg 1", "cg 2", "cg 4", "cg 8", "KRR"}
    assert rows["cg 8"] == pytest.approx(rows["KRR"], abs=0.5)


def test_cells_of_table_3_wait_for_the_settings_of_table_2():
    import pandas as pd

    chosen = {"bandwidth": 3.0, "reg": 1e-4, "reg, iid": 1e-3, "reg, dirichlet": 1e-2}
    found = Found(
        pd.DataFrame([{"data": "dna", "quantity": k, "value": v} for k, v in chosen.items()])
    )
    cells = fednewton._table3("usual", found)
    assert [(c["data"], c["split"], c["bandwidth"], c["reg"], c["reg_cg"]) for c in cells] == [
        ("dna", "iid", 3.0, 1e-3, 1e-4),
        ("dna", "dirichlet", 3.0, 1e-2, 1e-4),
    ]


def test_figures_have_every_method():
    rows = fednewton.shifts(0, "model", 0.1, 1e-4)
    assert all(r["heterogeneity"] > 0 for r in rows) and {"DKRR", "KRR", "Newton 8", "cg 8"} <= {
        r["method"] for r in rows
    }
    rows = fednewton.by_round(0, "synthetic", 3, 1e-4, 0.0, 200)
    assert {r["method"]: r["round"] for r in rows} == dict.fromkeys(
        ("Newton", "cg", "FedAvg", "FedProx", "KRR"), 3
    )
    assert sum(r["rows"] for r in fednewton.partition(0, "digits", "iid", 4, 1.0)) == len(
        fd.load("digits").x_train
    )
