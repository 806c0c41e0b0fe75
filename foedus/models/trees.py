"""Regression trees as arrays: fitted by scikit-learn, applied by compiled code if available.

A forest is one flat structure of nodes with a root for each tree. Nothing but arrays is ever sent
or stored, and every index is checked before the compiled code sees it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foedus import kernels
from foedus.base import tree
from foedus.errors import ReplyError
from foedus.wire.arrays import Trees

_THREADS_FROM = 1 << 16
"""Rows times trees from which several threads are faster."""


def fit_trees(
    x: np.ndarray, y: np.ndarray, count: int, seed: int, *, depth: int | None = None, leaf: int = 1,
    extra: bool = False, features: float = 1.0, rows: float = 1.0,
    weight: np.ndarray | None = None,
) -> Trees:  # fmt: skip
    """`count` regression trees of y (n, k) on x (n, d), one after the other from one generator.

    Its draws do not depend on other threads. weight: of the rows (sample_weight); rows: the part of
    them, drawn without replacement, that a tree is grown on.

    The same trees as `DecisionTreeRegressor(max_depth=depth, min_samples_leaf=leaf,
    max_features=features, random_state=...)` grows, with splitter "random" where `extra`; by
    scikit-learn's own compiled builder. For small trees, the Python code of its estimators takes as
    long as the builder, and blocks other threads.
    """
    from sklearn.tree._criterion import MSE
    from sklearn.tree._splitter import BestSplitter, RandomSplitter
    from sklearn.tree._tree import DepthFirstTreeBuilder, Tree

    (whole, columns), outputs = x.shape, y.shape[1]
    draws, look_at = np.random.RandomState(seed & 0xFFFFFFFF), max(1, int(features * columns))
    kind = RandomSplitter if extra else BestSplitter
    splitter = kind(MSE(outputs, whole), look_at, leaf, 0.0, draws, None)
    deepest = np.iinfo(np.int32).max if depth is None else depth
    builder = DepthFirstTreeBuilder(splitter, max(2, 2 * leaf), leaf, 0.0, deepest, 0.0)
    ones = np.ones(outputs, np.intp)
    x, y = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(y, np.float64)
    grown = [Tree(columns, ones, outputs) for _ in range(count)]
    weight = None if weight is None else np.asarray(weight, np.float64)
    used = max(1, round(rows * len(x)))
    for one in grown:
        some = weight
        if used < len(x):
            some = np.ones(len(x)) if weight is None else weight.copy()
            some[draws.permutation(len(x))[used:]] = 0
        builder.build(one, x, y, some, None)
    return _sound(from_sklearn(*grown))


def _sound(trees: Trees) -> Trees:
    """The same, grown in this process: `check_trees` need not look at its nodes.

    Never set for trees read from a message.
    """
    object.__setattr__(trees, "_checked", True)
    return trees


def from_sklearn(*trees: Any) -> Trees:
    """scikit-learn's trees (`estimator.tree_`) as arrays; float32 rows go the same way in both."""
    sizes = [t.node_count for t in trees]
    roots = np.cumsum([0, *sizes[:-1]]).astype(np.int32)
    nodes = [t.__getstate__()["nodes"] for t in trees]

    def column(name: str, kind: type) -> np.ndarray:
        return np.concatenate([n[name] for n in nodes], dtype=kind, casting="unsafe")

    children = ("left_child", "right_child")
    feature, left, right = (column(name, np.int32) for name in ("feature", *children))
    exact, leaf, base = column("threshold", np.float64), left < 0, np.repeat(roots, sizes)
    base[leaf] = 0
    left += base
    right += base
    threshold = exact.astype(np.float32)
    # Thresholds lie between two values of float32; rounding up might reach the larger one.
    np.nextafter(threshold, np.float32(-np.inf), out=threshold, where=threshold > exact)
    threshold[leaf] = 0
    ends = (np.flatnonzero(n["left_child"] < 0) for n in nodes)
    values = [t.value[:, :, 0].take(end, 0) for t, end in zip(trees, ends, strict=True)]
    value = np.concatenate(values, dtype=np.float32, casting="unsafe")
    tensor = torch.from_numpy
    return Trees(
        tensor(np.maximum(feature, -1)), tensor(threshold), tensor(left), tensor(right),
        tensor(value), tensor(roots), trees[0].n_features,
    )  # fmt: skip


