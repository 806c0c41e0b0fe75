"""FedFW's experiments (Section 5): Tables 1 to 3 under two protocols, Figures 2 to 4, the penalty against a grid, and bytes.

python -m foedus.papers.fedfw table1 --protocol described --seeds 3
python -m foedus.papers.fedfw table1 --protocol published --sets synthetic
python -m foedus.papers.fedfw figures --out docs/figures
python -m foedus.papers.fedfw penalty --sets digits letter
python -m foedus.papers.fedfw bytes

The tables come twice, because what the paper describes is not what stands behind its numbers.

"described": Algorithm 1 with full gradients (mini-batches in Table 3), one ball of radius 10 over all parameters, 10 clients and
100 rounds (100 clients and 300 rounds in Table 3), penalty="auto".

"published": what the authors' public code does. A round makes ceil(n / 64) Frank-Wolfe steps over a client's rows in their stored
order, and steps and penalties are those of the number of steps made so far; a client begins each round at the centre, so its own
model is overwritten, and sends its model; every parameter tensor has its own ball, of radius 10 (100 for L1 and MNIST); pixels are
scaled to [-1, 1]; training and test rows are pooled and split 75 to 25; "IID synthetic" is Synthetic(0.5, 0.5) with its natural
clients, "non-IID synthetic" the same with 3 classes, and its network has one hidden layer of 20; the branch of FedFW+ never runs,
so its rows are FedFW's again; FedDR makes one mini-batch step a round, adds what clients send to the projected model, and projects
onto an L1 ball by rescaling. A published number is the best test accuracy of 1,000 rounds (300 in Table 3).

Both protocols report the last and the best accuracy. Not known, and chosen here: lambda_0 = 1e-3, and FedDR's step of 0.1 and alpha
of 0.1 under "published"; how rows are dealt to clients (evenly, or by labels); the seeds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import foedus as fd
from foedus.algorithms.feddr import FedDR
from foedus.algorithms.fedfw import ConstrainedTraining
from foedus.core import tree
from foedus.core.algorithm import Client
from foedus.core.batching import batched
from foedus.core.clients import Clients
from foedus.core.rows import take
from foedus.core.tree import State
from foedus.geometry import domain_of
from foedus.models.base import Params
from foedus.models.losses import loss_for
from foedus.models.training import gradient_of
from foedus.papers.fednewton import markdown

RADIUS, BATCH, CLIENTS = 10.0, 64, 10


# -- what the authors' code does ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedFedFW(ConstrainedTraining):
    """FedFW as in the authors' code; see the module. With `averaged`, gradients are averaged as in FedFW-sto (rho of Theorem 3)."""

    penalty: float = 1e-3
    batch_size: int = BATCH
    averaged: bool = False

    def init(self, client: Client) -> dict[str, Any]:
        x = self.first(client.spec, client.shared)
        return {"made": torch.zeros(()), "d": tree.zeros_like(x) if self.averaged else {}}

    def sweep(self, client: Client, x: Params, share: float) -> tuple[Params, dict[str, Any]]:
        """As many Frank-Wolfe steps as the client has mini-batches, from the centre; the model is sent."""
        data, loss = client.data, loss_for(self.loss, client.spec.classes)
        args = {"x": x, "index": data.index, "weight": data.weight, **client.state}
        return _sweep(args, (self, loss, data.table_x, data.table_y, share))

    def start(self, clients: Clients) -> State:
        return State(center=self.first(clients.spec, clients.shared), spec=clients.spec)

    def round(self, clients: Clients, state: State) -> State:
        return state.replace(center=clients.mean(self.sweep, weights="uniform", x=state.center, share=1 / clients.total))


