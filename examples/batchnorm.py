"""BatchNorm in federated training: compare the policies of `fd.Module(net, norm=...)`.

A ResNet-8 with BatchNorm is trained on digits of eight clients. The same rows are divided in three
ways: by domain (feature skew: MNIST, USPS and EMNIST, plain and in other styles), by label
(Dirichlet, alpha = 0.1) and at random. Each policy is scored on the clients' own test rows; a
global model, if there is one, also on all test rows. There are two references: the model of
"average" after one round of training at each client, and each client alone.

The step size of each policy and partition is chosen from `LRS`, by accuracy on own test rows with
another seed. The network starts with the statistics of public images, which no client has; these
are the statistics that "frozen" keeps.

    python examples/batchnorm.py            # needs $FOEDUS_DATA; finished cells stay in results/
    python examples/batchnorm.py --quick    # scikit-learn's digits, four clients, under a minute
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

import foedus as fd
from foedus.papers.markdown import markdown
from foedus.papers.store import Cell, Store, found_in, versions

RESULTS = Path(__file__).parents[1] / "results"
POLICIES = ("average", "local", "silo", "frozen", "group", "average, fine-tuned", "alone")
SKEWS = {"features": "feature skew", "labels": "label skew", "none": "IID"}
LRS, SEEDS, TUNING_SEED = (0.1, 0.4), 3, 100

# For each client, whose digits, and in which style.
DOMAINS = (
    ("mnist", "plain"),
    ("mnist", "faint"),
    ("mnist", "noisy"),
    ("usps", "plain"),
    ("usps", "blurred"),
    ("emnist_digits10k", "plain"),
    ("emnist_digits10k", "bright"),
    ("emnist_digits10k", "blurred"),
)
QUICK = (("digits", "plain"), ("digits", "faint"), ("digits", "bright"), ("digits", "blurred"))


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, and a skip connection."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.around = nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + (x if self.around is None else self.around(x)))


class ResNet8(nn.Module):
    """ResNet-8: three blocks of `width`, 2 `width` and 4 `width` channels."""

    def __init__(self, width: int = 8, classes: int = 10):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.out = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


def styled(x: np.ndarray, style: str, rng: np.random.Generator) -> np.ndarray:
    """Images (n, 1, height, width) between 0 and 1 in one of the styles."""
    if style == "bright":
        return 0.5 + 0.5 * x
    if style == "faint":
        return 0.25 * x
    if style == "blurred":
        return F.avg_pool2d(torch.from_numpy(x), 3, 1, 1).numpy()
    if style == "noisy":
        return np.clip(x + rng.normal(0, 0.3, x.shape), 0, 1)
    return x


def images(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All digits of a set, 8 x 8 pixels between 0 and 1."""
    data = fd.load(name, scale=None)
    found = []
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        side = int(x[0].size ** 0.5)
        x = torch.from_numpy(x.reshape(-1, 1, side, side).astype(np.float32))
        if name == "usps":
            x = F.avg_pool2d((x + 1) / 2, 2)
        elif name == "digits":
            x = x / 16
        else:
            x = F.avg_pool2d(F.pad(x / 255, (2, 2, 2, 2)), 4)
        found += [x.numpy(), y]
    return tuple(found)


def rows_of(quick: bool, seed: int) -> tuple[fd.Data, torch.Tensor]:
    """The rows of all domains, no image in two of them, groups being domains; and public images."""
    domains, train, test = (QUICK, 150, 60) if quick else (DOMAINS, 100, 200)
    rng = np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray]] = {k: [] for k in ("x", "y", "xt", "yt")}
    public: list[np.ndarray] = []
    for name in dict.fromkeys(name for name, _ in domains):
        x, y, xt, yt = images(name)
        styles = [style for other, style in domains if other == name]
        order, order_test = rng.permutation(len(y)), rng.permutation(len(yt))
        some = order[: len(styles) * train].reshape(len(styles), train)
        some_test = order_test[: len(styles) * test].reshape(len(styles), test)
        public.append(x[order[some.size :][:200]])
        for style, i, j in zip(styles, some, some_test, strict=True):
            parts["x"].append(styled(x[i], style, rng))
            parts["xt"].append(styled(xt[j], style, rng))
            parts["y"].append(y[i])
            parts["yt"].append(yt[j])
    x, y, xt, yt = (np.concatenate(v) for v in parts.values())
    own, own_test = (np.repeat(np.arange(len(domains)), n) for n in (train, test))
    names = [" ".join(d) for d in domains]
    data = fd.Data.from_arrays(
        x, y, xt, yt, classes=10, name="domains", groups=own, groups_test=own_test,
        group_names=names,
    )  # fmt: skip
    return data, torch.from_numpy(np.concatenate(public))


