"""Draw the figures of docs/explanation and docs/results: `python docs/figures/make.py [FOLDER]`.

They stand on white and on dark pages: the background is transparent, and every color has a
contrast of at least 3 to 1 with both. What is drawn as data is computed here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon
from sklearn.tree import DecisionTreeRegressor

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results"

GREY, BLUE, ORANGE, GREEN, PURPLE = "#7c848e", "#2a82c9", "#d55e00", "#0c9a72", "#b7659d"
CLIENTS = (BLUE, ORANGE, GREEN)

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "mathtext.fontset": "dejavusans",
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.facecolor": "none",
    "axes.labelcolor": GREY,
    "axes.titlesize": 10.5,
    "axes.titlecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.transparent": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "foedus",
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def panels(*widths: float, height: float) -> tuple[Figure, list[Axes]]:
    """Panels side by side, 7.6 inches in all."""
    figure = Figure(figsize=(7.6, height), layout="constrained")
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)
    return figure, axes.flatten().tolist()


def canvas(ax: Axes, width: float, height: float) -> None:
    """An empty panel for boxes and arrows, with as many units as given."""
    ax.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def box(
    ax: Axes, x: float, y: float, width: float, height: float, text: str, color: str = GREY
) -> None:
    """A rounded box around (x, y)."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.15"
    ax.add_patch(
        FancyBboxPatch(corner, width, height, style, facecolor="none", edgecolor=color, lw=1.4)
    )
    ax.text(x, y, text, ha="center", va="center", color=color, linespacing=1.45)


def arrow(
    ax: Axes,
    start: Sequence[float],
    end: Sequence[float],
    color: str = GREY,
    bend: float = 0.0,
    dash: str = "-",
) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=11,
            shrinkA=0,
            shrinkB=0,
            color=color,
            linestyle=dash,
            lw=1.4,
        )
    )


# -- FFGB ------------------------------------------------------------------------------------------


def ffgb() -> Figure:
    """What travels, and two steps of one client: a tree misses something, the next one gets it."""
    figure, (left, first, second) = panels(1.15, 1, 1, height=2.9)
    canvas(left, 10, 10)
    left.set_title("one round")
    box(left, 5, 8.7, 9.6, 1.9, "server: $f^{t+1}$ = average of\nthe clients' sums")
    for x, color, name in zip((1.7, 5, 8.3), CLIENTS, "123", strict=True):
        arrow(left, (x - 0.55, 7.7), (x - 0.55, 3.0))
        arrow(left, (x + 0.55, 3.0), (x + 0.55, 7.7), color)
        left.text(x - 0.7, 5.3, "$f^t$", ha="right", va="center")
        left.text(x + 0.7, 5.3, "$h$", ha="left", va="center", color=color)
        box(left, x, 2.0, 2.9, 1.9, f"client {name}\nfits trees", color)

    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(0, 1, 45))
    gradient = np.sin(7 * x) + 0.8 * (x > 0.55) + 0.08 * rng.normal(size=45)
    fit = DecisionTreeRegressor(max_depth=1).fit
    step = 0.5
    h1 = fit(x[:, None], gradient).predict(x[:, None])
    residual = gradient - h1
    slope = gradient - step * h1  # the gradient of the squared loss at g_2 = g_1 - step h_1
    h2 = fit(x[:, None], residual + slope).predict(x[:, None])
    for ax, target, h, name, label in (
        (first, gradient, h1, "1", r"$\nabla R_i[g_1]$"),
        (second, residual + slope, h2, "2", r"$\Delta_1 + \nabla R_i[g_2]$"),
    ):
        ax.vlines(x, h, target, color=ORANGE, lw=0.9)
        ax.plot(x, target, ".", color=GREY, ms=5, label=label)
        ax.step(x, h, where="mid", color=BLUE, lw=2.2, label=f"$h_{name}$")
        ax.plot([], [], color=ORANGE, lw=1.2, label=rf"missed: $\Delta_{name}$")
        ax.set(title=f"step {name} of one client", xlabel="input", xticks=[], yticks=[])
        ax.set_ylim(-2.0, 4.4)
        ax.legend(loc="upper right", handlelength=1.2, borderaxespad=0, labelcolor="linecolor")
    return figure


# -- FedRes ----------------------------------------------------------------------------------------


