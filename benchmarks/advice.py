"""How good the advice of `fd.diagnose` is: every algorithm it names against FedAvg, by `python -m
benchmarks.advice [NAME ...] [--seeds 3]`.

Real sets are found in $FOEDUS_DATA. 20 rounds each, with the settings that the advice comes with;
FedRes sees 200 batches of 10 rows. FedAvg is the better, on the same test rows, of a linear model
and an MLP (for images a CNN), five epochs a round, lr 0.1 (0.01 for regression).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import warnings
from collections.abc import Callable

import numpy as np
import torch

import foedus as fd
from foedus.diagnosis.advice import ONE, OWN, code


def few(name: str, rows: int, test: int = 2000) -> fd.Data:
    """Some rows of a set."""
    data, rng = fd.load(name), np.random.default_rng(0)
    train, held = (
        rng.permutation(len(x))[:n] for x, n in ((data.x_train, rows), (data.x_test, test))
    )
    return dataclasses.replace(
        data,
        x_train=data.x_train[train],
        y_train=data.y_train[train],
        x_test=data.x_test[held],
        y_test=data.y_test[held],
    )


def shaped(data: fd.Data) -> fd.Data:
    """Flat rows as gray images."""
    side = int(data.x_train.shape[1] ** 0.5)
    images = {
        part: getattr(data, part).reshape(-1, 1, side, side) for part in ("x_train", "x_test")
    }
    return dataclasses.replace(data, **images)


def scaled(name: str) -> fd.Data:
    """A regression set whose y has variance 1."""
    data = fd.load(name)
    mean, deviation = data.y_train.mean(), data.y_train.std()
    return dataclasses.replace(
        data, y_train=(data.y_train - mean) / deviation, y_test=(data.y_test - mean) / deviation
    )


FEDERATIONS: dict[str, Callable[[int], fd.Federation]] = {
    "pendigits, iid": lambda s: fd.split(fd.load("pendigits"), "iid", clients=10, seed=s),
    "diabetes, iid": lambda s: fd.split(scaled("diabetes"), "iid", clients=5, seed=s),
    "mnist, iid, 6 rows each": lambda s: fd.split(few("mnist", 3000), "iid", clients=500, seed=s),
    "digits, dirichlet 0.1": lambda s: fd.split(
        fd.load("digits"), "dirichlet", clients=10, alpha=0.1, seed=s
    ),
    "letter, dirichlet 0.1": lambda s: fd.split(
        fd.load("letter"), "dirichlet", clients=10, alpha=0.1, seed=s
    ),
    "usps, dirichlet 0.3": lambda s: fd.split(
        fd.load("usps"), "dirichlet", clients=20, alpha=0.3, seed=s
    ),
    "covtype, homogeneity 0.1": lambda s: fd.split(
        few("covtype60k", 15000, 5000), "homogeneity", clients=10, s=0.1, seed=s
    ),
    "satimage, labels 2": lambda s: fd.split(
        fd.load("satimage"), "labels", clients=10, per_client=2, seed=s
    ),
    "mnist, labels 2": lambda s: fd.split(
        few("mnist", 6000), "labels", clients=100, per_client=2, seed=s
    ),
    "mnist as images, labels 2": lambda s: fd.split(
        shaped(few("mnist", 1000)), "labels", clients=10, per_client=2, seed=s
    ),
    "heart, 4 hospitals": lambda s: fd.split(
        fd.load("heart_disease_4sites", impute="median"), "natural"
    ),
    "pendigits, tasks": lambda s: fd.split(fd.load("pendigits"), "tasks", clients=10, seed=s),
    "mnist, tasks": lambda s: fd.split(few("mnist", 20000, 10000), "tasks", clients=50, seed=s),
    "covtype, tasks": lambda s: fd.split(fd.load("covtype60k"), "tasks", clients=50, seed=s),
    "leaf(1, 1)": lambda s: fd.synthetic_leaf(1.0, 1.0, seed=s),
    # No rule was adjusted on what follows.
    "ocr, iid": lambda s: fd.split(few("ocr_letters", 8000), "iid", clients=20, seed=s),
    "dna, dirichlet 0.1": lambda s: fd.split(
        fd.load("dna"), "dirichlet", clients=10, alpha=0.1, seed=s
    ),
    "shuttle, dirichlet 0.3": lambda s: fd.split(
        few("shuttle", 10000), "dirichlet", clients=10, alpha=0.3, seed=s
    ),
    "fashion, homogeneity 0.3": lambda s: fd.split(
        few("fashion_mnist_sub", 5000), "homogeneity", clients=10, s=0.3, seed=s
    ),
    "sensorless, labels 3": lambda s: fd.split(
        few("sensorless", 8000), "labels", clients=10, per_client=3, seed=s
    ),
    "usps, tasks": lambda s: fd.split(fd.load("usps"), "tasks", clients=50, seed=s),
}


def own(run: fd.Run) -> float:
    """What clients get on their own test rows: accuracy, or mean squared error."""
    table = run.per_client()
    table = table[table.test_rows > 0]
    return float(
        np.average(table["accuracy" if run.spec.classes else "mse"], weights=table.test_rows)
    )


def check(name: str, seed: int) -> dict[str, tuple[str, float, float]]:
    """By aim: the algorithm that is advised, how it does, and how FedAvg does."""
    fed = FEDERATIONS[name](seed)
    metric = "accuracy" if fed.data.classes else "mse"
    found = fd.diagnose(fed, seed=seed)

    def run(algorithm: fd.Algorithm) -> fd.Run:
        rounds = 200 if isinstance(algorithm, fd.FedRes) else 20
        return fd.run(algorithm, fed, rounds, seed=seed, evaluate_every=rounds)

    training = {"lr": 0.1 if fed.data.classes else 0.01, "epochs": 5}
    nets = [fd.Linear(), fd.MLP((64,))] if len(fed.spec.shape) == 1 else [fd.CNN()]
    plain = [run(fd.FedAvg(model, **training)) for model in nets]
    checked = {}

    def hold(
        aim: str, algorithm: fd.Algorithm, score: Callable[[fd.Run], float], against: list[fd.Run]
    ) -> None:
        best = (max if fed.data.classes else min)(map(score, against))
        checked[aim] = (type(algorithm).__name__, score(run(algorithm)), best)
        print(
            f"{name}, seed {seed}, {aim}: {code(algorithm)} {checked[aim][1:]}",
            file=sys.stderr,
            flush=True,
        )

    one = [a.algorithm for a in found.advice if a.aim == ONE]
    hold("one model", one[0], lambda r: r.records.last(metric), plain)
    if isinstance(one[-1], fd.FedDyn) and len(one) > 1:
        hold("one network", one[-1], lambda r: r.records.last(metric), plain[-1:])
    for advice in found.advice:
        if advice.aim == OWN and advice.algorithm is not None:
            hold("own models", advice.algorithm, own, plain)
    return checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", default=list(FEDERATIONS), help=f"of: {', '.join(FEDERATIONS)}"
    )
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        "| federation | aim | advised | it reaches | FedAvg | at least as good "
        "|\n|---|---|---|---|---|---|"
    )
    for name in arguments.names:
        found = [check(name, seed) for seed in range(arguments.seeds)]
        for aim in dict.fromkeys(aim for f in found for aim in f):
            runs = [f[aim] for f in found if aim in f]
            advised, plain = (statistics.fmean(r[k] for r in runs) for k in (1, 2))
            sign = -1 if name.startswith("diabetes") else 1
            better = sum(sign * r[1] >= sign * r[2] for r in runs)
            who = ", ".join(dict.fromkeys(r[0] for r in runs))  # several, where seeds disagree
            print(
                f"| {name} | {aim} | {who} | {advised:.3f} | {plain:.3f} | {better} of {len(runs)} "
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main()
