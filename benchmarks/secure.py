"""What secure aggregation costs against the plain mean: bytes, and seconds (of computing) of a
client and of the server.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from foedus import wire
from foedus.aggregation.secure.simulated import Outcome, SecureAggregation, aggregate
from foedus.core.reduce import Accumulator

CLIENTS = (10, 100, 1_000)
NUMBERS = (10_000, 100_000, 1_000_000, 10_000_000)
ROWS = 600
"""Of the largest client; the others have a few less, so that weights have no common divisor and
sums need 64 bits.
"""
_MOST, _CHEAP = 1.2e11, 4e9
"""Bytes of masks that are made at most, and up to which a case is repeated."""


def weights(clients: int) -> list[int]:
    return [ROWS - i % 7 for i in range(clients)]


def plain(reply: torch.Tensor, clients: int) -> float:
    """Seconds of the server for the weighted mean, replies added one by one as they come."""
    share = torch.tensor(weights(clients), dtype=torch.float64)
    share /= share.sum()
    began = time.process_time()
    total = Accumulator()
    for i in range(clients):
        total.add(reply[None], share[i : i + 1], 0, torch.tensor([i]))
    total.result()
    return time.process_time() - began


def row(clients: int, numbers: int, config: SecureAggregation, dropped: int, repeats: int) -> str:
    """One case, or why it is left out."""
    width = config.fixed_point.width(sum(weights(clients)), clients) // 8
    neighbors = config.degree(clients)
    masks = clients * (neighbors + 1) * numbers * width
    head = f"| {clients:,} | {numbers:,} | {neighbors} | {dropped} | "
    if masks > _MOST:
        return (
            head
            + f"left out: {masks / 1e9:,.0f} GB of masks to be made by {clients:,} clients in one "
            "process |"
        )
    reply = torch.linspace(-1, 1, numbers)
    taken: list[tuple[Outcome, float]] = []
    for _ in range(repeats if masks <= _CHEAP else 1):
        out = aggregate(
            [reply] * clients, weights(clients), config, dropouts={"mask": range(dropped)}
        )
        taken.append((out, plain(reply, clients)))
    error = float((out.total.mean() - reply).abs().max())
    assert error <= config.fixed_point.step, f"the mean is {error} off"
    client = statistics.median(o.seconds["clients"] for o, _ in taken) / clients
    server = statistics.median(o.seconds["server"] for o, _ in taken)
    before, bare = wire.nbytes(reply), statistics.median(p for _, p in taken)
    up, down = out.bytes_up / clients, out.bytes_down / clients
    sent = f"{before:,} | {up:,.0f} | {up / before:.2f} | {down:,.0f}"
    return head + f"{sent} | {client:.3f} | {server:.3f} | {bare:.4f} |"


def secure(
    repeats: int, clients: tuple[int, ...] = CLIENTS, numbers: tuple[int, ...] = NUMBERS
) -> None:
    """The table: 24 bits in 64, threshold 2/3; without dropouts, and with a twentieth of the
    clients gone after sharing keys.
    """
    config = SecureAggregation(range=16.0, bits=24)
    print(
        "\nSecure aggregation, by client; 'plain' is a message of float32 and the server's "
        "weighted mean of them"
    )
    print(
        "\n| clients | numbers | neighbors | dropped out | plain up, B | up, B | up / plain | "
        "more down, B | a client, s | server, s | plain server, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for n in clients:
        for size in numbers:
            for dropped in (0, -(-n // 20)):
                print(row(n, size, config, dropped, repeats), flush=True)


if __name__ == "__main__":  # python -m benchmarks.secure CLIENTS NUMBERS: one case
    secure(1, (int(sys.argv[1]),), (int(sys.argv[2]),))
