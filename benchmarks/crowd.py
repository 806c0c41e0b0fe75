"""Many clients: what the engine itself costs, in time and memory; and how long an import and the
demo take.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import foedus as fd
from benchmarks.ray import Nothing
from benchmarks.timing import in_turns, peak_memory, ratio, seconds, shown
from benchmarks.workloads import CROWD, Limit, foedus_rounds
from foedus.models.training import descend as training


def overhead(repeats: int) -> None:
    """A client step that does nothing, to show the engine alone."""
    print("| clients in the round | overhead a round, ms | a client, us |\n|---|---|---|")
    for clients in (10, 1_000, 100_000):
        x = np.zeros((clients * 20, 2), np.float32)
        fed = fd.split(fd.Data.from_arrays(x, x[:, 0]), "iid", clients=clients)
        rounds = 20 if clients < 100_000 else 5
        once = lambda r, fed=fed: seconds(lambda: fd.run(Nothing(), fed, r, evaluate_every=0))  # noqa: E731
        once(1)
        t = statistics.median((once(rounds) - once(0)) / rounds for _ in range(repeats))
        print(f"| {clients:,} | {1e3 * t:.2f} | {1e6 * t / clients:.2f} |", flush=True)


def crowd(repeats: int) -> None:
    """A cohort of 1,000 of 100,000 clients of 20 rows: rounds beside the same computation by hand,
    and the peak of memory.
    """
    work = CROWD
    fed = work.data()
    limit = Limit(work, fed)
    ways = {
        "foedus": lambda: (
            (
                seconds(lambda: foedus_rounds(work, fed, work.rounds))
                - seconds(lambda: foedus_rounds(work, fed, 0))
            )
            / work.rounds
        ),
        "limit": lambda: seconds(lambda: [limit.round() for _ in range(work.rounds)]) / work.rounds,
        "training": lambda: _training(lambda: foedus_rounds(work, fed, work.rounds)) / work.rounds,
    }
    taken = in_turns(ways, repeats)
    print(
        f"{work.title}\n\n| foedus, s a round | of which training | by hand, s a round | overhead "
        "over by hand |\n|---|---|---|---|"
    )
    more = 100 * (ratio(taken, "foedus", "limit") - 1)
    print(
        f"| {shown(taken['foedus'])} | {shown(taken['training'])} | {shown(taken['limit'])} | "
        f"{more:.0f}% |",
        flush=True,
    )


def _training(run: Callable[[], object]) -> float:
    """Seconds that a run spends in local training, permutations of rows included. The rest is
    sampling of the cohort, keys and the sum.
    """
    spent, descend = [], training._descend.__wrapped__

    def timed(*args: object) -> object:
        began = time.perf_counter()
        result = descend(*args)
        spent.append(time.perf_counter() - began)
        return result

    training._descend.__wrapped__ = timed
    try:
        run()
    finally:
        training._descend.__wrapped__ = descend
    return sum(spent)


def memory(repeats: int) -> None:
    """Peak memory of a process of its own for each number of clients, 20 rows x 100 features each,
    cohort 1,000.
    """
    print(
        "| clients | data, MB | peak after 5 rounds, MB | after 50 rounds, MB | peak / data "
        "|\n|---|---|---|---|---|"
    )
    for clients in (100_000, 200_000, 400_000):
        peaks = []
        for rounds in (5, 50):
            command = [sys.executable, "-m", "benchmarks.crowd", str(clients), str(rounds)]
            peaks.append(
                int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                / 1e6
            )
        data = clients * 20 * 100 * 4 / 1e6
        print(
            f"| {clients:,} | {data:.0f} | {peaks[0]:.0f} | {peaks[1]:.0f} | {peaks[1] / data:.2f} "
            "|",
            flush=True,
        )


def peak(clients: int, rounds: int) -> None:
    """Prints the bytes that a run takes at most, its data included and imports not."""
    rows = clients * 20
    warm = np.zeros((40, 100), np.float32)
    small = fd.split(fd.Data.from_arrays(warm, np.arange(40) % 10, classes=10), "iid", clients=2)
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=10)
    fd.run(algorithm, small, 1, evaluate_every=0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    x = np.random.default_rng(0).standard_normal((rows, 100), dtype=np.float32)
    fed = fd.split(fd.Data.from_arrays(x, np.arange(rows) % 10, classes=10), "iid", clients=clients)
    fd.run(algorithm, fed, rounds, participation=min(1.0, 1000 / clients), evaluate_every=0)
    print(peak_memory() - before)


def start(repeats: int) -> None:
    """From nothing to an imported library, and to the page of `foedus demo`."""

    def python(code: str) -> float:
        run = (
            f"import time; began = time.perf_counter(); {code}; print(time.perf_counter() - began)"
        )
        return float(
            subprocess.run(
                [sys.executable, "-c", run], capture_output=True, text=True, check=True
            ).stdout
        )

    taken = in_turns(
        {"torch": lambda: python("import torch"), "both": lambda: python("import torch, foedus")},
        repeats,
    )
    print("| what | seconds |\n|---|---|")
    print(
        f"| import torch | {shown(taken['torch'])} |\n| import torch, foedus | "
        f"{shown(taken['both'])} |"
    )
    more = statistics.median(b - a for a, b in zip(taken["torch"], taken["both"], strict=True))
    print(f"| foedus without torch | {more:.2f} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "foedus.cli", "demo", "--out", folder],
            capture_output=True,
            check=True,
        )
        taken_demo = time.perf_counter() - began
    print(f"| `foedus demo`, to its page | {taken_demo:.1f} |", flush=True)


if __name__ == "__main__":
    peak(*map(int, sys.argv[1:]))
