"""Networks and sums in an ONNX graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foedus.base.spec import Spec
from foedus.export.onnx.graph import Graph
from foedus.export.to_torch import network, plain
from foedus.models.base import Model, Params, image_shape
from foedus.models.cnn import CNN
from foedus.models.mlp import MLP


def emit_network(graph: Graph, model: Model, params: Params, x: str, spec: Spec) -> str:
    """A model with its parameters; other models than those of foedus are exported by PyTorch."""
    if not plain(model):
        kind = torch.int64 if spec.integers else torch.float32
        return graph.module(network(model, params, spec), x, spec.shape, kind)
    leak = 0.0
    if isinstance(model, CNN):
        x, leak = emit_convolutions(graph, model, params, x, spec), model.leak
    if isinstance(model, CNN) or len(spec.shape) > 1:
        x = graph.add("Flatten", x)
    layers = [("weight", "bias")]
    if isinstance(model, MLP | CNN):
        layers = [(f"weight{i}", f"bias{i}") for i in range(len(model.hidden) + 1)]
    x = graph.cast(x, params[layers[0][0]].dtype)
    for i, names in enumerate(layers):
        x = emit_bend(graph, x, leak) if i else x
        terms = [graph.constant(params[name]) for name in names if name in params]
        x = graph.add("Gemm", x, *terms, transB=1)
    return x


def emit_bend(graph: Graph, x: str, leak: float) -> str:
    return graph.add("LeakyRelu", x, alpha=leak) if leak else graph.add("Relu", x)


def emit_convolutions(graph: Graph, model: CNN, params: Params, x: str, spec: Spec) -> str:
    if len(spec.shape) != 3:
        x = graph.add("Reshape", x, graph.constant(np.array([-1, *image_shape(spec)], np.int64)))
    pad = model.kernel // 2 if model.padding == "same" else 0
    for i in range(len(model.channels)):
        terms = [graph.constant(params[f"{name}{i}"]) for name in ("conv", "conv_bias")]
        x = graph.add("Conv", x, *terms, pads=[pad] * 4)
        x = graph.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
        x = emit_bend(graph, x, model.leak)
    return x


def weighted(graph: Graph, parts: list[str], weights: Tensor) -> str:
    """sum_j weights_j parts_j."""
    terms = [graph.add("Mul", p, graph.constant(w)) for p, w in zip(parts, weights, strict=True)]
    return graph.add("Sum", *terms)


def constant_rows(graph: Graph, x: str, values: Tensor) -> str:
    """The same outputs for every row."""
    rows = graph.add("Shape", x, start=0, end=1)
    shape = graph.add("Concat", rows, graph.constant(np.array([1], np.int64)), axis=0)
    return graph.add("Expand", graph.constant(values.float()[None]), shape)