@batched
def _sweep(args: dict[str, Any], shared: tuple) -> tuple[Params, dict[str, Any]]:
    how, loss, table_x, table_y, share = shared
    center, index, weight, made, d = (args[k] for k in ("x", "index", "weight", "made", "d"))
    x, domain, slope = center, domain_of(how.domain), gradient_of(how.model, loss, len(made))
    for rows, real in zip(index.split(how.batch_size, 1), weight.split(how.batch_size, 1), strict=True):
        count = real.sum(1, keepdim=True)
        going = (count > 0).to(made.dtype).squeeze(1)
        inputs = take(table_x, rows)
        inputs = inputs.flatten(2) if how.model.closed_form else inputs
        g = slope(x, inputs, take(table_y, rows), real / count.clamp(min=1))
        made = made + going
        if how.averaged:
            eta, pull, rho = 9 / (made + 8), how.penalty * (made + 8).sqrt(), 4 / (made + 7) ** (2 / 3)
            rho = rho * going
            d = tree.map(lambda d, g: d + _each(rho, d) * (share * g - d), d, g)  # noqa: B023 - used at once
            g = d
        else:
            eta, pull, g = 2 / (made + 1), how.penalty * (made + 1).sqrt(), tree.scale(g, share)
        g = tree.map(lambda g, x, c: g + _each(pull, x) * (x - c), g, x, center)  # noqa: B023
        point = domain.dense(domain.lmo(g, batch=1), {k: v[0] for k, v in x.items()})
        eta = eta * going
        x = tree.map(lambda x, s: x + _each(eta, x) * (s - x), x, point)  # noqa: B023
    return x, {"made": made, "d": d}


def _each(v: Tensor, like: Tensor) -> Tensor:
    """A number for each client, to multiply a tensor of them."""
    return v.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class PublishedFedDR(FedDR):
    """FedDR as in the authors' code: one mini-batch step from the last x_i, and a server that adds to the projected model.

    y_i <- y_i + alpha (x - x_i);   x_i <- x_i - lr (grad f_i(x_i; batch) + alpha (x_i - y_i));   h_i = 2 x_i - y_i
    server:   x <- "projection" of (x + mean of the changes of h_i);  for an L1 ball, x scaled down to the radius
    """

    alpha: float = 0.1

    def init(self, client: Client) -> dict[str, Any]:
        return {**super().init(client), "made": torch.zeros((), dtype=torch.int64)}

    def train(self, client: Client, w: Params) -> tuple[Params, dict[str, Any]]:
        old, data = client.state, client.data
        y = tree.map(lambda y, w, x: y + self.alpha * (w - x), old["y"], w, old["x"])
        # The next 64 rows in stored order. Near the end they wrap around: the last batch is as large as the others.
        picked = (old["made"] * self.batch_size + torch.arange(self.batch_size)) % data.count.long()
        loss = loss_for(self.loss, client.spec.classes)
        rows = {"index": data.index.gather(0, picked), "params": old["x"]}
        g = _slope(rows, (self.model, loss, data.table_x, data.table_y))
        x = tree.map(lambda x, g, y: x - self.lr * (g + self.alpha * (x - y)), old["x"], g, y)
        move = tree.map(lambda x, y, x0, y0: 2 * (x - x0) - (y - y0), x, y, old["x"], old["y"])
        return move, {"x": x, "y": y, "made": old["made"] + 1}

    def round(self, clients: Clients, state: State) -> State:
        w = tree.add(state.w, clients.mean(self.train, weights="uniform", w=state.w))
        order = 1 if isinstance(self.domain, fd.L1Ball) else 2
        norm = torch.linalg.vector_norm(torch.cat([v.flatten() for v in w.values()]), order)
        return state.replace(w=tree.scale(w, min(1.0, self.domain.radius / float(norm)))) if norm > 0 else state.replace(w=w)


@batched
def _slope(args: dict[str, Any], shared: tuple) -> Params:
    model, loss, table_x, table_y = shared
    x = take(table_x, args["index"])
    x = x.flatten(2) if model.closed_form else x
    even = torch.full(args["index"].shape, 1 / args["index"].shape[1])
    return gradient_of(model, loss, len(x))(args["params"], x, take(table_y, args["index"]), even)


# -- the tables ----------------------------------------------------------------------------------------------------------------

