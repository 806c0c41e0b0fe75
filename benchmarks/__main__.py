"""Speed, as ratios measured in one run: `python -m benchmarks [w1 w2 w3 w4 w5 batching overhead memory fednewton fedfw lowrank fedboost fedres ffgb ray secure peers]`."""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import foedus as fd
from benchmarks.fedboost import fedboost
from benchmarks.fedfw import fedfw, lowrank
from benchmarks.fednewton import fednewton
from benchmarks.fedres import fedres
from benchmarks.ffgb import ffgb
from benchmarks.flower import flower
from benchmarks.peers.compare import peers
from benchmarks.ray import Nothing, ray
from benchmarks.secure import secure
from benchmarks.workloads import WORKLOADS, Limit, PlainLoop, Workload, foedus_rounds


def seconds(f: Callable[[], object]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def measure(work: Workload, repeats: int) -> dict[str, float]:
    """Seconds a round of each way, medians of interleaved repeats."""
    fed = work.data()
    plain = PlainLoop(work, fed)
    ways: dict[str, Callable[[], float]] = {
        # What a run costs once (placing the data) is taken off: rounds are compared.
        "foedus": lambda: (
            (seconds(lambda: foedus_rounds(work, fed, work.rounds)) - seconds(lambda: foedus_rounds(work, fed, 0)))
            / work.rounds
        ),
        "plain loop": lambda: seconds(plain.round),
    }
    if work.limit:
        limit = Limit(work, fed)
        ways["limit"] = lambda: seconds(lambda: [limit.round() for _ in range(work.rounds)]) / work.rounds
    for way in ways.values():
        way()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            taken[name].append(way())
    return {name: statistics.median(t) for name, t in taken.items()}


def workloads(names: list[str], repeats: int) -> None:
    print("\n| workload | plain loop, s | foedus, s | limit, s | plain / foedus | foedus / limit |")
    print("|---|---|---|---|---|---|")
    for name in names:
        work = WORKLOADS[name]
        t = measure(work, repeats)
        limit = f"{t['limit']:.4f} | " if "limit" in t else "- | "
        against = f"{t['foedus'] / t['limit']:.2f}" if "limit" in t else "-"
        print(
            f"| {name.upper()}: {work.title} | {t['plain loop']:.4f} | {t['foedus']:.4f} | {limit}"
            f"{t['plain loop'] / t['foedus']:.1f}x | {against} |",
            flush=True,
        )


def batching(repeats: int) -> None:
    """Where batching clients pays and where it does not: what `Local(batch="auto")` decides by."""
    print("\n| model, 10 clients x 64 rows, batches of 32 | parameters | batched, s | looped, s | looped / batched | auto |")
    print("|---|---|---|---|---|---|")

    def module(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(784, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))

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
        auto = "batched" if algorithm.batchable else "looped"
        print(f"| {name} | {size:,} | {batched:.4f} | {looped:.4f} | {looped / batched:.2f} | {auto} |", flush=True)


def overhead(repeats: int) -> None:
    print("\n| clients in the round | overhead a round, ms | a client, us |")
    print("|---|---|---|")
    for clients in (10, 1_000, 100_000):
        x = np.zeros((clients * 20, 2), np.float32)
        fed = fd.split(fd.Data.from_arrays(x, x[:, 0]), "iid", clients=clients)
        rounds = 20 if clients < 100_000 else 5
        once = lambda r, fed=fed: seconds(lambda: fd.run(Nothing(), fed, r, evaluate_every=0))  # noqa: E731
        once(1)
        t = statistics.median((once(rounds) - once(0)) / rounds for _ in range(repeats))
        print(f"| {clients:,} | {1e3 * t:.2f} | {1e6 * t / clients:.2f} |", flush=True)


def memory() -> None:
    """Peak memory of a process of its own for each number of clients, 20 rows x 100 features each, cohort 1,000."""
    print("\n| clients | data, MB | peak after 5 rounds, MB | after 50 rounds, MB | peak / data |")
    print("|---|---|---|---|---|")
    for clients in (100_000, 200_000, 400_000):
        peaks = [
            int(
                subprocess.run(
                    [sys.executable, "-m", "benchmarks", "--peak", str(clients), str(r)],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for r in (5, 50)
        ]
        data = clients * 20 * 100 * 4 / 1e6
        print(
            f"| {clients:,} | {data:.0f} | {peaks[0] / 1e6:.0f} | {peaks[1] / 1e6:.0f} | {peaks[1] / 1e6 / data:.2f} |",
            flush=True,
        )


def peak(clients: int, rounds: int) -> None:
    rows = clients * 20
    warm = np.zeros((40, 100), np.float32)
    small = fd.split(fd.Data.from_arrays(warm, np.arange(40) % 10, classes=10), "iid", clients=2)
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=10)
    fd.run(algorithm, small, 1, evaluate_every=0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    x = np.random.default_rng(0).standard_normal((rows, 100), dtype=np.float32)
    fed = fd.split(fd.Data.from_arrays(x, np.arange(rows) % 10, classes=10), "iid", clients=clients)
    fd.run(algorithm, fed, rounds, participation=min(1.0, 1000 / clients), evaluate_every=0)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


STUDIES: dict[str, Callable[[int], None]] = {
    "batching": batching,
    "overhead": overhead,
    "memory": lambda repeats: memory(),
    "fednewton": fednewton,
    "fedfw": fedfw,
    "lowrank": lowrank,
    "fedboost": fedboost,
    "fedres": fedres,
    "ffgb": ffgb,
    "ray": ray,
    "flower": flower,
    "secure": secure,
    "peers": peers,
}


def main() -> None:
    items = [*WORKLOADS, *STUDIES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed of foedus, as ratios in one run.")
    parser.add_argument("items", nargs="*", help=f"some of: {' '.join(items)} (all but peers)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        return peak(*options.peak)
    unknown = set(options.items) - set(items)
    if unknown:
        parser.error(f"unknown item {', '.join(sorted(unknown))}; choose from {', '.join(items)}")
    chosen = options.items or [i for i in items if i != "peers"]  # those install venvs: on request
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"
    )
    if any(w in chosen for w in WORKLOADS):
        workloads([w for w in WORKLOADS if w in chosen], options.repeats)
    for name, measure_it in STUDIES.items():
        if name in chosen:
            measure_it(options.repeats)
    return None


if __name__ == "__main__":
    main()
