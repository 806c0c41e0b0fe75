"""Ray against Local on the same workloads: what a round costs more, and what a second worker brings."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

import foedus as fd
from benchmarks.workloads import BATCH, LR, WORKLOADS


@dataclass(frozen=True)
class Nothing(fd.Algorithm):
    """A step that does nothing: what is left is the engine."""

    def idle(self, client: fd.Client) -> tuple[torch.Tensor, None]:
        return torch.zeros(()), None

    def start(self, clients) -> fd.State:
        return fd.State()

    def round(self, clients, state: fd.State) -> fd.State:
        clients.mean(self.idle)
        return state


@dataclass(frozen=True)
class Remembering(Nothing):
    """The same with a state of 10,000 numbers a client, which has to be copied in case a worker is lost."""

    def init(self, client: fd.Client) -> torch.Tensor:
        return torch.zeros(10_000)

    def idle(self, client: fd.Client) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(()), client.state + 1


def ray(repeats: int) -> None:
    """Seconds a round, medians; one process has all threads, a worker its share of them unless said otherwise."""
    x = np.zeros((20_000, 2), np.float32)
    idle = fd.split(fd.Data.from_arrays(x, x[:, 0]), "iid", clients=1000)
    cases: list[tuple[str, fd.Algorithm, fd.Federation, float, int]] = [
        ("nothing, 1,000 clients", Nothing(), idle, 1.0, 50),
        ("nothing, 1,000 clients x 40 kB of state", Remembering(), idle, 1.0, 50),
    ]
    for name in ("w2", "w4"):
        work = WORKLOADS[name]
        fed, algorithm = work.data(), fd.FedAvg(work.model, lr=LR, batch_size=BATCH)
        cases.append((f"{name.upper()}: {work.title}", algorithm, fed, work.cohort / work.clients, 4 * work.rounds))
        if name == "w2":
            cases.append(("W2 with all 100 clients in a round", algorithm, fed, 1.0, work.rounds))
    threads = torch.get_num_threads()
    engines = {
        "Local": (None, threads),
        "1 worker": (fd.Ray(workers=1, resources={"CPU": threads}), threads),
        "1 worker, 1 thread": (fd.Ray(workers=1, resources={"CPU": 1}), 1),
        "2 workers, 1 thread each": (fd.Ray(workers=2, resources={"CPU": 1}), 1),
    }
    taken: dict[tuple[str, str], list[float]] = {}
    for name, (engine, _) in engines.items():
        began = time.perf_counter()
        if engine is not None:
            engine.__enter__()
        try:
            for what, algorithm, fed, participation, rounds in cases:
                options = {"engine": engine, "participation": participation, "evaluate_every": 0}
                fd.run(algorithm, fed, 1, **options)
                if what == cases[0][0] and engine is not None:
                    print(f"{name}: Ray and its workers started in {time.perf_counter() - began:.1f} s", flush=True)
                for _ in range(repeats):
                    run = fd.run(algorithm, fed, rounds, **options)
                    clock = run.history.seconds
                    taken.setdefault((what, name), []).append((clock.iloc[-1] - clock.iloc[0]) / rounds)
        finally:
            if engine is not None:
                engine.__exit__()
    print("\n| seconds a round | " + " | ".join(engines) + " | 1 worker / Local | 1 thread / 2 workers |")
    print("|---|" + "---|" * (len(engines) + 2))
    for what, *_ in cases:
        t = [statistics.median(taken[what, name]) for name in engines]
        print(f"| {what} | " + " | ".join(f"{s:.4f}" for s in t) + f" | {t[1] / t[0]:.2f} | {t[2] / t[3]:.2f} |", flush=True)
