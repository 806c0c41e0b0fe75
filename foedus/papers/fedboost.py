"""FedBoost's experiments (Section 5 and Appendix D): Figures 3 to 5, the study with p = 1,000, and a case with classifiers.

python -m foedus.papers.fedboost figure3
python -m foedus.papers.fedboost figure4 --domains 1000
python -m foedus.papers.fedboost figure5
python -m foedus.papers.fedboost classifiers
python -m foedus.papers.fedboost draw --out docs/figures

The paper names neither the loss nor the mirror map behind its figures. With point masses, the log loss cannot be meant: an element
whose predictor is not sent has probability 0. With the squared loss and exponentiated gradient all its statements hold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import foedus as fd
from foedus.papers.fednewton import markdown

SAMPLINGS = ("all", "uniform", "weighted")
BUDGETS = (4, 8, 16, 32, 64, 100)


def point_masses(domains: int, rows: int = 20_000) -> fd.Federation:
    """Section 5.1: domain k is a client with element k only; the k-th has a share proportional to 1 / k (a power law)."""
    share = 1 / np.arange(1, domains + 1)
    sizes = np.maximum(1, np.round(rows * share / share.sum())).astype(int)
    return fd.Federation.from_clients(
        [(np.zeros((n, 1), np.float32), np.full(n, k)) for k, n in enumerate(sizes)], classes=domains
    )


def curve(fed: fd.Federation, members: fd.Predictors, rounds: int, every: int, **options: Any) -> pd.DataFrame:
    """Round and objective of the averaged weights and of the last, over all rows."""
    algorithm = fd.FedBoost(members, measure_every=every, **options)
    history = fd.run(algorithm, fed, rounds, evaluate_every=0).history
    return history[["round", "objective", "objective_last", "bytes_down"]].dropna()


def figure3(domains: int = 100, budget: int = 32, rounds: int = 1000, step: float | None = None) -> dict[str, pd.DataFrame]:
    """Loss curves: squared loss, exponentiated gradient."""
    fed, members = point_masses(domains), fd.Densities(np.eye(domains))
    curves = {}
    for sampling in SAMPLINGS:
        options = {} if sampling == "all" else {"budget": budget}
        curves[sampling] = curve(fed, members, rounds, rounds // 50, sampling=sampling, loss="squared", step=step, **options)
    return curves


def figure4(
    domains: int = 100, rounds: int = 1000, step: float | None = None, loss: str = "squared", corrected: bool = False
) -> pd.DataFrame:
    """Loss after the last round against the budget; `best` is that of the true mixture. corrected: with the unbiased gradient."""
    fed, members = point_masses(domains), fd.Densities(np.eye(domains))
    share = fed.sizes / fed.sizes.sum()
    best = 1 - (share**2).sum() if loss == "squared" else -(share * np.log(share)).sum()
    common = {"loss": loss, "step": step, "bias_correction": corrected}
    everything = curve(fed, members, rounds, rounds, sampling="all", **common)["objective"].iloc[-1]
    rows = []
    for budget in [max(1, b * domains // 100) for b in BUDGETS]:
        row: dict[str, float] = {"C": budget}
        for sampling in ("uniform", "weighted"):
            row[sampling] = curve(fed, members, rounds, rounds, sampling=sampling, budget=budget, **common)["objective"].iloc[
                -1
            ]
        rows.append(row | {"all": everything, "best": best})
    return pd.DataFrame(rows)


def shakespeare(least: int = 150, rest: float = 0.1) -> tuple[fd.Federation, fd.Densities]:
    """Section 5.2: the characters with at least so many words, a smoothed unigram model of each. (The paper: 715 characters.)"""
    fed = fd.word_federation([" ".join(user["speeches"]) for user in fd.load_speeches()], least=least, name="shakespeare")
    return fed, fd.Densities.of_clients(fed, rest)


def figure5(rounds: int = 200, step: float = 0.01, least: int = 150) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Loss curves in nats a word, C = p / 2; and perplexities on the words held out, beside two mixtures that need no learning."""
    fed, members = shakespeare(least)
    curves, rows = {}, []
    test = fed.data.y_test

    def perplexity(density: np.ndarray) -> float:
        return float(np.exp(-np.log(density[test]).mean()))

    for sampling in SAMPLINGS:
        options = {} if sampling == "all" else {"budget": len(members) / 2}
        algorithm = fd.FedBoost(members, sampling=sampling, step=step, measure_every=max(1, rounds // 20), **options)
        run = fd.run(algorithm, fed, rounds, evaluate_every=0)
        curves[sampling] = run.history[["round", "objective", "objective_last", "bytes_down"]].dropna()
        for name, weight in (("average", algorithm.result(run.state)), ("last", run.state.alpha)):
            density = (weight.float() @ members.table).numpy()
            rows.append({"mixture": f"{sampling}, {name} weights", "perplexity": perplexity(density)})
    words = np.bincount(fed.data.y_train, minlength=fed.data.classes) / len(fed.data.y_train)
    single = 0.9 * words + 0.1 / len(words)
    by_rows = fed.sizes / fed.sizes.sum()
    rows += [
        {"mixture": "uniform mixture", "perplexity": perplexity(members.table.numpy().mean(0))},
        {"mixture": "mixture by numbers of words", "perplexity": perplexity(by_rows @ members.table.numpy())},
        {"mixture": "one model of all text", "perplexity": perplexity(single)},
    ]
    return curves, pd.DataFrame(rows)


def classifiers(name: str = "satimage", clients: int = 12, rounds: int = 200, seed: int = 0) -> pd.DataFrame:
    """q = 12 classifiers of four families, each trained elsewhere on a third of the labels; clients with label shift.

    A quarter of the training rows is public and trains the predictors; the rest is the clients', split by Dirichlet(0.3) labels;
    three domains of four clients each. Accuracy and log loss on the test rows, and the largest domain loss.
    """
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier

    data = fd.load(name)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.y_train))
    public, private = np.split(order, [len(order) // 4])
    kinds = (
        lambda: LogisticRegression(max_iter=500),
        lambda: RandomForestClassifier(30, max_depth=8, random_state=seed),
        lambda: GaussianNB(var_smoothing=1e-3),
        lambda: KNeighborsClassifier(15),
    )
    fitted = []
    for part in range(3):
        labels = rng.permutation(data.classes)[: -(-2 * data.classes // 3)]
        known = np.isin(data.y_train[public], labels)
        # A third of the public rows of these labels, and a few of all, so that no label is unheard of.
        rows = np.concatenate((public[known][part::3], rng.choice(public, 60, replace=False)))
        fitted += [kind().fit(data.x_train[rows], data.y_train[rows]) for kind in kinds]
    members = fd.Classifiers(fitted, data.classes)
    own = fd.Data.from_arrays(
        data.x_train[private], data.y_train[private], data.x_test, data.y_test, classes=data.classes, name=name
    )
    fed = fd.split(own, "dirichlet", clients=clients, alpha=0.3, seed=seed)
    domains = [list(range(d, clients, 3)) for d in range(3)]
    rows_of = [np.concatenate([fed.client_rows(c) for c in group]) for group in domains]

    def scores(weight: torch.Tensor) -> dict[str, float]:
        def outputs(x: np.ndarray) -> np.ndarray:
            return members.mixture(weight, torch.from_numpy(x)).numpy()

        def loss(p: np.ndarray, y: np.ndarray) -> float:
            return float(-np.log(p[np.arange(len(y)), y] + 1e-4).mean())

        test = outputs(data.x_test)
        each = [loss(outputs(own.x_train[r]), own.y_train[r]) for r in rows_of]
        right = 100 * float((test.argmax(1) == data.y_test).mean())
        return {"accuracy": right, "loss": loss(test, data.y_test), "worst domain": max(each)}

    q = len(members)
    alone = [scores(torch.eye(q)[k]) for k in range(q)]
    best = max(range(q), key=lambda k: alone[k]["accuracy"])
    rows = [{"method": f"best single ({type(fitted[best]).__name__})"} | alone[best]]
    rows.append({"method": "uniform average"} | scores(torch.full((q,), 1 / q)))
    for budget in (None, 3):
        how: dict[str, Any] = {"sampling": "all"} if budget is None else {"budget": budget, "explore": 0.1}
        label = "all sent" if budget is None else f"C = {budget}"
        how |= {"floor": 1e-4, "measure_every": 0}
        for method, algorithm in {
            "FedBoost": fd.FedBoost(members, **how),
            "AFLBoost": fd.AFLBoost(members, domains=domains, **how),
        }.items():
            run = fd.run(algorithm, fed, rounds, seed=seed, evaluate_every=0)
            sent = run.history.bytes_down.iloc[-1] / 1e3 / rounds / clients
            rows.append({"method": f"{method}, {label}"} | scores(algorithm.result(run.state)) | {"kB down": sent})
    return pd.DataFrame(rows)


def draw(path: Path) -> None:
    """Figures 3 to 5 in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    colors = {"all": "black", "uniform": "tab:orange", "weighted": "tab:blue"}
    for name, table in figure3().items():
        places[0].plot(table["round"], table["objective"], color=colors[name], label=name)
    places[0].set(title="Figure 3: point masses, p = 100, C = 32", xlabel="round", ylabel="squared loss")
    table = figure4()
    for name in ("uniform", "weighted", "all"):
        places[1].plot(table["C"], table[name], "o-" if name != "all" else "--", color=colors[name], label=name)
    places[1].set(title="Figure 4: after 1,000 rounds", xlabel="C", ylabel="squared loss")
    for name, table in figure5()[0].items():
        places[2].plot(table["round"], table["objective_last"], color=colors[name], label=name)
    places[2].set(title="Figure 5: Shakespeare, C = p / 2", xlabel="round", ylabel="nats a word")
    for place in places:
        place.legend(title="sampling")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m foedus.papers.fedboost", description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=["figure3", "figure4", "figure5", "classifiers", "draw"])
    parser.add_argument("--domains", type=int, default=100, help="of the synthetic set")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--step", type=float, help="eta, if not that of Theorem 2 (Figure 5: 0.01)")
    parser.add_argument("--loss", default="squared", choices=["squared", "log"])
    parser.add_argument("--corrected", action="store_true", help="Figure 4 with the unbiased gradient of Section 4.2")
    parser.add_argument("--data", default="satimage", help="of the classifiers")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the picture")
    options = parser.parse_args()
    more = {k: v for k, v in (("rounds", options.rounds), ("step", options.step)) if v is not None}
    if options.item == "figure3":
        curves = figure3(options.domains, budget=round(0.32 * options.domains), **more)
        print(markdown(_side_by_side(curves, "objective"), 5))
    elif options.item == "figure4":
        print(markdown(figure4(options.domains, loss=options.loss, corrected=options.corrected, **more), 5))
    elif options.item == "figure5":
        curves, table = figure5(**more)
        for column in ("objective", "objective_last"):
            print(f"\n{column}, nats a word\n" + markdown(_side_by_side(curves, column), 4))
        print("\n" + markdown(table, 1))
    elif options.item == "classifiers":
        print(markdown(classifiers(options.data, **more), 3))
    else:
        draw(options.out / "fedboost.svg")


def _side_by_side(curves: dict[str, pd.DataFrame], column: str) -> pd.DataFrame:
    shown = pd.DataFrame({name: table.set_index("round")[column] for name, table in curves.items()}).reset_index()
    return shown[shown["round"] % (shown["round"].max() // 5) == 0].astype({"round": str})


if __name__ == "__main__":
    main()
