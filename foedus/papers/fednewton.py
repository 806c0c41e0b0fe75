"""FedNewton's experiments (Section 7): Table 3 and Figures 3 to 5, with conjugate gradients added to each.

python -m foedus.papers.fednewton table3 --sets letter usps --seeds 3
python -m foedus.papers.fednewton figures --out docs/figures
python -m foedus.papers.fednewton select --sets letter
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import foedus as fd

FEATURES, CLIENTS = 2000, 10
SHOWN = (1, 2, 4, 8)


@dataclass(frozen=True)
class Setting:
    """What `select` chose: bandwidth, reg for KRR and cg, reg for the paper's own methods on each split.

    alpha: of the Dirichlet split, and published: the best accuracy of the paper's Table 3, both from its tables.
    """

    bandwidth: float
    reg: float
    iid: float
    dirichlet: float
    alpha: float
    published: float


TABLE3 = {
    "dna": Setting(8.0, 1e-3, 1e-3, 1e-3, 1.0, 92.23),
    "letter": Setting(2.0, 1e-6, 1e-4, 1e-3, 0.5, 77.30),
    "pendigits": Setting(3.0, 1e-6, 1e-4, 1e-2, 1.0, 97.31),
    "satimage": Setting(2.0, 1e-4, 1e-3, 1e-2, 1.0, 88.49),
    "shuttle": Setting(0.5, 1e-6, 1e-4, 1e-2, 0.5, 98.54),
    "usps": Setting(8.0, 1e-4, 1e-3, 1e-2, 0.5, 93.49),
    "mnist": Setting(8.0, 1e-6, 1e-5, 1e-2, 0.5, 95.53),
}
"""The paper splits by Dirichlet(1) or Dirichlet(0.5); which of its settings belongs to which set is in its Table 2."""


def select(name: str, seed: int = 0) -> pd.DataFrame:
    """Accuracy of KRR for a grid of bandwidths and reg on a fifth of the *training* rows, held out; test rows are not touched.

    `chosen` marks the largest reg within one standard error of the best, and for it the best bandwidth.
    """
    data = fd.load(name)
    order = np.random.default_rng(seed).permutation(len(data.x_train))
    held, used = np.split(order, [len(order) // 5])
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    rows = []
    for bandwidth in (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0):
        phi = fd.RandomFourier(FEATURES, bandwidth, seed=seed)
        gram = torch.zeros(FEATURES, FEATURES, dtype=torch.float64)
        right = torch.zeros(FEATURES, data.classes, dtype=torch.float64)
        for part in torch.from_numpy(used).split(8192):
            block = phi(x[part])
            gram += block.mT @ block / len(used)
            right += block.mT @ torch.nn.functional.one_hot(y[part], data.classes).double() / len(used)
        values, vectors = torch.linalg.eigh(gram)
        right, outside = vectors.mT @ right, phi(x[held]) @ vectors
        for reg in 10.0 ** -np.arange(1, 10):
            guess = outside @ (right / (values.clamp(min=0) + reg).unsqueeze(1))
            rows.append({"bandwidth": bandwidth, "reg": reg, "accuracy": float((guess.argmax(1) == y[held]).double().mean())})
    grid = pd.DataFrame(rows)
    best = grid.accuracy.max()
    close = grid[grid.accuracy >= best - (best * (1 - best) / len(held)) ** 0.5]
    grid["chosen"] = grid.index == close.sort_values(["reg", "accuracy"]).index[-1]
    return grid


def select_newton(name: str, split: str, seed: int = 0) -> pd.DataFrame:
    """Accuracy of plain FedNewton after 4 rounds for a row of reg, on the same held-out training rows, bandwidth as chosen."""
    data, setting = fd.load(name), TABLE3[name]
    order = np.random.default_rng(seed).permutation(len(data.x_train))
    held, used = np.split(order, [len(order) // 5])
    x, y = data.x_train, data.y_train
    part = fd.Data.from_arrays(x[used], y[used], x[held], y[held], classes=data.classes)
    fed = fd.split(part, split, clients=CLIENTS, seed=seed, **({"alpha": setting.alpha} if split == "dirichlet" else {}))
    rows = []
    for reg in 10.0 ** -np.arange(1, 8):
        found = _accuracies(fd.FedNewton(fd.RandomFourier(FEATURES, setting.bandwidth), reg), fed, seed, rounds=4)
        rows.append({"reg": reg, "accuracy": found[4] if len(found) > 4 else 0.0})
    return pd.DataFrame(rows)


def table3(name: str, split: str, seed: int) -> dict[str, float]:
    """One set, one split, one seed: accuracy of every method, in percent."""
    setting = TABLE3[name]
    options = {"alpha": setting.alpha} if split == "dirichlet" else {}
    fed = fd.split(fd.load(name), split, clients=CLIENTS, seed=seed, **options)
    phi, reg = fd.RandomFourier(FEATURES, setting.bandwidth), getattr(setting, split)
    newton = _accuracies(fd.FedNewton(phi, reg), fed, seed)
    cg = _accuracies(fd.FedNewton(phi, setting.reg, solver="cg"), fed, seed)
    found = {"DKRR": newton[0]}
    found["FedAvg"] = _accuracies(fd.RidgeFedAvg(phi, reg, lr=1.0), fed, seed)[-1]
    found["FedProx"] = _accuracies(fd.RidgeFedProx(phi, reg, mu=reg), fed, seed)[-1]
    found |= {f"Newton {t}": newton[t] if t < len(newton) else float("nan") for t in SHOWN}
    found |= {f"cg {t}": cg[t] for t in SHOWN}
    found["KRR"] = _accuracies(fd.KRR(phi, setting.reg), fed, seed, rounds=0)[0]
    return {k: 100 * v for k, v in found.items()}


def _accuracies(algorithm: fd.Algorithm, fed: fd.Federation, seed: int, rounds: int = SHOWN[-1]) -> list[float]:
    return _history(algorithm, fed, seed, rounds)["accuracy"].tolist()


def _history(algorithm: fd.Algorithm, fed: fd.Federation, seed: int, rounds: int) -> pd.DataFrame:
    """The history, of the rounds before where it ends in numbers that are not finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fd.DivergenceWarning)
        try:
            return fd.run(algorithm, fed, rounds, seed=seed).history
        except fd.DivergenceError as error:
            return error.run.history


