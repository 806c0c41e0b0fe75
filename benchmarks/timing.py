"""How things are timed: in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Times = dict[str, list[float]]


def seconds(f: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def in_turns(ways: Mapping[str, Callable[[], float]], repeats: int, warm: bool = True) -> Times:
    """The times that each way reports, `repeats` of each, in turns; a first turn warms up."""
    for way in ways.values() if warm else ():
        way()
    taken: Times = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            taken[name].append(way())
    return taken


def shown(times: list[float]) -> str:
    """The median, and half of the distance between the quartiles."""
    median = statistics.median(times)
    quarter, _, rest = (
        statistics.quantiles(times, method="inclusive")
        if len(times) > 1
        else (median, median, median)
    )
    digits = 4 if median < 1 else 2
    return f"{median:.{digits}f} ± {(rest - quarter) / 2:.{digits}f}"


def ratio(times: Times, a: str, b: str) -> float:
    """The median of a over that of b."""
    return statistics.median(times[a]) / statistics.median(times[b])


def peak_memory() -> int:
    """Bytes that this program has taken at most.

    (`getrusage` also counts what the process was before it became this program.)
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
