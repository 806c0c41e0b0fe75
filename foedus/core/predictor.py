"""A trained model as users see it: rows in, NumPy out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foedus.base.spec import Spec
from foedus.errors import DataError

if TYPE_CHECKING:
    from foedus.data.preprocess import Preprocessor


def _softmax(outputs: Tensor) -> Tensor:
    return outputs.softmax(-1)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained model: rows in, numpy out.

    Rows are raw, in a DataFrame or a dictionary with columns by name, which `preprocess` makes what
    the model is given; or an array of such, as `data.x_test` is.
    """

    forward: Callable[[Tensor], Tensor]
    spec: Spec
    probabilities: Callable[[Tensor], Tensor] = _softmax
    """From raw outputs, for classification."""
    preprocess: Preprocessor | None = None
    class_values: tuple[Any, ...] | None = None
    """What `predict` says of tables for class 0, 1, ...; `None`: these numbers."""

    block: ClassVar[int] = 8192

    def outputs(self, x: Any) -> Tensor:
        """Raw outputs (logits or values), (n, outputs), in blocks of rows that bound memory."""
        if _is_table(x):
            if self.preprocess is None:
                raise DataError(
                    "this model knows no columns by name: its data was given as arrays; give rows "
                    "as data.x_test has them"
                )
            x = self.preprocess.transform(x)
        elif self.preprocess is not None and self.preprocess.looks_raw(np.asarray(x)):
            warnings.warn(
                "these rows look as if they were not scaled as those of the training; give raw "
                "rows in a DataFrame with the columns' names, or data.preprocess.apply(rows)",
                stacklevel=3,
            )
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
        """Classes, or values for regression ((n,) where there is one output).

        Of a table, labels as they were written there; of an array, which has rows as `data.x_test`
        has them, class numbers, as `data.y_test` has them.
        """
        out = self.outputs(x)
        if self.spec.classes:
            numbers = out.argmax(-1).numpy()
            plain = self.class_values is None or not _is_table(x)
            return numbers if plain else np.array(self.class_values)[numbers]
        return (out[:, 0] if self.spec.outputs == 1 else out).numpy()

    def predict_proba(self, x: Any) -> np.ndarray:
        """Class probabilities."""
        if not self.spec.classes:
            raise AttributeError(
                "predict_proba is for classification; this model predicts values (use predict)"
            )
        return self.probabilities(self.outputs(x)).numpy()


def _is_table(x: object) -> bool:
    """Whether its columns have names; pandas need not be imported for that."""
    frame = "pandas" in sys.modules and isinstance(x, sys.modules["pandas"].DataFrame)
    return frame or isinstance(x, Mapping)
