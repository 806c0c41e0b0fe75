"""FedRes' three schemes, 50 rollouts at once, against a plain NumPy loop over clients; and what a
round costs as delays and T grow.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

import foedus as fd
from benchmarks.timing import seconds
from foedus.data.catalog import locate
from foedus.papers.fedres import make, tasks

STEP = 0.1


def loop(fed: fd.Federation, name: str, rounds: int) -> float:
    """One rollout in plain loops: for each round, for each client.

    Returns the accuracy on the clients' own test rows.
    """
    x, y = (
        np.c_[fed.data.x_train, np.ones(len(fed.data.x_train))].astype(np.float32),
        2.0 * fed.data.y_train - 1,
    )
    last = [x.shape[1] - 1]
    shared = np.concatenate((fed.settings["global_features"], last))
    private = (
        np.concatenate((fed.settings["local_features"], last))
        if name == "FedRes"
        else np.arange(x.shape[1])
    )
    w, squares = np.zeros(len(shared), np.float32), np.zeros(len(shared), np.float32)
    locals_ = [np.zeros(len(private), np.float32) for _ in range(len(fed))]
    local_squares = [np.zeros(len(private), np.float32) for _ in range(len(fed))]
    rows = [fed.client_rows(i) for i in range(len(fed))]
    for t in range(rounds):
        total = np.zeros_like(w)
        for i in range(len(fed)):
            row = x[rows[i][t % len(rows[i])]]
            xg, xl, target = row[shared], row[private], y[rows[i][t % len(rows[i])]]
            z = 0.0
            if name != "Independent":
                z += xg @ w
            if name != "Central":
                z += xl @ locals_[i]
            error = 2 * (z - target)
            total += error * xg
            if name != "Central":
                g = error * xl
                local_squares[i] += g * g
                locals_[i] -= STEP * g / np.sqrt(np.maximum(local_squares[i], 1e-30))
        if name != "Independent":
            squares += total * total
            w = w - STEP * total / np.sqrt(np.maximum(squares, 1e-30))
    test = np.c_[fed.data.x_test, np.ones(len(fed.data.x_test))]
    hits = count = 0
    for i in range(len(fed)):
        own = fed.test_rows[fed.test_offsets[i] : fed.test_offsets[i + 1]]
        z = (test[own][:, shared] @ w if name != "Independent" else 0) + (
            test[own][:, private] @ locals_[i] if name != "Central" else 0
        )
        hits += ((z > 0) == (fed.data.y_test[own] == 1)).sum()
        count += len(own)
    return hits / count


def fedres(repeats: int) -> None:
    """pendigits (or digits), P = 50, T = 500, 50 rollouts."""
    torch.set_num_threads(1)
    name, clients = ("pendigits", 50) if locate("pendigits") is not None else ("digits", 15)
    data, rounds, many, few = fd.load(name), 500, 50, 2
    feds = tasks(data, clients, many)
    names = ("Independent", "Central", "FedRes")
    print(
        f"\n{name}, {clients} clients, {rounds} rounds, {many} rollouts of {', '.join(names)}, "
        "AdaGrad, one thread"
    )
    print(
        f"'NumPy' is a loop over rounds and clients, timed on {few} rollouts and multiplied by "
        f"{many // few}"
    )
    ours, theirs = [], []
    for _ in range(repeats):
        found: list = []
        ours.append(
            seconds(
                lambda f=found: f.append(
                    fd.rollouts({n: make(n, STEP) for n in names}, feds, rounds)
                )
            )
        )
        scores: dict[str, list[float]] = {n: [] for n in names}
        theirs.append(
            seconds(
                lambda s=scores: [
                    s[n].append(loop(f, n, rounds)) for n in names for f in feds[:few]
                ]
            )
            * many
            / few
        )
        for n in names:
            same = found[0][(found[0].scheme == n) & (found[0].rollout < few)].own_accuracy
            assert np.allclose(same, scores[n], atol=0.02), (n, same.tolist(), scores[n])
    a, b = statistics.median(ours), statistics.median(theirs)
    print("\n| NumPy, s | foedus, s | NumPy / foedus |\n|---|---|---|")
    print(f"| {b:.1f} | {a:.2f} | {b / a:.0f} |", flush=True)

    print(
        "\nA round of 50 rollouts of FedRes: ms, and MB of gradients that wait, as T and the delay "
        "grow"
    )
    print("\n| T | delay | ms a round | MB |\n|---|---|---|---|")
    for horizon, delay in ((250, 0), (1000, 0), (4000, 0), (1000, 20), (1000, 100), (1000, 200)):
        begin = time.perf_counter()
        fd.rollouts(
            {"FedRes": make("FedRes", STEP)}, feds, horizon, up=delay - delay // 2, down=delay // 2
        )
        each = (time.perf_counter() - begin) / horizon * 1e3
        width = len(feds[0].settings["local_features"]) + 1
        state = many * clients * (delay + 1 if delay else 0) * width * 4 / 1e6
        print(f"| {horizon:,} | {delay} | {each:.2f} | {state:.1f} |", flush=True)
