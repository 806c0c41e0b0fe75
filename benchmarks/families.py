"""The five families, each three ways: foedus, a straightforward reference, and the minimal
computation that every implementation needs.

The reference is what a careful author of the paper's pseudocode writes: NumPy, scikit-learn or
PyTorch, one client after the other. The bare computation is the products, factorizations or fits
alone, batched, on data that already lies where it is needed.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.tree import DecisionTreeRegressor

import foedus as fd
from benchmarks.fedboost import bare as mixtures
from benchmarks.fednewton import data as digits_data
from benchmarks.fedres import STEP, loop
from benchmarks.machine import flops, peak_flops
from benchmarks.timing import in_turns, ratio, seconds, shown
from foedus.data.catalog import locate
from foedus.papers.fedboost import point_masses
from foedus.papers.fedres import make, tasks


@dataclass(frozen=True)
class Family:
    """A workload with its three ways; `check` compares what the first two found. share: what part
    of the work the reference does.
    """

    title: str
    foedus: Callable[[], object]
    reference: Callable[[], object]
    bare: Callable[[], object]
    check: Callable[[object, object], None]
    share: float = 1.0
    dtype: torch.dtype = torch.float32


def w6() -> Family:
    """FedNewton, kernel ridge regression: MNIST's size, 20,000 rows, M = 1,000, 4 rounds."""
    full, _ = digits_data()
    rows, size, reg, clients, rounds = 20_000, 1000, 1e-3, 10, 4
    part = fd.Data.from_arrays(full.x_train[:rows], full.y_train[:rows], classes=10)
    fed = fd.split(part, "iid", clients=clients)
    features = fd.RandomFourier(size, bandwidth=5.0, seed=0)
    algorithm = fd.FedNewton(features, reg=reg)

    def ours() -> np.ndarray:
        return fd.run(algorithm, fed, rounds, evaluate_every=0).state.w.numpy()

    chosen = [fed.client_rows(i) for i in range(clients)]
    x, hot = torch.from_numpy(part.x_train), np.eye(10)[part.y_train]

    def reference() -> np.ndarray:
        """Algorithm 1 of the paper: every client makes its features and its Hessian, and solves
        with it in every round.
        """
        phis = [features(x[r], torch.float64).numpy() for r in chosen]
        hessians = [p.T @ p / len(p) + reg * np.eye(size) for p in phis]
        w = (
            sum(
                np.linalg.solve(h, p.T @ hot[r] / len(p))
                for h, p, r in zip(hessians, phis, chosen, strict=True)
            )
            / clients
        )
        for _ in range(rounds):
            g = (
                sum(
                    p.T @ (p @ w - hot[r]) / len(p) + reg * w
                    for p, r in zip(phis, chosen, strict=True)
                )
                / clients
            )
            w = w - sum(np.linalg.solve(h, g) for h in hessians) / clients
        return w

    waves = torch.rand(x.flatten(1).shape[1], size, dtype=torch.float64)

    def bare() -> None:
        """The features of every client, their products and the Cholesky factors."""
        for r in chosen:
            p = (x[r].flatten(1).double() @ waves).cos_()
            gram = p.mT @ p
            gram.diagonal().add_(len(p) * reg)
            torch.linalg.cholesky(gram)

    def check(a: object, b: object) -> None:
        assert np.allclose(a, b, atol=1e-6 * np.abs(b).max()), np.abs(a - b).max()

    title = "W6: FedNewton, 10 clients, 20,000 rows, M = 1,000, 4 rounds"
    return Family(title, ours, reference, bare, check, dtype=torch.float64)


