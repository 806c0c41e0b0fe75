"""What an exchange through Flower costs on loopback, and how much of it is the site's own work."""

from __future__ import annotations

import statistics

import foedus as fd


class _Plain(fd.Flower):
    """Flower's own SuperNodes, as its commands start them."""

    eager = False


def flower(repeats: int) -> None:
    """Seconds an exchange: with SuperNodes as they come, and with those of `fd.Flower`."""
    fed = fd.split(fd.load("digits"), "iid", clients=2, seed=0)
    algorithm = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)
    print(
        "\nFlower on loopback, 2 SuperNodes with TLS and keys, FedAvg on digits: seconds an "
        "exchange (median)\n"
    )
    print("| SuperNodes | all | the slower site's own work | the rest: Flower's |")
    print("|---|---|---|---|")
    for title, kind in (
        ("flower-supernode as it comes", _Plain),
        ("fd.Flower: forked, asking more often", fd.Flower),
    ):
        with kind(nodes=2, timeout=120) as engine:
            fd.run(algorithm, fed, 1, engine=engine, evaluate_every=0)
            fd.run(algorithm, fed, 2 * repeats, engine=engine, evaluate_every=0)
            whole, own = (
                statistics.median(v[1:]) for v in (engine.line.seconds, engine.line.working)
            )
        print(f"| {title} | {whole:.2f} | {own:.3f} | {whole - own:.2f} |", flush=True)
