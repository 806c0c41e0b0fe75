"""Real tables as people have them: from the raw file to a model that takes raw rows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import foedus as fd

FOLDER = Path(os.environ.get("FOEDUS_DATA", "nowhere")) / "tables"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the tables are not here")


def test_flights_by_carrier(tmp_path):
    """Sixteen natural clients, categories, holes: the fit is that of pooled rows, and the saved
    model does as well on the raw table as the run says.
    """
    path = FOLDER / "flights60k.csv.gz"
    drop = ["dep_delay", "arr_delay"]
    data = fd.load(path, label="late", group="carrier", drop=drop, impute="median")
    frame = pd.read_csv(path)
    fed = fd.split(data, "natural")
    assert len(fed) == 16 and sorted(fed.names) == sorted(frame.carrier.unique())
    assert data.class_values == ("no", "yes")

    x = frame.drop(columns=["late", "carrier", *drop])
    texts = [c for c in x.columns if not pd.api.types.is_numeric_dtype(x[c])]
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    rest = [c for c in x.columns if c not in texts]
    pooled = ColumnTransformer([("numbers", numbers, rest), ("texts", encoder, texts)])
    # the same rows as in the training part, found by what they were made of
    every = data.preprocess.transform(x)
    held = len(data.x_test)
    assert every.shape == (60_000, data.x_train.shape[1]) and len(data.x_train) == 60_000 - held
    parts = [sorted(map(bytes, x)) for x in (every, np.r_[data.x_train, data.x_test])]
    assert parts[0] == parts[1]
    sizes = {c: len(data.preprocess.categories[c]) for c in texts}
    pooled.fit(x)
    known = pooled.named_transformers_["texts"].categories_
    assert all(abs(len(k) - sizes[c]) <= 1 for c, k in zip(texts, known, strict=True))

    run = fd.run(fd.FedAvg(fd.Linear(), lr=0.3, batch_size=256), fed, 5)
    run.save(tmp_path / "flights.safetensors")
    model = fd.Run.load(tmp_path / "flights.safetensors").model
    said = model.predict(frame.sample(frac=1, axis=1, random_state=0))
    assert set(said) <= {"no", "yes"}
    hits = (said == frame.late.to_numpy(str)).mean()
    assert hits == pytest.approx(run.history.accuracy.iloc[-1], abs=0.01)
    assert run.per_client().name.tolist() == list(fed.names)


@pytest.mark.parametrize("secure", [False, True])
def test_flights_prepared_among_the_carriers(secure):
    """16 clients of 6 to 7,948 training rows: the same rows as by a fit of all of them at once."""
    settings = {"label": "late", "group": "carrier", "drop": ["dep_delay", "arr_delay"]}
    settings |= {"impute": "median", "scale": "standard"}
    path = FOLDER / "flights60k.csv.gz"
    pooled = fd.load(path, **settings)
    raw = fd.split(fd.load(path, **settings, fit=False), "natural")
    fed = fd.prepare(raw, aggregation=fd.SecureAggregation() if secure else None)
    assert fed.data.preprocess.categories == pooled.preprocess.categories
    np.testing.assert_allclose(fed.data.x_train, pooled.x_train, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(fed.data.x_test, pooled.x_test, rtol=1e-6, atol=1e-6)
    about = fed.settings["preprocess"]
    # 13 exchanges; in the sum, texts need a second, larger table, and each has four phases
    assert about["messages_up"] == 16 * (4 * 14 if secure else 13)
    assert 1e4 < about["bytes_up"] / 16 < (1e6 if secure else 1e5)


def test_prices_of_diamonds():
    """Integers that are amounts: asked about, then predicted in their own unit."""
    path = FOLDER / "diamonds.csv.gz"
    with pytest.raises(fd.DataError, match="different integers: pass task='regression'"):
        fd.load(path, label="price")
    data = fd.load(path, label="price", task="regression")
    assert data.classes is None and data.x_train.shape[1] == 6 + 5 + 7 + 8
    newton = fd.FedNewton(fd.Polynomial(1), reg=1e-4, solver="cg")
    run = fd.run(newton, fd.split(data, clients=5), 10)
    frame = pd.read_csv(path)
    said = run.model.predict(frame)
    assert 1 - ((said - frame.price) ** 2).mean() / frame.price.var() > 0.9


def test_visits_to_a_doctor():
    """Booleans, texts and numbers; the counts are few and many."""
    data = fd.load(FOLDER / "doctor_contacts.csv.gz", label="mdu", task="regression")
    assert data.preprocess.categories == {
        "health": ("excellent", "fair", "good", "poor"), "sex": ("female", "male"),
    }  # fmt: skip
    assert data.x_train.shape == (15_139, 12 + 4 + 2)
    np.testing.assert_allclose(data.x_train[:, :12].mean(0, dtype=np.float64), 0, atol=1e-6)
