"""Regression trees as arrays: fitted by scikit-learn, sent as `wire.Trees`, applied by scikit-learn's own compiled code.

A forest is one flat structure of nodes with a root for each tree. Nothing but arrays is ever sent or stored, and every index is
checked before the compiled code sees it.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foedus.core.arrays import Trees
from foedus.errors import ReplyError

_THREADS_FROM = 1 << 16
"""Rows times trees from which several threads pay."""


def fit_trees(x: np.ndarray, y: np.ndarray, count: int, seed: int, **options: Any) -> Trees:
    """`count` regression trees of y (n, k) on x (n, d), one after the other from seeds of their own.

    options: as of scikit-learn's `DecisionTreeRegressor` (`splitter="random"` for extremely randomised trees).
    """
    from sklearn.tree import DecisionTreeRegressor

    # One generator for all: scikit-learn hashes a seed slowly.
    state = np.random.RandomState(seed & 0xFFFFFFFF)
    fitted = [DecisionTreeRegressor(random_state=state, **options).fit(x, y, check_input=False).tree_ for _ in range(count)]
    return join([from_sklearn(t) for t in fitted])


def from_sklearn(tree: Any) -> Trees:
    """One of scikit-learn's trees (`estimator.tree_`) as arrays; rows of float32 go the same way in both."""
    value = tree.value[:, :, 0] if tree.value.ndim == 3 else tree.value
    threshold = tree.threshold.astype(np.float32)
    # Thresholds lie between two values of float32: rounded up, one might reach the larger of them.
    threshold = np.where(threshold > tree.threshold, np.nextafter(threshold, np.float32(-np.inf)), threshold)
    leaf = tree.children_left < 0
    numbers = [np.where(leaf, -1, a).astype(np.int32) for a in (tree.feature, tree.children_left, tree.children_right)]
    feature, left, right = (torch.from_numpy(a) for a in numbers)
    threshold = torch.from_numpy(np.where(leaf, 0, threshold).astype(np.float32))
    # Only leaves speak; zeros elsewhere are shorter where messages are compressed.
    value = torch.from_numpy(np.where(leaf[:, None], value, 0).astype(np.float32))
    return Trees(feature, threshold, left, right, value, torch.zeros(1, dtype=torch.int32), tree.n_features)


def join(parts: list[Trees]) -> Trees:
    """Many flat structures as one."""
    if len(parts) == 1:
        return parts[0]
    sizes = [len(p.feature) for p in parts]
    base = np.cumsum([0, *sizes[:-1]]).tolist()
    kind = torch.int32 if sum(sizes) < 2**31 else torch.int64  # what was sent may be narrower than the sums need

    def moved(name: str) -> Tensor:
        numbers = ((getattr(p, name).to(kind), b) for p, b in zip(parts, base, strict=True))
        return torch.cat([torch.where(v >= 0, v + b, -1) for v, b in numbers])

    feature = torch.cat([p.feature.to(torch.int32) for p in parts])
    threshold, value = (torch.cat([getattr(p, name) for p in parts]) for name in ("threshold", "value"))
    return Trees(feature, threshold, moved("left"), moved("right"), value, moved("roots"), parts[0].features)


def some_trees(trees: Trees, first: int, last: int) -> Trees:
    """Trees first .. last - 1 of a flat structure that `join` made: their nodes lie side by side."""
    begin = int(trees.roots[first])
    end = int(trees.roots[last]) if last < len(trees.roots) else len(trees.feature)
    part = slice(begin, end)
    left, right = (torch.where(getattr(trees, k)[part] >= 0, getattr(trees, k)[part] - begin, -1) for k in ("left", "right"))
    rest = (trees.value[part], trees.roots[first:last] - begin, trees.features)
    return Trees(trees.feature[part], trees.threshold[part], left, right, *rest)


