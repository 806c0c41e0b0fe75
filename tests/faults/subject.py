"""The runs that are disturbed, what "the same result" means, and the table of what became of
them.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import foedus as fd
from foedus.base import tree

MEASURED = ("seconds", "exchange_seconds", "slowest_seconds")
ALGORITHMS = {
    "Scaffold": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16),
    "FedFW": fd.FedFW(fd.Linear(), fd.L2Ball(5.0)),
    "FedAvg": fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16, server_momentum=0.5),
}


def federation(clients: int = 6) -> fd.Federation:
    """Some hundred rows of bundled data, in unequal parts."""
    d = fd.load("digits")
    small = fd.Data.from_arrays(
        d.x_train[:300], d.y_train[:300], d.x_test[:100], d.y_test[:100], classes=10
    )
    return fd.split(small, "dirichlet", clients=clients, alpha=0.5, seed=0)


def difference(a: fd.Run, b: fd.Run) -> str | None:
    """Where two runs differ: in the history but for measured times, or in the state; to the last
    bit.
    """
    rows = [
        [{k: v for k, v in row.items() if k not in MEASURED} for row in r.records.rows]
        for r in (a, b)
    ]
    if len(rows[0]) != len(rows[1]):
        return f"{len(rows[0])} rows of history, not {len(rows[1])}"
    for n, (x, y) in enumerate(zip(*rows, strict=True)):
        for k in x | y:
            u, v = x.get(k), y.get(k)
            if u != v and not (
                isinstance(u, float) and isinstance(v, float) and math.isnan(u) and math.isnan(v)
            ):
                return f"row {n}: {k} is {u!r}, not {v!r}"
    leaves = [[t for t in tree.leaves(r.state) if isinstance(t, torch.Tensor)] for r in (a, b)]
    for x, y in zip(*leaves, strict=True):
        if not torch.equal(x, y):
            return f"a tensor of the state differs by {(x - y).abs().max():g}"
    return None


# -- processes -------------------------------------------------------------------------------------

DONE, REFUSED, BROKEN = 0, 3, 1


def forked(work: Callable[[], None], said: Path) -> int:
    """Do something in a process of its own, which ends with DONE, REFUSED (a `FoedusError`, written
    to `said`) or BROKEN.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = BROKEN
    try:
        warnings.simplefilter("ignore")
        work()
        code = DONE
    except fd.FoedusError as error:
        said.write_text(
            "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        )
        code = REFUSED
    except BaseException:
        said.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def wait(pid: int, seconds: float | None = None) -> int | None:
    """The exit code of a process (minus the signal that ended it, if one did), or None if it has
    not ended within `seconds`.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, 0 if end is None else os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def kill(pid: int) -> bool:
    """kill -9 of a child of ours; whether it was still alive."""
    if wait(pid, 0) is not None:
        return False
    os.kill(pid, signal.SIGKILL)
    return wait(pid) == -signal.SIGKILL


def children(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    found = []
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            mine = [int(c) for c in entry.read_text().split()]
        except OSError:
            continue
        for child in mine:
            found += [child, *children(child)]
    return found


# -- the table -------------------------------------------------------------------------------------

SAME, RESUMED, ERROR = "same result", "error, then the same result", "clear error"


@dataclass
class Tally:
    """What became of the runs with one kind of fault."""

    fault: str
    injected: int = 0
    kills: int = 0
    outcomes: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    notes: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    shown: float = field(default_factory=time.monotonic)

    def end(self, kind: str, wrong: str | None = None) -> None:
        """A run has come to its end; every ten seconds one is told of."""
        if wrong is None:
            self.outcomes[kind] += 1
        else:
            self.wrong.append(wrong)
        if wrong is not None or time.monotonic() - self.shown > 10:
            self.shown = time.monotonic()
            print(
                f"  {self.fault}: {max(self.injected, self.kills)} so far, {self.runs} runs "
                f"{wrong or ''}".rstrip(),
                file=sys.stderr,
                flush=True,
            )

    @property
    def runs(self) -> int:
        return sum(self.outcomes.values()) + len(self.wrong)

    def row(self) -> str:
        cells = [
            self.fault,
            self.injected,
            self.runs,
            *(self.outcomes[k] for k in (SAME, RESUMED, ERROR)),
            len(self.wrong),
        ]
        return f"| {' | '.join(map(str, cells))} | {self.seconds:.0f} |"


HEAD = (
    f"| fault | injected | runs | {SAME} | {RESUMED} | {ERROR} | other outcome | seconds "
    "|\n|---|---|---|---|---|---|---|---|"
)
