"""Feature maps in an ONNX graph."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from foedus.base.spec import Spec
from foedus.export.onnx.graph import Graph
from foedus.export.onnx.networks import constant_rows
from foedus.export.to_torch import known
from foedus.models.features import FeatureMap, Identity, ModuleFeatures, Polynomial, RandomFourier


def emit_features(
    graph: Graph, features: FeatureMap, x: str, spec: Spec, dtype: torch.dtype
) -> str:
    """Features (n, M) in `dtype`."""
    known(features, "ONNX export")
    if isinstance(features, ModuleFeatures):
        own = features.precision or torch.float32
        module = nn.Sequential(copy.deepcopy(features.frozen), nn.Flatten())
        return graph.cast(graph.module(module, graph.cast(x, own), spec.shape, own), dtype)
    x = graph.cast(graph.add("Flatten", x) if len(spec.shape) > 1 else x, dtype)
    match features:
        case Identity(intercept=False):
            return x
        case Identity():
            return graph.add("Concat", x, ones(graph, x, dtype), axis=1)
        case Polynomial():
            with_one = graph.add("Concat", ones(graph, x, dtype), x, axis=1)
            factors = graph.constant(features.factors(spec.features))
            some = graph.add("Gather", with_one, factors, axis=1)
            return graph.add("ReduceProd", some, graph.constant(np.array([-1])), keepdims=0)
        case RandomFourier():
            waves = features.waves(spec.features, dtype)
            turns = graph.add("MatMul", x, graph.constant(waves[:-1]))
            turns = graph.add("Add", turns, graph.constant(waves[-1]))
            scale = graph.constant(torch.tensor(features.scale, dtype=dtype))
            return graph.add("Mul", graph.add("Cos", turns), scale)
    raise AssertionError(features)


def ones(graph: Graph, x: str, dtype: torch.dtype) -> str:
    """A column of ones for the rows of x (n, d)."""
    return graph.cast(constant_rows(graph, x, torch.ones(1)), dtype)