def dealt(data: fd.Data, skew: str, seed: int) -> fd.Federation:
    """The same rows, divided among as many clients as there are domains."""
    if skew == "features":
        return fd.split(data, "natural")
    clients = len(data.group_names)
    if skew == "labels":
        return fd.split(data, "dirichlet", clients=clients, alpha=0.1, seed=seed)
    return fd.split(data, "iid", clients=clients, seed=seed)


def start(public: torch.Tensor, width: int, seed: int) -> ResNet8:
    """A network as PyTorch initializes it, with the statistics of public images."""
    torch.manual_seed(seed)
    net = ResNet8(width).train()
    with torch.no_grad():
        for _ in range(50):  # the average over mini-batches forgets 1 - 0.9^50 of the start
            net(public)
    return net.eval()


def algorithm_of(policy: str, net: nn.Module, lr: float) -> fd.FedAvg | fd.Independent:
    how: dict[str, Any] = {"lr": lr, "epochs": 1, "batch_size": 10, "clip": 1.0}
    if policy == "alone":
        return fd.Independent(fd.Module(net, norm="average"), **how)
    if policy == "average, fine-tuned":
        return fd.FineTuned(fd.Module(net, norm="average"), **how)
    return fd.FedAvg(fd.Module(net, norm=policy), **how)


def measure(policy: str, skew: str, lr: float, rounds: int, quick: bool, seed: int) -> dict:
    """Scores after the last round, and the bytes that a client sends in a round."""
    data, public = rows_of(quick, seed)
    algorithm = algorithm_of(policy, start(public, 4 if quick else 8, seed), lr)
    try:
        run = fd.run(
            algorithm, dealt(data, skew, seed), rounds, seed=seed, evaluate_every=rounds,
            per_client=True, engine=fd.Local(batch=True),
        )  # fmt: skip
    except fd.DivergenceError:
        return {"own": 0.0, "worst": 0.0, "diverged": True}
    last, own = run.records.last, "own_" if algorithm.personal else ""
    found = {"own": last(f"{own}accuracy_mean"), "worst": last(f"{own}accuracy_worst")}
    found["bytes"] = last("bytes_up") / max(1, last("messages_up"))
    return found if own else {**found, "global": last("accuracy")}


def cell_of(policy: str, skew: str, lr: float, seed: int, quick: bool) -> Cell:
    rounds = 2 if quick else 40
    return Cell({"policy": policy, "skew": skew, "lr": lr, "rounds": rounds}, seed)


def study(store: Store, quick: bool = False) -> pd.DataFrame:
    """The scores of all policies with their best step sizes; computes cells that are missing."""

    def done(*which: Any) -> Cell:
        cell = cell_of(*which, quick)
        if cell.key not in store.cells:
            begin = time.process_time()
            rows = [measure(**cell.settings, quick=quick, seed=cell.seed)]
            seconds = time.process_time() - begin
            store.add(replace(cell, rows=rows, seconds=seconds, versions=versions()))
            print(f"{cell.key}: {rows[0]['own']:.3f} ({seconds:.1f} s)", flush=True)
        return store.cells[cell.key]

    cells = []
    for skew in SKEWS:
        for policy in POLICIES:
            if quick:
                cells.append(done(policy, skew, LRS[0], 0))
                continue
            tried = {lr: done(policy, skew, lr, TUNING_SEED) for lr in LRS}
            best = max(tried, key=lambda lr: tried[lr].rows[0]["own"])
            cells += [done(policy, skew, best, seed) for seed in range(SEEDS)]
    return found_in(cells).frame


def tables(found: pd.DataFrame) -> str:
    """Accuracy in percent, the mean over seeds and their standard deviation."""

    def cell(policy: str, skew: str, score: str, spread: bool = False) -> str:
        rows = found[(found.policy == policy) & (found["skew"] == skew)]
        if "diverged" in rows and rows["diverged"].any():
            return "diverged"
        values = rows[score] * 100
        if values.isna().any():
            return "–"
        return f"{values.mean():.1f}" + (f" ± {values.std(ddof=0):.1f}" if spread else "")

    own, more = [], []
    for policy in POLICIES:
        sent = found[found.policy == policy]["bytes"].mean()
        own.append([policy, *(cell(policy, k, "own", True) for k in SKEWS), f"{sent:,.0f}"])
        more.append([policy, *(cell(policy, k, s) for s in ("worst", "global") for k in SKEWS)])
    names = list(SKEWS.values())
    heads = [f"{what}, {k}" for what in ("worst client", "global model") for k in names]
    return (
        markdown(["own test rows", *names, "bytes a client sends a round"], own)
        + "\n\n"
        + markdown(["", *heads], more)
    )


def stored(folder: Path = RESULTS) -> Store:
    """Where finished cells are kept."""
    return Store(folder, "batchnorm", "policies", "usual")


def main(quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(tables(study(stored(Path(folder) if quick else RESULTS), quick)))


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
