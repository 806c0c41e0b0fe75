"""What an exchange through Flower costs on loopback, and how much of it is the site's own work."""

from __future__ import annotations

import statistics

import foedus as fd


def flower(repeats: int) -> None:
    """Seconds an exchange with the SuperNodes and resident workers of `fd.Flower`."""
    fed = fd.split(fd.load("digits"), "iid", clients=2, seed=0)
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)
    with fd.Flower(nodes=2, timeout=120) as engine:
        fd.run(algorithm, fed, 1, engine=engine, evaluate_every=0)
        fd.run(algorithm, fed, 4 * repeats, engine=engine, evaluate_every=0)
        whole, own = (statistics.median(v[1:]) for v in (engine.line.seconds, engine.line.working))
    print(
        "\nFlower on loopback, 2 SuperNodes with TLS and keys, FedAvg on digits: seconds an "
        "exchange (median)\n"
    )
    print("| all | the slower site's own work | the rest: Flower's |")
    print("|---|---|---|")
    print(f"| {whole:.2f} | {own:.3f} | {whole - own:.2f} |", flush=True)
