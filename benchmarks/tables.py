"""A table of a million rows: fitting its preprocessing, beside scikit-learn on the pooled rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, RobustScaler, StandardScaler

import foedus as fd
from benchmarks.timing import in_turns, ratio, seconds, shown

ROWS, NUMBERS, TEXTS, CLIENTS = 1_000_000, 45, 5, 100
SCALERS = {"standard": StandardScaler, "robust": RobustScaler}


def frame() -> pd.DataFrame:
    """Numbers, 2 % of which are missing, and texts of twenty kinds."""
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (ROWS, NUMBERS))
    x[rng.random(x.shape) < 0.02] = np.nan
    made = pd.DataFrame(x, columns=[f"n{i}" for i in range(NUMBERS)])
    names = np.array([f"kind {i}" for i in range(20)])
    for i in range(TEXTS):
        made[f"t{i}"] = names[rng.integers(0, 20, ROWS)]
    return made


def tables(repeats: int) -> None:
    """From raw rows to prepared ones: the fit, and its application, in each of three ways."""
    table = frame()
    site = np.arange(ROWS) // (ROWS // CLIENTS)
    labeled = table.assign(y=np.arange(ROWS) % 2, site=site)
    numbers = [c for c in table.columns if c.startswith("n")]
    print(
        f"{ROWS:,} rows, {NUMBERS} columns of numbers and {TEXTS} of text, {CLIENTS} clients\n\n"
        "| scale, missing values | scikit-learn, pooled, s | fd.load, s | ratio | among the clients"
        " (fd.prepare), s | ratio | kB a client |\n|---|---|---|---|---|---|---|"
    )
    for scale, impute in (("standard", "mean"), ("standard", "median"), ("robust", "median")):
        pooled = ColumnTransformer(
            [
                ("n", make_pipeline(SimpleImputer(strategy=impute), SCALERS[scale]()), numbers),
                ("t", OneHotEncoder(handle_unknown="ignore", dtype=np.float32, sparse_output=False),
                 [c for c in table.columns if c not in numbers]),
            ]
        )  # fmt: skip
        settings: dict[str, Any] = {"label": "y", "group": "site", "test": 0}
        settings |= {"scale": scale, "impute": impute}
        raw = fd.split(fd.load(labeled, **settings, fit=False), "natural")
        ways = {
            "scikit-learn": lambda pooled=pooled: seconds(lambda: pooled.fit_transform(table)),
            "load": lambda settings=settings: seconds(lambda: fd.load(labeled, **settings)),
            "prepare": lambda raw=raw: seconds(lambda: fd.prepare(raw)),
        }
        taken = in_turns(ways, repeats, warm=False)
        sent = fd.prepare(raw).settings["preprocess"]["bytes_up"] / CLIENTS / 1e3
        cells = [shown(taken["scikit-learn"])]
        for way in ("load", "prepare"):
            cells += [shown(taken[way]), f"{ratio(taken, way, 'scikit-learn'):.2f}"]
        print(f"| {scale}, {impute} | {' | '.join(cells)} | {sent:.0f} |", flush=True)
