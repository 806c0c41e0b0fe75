"""Probabilities in an ONNX graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from foedus.errors import ModelError
from foedus.export import probabilities
from foedus.export.onnx.graph import Graph


def emit_shares(graph: Graph, shares: Callable[[Tensor], Tensor], z: str, classes: int) -> str:
    """Probabilities from outputs."""
    if shares is probabilities.as_they_are:
        return z
    if shares is probabilities.softmax:
        return graph.add("Softmax", z, axis=-1)
    if shares is probabilities.sigmoid_shares:
        return emit_sigmoids(graph, z)
    if shares is probabilities.simplex_shares:
        return emit_simplex(graph, z, classes)
    raise ModelError(f"the probabilities {shares!r} are the model's own and have no ONNX export")


def emit_sigmoids(graph: Graph, z: str) -> str:
    """The softmax of log sigmoid(z) = -softplus(-z)."""
    minus = graph.add("Neg", graph.cast(z, torch.float32))
    return graph.add("Softmax", graph.add("Neg", graph.add("Softplus", minus)), axis=-1)


def emit_simplex(graph: Graph, z: str, classes: int) -> str:
    """The closest point of the simplex, as `foedus.geometry.domain.simplex`: max(y - theta, 0)."""
    last = graph.constant(np.array([-1], np.int64))
    z = graph.cast(z, torch.float64)
    y = graph.add("Sub", z, graph.add("ReduceMax", z, last))
    y = graph.add("Max", y, graph.constant(np.float64(-1)))
    size = graph.constant(np.array([classes], np.int64))
    ordered = graph.add("TopK", y, size, outputs=2)
    one, count = np.float64(1), np.arange(1.0, classes + 1)
    sums = graph.add("CumSum", ordered, graph.constant(np.int64(1)))
    excess = graph.add("Sub", sums, graph.constant(one))
    positive = graph.add("Greater", graph.add("Mul", ordered, graph.constant(count)), excess)
    support = graph.add("ReduceSum", graph.cast(positive, torch.float64), last)
    place = graph.cast(graph.add("Sub", support, graph.constant(one)), torch.int64)
    theta = graph.add("Div", graph.add("GatherElements", excess, place, axis=1), support)
    return graph.add("Relu", graph.add("Sub", y, theta))
