"""Raw columns of a table in an ONNX graph, as `Preprocessor.transform` processes them."""

from __future__ import annotations

import numpy as np
import torch

from foedus.data.preprocess import UNSEEN, Preprocessor
from foedus.errors import ModelError
from foedus.export.onnx.graph import Graph

REFUSED = "foedus: a number is {}infinite, which the model does not take"
"""The name of the node that fails, which onnxruntime's error shows."""


def emit_columns(graph: Graph, preprocess: Preprocessor) -> str:
    """The rows for the model (n, features), from one input (n, 1) for each column.

    Numbers are given in double precision, because shift and divisor were fitted in it: in single
    precision, 1000000.4 - 1000000 has an error of 0.02. Texts are strings, "" where one is missing.
    """
    assert preprocess.names is not None
    numbers, places = [], []
    for name in preprocess.names:
        known = preprocess.categories.get(name)
        if known is None:
            numbers.append(graph.input(name, "DOUBLE"))
        else:
            texts = graph.input(name, "STRING")
            places.append((emit_place(graph, name, known, texts), len(known)))
    parts = [emit_numbers(graph, preprocess, joined(graph, numbers))] if numbers else []
    for place, size in places:
        if preprocess.encode == "onehot":
            place = graph.add("Equal", place, graph.constant(np.arange(size)[None]))
        parts.append(graph.cast(place, torch.float32))
    return joined(graph, parts)


def joined(graph: Graph, parts: list[str]) -> str:
    """Concatenate columns."""
    return parts[0] if len(parts) == 1 else graph.add("Concat", *parts, axis=1)


def emit_numbers(graph: Graph, preprocess: Preprocessor, x: str) -> str:
    """Impute, scale and clip, as `Preprocessor.apply` does it: double, then single precision."""
    fill, shift, divisor = preprocess.fill, preprocess.shift, preprocess.divisor
    missing, infinite = graph.add("IsNaN", x), graph.add("IsInf", x)
    wrong = graph.add("Or", missing, infinite) if fill is None else infinite
    x = emit_refusal(graph, x, wrong, REFUSED.format("missing or " * (fill is None)))
    if fill is not None:
        x = graph.add("Where", missing, graph.constant(np.float64(fill)), x)
    if shift is not None:
        x = graph.add("Sub", x, graph.constant(np.float64(shift)))
    if divisor is not None:
        x = graph.add("Div", x, graph.constant(np.float64(divisor)))
    x = graph.cast(x, torch.float32)
    if preprocess.clip is not None:
        ends = [graph.constant(np.float32(end)) for end in (-preprocess.clip, preprocess.clip)]
        x = graph.add("Clip", x, *ends)
    return x


def emit_refusal(graph: Graph, x: str, wrong: str, name: str) -> str:
    """x, or a runtime error if any entry of `wrong` is true: the graph then reads the second of one
    element, which the standard defines as an error.
    """
    every = graph.constant(np.array([0, 1]))
    count = graph.add("ReduceSum", graph.cast(wrong, torch.int64), every, keepdims=0)
    place = graph.cast(graph.add("Greater", count, graph.constant(np.int64(0))), torch.int64)
    zero = graph.add("Gather", graph.constant(np.zeros(1)), place, name=name)
    return graph.add("Add", x, zero)


def emit_place(graph: Graph, name: str, known: tuple[str | None, ...], texts: str) -> str:
    """The index of each text among the known ones (int64), -1 for others; "" means missing."""
    if "" in known:
        raise ModelError(
            f"column {name!r} has the empty text among its categories, which in an ONNX file "
            "stands for a missing one; give the empty texts a name before training, or export "
            "run.model.prepared, which takes prepared rows"
        )
    return graph.add(
        "LabelEncoder",
        texts,
        domain="ai.onnx.ml",
        keys_strings=["" if text is None else text for text in known],
        values_int64s=list(range(len(known))),
        default_int64=int(UNSEEN),
    )
