"""Federated gradient boosted decision trees: clients send histograms, the server finds the splits.

    round t:  T trees, level by level, on the sums over all clients of gradients g and second
              derivatives h of the loss at f; f <- f + lr * trees

Every exchange is a sum over clients, so that the trees are those of histogram boosting (LightGBM,
`HistGradientBoosting`) with all rows in one place and the same bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from foedus.algorithms.gbdt.binning import counted, find_edges
from foedus.algorithms.gbdt.checks import check_counts, check_histograms, check_totals, each
from foedus.algorithms.gbdt.growing import Growing, leaves_of
from foedus.base.settings import check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Batching, Client, client_step
from foedus.core.clients import Clients
from foedus.core.held import HeldSum, sum_from_wire
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, ReplyError, shown
from foedus.export.forms import Ensemble
from foedus.export.probabilities import shares_of, softmax
from foedus.models.histograms import MOST_BINS, SplitRule, binned, offsets_of, sum_histograms
from foedus.models.losses import (
    CrossEntropy,
    Loss,
    LossSetting,
    PoissonNLL,
    Squared,
    check_loss,
    loss_for,
)
from foedus.models.oracles import Forest
from foedus.models.trees import check_trees, predict_trees
from foedus.wire.arrays import Trees

_MOST_EDGES = 1 << 16


@dataclass(frozen=True)
class FederatedGBDT(Algorithm):
    """Gradient boosted trees from sums of histograms: as pooled histogram boosting.

    Before the first round the clients agree on bins (about as many rows in each) and on the best
    constant f^0, by sums of counts. In a round, one tree for each output (one in all for two
    classes) is grown level by level. For the nodes of a level, client i sends for every feature and
    bin the sums over its rows there of

        g = loss'(f(x)),    h = loss''(f(x)),    1

    and the server splits each node where the gain is largest, by the sums over all clients:

        gain = G_L^2 / (H_L + l2) + G_R^2 / (H_R + l2) - G^2 / (H + l2)

    A leaf has the value -lr G / (H + l2). Of two children only the smaller one is asked for; the
    other one's histogram is the parent's without it, or both are asked for if other clients answer
    than before. For more than two classes h is p (1 - p). Only sums over clients are needed: secure
    aggregation and differential privacy apply. As long as no client is lost and sums have neither
    rounding nor noise, the trees are those of pooled rows, split for split.

    Args:
        loss: "auto" (cross-entropy or squared), "poisson", "logistic", "huber", "bce", or one of
            `fd.losses` that is a sum over outputs with a second derivative.
        lr: The learning rate (shrinkage).
        depth: The largest depth of a tree.
        leaf: The least number of rows of all clients in a leaf; the least sum of h is 1e-3.
        l2: lambda. With 0, classes of a few rows make leaves so large that boosting diverges.
        gain: The least gain of a split.
        bins: The largest number of bins of a feature.

    Raises:
        ConfigError: A setting is out of range; or, for given data, the loss has no second
            derivative of its own for each output.

    Example:
        >>> fed = fd.split(fd.load("breast_cancer"), "homogeneity", clients=5, s=0.1)
        >>> run = fd.run(fd.FederatedGBDT(lr=0.3), fed, rounds=10)
        >>> run.history.accuracy.iloc[-1] > 0.9
        True
    """

    weighs_rows: ClassVar[bool] = True

    loss: LossSetting = "auto"
    lr: Annotated[float, Gt(0)] = 0.1
    depth: Annotated[int, Ge(1), Le(16)] = 6
    leaf: Annotated[int, Ge(1)] = 20
    l2: Annotated[float, Ge(0)] = 1.0
    gain: Annotated[float, Ge(0)] = 0.0
    bins: Annotated[int, Ge(2), Le(MOST_BINS)] = 255

    remedy: ClassVar[str] = "try a smaller lr"

    def __post_init__(self) -> None:
        check_settings(self)
        check_loss(self.loss)

    def batching(self) -> Batching:
        return Batching(alike=False, pays=False)

    def check(self, spec: Spec) -> None:
        loss = self._loss(spec.classes)
        loss.check(spec.classes, spec.outputs)
        own = type(loss).bend is not Loss.bend and loss.separable
        if not own and not isinstance(loss, CrossEntropy):
            raise ConfigError(
                f"loss={shown(self.loss)} has no second derivative by output; use fd.FFGB, or one "
                "of 'cross_entropy', 'squared', 'poisson', 'logistic', 'huber', 'bce'"
            )

    def _loss(self, classes: int | None) -> Loss:
        return loss_for(self.loss, classes)

    def directions(self, spec: Spec) -> Tensor:
        """What the trees of a round add to the outputs, (trees, outputs)."""
        if spec.classes == 2 and isinstance(self._loss(2), CrossEntropy):
            return torch.tensor([[-0.5, 0.5]])
        return torch.eye(spec.outputs)

    def oracle(self, spec: Spec) -> Forest:
        """The form of a round's trees; its functions are averages."""
        return Forest(trees=len(self.directions(spec)), depth=self.depth)

    def reply_bound(self, step: str, spec: Spec) -> float | None:
        """Counts are parts of all rows, and so are slopes of the plain cross-entropy."""
        plain = step == "count" or type(self._loss(spec.classes)) is CrossEntropy
        return None if plain else math.inf

    # -- clients -----------------------------------------------------------------------------------

    def init(self, client: Client) -> dict[str, Tensor]:
        """f on the client's rows, and their bins, once there are some."""
        n, d = len(client.data.index), client.spec.features
        f = torch.zeros(n, client.spec.outputs)
        widths = torch.zeros(d, dtype=torch.int64)
        return {"f": f, "bins": torch.zeros(d, n, dtype=torch.uint8), "widths": widths}

    def absorb(self, client: Client, **updates: Tree) -> dict[str, Tensor]:
        """f with the trees that are new to the client."""
        keep, parts, weights = updates["f"]
        total, oracle = keep * client.state["f"], self.oracle(client.spec)
        for trees, weight in zip(parts, weights, strict=True):
            total = total + oracle.values(trees, weight, client.data.x, client.spec)
        return {**client.state, "f": total}

    def check_updates(self, spec: Spec, **updates: Tree) -> None:
        if list(updates) != ["f"]:
            raise ReplyError(f"the held values {list(updates)} are not ['f']")
        for trees, weights in sum_from_wire("f", updates["f"]):
            self.oracle(spec).accept_joined(trees, len(weights), spec)

    @client_step(batch="loop")
    def count(self, client: Client, thresholds: Tensor, scale: float) -> tuple[Tree, None]:
        """The numbers of rows between thresholds, by feature."""
        fits = thresholds.dim() == 2 and len(thresholds) == client.spec.features
        if not fits or thresholds.shape[1] > _MOST_EDGES:
            raise ReplyError(f"thresholds of shape {tuple(thresholds.shape)} cannot be")
        rows = counted(client.data.x.flatten(1).numpy(), thresholds.numpy())
        return {"rows": torch.from_numpy(rows * scale).float()}, None

    @client_step(batch="loop")
    def begin(
        self, client: Client, edges: Tensor, widths: Tensor, scale: float
    ) -> tuple[Tree, Tree]:
        """Keep the bins of the rows; the sums of labels, or of targets, and of weights."""
        fits = edges.dim() == 2 and widths.shape == edges.shape[:1] == (client.spec.features,)
        fits = fits and widths.dtype == torch.int64 and edges.shape[1] < MOST_BINS
        if not fits or not bool(((widths >= 0) & (widths <= edges.shape[1])).all()):
            raise ReplyError(f"edges of shape {tuple(edges.shape)} cannot be")
        bins = binned(client.data.x.flatten(1).numpy(), edges_of(edges, widths))
        state = {**client.state, "bins": torch.from_numpy(bins), "widths": widths}
        y, w = client.data.y, _worth(client)
        if client.spec.classes:
            y = torch.nn.functional.one_hot(y, client.spec.classes)
        sums = w @ y.reshape(len(y), -1).to(w.dtype)
        return {"sums": (scale * sums).float(), "weight": (scale * w.sum()).float()}, state

    @client_step(batch="loop")
    def histograms(
        self, client: Client, trees: Trees, nodes: int, scale: float
    ) -> tuple[Tree, None]:
        """Sums by node, feature and bin, at the leaves of `trees` with the numbers 1 .. nodes."""
        count = len(self.directions(client.spec))
        if not isinstance(trees, Trees):
            raise ReplyError("histograms are by the leaves of trees")
        check_trees(trees, client.spec.features, count, count, self.depth)
        if not 0 < nodes <= int((trees.feature < 0).sum()):
            raise ReplyError(f"histograms of {nodes} nodes cannot be: the trees have fewer leaves")
        node = predict_trees(trees, client.data.x).numpy().round().astype(np.int32) - 1
        if node.min(initial=0) < -1 or node.max(initial=0) >= nodes:
            raise ReplyError(f"a leaf has a number beyond the {nodes} nodes")
        bins, offsets = client.state["bins"].numpy(), offsets_of(client.state["widths"].numpy())
        total: np.ndarray | None = None
        for t, (g, h) in enumerate(zip(*self.derivatives(client), strict=True)):
            columns = [g, torch.ones_like(g)] if h is None else [g, h, torch.ones_like(g)]
            values = torch.stack(columns, 1).numpy()
            if total is None:
                total = np.zeros((nodes, int(offsets[-1]), len(columns)))
            own, local = np.unique(node[:, t], return_inverse=True)  # nodes of this tree alone
            outside = int((own < 0).sum())
            own = own[outside:]
            if len(own):
                total[own] += sum_histograms(bins, offsets, local - outside, values, len(own))
        assert total is not None
        return {"sums": torch.from_numpy(total * scale).float()}, None

    def derivatives(self, client: Client) -> tuple[list[Tensor], list[Tensor | None]]:
        """g and h of each tree, times the rows' weights; h is `None` where it is 1."""
        f, y, spec, w = client.state["f"], client.data.y, client.spec, _worth(client)
        loss = self._loss(spec.classes)
        g = loss.slope(f, y, torch.ones(len(f))).double() * w.unsqueeze(1)
        if isinstance(loss, Squared) and client.data.worth is None:
            return list(g.T.contiguous()), [None] * g.shape[1]
        if isinstance(loss, CrossEntropy):
            p = f.double().softmax(-1)
            h = p * (1 - p) * w.unsqueeze(1)
            if len(self.directions(spec)) == 1:
                return [g[:, 1].contiguous()], [h[:, 1].contiguous()]
        else:
            h = loss.bend(f, y, torch.ones_like(f)).double() * w.unsqueeze(1)
        return list(g.T.contiguous()), list(h.T.contiguous())

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        if not clients.punctual:
            raise ConfigError(
                "fd.FederatedGBDT asks several times in a round, each time by what it was told; it "
                "cannot run where messages are late"
            )
        spec, scale = clients.spec, _scale(clients)

        def count(thresholds: np.ndarray) -> np.ndarray:
            sent = torch.from_numpy(thresholds)
            check = lambda reply, most: check_counts(reply, most, sent.shape)  # noqa: E731
            accept = each(clients, check, scale)
            found = clients.sum(self.count, accept=accept, thresholds=sent, scale=scale)["rows"]
            return found.double().numpy() / scale

        edges = find_edges(count, spec.features, self.bins)
        widths = torch.tensor([len(values) for values in edges])
        whole = torch.zeros(spec.features, int(widths.max()))
        for row, values in zip(whole, edges, strict=True):
            row[: len(values)] = torch.from_numpy(values)
        check = lambda reply, most: check_totals(  # noqa: E731
            reply, most, spec.outputs, spec.classes is not None
        )
        accept = each(clients, check, scale)
        seen = clients.sum(self.begin, accept=accept, edges=whole, widths=widths, scale=scale)
        base = self.base(seen["sums"].double() / seen["weight"].double(), spec)
        trees = len(self.directions(spec))
        constant = leaves_of(base.float().expand(trees, -1), spec.features)
        f = HeldSum().grown(1.0, constant, torch.ones(1, dtype=torch.float64))
        return State(f=f, edges=whole, widths=widths, spec=spec)

    def base(self, mean: Tensor, spec: Spec) -> Tensor:
        """f^0: the constant that fits the mean of the targets, or the classes' shares, best."""
        loss = self._loss(spec.classes)
        if isinstance(loss, CrossEntropy):
            logs = mean.clamp(min=1e-6).log()
            return logs - logs.mean()
        if isinstance(loss, PoissonNLL):
            return mean.clamp(min=1e-6).log()
        return mean if isinstance(loss, Squared) else torch.zeros(spec.outputs)

    def round(self, clients: Clients, state: State) -> State:
        rule = SplitRule(self.leaf, self.l2, self.gain)
        edges = edges_of(state.edges, state.widths)
        growing = Growing(edges, self.directions(state.spec), rule)

        def ask(trees: Trees, nodes: int) -> tuple[np.ndarray, tuple[int, ...]]:
            return self.sums(clients, state, trees, nodes, growing.offsets)

        trees = growing.grow(self.depth, ask, self.lr)
        return state.replace(f=state.f.grown(1.0, trees, torch.ones(1, dtype=torch.float64)))

    def sums(
        self, clients: Clients, state: State, trees: Trees, nodes: int, offsets: np.ndarray
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        """The histograms of all clients at the leaves of `trees`, and the clients that answered."""
        scale = _scale(clients)
        plain = isinstance(self._loss(state.spec.classes), Squared) and not state.spec.weighted

        def check(reply: Tree, most: float) -> None:
            check_histograms(reply, most, nodes, offsets, 2 if plain else 3)

        reply = clients.sum(
            self.histograms, accept=each(clients, check, scale), f=state.f, trees=trees,
            nodes=nodes, scale=scale,
        )  # fmt: skip
        sums = reply["sums"].double().numpy() / scale
        who = clients.ids if clients.answered is None else clients.answered
        # the second derivative is 1: its sum is the number of rows
        return sums if sums.shape[2] == 3 else sums[..., [0, 1, 1]], tuple(who.tolist())

    def predictor(self, state: State) -> Predictor:
        _, weights = state.f.since(0)
        oracle = self.oracle(state.spec)
        form = Ensemble(oracle, oracle.concat(state.f.parts), torch.cat(weights), state.spec)
        return Predictor(form, form.spec, shares_of(self._loss(state.spec.classes), softmax))

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        classes = None if y.is_floating_point() else outputs.shape[-1]
        return self._loss(classes).value(outputs, y)


def edges_of(padded: Tensor, widths: Tensor) -> list[np.ndarray]:
    """The edges of each feature, without the zeros that fill up the rows."""
    return [row[:w] for row, w in zip(padded.numpy(), widths.tolist(), strict=True)]


def _scale(clients: Clients) -> float:
    """A power of two, which rounds nothing, that makes counts of all rows at most 1."""
    return 2.0 ** -math.ceil(math.log2(max(clients.total_rows, 1)))


def _worth(client: Client) -> Tensor:
    worth = client.data.worth
    return (client.data.weight if worth is None else worth).double()
