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

from foedus.core import tree
from foedus.core.arrays import Trees
from foedus.errors import ReplyError

_THREADS_FROM = 1 << 16
"""Rows times trees from which several threads pay."""


def fit_trees(
    x: np.ndarray, y: np.ndarray, count: int, seed: int, *, depth: int | None = None, leaf: int = 1, extra: bool = False,
    features: float = 1.0,
) -> Trees:  # fmt: skip
    """`count` regression trees of y (n, k) on x (n, d), one after the other from one generator: no other thread has a part in its draws.

    The same trees as `DecisionTreeRegressor(max_depth=depth, min_samples_leaf=leaf, max_features=features, random_state=...)` grows, with
    splitter "random" where `extra`; by scikit-learn's own compiled builder. Around it, its estimators take as long in Python as small
    trees take to grow, and threads must wait for each other meanwhile.
    """
    from sklearn.tree._criterion import MSE
    from sklearn.tree._splitter import BestSplitter, RandomSplitter
    from sklearn.tree._tree import DepthFirstTreeBuilder, Tree

    (rows, columns), outputs = x.shape, y.shape[1]
    draws, look_at = np.random.RandomState(seed & 0xFFFFFFFF), max(1, int(features * columns))
    splitter = (RandomSplitter if extra else BestSplitter)(MSE(outputs, rows), look_at, leaf, 0.0, draws, None)
    deepest = np.iinfo(np.int32).max if depth is None else depth
    builder, ones = DepthFirstTreeBuilder(splitter, max(2, 2 * leaf), leaf, 0.0, deepest, 0.0), np.ones(outputs, np.intp)
    x, y = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(y, np.float64)
    grown = [Tree(columns, ones, outputs) for _ in range(count)]
    for one in grown:
        builder.build(one, x, y, None, None)
    found = from_sklearn(*grown)
    # All clients will apply them: they are kept as they were grown, but for the values of leaves. This says, too, that they are sound.
    silent = np.zeros((max(one.node_count for one in grown), 1, 1))
    object.__setattr__(found, "_compiled", [_silent(one.__getstate__()["nodes"], columns, silent) for one in grown])
    return found


def _silent(nodes: np.ndarray, features: int, values: np.ndarray) -> Any:
    """scikit-learn's tree of these nodes, to say in which of them a row ends; `values`, zeros, enough for all of them."""
    from sklearn.tree._tree import Tree

    one = Tree(features, np.ones(1, np.intp), 1)
    one.__setstate__({"max_depth": len(nodes), "node_count": len(nodes), "nodes": nodes, "values": values[: len(nodes)]})
    return one


def from_sklearn(*trees: Any) -> Trees:
    """scikit-learn's trees (`estimator.tree_`) as arrays, one after the other; rows of float32 go the same way in both."""
    sizes = [t.node_count for t in trees]
    roots = np.cumsum([0, *sizes[:-1]]).astype(np.int32)
    nodes = [t.__getstate__()["nodes"] for t in trees]

    def column(name: str, kind: type) -> np.ndarray:
        return np.concatenate([n[name] for n in nodes], dtype=kind, casting="unsafe")

    feature, left, right = (column(name, np.int32) for name in ("feature", "left_child", "right_child"))
    exact, leaf, base = column("threshold", np.float64), left < 0, np.repeat(roots, sizes)
    base[leaf] = 0
    left += base
    right += base
    threshold = exact.astype(np.float32)
    # Thresholds lie between two values of float32: rounded up, one might reach the larger of them.
    np.nextafter(threshold, np.float32(-np.inf), out=threshold, where=threshold > exact)
    threshold[leaf] = 0
    ends = [np.flatnonzero(n["left_child"] < 0) for n in nodes]
    value = np.concatenate(
        [t.value[:, :, 0].take(end, 0) for t, end in zip(trees, ends, strict=True)], dtype=np.float32, casting="unsafe"
    )
    numbers = (np.maximum(feature, -1), threshold, left, right, value, roots)
    return Trees(*map(torch.from_numpy, numbers), trees[0].n_features)


