"""Data drift with fixed predictors: FedBoost learns the mixture weights again.

There are twenty topics, each with a distribution of words and a predictor that was trained once.
The topics of the clients change: 1 to 5 at first, 4 to 8 later. Only the twenty weights of the
mixture are learned again, from the old weights or from uniform weights.

Run it: python examples/drift.py
"""

from __future__ import annotations

import numpy as np

import foedus as fd

TOPICS, WORDS, CLIENTS = 20, 300, 10


def talk(topics: np.ndarray, share: np.ndarray, rows: int, seed: int) -> fd.Federation:
    """Clients with words drawn from a mixture of topics: `rows` for training, half as many test."""
    rng = np.random.default_rng(seed)
    y = rng.choice(WORDS, size=rows + rows // 2, p=share @ topics)
    x = np.zeros((len(y), 1), np.float32)
    data = fd.Data.from_arrays(x[:rows], y[:rows], x[rows:], y[rows:], classes=WORDS, name="talk")
    return fd.split(data, "iid", clients=CLIENTS, seed=seed)


def drift(rounds: int = 60, rows: int = 6000, seed: int = 0) -> dict[str, list[float]]:
    """Test loss in nats a word, before and after the change."""
    topics = np.random.default_rng(seed).dirichlet(np.full(WORDS, 0.1), TOPICS)
    members = fd.Densities(0.95 * topics + 0.05 / WORDS)
    early, late = (np.isin(np.arange(TOPICS), range(*r)) / 5 for r in ((0, 5), (3, 8)))
    first, then = talk(topics, early, rows, seed + 1), talk(topics, late, rows, seed + 2)

    def learn(fed: fd.Federation, start: tuple[float, ...] | None = None) -> fd.Run:
        # Without averaging, because the next run starts from the last weights.
        algorithm = fd.FedBoost(
            members, budget=8, explore=0.2, average=False, start_weights=start, measure_every=0
        )
        return fd.run(algorithm, fed, rounds, evaluate_every=rounds // 3)

    before = learn(first)
    # A weight near 0 would take long to grow again, so a tenth of the total is spread evenly.
    weights = 0.9 * before.state.alpha + 0.1 / TOPICS
    runs = {
        "before the change": before,
        "after, old weights": fd.run(
            fd.FedBoost(members, sampling="all", start_weights=tuple(before.state.alpha.tolist())),
            then,
            0,
        ),
        "after, from old weights": learn(then, tuple((weights / weights.sum()).tolist())),
        "after, from uniform weights": learn(then),
    }
    return {name: run.history.loss.dropna().tolist() for name, run in runs.items()}


def main() -> None:
    for name, losses in drift().items():
        print(f"{name:30}" + "".join(f"{loss:9.3f}" for loss in losses))


if __name__ == "__main__":
    main()

# Expected output, in nats a word: at the start, and after 20, 40 and 60 rounds.
#
# before the change                 5.416    5.201    5.077    5.018
# after, old weights                5.581
# after, from old weights           5.541    5.241    5.157    5.103
# after, from uniform weights       5.470    5.236    5.139    5.064
#
# Here the old weights are no good start: three of the five topics are new.