def w7() -> Family:
    """FedFW with softmax regression on an L1 ball: 1,000 clients of 60 rows, 20 rounds, full
    gradients.
    """
    full, _ = digits_data()
    clients, rounds, ball = 1000, 20, fd.L1Ball(10.0)
    fed = fd.split(full, "iid", clients=clients)
    algorithm = fd.FedFW(fd.Linear(), ball, measure_every=0, penalty=1e-3)
    index = np.stack([fed.client_rows(i) for i in range(clients)])
    x = torch.from_numpy(full.x_train)[index].flatten(2)
    y = torch.from_numpy(full.y_train)[index]

    def ours() -> np.ndarray:
        center = fd.run(algorithm, fed, rounds, evaluate_every=0).state.center
        return np.concatenate([center[k].numpy().ravel() for k in ("weight", "bias")])

    def reference() -> np.ndarray:
        """Algorithm 1: one client after the other, with autograd and a dense extreme point."""
        size = 10 * x.shape[2] + 10
        own, center = [torch.zeros(size) for _ in range(clients)], torch.zeros(size)
        for t in range(1, rounds + 1):
            eta, pull, total = 2 / (t + 1), 1e-3 * (t + 1) ** 0.5, torch.zeros(size)
            for i in range(clients):
                w = own[i].clone().requires_grad_()
                logits = x[i] @ w[:-10].view(10, -1).mT + w[-10:]
                (torch.nn.functional.cross_entropy(logits, y[i]) / clients).backward()
                g = w.grad + pull * (own[i] - center)
                j = int(g.abs().argmax())
                point = torch.zeros(size)
                point[j] = -10.0 * torch.sign(g[j])
                own[i] = own[i] + eta * (point - own[i])
                total += point / clients
            center = center + eta * (total - center)
        return center.numpy()

    def check(a: object, b: object) -> None:
        assert np.abs(a - b).sum() < 0.2 * np.abs(b).sum(), (np.abs(a - b).sum(), np.abs(b).sum())

    @torch.no_grad()
    def bare() -> np.ndarray:
        """The same for all clients at once: two products, the largest entry of each gradient, a
        step towards it.
        """
        size, hot = 10 * x.shape[2], torch.nn.functional.one_hot(y, 10).float()
        own, center, everybody = (
            torch.zeros(clients, size + 10),
            torch.zeros(size + 10),
            torch.arange(clients),
        )
        for t in range(1, rounds + 1):
            eta, pull = 2 / (t + 1), 1e-3 * (t + 1) ** 0.5
            w, b = own[:, :size].view(clients, 10, -1), own[:, size:]
            slope = (torch.baddbmm(b.unsqueeze(2), w, x.mT).softmax(1) - hot.mT).div_(
                x.shape[1] * clients
            )
            g = torch.sub(own, center).mul_(pull)
            g[:, :size].view(clients, 10, -1).baddbmm_(slope, x)
            g[:, size:] += slope.sum(2)
            place = g.abs().argmax(1)
            move = -10.0 * eta * g[everybody, place].sign()
            own.mul_(1 - eta)[everybody, place] += move
            center.mul_(1 - eta).index_add_(0, place, move / clients)
        return center.numpy()

    return Family(
        "W7: FedFW, 1,000 clients x 60 rows, L1 ball, 20 rounds", ours, reference, bare, check
    )


def w8() -> Family:
    """FedRes online: 50 clients, 500 rounds, 50 rollouts at once; the reference does two of
    them.
    """
    name, clients = ("pendigits", 50) if locate("pendigits") is not None else ("digits", 15)
    data, rounds, many, few = fd.load(name), 500, 50, 2
    feds = tasks(data, clients, many)
    wide = len(feds[0].settings["global_features"]) + 1, len(feds[0].settings["local_features"]) + 1
    rows = torch.rand(rounds, many, clients, sum(wide))

    def ours() -> list[float]:
        found = fd.rollouts({"FedRes": make("FedRes", STEP)}, feds, rounds)
        return found[found.rollout < few].own_accuracy.tolist()

    def bare() -> None:
        """Two products of a row with a model and two steps of AdaGrad, for all clients of all
        rollouts; rows lie ready.
        """
        w, v = torch.zeros(many, 1, wide[0]), torch.zeros(many, clients, wide[1])
        a, b = torch.ones_like(w), torch.ones_like(v)
        for row in rows:
            shared, own = row[..., : wide[0]], row[..., wide[0] :]
            error = (shared * w).sum(-1, keepdim=True) + (own * v).sum(-1, keepdim=True) - 1
            g, h = (error * shared).sum(1, keepdim=True), error * own
            w -= STEP * g * a.addcmul_(g, g).rsqrt()
            v -= STEP * h * b.addcmul_(h, h).rsqrt()

    def check(a: object, b: object) -> None:
        assert np.allclose(a, b, atol=0.02), (a, b)

    return Family(
        f"W8: FedRes online, {clients} clients, 500 rounds, 50 rollouts",
        ours,
        lambda: [loop(f, "FedRes", rounds) for f in feds[:few]],
        bare,
        check,
        share=few / many,
    )