CNN = fd.CNN(channels=(32, 64), hidden=(128,))

PUBLISHED = {
    ("table1", "mnist", "l2"): {"iid": (89.59, 86.96, 86.50), "non-iid": (83.72, 86.95, 86.98)},
    ("table1", "synthetic", "l2"): {"iid": (78.24, 80.20, 79.96), "non-iid": (92.97, 94.81, 94.56)},
    ("table1", "cifar10", "l2"): {"iid": (39.95, 36.30, 36.30), "non-iid": (37.79, 38.13, 37.20)},
    ("table1", "mnist", "l1"): {"iid": (72.18, 78.07, 69.17), "non-iid": (74.29, 80.54, 71.32)},
    ("table1", "synthetic", "l1"): {"iid": (79.00, 81.63, 81.92), "non-iid": (93.81, 90.84, 91.20)},
    ("table1", "cifar10", "l1"): {"iid": (23.25, 21.86, 21.99), "non-iid": (24.77, 25.08, 25.16)},
    ("table2", "mnist", "l2"): {"iid": (96.89, 95.87, 95.05), "non-iid": (88.93, 92.70, 91.79)},
    ("table2", "synthetic", "l2"): {"iid": (75.96, 81.70, 81.96), "non-iid": (93.85, 96.13, 96.08)},
    ("table2", "mnist", "l1"): {"iid": (11.72, 23.88, 20.40), "non-iid": (16.75, 37.62, 36.27)},
    ("table2", "synthetic", "l1"): {"iid": (78.59, 75.52, 76.44), "non-iid": (93.51, 91.53, 91.96)},
    ("table3", "emnist10", "l2"): {"iid": (92.18, 93.79), "non-iid": (85.70, 91.88)},
    ("table3", "synthetic", "l2"): {"iid": (67.68, 72.01), "non-iid": (84.70, 87.32)},
    ("table3", "cifar10", "l2"): {"iid": (36.39, 38.52), "non-iid": (34.91, 37.83)},
}
"""Test accuracy in percent of FedDR, FedFW and FedFW+, or of FedDR and FedFW-sto (Table 3; EMNIST-62 is not at hand)."""

METHODS = ("FedDR", "FedFW", "FedFW+")
FILES = {"mnist": "mnist", "cifar10": "cifar10_sub", "emnist10": "emnist_digits10k"}
ROWS = {("table2", "mnist"): 600}
"""Training rows where not all are used (and 1,000 test rows): convolutions on a CPU. The full scale is `--rows 60000`."""


@dataclass(frozen=True)
class Cell:
    """One data set, set of parameters and split of one table."""

    table: str
    data: str
    ball: str
    split: str

    @property
    def clients(self) -> int:
        return 100 if self.table == "table3" else CLIENTS

    @property
    def domain(self) -> fd.L1Ball | fd.L2Ball:
        return fd.L1Ball(RADIUS) if self.ball == "l1" else fd.L2Ball(RADIUS)

    def model(self, protocol: str) -> Any:
        if self.table != "table2":
            return fd.Linear()
        if self.data == "mnist":
            return CNN
        return fd.MLP((20,)) if protocol == "published" else fd.MLP((100, 100))


