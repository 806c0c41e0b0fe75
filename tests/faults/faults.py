"""Faults on purpose: every run must end with the result of an undisturbed run, or with a clear
error and a usable checkpoint.

    python -m tests.faults.faults                     everything: at least 100 kills, about 20
                                                      minutes
    python -m tests.faults.faults --quick             some of each, without federations: seconds
    python -m tests.faults.faults --only kill disk    some kinds

Moments, victims and damages are drawn from `--seed`; what else the machine does meanwhile is not,
so two campaigns hit the same run at different points. The table counts what became of the runs.
Anything but the two allowed ends is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.faults import alone
from tests.faults.subject import ALGORITHMS, ERROR, HEAD, RESUMED, SAME, Tally

KINDS = {
    "kill": "kill -9 of the process of a run",
    "damage": "a damaged checkpoint is read",
    "resume": "a damaged checkpoint, then resume",
    "disk": "full disk",
    "clock": "wall clock jumps, one process",
    "ray": "kill -9 of a Ray actor",
    "client": "kill -9 of a process that works on an answer",
    "node": "kill -9 of a SuperNode",
    "slow": "a site hangs",
    "flap": "sites disconnect and reconnect",
    "clocks": "wall clock jumps, a federation",
    "server": "kill -9 of a deployed server",
    "site": "kill -9 at deployed sites",
}
FULL = {
    "kill": 70, "damage": 2000, "resume": 20, "disk": 8, "clock": 2, "ray": 16, "client": 12,
    "node": 6, "slow": 3, "flap": 1, "clocks": 1, "server": 4, "site": 8,
}  # fmt: skip
QUICK = {"kill": 4, "damage": 200, "resume": 5, "disk": 2}


def campaign(
    counts: dict[str, int], seed: int, folder: Path, say: Callable[[str], None] = print
) -> list[Tally]:
    """Inject each kind of fault as often as `counts` says; the table is printed as it grows."""
    torch.set_num_threads(1)
    tallies: list[Tally] = []
    say(HEAD)

    def do(kind: str, work: Callable[..., None], *about: Any) -> None:
        if not counts.get(kind):
            return
        tally, began = Tally(KINDS[kind]), time.monotonic()
        try:
            work(tally, *about, Random(f"{seed} {kind}"))
        finally:  # Ctrl-C shows what there is
            tally.seconds = time.monotonic() - began
            tallies.append(tally)
            say(tally.row())

    def many(kind: str, work: Callable[..., None], what: Any) -> None:
        do(kind, lambda tally, rng: work(tally, what, counts[kind], rng))

    # before anything here has threads: these fork
    if {"kill", "damage", "resume", "disk", "clock"} & set(counts):
        subjects = [alone.Subject(name, folder) for name in ALGORITHMS]
        many("kill", alone.killed, subjects)
        many("damage", alone.looked_at, subjects[0])
        many("resume", alone.corrupted, subjects)
        many("disk", alone.full_disk, subjects)
        if alone.COMPILER:
            many("clock", alone.clocks, subjects)
    if {"ray", "client", "node", "slow", "flap", "clocks", "server", "site"} & set(counts):
        from tests.faults import sites

        many("ray", sites.ray, folder)
        if {"client", "node", "slow", "flap"} & set(counts):
            federation = sites.Federation(folder)
            try:
                many("client", sites.client_apps, federation)
                many("node", sites.super_nodes, federation)
                many("slow", sites.slow, federation)
                many("flap", sites.flapping, federation)
            finally:
                federation.close()
        if alone.COMPILER:
            many("clocks", sites.clocks, folder)
        many("server", sites.server_apps, folder)
        many("site", sites.residents, folder)
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="some of each, without federations")
    parser.add_argument(
        "--only", nargs="+", choices=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}"
    )
    parser.add_argument("--kills", type=int, help="kills of the process of a run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = dict(QUICK if options.quick else FULL)
    if options.only:
        counts = {kind: counts.get(kind, FULL[kind]) for kind in options.only}
    if options.kills and "kill" in counts:
        counts["kill"] = options.kills
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foedus-faults-") as folder:
        tallies = campaign(counts, options.seed, Path(folder), lambda text: print(text, flush=True))
    kills, wrong = sum(t.kills for t in tallies), [(t.fault, w) for t in tallies for w in t.wrong]
    ends = {kind: sum(t.outcomes[kind] for t in tallies) for kind in (SAME, RESUMED, ERROR)}
    print(f"\n{kills} kills in all; {time.monotonic() - began:.0f} s")
    print(
        f"{sum(t.runs for t in tallies)} runs: {', '.join(f'{k} {n}' for k, n in ends.items())}, "
        f"other outcomes {len(wrong)}"
    )
    for note, times in (
        sum((t.notes for t in tallies), start=type(tallies[0].notes)()).items() if tallies else ()
    ):
        print(f"{note}: {times} times")
    if {"clock", "clocks"} & set(counts) and not alone.COMPILER:
        print("clocks were left out: there is no C compiler, which a clock that jumps needs")
    for fault, text in wrong:
        print(f"{fault}: {text}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
