"""What sites may bring: all of it becomes the same federation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import foedus as fd
from tests.data.test_preprocess import raw_table

RNG = np.random.default_rng(0)
X = [RNG.normal(size=(n, 3)).astype(np.float32) for n in (5, 3, 4)]
Y = [np.arange(len(x)) % 2 for x in X]
PAIRS = list(zip(X, Y, strict=True))
NAMES = ["north", "south", "west"]


class Items(Dataset):
    """Item by item."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), int(self.y[i])


class FromTheHub:
    """As a Hugging Face data set is: columns by name."""

    def __init__(self, frame):
        self.frame, self.column_names = frame, list(frame.columns)

    def to_pandas(self):
        return self.frame


BROUGHT = {
    "arrays": lambda x, y: (x, y),
    "lists": lambda x, y: [x.tolist(), y.tolist()],
    "tensors": lambda x, y: (torch.from_numpy(x), torch.from_numpy(y)),
    "TensorDataset": lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
    "Dataset": Items,
    "DataLoader": lambda x, y: DataLoader(Items(x, y), batch_size=2),
    "sparse": lambda x, y: (scipy.sparse.csr_matrix(x), y),
}


@pytest.mark.parametrize("kind", list(BROUGHT))
@pytest.mark.parametrize("by_name", [True, False])
def test_whatever_they_bring(kind, by_name):
    parts = [BROUGHT[kind](x, y) for x, y in PAIRS]
    fed = fd.Federation.from_clients(dict(zip(NAMES, parts, strict=True)) if by_name else parts)
    assert fed.names == (tuple(NAMES) if by_name else None) and fed.data.classes == 2
    for i, (x, y) in enumerate(PAIRS):
        rows = fed.client_rows(i)
        np.testing.assert_array_equal(fed.data.x_train[rows], x)
        np.testing.assert_array_equal(fed.data.y_train[rows], y)


def tables(seed: int = 0, rows: int = 60) -> dict[str, pd.DataFrame]:
    """Not in alphabetical order; the second has its columns in another order."""
    found = {k: raw_table(rows, seed + n) for n, k in enumerate(("west", "east", "middle"))}
    found["east"] = found["east"][found["east"].columns[::-1]]
    return found


READING = {"label": "outcome", "impute": "median"}


def test_tables_of_sites_are_one_table():
    """The same as one table with a column that says whose row it is; columns meet by name."""
    parts = tables()
    fed = fd.Federation.from_clients(parts, **READING)
    assert fed.names == ("west", "east", "middle") and fed.sizes.tolist() == [60, 60, 60]
    pooled = pd.concat(parts.values(), ignore_index=True)
    whole = fd.load(pooled, test=0, **READING)
    np.testing.assert_array_equal(fed.data.x_train, whole.x_train)
    np.testing.assert_array_equal(fed.data.y_train, whole.y_train)
    assert fed.data.class_values == ("ill", "well")
    named = {k: FromTheHub(frame) for k, frame in parts.items()}
    hub = fd.Federation.from_clients(named, **READING)
    np.testing.assert_array_equal(hub.data.x_train, fed.data.x_train)


def test_names_are_in_every_table():
    fed = fd.Federation.from_clients(tables(), test=0.25, **READING)
    assert fed.summary().name.tolist() == ["west", "east", "middle"]
    run = fd.run(fd.FedAvg(fd.Linear(), lr=0.5), fed, 3)
    per = run.per_client()
    assert per.columns[:3].tolist() == ["client", "name", "test_rows"]
    assert per.name.tolist() == ["west", "east", "middle"]
    assert run.model.predict(tables(9)["east"]).tolist()[0] in ("ill", "well")
    assert fed.select([2, 0]).names == ("middle", "west")


@pytest.mark.parametrize("kind", ["own", "own, another order", "common", "part"])
def test_rows_to_test(kind):
    parts = tables()
    own = {k: frame.head(5 + n) for n, (k, frame) in enumerate(tables(5).items())}
    given = {
        "own": own,
        "own, another order": dict(reversed(own.items())),
        "common": raw_table(30, 8),
        "part": 0.25,
    }[kind]
    fed = fd.Federation.from_clients(parts, test=given, **READING)
    want = {"common": 30, "part": 45}.get(kind, 18)
    assert fed.test_sizes.sum() == want
    if kind.startswith("own"):
        assert fed.test_sizes.tolist() == [5, 6, 7]
        rows = fed.data.preprocess.transform(own["east"])
        np.testing.assert_array_equal(fed.data.x_test[fed.test_client_rows(1)], rows)
    assert fed.sizes.sum() == (135 if kind == "part" else 180)


@pytest.mark.parametrize("kind", ["TensorDataset", "Dataset", "tensors"])
def test_common_rows_to_test_of_any_kind(kind):
    fed = fd.Federation.from_clients(PAIRS, test=BROUGHT[kind](*PAIRS[0]))
    assert fed.test_sizes.sum() == 5
    hub = fd.Federation.from_clients(tables(), test=FromTheHub(raw_table(30, 8)), **READING)
    assert hub.test_sizes.sum() == 30
    assert fd.Federation.from_clients(PAIRS, test=np.float32(0.5)).test_sizes.sum() > 0


def test_categories_that_are_numbers_stay_categories():
    """Sites that have other ones: pandas would make numbers of them."""
    one, two = (FRAME.assign(age=pd.Categorical(list(k) * (20 // len(k)))) for k in ("01", "0123"))
    fed = fd.Federation.from_clients({"a": one, "b": two}, **READING)
    assert fed.data.preprocess.categories["age"] == ("0", "1", "2", "3")


def test_a_label_by_its_place():
    fed = fd.Federation.from_clients({"a": FRAME, "b": FRAME}, label=-1, impute="mean")
    assert fed.data.class_values == ("ill", "well")


def test_a_part_of_arrays_is_held_out():
    fed = fd.Federation.from_clients(PAIRS, test=0.4)
    assert fed.sizes.tolist() == [3, 2, 2] and fed.test_sizes.tolist() == [2, 1, 2]


FRAME = raw_table(20)


def test_tables_with_labels_apart_are_aligned():
    """Columns in another order at one client are not mixed."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(0, 1, 20), "w": rng.normal(100, 1, 20)})
    y = np.arange(20) % 2
    fed = fd.Federation.from_clients(
        {"one": (frame, y), "two": (frame[["w", "a"]], pd.Series(y))}, scale=None
    )
    np.testing.assert_allclose(fed.data.x_train[:20], fed.data.x_train[20:])
    with pytest.raises(fd.DataError, match="give one DataFrame that has them as columns"):
        fd.Federation.from_clients([(frame, y, y + 1.0)])