def federation(cell: Cell, protocol: str, seed: int, rows: int | None = None) -> fd.Federation:
    """The clients of a cell."""
    if cell.data == "synthetic":
        three = cell.split == "non-iid"
        more = {"classes": 3} if three and protocol == "published" else {"per_client": 3} if three else {}
        return fd.synthetic_leaf(0.5, 0.5, clients=cell.clients, rows=100 * cell.clients * 5, seed=seed, test=0.25, **more)
    data = fd.load(FILES[cell.data])
    if protocol == "published":
        x, y = (np.concatenate(pair) for pair in ((data.x_train, data.x_test), (data.y_train, data.y_test)))
        order = np.random.default_rng(seed).permutation(len(y))
        test, train = np.split(order, [len(y) // 4])
        x = 2 * x - 1
        data = fd.Data.from_arrays(x[train], y[train], x[test], y[test], classes=data.classes, name=data.name)
    rows = rows or ROWS.get((cell.table, cell.data))
    if rows is not None and rows < len(data.x_train):
        keep = np.random.default_rng(seed).permutation(len(data.x_train))[:rows]
        data = replace(data, x_train=data.x_train[keep], y_train=data.y_train[keep])
        if cell.table == "table2":
            data = replace(data, x_test=data.x_test[:1000], y_test=data.y_test[:1000])
    if cell.split == "iid":
        return fd.split(data, "iid", clients=cell.clients, seed=seed)
    return fd.split(data, "labels", clients=cell.clients, per_client=3, seed=seed)


def described(cell: Cell, rounds: int) -> dict[str, fd.Algorithm]:
    """The paper's own words. FedDR's step is not in it; of 1, 0.3, 0.1 and 0.03 this one fails nowhere."""
    begin = {"begin": "projected"} if cell.table == "table2" else {}
    model, domain = cell.model("described"), cell.domain
    batch = {"batch_size": BATCH} if cell.table == "table3" else {"batch_size": None}
    rows = {"FedDR": FedDR(model, domain=domain, lr=0.1, steps=1, **batch)}
    if cell.table == "table3":
        return rows | {"FedFW-sto": fd.FedFW(model, domain, variant="stochastic", batch_size=BATCH, measure_every=0)}
    pace = {"schedule": "nonconvex", "horizon": rounds} if cell.table == "table2" else {}
    plain = fd.FedFW(model, domain, measure_every=0, **begin, **pace)
    return rows | {"FedFW": plain, "FedFW+": replace(plain, variant="augmented")}


def published(cell: Cell) -> dict[str, fd.Algorithm]:
    """The authors' code."""
    model, ball = cell.model("published"), cell.domain
    if cell.ball == "l1" and cell.data == "mnist":
        ball = fd.L1Ball(100.0)
    rows = {"FedDR": PublishedFedDR(model, domain=ball, lr=0.1, steps=1, batch_size=BATCH)}
    averaged = cell.table == "table3"
    ours = PublishedFedFW(model, fd.PerLayer(ball), begin="projected", averaged=averaged)
    return rows | {"FedFW-sto" if averaged else "FedFW": ours}


def usual_rounds(cell: Cell, protocol: str) -> int:
    return 300 if cell.table == "table3" else 100 if protocol == "described" else 1000


def run_cell(cell: Cell, protocol: str, seed: int, rounds: int | None = None, rows: int | None = None) -> list[dict]:
    """Last and best accuracy, in percent, of every method of a cell; one dict a method."""
    rounds = rounds or usual_rounds(cell, protocol)
    fed = federation(cell, protocol, seed, rows)
    methods = described(cell, rounds) if protocol == "described" else published(cell)
    numbers = PUBLISHED[cell.table, cell.data, cell.ball][cell.split]
    known = dict(zip(("FedDR", "FedFW-sto") if len(numbers) == 2 else METHODS, numbers, strict=True))
    found = []
    for name, algorithm in methods.items():
        try:
            history = fd.run(algorithm, fed, rounds, seed=seed).history
        except fd.DivergenceError as error:  # the last numbers that it had
            history = error.run.history
        accuracy = 100 * history["accuracy"].iloc[1:]
        names = {"table": cell.table, "protocol": protocol, "data": cell.data, "ball": cell.ball, "split": cell.split}
        names |= {"method": name, "seed": seed, "rounds": rounds, "rows": rows or 0}
        found.append({**names, "paper": known[name], "last": accuracy.iloc[-1], "best": accuracy.max()})
    return found


def table(
    name: str,
    protocol: str,
    *,
    sets: list[str] | None = None,
    balls: list[str] | None = None,
    splits: list[str] | None = None,
    seeds: int = 1,
    rounds: int | None = None,
    rows: int | None = None,
    out: Path | None = None,
) -> pd.DataFrame:
    """All cells of a table, means over seeds; finished cells are read from the file `out`, where there is one."""
    unknown = set(sets or []) - {data for which, data, _ in PUBLISHED if which == name}
    if unknown or seeds < 1:
        raise fd.ConfigError(
            f"{name} has no data set {', '.join(sorted(unknown))}" if unknown else f"seeds={seeds} must be positive"
        )
    done = pd.read_csv(out).to_dict("records") if out is not None and out.exists() else []
    named = ("table", "protocol", "data", "ball", "split", "seed", "rounds", "rows")
    have = {tuple(r[k] for k in named) for r in done}
    wanted = []
    for which, data, ball in PUBLISHED:
        for split in ("iid", "non-iid"):
            cell = Cell(which, data, ball, split)
            chosen = data in (sets or [data]) and ball in (balls or [ball]) and split in (splits or [split])
            for seed in range(seeds if which == name and chosen else 0):
                key = (which, protocol, data, ball, split, seed, rounds or usual_rounds(cell, protocol), rows or 0)
                wanted.append(key)
                if key in have:
                    continue
                done += run_cell(cell, protocol, seed, rounds, rows)
                if out is not None:
                    pd.DataFrame(done).to_csv(out, index=False)
                print(pd.DataFrame(done).tail(3).round(2).to_string(index=False, header=False), flush=True)
    frame = pd.DataFrame([r for r in done if tuple(r[k] for k in named) in wanted])
    keys = ["ball", "data", "split", "method"]
    means = frame.groupby(keys, sort=False)[["paper", "last", "best"]].mean()
    spread = frame.groupby(keys, sort=False)["last"].std(ddof=0).rename("+-")
    return means.join(spread)[["paper", "last", "+-", "best"]].reset_index()


# -- the figures -----------------------------------------------------------------------------------------------------------------

PARTS = (0.1, 0.2, 0.5, 1.0)
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)


def figure2(rounds: int = 300, seed: int = 0) -> dict[str, dict[str, pd.DataFrame]]:
    """Participation: softmax regression on synthetic data (3 classes, 20 clients), L1 ball, two penalties."""
    fed = fd.synthetic_leaf(0.5, 0.5, clients=20, classes=3, rows=10_000, seed=seed, test=0.25)
    panels: dict[str, dict[str, pd.DataFrame]] = {}
    for penalty in (1e-3, 1e-2):
        algorithm = fd.FedFW(fd.Linear(), fd.L1Ball(RADIUS), penalty=penalty, measure_every=0)
        panels[f"Figure 2, lambda_0 = {penalty:g}"] = {
            f"p = {p:g}": fd.run(algorithm, fed, rounds, seed=seed, participation=p, evaluate_every=5).history for p in PARTS
        }
    return panels


def figure3(rounds: int = 300, seed: int = 0) -> dict[str, dict[str, pd.DataFrame]]:
    """Participation: a network with two hidden layers on synthetic data, L2 ball, lambda_t = 1e-3 throughout.

    Of this, lambda_0 = lambda_t / T^(1/3) is the step of FedFW+'s dual variables, as in Algorithm 1.
    """
    fed = fd.synthetic_leaf(0.5, 0.5, clients=20, classes=3, rows=10_000, seed=seed, test=0.25)
    panels: dict[str, dict[str, pd.DataFrame]] = {}
    for name, variant in (("FedFW", "penalty"), ("FedFW+", "augmented")):
        panels[f"Figure 3, {name}"] = {}
        for p in PARTS:
            horizon = rounds if p == 1 else p * rounds + 1
            algorithm = fd.FedFW(
                fd.MLP((100, 100)),
                fd.L2Ball(RADIUS),
                begin="projected",
                variant=variant,
                schedule="nonconvex",
                horizon=rounds,
                penalty=1e-3 / horizon ** (1 / 3),
                measure_every=0,
            )
            history = fd.run(algorithm, fed, rounds, seed=seed, participation=p, evaluate_every=5).history
            panels[f"Figure 3, {name}"][f"p = {p:g}"] = history
    return panels


def figure4(rounds: int = 100, seed: int = 0) -> dict[str, dict[str, pd.DataFrame]]:
    """The penalty: softmax regression on MNIST (12,000 rows) with p = 0.5, and a network on synthetic data with p = 1."""
    images = federation(Cell("table1", "mnist", "l1", "non-iid"), "described", seed, rows=12_000)
    rows = federation(Cell("table2", "synthetic", "l1", "non-iid"), "described", seed)
    cases = {
        "(a)": (fd.FedFW(fd.Linear(), fd.L1Ball(RADIUS)), images, 0.5),
        "(b)": (fd.FedFW(fd.Linear(), fd.L2Ball(RADIUS)), images, 0.5),
    }
    for name, ball in (("(c)", fd.L1Ball(RADIUS)), ("(d)", fd.L2Ball(RADIUS))):
        net = fd.FedFW(fd.MLP((100, 100)), ball, begin="projected", schedule="nonconvex", horizon=rounds)
        cases[name] = (net, rows, 1.0)
    panels: dict[str, dict[str, pd.DataFrame]] = {}
    for name, (algorithm, fed, p) in cases.items():
        panels[f"Figure 4 {name}"] = {
            f"lambda_0 = {v if v == 'auto' else format(v, 'g')}": fd.run(
                replace(algorithm, penalty=v), fed, rounds, seed=seed, participation=p
            ).history
            for v in (*PENALTIES, "auto")
        }
    return panels


def draw(path: Path, quick: bool = False) -> pd.DataFrame:
    """Figures 2 to 4 in one picture; returns the last values of every curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    few = {"rounds": 20} if quick else {}
    panels = figure2(**few) | figure3(**few) | figure4(**few)
    shown = [(title, column) for title in panels if "4" not in title for column in ("accuracy", "loss")]
    shown += [(title, column) for column in ("fw_gap", "accuracy") for title in panels if "Figure 4" in title]
    figure, places = pyplot.subplots(4, 4, figsize=(15, 12), constrained_layout=True)
    for place, (title, column) in zip(places.flat, shown, strict=True):
        for label, history in panels[title].items():
            kept = history[history[column].notna() & (history["round"] > 0)]
            place.plot(kept["round"], kept[column], label=label, linewidth=1.3, color="black" if "auto" in label else None)
        place.set(xlabel="round", ylabel=column, title=title)
        if column != "accuracy":
            place.set_yscale("log")
        place.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    rows = [
        {"panel": title, "curve": label, **{c: h[c].dropna().iloc[-1] for c in ("accuracy", "loss", "fw_gap") if c in h}}
        for title, curves in panels.items()
        for label, h in curves.items()
    ]
    return pd.DataFrame(rows)


# -- the penalty -----------------------------------------------------------------------------------------------------------------

SETS = ("digits", "dna", "letter", "pendigits", "satimage", "shuttle", "usps", "mnist", "fashion_mnist_sub")
GRID = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def penalty(name: str, rounds: int = 300, seed: int = 0) -> pd.DataFrame:
    """Accuracy after the last round with penalty="auto", and with each of a grid: L1 and L2 ball, IID and three labels a client."""
    data = fd.load(name)
    if len(data.x_train) > 6000:
        keep = np.random.default_rng(seed).permutation(len(data.x_train))[:6000]
        data = replace(data, x_train=data.x_train[keep], y_train=data.y_train[keep])
    rows = []
    for ball in (fd.L1Ball(RADIUS), fd.L2Ball(RADIUS)):
        for split, options in (("iid", {}), ("labels", {"per_client": min(3, data.classes - 1)})):
            fed = fd.split(data, split, clients=CLIENTS, seed=seed, **options)
            row: dict[str, Any] = {"data": name, "ball": type(ball).__name__, "split": split}
            for value in ("auto", *GRID):
                algorithm = fd.FedFW(fd.Linear(), ball, penalty=value, measure_every=0)
                run = fd.run(algorithm, fed, rounds, seed=seed, evaluate_every=rounds)
                row |= {"lambda_0": run.history["penalty"].iloc[0]} if value == "auto" else {}
                row[f"{value}" if value == "auto" else f"{value:g}"] = 100 * run.history["accuracy"].iloc[-1]
            rows.append(row)
    return pd.DataFrame(rows)


# -- bytes -----------------------------------------------------------------------------------------------------------------------


def traffic(name: str = "digits", clients: int = CLIENTS, rounds: int = 20, seed: int = 0) -> pd.DataFrame:
    """Bytes that a client sends and receives in a round, once under way, over different sets; FedAvg beside them."""
    data = fd.load(name)
    fed = fd.split(data, "labels", clients=clients, per_client=min(3, data.classes - 1), seed=seed)
    sets = {
        "L1Ball": fd.L1Ball(RADIUS),
        "KSparse, k = 10": fd.KSparse(10, 1.0),
        "LInfBall": fd.LInfBall(0.1),
        "L2Ball": fd.L2Ball(RADIUS),
        "NuclearBall, bias in an L2Ball": fd.PerLayer({"weight": fd.NuclearBall(RADIUS), "bias": fd.L2Ball(1.0)}),
    }
    methods: dict[str, fd.Algorithm] = {f"FedFW, {k}": fd.FedFW(fd.Linear(), v, measure_every=0) for k, v in sets.items()}
    rows = []
    for method, algorithm in (methods | {"FedAvg": fd.FedAvg(fd.Linear(), lr=0.1)}).items():
        history = fd.run(algorithm, fed, rounds, seed=seed, evaluate_every=rounds).history
        half = rounds // 2
        per_round = (history.iloc[-1] - history.iloc[half])[["bytes_up", "bytes_down"]] / (rounds - half) / clients
        rows.append({"data": name, "method": method, "up": per_round["bytes_up"], "down": per_round["bytes_down"]})
    table = pd.DataFrame(rows)
    table["FedAvg / up"] = table["up"].iloc[-1] / table["up"]
    table["FedAvg / down"] = table["down"].iloc[-1] / table["down"]
    return table


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m foedus.papers.fedfw", description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=["table1", "table2", "table3", "figures", "penalty", "bytes"])
    parser.add_argument("--protocol", default="described", choices=["described", "published"])
    parser.add_argument("--sets", nargs="+", help="data sets of a table, or of the comparison of penalties")
    parser.add_argument("--balls", nargs="+", choices=["l1", "l2"])
    parser.add_argument("--splits", nargs="+", choices=["iid", "non-iid"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="rounds, if not the paper's")
    parser.add_argument("--rows", type=int, help="training rows, if not all")
    parser.add_argument("--quick", action="store_true", help="figures of a few rounds")
    parser.add_argument("--out", type=Path, help="tables: file of finished cells, to go on from; figures: folder")
    options = parser.parse_args()
    if options.item == "figures":
        folder = options.out or Path()
        print(markdown(draw(folder / "fedfw.svg", options.quick), 4))
    elif options.item == "bytes":
        whole = pd.concat([traffic(name) for name in options.sets or ("digits", "mnist")])
        whole[["up", "down"]] = whole[["up", "down"]].map("{:,.0f}".format)
        print(markdown(whole, 1))
    elif options.item == "penalty":
        frames = []
        for name in options.sets or SETS:
            frames.append(penalty(name, options.rounds or 300))
            print(frames[-1].round(2).to_string(index=False), flush=True)
        whole = pd.concat(frames)
        whole["lambda_0"] = whole["lambda_0"].map("{:.1e}".format)
        print(markdown(whole, 1))
    else:
        which = {k: getattr(options, k) for k in ("sets", "balls", "splits", "seeds", "rounds", "rows", "out")}
        print(markdown(table(options.item, options.protocol, **which), 2))


if __name__ == "__main__":
    main()
