"""What compiled loops gain: the same rounds with them and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import foedus as fd
from benchmarks.timing import in_turns, ratio, seconds, shown
from benchmarks.workloads import CROWD, WORKLOADS, foedus_rounds
from foedus import kernels
from foedus.data.catalog import locate


@contextmanager
def _switched(on: bool) -> Iterator[None]:
    before, kernels.ready = kernels.ready, on
    try:
        yield
    finally:
        kernels.ready = before


def compiled(repeats: int) -> None:
    """A row for each of a few jobs: seconds a round."""
    if not kernels.ready:
        print("foedus was installed without a compiler: there is nothing to compare")
        return
    print(
        "| rounds of | compiled, s a round | in Python, s a round | in Python / compiled "
        "|\n|---|---|---|---|"
    )
    for work in (WORKLOADS["w1"], WORKLOADS["w3"], CROWD):
        fed = work.data()
        _row(
            f"FedAvg: {work.title[0].lower()}{work.title[1:]}",
            lambda n, w=work, f=fed: foedus_rounds(w, f, n),
            work.rounds,
            repeats,
        )
    name = "letter" if locate("letter") is not None else "digits"
    fed = fd.split(fd.load(name), "homogeneity", clients=10, s=0.3)
    _row(
        f"FFGB: trees on {name}, 10 clients",
        lambda n: fd.run(fd.FFGB(), fed, n, evaluate_every=0),
        5,
        repeats,
    )


def _row(title: str, run: Callable[[int], object], rounds: int, repeats: int) -> None:
    def once(on: bool) -> float:
        with _switched(on):
            return (seconds(lambda: run(rounds)) - seconds(lambda: run(0))) / rounds

    taken = in_turns({"compiled": lambda: once(True), "Python": lambda: once(False)}, repeats)
    print(
        f"| {title} | {shown(taken['compiled'])} | {shown(taken['Python'])} | "
        f"{ratio(taken, 'Python', 'compiled'):.1f}x |",
        flush=True,
    )