def fedres() -> Figure:
    """The two models of one client, and which round a late message belongs to."""
    figure, (left, right) = panels(1, 1.25, height=3.1)
    canvas(left, 10, 10)
    left.set_title("one prediction")
    left.text(0.9, 7.6, "$x^g$", ha="center", va="center", fontsize=12)
    left.text(0.9, 2.8, "$x^l$", ha="center", va="center", fontsize=12)
    box(left, 4.0, 7.6, 3.6, 2.2, "global model\n$w^g$", BLUE)
    box(left, 4.0, 2.8, 3.6, 2.2, "private model\n$w_i$", ORANGE)
    arrow(left, (1.4, 7.6), (2.15, 7.6))
    arrow(left, (1.4, 2.8), (2.15, 2.8))
    box(left, 7.4, 5.2, 0.9, 0.95, "+")
    arrow(left, (5.85, 7.2), (6.95, 5.7), BLUE)
    arrow(left, (5.85, 3.2), (6.95, 4.7), ORANGE)
    arrow(left, (7.9, 5.2), (8.7, 5.2))
    left.text(8.8, 5.2, r"$\hat{y}$", ha="left", va="center", fontsize=12)
    left.text(4.0, 9.35, "all clients, at the server", ha="center", color=BLUE, fontsize=9)
    left.text(4.0, 0.75, "stays at the client", ha="center", color=ORANGE, fontsize=9)

    canvas(right, 11.6, 10)
    right.set_title("messages, down = 2 and up = 3")
    lanes = {"server": 8.0, "client $i$": 2.6}
    for name, y in lanes.items():
        right.plot((1.75, 11.4), (y, y), color=GREY, lw=1.2)
        right.text(1.55, y, name, ha="right", va="center")
        right.plot(np.arange(2.2, 11.3), np.full(10, y), "|", color=GREY, ms=7)
    place = {t: 2.2 + t for t in range(10)}
    top, low = lanes.values()
    for t, label, where in (
        (0, "$t-2$", top),
        (5, "$t+3$", top),
        (2, "$t$", low),
        (7, "$t+5$", low),
    ):
        above = where == top
        right.text(place[t], where + (0.55 if above else -0.55), label, ha="center",
                   va="bottom" if above else "top")  # fmt: skip
    arrow(right, (place[0], top - 0.15), (place[2], low + 0.15), BLUE)
    arrow(right, (place[2], low + 0.15), (place[5], top - 0.15), PURPLE)
    right.text(place[1] - 0.25, 4.3, "$w^g_{t-2}$", ha="right", color=BLUE)
    right.text(place[4] + 0.1, 5.1, "$x^g,\\ f(x^l; w_{i,t}),\\ y$", ha="left", color=PURPLE)
    arrow(right, (place[2] + 0.1, low - 0.1), (place[7] - 0.1, low - 0.1), ORANGE, bend=0.22)
    right.text(place[4] + 0.5, 0.75, "the same gradient waits as long here", ha="center",
               color=ORANGE, fontsize=9)  # fmt: skip
    right.text(place[5], top + 1.35, "global step", ha="center", color=BLUE, fontsize=9)
    right.text(place[7], low + 0.4, "private step", ha="center", color=ORANGE, fontsize=9)
    return figure


# -- FedFW -----------------------------------------------------------------------------------------


