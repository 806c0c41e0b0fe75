"""What `foedus demo` runs: a function for each family, to be read and copied.

Each divides data that scikit-learn brings along among clients, runs a family beside what it is
compared with, and returns the runs by name. Nothing here knows how they are shown.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

import foedus as fd


def ffgb(seed: int = 0) -> dict[str, fd.Run]:
    """Boosted trees, where 90% of the digits are sorted by label before they are divided."""
    fed = fd.split(fd.load("digits"), "homogeneity", clients=10, s=0.1, seed=seed)
    network = fd.FedAvg(fd.MLP((64,)), lr=0.4, epochs=5)
    return {
        "FFGB, trees": fd.run(fd.FFGB(fd.Forest(trees=10)), fed, 10, seed=seed, progress=False),
        "FedAvg, network": fd.run(network, fed, 50, seed=seed, progress=False),
    }


def fednewton(seed: int = 0) -> dict[str, fd.Run]:
    """Kernel ridge regression on random features: the distance to the solution of pooled rows."""
    fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=1.0, min_rows=10, seed=seed)
    problem: dict[str, Any] = {"features": fd.RandomFourier(300, bandwidth=4.0), "reg": 1e-3}
    pooled = fd.run(fd.KRR(**problem), fed, 0, seed=seed, progress=False)
    target = pooled.model.predict_proba(fed.data.x_test)

    def distance(y, p):
        """Of the predictions from those of the pooled solution, relative to these."""
        return np.linalg.norm(p - target) / np.linalg.norm(target)

    options: dict[str, Any] = {"seed": seed, "metrics": [distance], "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fd.DivergenceWarning)  # that of plain Newton: the point
        return {
            "FedNewton, cg": fd.run(fd.FedNewton(**problem, solver="cg"), fed, 4, **options),
            "FedAvg": fd.run(fd.RidgeFedAvg(**problem, lr=4.0, steps=5), fed, 50, **options),
            "plain Newton": fd.run(fd.FedNewton(**problem), fed, 4, **options),
            "pooled rows": pooled,
        }


def fedfw(seed: int = 0) -> dict[str, fd.Run]:
    """A sparse model on all products of up to three of the 30 measurements of a tumor."""
    data = fd.load("breast_cancer")
    of_three = PolynomialFeatures(3, interaction_only=True, include_bias=False)
    products = make_pipeline(of_three, StandardScaler()).fit(data.x_train)
    x_train, x_test = (
        products.transform(x).clip(-3, 3).astype(np.float32) for x in (data.x_train, data.x_test)
    )
    data = fd.Data.from_arrays(x_train, data.y_train, x_test, data.y_test, classes=2)
    fed = fd.split(data, "dirichlet", clients=10, alpha=0.5, min_rows=5, seed=seed)
    sparse = fd.FedFW(fd.Linear(), fd.L1Ball(15.0), measure_every=0)
    dense = fd.FedAvg(fd.Linear(), lr=0.1)
    return {
        "FedFW": fd.run(sparse, fed, 100, seed=seed, progress=False),
        "FedAvg": fd.run(dense, fed, 20, seed=seed, progress=False),
    }


def fedres(seed: int = 0) -> dict[str, fd.Run]:
    """30 clients, each with a task of its own; half of the pixels are shared, half are private."""
    fed = fd.split(fd.load("digits"), "tasks", clients=30, seed=seed)
    pixels = (fed.settings["global_features"], fed.settings["local_features"])
    both = fd.FedRes(shared=pixels[0], private=pixels[1], step=0.035)
    late = fd.Delayed(fd.Local(), up=2, down=5)
    options: dict[str, Any] = {"seed": seed, "evaluate_every": 5, "progress": False}
    return {
        "FedRes": fd.run(both, fed, 120, **options),
        "FedRes, 7 rounds late": fd.run(both, fed, 120, engine=late, **options),
        "Independent": fd.run(both.independent(), fed, 120, **options),
        "Central": fd.run(both.central(), fed, 120, **options),
    }


def fedboost(seed: int = 0) -> dict[str, fd.Run]:
    """Twelve classifiers are given; only three of them were fitted to upright digits."""
    data, rng = fd.load("digits"), np.random.default_rng(seed)
    public, private = np.split(rng.permutation(len(data.x_train)), [400])
    given = []
    for quarters in range(4):
        for _ in range(3):
            rows = rng.choice(public, 150, replace=False)
            turned = np.rot90(data.x_train[rows].reshape(-1, 8, 8), quarters, axes=(1, 2))
            model = LogisticRegression(C=0.1, max_iter=200)
            given.append(model.fit(turned.reshape(len(rows), -1), data.y_train[rows]))
    x, y = data.x_train[private], data.y_train[private]
    own = fd.Data.from_arrays(x, y, data.x_test, data.y_test, classes=10)
    fed = fd.split(own, "dirichlet", clients=10, alpha=0.3, min_rows=5, seed=seed)
    members = fd.Classifiers(given, classes=10)
    few: dict[str, Any] = {"budget": 4, "explore": 0.1, "bias_correction": True, "average": False}
    everything = fd.FedBoost(members, sampling="all", loss="squared")
    options: dict[str, Any] = {"seed": seed, "progress": False}
    return {
        "FedBoost": fd.run(fd.FedBoost(members, loss="squared", **few), fed, 40, **options),
        "all sent": fd.run(everything, fed, 40, **options),
        "equal weights": fd.run(everything, fed, 0, **options),
    }


def averaging(seed: int = 0) -> fd.Comparison:
    """Methods that average one network; half of the clients take part in each round."""
    training: dict[str, Any] = {"model": fd.MLP((64,)), "lr": 0.1, "epochs": 5}
    algorithms = {
        "FedAvg": fd.FedAvg(**training),
        "FedProx": fd.FedProx(**training, mu=0.1),
        "Scaffold": fd.Scaffold(**training),
        "FedDyn": fd.FedDyn(**training, alpha=0.1),
        "Independent": fd.Independent(**training),
        "Central": fd.Central(**training),
    }
    fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.1, min_rows=10, seed=seed)
    seeds = [seed, seed + 1, seed + 2]
    return fd.compare(algorithms, fed, 30, seeds=seeds, participation=0.5, progress=False)
