"""FedRes' experiments: Figures 1 to 12, the rates of Theorems 2 and 3, and Example 2.

python -m foedus.papers.fedres figure1                     # P = 50, eight sets, 50 rollouts; figure2: P = 10
python -m foedus.papers.fedres clients --delay 20          # Figures 3, 4, 8 (delay 0), 11 (20), 12 (80)
python -m foedus.papers.fedres delay                       # Figures 5, 9, 10
python -m foedus.papers.fedres least_squares               # what the models of Figure 1 reach without steps
python -m foedus.papers.fedres appendix_c                  # Figures 6 and 7
python -m foedus.papers.fedres theorem2
python -m foedus.papers.fedres bandit
python -m foedus.papers.fedres example2
python -m foedus.papers.fedres draw --out docs/figures

The paper prints no numbers, only pictures. It uses Vowpal Wabbit's linear regression with --adaptive: here the squared loss on labels
+-1 and AdaGrad. Steps are chosen for each set, scheme and delay by the test accuracy of ten other rollouts, from one grid.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import foedus as fd
from foedus.algorithms.bandit import alone
from foedus.data.datasets import locate
from foedus.papers.cells import Cells
from foedus.papers.fednewton import markdown

CENTRAL_BETTER = ("mnist", "satimage", "sensorless", "usps")
INDEPENDENT_BETTER = ("letter", "pendigits", "shuttle", "covtype")
SETS = (*INDEPENDENT_BETTER, *CENTRAL_BETTER)
"""In the paper, Central beats Independent on the last four and loses on the first four."""
STEPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SCHEMES = ("Independent", "Central", "FedRes")
ROUNDS, ROLLOUTS, TUNING = 500, 50, 10
CLIENTS = (1, 2, 5, 10, 20, 50, 100)
DELAYS = (0, 10, 20, 50, 100, 200)


def load(name: str) -> fd.Data:
    """A set by name; for covtype the 60,000 rows of covtype60k, where the whole is not at hand."""
    return fd.load("covtype60k" if name == "covtype" and locate("covtype") is None else name)


def scheme(name: str, step: float) -> Any:
    """Section 6.2: a function from a federation of tasks to an algorithm. "FedRes, all" has all features in the local model."""

    def make(fed: fd.Federation) -> fd.FedRes:
        both = {"shared": fed.settings["global_features"], "private": fed.settings["local_features"]}
        if name == "FedRes, all":
            both["private"] = None
        algorithm = fd.FedRes(**both, step=step)
        return {"Independent": algorithm.independent, "Central": algorithm.central}.get(name, lambda: algorithm)()

    return make


def tasks(data: fd.Data, clients: int, rollouts: int, first: int = 0) -> list[fd.Federation]:
    """Section 6.1, again and again."""
    return [fd.split(data, "tasks", clients=clients, seed=first + s) for s in range(rollouts)]


def tuned(
    data: fd.Data, names: Sequence[str], delay: int = 0, rounds: int = ROUNDS, rollouts: int = TUNING
) -> dict[str, float]:
    """The step of each scheme with the best accuracy over other rollouts, with 50 clients."""
    feds = tasks(data, 50, rollouts, first=1_000_000)
    grid = {f"{name} {step}": scheme(name, step) for name in names for step in STEPS}
    found = fd.rollouts(grid, feds, rounds, up=delay - delay // 2, down=delay // 2)
    mean = found.groupby("scheme").own_accuracy.mean()
    return {name: max(STEPS, key=lambda step, n=name: mean[f"{n} {step}"]) for name in names}


def accuracy(
    data: fd.Data,
    names: Sequence[str],
    clients: int,
    delay: int,
    steps: dict[str, float],
    rollouts: int = ROLLOUTS,
    rounds: int = ROUNDS,
) -> dict[str, tuple[float, float]]:
    """Mean accuracy of each scheme in percent, and its standard error. Independent is never delayed."""
    feds, found = tasks(data, clients, rollouts), {}
    for name in names:
        late = 0 if name == "Independent" else delay
        result = fd.rollouts({name: scheme(name, steps[name])}, feds, rounds, up=late - late // 2, down=late // 2)
        scores = 100 * result.own_accuracy
        found[name] = (float(scores.mean()), float(scores.std() / np.sqrt(len(scores))))
    return found


def study(
    names: Sequence[str], sets: Sequence[str], points: Sequence[tuple[int, int]], keep: Path | None, rollouts: int
) -> pd.DataFrame:
    """Accuracies for (clients, delay) at all `points`. `keep`: a file of finished cells, to go on from."""
    once = Cells(keep).once

    rows = []
    for name in sets:
        data = functools.cache(functools.partial(load, name))  # not needed where all cells are finished
        for clients, delay in points:
            steps = {}
            for s in names:
                late = 0 if s == "Independent" else delay
                steps[s] = once(f"step {name} {s} {late}", lambda s=s, late=late, d=data: tuned(d(), [s], late)[s])
                key = f"accuracy {name} {s} {clients} {late} {rollouts}"
                try:
                    mean, error = once(
                        key, lambda s=s, c=clients, late=late, d=data, k=steps: accuracy(d(), [s], c, late, k, rollouts)[s]
                    )
                except fd.SplitError:  # more clients than the set has rows for
                    mean, error = np.nan, np.nan
                row = {"set": name, "clients": clients, "delay": delay, "scheme": s, "accuracy": mean, "error": error}
                rows.append({**row, "step": steps[s]})
    return pd.DataFrame(rows)


def figure1(clients: int = 50, sets: Sequence[str] = SETS, keep: Path | None = None, rollouts: int = ROLLOUTS) -> pd.DataFrame:
    """Accuracy without delay (Figure 2: clients=10); the last columns say what the claim is about."""
    found = study((*SCHEMES, "FedRes, all"), sets, [(clients, 0)], keep, rollouts)
    table = (
        found.pivot(index="set", columns="scheme", values="accuracy").loc[list(sets), [*SCHEMES, "FedRes, all"]].reset_index()
    )
    better = table[["Independent", "Central"]].max(axis=1)
    table["FedRes - better"] = table["FedRes"] - better
    table["all - better"] = table["FedRes, all"] - better
    return table


def least_squares(
    sets: Sequence[str] = ("letter", "pendigits"), clients: int = 50, rollouts: int = 5, ridge: float = 0.03
) -> pd.DataFrame:
    """What the models of Independent and FedRes reach without any steps: ridge regression on all rows, accuracy in percent.

    ridge: on the weights that a client learns alone; the global model has next to none.
    """
    rows = []
    for name in sets:
        hits = {"Independent": 0, "FedRes": 0}
        count = 0
        for fed in tasks(load(name), clients, rollouts, first=1000):
            data = fed.data
            x, x_test = (np.c_[v.reshape(len(v), -1), np.ones(len(v))].astype(float) for v in (data.x_train, data.x_test))
            y, y_test = 2.0 * data.y_train - 1, 2.0 * data.y_test - 1
            g, own = (np.append(fed.settings[k], x.shape[1] - 1) for k in ("global_features", "local_features"))
            matrix, right, parts = 1e-6 * np.eye(len(g)), 0.0, []
            for i in range(clients):
                r = fed.client_rows(i)
                xg, xl, n = x[r][:, g], x[r][:, own], len(r)
                inverse, cross = np.linalg.inv(xl.T @ xl / n + ridge * np.eye(len(own))), xg.T @ xl / n
                matrix = matrix + xg.T @ xg / n - cross @ inverse @ cross.T
                right = right + xg.T @ y[r] / n - cross @ inverse @ (xl.T @ y[r] / n)
                parts.append((r, xl, inverse, cross))
            w = np.linalg.solve(matrix, right)
            for i, (r, xl, inverse, cross) in enumerate(parts):
                t = fed.test_rows[fed.test_offsets[i] : fed.test_offsets[i + 1]]
                alone_ = np.linalg.solve(x[r].T @ x[r] / len(r) + ridge * np.eye(x.shape[1]), x[r].T @ y[r] / len(r))
                local = inverse @ (xl.T @ y[r] / len(r) - cross.T @ w)
                hits["Independent"] += (np.sign(x_test[t] @ alone_) == y_test[t]).sum()
                hits["FedRes"] += (np.sign(x_test[t][:, g] @ w + x_test[t][:, own] @ local) == y_test[t]).sum()
                count += len(t)
        rows.append({"set": name, **{k: 100 * v / count for k, v in hits.items()}})
    return pd.DataFrame(rows)


# Appendix C


class Started(fd.Linear):
    """A linear model that starts at (1, 0)."""

    def init(self, spec: fd.Spec, key: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": torch.tensor([[1.0, 0.0]])}


def locked(rows: int, rollouts: int, seed: int = 0) -> list[fd.Federation]:
    """C.1: one client; columns 0 and 1 are global, 2 and 3 local."""
    feds = []
    for r in range(rollouts):
        rng = np.random.default_rng((seed, r))
        a, b, noise = rng.normal(size=rows), rng.normal(size=rows), rng.normal(scale=0.5, size=rows)
        x = np.stack((a + noise, b, 1 - a, 1 - b), 1).astype(np.float32)
        feds.append(fd.Federation.from_clients([(x, np.ones(rows, np.float32))]))
    return feds


def appendix_c(
    rounds: int = 20_000, rollouts: int = 50, step: float = 1.0, schedule: str = "adagrad", seed: int = 0
) -> dict[str, dict[str, np.ndarray]]:
    """Figures 6 and 7: the average loss so far, and w^g, after each round; averages over rollouts.

    The paper's step of 1.0 in w <- w - eta grad diverges on these data (|x|^2 is 6 on average, so that eta must be below about 0.1).
    With AdaGrad, as in the paper's other experiments, a step of 1.0 gives its picture.
    """
    feds = locked(rounds, rollouts, seed)
    curves = {}
    model = Started(bias=False)
    losses, path = np.zeros(rounds), np.zeros((rounds, 2))

    def watch(name: str, t: int, seen: dict[str, Any]) -> None:
        losses[t - 1] = seen["loss"].mean()
        path[t - 1] = seen["w"]["weight"].mean(0)[0]

    algorithm = fd.FedRes(model, model, shared=(0, 1), private=(2, 3), step=step, schedule=schedule)
    fd.rollouts({"FedRes.SGD": lambda fed: algorithm}, feds, rounds, watch=watch)
    curves["FedRes.SGD"] = {"loss": losses.cumsum() / np.arange(1, rounds + 1), "w": path}
    x = torch.stack([torch.from_numpy(f.data.x_train) for f in feds]).double()
    for name, kind in (("FedRes.ERM", fd.FedResERM), ("fictitious play", fd.FictitiousPlay)):
        curves[name] = dict(zip(("loss", "w"), _least_squares_play(kind(bias=False), x), strict=True))
    return curves


def _least_squares_play(algorithm: fd.FedResERM, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A server and one client in every rollout (R, T, 4), with the updates of the algorithm."""
    rollouts, rounds = x.shape[:2]
    y = torch.ones(rollouts, 1, 1, dtype=x.dtype)
    w = local = torch.tensor([[1.0], [0.0]], dtype=x.dtype).expand(rollouts, 2, 1)
    zeros = {"own": x.new_zeros(rollouts, 2, 2), "cross": x.new_zeros(rollouts, 2, 2), "y": x.new_zeros(rollouts, 2, 1)}
    client, server = dict(zeros), dict(zeros)
    losses, path = np.zeros(rounds), np.zeros((rounds, 2))
    for t in range(rounds):
        local = algorithm.fit(client, w, local, torch.full((rollouts,), t))
        g, own = x[:, t : t + 1, :2], x[:, t : t + 1, 2:]
        said_g, said_l = g @ w, own @ local
        losses[t], path[t] = (y - said_g - said_l).square().mean(), w.mean(0)[:, 0]
        client = algorithm.learn(client, own, g, y, said_g)
        server = algorithm.learn(server, g, own, y, said_l)
        w = algorithm.fit(server, local, w, torch.full((rollouts,), t + 1))
    return losses.cumsum() / np.arange(1, rounds + 1), path


