"""Probabilities of classes from a model's outputs (n, classes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from foedus.geometry import Simplex
from foedus.models.losses import CrossEntropy, Focal, Logistic, WeightedCrossEntropy


def softmax(outputs: Tensor) -> Tensor:
    """The softmax of logits."""
    return outputs.softmax(-1)


def sigmoid_shares(outputs: Tensor) -> Tensor:
    """Every class against the rest: sigmoids, scaled to sum 1."""
    return F.logsigmoid(outputs).softmax(-1)


def shares_of(loss: Any, otherwise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The link function of a loss, from outputs to probabilities; `otherwise`: for losses without
    one."""
    if isinstance(loss, Logistic):
        return sigmoid_shares
    return softmax if isinstance(loss, CrossEntropy | WeightedCrossEntropy | Focal) else otherwise


def simplex_shares(outputs: Tensor) -> Tensor:
    """From one-against-all outputs, which estimate 0 and 1: the closest point of the probability
    simplex.
    """
    return Simplex().project(outputs, batch=1)


def as_they_are(outputs: Tensor) -> Tensor:
    """The outputs are probabilities."""
    return outputs
