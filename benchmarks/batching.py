"""Where batching clients pays and where it does not: what `Local(batch="auto")` decides by."""

from __future__ import annotations

import statistics

import numpy as np
from torch import nn

import foedus as fd


def batching(repeats: int) -> None:
    """One round of FedAvg with models of several sizes, batched and looped."""
    print(
        "\n| model, 10 clients x 64 rows, batches of 32 | parameters | batched, s | looped, s | "
        "looped / batched | auto |"
    )
    print("|---|---|---|---|---|---|")

    def module(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(784, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 10),
        )

    models = {
        "Linear()": fd.Linear(),
        "MLP(200)": fd.MLP(200),
        "MLP(2000, 2000)": fd.MLP((2000, 2000)),
        "torch module, width 50": module(50),
        "torch module, width 300": module(300),
        "torch module, width 1000": module(1000),
        "torch module, width 2000": module(2000),
        "CNN.mnist()": fd.CNN.mnist(),
        "CNN, 8 and 16 filters": fd.CNN((8, 16), hidden=(32,), padding="same"),
    }
    rng = np.random.default_rng(0)
    x = rng.standard_normal((640, 784), dtype=np.float32)
    fed = fd.split(fd.Data.from_arrays(x, np.arange(640) % 10, classes=10), "iid", clients=10)
    for name, model in models.items():
        algorithm = fd.FedAvg(model, lr=0.01, batch_size=32)
        taken: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(repeats + 1):
            for batch, times in taken.items():
                run = fd.run(algorithm, fed, 1, engine=fd.Local(batch=batch), evaluate_every=0)
                if repeat:
                    times.append(run.records.last("seconds") - run.records.rows[0]["seconds"])
        batched, looped = (statistics.median(taken[b]) for b in (True, False))
        size = sum(p.numel() for p in run.state.w.values())
        auto = "batched" if algorithm.batching().pays else "looped"
        print(
            f"| {name} | {size:,} | {batched:.4f} | {looped:.4f} | {looped / batched:.2f} | {auto} "
            "|",
            flush=True,
        )