# Theorem 2, Example 2, Theorem 3


def realisable(
    rounds: int, clients: int = 10, width: int = 10, noise: float = 0.5, seed: int = 0, spread: float = 0.5
) -> fd.Federation:
    """y = w*_g . x^g + w*_i . x^l + noise, with `width` global and as many local features, of variance 1 / width."""
    rng = np.random.default_rng(seed)
    w, parts = rng.normal(size=width), []
    for _ in range(clients):
        x = (rng.normal(size=(rounds, 2 * width)) / np.sqrt(width)).astype(np.float32)
        y = x[:, :width] @ w + x[:, width:] @ (spread * rng.normal(size=width)) + noise * rng.normal(size=rounds)
        parts.append((x, y.astype(np.float32)))
    return fd.Federation.from_clients(parts)


def theorem2(
    horizons: Sequence[int] = (500, 1000, 2000, 4000, 8000, 16000),
    delay: int = 50,
    rollouts: int = 10,
    noise: float = 0.5,
    scales: Sequence[float] = (0.25, 0.5, 1.0, 2.0),
    rules: Sequence[str] = ("aligned", "asymmetric", "misaligned"),
) -> pd.DataFrame:
    """Average regret after T rounds, by rule and delay, with the step of Theorem 2 up to a constant, the best of `scales`.

    The comparator is (w*_g, w*_i), whose expected loss is the variance of the noise.
    """
    rows = []
    for horizon in horizons:
        feds = [realisable(horizon, seed=s, noise=noise) for s in range(rollouts)]
        for rule, late in (("aligned", 0), *((rule, delay) for rule in rules)):
            best = None
            for scale in scales:
                algorithm = fd.FedRes(
                    fd.Linear(bias=False), fd.Linear(bias=False), shared=range(10), private=range(10, 20), schedule="constant",
                    rule=rule, step=scale / np.sqrt(10 * horizon), local_step=scale * 10 / np.sqrt(10 * horizon), radius=10.0,
                )  # fmt: skip
                found = fd.rollouts({"": lambda fed, a=algorithm: a}, feds, horizon, up=late - late // 2, down=late // 2)
                value = float(found.online_loss.mean()) - noise**2
                best = value if best is None or value < best else best
            rows.append({"T": horizon, "rule": rule, "delay": late, "regret": best})
    return pd.DataFrame(rows)


def slopes(table: pd.DataFrame, last: int = 4) -> pd.Series:
    """Slope of log regret against log T over the last few horizons."""
    return table.groupby([c for c in table.columns if c not in ("T", "regret")]).apply(
        lambda g: float(np.polyfit(np.log(g["T"].tail(last)), np.log(g["regret"].tail(last)), 1)[0]), include_groups=False
    )


def example2(clients: int = 10, rounds: int = 2000, width: int = 5, seed: int = 0) -> pd.DataFrame:
    """Half of the clients have +v, half -v, on the same features: what a global model alone is left with."""
    rng = np.random.default_rng(seed)
    u, v = rng.normal(size=width), rng.normal(size=width)
    parts = []
    for i in range(clients):
        x = rng.normal(size=(rounds, width)).astype(np.float32)
        parts.append((x, (x @ (u + (v if i < clients // 2 else -v))).astype(np.float32)))
    fed = fd.Federation.from_clients(parts)
    rows, last = [], rounds // 10
    for name, algorithm in (
        ("global model alone", fd.FedRes(local_model=None, rule="misaligned")),
        ("FedRes", fd.FedRes()),
    ):
        losses: list[float] = []
        fd.rollouts(
            {name: lambda fed, a=algorithm: a}, [fed], rounds, watch=lambda n, t, s, k=losses: k.append(float(s["loss"].mean()))
        )
        rows.append({"method": name, "loss in the last tenth": float(np.mean(losses[-last:])), "E (v.x)^2": float(v @ v)})
    return pd.DataFrame(rows)


def bandit(horizons: Sequence[int] = (500, 1000, 2000, 4000), seeds: int = 2, clients: int = 20) -> pd.DataFrame:
    """Average regret after T rounds on a realisable environment: both explorations, with both models and with either alone."""
    rows = []
    for horizon in horizons:
        feds = [fd.linear_bandit(clients=clients, actions=5, rounds=horizon, seed=s) for s in range(seeds)]
        for explore in ("epsilon", "squarecb"):
            for part in ("both", "global", "local"):
                best = None
                for step in (0.03, 0.1):
                    algorithm = fd.FedResBandit(
                        shared=range(8), private=range(8, 12), explore=explore, step=step, measure_every=horizon,
                        every=max(2, round(horizon**0.2 * 1.5)), gamma=20.0,
                    )  # fmt: skip
                    if part != "both":
                        algorithm = alone(algorithm, part)
                    value = np.mean(
                        [
                            fd.run(algorithm, f, horizon, evaluate_every=0, seed=s).history.regret.iloc[-1]
                            for s, f in enumerate(feds)
                        ]
                    )
                    best = value if best is None or value < best else best
                rows.append({"T": horizon, "exploration": explore, "models": part, "regret": float(best)})
    return pd.DataFrame(rows)


def draw(out: Path, keep: Path | None, rollouts: int) -> None:
    """All pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"Independent": "tab:green", "Central": "tab:orange", "FedRes": "tab:blue", "FedRes, all": "tab:purple"}

    figure, places = pyplot.subplots(2, 1, figsize=(10, 7), constrained_layout=True)
    for place, clients, number in zip(places, (50, 10), (1, 2), strict=True):
        table = figure1(clients, keep=keep, rollouts=rollouts)
        for k, name in enumerate((*SCHEMES, "FedRes, all")):
            place.bar(np.arange(len(table)) + 0.2 * (k - 1.5), table[name], 0.2, label=name, color=colors[name])
        place.set_xticks(range(len(table)), table["set"])
        place.set(title=f"Figure {number}: {clients} clients, no delay", ylabel="accuracy, %", ylim=(50, 100))
    places[0].legend(ncols=4, loc="lower right")
    figure.savefig(out / "fedres-sets.svg", metadata={"Date": None})
    pyplot.close(figure)

    for name, points, column, label in (
        ("clients", [(c, 0) for c in CLIENTS], "clients", "clients"),
        ("clients-delay20", [(c, 20) for c in CLIENTS], "clients", "clients, delay 20"),
        ("clients-delay80", [(c, 80) for c in CLIENTS], "clients", "clients, delay 80"),
        ("delay", [(50, d) for d in DELAYS], "delay", "delay, rounds"),
    ):
        table = study(SCHEMES, SETS, points, keep, rollouts)
        figure, places = pyplot.subplots(2, 4, figsize=(13, 6), constrained_layout=True)
        for place, (data, part) in zip(places.flat, table.groupby("set", sort=False), strict=True):
            for s, line in part.groupby("scheme", sort=False):
                place.errorbar(line[column], line.accuracy, line.error, marker="o", markersize=3, label=s, color=colors[s])
            place.set(title=data, xlabel=label)
            if column == "clients":
                place.set_xscale("log")
        places[0, 0].legend()
        figure.savefig(out / f"fedres-{name}.svg", metadata={"Date": None})
        pyplot.close(figure)

    curves = appendix_c()
    figure, places = pyplot.subplots(1, 4, figsize=(14, 3.5), constrained_layout=True)
    for name, curve in curves.items():
        places[0].loglog(np.arange(1, len(curve["loss"]) + 1), curve["loss"], label=name)
    places[0].set(title="Figure 6", xlabel="round", ylabel="average loss")
    places[0].legend()
    for place, (name, curve) in zip(places[1:], curves.items(), strict=True):
        place.plot(curve["w"][:, 0], "tab:blue", label="first")
        place.plot(curve["w"][:, 1], "tab:red", label="second")
        place.set(title=f"Figure 7: {name}", xlabel="round", ylim=(-0.1, 1.1))
    places[1].legend()
    figure.savefig(out / "fedres-appendix-c.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m foedus.papers.fedres", description=__doc__.splitlines()[0])
    items = ("figure1", "figure2", "least_squares", "clients", "delay", "appendix_c", "theorem2", "bandit", "example2", "draw")
    parser.add_argument("item", choices=items)
    parser.add_argument("--sets", nargs="+", default=list(SETS), metavar="SET")
    parser.add_argument("--delay", type=int, default=0, help="of the item 'clients'")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--keep", type=Path, help="a JSON file of finished cells, to go on from")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures")
    options = parser.parse_args()
    torch.set_num_threads(1)  # these are small operations
    if options.item in ("figure1", "figure2"):
        table = figure1(50 if options.item == "figure1" else 10, options.sets, options.keep, options.rollouts)
        print(markdown(table, 1))
        for column in ("FedRes - better", "all - better"):
            print(f"{column}: within 1.5 points on {(table[column] >= -1.5).sum()} of {len(table)} sets")
    elif options.item in ("clients", "delay"):
        points = [(c, options.delay) for c in CLIENTS] if options.item == "clients" else [(50, d) for d in DELAYS]
        table = study(SCHEMES, options.sets, points, options.keep, options.rollouts)
        wide = table.pivot(
            index=["set", options.item.removesuffix("s") if options.item == "delay" else "clients"],
            columns="scheme",
            values="accuracy",
        )
        print(markdown(wide[list(SCHEMES)].reset_index().astype({wide.index.names[1]: str}), 1))
    elif options.item == "appendix_c":
        for name, curve in appendix_c(rollouts=options.rollouts).items():
            print(f"{name}: average loss {curve['loss'][-1]:.4f}, w^g {curve['w'][-1].round(3).tolist()}")
    elif options.item == "example2":
        print(markdown(example2(), 4))
    elif options.item == "least_squares":
        print(markdown(least_squares(), 1))
    elif options.item == "draw":
        draw(options.out, options.keep, options.rollouts)
    else:
        table = theorem2() if options.item == "theorem2" else bandit()
        keys = [c for c in table.columns if c not in ("T", "regret")]
        wide = table.pivot(index="T", columns=keys, values="regret")
        wide.columns = [", ".join(map(str, c)) for c in wide.columns]
        print(markdown(wide.reset_index().astype({"T": str}), 4))
        print(slopes(table).round(2).to_string())


if __name__ == "__main__":
    main()
