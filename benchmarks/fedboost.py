"""FedBoost against the matrix products that it needs; and bytes a round as the number of
predictors grows.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

import foedus as fd
from benchmarks.timing import seconds
from foedus.data.catalog import locate
from foedus.papers.fedboost import point_masses, shakespeare


def bare(clients: torch.Tensor, table: torch.Tensor, loss: str, rounds: int) -> None:
    """Dense products of all clients' distributions (p, |Y|) with the predictors sent (C, |Y|):
    their gradients, nothing else.
    """
    weight = torch.full((len(table),), 1 / len(table))
    for _ in range(rounds):
        mixed = weight @ table
        if loss == "log":
            (clients / mixed) @ table.mT
        else:
            (mixed - clients) @ table.mT


def fedboost(repeats: int) -> None:
    """Point masses with p = q = 1,000, 1,000 rounds; and Shakespeare's characters, 50 rounds."""
    print(
        "\nFedBoost; 'bare' is the dense products of all clients' distributions with the "
        "predictors of a round, and nothing else"
    )
    print("\n| data | p | C | rounds | FedBoost, s | bare, s | FedBoost / bare |")
    print("|---|---|---|---|---|---|---|")
    cases: list[tuple[str, fd.Federation, fd.Densities, str, int, list[int]]] = []
    cases.append(
        (
            "point masses",
            point_masses(1000),
            fd.Densities(np.eye(1000)),
            "squared",
            1000,
            [32, 320, 1000],
        )
    )
    if locate("shakespeare") is not None:
        fed, members = shakespeare()
        cases.append(("Shakespeare", fed, members, "log", 50, [len(members) // 2, len(members)]))
    for name, fed, members, loss, rounds, budgets in cases:
        counts = np.bincount(
            fed.owners() * fed.data.classes + fed.data.y_train[fed.rows],
            minlength=len(fed) * fed.data.classes,
        )
        shares = torch.from_numpy(
            (counts.reshape(len(fed), -1) / fed.sizes[:, None]).astype(np.float32)
        )
        for budget in budgets:
            options: dict[str, Any] = (
                {"sampling": "all"}
                if budget == len(members)
                else {"budget": budget, "sampling": "uniform"}
            )
            algorithm = fd.FedBoost(members, loss=loss, step=0.01, measure_every=0, **options)
            fd.run(algorithm, fed, 2, evaluate_every=0)
            ours, theirs = [], []
            for _ in range(repeats):
                ours.append(
                    seconds(lambda a=algorithm, f=fed, r=rounds: fd.run(a, f, r, evaluate_every=0))
                )
                table = members.table[:budget]
                theirs.append(
                    seconds(lambda s=shares, t=table, k=loss: bare(s, t, k, 20)) * rounds / 20
                )
            a, b = statistics.median(ours), statistics.median(theirs)
            print(
                f"| {name} | {len(fed):,} | {budget:,} | {rounds:,} | {a:.2f} | {b:.2f} | "
                f"{a / b:.2f} |",
                flush=True,
            )

    print("\n| q | C | predictors sent a round | bytes down a client and round |")
    print("|---|---|---|---|")
    for q in (10, 100, 1000, 100_000):
        table = np.random.default_rng(0).dirichlet(np.ones(200), q)
        data = fd.Data.from_arrays(
            np.zeros((2000, 1), np.float32), np.arange(2000) % 200, classes=200
        )
        fed = fd.split(data, "iid", clients=10)
        history = fd.run(
            fd.FedBoost(fd.Densities(table), budget=5, measure_every=0), fed, 100, evaluate_every=0
        ).history
        print(
            f"| {q:,} | 5 | {history.sent.mean():.2f} | "
            f"{history.bytes_down.iloc[-1] / 100 / len(fed):,.0f} |",
            flush=True,
        )
