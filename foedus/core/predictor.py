"""A trained model as users see it: NumPy in, NumPy out, and accepted by scikit-learn."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from foedus.base.spec import Spec
from foedus.errors import DataError, ModelError
from foedus.export.probabilities import softmax

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained model: NumPy in, NumPy out.

    It is a fitted estimator to scikit-learn (`sklearn.inspection`, `sklearn.metrics`; for what
    calls `fit`, wrap it in `sklearn.frozen.FrozenEstimator`), and can be pickled where its form
    can.

    Args:
        form: Raw outputs (n, outputs) of rows: one of `foedus.export.forms`, or any function.
        spec: The form of the data.
        probabilities: From raw outputs, for classification.
        class_names: Names of the classes, in order; `predict` then returns names.
        feature_names: Names of the columns.

    Example:
        >>> run.model.predict_proba(x).shape
        (100, 10)
    """

    form: Callable[[Tensor], Tensor]
    spec: Spec
    probabilities: Callable[[Tensor], Tensor] = softmax
    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None

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
                return self.form(x) if len(x) else torch.empty(0, self.spec.outputs)
            return torch.cat([self.form(b) for b in x.split(self.block)])

    def predict(self, x: Any) -> np.ndarray:
        """Class numbers (names, where there are), or values for regression ((n,) where there is
        one output).
        """
        out = self.outputs(x)
        if self.spec.classes:
            numbers = out.argmax(-1).numpy()
            return numbers if self.class_names is None else self.classes_[numbers]
        return (out[:, 0] if self.spec.outputs == 1 else out).numpy()

    def predict_proba(self, x: Any) -> np.ndarray:
        """Class probabilities."""
        if not self.spec.classes:
            raise AttributeError(
                "predict_proba is for classification; this model predicts values (use predict)"
            )
        return self.probabilities(self.outputs(x)).numpy()

    # -- out of foedus -----------------------------------------------------------------------------

    def to_torch(self) -> nn.Module:
        """A PyTorch module that gives the raw outputs: the user's own class where one was given."""
        from foedus.export.to_torch import to_torch

        return to_torch(self.form, self.spec)

    def to_sklearn(self) -> Any:
        """A fitted scikit-learn estimator of rows (n, features)."""
        from foedus.export.to_sklearn import to_sklearn

        classes = self.classes_ if self.spec.classes else None
        columns = None if self.feature_names is None else self.feature_names_in_
        return to_sklearn(self.form, self.spec, self.probabilities, classes, columns)

    def to_onnx(self, path: str | os.PathLike) -> None:
        """Write an ONNX file: rows "x", "outputs" and, for classification, "probabilities"."""
        from foedus.export.to_onnx import to_onnx

        names = {"classes": self.class_names, "features": self.feature_names}
        to_onnx(self.form, self.spec, self.probabilities, path, names)

    # -- scikit-learn ------------------------------------------------------------------------------

    @property
    def classes_(self) -> np.ndarray:
        names = self.class_names
        if not self.spec.classes:
            raise AttributeError("classes_ is for classification; this model predicts values")
        return np.arange(self.spec.classes) if names is None else np.array(names)

    @property
    def n_features_in_(self) -> int:
        return self.spec.features

    @property
    def feature_names_in_(self) -> np.ndarray:
        if self.feature_names is None:
            raise AttributeError("the columns of this model have no names")
        return np.array(self.feature_names, object)

    @property
    def _estimator_type(self) -> str:  # scikit-learn before 1.6
        return "classifier" if self.spec.classes else "regressor"

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        kinds = (
            {"classifier_tags": ClassifierTags()}
            if self.spec.classes
            else {"regressor_tags": RegressorTags()}
        )
        return Tags(self._estimator_type, TargetTags(required=True), **kinds)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_clone__(self) -> Self:
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """There is nothing to set: the model is trained."""
        return {}

    def set_params(self, **params: Any) -> Self:
        if params:
            raise ModelError(f"a trained model has no settings; it was given {sorted(params)}")
        return self

    def fit(self, x: Any, y: Any = None, **settings: Any) -> NoReturn:
        """Refused: a run has trained the model."""
        raise ModelError(
            "this model was trained by a federated run and is not fitted again; wrap it in "
            "sklearn.frozen.FrozenEstimator for tools that call fit"
        )

    def score(self, x: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy, or R^2 for regression."""
        from sklearn.metrics import accuracy_score, r2_score

        metric = accuracy_score if self.spec.classes else r2_score
        return float(metric(y, self.predict(x), sample_weight=sample_weight))