def fedfw() -> Figure:
    """A run of Algorithm 1 in two dimensions, and the bytes of one message."""
    figure, (left, right) = panels(1.15, 1, height=3.2)
    goals = np.array([[1.7, -0.5], [0.9, 1.3], [0.2, 0.75]])  # of f_i(x) = |x - goal_i|^2 / 2
    count, rounds, pull = len(goals), 400, 0.5
    x, center = np.zeros((count, 2)), np.zeros(2)
    path = [center]
    for t in range(1, rounds + 1):
        eta, penalty = 2 / (t + 1), pull * np.sqrt(t + 1)
        g = (x - goals) / count + penalty * (x - center)
        largest = np.abs(g).argmax(1)
        s = np.zeros_like(x)
        s[np.arange(count), largest] = -np.sign(g[np.arange(count), largest])
        x = x + eta * (s - x)
        center = center + eta * (s.mean(0) - center)
        path.append(center)
    mean = goals.mean(0)
    solution = np.clip(mean - (mean.sum() - 1) / 2, 0, 1)  # its projection onto the face x + y = 1
    corners = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]])
    left.add_patch(Polygon(corners, facecolor=GREY, alpha=0.13))
    left.add_patch(Polygon(corners, facecolor="none", edgecolor=GREY, lw=1.4))
    left.plot(*corners.T, "o", color=GREY, ms=6)
    for goal, color, name in zip(goals, CLIENTS, "123", strict=True):
        left.plot(*goal, "x", color=color, ms=8, mew=2.2)
        left.text(goal[0] + 0.12, goal[1], f"$f_{name}$", color=color, va="center")
    left.plot(*np.array(path[:25]).T, ".-", color=PURPLE, lw=1.1, ms=4)
    left.plot(*path[-1], "*", color=PURPLE, ms=13)
    left.text(0.75, -1.0, "path of the center,\n25 rounds, and its limit", color=PURPLE)
    left.text(-1.25, 1.2, "extreme points:\nthe messages", va="bottom")
    arrow(left, (-0.55, 1.17), (-0.1, 1.03))
    arrow(left, (-1.0, 1.17), (-1.0, 0.12))
    left.set(
        title="three clients in an L1 ball", xlim=(-1.35, 2.15), ylim=(-1.3, 1.8), aspect="equal"
    )
    left.set(xticks=[], yticks=[])
    left.spines[:].set_visible(False)
    assert np.abs(path[-1] - solution).max() < 0.1, (path[-1], solution)

    stored = json.loads((RESULTS / "fedfw-bytes.json").read_text())["cells"]
    (rows,) = [cell["rows"] for cell in stored if cell["settings"]["data"] == "mnist"]
    sent = {row["method"].removeprefix("FedFW, ").split(",")[0]: row["up"] for row in rows}
    names = sorted(sent, key=lambda name: (name != "FedAvg", sent[name]), reverse=True)
    values = [sent[name] for name in names][::-1]
    names = names[::-1]
    colors = [PURPLE if name != "FedAvg" else GREY for name in names]
    right.barh(names, values, color=colors, height=0.6)
    for y, value in enumerate(values):
        right.text(value * 1.15, y, f"{value:,.0f}", va="center")
    right.set(xscale="log", xlim=(8, 2e5), title="bytes up, a client and round, MNIST")
    right.tick_params(length=0)
    right.spines["left"].set_visible(False)
    right.minorticks_off()
    return figure


# -- FedBoost --------------------------------------------------------------------------------------


def fedboost() -> Figure:
    """A draw by weighted sampling, and the weights over the rounds of a run on point masses."""
    figure, (left, right) = panels(1, 1.1, height=2.9)
    q, budget, rounds, step = 8, 3, 400, 0.12
    rng = np.random.default_rng(5)
    target = 1 / np.arange(1, q + 1)
    target /= target.sum()
    weights, seen, shown = np.full(q, 1 / q), [], None
    for t in range(rounds):
        gamma = np.minimum(1, budget * weights)
        drawn = rng.uniform(size=q) < gamma
        if t >= 60 and drawn.sum() == budget and shown is None:
            shown = weights, gamma, drawn
        seen.append(weights)
        # squared loss on point masses, with the bias of Section 4.2 taken off
        a = weights * drawn / gamma
        d = 2 * (a - target) * drawn / gamma
        d -= 2 * drawn / gamma * weights * (1 / gamma - 1)
        weights = weights * np.exp(-step * d)
        weights /= weights.sum()
    assert shown is not None
    alpha, gamma, drawn = shown
    k = np.arange(1, q + 1)
    left.bar(k[drawn], alpha[drawn], 0.62, color=BLUE, label=r"$\alpha_k$, sent")
    left.bar(k[~drawn], alpha[~drawn], 0.62, facecolor="none", edgecolor=GREY, lw=1.4,
             label=r"$\alpha_k$, not sent")  # fmt: skip
    left.plot(k, gamma, "_", color=ORANGE, ms=15, mew=2.4, label=r"$\gamma_k = C \alpha_k$")
    left.set(title=f"one round: {drawn.sum()} of {q} predictors are sent", xlabel="predictor $k$")
    left.set(xticks=k, ylim=(0, 1.08))
    left.legend(loc="upper right", labelcolor=GREY)
    seen_ = np.array(seen)
    average = seen_.cumsum(0) / np.arange(1, rounds + 1)[:, None]
    for i, color in zip((0, 1, 2, 7), (BLUE, ORANGE, GREEN, PURPLE), strict=True):
        right.plot(seen_[:, i], color=color, lw=0.8)
        right.plot(average[:, i], color=color, lw=2.4)
        right.hlines(target[i], 0, rounds, color=color, lw=1, ls=(0, (3, 3)))
        right.text(rounds * 1.02, target[i], rf"$\alpha_{i + 1}$", color=color, va="center")
    right.set(title="weights: newest (thin), average, best (dashed)", xlabel="round")
    right.set(xlim=(0, rounds * 1.1), ylim=(0, 0.5))
    return figure


