"""A small run of every kind of model, made once in a process."""

from __future__ import annotations

import functools

import numpy as np
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.naive_bayes import GaussianNB

import foedus as fd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + (X[:, 1] + X[:, 2] > 0.5)  # classes 0, 1, 2
VALUES = (X @ RNG.normal(size=(6, 2))).astype(np.float32)
IMAGES = RNG.normal(size=(150, 2, 8, 8)).astype(np.float32)


def federation(x, y, classes=None) -> fd.Federation:
    clients = [(x[a:b], y[a:b]) for a, b in ((0, 20), (20, 55), (55, 110))]
    return fd.Federation.from_clients(clients, test=(x[110:], y[110:]), classes=classes)


THREE = federation(X, Y, 3)
BINARY = federation(X, (Y > 0).astype(int), 2)
ONE_VALUE = federation(X, VALUES[:, 0])
TWO_VALUES = federation(X, VALUES)
PICTURES = federation(IMAGES, Y, 3)


class Net(torch.nn.Module):
    """A user's module: trained and frozen parameters, a buffer, a layer by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.last = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(5, 3))
        self.register_buffer("scale", torch.tensor(0.7))
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)) * self.scale)


def seeded(module: type[torch.nn.Module] = Net) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return module()


def networks() -> list[torch.nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [torch.nn.Linear(6, 3), torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Tanh())]


def estimators() -> list:
    two = Y[:110] < 2
    return [
        LogisticRegression().fit(X[:110], Y[:110]),
        GaussianNB().fit(X[:110][two], Y[:110][two]),  # has not seen class 2
    ]


FAST = fd.Training(lr=0.01, optimizer="adam", epochs=3, batch_size=16)
RANDOM = fd.RandomFourier(40, bandwidth=2.0)

RUNS = {
    "fedavg-linear": (lambda: fd.FedAvg(fd.Linear(), lr=0.2), THREE),
    "fedavg-linear-two-classes": (lambda: fd.FedAvg(fd.Linear(bias=False), lr=0.2), BINARY),
    "fedavg-linear-values": (lambda: fd.FedAvg(fd.Linear(), lr=0.1), ONE_VALUE),
    "fedavg-linear-images": (lambda: fd.FedAvg(fd.Linear(), lr=0.05), PICTURES),
    "fedavg-mlp": (lambda: fd.FedAvg(fd.MLP((7, 5)), lr=0.2), THREE),
    "fedavg-mlp-values": (lambda: fd.FedAvg(fd.MLP(7), lr=0.1), TWO_VALUES),
    "fedavg-cnn": (lambda: fd.FedAvg(fd.CNN((3, 4), 3, (6,), "same", leak=0.1), lr=0.1), PICTURES),
    "fedavg-cnn-valid": (lambda: fd.FedAvg(fd.CNN((3,), 3, ()), lr=0.1), PICTURES),
    "fedavg-module": (lambda: fd.FedAvg(seeded(), lr=0.2), THREE),
    "fedfw-linear": (lambda: fd.FedFW(fd.Linear(), fd.L1Ball(5.0)), THREE),
    "fedfw-low-rank": (lambda: fd.FedFW(fd.Linear(bias=False), fd.NuclearBall(3.0)), TWO_VALUES),
    "ffgb-trees": (lambda: fd.FFGB(fd.Forest(trees=4, depth=5)), THREE),
    "ffgb-trees-logistic": (lambda: fd.FFGB(fd.Forest(3, depth=3), loss="logistic"), THREE),
    "ffgb-trees-values": (lambda: fd.FFGB(fd.Forest(trees=4), step=1.0), ONE_VALUE),
    "ffgb-trees-two-values": (lambda: fd.FFGB(fd.Forest(trees=4), step=1.0), TWO_VALUES),
    "ffgb-trees-images": (lambda: fd.FFGB(fd.Forest(trees=3, depth=4)), PICTURES),
    "ffgb-networks": (lambda: fd.FFGB(fd.Net(fd.MLP(5), FAST), step=0.5), THREE),
    "ffgb-modules": (lambda: fd.FFGB(fd.Net(seeded(), FAST), step=0.5), THREE),
    "ffgb-distill": (
        lambda: fd.FFGBDistill(fd.MLP(5), fd.Public(X[:40]), oracle=FAST),
        THREE,
    ),
    "fednewton-squared": (lambda: fd.FedNewton(RANDOM, reg=1e-2, solver="cg"), THREE),
    "fednewton-values": (lambda: fd.FedNewton(fd.Polynomial(2), reg=1e-2, solver="cg"), TWO_VALUES),
    "fednewton-cubic": (lambda: fd.FedNewton(fd.Polynomial(3), reg=1e-1, solver="cg"), ONE_VALUE),
    "fednewton-single": (lambda: fd.FedNewton(RANDOM, reg=1e-2, dtype="float32"), THREE),
    "fednewton-logistic": (
        lambda: fd.FedNewton(fd.Identity(intercept=True), reg=1e-2, loss="logistic"),
        THREE,
    ),
    "fednewton-softmax": (
        lambda: fd.FedNewton(fd.RandomFourier(30, 3.0, unbiased=True), 1e-2, loss="cross_entropy"),
        BINARY,
    ),
    "fednewton-module": (lambda: fd.FedNewton(seeded(), reg=1e-2), THREE),
    "krr-linear": (lambda: fd.KRR(fd.Identity(), reg=1e-2), THREE),
    "fedres": (lambda: fd.FedRes(shared=[4, 0, 2], private=[1, 3]), THREE),
    "fedres-two-classes": (lambda: fd.FedRes(shared=range(3), private=range(3, 6)), BINARY),
    "fedres-mlp": (
        lambda: fd.FedRes(fd.MLP(4), fd.Linear(), shared=[5, 1], private=range(6)),
        TWO_VALUES,
    ),
    "fedres-erm": (lambda: fd.FedResERM(shared=[0, 5], private=[1, 3]), BINARY),
    "bandit": (
        lambda: fd.FedResBandit(shared=[3, 0], private=[1, 2], every=1),
        fd.linear_bandit(3, actions=4, shared=2, private=2, rounds=20),
    ),
    "independent": (lambda: fd.Independent(fd.Linear(), lr=0.1), THREE),
    "ffgb-estimators": (lambda: fd.FFGB(fd.Sklearn(LinearRegression()), step=0.1), TWO_VALUES),
    "fedboost-densities": (lambda: fd.FedBoost(fd.Densities.of_clients(THREE), 2), THREE),
    "fedboost-networks": (lambda: fd.FedBoost(fd.Classifiers(networks(), 3), 1), THREE),
    "fedboost-estimators": (lambda: fd.FedBoost(fd.Classifiers(estimators(), 3), 1), THREE),
    "aflboost-networks": (lambda: fd.AFLBoost(fd.Classifiers(networks(), 3), 2), THREE),
}
"""Algorithm and data by name."""


@functools.cache
def run(name: str) -> fd.Run:
    algorithm, fed = RUNS[name]
    return fd.run(algorithm(), fed, rounds=3, seed=3)


def rows(name: str) -> np.ndarray:
    return RUNS[name][1].data.x_test


def models(name: str) -> list[fd.Predictor]:
    """The global model, where there is one, and a client's own, where it has one."""
    made = run(name)
    own = [made.model_of(1)] if made.algorithm.personal else []
    return own if name == "independent" else [made.model, *own]
