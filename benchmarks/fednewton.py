"""FedNewton against the linear algebra that it needs, and how its cost grows."""

from __future__ import annotations

import statistics
import time
import warnings

import numpy as np
import torch

import foedus as fd
from foedus.data.catalog import locate

ROWS, INPUTS, CLASSES, REG = 60_000, 784, 10, 1e-4


def data() -> tuple[fd.Data, str]:
    """MNIST where it is at hand; else random rows of its size, which cost the same."""
    if locate("mnist") is not None:
        return fd.load("mnist"), "MNIST"
    x = np.random.default_rng(0).random((ROWS, INPUTS), dtype=np.float32)
    return fd.Data.from_arrays(
        x, np.arange(ROWS) % CLASSES, classes=CLASSES
    ), "random rows of MNIST's size"


def whole(fed: fd.Federation, size: int, rounds: int = 4, dtype: str = "float64") -> float:
    """Seconds of a run from the raw rows to the last round, evaluation off."""
    algorithm = fd.FedNewton(fd.RandomFourier(size, bandwidth=5.0), reg=REG, dtype=dtype)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fd.DivergenceWarning)
        fd.run(algorithm, fed, rounds, evaluate_every=0)
    return time.perf_counter() - began


def bare(fed: fd.Federation, size: int, dtype: torch.dtype = torch.float64) -> float:
    """Seconds of the products Phi_j^T Phi_j of all clients and of their Cholesky factors, features
    given.
    """
    taken = 0.0
    for n in fed.sizes.tolist():
        phi = torch.rand(n, size, dtype=dtype)
        began = time.perf_counter()
        gram = phi.mT @ phi
        gram.diagonal().add_(n * REG)
        torch.linalg.cholesky(gram)
        taken += time.perf_counter() - began
    return taken


def fednewton(repeats: int) -> None:
    """The table of ratios, then growth in M, in rows and in clients."""
    full, name = data()
    print(
        f"\nFedNewton on {name}, 10 clients, M = 2000, 4 rounds; 'bare' is the products Phi_j^T "
        "Phi_j and their factors"
    )
    print("\n| dtype | split | whole run, s | bare, s | whole / bare |")
    print("|---|---|---|---|---|")
    for dtype in ("float64", "float32"):
        for scheme, options in (("iid", {}), ("dirichlet", {"alpha": 0.5})):
            fed = fd.split(full, scheme, clients=10, seed=0, **options)
            whole(fed, 2000, rounds=0, dtype=dtype)
            pairs = [
                (whole(fed, 2000, dtype=dtype), bare(fed, 2000, getattr(torch, dtype)))
                for _ in range(repeats)
            ]
            ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(
                f"| {dtype} | {scheme} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |",
                flush=True,
            )

    print("\n| grows | M | rows | clients | whole run, s | bare, s |")
    print("|---|---|---|---|---|---|")
    cases = [("M", m, ROWS // 4, 10) for m in (250, 500, 1000, 2000)]
    cases += [("rows", 1000, n, 10) for n in (ROWS // 8, ROWS // 4, ROWS // 2)]
    cases += [("clients", 500, ROWS // 4, c) for c in (10, 40, 160, 640)]
    for what, size, rows, clients in cases:
        part = fd.Data.from_arrays(full.x_train[:rows], full.y_train[:rows], classes=CLASSES)
        fed = fd.split(part, "iid", clients=clients)
        whole(fed, size)
        ours = statistics.median(whole(fed, size) for _ in range(3))
        theirs = f"{bare(fed, size):.2f}" if rows // clients >= size else "dual"
        print(f"| {what} | {size} | {rows:,} | {clients} | {ours:.2f} | {theirs} |", flush=True)
