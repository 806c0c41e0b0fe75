"""foedus against Flower's simulator, pfl-research and FedJAX, in turns: `python -m benchmarks
peers`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import foedus as fd
from benchmarks.peers.job import Job, Weights, load
from benchmarks.peers.venvs import PEERS, Peer, UnavailableError, python_of
from benchmarks.workloads import LR, WORKLOADS, Workload

ROOT = Path(__file__).parent.parent.parent
OURS = Peer("foedus", (), {"": ("-m", "benchmarks.peers.ours")})
# Of accuracies on the 2,000 held-out rows: tools draw other cohorts and shuffle otherwise
# (pfl-research not at all).
TOLERANCE = 0.05
# Of weights after a round in which nothing is drawn: sums in another order, in single precision.
EXACT = 1e-4
LIMIT = 900  # seconds for one process, after which it is given up


def peers(name: str, repeats: int) -> None:
    """Seconds a round of every tool on one of W1 to W5, in turns: three repeats, which take
    minutes, unless more than the usual are asked.
    """
    compare(WORKLOADS[name], repeats if repeats > 5 else 3)


def compare(work: Workload, repeats: int) -> None:
    print(
        "| workload | tool | s a round: median (smallest to largest) | tool / foedus | accuracy | "
        "largest difference after one step |"
    )
    print("|---|---|---|---|---|---|")
    pythons: dict[str, Path] = {"foedus": Path(sys.executable)}
    for name, peer in PEERS.items():
        try:
            pythons[name] = python_of(name)
        except UnavailableError as reason:
            _left_out(work, peer.title, reason)
    with tempfile.TemporaryDirectory() as folder:
        wrong = _workload(work, Path(folder), pythons, repeats)
    if wrong:
        raise AssertionError("; ".join(wrong))


def _left_out(work: Workload, title: str, reason: Exception) -> None:
    print(
        f"| {work.name.upper()}: {work.title} | {title} | left out: "
        f"{str(reason).replace('|', '/')} | - | - | - |",
        flush=True,
    )


def _tool(name: str) -> Peer:
    return PEERS.get(name, OURS)


def _workload(work: Workload, folder: Path, pythons: dict[str, Path], repeats: int) -> list[str]:
    fed = work.data()
    held = fed.data.x_test, fed.data.y_test
    rows = fed.rows.reshape(work.clients, work.rows)
    np.save(folder / "x.npy", fed.data.x_train[rows])
    np.save(folder / "y.npy", fed.data.y_train[rows])
    np.savez(
        folder / "first.npz",
        *(v.numpy() for v in fd.run(work.algorithm, fed, 0, evaluate_every=0).state.w.values()),
    )
    del fed
    job = Job(
        work.name,
        work.net,
        work.clients,
        work.rows,
        work.cohort,
        work.batch,
        LR,
        work.rounds,
        folder=str(folder),
    )
    taken: dict[str, list[float]] = {}
    accuracy: dict[str, float] = {}
    apart: dict[str, float] = {}
    chosen: dict[str, str] = {}
    versions: dict[str, dict[str, str]] = {}
    expected: Weights = []
    for repeat in range(repeats):
        for name, python in pythons.items():
            tool = _tool(name)
            mine = dataclasses.replace(
                job, check=repeat == 0, passes=tool.passes if work.limit else 1
            )
            for variant in (
                [chosen[name]] if repeat and name in chosen else tool.variants if not repeat else []
            ):
                try:
                    found = run(python, tool, variant, mine)
                except UnavailableError as reason:
                    _left_out(work, f"{tool.title}, {variant}", reason)
                    continue
                median = statistics.median(found["seconds"])
                if repeat:
                    taken[name].append(median)
                    continue
                weights = load(job.path("checked.npz"))
                expected = expected or weights
                if name not in chosen or median < taken[name][0]:
                    chosen[name], taken[name], versions[name] = variant, [median], found["versions"]
                    apart[name] = max(
                        float(np.abs(a - b).max()) for a, b in zip(weights, expected, strict=True)
                    )
                    accuracy[name] = accuracy_of(work, load(job.path("learned.npz")), *held)
    for name, times in taken.items():
        t, tool = statistics.median(times), _tool(name)
        title = tool.title + (f", {chosen[name]}" if chosen[name] else "")
        title += f" ({', '.join(f'{p} {v}' for p, v in versions[name].items())})"
        print(
            f"| {work.name.upper()}: {work.title} | {title} | {t:.4f} ({min(times):.4f} to "
            f"{max(times):.4f}) "
            f"| {t / statistics.median(taken['foedus']):.1f} | {accuracy[name]:.3f} | "
            f"{apart[name]:.0e} |",
            flush=True,
        )
    found = (
        disagreement(work, _tool(name).title, accuracy[name] - accuracy["foedus"], apart[name])
        for name in taken
    )
    return [text for text in found if text]


def disagreement(work: Workload, title: str, accuracy: float, apart: float) -> str:
    """Why times of a tool are not to be compared with those of foedus, if that is so."""
    if abs(accuracy) <= TOLERANCE and apart <= EXACT:
        return ""
    return (
        f"{title} does not do the same as foedus on {work.name.upper()}: accuracy differs by "
        f"{accuracy:+.3f} (at most "
        f"{TOLERANCE}), weights after one step of all clients by {apart:.1e} (at most {EXACT})"
    )


def accuracy_of(work: Workload, weights: Weights, x: np.ndarray, y: np.ndarray) -> float:
    module = work.module()
    with torch.no_grad():
        for p, w in zip(module.parameters(), weights, strict=True):
            p.copy_(torch.from_numpy(w))
        return float((module(torch.from_numpy(x)).argmax(1).numpy() == y).mean())


def run(python: Path, tool: Peer, variant: str, job: Job) -> dict:
    """One process: what it printed last.

    `UnavailableError`, with the end of what it said, if it fails.
    """
    file = str(job.write("job.json"))
    command = [part.replace("{job}", file) for part in tool.variants[variant]]
    command += [] if file in command else [file]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (
        tool.environment or {}
    )
    if variant == "pmap":
        environment["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={torch.get_num_threads()}"
        )
    if tool is OURS:
        environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    # A session of its own, so that what a tool starts ends with it.
    process = subprocess.Popen(
        [str(python), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise UnavailableError(f"not finished after {LIMIT} s") from error
    found = [line for line in out.splitlines() if line.startswith('{"seconds"')]
    if process.returncode or not found:
        raise UnavailableError((err.strip().splitlines() or ["it ended without a result"])[-1])
    return json.loads(found[-1])
