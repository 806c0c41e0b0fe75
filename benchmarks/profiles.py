"""Where the time of each workload goes: the five largest costs and their shares, in one thread, by
the time of the processor.
"""

from __future__ import annotations

import cProfile
import pstats
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import foedus as fd
from benchmarks.families import FAMILIES
from benchmarks.workloads import CROWD, WORKLOADS, Workload, foedus_rounds

ROOT = Path(__file__).parent.parent


def profiled(f: Callable[[], object]) -> pstats.Stats:
    """A call, after one that is not counted."""
    f()
    profile = cProfile.Profile(time.process_time)
    profile.runcall(f)
    return pstats.Stats(profile)


def name_of(function: tuple[str, int, str]) -> str:
    """A function as one would look for it: `torch.bmm`, or `training/descend.py _descend`."""
    file, _, name = function
    if file == "~":
        found = re.search(r"'([\w.<>]+)' of '[\w.]+?(\w+)' objects", name)
        return (
            f"{found[2]}.{found[1]}".replace("TensorBase", "Tensor")
            if found
            else re.sub(r"<built-in method |>", "", name)
        )
    parts = Path(file).parts
    return f"{'/'.join(parts[-2:])} {name}"


def largest(stats: pstats.Stats, many: int = 5) -> str:
    """The functions with the most time of their own, and their shares."""
    own = sorted(((v[2], name_of(k)) for k, v in stats.stats.items()), reverse=True)
    return "; ".join(f"{name} {100 * t / stats.total_tt:.0f}%" for t, name in own[:many])


def python_share(stats: pstats.Stats) -> float:
    """The part of the time that is spent in Python's own functions, not in PyTorch, NumPy or
    scikit-learn.
    """
    return sum(v[2] for k, v in stats.stats.items() if k[0] != "~") / stats.total_tt


def rounds_of(work: Workload) -> Callable[[], object]:
    """Rounds on data that is placed once."""
    fed = work.data()
    return lambda: foedus_rounds(work, fed, work.rounds)


def profiles(repeats: int) -> None:
    """W1 to W10 and the 100,000 clients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], Callable[[], object]]] = {
        **{name.upper(): lambda w=w: rounds_of(w) for name, w in WORKLOADS.items()},
        **{name.upper(): lambda make=make: make().foedus for name, make in FAMILIES.items()},
        "100,000 clients": lambda: rounds_of(CROWD),
    }
    print("| workload | the five largest costs | Python |\n|---|---|---|")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fd.DivergenceWarning)
            for name, make in cases.items():
                stats = profiled(make())
                print(
                    f"| {name} | {largest(stats)} | {100 * python_share(stats):.0f}% |", flush=True
                )
    finally:
        torch.set_num_threads(threads)
