"""Many tasks, few rows, low rank: multi-task regression over a nuclear-norm ball, with FedFW.

Five sites measure 500 features and 300 outcomes, y = W x + noise, where W has rank 3. Each site has
120 rows, 600 in total, so least squares fits the noise. A bound on the nuclear norm of W (the sum
of its singular values) finds the few directions that matter. There are two ways to stay within it:

    FedFW            a site sends the extreme point for its gradient, which is a pair of vectors:
                     800 numbers, where W has 150,000. The server sends all five pairs back, which
                     determine how its W has changed.
    ProjectedFedAvg  a site sends a change of all of W, and the server projects, with a full
                     singular value decomposition in each round.

FedAvg has no bound. Its best round, chosen by the test rows, is shown as well: early stopping does
not replace the ball.

Settings: the radius is the nuclear norm of the true W, which is known because the data are
synthetic; for other data, tune it on held-out rows. FedFW has its default penalty, "auto", and the
variant "augmented" (FedFW+), which is better here. The averaging methods take one full-batch step
in each round, with a step size close to the largest for which FedAvg converges.

Result: all rounds of FedFW together send up about as much as one round of the others. But a
projected step gains more than a Frank-Wolfe step, most of all for features like these, which are
independent and of equal scale. So the third line stops ProjectedFedAvg once it is as good as FedFW:
after a few rounds, with five times the bytes up of FedFW, and about as many down. The upload of
FedFW grows with the sum of the sides of W, those of the others with their product: the larger W,
the better for FedFW. Its download grows with the number of sites, because every site is sent every
pair.

Run it: python examples/lowrank.py
"""

from __future__ import annotations

import numpy as np

import foedus as fd


def federation(
    features: int = 500,
    tasks: int = 300,
    rank: int = 3,
    clients: int = 5,
    rows: int = 120,
    noise: float = 1.0,
    seed: int = 0,
) -> tuple[fd.Federation, float]:
    """Clients with `rows` rows each of y = W x + noise, and the nuclear norm of W."""
    rng = np.random.default_rng(seed)
    W = (
        rng.standard_normal((tasks, rank))
        @ rng.standard_normal((rank, features))
        / np.sqrt(rank * features)
    )

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((n, features))
        return x.astype(np.float32), (x @ W.T + noise * rng.standard_normal((n, tasks))).astype(
            np.float32
        )

    data = fd.Data.from_arrays(*draw(clients * rows), *draw(500), name="low rank")
    return fd.split(data, "iid", clients=clients, seed=seed), float(np.linalg.norm(W, "nuc"))


def compare(
    fed: fd.Federation, radius: float, rounds: int = 200, averaging_rounds: int = 40
) -> dict[str, fd.Run]:
    """Run each method; rounds of FedFW are cheap, so it has more of them."""
    # one matrix and nothing else, so the ball is over it
    model, ball = fd.Linear(bias=False), fd.NuclearBall(radius)
    step = {"lr": 0.5, "steps": 1, "batch_size": None}
    fedfw = fd.FedFW(model, ball, variant="augmented", measure_every=0)
    projected = fd.ProjectedFedAvg(model, domain=ball, measure_every=0, **step)
    runs = {"FedFW": fd.run(fedfw, fed, rounds, evaluate_every=rounds)}
    runs["ProjectedFedAvg"] = fd.run(projected, fed, averaging_rounds)
    reached = runs["FedFW"].history.mse.iloc[-1]
    runs["ProjectedFedAvg, to FedFW's mse"] = fd.run(
        projected, fed, averaging_rounds, target=reached
    )
    runs["FedAvg"] = fd.run(fd.FedAvg(model, **step), fed, averaging_rounds)
    return runs


def table(runs: dict[str, fd.Run]) -> str:
    """Test error and megabytes of each run."""
    lines = [f"{'':32}rounds  test mse  MB up  MB down"]
    for name, run in runs.items():
        last = run.history.iloc[-1]
        lines.append(
            f"{name:32}{last['round']:6.0f}{last.mse:10.2f}"
            f"{last.bytes_up / 1e6:7.1f}{last.bytes_down / 1e6:9.1f}"
        )
    best = runs["FedAvg"].history.mse.min()
    return "\n".join([*lines, f"{'FedAvg, its best round':32}{'':6}{best:10.2f}"])


def main() -> None:
    fed, radius = federation()
    print(table(compare(fed, radius)))


if __name__ == "__main__":
    main()

# Expected output. Predicting with the true W has an mse of 1.00 (the noise), with W = 0 of 1.98.
#
#                                 rounds  test mse  MB up  MB down
# FedFW                              200      1.25    3.2     16.0
# ProjectedFedAvg                     40      1.15  120.0    120.0
# ProjectedFedAvg, to FedFW's mse      5      1.23   15.0     15.0
# FedAvg                              40      3.19  120.0    120.0
# FedAvg, its best round                      1.60
