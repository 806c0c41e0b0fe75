"""FedFW against the gradients that it needs; and what an oracle call costs compared with a
projection, in time and bytes.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import foedus as fd
from benchmarks.fednewton import data
from benchmarks.timing import seconds
from foedus import wire

SIDES = (64, 128, 256, 512, 1024, 2048)
RANK = 5
SLOW = 1024  # from this side on, no more than three repeats


def gradients(kind: str, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """A matrix like a client's gradient, and the next one: 5% of its size has changed.

    "signal": noise, its largest singular value about 1, plus rank 5 with singular values 2, 2/2,
    ..., 2/5. "noise": noise alone, whose largest singular values are the closer to each other the
    larger it is: the hard case of the oracle.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    g = normal(side, side) / (2 * side**0.5)  # the largest singular value of this is about 1
    if kind == "signal":
        left, right = (torch.linalg.qr(normal(side, RANK)).Q for _ in range(2))
        g += (left * (2 / torch.arange(1, RANK + 1))) @ right.mT
    change = normal(side, side)
    return g, g + change * (0.05 * g.norm() / change.norm())


def lowrank(repeats: int) -> None:
    """`NuclearBall`: the oracle, cold and warm, against the projection, as the matrix grows; and
    the messages.
    """
    ball = fd.NuclearBall(1.0)
    print(
        "\nNuclearBall, square float32 matrices; 'warm' starts at the answer for a gradient 5% "
        f"away; signal: rank {RANK} + noise"
    )
    print(
        "\n| gradient | side | oracle, ms | warm, ms | projection, ms | projection / oracle | "
        "projection / warm |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in ("signal", "noise"):
        for side in SIDES:
            taken: dict[str, list[float]] = {"cold": [], "warm": [], "project": []}
            for repeat in range(min(repeats, 3) if side >= SLOW else repeats):
                last, g = gradients(kind, side, repeat)
                near = ball.lmo(last).right.squeeze(-1)
                if not repeat and side < SLOW:  # what a first call loads is not counted
                    ball.lmo(g), ball.project(g)
                taken["cold"].append(seconds(lambda g=g: ball.lmo(g)))
                taken["warm"].append(seconds(lambda g=g, near=near: ball.lmo(g, warm=near)))
                taken["project"].append(seconds(lambda g=g: ball.project(g)))
            cold, warm, project = (1e3 * statistics.median(t) for t in taken.values())
            print(
                f"| {kind} | {side} | {cold:.1f} | {warm:.1f} | {project:.1f} | "
                f"{project / cold:.1f}x | {project / warm:.1f}x |",
                flush=True,
            )

    print("\n| side | extreme point, bytes | dense, bytes | dense / point |")
    print("|---|---|---|---|")
    for side in SIDES:
        g = torch.ones(side, side)
        point, dense = wire.nbytes(ball.lmo(g)), wire.nbytes(g)
        print(f"| {side} | {point:,} | {dense:,} | {dense / point:.0f}x |")


def bare(x: Tensor, y: Tensor, rounds: int) -> None:
    """The gradients of softmax regression at all clients, (c, n, d) rows at a time, and nothing
    else.
    """
    clients, n, d = x.shape
    hot = F.one_hot(y, 10).float()
    weight, bias = torch.zeros(clients, 10, d), torch.zeros(clients, 1, 10)
    for _ in range(rounds):
        slope = torch.softmax(torch.baddbmm(bias, x, weight.mT), -1).sub_(hot).div_(n)
        torch.bmm(slope.mT, x)
        slope.sum(1)


def fedfw(repeats: int, rounds: int = 100) -> None:
    """FedFW with full gradients of softmax regression: 10 clients of 6,000 rows, 1,000 clients of
    60.
    """
    full, name = data()
    print(
        f"\nFedFW, softmax regression on {name}, {rounds} rounds, full gradients; 'bare' is these "
        "gradients and nothing else"
    )
    print(
        "\n| clients | rows of each | set | FedFW, s | bare, s | FedFW / bare | client steps a "
        "second | with history / bare |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for clients in (10, 1000):
        n = len(full.x_train) // clients
        fed = fd.split(full, "iid", clients=clients, seed=0)
        rows = np.stack([fed.client_rows(i) for i in range(clients)])
        x = torch.from_numpy(full.x_train)[rows].flatten(2)
        y = torch.from_numpy(full.y_train)[rows]
        for ball in (fd.L2Ball(10.0), fd.L1Ball(10.0)):
            quiet = fd.FedFW(fd.Linear(), ball, measure_every=0)
            loud = fd.FedFW(fd.Linear(), ball)
            fd.run(quiet, fed, 2, evaluate_every=0)
            taken: dict[str, list[float]] = {"ours": [], "bare": [], "loud": []}
            for _ in range(repeats):
                taken["ours"].append(
                    seconds(lambda a=quiet, f=fed: fd.run(a, f, rounds, evaluate_every=0))
                )
                taken["bare"].append(seconds(lambda x=x, y=y: bare(x, y, rounds)))
                taken["loud"].append(
                    seconds(lambda a=loud, f=fed: fd.run(a, f, rounds, evaluate_every=0))
                )
            ours, theirs, measured = (statistics.median(t) for t in taken.values())
            print(
                f"| {clients:,} | {n:,} | {type(ball).__name__} | {ours:.2f} | {theirs:.2f} | "
                f"{ours / theirs:.2f} "
                f"| {clients * rounds / ours:,.0f} | {measured / theirs:.2f} |",
                flush=True,
            )
