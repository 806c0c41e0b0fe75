"""FFGB's experiments, small."""

from __future__ import annotations

import numpy as np
import pytest

import foedus as fd
from foedus.papers import ffgb


def test_theorem_4_3():
    table = ffgb.theorem43(horizons=(4, 36)).set_index("T")
    assert table["with residual"]["36"] < 0.1 * table["with residual"]["4"]
    assert table["without"]["36"] > 5 * table["with residual"]["36"]


def test_bagging_is_boosting_where_there_is_one_client():
    """One client, two classes, one round: a tree with Newton leaves, sum (y - 1/2) / (sum 1/4 + 1), at the rate."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 1)).astype(np.float32)
    y = (x[:, 0] > 0.3).astype(int)
    data = fd.Data.from_arrays(x, y, x, y, classes=2)
    fed = fd.split(data, "iid", clients=1)
    assert ffgb.bagging(fed, rounds=1, depth=1) == 1.0


def test_tabular_study(tmp_path, monkeypatch):
    monkeypatch.setattr(ffgb, "SHARES", (0.3,))
    monkeypatch.setattr(ffgb, "pooled", lambda data: 0.97)
    monkeypatch.setattr(ffgb, "alone", lambda fed: 0.5)
    monkeypatch.setattr(ffgb, "bagging", lambda fed, rounds: 0.9)
    table = ffgb.tabular(["digits"], rounds=2, clients=4, keep=tmp_path / "cells.json")
    assert table.FFGB.iloc[0] > 0.85 and table["FFGB, MB up"].iloc[0] > 0
    monkeypatch.setattr(fd, "run", None)  # finished cells are not run again
    assert ffgb.tabular(["digits"], rounds=2, clients=4, keep=tmp_path / "cells.json").equals(table)


def test_images(monkeypatch):
    data = fd.load("digits")
    monkeypatch.setattr(
        ffgb,
        "image_pair",
        lambda name, clients, s, rows, public: (fd.split(data, "homogeneity", clients=4, s=s), data.x_test[:100]),
    )
    rounds = {"FFGB-Distill": 1, "FedAvg-Distill": 1, "FedDyn": 1, "FedAvg": 1}
    table, curves = ffgb.table2(shares=(0.3,), rounds=rounds, epochs=3, distil=5, local=1, model=fd.MLP(16))
    assert len(table) == 2 and set(curves.method) == set(rounds)
    warm = ffgb.figure1(s=0.3, rounds=1, epochs=3, distil=5, local=1, model=fd.MLP(16))
    start = warm[warm["round"] == 0].set_index("method").accuracy
    assert start["FedAvg-d"] == start["FedDyn-d"] > start["FedAvg-r"]


@pytest.mark.parametrize("name", ["heart_disease_4sites"])
def test_heart(name, real):
    data = ffgb.tabular_data(name)
    assert data.classes == 2 and len(np.unique(data.groups_train)) == 4 and np.isfinite(data.x_train).all()