def join(parts: list[Trees]) -> Trees:
    """Many flat structures as one."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.array([len(p.feature) for p in parts])
    begin = np.cumsum(sizes) - sizes
    kind = torch.int32 if sizes.sum() < 2**31 else torch.int64  # what was sent may be narrower than the sums need

    def together(name: str, kind: torch.dtype) -> Tensor:
        """Copied by NumPy, since to wake PyTorch's threads takes longer than this; into memory of PyTorch's, since NumPy asks for huge
        pages, which the system may take longer to find than all else here."""
        pieces = [getattr(p, name).numpy() for p in parts]
        whole = torch.empty(sum(map(len, pieces)), *pieces[0].shape[1:], dtype=kind)
        np.concatenate(pieces, out=whole.numpy())
        return whole

    def moved(name: str) -> Tensor:
        whole = together(name, kind)
        ends = np.cumsum([len(getattr(p, name)) for p in parts])
        for numbers, base in zip(np.split(whole.numpy(), ends[:-1]), begin.tolist(), strict=True):  # views of it
            inner = numbers >= 0
            numbers += base + 1
            numbers *= inner
            numbers -= 1  # -1 stays -1: a leaf has no children
        return whole

    arrays = (
        together("feature", torch.int32),
        together("threshold", torch.float32),
        moved("left"),
        moved("right"),
        together("value", torch.float32),
        moved("roots"),
    )
    joined = Trees(*arrays, parts[0].features)
    if all(hasattr(p, "_compiled") for p in parts):
        object.__setattr__(joined, "_compiled", [tree for p in parts for tree in p._compiled])
    return joined


def some_trees(trees: Trees, first: int, last: int) -> Trees:
    """Trees first .. last - 1 of a flat structure that `join` made: their nodes lie side by side."""
    begin = int(trees.roots[first])
    end = int(trees.roots[last]) if last < len(trees.roots) else len(trees.feature)
    part = slice(begin, end)
    left, right = (torch.where(getattr(trees, k)[part] >= 0, getattr(trees, k)[part] - begin, -1) for k in ("left", "right"))
    leaves = slice(*(int((trees.feature[:n] < 0).sum()) for n in (begin, end)))
    rest = (trees.value[leaves], trees.roots[first:last] - begin, trees.features)
    return Trees(trees.feature[part], trees.threshold[part], left, right, *rest)


def check_trees(trees: Trees, features: int, outputs: int, count: int | None = None, depth: int | None = None) -> None:
    """Refuse trees that do not fit the data, whose nodes point anywhere but forwards, or that are deeper than asked for.

    A chain of nodes would cost those who apply it as many steps for each row as it has bytes.
    """
    if problem := trees.fault():
        raise ReplyError(f"these are no trees: {problem}")
    n = len(trees.feature)
    if trees.feature.dim() != 1 or trees.features != features or trees.value.shape[-1] != outputs:
        raise ReplyError(
            f"trees for {trees.features} features and {trees.value.shape[-1]} outputs; the data has {features} and {outputs}"
        )
    if count is not None and len(trees.roots) != count:
        raise ReplyError(f"{len(trees.roots)} trees were sent where {count} were due")
    if hasattr(trees, "_compiled"):  # grown in this process, or checked before: never read from a message
        return
    feature, left, right, roots = (getattr(trees, k).numpy() for k in ("feature", "left", "right", "roots"))
    if not len(roots) or roots[0] != 0 or (roots[1:] <= roots[:-1]).any() or roots[-1] >= n:
        raise ReplyError("the roots of trees must rise from node 0, each at a node of its own")
    at, leaf, ends = np.arange(n), feature < 0, np.append(roots[1:].astype(np.int64), n)
    end = np.repeat(ends, ends - roots)  # where a node's tree ends
    inside = (feature >= -1) & (feature < features)
    forward = leaf | ((left > at) & (left < end) & (right > at) & (right < end))
    if not (inside & forward).all():
        raise ReplyError("a tree's node points to a feature that does not exist, backwards, or out of its tree")
    inner = np.flatnonzero(~leaf)
    parents = np.bincount(np.concatenate((left[inner], right[inner], roots)), minlength=n)
    if (parents != 1).any():
        raise ReplyError("every node of a tree but its root must be the child of one other")
    level = roots
    for _ in range(depth or 0):
        level = level[~leaf[level]]
        level = np.concatenate((left[level], right[level]))
    if depth is not None and not leaf[level].all():
        raise ReplyError(f"a tree is deeper than the {depth} levels that were asked for")
    if leaf.sum() != len(trees.value):
        raise ReplyError(f"{len(trees.value)} values were sent for {leaf.sum()} leaves")
    if not tree.all_finite((trees.value, trees.threshold)):
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
    feature, left, right, threshold, roots = (
        getattr(trees, k).numpy() for k in ("feature", "left", "right", "threshold", "roots")
    )
    begin = roots.astype(np.int64)
    sizes = np.diff(begin, append=len(feature))
    if not len(begin) or begin[0] != 0 or (sizes < 1).any():
        raise ReplyError("a tree's nodes must lie side by side, from its root on")
    base, size = np.repeat(begin, sizes), np.repeat(sizes, sizes)
    leaf, nodes = feature < 0, np.zeros(len(feature), _node_type())
    for name, child in (("left_child", left), ("right_child", right)):
        place = np.where(leaf, -1, child - base)
        if (place >= size).any() or (place < -1).any():
            raise ReplyError("a tree's nodes must lie side by side, from its root on")
        nodes[name] = place
    if leaf.sum() != len(trees.value):
        raise ReplyError(f"trees with {leaf.sum()} leaves have {len(trees.value)} rows of values")
    nodes["feature"] = np.where(leaf, -2, feature)
    nodes["threshold"] = threshold
    silent = np.zeros((int(sizes.max()), 1, 1))
    made = [_silent(nodes[i : i + n], trees.features, silent) for i, n in zip(begin.tolist(), sizes.tolist(), strict=True)]
    object.__setattr__(trees, "_compiled", made)
    return made


_BLOCK_TREES, _BLOCK_ROWS = 256, 4096


def predict_trees(trees: Trees, x: Tensor, weights: Tensor | None = None, threads: int | None = None) -> Tensor:
    """sum_j weights_j tree_j(x) of rows (n, d): (n, k). The trees must have been checked (`check_trees`).

    Compiled code finds the leaf of each row in each tree; the weighted sum over the leaves of a row is one pass (an embedding bag).
    Rows go in the order of their leaves in the first tree: neighbours then turn alike in the other trees, too, which takes a
    processor that guesses where they turn a tenth less time.
    """
    rows = np.ascontiguousarray(x.numpy().reshape(len(x), -1), np.float32)
    compiled, roots = _compiled(trees), trees.roots.tolist()
    if not hasattr(trees, "_number"):
        object.__setattr__(trees, "_number", np.cumsum(trees.feature.numpy() < 0, dtype=np.int32) - 1)
    number = trees._number  # of a leaf among the leaves, by its node
    share = (torch.ones(len(compiled)) if weights is None else weights).float()
    if not len(rows):
        return torch.zeros(0, trees.value.shape[-1])

    def total(part: np.ndarray) -> Tensor:
        order = np.argsort(compiled[0].apply(part))
        part, out = part[order], torch.zeros(len(part), trees.value.shape[-1], dtype=torch.float64)
        for first in range(0, len(compiled), _BLOCK_TREES):
            some = range(first, min(first + _BLOCK_TREES, len(compiled)))
            leaf = torch.from_numpy(np.stack([number[roots[j] :].take(compiled[j].apply(part)) for j in some], 1))
            factor = share[some.start : some.stop].expand(leaf.shape).contiguous()
            out += F.embedding_bag(leaf, trees.value, per_sample_weights=factor, mode="sum")
        return torch.empty(out.shape).index_copy_(0, torch.from_numpy(order), out.float())

    blocks = [rows[i : i + _BLOCK_ROWS] for i in range(0, len(rows), _BLOCK_ROWS)]
    workers = threads or torch.get_num_threads()
    if workers == 1 or len(rows) * len(compiled) < _THREADS_FROM:
        return torch.cat([total(b) for b in blocks])
    if len(blocks) < workers:
        blocks = np.array_split(rows, workers)
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.cat(list(pool.map(total, blocks)))
    finally:
        torch.set_num_threads(before)
