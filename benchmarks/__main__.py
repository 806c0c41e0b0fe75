"""Speed, as ratios measured in one run: `python -m benchmarks [ITEM ...] [--repeats 5] [--docs]`.

Without items, those of docs/results/performance.md:
machine w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 crowd compiled
overhead memory scaling tables start profile; but not those that install other tools, peers-w1
peers-w2 peers-w3 peers-w4 peers-w5, or peers for all five. Results are kept in benchmarks/results;
--docs writes the page from them. Further studies, by name: batching layers fednewton fedfw
lowrank fedboost fedres ffgb trees ray flower secure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from benchmarks import store
from benchmarks.batching import batching
from benchmarks.compiled import compiled
from benchmarks.crowd import crowd, memory, overhead, start
from benchmarks.families import FAMILIES, family
from benchmarks.fedboost import fedboost
from benchmarks.fedfw import fedfw, lowrank
from benchmarks.fednewton import fednewton
from benchmarks.fedres import fedres
from benchmarks.ffgb import ffgb
from benchmarks.flower import flower
from benchmarks.layers import layers
from benchmarks.limits import workload
from benchmarks.machine import machine
from benchmarks.peers.compare import peers
from benchmarks.profiles import profiles
from benchmarks.ray import ray
from benchmarks.scaling import scaling
from benchmarks.secure import secure
from benchmarks.tables import tables
from benchmarks.trees import trees
from benchmarks.workloads import WORKLOADS

Study = Callable[[int], None]

PAGE: dict[str, dict[str, Study]] = {
    "Hardware peaks": {"machine": machine},
    "Rounds of FedAvg": {name: partial(workload, name) for name in WORKLOADS},
    "Comparison with other frameworks": {
        f"peers-{name}": partial(peers, name) for name in WORKLOADS
    },
    "The five families": {name: partial(family, name) for name in FAMILIES},
    "100,000 clients": {"crowd": crowd},
    "Compiled loops": {"compiled": compiled},
    "Engine overhead": {"overhead": overhead},
    "Memory": {"memory": memory},
    "Scaling": {"scaling": scaling},
    "Loading tables": {"tables": tables},
    "Import and start": {"start": start},
    "Profile": {"profile": profiles},
}
"""The sections of docs/results/performance.md, and the items of each."""

STUDIES: dict[str, Study] = {
    "batching": batching,
    "layers": layers,
    "fednewton": fednewton,
    "fedfw": fedfw,
    "lowrank": lowrank,
    "fedboost": fedboost,
    "fedres": fedres,
    "ffgb": ffgb,
    "trees": trees,
    "ray": ray,
    "flower": flower,
    "secure": secure,
}
"""Items of other pages."""


def main() -> None:
    on_the_page = {name: study for items in PAGE.values() for name, study in items.items()}
    items = on_the_page | STUDIES
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Speed of foedus, as ratios in one run."
    )
    parser.add_argument(
        "items",
        nargs="*",
        help=f"some of: {' '.join(items)} (those of the page); peers: all of them",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--docs",
        action="store_true",
        help="write docs/results/performance.md from what is stored; alone, measure nothing",
    )
    options = parser.parse_args()
    others = list(PAGE["Comparison with other frameworks"])
    asked = [name for item in options.items for name in (others if item == "peers" else [item])]
    unknown = set(asked) - set(items)
    if unknown:
        parser.error(f"unknown item {', '.join(sorted(unknown))}; choose from {', '.join(items)}")
    chosen = asked or ([] if options.docs else [name for name in on_the_page if name not in others])
    for name in chosen:
        print(f"\n{name}, {store.where()['machine']}\n", flush=True)
        if name in on_the_page:
            with store.kept(name, options.repeats):
                items[name](options.repeats)
        else:
            items[name](options.repeats)
    if options.docs:
        print(store.write_docs(PAGE))


if __name__ == "__main__":
    main()
