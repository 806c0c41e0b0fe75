"""Fitted scikit-learn estimators for models that scikit-learn's own classes do not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
from torch import Tensor

from foedus.errors import DataError, ModelError
from foedus.models.features import ModuleFeatures
from foedus.models.predictors.classifiers import Classifiers
from foedus.models.trees import predict_trees, some_trees
from foedus.wire.arrays import Trees


class Trained(BaseEstimator):
    """Base: fitted by a run. A clone is the estimator itself."""

    n_features_in_: int

    def fit(self, x: Any, y: Any = None) -> NoReturn:
        """Refused: a run has trained the model."""
        raise ModelError(f"this {type(self).__name__} was trained by a run and is not fitted again")

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_clone__(self) -> Self:
        return self

    def _rows(self, x: Any) -> Tensor:
        rows = torch.from_numpy(np.array(x, np.float32))
        if rows.dim() != 2 or rows.shape[1] != self.n_features_in_:
            raise DataError(
                f"x has shape {tuple(rows.shape)}, the model expects (n, {self.n_features_in_})"
            )
        return rows


class _Classifier(ClassifierMixin, Trained):
    """A classifier of raw outputs, one for each class."""

    classes_: np.ndarray
    probabilities_: Callable[[Tensor], Tensor]

    def decision_function(self, x: Any) -> np.ndarray:
        """Raw outputs (n, classes)."""
        raise NotImplementedError

    def predict(self, x: Any) -> np.ndarray:
        """Classes."""
        return self.classes_[self.decision_function(x).argmax(1)]

    def predict_proba(self, x: Any) -> np.ndarray:
        """Class probabilities."""
        return self.probabilities_(torch.from_numpy(self.decision_function(x))).numpy()


class LinearShares(_Classifier):
    """A linear classifier whose probabilities are not the softmax of its outputs.

    Attributes:
        coef_: (classes, features).
        intercept_: (classes,).
    """

    coef_: np.ndarray
    intercept_: np.ndarray

    def decision_function(self, x: Any) -> np.ndarray:
        return np.asarray(x) @ self.coef_.T + self.intercept_


class _TreeSum(Trained):
    """sum_j estimator_weights_[j] tree_j(x).

    Attributes:
        trees_: All trees in one structure.
        estimator_weights_: One for each tree.
    """

    trees_: Trees
    estimator_weights_: np.ndarray

    @property
    def estimators_(self) -> list[TreeEnsembleRegressor]:
        """The trees, each as a regressor."""
        made = []
        for j in range(len(self.estimator_weights_)):
            one = TreeEnsembleRegressor()
            one.trees_ = some_trees(self.trees_, j, j + 1)
            one.estimator_weights_ = np.ones(1)
            one.n_features_in_ = self.n_features_in_
            made.append(one)
        return made

    def _sum(self, x: Any) -> np.ndarray:
        weights = torch.from_numpy(self.estimator_weights_)
        return predict_trees(self.trees_, self._rows(x), weights).numpy()


class TreeEnsembleRegressor(RegressorMixin, _TreeSum):
    """The trees of an FFGB run on values."""

    def predict(self, x: Any) -> np.ndarray:
        """Values: (n,), or (n, outputs) where there are several."""
        values = self._sum(x)
        return values[:, 0] if values.shape[1] == 1 else values


class TreeEnsembleClassifier(_TreeSum, _Classifier):
    """The trees of an FFGB run on classes."""

    def decision_function(self, x: Any) -> np.ndarray:
        return self._sum(x)


class Member(ClassifierMixin, Trained):
    """A given classifier with a probability for every class, also those that it has not seen."""

    classes_: np.ndarray
    given_: Classifiers
    shape_: tuple[int, ...]

    def predict_proba(self, x: Any) -> np.ndarray:
        """Class probabilities."""
        rows = self._rows(x).reshape(-1, *self.shape_)
        return self.given_.mixture(torch.ones(1), rows).numpy()

    def predict(self, x: Any) -> np.ndarray:
        """Classes."""
        return self.classes_[self.predict_proba(x).argmax(1)]


class ModuleTransformer(TransformerMixin, Trained):
    """A torch module's outputs as features."""

    features_: ModuleFeatures
    shape_: tuple[int, ...]

    def transform(self, x: Any) -> np.ndarray:
        """Features (n, M)."""
        return self.features_(self._rows(x).reshape(-1, *self.shape_)).numpy()
