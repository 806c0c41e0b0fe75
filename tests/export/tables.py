"""A small run of every kind of model on raw tables, made once in a process."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.naive_bayes import GaussianNB

import foedus as fd

READING = {
    "standard-onehot": {"scale": "standard", "impute": "median"},
    "minmax-ordinal": {"scale": "minmax", "impute": "mean", "encode": "ordinal"},
    "robust-clip": {"scale": "robust", "impute": "zero", "clip": 0.8},
    "none": {"scale": None, "impute": "median"},
    "none-ordinal-clip": {"scale": None, "impute": "mean", "encode": "ordinal", "clip": 2.5},
}
"""How tables are read: both encodings, every scale, with and without clipping."""


def table(rows: int = 240, seed: int = 0, far: float = 1e6) -> pd.DataFrame:
    """Numbers far from 0, booleans, texts, categoricals of numbers; some are missing."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows) / 20,
            "colour": rng.choice(["red", "green", "blue"], rows),
            "label": rng.normal(far, 3, rows),  # the name of an output of an ONNX file
            "v1": rng.choice(["a|b", "c"], rows),  # the name of a value inside of one
            "grade": pd.Categorical(rng.choice([1, 2, 3], rows)),
            "flag": rng.random(rows) < 0.3,
        }
    )
    risk = frame.age + (frame.label - far) / 3 + 2 * (frame.colour == "red")
    frame["cost"] = risk + rng.normal(0, 0.3, rows)
    frame["outcome"] = np.array(["well", "ill", "dead"])[np.digitize(risk, [2.5, 4.0])]
    frame.loc[rng.random(rows) < 0.15, "age"] = np.nan
    frame.loc[rng.random(rows) < 0.15, "colour"] = None
    return frame


def far_of(reading: str) -> float:
    """Numbers that are not scaled must not be large."""
    return 0.0 if READING[reading]["scale"] is None else 1e6


def new_rows(reading: str = "standard-onehot") -> pd.DataFrame:
    """Later rows, in another order of columns: unseen categories, missing where none was."""
    frame = table(60, 1, far_of(reading))
    frame.loc[::7, "colour"] = "violet"
    frame.loc[::5, "v1"] = None
    frame.loc[3, "label"] = np.nan
    return frame[["v1", "flag", "grade", "label", "colour", "age", "cost", "outcome"]]


def federation(reading: str = "standard-onehot", target: str = "outcome") -> fd.Federation:
    other = {"outcome": "cost", "cost": "outcome"}[target]
    how = {**READING[reading], "task": "regression" if target == "cost" else None}
    rows = table(far=far_of(reading))
    data = fd.load(rows, label=target, drop=[other], test=0.2, **how)
    return fd.split(data, "quantity", clients=3, seed=0)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LazyLinear(6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
        )

    def forward(self, x):
        return self.layers(x)


def net(features: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Net()
        made(torch.zeros(1, features))
        return made


def estimators(fed: fd.Federation) -> list:
    x, y = fed.data.x_train, fed.data.y_train
    some = y < 2  # the second has not seen the third class
    return [LogisticRegression(max_iter=500).fit(x, y), GaussianNB().fit(x[some], y[some])]


FAST = fd.Training(lr=0.01, optimizer="adam", epochs=3, batch_size=16)
LINEAR, VALUES = "outcome", "cost"

FAMILIES = {
    "fedavg-linear": (lambda fed: fd.FedAvg(fd.Linear(), lr=0.1), LINEAR),
    "fedavg-mlp": (lambda fed: fd.FedAvg(fd.MLP(7), lr=0.1), LINEAR),
    "fedavg-module": (lambda fed: fd.FedAvg(net(fed.spec.features), lr=0.1), LINEAR),
    "fedavg-values": (lambda fed: fd.FedAvg(fd.Linear(), lr=0.01), VALUES),
    "ffgb-trees": (lambda fed: fd.FFGB(fd.Forest(trees=4, depth=5)), LINEAR),
    "ffgb-trees-values": (lambda fed: fd.FFGB(fd.Forest(trees=4), step=1.0), VALUES),
    "ffgb-nets": (lambda fed: fd.FFGB(fd.Net(fd.MLP(5), FAST), step=0.5), LINEAR),
    "fedfw": (lambda fed: fd.FedFW(fd.Linear(), fd.L1Ball(5.0)), LINEAR),
    "fednewton": (lambda fed: fd.FedNewton(fd.RandomFourier(30, 2.0), reg=1e-2), LINEAR),
    "fednewton-logistic": (
        lambda fed: fd.FedNewton(fd.Identity(intercept=True), reg=1e-2, loss="logistic"),
        LINEAR,
    ),
    "fednewton-values": (lambda fed: fd.FedNewton(fd.Polynomial(2), 1e-2, solver="cg"), VALUES),
    "fedres": (
        lambda fed: fd.FedRes(shared=[0, 1, 3], private=range(fed.spec.features)),
        LINEAR,
    ),
    "fedboost-modules": (
        lambda fed: fd.FedBoost(fd.Classifiers([net(fed.spec.features)] * 2, 3), 1),
        LINEAR,
    ),
    "fedboost-densities": (lambda fed: fd.FedBoost(fd.Densities.of_clients(fed), 2), LINEAR),
    "fedboost-estimators": (
        lambda fed: fd.FedBoost(fd.Classifiers(estimators(fed), 3), 1),
        LINEAR,
    ),
    "ffgb-estimators": (lambda fed: fd.FFGB(fd.Sklearn(LinearRegression()), step=0.1), VALUES),
}
"""Algorithm and what it predicts, by name."""


@functools.cache
def run(name: str, reading: str = "standard-onehot") -> fd.Run:
    algorithm, target = FAMILIES[name]
    fed = federation(reading, target)
    return fd.run(algorithm(fed), fed, rounds=2, seed=3)


def models(name: str, reading: str = "standard-onehot") -> list[fd.Predictor]:
    """The global model, and for FedRes also a client's own."""
    made = run(name, reading)
    return [made.model, made.model_of(1)] if made.algorithm.personal else [made.model]
