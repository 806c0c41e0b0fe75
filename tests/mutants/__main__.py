"""Run the tests against hand-made mutants of foedus.

    python -m tests.mutants                       all of them
    python -m tests.mutants 'feddyn-*' wire       ids, packages or files (`foedus/core/*`), with
                                                  wildcards
    python -m tests.mutants --check               only: does every `old` occur exactly once, and
                                                  do all tests exist?

The working tree is not touched: each mutant is a forked child process in which an import hook
compiles the mutated text of one module. Every test that is needed first runs once without a mutant,
and must pass. Exit code 1 if less than 95 % are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.listing import ROOT, Mutant, arguments, check, load

LIMIT = 120.0
"""Seconds for the tests of one mutant; more counts as killed.

A baseline of a whole test file has ten times as many.
"""

LEAST = 95.0
"""Per cent of the mutants that must be killed."""

PRELOADED = (
    "torch", "torch.func", "torch.testing", "numpy", "scipy.optimize", "scipy.stats", "pandas",
    "pytest", "hypothesis", "hypothesis.extra.numpy", "sklearn.ensemble", "sklearn.linear_model",
    "sklearn.datasets", "safetensors.torch", "joblib", "rich.console", "typer.testing",
    "matplotlib.pyplot", "ot", "skops.io", "cryptography.hazmat.primitives.asymmetric.x25519",
    "dp_accounting",
)  # fmt: skip
"""What is imported once, before the children are forked; not foedus, and nothing that starts
threads.
"""


class Hook(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a mutated text, and everything else as always."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(ROOT / mutant.file))
        self.text, self.loaded = mutant.source(), False

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        folders = [str(Path(self.path).parent)] if Path(self.path).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, self.path, loader=self, submodule_search_locations=folders
        )

    def get_code(self, fullname: str) -> Any:
        self.loaded = True
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Watch:
    """A pytest plugin that remembers which tests passed and which failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


@dataclass
class Job:
    """Tests to run in a child process, with a mutant or without."""

    name: str
    selection: tuple[str, ...]
    mutant: Mutant | None = None
    limit: float = LIMIT


@dataclass
class Outcome:
    """What became of a job: pytest's exit code, or what happened in its place."""

    code: int | str
    seconds: float
    passed: list[str]
    failed: list[str]
    loaded: bool
    output: str

    @property
    def status(self) -> str:
        if self.code in (1, "timeout"):
            return "killed"
        return "survived" if self.code == 0 else "error"


