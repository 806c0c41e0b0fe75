"""How cost grows: with clients, with the size of the model, and with rounds.

Each case is a process of its own, whose memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import foedus as fd
from benchmarks.timing import peak_memory

ROWS, CLASSES = 20, 10


def federation(clients: int, features: int, folder: str | None = None) -> fd.Federation:
    """Clients of 20 rows each; in a folder, the rows are mapped from a file there."""
    n = clients * ROWS
    shape = (n, features)
    x = (
        np.lib.format.open_memmap(f"{folder}/x.npy", "w+", np.float32, shape)
        if folder
        else np.empty(shape, np.float32)
    )
    rng = np.random.default_rng(0)
    for first in range(0, n, 1 << 18):
        part = x[first : first + (1 << 18)]
        part[:] = rng.standard_normal(part.shape, dtype=np.float32)
    data = fd.Data.from_arrays(x, (np.arange(n) % CLASSES).astype(np.int64), classes=CLASSES)
    return fd.split(data, "iid", clients=clients)


def one(
    clients: int,
    features: int,
    cohort: int,
    rounds: int,
    hidden: int = 0,
    mapped: bool = False,
    stateful: bool = False,
) -> None:
    """A case: prints seconds a round and peak bytes beyond what an empty process has, as JSON."""
    small = federation(4, features)
    model = fd.MLP(hidden) if hidden else fd.Linear()
    kind = fd.Scaffold if stateful else fd.FedAvg
    algorithm = kind(model, lr=0.1, batch_size=10)
    fd.run(algorithm, small, 1, evaluate_every=0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    with tempfile.TemporaryDirectory() as folder:
        fed = federation(clients, features, folder if mapped else None)
        share = cohort / clients
        fd.run(algorithm, fed, 1, participation=share, evaluate_every=0)
        began = time.perf_counter()
        run = fd.run(algorithm, fed, rounds, participation=share, evaluate_every=0)
        taken = (time.perf_counter() - began) / rounds
        size = sum(v.numel() for v in run.state.w.values())
    peak = peak_memory() - before
    print(json.dumps({"seconds": taken, "peak": peak, "parameters": size}))


def case(**options: Any) -> dict[str, float]:
    """`one` in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def scaling(repeats: int) -> None:
    """Clients 10^2 to 10^6, parameters 10^3 to 10^7, rounds 10 to 1,000."""
    print(
        "\nClients of 20 rows x 20 features, softmax regression, batches of 10 (2 steps a client); "
        "all clients in every round"
    )
    head = (
        "clients",
        "a round, s",
        "a client-step, us",
        "data, MB",
        "peak memory, MB",
        "peak / data",
    )
    print(f"\n| algorithm | {' | '.join(head)} |\n|{'---|' * (len(head) + 1)}")
    for stateful in (False, True):
        for clients in (100, 1_000, 10_000, 100_000, 1_000_000):
            if stateful and clients < 10_000:
                continue
            mapped = clients == 1_000_000
            found = case(
                clients=clients,
                features=20,
                cohort=clients,
                rounds=max(2, min(50, 100_000 // clients)),
                mapped=mapped,
                stateful=stateful,
            )
            data = clients * ROWS * (20 * 4 + 8) / 1e6
            name = ("Scaffold" if stateful else "FedAvg") + (
                ", rows in a mapped file" if mapped else ""
            )
            print(
                f"| {name} | {clients:,} | {found['seconds']:.4f} | "
                f"{1e6 * found['seconds'] / (2 * clients):.2f} | {data:.1f} "
                f"| {found['peak'] / 1e6:.0f} | {found['peak'] / 1e6 / data:.2f} |",
                flush=True,
            )
    print(
        "\n10 clients of 20 rows x 100 features, one hidden layer, batches of 10; the model grows"
    )
    print(
        "\n| parameters | a round, s | a client-step, ms | ns a parameter | peak memory, MB | "
        "bytes a parameter |\n|---|---|---|---|---|---|"
    )
    for hidden in (9, 90, 900, 9_000, 90_000):
        found = case(
            clients=10, features=100, cohort=10, rounds=20 if hidden <= 9_000 else 3, hidden=hidden
        )
        step, size = found["seconds"] / 20, found["parameters"]
        print(
            f"| {size:,} | {found['seconds']:.4f} | {1e3 * step:.3f} | {1e9 * step / size:.1f} | "
            f"{found['peak'] / 1e6:.0f} "
            f"| {found['peak'] / size:.0f} |",
            flush=True,
        )
    print("\n1,000 clients as above, cohort 100; rounds grow")
    print("\n| rounds | a round, ms | peak memory, MB |\n|---|---|---|")
    for rounds in (10, 100, 1_000):
        found = case(clients=1_000, features=20, cohort=100, rounds=rounds)
        print(
            f"| {rounds:,} | {1e3 * found['seconds']:.2f} | {found['peak'] / 1e6:.1f} |", flush=True
        )


if __name__ == "__main__":
    one(**json.loads(sys.argv[1]))
