"""ONNX graphs: nodes and constants with generated names."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import nn

from foedus.errors import ModelError

OPSET, TREES_OPSET, IR = 18, 3, 9
"""Old enough for onnxruntime 1.18."""
OUTPUTS = ("outputs", "probabilities", "label")


def onnx_package() -> Any:
    """The package `onnx`, which is optional."""
    try:
        import onnx
        import onnx.compose
    except ImportError as error:
        raise ModelError("to_onnx needs the package onnx: pip install 'foedus[onnx]'") from error
    return onnx


class Graph:
    """A graph under construction: each call adds a node and returns the name of its output."""

    def __init__(self, reserved: Collection[str] = ()) -> None:
        """reserved: names that values inside must not have, and prefixes."""
        self.onnx = onnx_package()
        self.inputs: list[Any] = []
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.reserved = set(reserved)
        self.count = 0

    def _name(self) -> str:
        while True:
            self.count += 1
            name = f"v{self.count}"
            if not any(other.startswith(name) for other in self.reserved):
                return name

    def input(self, name: str, kind: str, shape: tuple[int, ...] = (1,)) -> str:
        """An input (n, *shape) of the element type `kind`; the name that it has in the file.

        That is another one only where an output has the name, or where it is empty.
        """
        while name in ("", *OUTPUTS) or any(name == given.name for given in self.inputs):
            name = f"input_{name}"
        self.reserved.add(name)
        element = getattr(self.onnx.TensorProto, kind)
        made = self.onnx.helper.make_tensor_value_info(name, element, ["rows", *shape])
        self.inputs.append(made)
        return name

    def constant(self, value: Any) -> str:
        """A constant array (a torch tensor, a NumPy array, numbers or texts)."""
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.array(value)
        array = array.astype(object) if array.dtype.kind == "U" else array
        name = self._name()
        self.constants.append(self.onnx.numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def add(
        self, op: str, *inputs: str, domain: str = "", outputs: int = 1, **settings: Any
    ) -> str:
        """A node; of several outputs, the first is returned."""
        names = [self._name() for _ in range(outputs)]
        make = self.onnx.helper.make_node
        self.nodes.append(make(op, list(inputs), names, domain=domain, **settings))
        return names[0]

    def cast(self, x: str, dtype: torch.dtype) -> str:
        kinds = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64"}
        if dtype not in kinds:
            raise ModelError(f"a model in {dtype} has no ONNX export; use to_torch()")
        return self.add("Cast", x, to=getattr(self.onnx.TensorProto, kinds[dtype]))

    def module(self, module: nn.Module, x: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """The graph to which PyTorch exports a module, for rows of `shape`."""
        row, buffer = torch.zeros(2, *shape, dtype=dtype), BytesIO()
        settings: dict[str, Any] = {
            "input_names": ["x"],
            "output_names": ["y"],
            "dynamic_axes": {"x": {0: "rows"}, "y": {0: "rows"}},
            "opset_version": OPSET,
            "dynamo": False,  # the older exporter, which needs no other package
            "training": torch.onnx.TrainingMode.PRESERVE,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.onnx.export(module, (row,), buffer, **settings)  # type: ignore[arg-type]
            except Exception as error:  # any exception of a user's module
                name = type(module).__name__
                raise ModelError(f"PyTorch has no ONNX export of {name}: {error}") from error
        prefix = f"{self._name()}/"
        made = self.onnx.load_model_from_string(buffer.getvalue()).graph
        made = self.onnx.compose.add_prefix_graph(made, prefix)
        self.constants += made.initializer
        (inside,), (outside,) = made.input, made.output
        self.nodes.append(self.onnx.helper.make_node("Identity", [x], [inside.name]))
        self.nodes += made.node
        return outside.name

    def model(self, outputs: dict[str, str], widths: int, label: str | None = None) -> Any:
        """The whole model: named outputs (n, widths) in single precision, and labels (n,)."""
        helper, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        for name, value in outputs.items():
            self.nodes.append(helper.make_node("Cast", [value], [name], to=kind))
        made = [helper.make_tensor_value_info(n, kind, ["rows", widths]) for n in outputs]
        if label is not None:
            made.append(self._label(label))
        graph = helper.make_graph(self.nodes, "foedus", self.inputs, made, self.constants)
        opsets = [
            helper.make_opsetid("", OPSET),
            helper.make_opsetid("ai.onnx.ml", TREES_OPSET),
        ]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR, producer_name="foedus")

    def _label(self, values: str) -> Any:
        """The output "label": the entry of the constant `values` at the index of the largest
        output."""
        helper = self.onnx.helper
        (kind,) = (c.data_type for c in self.constants if c.name == values)
        place = self.add("ArgMax", "outputs", axis=1, keepdims=0)
        self.nodes.append(helper.make_node("Gather", [values, place], ["label"]))
        return helper.make_tensor_value_info("label", kind, ["rows"])
