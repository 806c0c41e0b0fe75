"""Trained models as ONNX files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.spec import Spec
from foedus.data.preprocess import Preprocessor
from foedus.errors import ModelError
from foedus.export import forms
from foedus.export.onnx.columns import emit_columns
from foedus.export.onnx.features import emit_features
from foedus.export.onnx.graph import Graph
from foedus.export.onnx.networks import constant_rows, emit_network, weighted
from foedus.export.onnx.shares import emit_shares
from foedus.export.onnx.trees import emit_trees
from foedus.export.refuse import refuse
from foedus.export.to_torch import columns_spec
from foedus.models.oracles import Forest, Net
from foedus.models.predictors.classifiers import Classifiers
from foedus.models.predictors.densities import Densities


def to_onnx(
    form: Any,
    spec: Spec,
    shares: Callable[[Tensor], Tensor],
    path: str | os.PathLike,
    preprocess: Preprocessor | None = None,
    classes: np.ndarray | None = None,
) -> None:
    """Write a graph from rows to "outputs", "probabilities" by `shares`, and, if `classes` are
    given, "label".

    The inputs are columns by name if `preprocess` has them, and otherwise one array "x".
    """
    columns = None if preprocess is None else preprocess.names
    graph = Graph(columns or ())
    if preprocess is None or columns is None:
        x = graph.input("x", "INT64" if spec.integers else "FLOAT", spec.shape)
    else:
        x = emit_columns(graph, preprocess)
        x = graph.cast(x, torch.int64) if spec.integers else x
    outputs = {"outputs": emit(graph, form, x, spec)}
    if spec.classes:
        outputs["probabilities"] = emit_shares(graph, shares, outputs["outputs"], spec.classes)
    label = None if classes is None else graph.constant(classes)
    model = graph.model(outputs, spec.outputs, label)
    names = {
        "classes": None if classes is None else [str(k) for k in classes.tolist()],
        "columns": columns,
        "features": None if preprocess is None else preprocess.feature_names,
    }
    given = {name: json.dumps(list(values)) for name, values in names.items() if values}
    graph.onnx.helper.set_model_props(model, given)
    graph.onnx.checker.check_model(model)
    try:
        graph.onnx.save_model(model, os.fspath(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror or error}") from error


def emit(graph: Graph, form: Any, x: str, spec: Spec) -> str:
    """Add the nodes that compute a form's outputs of rows `x`."""
    match form:
        case forms.Parametric():
            return emit_network(graph, form.model, form.params, x, spec)
        case forms.Ensemble() if not len(form.weights):
            return constant_rows(graph, x, torch.zeros(form.spec.outputs))
        case forms.Ensemble(oracle=Forest() as oracle):
            flat = graph.add("Flatten", x) if len(spec.shape) > 1 else x
            return emit_trees(graph, form.functions, oracle.shares(form.weights), flat)
        case forms.Ensemble(oracle=Net() as oracle):
            each = [tree.map(lambda v, j=j: v[j], form.functions) for j in range(len(form.weights))]
            parts = [emit_network(graph, oracle.model, params, x, spec) for params in each]
            return weighted(graph, parts, form.weights.float())
        case forms.OnFeatures():
            phi = emit_features(graph, form.features, x, spec, form.w.dtype)
            return graph.add("MatMul", phi, graph.constant(form.w))
        case forms.Mixture(predictors=Densities()):
            shares = form.predictors.mixture(form.weights, torch.zeros(1, 1))[0]
            return constant_rows(graph, x, shares)
        case forms.Mixture(predictors=Classifiers() as given) if given.modules_only:
            modules = [copy.deepcopy(m).eval() for m in given.members]
            logits = [graph.module(m, x, spec.shape, torch.float32) for m in modules]
            parts = [graph.add("Softmax", z, axis=-1) for z in logits]
            return weighted(graph, parts, form.weights.float())
        case forms.SomeColumns(columns=None):
            return emit(graph, form.form, x, spec)
        case forms.SomeColumns():
            flat = x if len(spec.shape) == form.batch else graph.add("Flatten", x)
            place = graph.constant(np.array(form.columns, np.int64))
            some = graph.add("Gather", flat, place, axis=form.batch)
            return emit(graph, form.form, some, columns_spec(form, spec))
        case forms.Total():
            return graph.add("Sum", *(emit(graph, f, x, spec) for f in form.forms))
        case forms.TwoClasses():
            z = emit(graph, form.form, x, spec)
            half = graph.add("Div", z, graph.constant(np.float32(2)))
            return graph.add("Concat", graph.add("Neg", half), half, axis=-1)
        case forms.Rounded():
            return graph.cast(emit(graph, form.form, x, spec), torch.float32)
    raise refuse("to_onnx", form)
