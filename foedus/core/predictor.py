"""A trained model as users see it: NumPy in, NumPy out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foedus.base.spec import Spec
from foedus.errors import DataError


def _softmax(outputs: Tensor) -> Tensor:
    return outputs.softmax(-1)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained model: numpy in, numpy out."""

    forward: Callable[[Tensor], Tensor]
    spec: Spec
    probabilities: Callable[[Tensor], Tensor] = _softmax
    """From raw outputs, for classification."""

    block: ClassVar[int] = 8192

    def outputs(self, x: Any) -> Tensor:
        """Raw outputs (logits or values), (n, outputs), in blocks of rows that bound memory."""
        x = torch.as_tensor(np.array(x, np.float32) if not isinstance(x, Tensor) else x).float()
        if tuple(x.shape[1:]) != self.spec.shape or x.dim() == 0:
            one = "; for a single row pass x[None]" if tuple(x.shape) == self.spec.shape else ""
            raise DataError(
                f"x has shape {tuple(x.shape)}, the model expects rows of shape "
                f"{self.spec.shape}{one}"
            )
        with torch.no_grad():
            if len(x) <= self.block:
                return self.forward(x) if len(x) else torch.empty(0, self.spec.outputs)
            return torch.cat([self.forward(b) for b in x.split(self.block)])

    def predict(self, x: Any) -> np.ndarray:
        """Class numbers, or values for regression ((n,) where there is one output)."""
        out = self.outputs(x)
        if self.spec.classes:
            return out.argmax(-1).numpy()
        return (out[:, 0] if self.spec.outputs == 1 else out).numpy()

    def predict_proba(self, x: Any) -> np.ndarray:
        """Class probabilities."""
        if not self.spec.classes:
            raise AttributeError(
                "predict_proba is for classification; this model predicts values (use predict)"
            )
        return self.probabilities(self.outputs(x)).numpy()
