"""Fully connected networks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import MinLen
from torch import Tensor
from torch.nn import functional as F

from foedus.base.settings import Means
from foedus.base.spec import Spec
from foedus.models.base import Model, Params, Pull, Widths, product, total, uniform_init, widths_of
from foedus.models.linear import affine


@dataclass(frozen=True)
class MLP(Model):
    """Fully connected network with ReLU.

        f(x) = W_L relu(... relu(W_1 x + b_1) ...) + b_L

    Weights and biases start uniform on +-1/sqrt(inputs of the layer), as in PyTorch.

    Args:
        hidden: The widths of the hidden layers: a number or a sequence.

    Raises:
        ModelError: A width is not a positive integer.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAvg(fd.MLP((64, 32)), lr=0.1), fed, rounds=3)
        >>> tuple(run.state.w["weight1"].shape)
        (32, 64)
    """

    hidden: Annotated[
        Widths, MinLen(1), Means("one or more positive layer widths, such as (200,)")
    ] = (200,)

    closed_form: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", widths_of(self.hidden))
        super().__post_init__()

    def init(self, spec: Spec, key: Tensor) -> Params:
        sizes = (spec.features, *self.hidden, spec.outputs)
        params = {}
        for i, (a, b) in enumerate(itertools.pairwise(sizes)):
            params[f"weight{i}"] = uniform_init(key, 2 * i, (b, a), a)
            params[f"bias{i}"] = uniform_init(key, 2 * i + 1, (b,), a)
        return params

    def layers(self, params: Params) -> list[tuple[Tensor | None, Tensor | None]]:
        """Weight and bias of each layer, from any of the parameters.

        Args:
            params: Parameters by name; missing ones become `None`.
        """
        numbers = range(len(self.hidden) + 1)
        return [(params.get(f"weight{i}"), params.get(f"bias{i}")) for i in numbers]

    def apply(self, params: Params, x: Tensor) -> Tensor:
        h = x.flatten(1).to(params["weight0"].dtype)
        last = len(self.hidden)
        for i in range(last):
            h = torch.relu(F.linear(h, params[f"weight{i}"], params[f"bias{i}"]))
        return F.linear(h, params[f"weight{last}"], params[f"bias{last}"])

    def pullback(self, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
        last = len(self.hidden)
        inputs = [x]
        for i in range(last):
            inputs.append(affine(inputs[-1], params[f"weight{i}"], params[f"bias{i}"]).relu_())
        outputs = affine(inputs[-1], params[f"weight{last}"], params[f"bias{last}"])

        def pull(slope: Tensor, alpha: float | None = None, beta: float = 1.0) -> Params:
            grads = {}
            for i in range(last, -1, -1):
                weight, upper = params[f"weight{i}"], slope
                if i:  # relu(a) > 0 exactly where a > 0: the activations say where the slope passes
                    below = torch.bmm(slope, weight)
                    slope = torch.ops.aten.threshold_backward(below, inputs[i], 0)
                grads[f"weight{i}"] = product(upper, inputs[i], weight, alpha, beta)
                grads[f"bias{i}"] = total(upper, params[f"bias{i}"], alpha, beta)
            return {name: grads[name] for name in params}

        return outputs, pull
