"""Trained models as fitted scikit-learn estimators of rows (n, features)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import VotingClassifier
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, LabelEncoder, PolynomialFeatures
from torch import Tensor, nn

from foedus.base.spec import Spec
from foedus.export import estimators as own
from foedus.export import forms
from foedus.export.probabilities import softmax
from foedus.export.refuse import refuse
from foedus.export.to_torch import columns_spec, known, plain
from foedus.models.features import FeatureMap, Identity, ModuleFeatures, Polynomial, RandomFourier
from foedus.models.linear import Linear
from foedus.models.oracles import Forest
from foedus.models.predictors.classifiers import Classifiers
from foedus.models.predictors.densities import Densities

Affine = tuple[np.ndarray, np.ndarray]
"""W (outputs, features) and b (outputs,), in double precision."""


def to_sklearn(
    form: Any,
    spec: Spec,
    probabilities: Callable[[Tensor], Tensor],
    classes: np.ndarray | None,
) -> BaseEstimator:
    """A fitted estimator; classes: its `classes_`."""
    match form:
        case forms.Ensemble(oracle=Forest() as oracle) if len(form.weights):
            made = own.TreeEnsembleRegressor() if classes is None else own.TreeEnsembleClassifier()
            weights = oracle.shares(form.weights).numpy()
            made = fitted(made, trees_=form.functions, estimator_weights_=weights)
            if classes is not None:
                fitted(made, classes_=classes, probabilities_=probabilities)
        case forms.OnFeatures():
            return on_features(form, spec, probabilities, classes)
        case forms.Mixture(predictors=Densities()):
            prior = form.predictors.mixture(form.weights, torch.zeros(1, 1))[0].double().numpy()
            each = range(len(prior))
            made = DummyClassifier(strategy="prior").fit(np.zeros((len(prior), 1)), each)
            fitted(made, class_prior_=prior, classes_=classes)
        case forms.Mixture(predictors=Classifiers() as given):
            return voting(given, form.weights, spec, classes)
        case _:
            found = affine(form, spec)
            if found is None:
                raise refuse("to_sklearn", form)
            made = linear(*found, probabilities, classes)
    return fitted(made, n_features_in_=spec.features)


def with_columns(columns: BaseEstimator, estimator: BaseEstimator) -> Pipeline:
    """An estimator of raw tables, which the transformer `columns` converts to rows."""
    steps = estimator.steps if isinstance(estimator, Pipeline) else [("model", estimator)]
    return Pipeline([("columns", columns), *steps])


def fitted(estimator: BaseEstimator, **attributes: Any) -> BaseEstimator:
    """An estimator with fitted attributes."""
    for name, value in attributes.items():
        setattr(estimator, name, value)
    return estimator


def affine(form: Any, spec: Spec) -> Affine | None:
    """W and b of a form that is W x + b, otherwise None."""
    match form:
        case forms.Parametric(model=Linear()) if plain(form.model):
            weight = form.params["weight"].double().numpy()
            bias = form.params.get("bias", torch.zeros(len(weight)))
            return weight, bias.double().numpy()
        case forms.OnFeatures(features=Identity()) if type(form.features) is Identity:
            return split(form)
        case forms.SomeColumns(columns=None):
            return affine(form.form, spec)
        case forms.SomeColumns(batch=1) if inner := affine(form.form, columns_spec(form, spec)):
            weight = np.zeros((len(inner[0]), spec.features))
            weight[:, form.columns] = inner[0]
            return weight, inner[1]
        case forms.Total():
            parts = [affine(f, spec) for f in form.forms]
            known = [p for p in parts if p is not None]
            if len(known) < len(parts):
                return None
            return sum(w for w, _ in known), sum(b for _, b in known)  # type: ignore[return-value]
        case forms.TwoClasses() if inner := affine(form.form, spec):
            w, b = inner
            return np.concatenate((-w, w)) / 2, np.concatenate((-b, b)) / 2
        case forms.Rounded():
            return affine(form.form, spec)
    return None


def split(form: forms.OnFeatures) -> Affine:
    """Weights of features as coefficients, and the weight of a constant as intercept."""
    w = form.w.double().numpy().T
    if isinstance(form.features, Identity) and form.features.intercept:
        return w[:, :-1], w[:, -1]
    return w, np.zeros(len(w))


def linear(
    weight: np.ndarray,
    bias: np.ndarray,
    probabilities: Callable[[Tensor], Tensor],
    classes: np.ndarray | None,
) -> BaseEstimator:
    """W x + b as a regressor, or as a classifier by its probabilities."""
    size = weight.shape[1]
    if classes is None:
        one = len(weight) == 1
        coef, start = (weight[0], float(bias[0])) if one else (weight, bias)
        return fitted(LinearRegression(), coef_=coef, intercept_=start, n_features_in_=size)
    if probabilities is not softmax:
        made = fitted(own.LinearShares(), probabilities_=probabilities)
    else:
        made = fitted(LogisticRegression(), n_iter_=np.zeros(1, np.int32))
        if len(classes) == 2:  # one row, for the second class: softmax is a sigmoid
            weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    return fitted(made, coef_=weight, intercept_=bias, classes_=classes, n_features_in_=size)


def on_features(
    form: forms.OnFeatures,
    spec: Spec,
    probabilities: Callable[[Tensor], Tensor],
    classes: np.ndarray | None,
) -> Pipeline:
    """A transformer for the feature map, and a linear model."""
    features, (weight, bias) = form.features, split(form)
    if isinstance(features, RandomFourier):  # scikit-learn has sqrt(2 / M) always
        weight = weight * features.scale / math.sqrt(2 / features.dim)
    made = fitted(transformer(features, spec), n_features_in_=spec.features)
    return Pipeline([("features", made), ("linear", linear(weight, bias, probabilities, classes))])


def transformer(features: FeatureMap, spec: Spec) -> BaseEstimator:
    """A feature map as a fitted transformer."""
    row = np.zeros((1, spec.features))
    known(features, "transformer")
    match features:
        case Identity():
            return FunctionTransformer().fit(row)
        case Polynomial():
            return PolynomialFeatures(features.degree).fit(row)
        case RandomFourier():
            gamma = 0.5 / features.bandwidth**2
            waves = features.waves(spec.features, torch.float64).numpy()
            made = RBFSampler(gamma=gamma, n_components=features.dim).fit(row)
            return fitted(made, random_weights_=waves[:-1], random_offset_=waves[-1])
        case ModuleFeatures():
            return fitted(own.ModuleTransformer(), features_=features, shape_=spec.shape)
    raise AssertionError(features)


def voting(
    given: Classifiers, weights: Tensor, spec: Spec, classes: np.ndarray | None
) -> VotingClassifier:
    """Given classifiers with their weights, as soft votes."""
    assert classes is not None
    members = [_member(m, given, spec, classes) for m in given.members]
    known = [(f"member{k}", m) for k, m in enumerate(members)]
    made = VotingClassifier(known, voting="soft", weights=weights.double().tolist())
    return fitted(
        made,
        estimators_=members,
        named_estimators_=dict(known),
        classes_=classes,
        le_=fitted(LabelEncoder(), classes_=classes),
    )


def _member(member: Any, given: Classifiers, spec: Spec, classes: np.ndarray) -> Any:
    """The classifier itself if it has probabilities of all classes."""
    if not isinstance(member, nn.Module) and len(member.classes_) == len(classes):
        return member
    alone = Classifiers([member], given.classes, given.trusted)
    made = fitted(own.Member(), given_=alone, shape_=spec.shape, classes_=classes)
    return fitted(made, n_features_in_=spec.features)