# -- FedNewton -------------------------------------------------------------------------------------


def ellipse(hessian: np.ndarray, center: np.ndarray, level: float) -> np.ndarray:
    """Points where (w - center)^T hessian (w - center) = level."""
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.sqrt(level) * np.stack([np.cos(angle), np.sin(angle)])
    return center[:, None] + np.linalg.solve(np.linalg.cholesky(hessian).T, circle)


def fednewton() -> Figure:
    """Local solutions for the global gradient, their average, and what becomes of the error."""
    figure, (left, right) = panels(1.1, 1, height=3.3)
    hessians = [np.diag([1.7, 0.65]), np.diag([0.65, 1.7])]
    total, best, w = sum(hessians) / 2, np.zeros(2), np.array([2.0, 2.0])
    gradient = total @ (w - best)
    left.plot(*ellipse(total, best, float(gradient @ w)), color=GREY, lw=0.9)
    left.plot(*ellipse(total, best, float(gradient @ w) / 4), color=GREY, lw=0.9)
    ends = [w - np.linalg.solve(h, gradient) for h in hessians]
    for h, end, color, name in zip(hessians, ends, CLIENTS, "12", strict=False):
        left.plot(*ellipse(h, end, float((w - end) @ h @ (w - end))), color=color, lw=0.9, ls="--")
        arrow(left, w, end, color)
        down = name == "1"
        place = end + np.array((0.3, -0.55) if down else (-0.2, 0.2))
        left.text(*place, f"$-H_{name}^{{-1}} g$", color=color, ha="left" if down else "right")
    middle = sum(ends) / 2
    left.plot(*zip(*ends, strict=True), color=PURPLE, lw=1, ls=(0, (2, 2)))
    left.plot(*best, "*", color=GREY, ms=13)
    left.plot(*middle, "o", color=PURPLE, ms=7)
    left.plot(*w, "o", color=GREY, ms=7)
    left.text(w[0] + 0.15, w[1] + 0.15, "$w$")
    left.text(middle[0] - 0.2, middle[1] - 0.1, "new $w$", color=PURPLE, ha="right", va="top")
    left.set(title="one round, two clients", xticks=[], yticks=[], aspect="equal")
    left.spines[:].set_visible(False)

    for rows, cg, color, place in (
        (200, False, BLUE, (0.0, 3e-8)),
        (20, False, ORANGE, (3.4, 2.0)),
        (20, True, GREEN, (2.9, 5e-3)),
    ):
        look = {"ls": "--", "marker": "s"} if cg else {"marker": "o"}
        right.semilogy(errors(rows, cg), ms=4, color=color, **look)
        text = f"{'cg' if cg else 'newton'},{' ' if rows == 20 else chr(10)}{rows} rows a client"
        right.text(*place, text, color=color)
    right.set(title="distance to the pooled solution", xlabel="round", ylim=(1e-8, 1e2))
    right.minorticks_off()
    return figure


def errors(rows: int, cg: bool, rounds: int = 8) -> list[float]:
    """Relative error of ridge regression by round, for eight clients with this number of rows."""
    rng = np.random.default_rng(0)
    size, reg, truth = 10, 0.05, rng.normal(size=10)
    parts = []
    for _ in range(8):
        x = rng.normal(size=(rows, size)) * np.exp(0.1 * rng.normal(size=size))
        parts.append((x, x @ truth + 0.3 * rng.normal(size=rows)))
    hessians = [x.T @ x / rows + reg * np.eye(size) for x, _ in parts]
    rights = [x.T @ y / rows for x, y in parts]
    h, b = sum(hessians) / 8, sum(rights) / 8

    def solved(v: np.ndarray) -> np.ndarray:
        return sum(np.linalg.solve(one, v) for one in hessians) / 8

    w = sum(np.linalg.solve(one, v) for one, v in zip(hessians, rights, strict=True)) / 8
    best = np.linalg.solve(h, b)
    found = [w]
    r, direction, before = b - h @ w, np.zeros(size), np.inf
    for _ in range(rounds):
        z = solved(r)
        if cg:
            direction = z + (r @ z / before) * direction
            before, q = r @ z, h @ direction
            w = w + (before / (direction @ q)) * direction
        else:
            w = w + z
        r = b - h @ w
        found.append(w)
    return [float(np.linalg.norm(w - best) / np.linalg.norm(best)) for w in found]


