"""Boosted trees on tables: functions against histograms, pooled rows, bagging and each client."""

from __future__ import annotations

import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import mean_poisson_deviance

import foedus as fd
from foedus.data.catalog import locate

ROUNDS, TREES = 20, 60
"""Of FFGB, and of FederatedGBDT with a learning rate of 0.2."""


def _table(name: str) -> pd.DataFrame:
    return pd.read_csv(Path(os.environ["FOEDUS_DATA"]) / "tables" / f"{name}.csv.gz")


def _late() -> fd.Federation:
    """Late or not, by carrier; nothing that is known only after departure."""
    frame = _table("flights60k").drop(columns=["arr_delay", "dep_delay"])
    data = fd.load(frame, label="late", impute="median", encode="ordinal", group="carrier")
    return fd.split(data, "natural")


def _diamonds(**how: Any) -> fd.Federation:
    frame = _table("diamonds")
    data = fd.load(frame, label="price", task="regression", encode="ordinal")
    return fd.split(data, clients=10, seed=0, **how)


def _doctor() -> fd.Federation:
    frame = _table("doctor_contacts")
    data = fd.load(frame, label="mdu", task="regression", impute="median", encode="ordinal")
    return fd.split(data, "iid", clients=10, seed=0)


def _set(name: str, s: float) -> fd.Federation:
    return fd.split(fd.load(name), "homogeneity", clients=10, s=s, seed=0)


def _cases() -> dict[str, tuple[Any, str]]:
    """By name: a federation, and the loss."""
    tables = {
        "flights: late, 16 carriers": (_late, "auto"),
        "diamonds: price, IID": (lambda: _diamonds(scheme="iid"), "auto"),
        "diamonds: price, sorted": (lambda: _diamonds(scheme="targets", s=0.1), "auto"),
        "doctor: visits, IID": (_doctor, "poisson"),
    }
    sets = [n for n in ("pendigits",) if locate(n) is not None]
    labels = {
        f"{n}, s = {s}": (lambda n=n, s=s: _set(n, s), "auto") for n in sets for s in (1, 0.1)
    }
    found = (tables if "FOEDUS_DATA" in os.environ else {}) | labels
    return found or {"digits, s = 0.1": (lambda: _set("digits", 0.1), "auto")}


def _boosted(loss: str, classes: int | None) -> Any:
    if classes:
        return HistGradientBoostingClassifier()
    return HistGradientBoostingRegressor(loss="poisson" if loss == "poisson" else "squared_error")


def _said(model: Any, x: np.ndarray, classes: int | None) -> np.ndarray:
    """Probabilities of all classes, or values."""
    if not classes:
        return model.predict(x)
    p = np.zeros((len(x), classes))
    p[:, model.classes_.astype(int)] = model.predict_proba(x)
    return p


def _score(said: np.ndarray, y: np.ndarray, loss: str, classes: int | None) -> float:
    """Accuracy, R^2, or the part of the deviance that is explained."""
    if classes:
        return float((said.argmax(1) == y).mean())
    if loss == "poisson":
        rest = mean_poisson_deviance(y, np.maximum(said, 1e-6))
        return float(1 - rest / mean_poisson_deviance(y, np.full(len(y), y.mean())))
    return float(1 - ((said - y) ** 2).mean() / y.var())


def _local(fed: fd.Federation, loss: str) -> tuple[float, float]:
    """Boosted trees at each client alone, on average, and the average of what they say."""
    data, classes, every = fed.data, fed.data.classes, []
    for i in range(len(fed)):
        x, y = data.x_train[fed.client_rows(i)], data.y_train[fed.client_rows(i)]
        if len(np.unique(y)) > 1:
            every.append(_said(_boosted(loss, classes).fit(x, y), data.x_test, classes))
        else:
            constant = np.eye(classes)[y[:1]] if classes else y[:1]
            every.append(np.repeat(constant, len(data.x_test), 0))
    scores = [_score(said, data.y_test, loss, classes) for said in every]
    return float(np.mean(scores)), _score(np.mean(every, 0), data.y_test, loss, classes)


def _ours(algorithm: Any, fed: fd.Federation, rounds: int, loss: str) -> tuple[float, ...]:
    """Score, MB up and down, seconds."""
    began = time.perf_counter()
    run = fd.run(algorithm, fed, rounds, evaluate_every=0)
    taken, data = time.perf_counter() - began, fed.data
    said = run.model.outputs(data.x_test).double().numpy()
    if not data.classes:
        said = np.exp(said[:, 0]) if loss == "poisson" else said[:, 0]
    score = _score(said, data.y_test, loss, data.classes)
    return score, run.records.last("bytes_up") / 1e6, run.records.last("bytes_down") / 1e6, taken


def trees(repeats: int) -> None:
    """Accuracy, R^2 or the explained part of the deviance on the test rows, and what travels."""
    head = ("data", "pooled", "alone", "bagging", "FFGB", "FFGB, search", "FederatedGBDT",
            "MB up: FFGB", "search", "GBDT", "seconds: FFGB", "GBDT")  # fmt: skip
    print(f"FFGB: {ROUNDS} rounds, weights by rows; FederatedGBDT: {TREES}, lr=0.2, 64 bins")
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, (make, loss) in _cases().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fed = make()
            data = fed.data
            pooled = _boosted(loss, data.classes).fit(data.x_train, data.y_train)
            one = _score(_said(pooled, data.x_test, data.classes), data.y_test, loss, data.classes)
            alone, bagged = _local(fed, loss)
            plain, search = (
                _ours(fd.FFGB(loss=loss, weights="rows", step=step), fed, ROUNDS, loss)
                for step in ("auto", "search")
            )
            gbdt = _ours(fd.FederatedGBDT(loss=loss, lr=0.2, bins=64), fed, TREES, loss)
        scores = [one, alone, bagged, plain[0], search[0], gbdt[0]]
        cells = [f"{s:.3f}" for s in scores]
        cells += [f"{n:.1f}" for n in (plain[1], search[1], gbdt[1], plain[3], gbdt[3])]
        assert all(map(math.isfinite, scores))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
