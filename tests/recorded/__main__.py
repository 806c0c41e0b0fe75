"""python -m tests.recorded [--write] [scenario globs]"""

from __future__ import annotations

import argparse
import sys
import time
from fnmatch import fnmatchcase

import torch

from tests.recorded import scenarios
from tests.recorded.compare import Difference, compare, load, load_changes, merge, save


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what is new or changed")
    parser.add_argument("globs", nargs="*", default=["*"], help="of scenario or scenario/algorithm")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    changes, failed = load_changes(), []
    print("scenario    runs errors  same fewer differ   CPU s")
    for scenario in scenarios.SCENARIOS:
        names = [a for s, a in scenarios.runs() if s == scenario and wanted(given.globs, s, a)]
        if names:
            failed += one_scenario(scenario, names, given.write, changes)
    return 1 if failed else 0


def wanted(globs: list[str], scenario: str, name: str) -> bool:
    return any(fnmatchcase(t, g) for g in globs for t in (scenario, f"{scenario}/{name}"))


def one_scenario(scenario: str, names: list[str], write: bool, changes: list) -> list[Difference]:
    """Run, compare or write, and print; the differences that count."""
    recorded, found, errors, same = load(scenario), [], 0, 0
    began = time.process_time()
    with scenarios.engine_of(scenario) as engine:
        for name in names:
            now = scenarios.record(scenario, name, engine)
            errors += "error" in now
            if write:
                recorded[name], new = merge(scenario, name, recorded.get(name), now, changes)
            elif name in recorded:
                new = compare(scenario, name, recorded[name], now)
            else:
                new = [Difference(scenario, name, "*", None, None, "a run that is not recorded")]
            same += not new
            found += new
    if write:  # in the order of the runs, without those that there are no more
        every = [a for s, a in scenarios.runs() if s == scenario]
        save(scenario, {a: recorded[a] for a in every if a in recorded})
    differ = [d for d in found if d.kind == "differs"]
    fewer = len({d.algorithm for d in found if d.kind == "fewer"})
    differing = len({d.algorithm for d in differ})
    seconds = time.process_time() - began
    counts = f"{len(names):5} {errors:6} {same:5} {fewer:5} {differing:6} {seconds:7.1f}"
    print(f"{scenario:10} {counts}", flush=True)
    for d in found:
        label = {"differs": "DIFFERS", "fewer": "fewer bytes", "wording": "wording"}[d.kind]
        kept = " (recorded value kept: no change of changes.toml covers it)" if write else ""
        saved = f" ({d.now / d.recorded - 1:+.1%})" if d.kind == "fewer" else ""
        print(f"  {label}: {d}{saved}{kept}", flush=True)
    return differ


if __name__ == "__main__":
    sys.exit(main())