def check_trees(trees: Trees, features: int, outputs: int, count: int | None = None) -> None:
    """Refuse trees that do not fit the data, or whose nodes point anywhere but forwards."""
    if problem := trees.fault():
        raise ReplyError(f"these are no trees: {problem}")
    n = len(trees.feature)
    if trees.feature.dim() != 1 or trees.features != features or trees.value.shape[-1] != outputs:
        raise ReplyError(
            f"trees for {trees.features} features and {trees.value.shape[-1]} outputs; the data has {features} and {outputs}"
        )
    if count is not None and len(trees.roots) != count:
        raise ReplyError(f"{len(trees.roots)} trees were sent where {count} were due")
    roots = trees.roots.long()
    if not len(roots) or int(roots[0]) != 0 or not bool((roots[1:] > roots[:-1]).all()) or int(roots[-1]) >= n:
        raise ReplyError("the roots of trees must rise from node 0, each at a node of its own")
    at, inner = torch.arange(n), trees.feature >= 0
    end = torch.cat((roots[1:], torch.tensor([n])))[torch.searchsorted(roots, at, right=True) - 1]  # where a node's tree ends
    inside = (trees.feature >= -1) & (trees.feature < features)
    forward = ~inner | ((trees.left > at) & (trees.left < end) & (trees.right > at) & (trees.right < end))
    if not bool((inside & forward).all()):
        raise ReplyError("a tree's node points to a feature that does not exist, backwards, or out of its tree")
    if not bool(torch.isfinite(trees.value).all()) or not bool(torch.isfinite(trees.threshold).all()):
        raise ReplyError("a tree holds numbers that are not finite")


@functools.cache
def _node_type() -> np.dtype:
    """How this version of scikit-learn lays out a node."""
    from sklearn.tree import DecisionTreeRegressor

    return DecisionTreeRegressor(max_depth=1).fit([[0.0], [1.0]], [0.0, 1.0]).tree_.__getstate__()["nodes"].dtype


def _compiled(trees: Trees) -> list[Any]:
    """scikit-learn's trees from arrays that have been checked; one for each root, its nodes from the root on. Made once for a structure.

    They only say where a row ends: the values of leaves stay where they are.
    """
    if hasattr(trees, "_compiled"):
        return trees._compiled
    from sklearn.tree._tree import Tree

    roots = trees.roots.long().tolist()
    feature, left, right, threshold = (getattr(trees, k).numpy() for k in ("feature", "left", "right", "threshold"))
    made: list[Any] = []
    for begin, end in zip(roots, [*roots[1:], len(feature)], strict=True):
        part = slice(begin, end)
        leaf = feature[part] < 0
        nodes = np.zeros(max(end - begin, 0), _node_type())
        for name, child in (("left_child", left), ("right_child", right)):
            nodes[name] = np.where(leaf, -1, child[part].astype(np.int64) - begin)
            if not len(nodes) or (nodes[name] >= len(nodes)).any() or (nodes[name] < -1).any():
                raise ReplyError("a tree's nodes must lie side by side, from its root on")
        nodes["feature"] = np.where(leaf, -2, feature[part])
        nodes["threshold"] = threshold[part]
        tree = Tree(trees.features, np.ones(1, np.intp), 1)
        tree.__setstate__(
            {"max_depth": len(nodes), "node_count": len(nodes), "nodes": nodes, "values": np.zeros((len(nodes), 1, 1))}
        )
        made.append(tree)
    object.__setattr__(trees, "_compiled", made)
    return made


_BLOCK_TREES, _BLOCK_ROWS = 256, 4096


def predict_trees(trees: Trees, x: Tensor, weights: Tensor | None = None, threads: int | None = None) -> Tensor:
    """sum_j weights_j tree_j(x) of rows (n, d): (n, k). The trees must have been checked (`check_trees`).

    Compiled code finds the leaf of each row in each tree; the weighted sum over the leaves of a row is one pass (an embedding bag).
    """
    rows = np.ascontiguousarray(x.numpy().reshape(len(x), -1), np.float32)
    compiled, roots = _compiled(trees), trees.roots.long().tolist()
    share = (torch.ones(len(compiled)) if weights is None else weights).float()
    if not len(rows):
        return torch.zeros(0, trees.value.shape[-1])

    def total(part: np.ndarray) -> Tensor:
        out = torch.zeros(len(part), trees.value.shape[-1], dtype=torch.float64)
        for first in range(0, len(compiled), _BLOCK_TREES):
            some = range(first, min(first + _BLOCK_TREES, len(compiled)))
            leaf = torch.from_numpy(np.stack([compiled[j].apply(part) + roots[j] for j in some], 1))
            factor = share[some.start : some.stop].expand(leaf.shape).contiguous()
            out += F.embedding_bag(leaf, trees.value, per_sample_weights=factor, mode="sum")
        return out.float()

    blocks = [rows[i : i + _BLOCK_ROWS] for i in range(0, len(rows), _BLOCK_ROWS)]
    workers = threads or torch.get_num_threads()
    if workers == 1 or len(rows) * len(compiled) < _THREADS_FROM:
        return torch.cat([total(b) for b in blocks])
    if len(blocks) < workers:
        blocks = np.array_split(rows, workers)
    with ThreadPoolExecutor(workers) as pool:
        return torch.cat(list(pool.map(total, blocks)))
