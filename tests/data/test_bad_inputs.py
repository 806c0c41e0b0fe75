"""What newcomers give by mistake: each message names the argument, the value and the remedy."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import foedus as fd

X, Y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
TABLE = pd.DataFrame({"age": [30.0, 40, 50, 60], "dose": [1.0, 2, 3, 4], "outcome": [0, 1, 0, 1]})
DAYS = pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03", "2020-01-04"])


class Items(Dataset):
    """A torch data set that gives this for every row."""

    def __init__(self, item, rows=4):
        self.item, self.rows = item, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        return self.item


def loaded(changes=None, /, **settings):
    """`fd.load` of the table with other columns."""
    return lambda: fd.load(TABLE.assign(**(changes or {})), **{"label": "outcome", **settings})


def sites(clients, /, **settings):
    return lambda: fd.Federation.from_clients(clients, **settings)


TABLES = {
    "no label": (loaded(label=None), "pass label=, the column to predict (columns: age, dose, out"),
    "another label": (
        loaded(label="outcom"),
        "label 'outcom' is unknown; did you mean 'outcome'? (allowed: age, dose, outcome)",
    ),
    "a label that is a column": (
        loaded(label=TABLE.outcome),
        "label is a Series; give the name or the place of the column to predict (columns: age",
    ),
    "a label with gaps": (
        loaded({"outcome": [0, 1, np.nan, 1]}),
        "row 2: column 'outcome' (the label) is missing in 1 rows; remove those rows",
    ),
    "a label with gaps among texts": (
        loaded({"outcome": ["no", None, "no", "yes"]}),
        "row 1: column 'outcome' (the label) is missing",
    ),
    "one class of text": (
        loaded({"outcome": "yes"}),
        "labels of 'table' are all 'yes'; at least two classes are needed",
    ),
    "days to predict": (loaded({"outcome": DAYS}), "column 'outcome' holds a Timestamp; give numb"),
    "bytes to predict": (loaded({"outcome": [b"p", b"q"] * 2}), "column 'outcome' holds a bytes"),
    "amounts to predict": (
        lambda: fd.load(pd.DataFrame({"a": range(30), "y": range(30)})),
        "30 different integers: pass task='regression' if they are amounts",
    ),
    "a column twice": (
        lambda: fd.load(pd.concat([TABLE, TABLE[["age"]]], axis=1), label="outcome"),
        "two columns have the name 'age'; rename one",
    ),
    "dates": (loaded({"day": DAYS}), "column 'day' holds datetime64[us]; convert it to numbers"),
    "lists": (
        loaded({"scan": [[1], [2], [3], [4]]}),
        "column 'scan' must hold numbers or texts (unhashable type: 'list'); make a column of each "
        "part, or leave it out with drop=",
    ),
    "tuples": (loaded({"scan": [(1,)] * 4}), "column 'scan' holds a tuple; give numbers or texts"),
    "complex numbers": (loaded({"dose": [1j, 2, 3, 4]}), "column 'dose' holds complex numbers"),
    "text among numbers": (
        loaded({"dose": ["1", "2", "three", "4"]}),
        "row 2: column 'dose' holds numbers, and here 'three'; correct it, leave it empty",
    ),
    "digits without end": (
        loaded({"dose": [2**70, 10**400, 1, 2]}),
        "column 'dose' holds a number that is too large",
    ),
    "names of people": (
        lambda: fd.load(pd.DataFrame({"a": [f"n{i}" for i in range(1001)], "y": [0.5] * 1001})),
        "column 'a' has 1001 different texts; leave it out, or put them into a few groups",
    ),
    "infinite numbers": (
        loaded({"dose": [1, 2, np.inf, 4]}),
        "row 2: column 'dose' is infinite; correct it, or leave it empty and pass impute='median'",
    ),
    "missing numbers": (
        loaded({"dose": [1, 2, np.nan, 4]}, test=0),
        "1 missing values (NaN), first in row 2, column 'dose'; pass impute='median'",
    ),
    "no rows": (lambda: fd.load(TABLE[:0], label="outcome"), "no rows; give at least one row"),
    "no features": (
        lambda: fd.load(TABLE[["outcome"]], label="outcome"),
        "no feature columns beside the label 'outcome'; give at least one column",
    ),
    "the label as group": (loaded(group="outcome"), "group='outcome' is the label; name another"),
    "another group": (loaded(group="agee"), "group 'agee' is unknown; did you mean 'age'?"),
    "the label left out": (
        loaded(drop=["outcome"]),
        "column 'outcome' is needed, and drop= leaves",
    ),
    "what is not there left out": (
        loaded(drop=["agee"]),
        "drop: column 'agee' is unknown; did you mean 'age'?",
    ),
    "all rows to test": (loaded(test=1.5), "test=1.5 must be a fraction of at least 0 and below 1"),
    "another scale": (loaded(scale="minmx"), "scale 'minmx' is unknown; did you mean 'minmax'?"),
    "another way to fill in": (
        loaded(impute="avg"),
        "impute 'avg' is unknown (allowed: median, me",
    ),
    "another encoding": (
        loaded(encode="one-hot"),
        "encode 'one-hot' is unknown; did you mean 'oneh",
    ),
    "another task": (loaded(task="ranking"), "task 'ranking' is unknown"),
    "no room": (loaded(clip=0), "clip=0"),
    "arrays to load": (
        lambda: fd.load(X),
        "source is a ndarray; give the name of a data set, a file or a DataFrame; arrays are "
        "fd.Data.from_arrays(x, y)",
    ),
    "a table to split": (
        lambda: fd.split(TABLE, "iid", clients=2),
        "data is a DataFrame; load it first: fd.load(data, label=...)",
    ),
    "too many clients": (
        lambda: fd.split(loaded(test=0)(), "iid", clients=50),
        "clients=50 is more than the 4 training rows of 'table'; no client may be empty",
    ),
    "data to run on": (
        lambda: fd.run(fd.FedAvg(), loaded()(), 1),
        "fed must be a federation: fd.split(data, 'iid', clients=10); got Data",
    ),
}

WEIGHTS = {
    "negative": (
        loaded({"w": [1, 2, -1, 3]}, weight="w"),
        "row 2: column 'w' (weight) is '-1'; a weight is a finite number, not negative: correct it",
    ),
    "missing": (
        loaded({"w": [1, 2, np.nan, 3]}, weight="w"),
        "row 2: column 'w' (weight) is missing in 1 rows; correct it, or leave the row out",
    ),
    "infinite": (
        loaded({"w": [1, 2, np.inf, 3]}, weight="w"),
        "row 2: column 'w' (weight) is 'inf'",
    ),
    "text": (
        loaded({"w": list("abcd")}, weight="w"),
        "row 0: column 'w' (weight) is 'a'; a weight",
    ),
    "all zero": (
        loaded({"w": 0}, weight="w"),
        "column 'w' (weight) is 0 in all rows; leave weight=",
    ),
    "another column": (loaded(weight="aeg"), "weight 'aeg' is unknown; did you mean 'age'?"),
    "the label": (loaded(weight="outcome"), "weight='outcome' is the label; name another column"),
    "the group": (loaded(group="age", weight="age"), "weight='age' says whose row it is; name"),
    "of no table": (lambda: fd.load("digits", weight="w"), "weight='w' names a column of a table"),
    "of a file that is no table": (
        lambda: fd.data.formats.read(__file__, format="libsvm", weight="w"),
        "weight='w' names a column of a table, and",
    ),
    "a column of arrays": (sites([(X, Y)], weight="w"), "give arrays as (x, y, weights)"),
    "at some sites": (
        sites([(X, Y, [1, 1, 1, 1]), (X, Y)]),
        "clients[1] has no weights, and clients[0] has some; give (x, y, weights) for all",
    ),
    "too few": (
        sites([(X, Y, [1, 1])]),
        "clients[0] has weights of shape (2,) for 4 rows; give one",
    ),
    "none to test": (
        sites([(X, Y, [1, 1, 1, 1])], test=(X, Y)),
        "weights_test of 'data' is missing, and the other part has weights; give both",
    ),
    "negative, of arrays": (
        sites([(X, Y, [1, -2, 1, 1])]),
        "weights_train of 'data' holds -2.0 in row 1 (1 such rows); weights must be finite and not "
        "negative: correct them",
    ),
    "texts, of arrays": (sites([(X, Y, list("abcd"))]), "weights_train of 'data' has dtype <U1"),
    "zero where it is run": (
        lambda: fd.run(fd.FedAvg(), sites([(X, Y, [0, 0, 0, 0])])(), 1),
        "the weights of all training rows of 'data' are 0; give some rows a weight above 0",
    ),
    "zero where it is tested": (
        lambda: fd.run(fd.FedAvg(), sites([(X, Y, [1] * 4)], test=(X, Y, [0] * 4))(), 1),
        "the weights of all test rows of 'data' are 0",
    ),
}

OTHER = TABLE.drop(columns="dose")
CATEGORIES = TABLE.assign(age=TABLE.age.astype("category"))
SITES = {
    "nothing": (sites({}), "clients is empty; give at least one (x, y)"),
    "one pair": (sites((X, Y)), "clients is a pair of arrays; for a single client give [(x, y)]"),
    "a table alone": (sites(TABLE), "clients is a DataFrame; give a dictionary by name, or a list"),
    "text": (sites("north"), "clients is a str; give"),
    "a number": (sites({"a": 3}), "clients['a'] is a int; give (x, y), a DataFrame"),
    "tables and arrays": (
        sites([TABLE, (X, Y)], label="outcome"),
        "some clients bring tables and others arrays; give all the same",
    ),
    "unequal columns": (
        sites({"a": TABLE, "b": OTHER}, label="outcome"),
        "clients['b'] and clients['a'] differ in columns: dose; give all the same",
    ),
    "categories at some": (
        sites({"a": CATEGORIES, "b": TABLE}, label="outcome"),
        "column 'age' holds categories at some sites only; make it categorical at all of them",
    ),
    "no label": (sites({"a": TABLE}), "pass label="),
    "a label for arrays": (sites([(X, Y)], label="y"), "label= is for tables; arrays are taken as"),
    "classes of tables": (
        sites({"a": TABLE}, label="outcome", classes=2),
        "classes= is for arrays",
    ),
    "a group": (sites({"a": TABLE}, label="outcome", group="age"), "group= is for one table; here"),
    "one feature": (
        sites([(X[:, 0], Y)]),
        "x of shape (4,) and y of shape (4,); give x [n, featur",
    ),
    "too few labels": (sites([(X, [0, 1])]), "x of shape (4, 2) and y of shape (2,); give x"),
    "other features": (
        sites([(X, Y), (X[:, :1], Y)]),
        "clients[1] has rows of shape (1,) and (), clients[0] of shape (2,) and (); give all",
    ),
    "a site without rows": (
        sites([(X, Y), (X[:0], Y[:0])]),
        "client 1 has no training rows; leave",
    ),
    "text for features": (sites([(X.astype(str), Y)]), "give an array of numbers (encode text and"),
    "text for labels": (
        sites([(X, np.array(list("abab"), object))]),
        "y_train of 'data' has dtype object; give an array of numbers",
    ),
    "gaps": (
        sites([(np.where(X == 3, np.nan, X), Y)]),
        "first nan in row 1, column 1; remove those",
    ),
    "one-hot labels": (
        sites([(X, np.eye(2, dtype=int)[Y])]),
        "y_train of 'data' has shape (4, 2); give one label a row, shape [n] (argmax of one-hot",
    ),
    "a label too large": (sites([(X, [0, 1, 2, 1])], classes=2), "holds label 2 in row 2 (1 such"),
    "part of a label": (sites([(X, [0.5, 1, 0, 1])], classes=2), "holds label 0.5 in row 0"),
    "a part to test": (
        sites([(X, Y)], test=1.5),
        "test=1.5 must be a fraction of at least 0 and below 1",
    ),
    "a percentage to test": (
        sites([(X, Y)], test=25),
        "test=25 must be a fraction of at least 0 and below 1",
    ),
    "yes to test": (sites([(X, Y)], test=True), "test=True must be a fraction"),
    "something to test": (sites([(X, Y)], test=3 + 4j), "test is a complex; give"),
    "too few to test": (
        sites([(X, Y)] * 3, test=[(X, Y)]),
        "test has 1 entries for 3 clients; give",
    ),
    "others to test": (
        sites({"a": (X, Y)}, test={"b": (X, Y)}),
        "test must have the same names as clients",
    ),
    "arrays to test": (
        sites({"a": TABLE}, label="outcome", test=(X, Y)),
        "test is a pair of arrays and the clients bring tables; give a table",
    ),
    "a table to test": (
        sites([(X, Y)], test=TABLE),
        "test is a table and the clients bring arrays",
    ),
    "a data set of dictionaries": (
        sites([Items({"x": torch.zeros(2), "y": 0})]),
        "clients['0']: its items must be pairs (x, y), not dict; give a Dataset of such pairs",
    ),
    "a data set of triples": (sites([Items((torch.zeros(2), 0, 1))]), "(x, y), not 3 values; give"),
    "a data set of rows": (
        sites([Items(torch.zeros(2))]),
        "must be pairs (x, y), not Tensor; give",
    ),
    "a data set without rows": (
        sites([Items((torch.zeros(2), 0), rows=0)]),
        "clients['0'] has no rows",
    ),
    "a loader that leaves rows out": (
        sites([DataLoader(TensorDataset(torch.zeros(5, 2), torch.zeros(5)), 2, drop_last=True)]),
        "this DataLoader leaves rows out; make one with drop_last=False",
    ),
    "a huge sparse matrix": (
        sites([(scipy.sparse.csr_matrix((1 << 20, 1 << 20)), np.zeros(1 << 20))]),
        "a sparse matrix of shape (1048576, 1048576) would take 4096 GiB once it is dense; leave",
    ),
}
EVERY = {
    f"{kind}: {name}": case
    for kind, cases in (("table", TABLES), ("weights", WEIGHTS), ("sites", SITES))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", list(EVERY))
def test_a_mistake_is_answered_with_its_remedy(name):
    give, words = EVERY[name]
    with pytest.raises(fd.FoedusError) as error:
        give()
    assert words in str(error.value)


TOLD = {
    "one class": (loaded({"outcome": 1}), "labels of 'table' are all 1: there is only one class"),
    "two classes as numbers": (
        loaded({"outcome": [0.0, 1.0, 0.0, 1.0]}),
        "are 0.0 and 1.0: they are treated as two classes; task='regression' predicts them as",
    ),
    "one-hot labels as numbers": (
        sites([(X, np.eye(2)[Y])]),
        "y_train of 'data' has 2 columns, of which one is 1 in each row: they are treated "
        "as regression targets; if they are classes, give y.argmax(1)",
    ),
}


@pytest.mark.parametrize("name", list(TOLD))
def test_doubtful_inputs_are_warned_about(name):
    give, words = TOLD[name]
    with pytest.warns(UserWarning, match=re.escape(words)):
        give()


def test_tensors_with_a_graph_are_taken_as_they_are():
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    assert (fd.Federation.from_clients([(x, Y)]).data.x_train == X).all()
