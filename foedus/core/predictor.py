"""A trained model as users see it: rows in, NumPy out, and accepted by scikit-learn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from foedus.base.spec import Spec
from foedus.data.formats.frames import is_frame
from foedus.data.preprocess import Preprocessor
from foedus.errors import DataError, ModelError
from foedus.export.probabilities import softmax

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained model: rows in, NumPy arrays out.

    Rows are either raw, in a DataFrame or a dictionary with columns by name, which `preprocess`
    transforms; or an array in the form of `data.x_test`.

    scikit-learn treats it as a fitted estimator (`sklearn.inspection`, `sklearn.metrics`; where
    `fit` is called, wrap it in `sklearn.frozen.FrozenEstimator`). It can be pickled if its form
    can.

    Args:
        form: Raw outputs (n, outputs) as a function of rows: one of `foedus.export.forms`, which
            can be exported, or any function.
        spec: The form of the data.
        probabilities: Class probabilities as a function of raw outputs, for classification.
        preprocess: The preprocessing that turns raw rows into the model's input.
        class_values: What `predict` returns for class 0, 1, ...; `None`: these numbers.
        round: For `run.best`, the round after which this was the model.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> model = fd.run(fd.FedAvg(), fed, rounds=3).model
        >>> x, y = fed.data.x_test, fed.data.y_test
        >>> model.predict_proba(x).shape, model.score(x, y) > 0.8
        ((451, 10), True)
    """

    form: Callable[[Tensor], Tensor]
    spec: Spec
    probabilities: Callable[[Tensor], Tensor] = softmax
    preprocess: Preprocessor | None = None
    class_values: tuple[Any, ...] | None = None
    round: int | None = None

    most: ClassVar[int] = 8192

    @property
    def block(self) -> int:
        """The number of rows that the model is given at a time."""
        return max(1, self.most // (self.spec.steps or 1))

    def outputs(self, x: Any) -> Tensor:
        """Raw outputs (logits or values), computed in blocks of rows that bound memory.

        Args:
            x: Raw rows by column name, or an array in the form of `data.x_test`.

        Returns:
            A tensor (n, outputs), or (n, steps, outputs) for sequences.

        Raises:
            DataError: The rows do not have the form that the model takes.
        """
        if table := _is_table(x):
            if self.preprocess is None:
                raise DataError(
                    "this model knows no columns by name: its data was given as arrays; give rows "
                    "as data.x_test has them"
                )
            x = self.preprocess.transform(x)
            x = x.astype(_whole(x)) if self.spec.integers else x
        elif not isinstance(x, Tensor):
            try:
                x = np.array(x, _whole(x) if self.spec.integers else np.float32)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"an array must hold numbers, as data.x_test does ({error}); give raw rows in "
                    "a DataFrame with the columns' names"
                ) from None
        if self.preprocess is not None and not table and self.preprocess.looks_raw(np.asarray(x)):
            warnings.warn(
                "these rows look as if they were not scaled as those of the training; give raw "
                "rows in a DataFrame with the columns' names, or data.preprocess.apply(rows)",
                stacklevel=3,
            )
        x = torch.as_tensor(x)
        x = x.long() if self.spec.integers else x.float()
        if tuple(x.shape[1:]) != self.spec.shape or x.dim() == 0:
            one = "; for a single row pass x[None]" if tuple(x.shape) == self.spec.shape else ""
            raise DataError(
                f"x has shape {tuple(x.shape)}, the model expects rows of shape "
                f"{self.spec.shape}{one}"
            )
        with torch.no_grad():
            if len(x) <= self.block:
                return self.form(x) if len(x) else torch.empty(0, *self.spec.output_shape)
            return torch.cat([self.form(b) for b in x.split(self.block)])

    def predict(self, x: Any) -> np.ndarray:
        """Predicted labels as they were written in the data, or values for regression.

        `prepared.predict` returns class numbers, as in `data.y_test`.

        Args:
            x: Raw rows by column name, or an array in the form of `data.x_test`.

        Returns:
            An array (n,), (n, outputs) for regression with several outputs, (n, steps) for
            sequences.
        """
        out = self.outputs(x)
        if self.spec.classes:
            return self.classes_[out.argmax(-1).numpy()]
        return (out[:, 0] if self.spec.outputs == 1 else out).numpy()

    def predict_proba(self, x: Any) -> np.ndarray:
        """Class probabilities.

        Args:
            x: Raw rows by column name, or an array in the form of `data.x_test`.

        Returns:
            An array (n, classes), or (n, steps, classes) for sequences.

        Raises:
            AttributeError: The model is for regression.
        """
        if not self.spec.classes:
            raise AttributeError(
                "predict_proba is for classification; this model predicts values (use predict)"
            )
        return self.probabilities(self.outputs(x)).numpy()

    # -- out of foedus -----------------------------------------------------------------------------

    def to_torch(self) -> nn.Module:
        """A PyTorch module that returns the raw outputs; the user's own class if one was trained.

        It takes rows in the form of `data.x_test`; `preprocess.transform` makes them from a raw
        table.

        Raises:
            ModelError: The model has a form that cannot be exported.

        Example:
            >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
            >>> module = fd.run(fd.FedAvg(), fed, rounds=1).model.to_torch()
            >>> module(torch.zeros(2, 64)).shape
            torch.Size([2, 10])
        """
        from foedus.export.to_torch import to_torch

        return to_torch(self.form, self.spec)

    def to_sklearn(self) -> Any:
        """A fitted scikit-learn estimator with the `classes_` of this model.

        For a table it is a `Pipeline` that takes raw DataFrames; otherwise an estimator of flat
        rows in the form of `data.x_test`.

        Raises:
            ModelError: The model has a form that cannot be exported, or predicts sequences.

        Example:
            >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
            >>> model = fd.run(fd.FedAvg(), fed, rounds=1).model
            >>> x = fed.data.x_test
            >>> bool((model.to_sklearn().predict(x) == model.predict(x)).all())
            True
        """
        from foedus.export.to_sklearn import to_sklearn, with_columns

        if self.spec.steps:
            raise ModelError(
                "scikit-learn has no estimators of sequences, with a label for each step; use "
                "run.model itself, or to_torch()"
            )
        classes = self.classes_ if self.spec.classes else None
        made = to_sklearn(self.form, self.spec, self.probabilities, classes)
        if self.preprocess is None or self.preprocess.names is None:
            return made
        return with_columns(self.preprocess.to_sklearn(), made)

    def to_onnx(self, path: str | os.PathLike) -> None:
        """Write an ONNX file with "outputs" and, for classification, "probabilities" and "label".

        The model of a table has one input (n, 1) for each raw column, by its name: numbers in
        double precision, NaN where one is missing, and texts, "" where one is missing. Other models
        take rows "x" in the form of `data.x_test`; `prepared` writes no "label".

        Args:
            path: The file to write.

        Raises:
            ModelError: The model has a form that cannot be exported.
        """
        from foedus.export.to_onnx import to_onnx

        written = self.class_values is not None or (
            self.preprocess is not None and self.preprocess.names is not None
        )
        classes = self.classes_ if self.spec.classes and written else None
        to_onnx(self.form, self.spec, self.probabilities, path, self.preprocess, classes)

    # -- scikit-learn ------------------------------------------------------------------------------

    @property
    def prepared(self) -> Predictor:
        """The same model for arrays only.

        Rows and class numbers are those of `data.x_test` and `data.y_test`.
        """
        return replace(self, preprocess=None, class_values=None)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The names of the model's inputs: columns of numbers, then of categories."""
        return None if self.preprocess is None else self.preprocess.feature_names

    @property
    def classes_(self) -> np.ndarray:
        """The classes as `predict` returns them; an `AttributeError` for regression."""
        values = self.class_values
        if not self.spec.classes:
            raise AttributeError("classes_ is for classification; this model predicts values")
        return np.arange(self.spec.classes) if values is None else np.array(values)

    @property
    def n_features_in_(self) -> int:
        """The number of columns of a table, or of features of an array."""
        columns = None if self.preprocess is None else self.preprocess.names
        return self.spec.features if columns is None else len(columns)

    @property
    def feature_names_in_(self) -> np.ndarray:
        """The columns of a table."""
        columns = None if self.preprocess is None else self.preprocess.names
        if columns is None:
            raise AttributeError("the columns of this model have no names")
        return np.array(columns, object)

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
        """An empty dictionary: a trained model has no settings.

        Args:
            deep: Ignored; scikit-learn's interface.
        """
        return {}

    def set_params(self, **params: Any) -> Self:
        """Accepts no setting: the model is trained.

        Args:
            **params: Must be empty.

        Raises:
            ModelError: A setting was given.
        """
        if params:
            raise ModelError(f"a trained model has no settings; it was given {sorted(params)}")
        return self

    def fit(self, x: Any, y: Any = None, **settings: Any) -> NoReturn:
        """Always raises `ModelError`: the model was trained by a run.

        Args:
            x: Ignored.
            y: Ignored.
            **settings: Ignored.
        """
        raise ModelError(
            "this model was trained by a federated run and is not fitted again; wrap it in "
            "sklearn.frozen.FrozenEstimator for tools that call fit"
        )

    def score(self, x: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy on labels as they were written in the data, or R^2 for regression.

        Args:
            x: Raw rows by column name, or an array in the form of `data.x_test`.
            y: Labels or targets.
            sample_weight: The weight of each row.

        Raises:
            ModelError: The model predicts sequences.
        """
        from sklearn.metrics import accuracy_score, r2_score

        if self.class_values is not None and (
            other := set(np.ravel(y).tolist()) - set(self.classes_.tolist())
        ):
            warnings.warn(
                "y has labels that are none of this model's classes, such as "
                f"{min(other, key=str)!r}; for class numbers, as data.y_test has them, use "
                "model.prepared.score",
                stacklevel=2,
            )
        if self.spec.steps:
            raise ModelError(
                "score is for one label a row; of the steps of sequences, compare model.predict(x) "
                "with y where y is not -100"
            )
        metric = accuracy_score if self.spec.classes else r2_score
        return float(metric(y, self.predict(x), sample_weight=sample_weight))


def _whole(x: Any) -> type:
    """The dtype of rows of integers; raises `DataError` for fractions."""
    given = np.asarray(x)
    if given.dtype.kind == "f" and not (given == np.floor(given)).all():
        raise DataError("x holds fractions; the model takes rows of integers, as data.x_test has")
    return np.int64


def _is_table(x: object) -> bool:
    """Whether its columns have names."""
    return is_frame(x) or isinstance(x, Mapping)