# -- averaging -------------------------------------------------------------------------------------


def averaging() -> Figure:
    """Client drift: FedAvg stops beside the solution, control variates lead to it."""
    figure, axes = panels(1, 1, height=3.0)
    hessians = [np.diag([1.0, 0.12]), np.diag([0.12, 1.0])]
    minima = [np.array([-1.2, 1.1]), np.array([1.3, -0.9])]
    total = sum(hessians) / 2
    best = np.linalg.solve(total, sum(h @ m for h, m in zip(hessians, minima, strict=True)) / 2)
    start, lr, steps = np.array([1.9, 1.75]), 0.25, 10
    for ax, corrected, name in zip(axes, (False, True), ("FedAvg", "Scaffold"), strict=True):
        w, own = start, [np.zeros(2), np.zeros(2)]
        ax.plot(*ellipse(total, best, 0.05), color=GREY, lw=0.8)
        servers = [w]
        for _ in range(12):
            ends, common = [], sum(own) / 2
            for i, (h, m) in enumerate(zip(hessians, minima, strict=True)):
                x, path = w, [w]
                for _ in range(steps):
                    x = x - lr * (h @ (x - m) + (common - own[i] if corrected else 0))
                    path.append(x)
                ax.plot(*np.array(path).T, ".-", color=CLIENTS[i], lw=0.9, ms=3)
                if corrected:  # option II
                    own[i] = own[i] - common + (w - x) / (steps * lr)
                ends.append(x)
            w = sum(ends) / 2
            servers.append(w)
        ax.plot(*np.array(servers).T, "o-", color=PURPLE, ms=5, lw=1.4)
        ax.plot(*best, "*", color=GREY, ms=14, zorder=5)
        ax.text(best[0] - 0.75, best[1] - 0.62, "solution", ha="center")
        arrow(ax, best - (0.6, 0.42), best - (0.12, 0.1))
        for minimum, color in zip(minima, CLIENTS, strict=False):
            ax.plot(*minimum, "x", color=color, ms=9, mew=2.4)
        ax.text(minima[0][0] + 0.16, minima[0][1] + 0.12, "best for client 1", color=BLUE)
        ax.text(minima[1][0], minima[1][1] - 0.32, "best for client 2", color=ORANGE, ha="center")
        ax.text(start[0] - 0.95, start[1] - 0.75, "server", color=PURPLE, ha="right")
        ax.set(title=name, xticks=[], yticks=[], aspect="equal")
        ax.set(xlim=(-1.7, 2.3), ylim=(-1.4, 2.1))
        ax.spines[:].set_visible(False)
    return figure


# -- speed -----------------------------------------------------------------------------------------

TOOLS = {
    "foedus": ("foedus", PURPLE, "o"),
    "pfl-research": ("pfl-research", GREEN, "s"),
    "FedJAX, jit": ("FedJAX", ORANGE, "^"),
    "Flower, 2 actors, ": ("Flower, polling every 5 ms", BLUE, "D"),
    "Flower, 2 actors (": ("Flower", GREY, "v"),
}
"""How the stored rows of a tool begin; its name, color and marker."""


def speed() -> Figure:
    """Seconds of a round with every framework, from the stored comparison."""
    figure, (ax,) = panels(1, height=3.1)
    titles = []
    for y in range(1, 6):
        stored = json.loads((HERE.parents[1] / f"benchmarks/results/peers-w{y}.json").read_text())
        rows = [line.split(" | ") for line in stored["text"].splitlines()[2:]]
        titles.append(rows[0][0].removeprefix("| ").split(",")[0])
        for start, (name, color, marker) in TOOLS.items():
            (seconds,) = [float(r[2].split(" (")[0]) for r in rows if r[1].startswith(start)]
            label = name if y == 1 else None
            size = 11 if name == "foedus" else 7.5  # it can be seen below another
            ax.plot(seconds, y, marker, color=color, ms=size, ls="none", label=label)
    ax.hlines(range(1, 6), 1e-3, 20, color=GREY, lw=0.5, zorder=0)
    ax.set(
        xscale="log",
        xlim=(2e-3, 20),
        ylim=(5.6, 0.4),
        xlabel="seconds a round, cohort of 10 to 100",
    )
    ax.set_yticks(range(1, 6), titles)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, columnspacing=1.2, handletextpad=0.2,
                  labelcolor="linecolor")  # fmt: skip
    return figure


