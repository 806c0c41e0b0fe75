"""The sections of `foedus demo`: the runs of an example, a sentence, a picture, rows of a table."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foedus.cli.demo import claims, examples
from foedus.cli.demo.claims import Claim
from foedus.core.result import Run
from foedus.data.federation import Federation
from foedus.papers.ffgb import bagging_by_round
from foedus.report import curves
from foedus.report.charts import Bar, Bars, Chart, Line, Lines
from foedus.report.compare import Comparison, megabytes

ROUND, MEGABYTES = "round", "megabytes, up and down"
TURNS = ("upright", "turned by 90°", "turned by 180°", "turned by 270°")


@dataclass(frozen=True)
class Row:
    """A line of the summary.

    Args:
        method: Its name.
        score: Accuracy on the test rows, or on clients' own test rows.
        rounds: How many.
        megabytes: Up and down, 10^6 bytes.
        seconds: Of computing; NaN if they were not measured.
    """

    method: str
    score: float
    rounds: int
    megabytes: float
    seconds: float


@dataclass(frozen=True)
class Section:
    """What the demo shows of one example.

    Args:
        name: The name of the example, as in `--only`.
        title: A heading.
        setting: What was run.
        claim: The sentence.
        chart: The picture.
        rows: Lines of the summary.
        score: What the scores of the rows are.
        comparison: The runs of a comparison, if it is one.
    """

    name: str
    title: str
    setting: str
    claim: Claim
    chart: Chart
    rows: Sequence[Row]
    score: str = "accuracy"
    comparison: Comparison | None = field(default=None, repr=False)

    @property
    def code(self) -> str:
        """The example and what it imports, to be copied."""
        own = inspect.getsource(getattr(examples, self.name))
        whole = inspect.getsource(examples)
        names = {node.id for node in ast.walk(ast.parse(own)) if isinstance(node, ast.Name)}
        imports = [
            ast.get_source_segment(whole, node)
            for node in ast.parse(whole).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            and names & {alias.asname or alias.name for alias in node.names}
        ]
        return "\n".join([*filter(None, imports), "", "", own])


def ffgb(seed: int) -> Section:
    runs = examples.ffgb(seed)
    trees, network = runs.values()
    fed = trees.fed
    assert isinstance(fed, Federation)
    scores, sizes = zip(*bagging_by_round(fed, 100, seed), strict=True)
    sent = (np.cumsum(sizes) * len(fed) / 1e6).tolist()  # up, and down to all other clients
    axes = {"rounds": [*range(1, 101)], "megabytes": sent}
    lines = [*map(line, runs, runs.values()), Line("bagging, trees", axes, {"accuracy": scores})]
    caption = (
        "Accuracy on the test rows. A round of FFGB adds ten trees of each client, a round of "
        "bagging one. Trees are large: choose megabytes for the price."
    )
    labels = {"rounds": ROUND, "megabytes": MEGABYTES, "accuracy": "accuracy"}
    rounds = [run.history.accuracy for run in (trees, network)]
    return Section(
        "ffgb",
        "FFGB: trees cannot be averaged, but added",
        "Digits, ten clients, 90% of the rows sorted by label. Bagging is what Flower does with "
        "XGBoost: every client grows trees on the common margins, and all are pooled.",
        claims.ffgb(rounds[0][10], rounds[1][10], rounds[1][50], scores[-1]),
        Lines("Boosted trees under label skew", caption, lines, labels, log=("rounds",)),
        [*table(runs), Row("bagging, trees", scores[-1], 100, sent[-1], math.nan)],
    )


def fednewton(seed: int) -> Section:
    runs = examples.fednewton(seed)
    names = [name for name in runs if name != "pooled rows"]
    distances = {name: runs[name].history.distance.tolist() for name in names}
    cg, fedavg, newton = (distances[name][-1] for name in names)
    caption = (
        "Distance of the predictions on the test rows from those of the pooled solution, relative "
        "to these. All start from the average of what clients find alone."
    )
    labels = {"rounds": ROUND, "megabytes": MEGABYTES, "distance": "distance from pooled"}
    lines = [line(name, runs[name], "distance") for name in names]
    return Section(
        "fednewton",
        "FedNewton: the solution of pooled rows, by curvature",
        "Digits, ten clients with unequal labels, kernel ridge regression on 300 random features, "
        "reg 0.001. Plain Newton converges with a larger reg or more rows at each client.",
        claims.fednewton(cg, fedavg, newton, distances["plain Newton"][0]),
        Lines("The way to the pooled solution", caption, lines, labels, log=("distance",)),
        table(runs),
    )


def fedfw(seed: int) -> Section:
    runs = examples.fedfw(seed)
    sparse, dense = (run.history.iloc[-1] for run in runs.values())
    weights = [p.detach().numpy().ravel() for p in runs["FedFW"].model.to_torch().parameters()]
    used = np.concatenate(weights) != 0
    labels = {"megabytes": "megabytes, up", "rounds": ROUND, "accuracy": "accuracy"}
    caption = "Accuracy on the test rows by what all clients have uploaded, or by round."
    return Section(
        "fedfw",
        "FedFW: a sparse model, from uploads of a few bytes",
        "Breast cancer, ten clients with unequal labels, a linear model on all products of up to "
        "three of 30 measurements, in an L1 ball. FedFW takes 100 rounds, FedAvg 20.",
        claims.fedfw(
            sparse.bytes_up / sparse.messages_up, dense.bytes_up / dense.messages_up,
            sparse.accuracy, dense.accuracy, int(used.sum()), used.size,
        ),
        Lines(
            "Accuracy by bytes", caption, [line(n, r, up=True) for n, r in runs.items()], labels,
            log=("megabytes",),
        ),
        table(runs),
    )  # fmt: skip


def fedres(seed: int) -> Section:
    runs = examples.fedres(seed)
    labels = {"rounds": ROUND, "megabytes": MEGABYTES, "own_accuracy": "accuracy, own rows"}
    labels["online_loss"] = "loss so far, before learning"
    caption = (
        "Accuracy of each client's own model on its own test rows, on average, while rows arrive "
        "one by one; or the average loss of predictions made before the label was known."
    )
    lines = [line(name, run, "own_accuracy", "online_loss") for name, run in runs.items()]
    return Section(
        "fedres",
        "FedRes: a personal model for each client, also from late messages",
        "Digits, 30 clients, each with a task of its own: to tell a digit from three others. Half "
        "of the pixels may be shared. Independent: each client alone, on all pixels; Central: one "
        "model, on the shared pixels.",
        claims.fedres(*(run.records.last("own_accuracy") for run in runs.values())),
        Lines("Predictions at clients that differ", caption, lines, labels),
        table(runs, "own_accuracy"),
        "accuracy, own rows",
    )


def fedboost(seed: int) -> Section:
    runs = examples.fedboost(seed)
    few, everything, equal = (run.records.last("accuracy") for run in runs.values())
    alpha = runs["FedBoost"].state.alpha.tolist()
    sizes = [sum(run.records.last(c) for c in ("bytes_up", "bytes_down")) for run in runs.values()]
    each = len(alpha) // len(TURNS)
    bars = [
        Bar(f"{TURNS[k // each]}, {k % each + 1}", weight, reference=k >= each)
        for k, weight in enumerate(alpha)
    ]
    caption = (
        "Weight of each classifier after 40 rounds. The server was not told which of them were "
        "fitted to upright digits, those of the clients."
    )
    sent = float(np.nanmean(runs["FedBoost"].history.sent))
    level = ("equal", 1 / len(alpha))
    return Section(
        "fedboost",
        "FedBoost: choosing among given predictors, a few sent a round",
        "Digits, ten clients with unequal labels. Twelve logistic regressions are given, fitted to "
        "150 public digits each, three for each way in which a camera may be turned.",
        claims.fedboost(sum(alpha[:each]), few, equal, everything, sent, sizes[0] / sizes[1]),
        Bars("Weights of twelve given classifiers", caption, "weight", bars, level=level),
        table(runs),
    )


def averaging(seed: int) -> Section:
    comparison = examples.averaging(seed)
    scores = {name: float(np.mean(comparison.final(name))) for name in comparison.runs}
    own = float(np.mean(comparison.final("Independent", "own_accuracy")))
    best = comparison.best
    chart = curves.chart(comparison)
    assert best is not None and chart is not None
    costs = comparison.table()
    rows = [
        Row(name, score, 30, costs.mb[name], costs.seconds[name]) for name, score in scores.items()
    ]
    return Section(
        "averaging",
        "Averaging: the methods people compare with",
        "Digits, ten clients, labels by Dirichlet(0.1), half of the clients in each round; a "
        "network with 64 hidden units, three seeds. Central has all rows in one place.",
        claims.averaging(best, scores[best], scores["FedAvg"], scores["Independent"], own),
        chart,
        rows,
        comparison=comparison,
    )


SECTIONS: dict[str, Callable[[int], Section]] = {
    f.__name__: f for f in (ffgb, fednewton, fedfw, fedres, fedboost, averaging)
}


def line(name: str, run: Run, *metrics: str, up: bool = False) -> Line:
    """The rounds of a run that were evaluated. up: megabytes of uploads alone."""
    metrics = metrics or ("accuracy",)
    rows = [row for row in run.records.rows if not math.isnan(row.get(metrics[0], math.nan))]
    sent = [row["bytes_up"] / 1e6 if up else megabytes(row) for row in rows]
    x = {"rounds": [row["round"] for row in rows], "megabytes": sent}
    return Line(name, x, {m: [row.get(m, math.nan) for row in rows] for m in metrics})


def table(runs: Mapping[str, Run], score: str = "accuracy") -> list[Row]:
    """A line of the summary for each run."""
    ends = {name: run.records.rows[-1] for name, run in runs.items()}
    return [
        Row(name, runs[name].records.last(score), end["round"], megabytes(end), end["seconds"])
        for name, end in ends.items()
    ]
