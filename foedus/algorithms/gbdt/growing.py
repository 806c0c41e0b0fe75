"""The server's side of growing trees from sums of histograms, level by level."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from foedus.models.histograms import SplitRule, offsets_of
from foedus.models.trees import join
from foedus.wire.arrays import Trees

Ask = Callable[[Trees, int], tuple[np.ndarray, tuple[int, ...]]]


class Growing:
    """One tree of each output.

    Args:
        edges: The edges of each feature.
        directions: What each tree adds to the outputs, (trees, outputs).
        rule: Which splits are allowed.
    """

    def __init__(self, edges: list[np.ndarray], directions: torch.Tensor, rule: SplitRule):
        self.edges, self.rule = edges, rule
        self.offsets = offsets_of(np.array([len(e) for e in edges]))
        self.directions = directions
        self.trees: list[list[dict]] = [[{"feature": -1}] for _ in directions]

    def grow(self, depth: int, ask: Ask, lr: float) -> Trees:
        """The trees, as one function that is an average of trees.

        Of two children only the smaller one is asked for: the other's histogram is the parent's
        without it. If the clients that answer have changed, that would count the rows of those lost
        to it: then all children are asked for.

        Args:
            depth: The largest depth.
            ask: The sum of the histograms (nodes, bins, 3) over clients, for trees whose leaves
                have the numbers of the nodes that are asked for, from 1, and 0 elsewhere; and the
                ids of these clients.
            lr: The learning rate.
        """
        level = [(t, 0) for t in range(len(self.trees))]
        asked, who = ask(self._numbered(level), len(level))
        found = dict(zip(level, asked, strict=True))
        for at, histogram in found.items():
            self._node(at)["sums"] = self._whole(histogram)
        for d in range(depth):
            pairs = self._split(found)
            if not pairs or d + 1 == depth:  # the splits have told the sums of their leaves
                break
            small = [min(pair, key=lambda at: self._node(at)["sums"][2]) for _, pair in pairs]
            before, (asked, who) = who, ask(self._numbered(small), len(small))
            if who != before:
                level = [at for _, pair in pairs for at in pair]
                asked, who = ask(self._numbered(level), len(level))
                found = dict(zip(level, asked, strict=True))
                continue
            parents, found = found, {}
            for (at, pair), mine, histogram in zip(pairs, small, asked, strict=True):
                found[mine] = histogram
                (other,) = set(pair) - {mine}
                found[other] = parents[at] - histogram
        scale = lr * len(self.trees)
        value = lambda node: scale * float(self.rule.value(node["sums"]))  # noqa: E731
        values = [[value(node) for node in tree] for tree in self.trees]
        return self._joined(values, self.directions)

    def _node(self, at: tuple[int, int]) -> dict:
        return self.trees[at[0]][at[1]]

    def _whole(self, histogram: np.ndarray) -> np.ndarray:
        """The sums of a node, by its first feature, as `SplitRule.splits` has them."""
        return histogram[: self.offsets[1]].sum(0)

    def _split(self, found: dict) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
        """Split nodes where that gains; each one with its two children."""
        made = []
        features, bins, lefts = self.rule.splits(np.stack(list(found.values())), self.offsets)
        for at, feature, b, left in zip(found, features.tolist(), bins, lefts, strict=True):
            if feature < 0:
                continue
            tree, node = self.trees[at[0]], self._node(at)
            node |= {"feature": feature, "threshold": self.edges[feature][b], "child": len(tree)}
            # by the sums that the rule has tested: noise tells the parent's split others
            node["sums"] = self._whole(found[at])
            for sums in (left, node["sums"] - left):
                tree.append({"feature": -1, "sums": sums})
            made.append((at, [(at[0], len(tree) - 2), (at[0], len(tree) - 1)]))
        return made

    def _numbered(self, asked: list[tuple[int, int]]) -> Trees:
        number = {at: float(i + 1) for i, at in enumerate(asked)}
        each = enumerate(self.trees)
        values = [[number.get((t, i), 0.0) for i in range(len(n))] for t, n in each]
        return self._joined(values, torch.eye(len(self.trees)))

    def _joined(self, values: list[list[float]], directions: torch.Tensor) -> Trees:
        parts = zip(self.trees, values, directions, strict=True)
        return join([_arrays(*part, len(self.edges)) for part in parts])


def leaves_of(values: torch.Tensor, features: int) -> Trees:
    """Trees of one leaf each, with values (trees, outputs)."""
    one = torch.ones(1)
    return join([_arrays([{"feature": -1}], [1.0], value * one, features) for value in values])


def _arrays(
    nodes: list[dict], values: list[float], direction: torch.Tensor, features: int
) -> Trees:
    """One tree, whose leaves are multiples of a direction."""
    leaves = [i for i, node in enumerate(nodes) if node["feature"] < 0]
    value = torch.tensor([[float(values[i])] for i in leaves]) * direction
    child = torch.tensor([node.get("child", -1) for node in nodes], dtype=torch.int32)
    return Trees(
        torch.tensor([node["feature"] for node in nodes], dtype=torch.int32),
        torch.tensor([float(node.get("threshold", 0.0)) for node in nodes], dtype=torch.float32),
        child, torch.where(child >= 0, child + 1, -1).to(torch.int32), value,
        torch.zeros(1, dtype=torch.int32), features,
    )  # fmt: skip