LOOKS = (
    (("FFGB", "FedNewton", "FedFW", "FedRes", "FedBoost"), ORANGE, "-"),
    (("FedRes, 7 rounds late", "plain Newton"), ORANGE, ":"),
    (("FedAvg", "Central"), BLUE, "-"),
    (("bagging", "Independent"), GREEN, "--"),
)
"""How the names of lines begin; their color and dashes. The last that fits counts."""


def families() -> Figure:
    """What each family does that averaging cannot: the pictures of `foedus demo`, as stored."""
    sections = json.loads((RESULTS / "demo.json").read_text())["sections"]
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots(2, 3).flatten().tolist()
    shown = (
        ("ffgb", "FFGB: trees", "rounds", "round", "accuracy", "accuracy"),
        (
            "fednewton",
            "FedNewton",
            "rounds",
            "round",
            "distance",
            "distance from pooled",
        ),
        ("fedfw", "FedFW: tiny uploads", "megabytes", "megabytes up", "accuracy", "accuracy"),
        ("fedres", "FedRes: late messages", "rounds", "round", "own_accuracy", "own rows"),
    )
    for ax, (name, title, x, below, y, beside) in zip(axes, shown, strict=False):
        for line in sections[name]["picture"]["lines"]:
            fits = [look for look in LOOKS if line["name"].startswith(look[0])]
            _, color, dashes = fits[-1]
            ys = [v if v is None or y != "distance" else max(v, 1e-4) for v in line["y"][y]]
            points = [(a, b) for a, b in zip(line["x"][x], ys, strict=True) if a and b is not None]
            ax.plot(*zip(*points, strict=True), color=color, ls=dashes, lw=1.5, label=line["name"])
        ax.set(title=title, xlabel=below, ylabel=beside)
        ax.legend(fontsize=7.5, labelcolor="linecolor", handlelength=1.4, labelspacing=0.25)
    axes[0].set(xscale="log", ylim=(0.6, 1))
    axes[1].set(xscale="log", yscale="log")
    axes[2].set_xscale("log")
    axes[3].set_ylim(0.6, 1)
    weights = [bar["value"] for bar in sections["fedboost"]["picture"]["bars"]]
    colors = [ORANGE if k < 3 else GREY for k in range(len(weights))]
    axes[4].bar(range(len(weights)), weights, color=colors)
    axes[4].set(title="FedBoost: 3 of 12 fit", xlabel="given predictor", ylabel="weight")
    axes[4].set_xticks([])
    axes[4].text(3.2, max(weights) * 0.8, "fitted to the\nclients' task", color=ORANGE, fontsize=8)
    _speed_of_w3(axes[5])
    return figure


def _speed_of_w3(ax: Axes) -> None:
    """Seconds of a round of FedAvg with each framework, from the stored comparison."""
    stored = json.loads((HERE.parents[1] / "benchmarks/results/peers-w3.json").read_text())
    rows = [line.split(" | ") for line in stored["text"].splitlines()[2:]]
    names = {"foedus": "foedus", "pfl-research": "pfl-research", "FedJAX, jit": "FedJAX",
             "Flower, 2 actors, ": "Flower"}  # fmt: skip
    for y, (start, name) in enumerate(names.items()):
        (seconds,) = [float(r[2].split(" (")[0]) for r in rows if r[1].startswith(start)]
        ax.barh(y, seconds, left=1e-3, color=ORANGE if name == "foedus" else GREY, height=0.62)
        ax.text(seconds * 1.25, y, f"{seconds:.3f}", va="center", fontsize=8)
    ax.set(title="FedAvg, 100 clients", xscale="log", xlim=(1e-3, 8), ylim=(3.6, -0.6))
    ax.set(xlabel="seconds a round")
    ax.set_yticks(range(len(names)), list(names.values()))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


FIGURES: dict[str, Callable[[], Figure]] = {
    "families.svg": families,
    "ffgb.svg": ffgb,
    "fedres.svg": fedres,
    "fedfw.svg": fedfw,
    "fedboost.svg": fedboost,
    "fednewton.svg": fednewton,
    "averaging.svg": averaging,
    "speed.svg": speed,
}


def make(folder: Path = HERE) -> list[Path]:
    """Draw all figures into a folder."""
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            draw().savefig(folder / name, metadata={"Date": None, "Creator": None})
            written.append(folder / name)
    return written


if __name__ == "__main__":
    for path in make(*map(Path, sys.argv[1:2])):
        print(path)
