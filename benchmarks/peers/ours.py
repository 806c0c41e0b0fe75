"""foedus, as the other tools are measured: `python -m benchmarks.peers.ours JOB`."""

from __future__ import annotations

import functools

import numpy as np

import foedus as fd
from benchmarks.peers.job import Job, Weights, load, measure
from benchmarks.workloads import WORKLOADS


def federation(x: np.ndarray, y: np.ndarray) -> fd.Federation:
    """Clients with rows of their own, (clients, rows, ...)."""
    clients, rows = y.shape
    data = fd.Data.from_arrays(x.reshape(-1, *x.shape[2:]), y.reshape(-1), classes=10)
    offsets = np.arange(clients + 1) * rows
    none = np.zeros(0, np.int64)
    return fd.Federation(
        data,
        np.arange(clients * rows),
        offsets,
        none,
        np.zeros(clients + 1, np.int64),
        np.arange(clients),
    )


def weights(run: fd.Run) -> Weights:
    return [v.numpy() for v in run.state.w.values()]


def main() -> None:
    job = Job.read()
    x, y = job.data()
    work = WORKLOADS[job.workload]
    every = functools.partial(fd.run, work.algorithm, evaluate_every=0)
    fed = federation(x, y)
    first = [v.numpy() for v in every(fed, 0).state.w.values()]
    assert all(
        np.array_equal(a, b) for a, b in zip(first, load(job.path("first.npz")), strict=True)
    )

    measure(
        job,
        rounds=lambda n: weights(every(fed, n, participation=job.cohort / job.clients)),
        one_step=lambda: weights(every(federation(x[:, : job.batch], y[:, : job.batch]), 1)),
        packages=("torch", "numpy"),
    )


if __name__ == "__main__":
    main()