# -- synthetic data: Figures 3 to 5 --------------------------------------------------------------------------------------

SYNTHETIC = fd.RandomFourier(200, bandwidth=0.1**-0.5)
"""Table 2: M = 200, sigma^2 = 0.1, read as the variance of Omega (as 1 / that, KRR would learn nothing: its error is 10)."""

REGS = (1e-6, 1e-4)
"""Table 2 says 1e-6. With 1e-4 plain Newton needs about 280 rows a client to converge, where the paper saw 260."""


def methods(reg: float) -> dict[str, fd.Algorithm]:
    """What Figures 3 to 5 compare; lambda_prox is 0.7 lambda in Table 2."""
    return {
        "Newton": fd.FedNewton(SYNTHETIC, reg),
        "cg": fd.FedNewton(SYNTHETIC, reg, solver="cg"),
        "FedAvg": fd.RidgeFedAvg(SYNTHETIC, reg, lr=1.0),
        "FedProx": fd.RidgeFedProx(SYNTHETIC, reg, mu=0.7 * reg),
    }


def errors(fed: fd.Federation, reg: float, seed: int) -> dict[str, float]:
    """Mean squared error on the test rows of every method after 1, 2, 4 and 8 rounds."""
    found = {}
    for name, algorithm in methods(reg).items():
        mse = _history(algorithm, fed, seed, SHOWN[-1])["mse"].tolist()
        mse += [float("inf")] * (SHOWN[-1] + 1 - len(mse))
        found["DKRR"] = mse[0]
        found |= {f"{name} {t}": mse[t] for t in SHOWN}
    found["KRR"] = _history(fd.KRR(SYNTHETIC, reg), fed, seed, 0)["mse"][0]
    return found