def join(parts: list[Trees]) -> Trees:
    """Many flat structures as one."""
    if len(parts) == 1:
        return parts[0]
    sizes = np.array([len(p.feature) for p in parts])
    begin = np.cumsum(sizes) - sizes
    # what was sent may be narrower than the sums need
    kind = torch.int32 if sizes.sum() < 2**31 else torch.int64

    def together(name: str, kind: torch.dtype) -> Tensor:
        # Copied by NumPy, since waking PyTorch's threads takes longer; into PyTorch's memory, since
        # NumPy requests huge pages, which may take the system longest to find.
        pieces = [getattr(p, name).numpy() for p in parts]
        whole = torch.empty(sum(map(len, pieces)), *pieces[0].shape[1:], dtype=kind)
        np.concatenate(pieces, out=whole.numpy())
        return whole

    def moved(name: str) -> Tensor:
        whole = together(name, kind)
        ends = np.cumsum([len(getattr(p, name)) for p in parts])
        # views of it
        for numbers, base in zip(np.split(whole.numpy(), ends[:-1]), begin.tolist(), strict=True):
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
    return _sound(joined) if all(hasattr(p, "_checked") for p in parts) else joined


def some_trees(trees: Trees, first: int, last: int) -> Trees:
    """Trees first .. last - 1 of a structure from `join`, where their nodes are contiguous."""
    begin = int(trees.roots[first])
    end = int(trees.roots[last]) if last < len(trees.roots) else len(trees.feature)
    part = slice(begin, end)
    children = (trees.left[part], trees.right[part])
    left, right = (torch.where(child >= 0, child - begin, -1) for child in children)
    leaves = slice(*(int((trees.feature[:n] < 0).sum()) for n in (begin, end)))
    rest = (trees.value[leaves], trees.roots[first:last] - begin, trees.features)
    return Trees(trees.feature[part], trees.threshold[part], left, right, *rest)


def check_trees(
    trees: Trees, features: int, outputs: int, count: int | None = None, depth: int | None = None
) -> None:
    """Refuse trees that do not fit the data, whose children do not come later, or that are too
    deep.

    A chain of nodes would make each row cost a number of steps proportional to its bytes.
    """
    if problem := trees.fault():
        raise ReplyError(f"these are not valid trees: {problem}")
    n = len(trees.feature)
    if trees.feature.dim() != 1 or trees.features != features or trees.value.shape[-1] != outputs:
        raise ReplyError(
            f"trees for {trees.features} features and {trees.value.shape[-1]} outputs; the data "
            f"has {features} and {outputs}"
        )
    if count is not None and len(trees.roots) != count:
        raise ReplyError(f"{len(trees.roots)} trees were sent instead of {count}")
    if hasattr(trees, "_checked"):
        return
    arrays = (trees.feature, trees.left, trees.right, trees.roots)
    feature, left, right, roots = (array.numpy() for array in arrays)
    if not len(roots) or roots[0] != 0 or (roots[1:] <= roots[:-1]).any() or roots[-1] >= n:
        raise ReplyError("the roots of trees must rise from node 0, each at a node of its own")
    at, leaf, ends = np.arange(n), feature < 0, np.append(roots[1:].astype(np.int64), n)
    end = np.repeat(ends, ends - roots)  # where a node's tree ends
    inside = (feature >= -1) & (feature < features)
    forward = leaf | ((left > at) & (left < end) & (right > at) & (right < end))
    if not (inside & forward).all():
        raise ReplyError(
            "a tree's node points to a feature that does not exist, backwards, or out of its tree"
        )
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


