"""The forms of trained models: a few kinds of functions of rows.

An algorithm describes its model by a form; predictions, `to_torch`, `to_sklearn` and `to_onnx` all
follow from it. Forms hold data and no closures, so they can be pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from foedus.base.columns import Columns, part
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.models.base import Model, Params
from foedus.models.features import FeatureMap
from foedus.models.oracles import Oracle
from foedus.models.predictors.base import Predictors


class Form:
    """Base of the forms: a call gives outputs (n, outputs) of rows (n, *shape).

    kind: the form in the words of an error.
    """

    kind: ClassVar[str]

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Parametric(Form):
    """A model with its parameters."""

    kind: ClassVar[str] = "a model with parameters"

    model: Model
    params: Params

    def __call__(self, x: Tensor) -> Tensor:
        return self.model.apply(self.params, x)


@dataclass(frozen=True, eq=False)
class Ensemble(Form):
    """sum_j weights_j h_j(x) of joined functions of an oracle: trees, networks or estimators."""

    kind: ClassVar[str] = "a weighted sum of functions"

    oracle: Oracle
    functions: Tree
    weights: Tensor
    spec: Spec

    def __call__(self, x: Tensor) -> Tensor:
        if not len(self.weights):
            return torch.zeros(len(x), self.spec.outputs)
        return self.oracle.values(self.functions, self.weights, x, self.spec)


@dataclass(frozen=True, eq=False)
class OnFeatures(Form):
    """phi(x)^T w of a feature map phi, in the precision of w (M, outputs)."""

    kind: ClassVar[str] = "a feature map with weights"

    features: FeatureMap
    w: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """In blocks of rows whose features are at most 64 MB."""
        block = max(1, (1 << 26) // (len(self.w) * self.w.element_size()))
        return torch.cat([self.features(some, self.w.dtype) @ self.w for some in x.split(block)])


@dataclass(frozen=True, eq=False)
class Mixture(Form):
    """sum_k weights_k h_k(x) of given predictors: probabilities."""

    kind: ClassVar[str] = "a mixture of given predictors"

    predictors: Predictors
    weights: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.predictors.mixture(self.weights, x)


@dataclass(frozen=True, eq=False)
class SomeColumns(Form):
    """A model of some columns; `None`: of all. batch: leading dimensions of the rows."""

    kind: ClassVar[str] = "a model of some columns"

    form: Form
    columns: Columns
    batch: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        return self.form(part(x, self.columns, self.batch))


@dataclass(frozen=True, eq=False)
class Total(Form):
    """The sum of some models, as of the global and the local one of FedRes."""

    kind: ClassVar[str] = "a sum of models"

    forms: tuple[Form, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return reduce(torch.add, (form(x) for form in self.forms))


@dataclass(frozen=True, eq=False)
class TwoClasses(Form):
    """Outputs for two classes from a model with one."""

    kind: ClassVar[str] = "a model of two classes with one output"

    form: Form

    def __call__(self, x: Tensor) -> Tensor:
        return two_classes(self.form(x))


@dataclass(frozen=True, eq=False)
class Rounded(Form):
    """A model in double precision whose outputs are given in single precision."""

    kind: ClassVar[str] = "a model with rounded outputs"

    form: Form

    def __call__(self, x: Tensor) -> Tensor:
        return self.form(x).float()


def two_classes(z: Tensor) -> Tensor:
    """(-z/2, z/2): the logits of two classes whose difference is z."""
    return torch.cat((-z / 2, z / 2), -1)