def figure3(reg: float, seed: int = 0) -> pd.DataFrame:
    """Local sample size: 10,000 rows over m clients, no heterogeneity."""
    rows = []
    for m in (5, 10, 20, 30, 38, 50, 70, 100):
        fed = fd.synthetic_piecewise(0.0, 0.0, clients=m, seed=seed)
        rows.append({"rows a client": 10000 // m} | errors(fed, reg, seed))
    return pd.DataFrame(rows)


def figure4_data(reg: float, seed: int = 0) -> pd.DataFrame:
    """Covariate shift: 20 clients of 500 rows; the axis is the mean of Delta_Dj."""
    rows = []
    for alpha in (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
        fed = fd.synthetic_piecewise(alpha, 0.0, clients=20, seed=seed)
        found = fd.diagnose(fed, SYNTHETIC, reg, seed=seed)
        shift = float(found.per_client["data_shift"].mean())
        rows.append({"alpha": alpha, "data shift": shift, "radius": found.radius} | errors(fed, reg, seed))
    return pd.DataFrame(rows)


def figure4_model(reg: float, seed: int = 0) -> pd.DataFrame:
    """Concept shift: 20 clients of 500 rows; the axis is the mean of Delta_fj, of the true functions."""
    rows = []
    for beta in (0.0, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3):
        fed = fd.synthetic_piecewise(0.0, beta, clients=20, seed=seed)
        exact = fd.synthetic_piecewise(0.0, beta, clients=20, noise=0.0, seed=seed).data  # the same rows without noise
        shift = float(np.abs(exact.y_train + np.abs(exact.x_train.sum(1))).mean())
        rows.append({"beta": beta, "model shift": shift} | errors(fed, reg, seed))
    return pd.DataFrame(rows)


def figure5(reg: float, seed: int = 0, rounds: int = 20) -> pd.DataFrame:
    """Rounds, on data with covariate shift 0.01 and concept shift 0.001."""
    fed = fd.synthetic_piecewise(0.01, 0.001, clients=20, seed=seed)
    table = pd.DataFrame({"round": range(rounds + 1)})
    for name, algorithm in methods(reg).items():
        table[name] = pd.Series(_history(algorithm, fed, seed, rounds)["mse"])
    table["KRR"] = _history(fd.KRR(SYNTHETIC, reg), fed, seed, 0)["mse"][0]
    return table


FIGURES = {
    "figure3": (figure3, "rows a client", True),
    "figure4-data": (figure4_data, "data shift", False),
    "figure4-model": (figure4_model, "model shift", False),
    "figure5": (figure5, "round", False),
}
"""Each figure: how it is made, its axis, and whether that is logarithmic."""


def draw(tables: dict[tuple[float, str], pd.DataFrame], path: Path) -> None:
    """All figures, a row for each reg; curves that leave the picture diverge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"cg": "tab:blue", "Newton": "tab:red", "FedAvg": "tab:green", "FedProx": "tab:orange"}
    figure, places = pyplot.subplots(len(REGS), len(FIGURES), figsize=(15, 7), constrained_layout=True)
    for place, ((reg, name), table) in zip(places.flat, tables.items(), strict=True):
        _, axis, logarithmic = FIGURES[name]
        skipped = {axis, "alpha", "beta", "radius", *(f"{m} {t}" for m in ("FedAvg", "FedProx") for t in SHOWN[:-1])}
        for method in [c for c in table.columns if c not in skipped]:
            last = method.split()[-1]
            fade = 0.35 + 0.65 * SHOWN.index(int(last)) / 3 if last.isdigit() and "Fed" not in method else 1.0
            color = next((c for k, c in colors.items() if k in method), "black")
            style = "--" if method == "KRR" else "-"
            place.plot(table[axis], table[method], style, color=color, alpha=fade, label=method, linewidth=1.4)
        lowest = table["KRR"].min()
        place.set(xlabel=axis, ylabel="mean squared error", ylim=(0.98 * lowest, 1.35 * lowest), title=f"{name}, reg {reg:g}")
        if logarithmic:
            place.set_xscale("log")
        place.legend(fontsize=6)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def markdown(table: pd.DataFrame, digits: int) -> str:
    shown = table.map(
        lambda v: v if isinstance(v, str) else ("-" if pd.isna(v) else f"{v:.{digits}f}" if v < 1e4 else f"{v:.1e}")
    )
    lines = [shown.columns, ["---"] * len(shown.columns), *shown.to_numpy()]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m foedus.papers.fednewton", description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=["select", "table3", "figures"])
    parser.add_argument("--sets", nargs="+", default=list(TABLE3), choices=list(TABLE3), metavar="SET")
    parser.add_argument("--splits", nargs="+", default=["iid", "dirichlet"], choices=["iid", "dirichlet"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the picture")
    options = parser.parse_args()
    if options.item == "select":
        for name in options.sets:
            grid = select(name)
            print(f"\n{name}\n{grid.pivot(index='bandwidth', columns='reg', values='accuracy').round(4).to_string()}")
            print(f"chosen: {grid[grid.chosen].iloc[0].to_dict()}", flush=True)
            for split in options.splits:
                grid = select_newton(name, split)
                print(
                    f"Newton, {split}: reg {grid.reg[grid.accuracy.idxmax()]:g}\n{grid.T.to_string(header=False)}", flush=True
                )
    elif options.item == "table3":
        for split in options.splits:
            for name in options.sets:
                runs = pd.DataFrame([table3(name, split, seed) for seed in range(options.seeds)])
                row = {"set": name, "split": split, "paper's best": TABLE3[name].published}
                row |= {k: f"{runs[k].mean():.2f}±{runs[k].std(ddof=0):.2f}" for k in runs}
                print(
                    *markdown(pd.DataFrame([row]), 2).splitlines()[0 if name == options.sets[0] else 2 :], sep="\n", flush=True
                )
    else:
        tables = {}
        for reg in REGS:
            for name, (figure, _, _) in FIGURES.items():
                tables[reg, name] = figure(reg)
                print(f"\n{name}, reg {reg:g}\n{markdown(tables[reg, name], 4)}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            draw(tables, options.out / "fednewton.svg")


if __name__ == "__main__":
    main()
