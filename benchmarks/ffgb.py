"""FFGB: a round with trees against the bare fits, an ensemble's predictions against scikit-learn's
forest, nets batched against a loop.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.tree import DecisionTreeRegressor

import foedus as fd
from benchmarks.timing import in_turns, seconds
from foedus.base import random
from foedus.base.spec import Spec
from foedus.data.catalog import locate
from foedus.models.trees import check_trees, from_sklearn, predict_trees
from foedus.wire.arrays import Trees


@dataclass(frozen=True)
class Noted(fd.Forest):
    """A forest that writes down what it fits: rows, targets and the seed."""

    asked: ClassVar[list[tuple[np.ndarray, np.ndarray, int]]] = []

    def fit(self, x: torch.Tensor, target: torch.Tensor, key: torch.Tensor, spec: Spec) -> Trees:
        self.asked.append((x.numpy(), target.double().numpy(), int(random.words(key, 1)[0])))
        return super().fit(x, target, key, spec)


def ffgb(repeats: int) -> None:
    """Trees on the tabular sets at hand, ten clients; nets on images of 28 x 28."""
    workers = torch.get_num_threads()
    print(f"\nFFGB, 10 clients, {fd.Forest().trees} trees each a round, {workers} threads")
    head = (
        "set",
        "a round of FFGB, s",
        "bare fits, s",
        "with check_input=False, s",
        "FFGB / bare",
        "FFGB / unchecked",
    )
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in [
        n for n in ("letter", "pendigits", "satimage", "covtype60k") if locate(n) is not None
    ] or ["digits"]:
        data = fd.load(name)
        a, b, c = rounds_and_fits(data, workers, repeats)
        print(f"| {name} | {a:.3f} | {b:.3f} | {c:.3f} | {a / b:.2f} | {a / c:.2f} |", flush=True)

    data = fd.load("letter" if locate("letter") is not None else "digits")
    x, y = data.x_train[:5000], np.eye(data.classes)[data.y_train[:5000]]
    forest = ExtraTreesRegressor(200, max_depth=12, random_state=0, n_jobs=workers).fit(x, y)
    trees = from_sklearn(*(e.tree_ for e in forest.estimators_))
    check_trees(trees, x.shape[1], data.classes)
    rows, weights = torch.from_numpy(data.x_test), torch.full((200,), 1 / 200)
    assert np.allclose(predict_trees(trees, rows, weights), forest.predict(data.x_test), atol=1e-5)
    ours = [seconds(lambda: predict_trees(trees, rows, weights)) for _ in range(max(3, repeats))]
    theirs = [seconds(lambda: forest.predict(data.x_test)) for _ in range(max(3, repeats))]
    a, b = statistics.median(ours), statistics.median(theirs)
    print(
        f"\n200 trees on {len(rows):,} rows, {workers} threads each\n\n| foedus, s | scikit-learn, "
        "s | scikit-learn / foedus |\n|---|---|---|"
    )
    print(f"| {a:.3f} | {b:.3f} | {b / a:.2f} |", flush=True)

    print(
        "\nA round of FFGB-Distill, 100 clients of 40 images, 5 epochs: batched against one client "
        "after the other"
    )
    print("\n| model | batched, s | one by one, s | one by one / batched |\n|---|---|---|---|")
    rng = np.random.default_rng(0)
    images = fd.Data.from_arrays(
        rng.random((4000, 1, 28, 28), dtype=np.float32), rng.integers(10, size=4000), classes=10
    )
    crowd = fd.split(images, "iid", clients=100)
    train = fd.Training(lr=1e-3, optimizer="adam", epochs=5, batch_size=20)
    public = rng.random((20, 1, 28, 28), dtype=np.float32)
    for name, model in (("MLP 784-200-10", fd.MLP(200)), ("CNN", fd.CNN())):
        algorithm = fd.FFGBDistill(model, public, oracle=train, student=fd.Training(epochs=1))
        ways: dict[str, list[float]] = {"auto": [], "loop": []}
        for _ in range(repeats if name.startswith("MLP") else 1):
            ways["auto"].append(seconds(lambda a=algorithm: fd.run(a, crowd, 1, evaluate_every=0)))
            ways["loop"].append(seconds(lambda a=algorithm: plain(a, crowd)))
        a, b = statistics.median(ways["auto"]), statistics.median(ways["loop"])
        print(f"| {name} | {a:.2f} | {b:.2f} | {b / a:.2f} |", flush=True)


def rounds_and_fits(data: fd.Data, workers: int, repeats: int) -> list[float]:
    """Seconds of a round of FFGB, of scikit-learn's fits of the very same trees, and of these
    without its check of the rows.

    What a run costs once is taken off; so is the first round, in which there is nothing yet that
    clients could catch up with.
    """
    fed, rounds, oracle = fd.split(data, "homogeneity", clients=10, s=0.3), 5, fd.Forest()
    options = {"splitter": "random", "max_depth": oracle.depth, "max_features": oracle.features}
    Noted.asked.clear()
    parts = fd.run(fd.FFGB(Noted()), fed, rounds, evaluate_every=0).state.parts

    def bare(check: bool = True) -> list[int]:
        """A client's trees one after the other, in as many threads: nodes of each round."""

        def one(asked: tuple[np.ndarray, np.ndarray, int]) -> int:
            x, y, seed = asked
            state = np.random.RandomState(seed)
            fits = (
                DecisionTreeRegressor(random_state=state, **options).fit(x, y, check_input=check)
                for _ in range(oracle.trees)
            )
            return sum(model.tree_.node_count for model in fits)

        with ThreadPoolExecutor(workers) as pool:
            return [
                sum(pool.map(one, Noted.asked[t * len(fed) : (t + 1) * len(fed)]))
                for t in range(1, rounds)
            ]

    def ours() -> float:
        return float(
            np.diff(fd.run(fd.FFGB(oracle), fed, rounds, evaluate_every=0).history["seconds"])[
                1:
            ].sum()
        )

    assert bare() == [len(part.feature) for part in parts[1:]]
    ways = {
        "FFGB": ours,
        "bare": lambda: seconds(bare),
        "unchecked": lambda: seconds(lambda: bare(check=False)),
    }
    return [statistics.median(taken) / (rounds - 1) for taken in in_turns(ways, repeats).values()]


def plain(algorithm: fd.FFGBDistill, fed: fd.Federation) -> None:
    """The weak learners of a round as one would write them: torch.nn, torch.optim, one client after
    the other.
    """
    how, first = algorithm.oracle, algorithm.model.init(fed.spec, torch.tensor([0, 0]))
    for i in range(len(fed)):
        rows = fed.client_rows(i)
        x, y = torch.from_numpy(fed.data.x_train[rows]), torch.from_numpy(fed.data.y_train[rows])
        params = {k: v.clone().requires_grad_() for k, v in first.items()}
        optimizer = torch.optim.Adam(params.values(), lr=how.lr)
        target = torch.full((len(rows), 10), 0.1) - torch.nn.functional.one_hot(y, 10)
        for _ in range(how.epochs):
            order = torch.randperm(len(rows))
            for batch in order.split(how.batch_size):
                optimizer.zero_grad()
                (
                    0.5 * (algorithm.model.apply(params, x[batch]) - target[batch]).square().sum(-1)
                ).mean().backward()
                optimizer.step()