def preload() -> None:
    """Import what all children need, in one thread."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ.setdefault("MPLBACKEND", "Agg")
    # no test here needs a plugin, and finding them takes a second
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import hypothesis
    import torch

    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True, deadline=None)
    hypothesis.settings.load_profile("mutants")
    gc.collect()
    gc.freeze()  # children need not look through what was imported before them


def child(job: Job, folder: Path) -> None:
    """Run the tests of a job, and write down what happened. Never returns."""
    code, report, hook = 70, {}, None
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        if job.mutant is not None:
            hook = Hook(job.mutant)
            sys.meta_path.insert(0, hook)
        import pytest

        watch = Watch()
        options = [
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            f"--basetemp={folder / 'tmp'}",
        ]
        options += ["-x"] if job.mutant else []
        code = int(pytest.main([*options, *job.selection], plugins=[watch]))
        report = {
            "passed": watch.passed,
            "failed": watch.failed,
            "loaded": hook is None or hook.loaded,
        }
    finally:
        report["code"] = code
        (folder / "report").write_text(json.dumps(report))
        sys.stdout.flush()
        os._exit(0)


def outcomes(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[Job, Outcome]]:
    """Run jobs in forked children, at most `at_once` at a time."""
    waiting, running = list(reversed(jobs)), {}
    with tempfile.TemporaryDirectory(prefix="foedus-mutants-") as base:
        try:
            # Compiled once for all children, in no folder of the sources.
            sys.pycache_prefix, sys.dont_write_bytecode = base, False
            while waiting or running:
                while waiting and len(running) < at_once:
                    job, folder = waiting.pop(), Path(tempfile.mkdtemp(dir=base))
                    sys.stdout.flush()
                    if (pid := os.fork()) == 0:
                        child(job, folder)
                    running[pid] = (job, folder, time.monotonic())
                for pid, (job, folder, began) in list(running.items()):
                    seconds = time.monotonic() - began
                    ended, late = os.waitpid(pid, os.WNOHANG)[0] == pid, seconds > job.limit
                    if not ended and not late:
                        continue
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        # whatever is left of the child's own process group
                        os.killpg(pid, signal.SIGKILL)
                    if not ended:
                        os.waitpid(pid, 0)
                    del running[pid]
                    yield job, _outcome(folder, seconds, ended)
                time.sleep(0.02)
        finally:
            for pid in running:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _outcome(folder: Path, seconds: float, ended: bool) -> Outcome:
    output = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
    if not ended:
        return Outcome("timeout", seconds, [], [], True, output)
    if not (folder / "report").exists():
        return Outcome("crashed", seconds, [], [], True, output)
    report = json.loads((folder / "report").read_text())
    lists = (report.get("passed", []), report.get("failed", []), report.get("loaded", False))
    return Outcome(report["code"], seconds, *lists, output)


def baseline(mutants: Sequence[Mutant], at_once: int) -> tuple[dict[str, str], float]:
    """Run every test that is needed without a mutant: what is wrong with tests, by entry; and the
    seconds it took.
    """
    began = time.monotonic()
    entries = sorted({test for mutant in mutants for test in mutant.tests})
    groups: dict[str, list[str]] = {}
    for test in entries:
        groups.setdefault(test if " -k " in test else test.partition("::")[0], []).append(test)
    jobs = [
        Job(name, tuple(word for test in tests for word in arguments(test)), limit=10 * LIMIT)
        for name, tests in groups.items()
    ]
    bad = {}
    for job, outcome in outcomes(jobs, at_once):
        for test in groups[job.name]:
            file = test.partition(" -k ")[0]
            own = lambda names, file=file: [  # noqa: E731
                n for n in names if n == file or n.startswith((f"{file}::", f"{file}["))
            ]
            if own(outcome.failed):
                bad[test] = "fails without a mutant"
            elif not own(outcome.passed):
                bad[test] = (
                    f"does not run (pytest ended with {outcome.code})\n{outcome.output[-2000:]}"
                )
    return bad, time.monotonic() - began


def table(results: list[tuple[Mutant, str]]) -> str:
    """Counts by package, and the percentage of the killed among those that are not equivalent."""
    kinds = ("killed", "survived", "equivalent", "error")
    lines = [f"{'package':<12}" + "".join(f"{kind:>12}" for kind in kinds)]
    for package in [*sorted({m.package for m, _ in results}), "all"]:
        own = [status for m, status in results if package in (m.package, "all")]
        lines.append(f"{package:<12}" + "".join(f"{own.count(kind):>12}" for kind in kinds))
    return "\n".join(lines)


def percentage(results: list[tuple[Mutant, str]]) -> float:
    """Of the mutants that are not equivalent, how many per cent were killed."""
    counted = [status for _, status in results if status != "equivalent"]
    return 100.0 * counted.count("killed") / len(counted) if counted else 100.0


def main(argv: Sequence[str] | None = None, echo: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("patterns", nargs="*", help="ids, packages or files; all unless given")
    parser.add_argument("--jobs", type=int, default=2, help="child processes at once")
    parser.add_argument("--list", action="store_true", help="list the mutants and their tests")
    parser.add_argument(
        "--check", action="store_true", help="only check the list against the sources and the tests"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write what happened to each mutant to a file"
    )
    given = parser.parse_args(argv)
    try:
        mutants = load(given.patterns)
    except ValueError as error:
        echo(f"error: {error}")
        return 2
    if given.list:
        for mutant in mutants:
            note = f" (equivalent: {mutant.equivalent})" if mutant.equivalent else ""
            echo(f"{mutant.id}  {mutant.file}{note}\n    {' '.join(mutant.tests)}")
        return 0
    if problems := check(mutants):
        echo("\n".join(f"error: {problem}" for problem in problems))
        return 2
    if given.check:
        echo(f"{len(mutants)} mutants: every place is found once, every test exists")
        return 0

    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are ended, too
    preload()
    active = [mutant for mutant in mutants if mutant.equivalent is None]
    bad, seconds = baseline(active, given.jobs)
    if bad:
        echo("\n".join(f"error: {test} {why}" for test, why in sorted(bad.items())))
        echo("error: tests that fail without a mutant say nothing about one")
        return 2
    echo(f"tests without a mutant: all pass ({seconds:.0f} s)")
    results: list[tuple[Mutant, str]] = [
        (mutant, "equivalent") for mutant in mutants if mutant.equivalent
    ]
    details: dict[str, Any] = {}
    jobs = [Job(mutant.id, mutant.arguments, mutant) for mutant in active]
    for job, outcome in outcomes(jobs, given.jobs):
        status = outcome.status
        results.append((job.mutant, status))
        note = f"  {outcome.failed[0]}" if outcome.failed else ""
        if outcome.code == "timeout":
            note = f"  (no end after {LIMIT:.0f} s)"
        elif status == "error":
            note = f"  (pytest ended with {outcome.code})\n{outcome.output[-3000:]}"
        elif status == "survived" and not outcome.loaded:
            note = "  (its module was never imported)"
        echo(f"{status:<9} {job.name}  {outcome.seconds:.1f} s{note}")
        details[job.name] = {"status": status, "seconds": outcome.seconds, "failed": outcome.failed}
    if given.json:
        Path(given.json).write_text(json.dumps(details, indent=1))
    killed = percentage(results)
    echo(
        f"\n{table(results)}\n\nkilled: {killed:.1f} % of those that are not equivalent, in "
        f"{time.monotonic() - began:.0f} s"
    )
    if left := [mutant for mutant, status in results if status in ("survived", "error")]:
        echo(
            "not killed:\n"
            + "\n".join(f"  {m.id}  {m.file}: {m.old.strip()!r} -> {m.new.strip()!r}" for m in left)
        )
    return int(killed < LEAST)


if __name__ == "__main__":
    sys.exit(main())
