"""Ray against Local on the same workloads: what a round costs more, and what a second worker
brings.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

import foedus as fd
from benchmarks.workloads import WORKLOADS
from foedus.engines.ray.cluster import load_ray


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
    """The same with a state of 10,000 numbers a client, which has to be copied in case a worker is
    lost.
    """

    def init(self, client: fd.Client) -> torch.Tensor:
        return torch.zeros(10_000)

    def idle(self, client: fd.Client) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(()), client.state + 1


def ray(repeats: int) -> None:
    """Seconds a round, medians; one process has all threads, a worker its share of them unless said
    otherwise.
    """
    x = np.zeros((20_000, 2), np.float32)
    idle = fd.split(fd.Data.from_arrays(x, x[:, 0]), "iid", clients=1000)
    cases: list[tuple[str, fd.Algorithm, fd.Federation, float, int]] = [
        ("nothing, 1,000 clients", Nothing(), idle, 1.0, 50),
        ("nothing, 1,000 clients x 40 kB of state", Remembering(), idle, 1.0, 50),
    ]
    for name in ("w2", "w4"):
        work = WORKLOADS[name]
        fed, algorithm = work.data(), work.algorithm
        cases.append(
            (
                f"{name.upper()}: {work.title}",
                algorithm,
                fed,
                work.cohort / work.clients,
                2 * work.rounds,
            )
        )
        if name == "w2":
            cases.append(("W2 with all 100 clients in a round", algorithm, fed, 1.0, work.rounds))
    threads = torch.get_num_threads()
    kinds = {
        "1 worker": {"workers": 1, "resources": {"CPU": threads}},
        "1 worker, 1 thread": {"workers": 1, "resources": {"CPU": 1}},
        "2 workers, 1 thread each": {"workers": 2, "resources": {"CPU": 1}},
    }
    with ExitStack() as stack:  # one Ray for all of them, so that their turns can alternate
        module = load_ray()
        stack.callback(module.shutdown)
        began = time.perf_counter()
        module.init(
            "local",
            num_cpus=threads + 3,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        started = time.perf_counter() - began
        engines = {
            "Local": fd.Local(),
            **{name: stack.enter_context(fd.Ray(**kind)) for name, kind in kinds.items()},
        }
        began = time.perf_counter()
        fd.run(Nothing(), idle, 0, engine=engines["1 worker"])
        print(
            f"Ray started in {started:.1f} s, a worker in {time.perf_counter() - began:.1f} s",
            flush=True,
        )
        print(
            "\n| seconds a round | "
            + " | ".join(engines)
            + " | 1 worker / Local | 1 thread / 2 workers |"
        )
        print("|---|" + "---|" * (len(engines) + 2), flush=True)
        for what, algorithm, fed, participation, rounds in cases:
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for repeat in range(repeats + 1):
                for name, engine in engines.items():
                    options = {
                        "engine": engine,
                        "participation": participation,
                        "evaluate_every": 0,
                    }
                    clock = fd.run(
                        algorithm, fed, rounds if repeat else 1, **options
                    ).history.seconds
                    if repeat:
                        taken[name].append((clock.iloc[-1] - clock.iloc[0]) / rounds)
            t = [statistics.median(times) for times in taken.values()]
            print(
                f"| {what} | "
                + " | ".join(f"{s:.4f}" for s in t)
                + f" | {t[1] / t[0]:.2f} | {t[2] / t[3]:.2f} |",
                flush=True,
            )