def _nodes(trees: Trees) -> tuple[np.ndarray, ...]:
    """The nodes in the form for evaluation, packed or as arrays, made once; never out of bounds."""
    name = "_packed" if kernels.ready else "_arrays"
    if hasattr(trees, name):
        return getattr(trees, name)
    if len(trees.feature) > np.iinfo(np.int32).max:
        raise ReplyError(f"{len(trees.feature)} nodes are more than can be numbered")
    arrays = (trees.feature, trees.left, trees.right, trees.roots)
    feature, left, right, roots = (np.ascontiguousarray(a.numpy(), np.int32) for a in arrays)
    threshold = np.ascontiguousarray(trees.threshold.numpy())
    pack = kernels.pack_trees if kernels.ready else _plain
    packed = pack(feature, threshold, left, right, roots, trees.features)
    if packed is None:
        raise ReplyError(
            "a tree's nodes must lie side by side, from its root on, and point forwards"
        )
    *nodes, leaves = packed
    if leaves != len(trees.value):
        raise ReplyError(f"trees with {leaves} leaves have {len(trees.value)} rows of values")
    object.__setattr__(trees, name, (*nodes, roots))
    return getattr(trees, name)


def _plain(
    feature: np.ndarray,
    threshold: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    roots: np.ndarray,
    features: int,
) -> tuple | None:
    """The Python version of `kernels.pack_trees`, for `_walked`: the arrays, and the numbers of
    leaves."""
    n, leaf = len(feature), feature < 0
    sizes = np.diff(roots, append=n)
    if not len(roots) or roots[0] != 0 or (sizes < 1).any():
        return None
    at, end = np.arange(n), np.repeat(np.append(roots[1:], n), sizes)
    fine = leaf | ((feature < features) & (left > at) & (left < end) & (right > at) & (right < end))
    numbers = np.cumsum(leaf, dtype=np.int32) - 1
    return (feature, threshold, left, right, numbers, leaf.sum()) if fine.all() else None


def _walked(
    x: np.ndarray, nodes: tuple[np.ndarray, ...], shares: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """The Python version of `kernels.sum_trees`: level by level, all trees together."""
    feature, threshold, left, right, number, roots = nodes
    at, row = np.tile(roots, (len(x), 1)), np.arange(len(x))[:, None]
    while (inner := feature[at] >= 0).any():
        yes = x[row, np.maximum(feature[at], 0)] <= threshold[at]
        at = np.where(inner, np.where(yes, left[at], right[at]), at)
    factor = torch.from_numpy(shares).double().expand(at.shape).contiguous()
    leaf, table = torch.from_numpy(number[at]), torch.from_numpy(values).double()
    return F.embedding_bag(leaf, table, per_sample_weights=factor, mode="sum").float().numpy()


_BLOCK = 1 << 20
"""Rows times trees of a block in NumPy."""


def predict_trees(
    trees: Trees, x: Tensor, weights: Tensor | None = None, threads: int | None = None
) -> Tensor:
    """sum_j weights_j tree_j(x) of rows (n, d): (n, k).

    The trees must have been checked (`check_trees`). threads: of compiled code.
    """
    rows = np.ascontiguousarray(x.flatten(1).numpy(), np.float32)
    if rows.shape[1] != trees.features:
        raise ReplyError(
            f"trees for {trees.features} features were asked about rows of {rows.shape[1]}"
        )
    nodes, values = _nodes(trees), trees.value.contiguous().numpy()
    weights = torch.ones(len(trees.roots)) if weights is None else weights
    shares = weights.float().contiguous().numpy()
    if kernels.ready:
        few = len(rows) * len(shares) < _THREADS_FROM
        threads = 1 if few else threads or torch.get_num_threads()
        packed, roots = nodes
        sums = kernels.sum_trees(rows, packed, roots, shares, values, threads)
        return torch.from_numpy(sums)
    step = max(1, _BLOCK // len(shares))
    blocks = (rows[i : i + step] for i in range(0, max(1, len(rows)), step))
    walked = [_walked(block, nodes, shares, values) for block in blocks]
    return torch.from_numpy(np.concatenate(walked))