def w9() -> Family:
    """FFGB with trees: ten clients, ten trees each a round, 5 rounds."""
    data = fd.load("letter" if locate("letter") is not None else "digits")
    fed, rounds, oracle = fd.split(data, "homogeneity", clients=10, s=0.3), 5, fd.Forest()
    options = {"splitter": "random", "max_depth": oracle.depth, "max_features": oracle.features}
    chosen = [fed.client_rows(i) for i in range(len(fed))]
    hot = np.eye(data.classes)[data.y_train]

    def ours() -> float:
        return float(
            fd.run(fd.FFGB(oracle), fed, rounds, evaluate_every=rounds).history.accuracy.iloc[-1]
        )

    def scores(trees: list[DecisionTreeRegressor], x: np.ndarray) -> np.ndarray:
        return (
            -10.0
            / len(fed)
            / oracle.trees
            * sum((t.predict(x) for t in trees), np.zeros((len(x), data.classes)))
        )

    def reference() -> float:
        """A list of scikit-learn's trees; every client evaluates all of them in every round."""
        trees: list[DecisionTreeRegressor] = []
        for t in range(rounds):
            new = []
            for i, rows in enumerate(chosen):
                x, f = data.x_train[rows], scores(trees, data.x_train[rows])
                p = np.exp(f - f.max(1, keepdims=True))
                target = p / p.sum(1, keepdims=True) - hot[rows]
                state = np.random.RandomState(1000 * t + i)
                new += [
                    DecisionTreeRegressor(random_state=state, **options).fit(x, target)
                    for _ in range(oracle.trees)
                ]
            trees += new
        return float((scores(trees, data.x_test).argmax(1) == data.y_test).mean())

    def bare() -> None:
        """Fits alone, on targets of the first round, in as many threads as there are."""
        from concurrent.futures import ThreadPoolExecutor

        def one(i: int) -> None:
            rows = chosen[i % len(chosen)]
            target = 1 / data.classes - hot[rows]
            state = np.random.RandomState(i)
            for _ in range(oracle.trees):
                DecisionTreeRegressor(random_state=state, **options).fit(data.x_train[rows], target)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(one, range(rounds * len(chosen))))

    def check(a: object, b: object) -> None:
        assert abs(a - b) < 0.02, (a, b)

    return Family(
        f"W9: FFGB, trees on {data.name}, 10 clients, 5 rounds", ours, reference, bare, check
    )


def w10() -> Family:
    """FedBoost on point masses: 1,000 domains, 1,000 predictors, 32 of them a round, 200 rounds."""
    size, budget, rounds, step = 1000, 32, 200, 0.01
    fed, members = point_masses(size), fd.Densities(np.eye(size))
    algorithm = fd.FedBoost(
        members, loss="squared", step=step, budget=budget, sampling="uniform", measure_every=0
    )
    counts = np.bincount(
        fed.owners() * fed.data.classes + fed.data.y_train[fed.rows],
        minlength=len(fed) * fed.data.classes,
    )
    shares = (counts.reshape(len(fed), -1) / fed.sizes[:, None]).astype(np.float32)
    part = fed.sizes / fed.sizes.sum()

    def objective(weight: np.ndarray) -> float:
        return float(((part @ shares - weight) ** 2).sum())

    def ours() -> float:
        return objective(
            np.asarray(fd.run(algorithm, fed, rounds, evaluate_every=0).state.alpha, np.float64)
        )

    def reference() -> float:
        """Algorithm 1: one client after the other, unbiased by q / C, exponentiated gradient."""
        rng, table = np.random.default_rng(0), np.eye(size, dtype=np.float32)
        weight = np.full(size, 1 / size, np.float32)
        for _ in range(rounds):
            chosen = rng.random(size) < budget / size
            mixed = (weight[chosen] * size / budget) @ table[chosen]
            g = np.zeros(size, np.float32)
            for i in range(len(fed)):
                g[chosen] += part[i] * (table[chosen] @ (mixed - shares[i])) * size / budget
            weight = weight * np.exp(-step * (g - g.mean()))
            weight /= weight.sum()
        return objective(weight)

    def check(a: object, b: object) -> None:
        assert a < 1.5 * objective(np.full(size, 1 / size)) and np.isfinite(b), (a, b)

    some, table = torch.from_numpy(shares), members.table[:budget]
    return Family(
        "W10: FedBoost, p = q = 1,000, C = 32, 200 rounds",
        ours,
        reference,
        lambda: mixtures(some, table, "squared", rounds),
        check,
    )


FAMILIES = {"w6": w6, "w7": w7, "w8": w8, "w9": w9, "w10": w10}


HEAD = (
    "workload",
    "reference, s",
    "foedus, s",
    "bare, s",
    "reference / foedus",
    "foedus / bare",
    "of the machine's peak",
)


def family(name: str, repeats: int) -> None:
    """One row of the table: seconds of a whole run, medians of interleaved repeats."""
    one = FAMILIES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fd.DivergenceWarning)
        one.check(one.foedus(), one.reference())
        sums = flops(one.bare)
        ways = {way: lambda way=way: seconds(getattr(one, way)) for way in ("foedus", "bare")}
        taken = in_turns(
            ways | {"reference": lambda: seconds(one.reference) / one.share}, repeats, warm=False
        )
    reached = (
        f"{100 * sums / peak_flops(one.dtype) / statistics.median(taken['foedus']):.0f}%"
        if sums
        else "-"
    )
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    print(
        f"| {one.title} | {shown(taken['reference'])} | {shown(taken['foedus'])} | "
        f"{shown(taken['bare'])} "
        f"| {ratio(taken, 'reference', 'foedus'):.1f}x | {ratio(taken, 'foedus', 'bare'):.2f} | "
        f"{reached} |",
        flush=True,
    )
