"""W1 to W5 beside a plain loop, beside the same computation by hand, and beside what the machine
could do at its peaks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.machine import peak_bytes, peak_flops, row_flops
from benchmarks.timing import in_turns, ratio, seconds, shown
from benchmarks.workloads import WORKLOADS, Limit, PlainLoop, Workload, foedus_rounds

HEAD = (
    "workload",
    "plain loop, s a round",
    "foedus, s a round",
    "by hand, s a round",
    "plain / foedus",
    "foedus / by hand",
    "at the peaks, s",
    "fraction reached",
)


def at_the_peaks(work: Workload) -> float:
    """Seconds of a round's multiplications at the machine's peak, or of reading and copying its
    rows once, whichever is more.
    """
    rows = work.cohort * work.rows
    sums = rows * row_flops(work.module(), torch.rand(32, *work.shape), torch.arange(32) % 10)
    return max(sums / peak_flops(), 2 * rows * work.features * 4 / peak_bytes())


def workload(name: str, repeats: int) -> None:
    """One row of the table: medians of interleaved repeats."""
    work = WORKLOADS[name]
    fed = work.data()
    plain = PlainLoop(work, fed)
    rounds = work.rounds
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: seconds(plain.round),
        # What a run costs once (placing the data) is taken off: rounds are compared.
        "foedus": lambda: (
            (
                seconds(lambda: foedus_rounds(work, fed, rounds))
                - seconds(lambda: foedus_rounds(work, fed, 0))
            )
            / rounds
        ),
    }
    if work.limit:
        limit = Limit(work, fed)
        ways["limit"] = lambda: seconds(lambda: [limit.round() for _ in range(rounds)]) / rounds
    taken = in_turns(ways, repeats)
    hand = (
        (shown(taken["limit"]), f"{ratio(taken, 'foedus', 'limit'):.2f}")
        if work.limit
        else ("-", "-")
    )
    least = at_the_peaks(work)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    print(
        f"| {name.upper()}: {work.title} | {shown(taken['plain'])} | {shown(taken['foedus'])} | "
        f"{hand[0]} "
        f"| {ratio(taken, 'plain', 'foedus'):.1f}x | {hand[1]} | {least:.4f} "
        f"| {100 * least / statistics.median(taken['foedus']):.0f}% |",
        flush=True,
    )
