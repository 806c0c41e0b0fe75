"""Trees in an ONNX graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foedus.export.onnx.graph import Graph
from foedus.wire.arrays import Trees


def emit_trees(graph: Graph, trees: Trees, weights: Tensor, x: str) -> str:
    """sum_j weights_j tree_j(x), in double precision: a row goes left where x <= threshold."""
    feature, leaf = trees.feature.numpy(), trees.feature.numpy() < 0
    roots = trees.roots.numpy().astype(np.int64)
    sizes = np.diff(roots, append=len(feature))
    tree = np.repeat(np.arange(len(roots)), sizes)
    start = np.repeat(roots, sizes)
    number = np.arange(len(feature)) - start
    child = lambda side: np.where(leaf, 0, side.numpy() - start).tolist()  # noqa: E731
    outputs = trees.value.shape[1]
    share = weights.float().double().numpy()[tree[leaf]]
    values = trees.value.double().numpy() * share[:, None]
    tensor = graph.onnx.numpy_helper.from_array
    return graph.add(
        "TreeEnsembleRegressor",
        graph.cast(x, torch.float64),
        domain="ai.onnx.ml",
        aggregate_function="SUM",
        n_targets=outputs,
        nodes_treeids=tree.tolist(),
        nodes_nodeids=number.tolist(),
        nodes_featureids=np.maximum(feature, 0).tolist(),
        nodes_modes=["LEAF" if end else "BRANCH_LEQ" for end in leaf.tolist()],
        nodes_values_as_tensor=tensor(trees.threshold.double().numpy(), "thresholds"),
        nodes_truenodeids=child(trees.left),
        nodes_falsenodeids=child(trees.right),
        target_treeids=np.repeat(tree[leaf], outputs).tolist(),
        target_nodeids=np.repeat(number[leaf], outputs).tolist(),
        target_ids=np.tile(np.arange(outputs), int(leaf.sum())).tolist(),
        target_weights_as_tensor=tensor(values.ravel(), "values"),
    )
