"""FFGB: a round with trees against the bare fits, an ensemble's predictions against scikit-learn's forest, nets batched against a loop."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.tree import DecisionTreeRegressor

import foedus as fd
from benchmarks.fedfw import seconds
from foedus.data.datasets import locate
from foedus.models.trees import check_trees, from_sklearn, join, predict_trees


def ffgb(repeats: int) -> None:
    """letter (or digits), ten clients; nets on images of 28 x 28."""
    data = fd.load("letter" if locate("letter") is not None else "digits")
    fed, rounds, oracle = fd.split(data, "homogeneity", clients=10, s=0.3), 5, fd.Forest()
    workers = torch.get_num_threads()

    def bare() -> None:
        """The same number of trees, with the same options, on the same rows: in as many threads."""

        def one(i: int) -> None:
            rows = fed.client_rows(i)
            x, y = data.x_train[rows], np.eye(data.classes)[data.y_train[rows]] - 1 / data.classes
            for k in range(oracle.trees):
                options = {"splitter": "random", "max_depth": oracle.depth, "max_features": oracle.features, "random_state": k}
                DecisionTreeRegressor(**options).fit(x, y)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, range(len(fed))))

    print(f"\nFFGB on {data.name}: {len(fed)} clients, {oracle.trees} trees each a round, {workers} threads")
    ours, theirs = [], []
    for _ in range(repeats):
        whole = seconds(lambda: fd.run(fd.FFGB(oracle), fed, rounds, evaluate_every=0))
        ours.append(whole / rounds)
        theirs.append(seconds(bare))
    a, b = statistics.median(ours), statistics.median(theirs)
    print("\n| a round of FFGB, s | bare fits, s | FFGB / bare |\n|---|---|---|")
    print(f"| {a:.3f} | {b:.3f} | {a / b:.2f} |", flush=True)

    x, y = data.x_train[:5000], np.eye(data.classes)[data.y_train[:5000]]
    forest = ExtraTreesRegressor(200, max_depth=12, random_state=0, n_jobs=workers).fit(x, y)
    trees = join([from_sklearn(e.tree_) for e in forest.estimators_])
    check_trees(trees, x.shape[1], data.classes)
    rows, weights = torch.from_numpy(data.x_test), torch.full((200,), 1 / 200)
    assert np.allclose(predict_trees(trees, rows, weights), forest.predict(data.x_test), atol=1e-5)
    ours = [seconds(lambda: predict_trees(trees, rows, weights)) for _ in range(max(3, repeats))]
    theirs = [seconds(lambda: forest.predict(data.x_test)) for _ in range(max(3, repeats))]
    a, b = statistics.median(ours), statistics.median(theirs)
    print(
        f"\n200 trees on {len(rows):,} rows, {workers} threads each\n\n| foedus, s | scikit-learn, s | scikit-learn / foedus |\n|---|---|---|"
    )
    print(f"| {a:.3f} | {b:.3f} | {b / a:.2f} |", flush=True)

    print("\nA round of FFGB-Distill, 100 clients of 40 images, 5 epochs: batched against one client after the other")
    print("\n| model | batched, s | one by one, s | one by one / batched |\n|---|---|---|---|")
    rng = np.random.default_rng(0)
    images = fd.Data.from_arrays(rng.random((4000, 1, 28, 28), dtype=np.float32), rng.integers(10, size=4000), classes=10)
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


def plain(algorithm: fd.FFGBDistill, fed: fd.Federation) -> None:
    """The weak learners of a round as one would write them: torch.nn, torch.optim, one client after the other."""
    how, first = algorithm.oracle, algorithm.model.init(fed.spec, torch.tensor([0, 0]))
    for i in range(len(fed)):
        rows = fed.client_rows(i)
        x, y = torch.from_numpy(fed.data.x_train[rows]), torch.from_numpy(fed.data.y_train[rows])
        params = {k: v.clone().requires_grad_() for k, v in first.items()}
        optimiser = torch.optim.Adam(params.values(), lr=how.lr)
        target = torch.full((len(rows), 10), 0.1) - torch.nn.functional.one_hot(y, 10)
        for _ in range(how.epochs):
            order = torch.randperm(len(rows))
            for batch in order.split(how.batch_size):
                optimiser.zero_grad()
                (0.5 * (algorithm.model.apply(params, x[batch]) - target[batch]).square().sum(-1)).mean().backward()
                optimiser.step()
