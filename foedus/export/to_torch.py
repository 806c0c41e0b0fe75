"""Trained models as PyTorch modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from foedus.base import tree
from foedus.base.spec import Spec
from foedus.errors import ModelError
from foedus.export import forms
from foedus.export.layers import (
    Applied,
    Cast,
    Constant,
    Cosine,
    Logits,
    Monomials,
    Take,
    WeightedSum,
)
from foedus.export.refuse import refuse
from foedus.models.base import Model, Params, image_shape
from foedus.models.cnn import CNN
from foedus.models.features import FeatureMap, Identity, ModuleFeatures, Polynomial, RandomFourier
from foedus.models.linear import Linear
from foedus.models.mlp import MLP
from foedus.models.module import Module
from foedus.models.oracles import Net
from foedus.models.predictors.classifiers import Classifiers
from foedus.models.predictors.densities import Densities


def to_torch(form: Any, spec: Spec) -> nn.Module:
    """A module with the outputs of a form for rows (n, *shape)."""
    match form:
        case forms.Parametric():
            return network(form.model, form.params, spec)
        case forms.Ensemble() if not len(form.weights):
            return Constant(torch.zeros(form.spec.outputs))
        case forms.Ensemble(oracle=Net() as oracle):
            each = [tree.map(lambda v, j=j: v[j], form.functions) for j in range(len(form.weights))]
            members = [network(oracle.model, params, spec) for params in each]
            return WeightedSum(members, form.weights.float())
        case forms.OnFeatures():
            maps = feature_layers(form.features, spec, form.w.dtype)
            return nn.Sequential(*maps, _linear(form.w.mT))
        case forms.Mixture(predictors=Densities()):
            return Constant(form.predictors.mixture(form.weights, torch.zeros(1, 1))[0].clone())
        case forms.Mixture(predictors=Classifiers() as given) if given.modules_only:
            shares = [nn.Sequential(copy.deepcopy(m), nn.Softmax(-1)) for m in given.members]
            return WeightedSum([m.eval() for m in shares], form.weights.float())
        case forms.SomeColumns(columns=None):
            return to_torch(form.form, spec)
        case forms.SomeColumns():
            inner = columns_spec(form, spec)
            return nn.Sequential(Take(form.columns or (), form.batch), to_torch(form.form, inner))
        case forms.Total():
            parts = [to_torch(f, spec) for f in form.forms]
            return parts[0] if len(parts) == 1 else WeightedSum(parts, torch.ones(len(parts)))
        case forms.TwoClasses():
            return nn.Sequential(to_torch(form.form, spec), Logits())
        case forms.Rounded():
            return nn.Sequential(to_torch(form.form, spec), Cast(torch.float32))
    raise refuse("to_torch", form)


def network(model: Model, params: Params, spec: Spec) -> nn.Module:
    """A model with its parameters: layers of `torch.nn`, or the user's own class."""
    if isinstance(model, Module):
        return model.exported(params)
    if not plain(model):
        return Applied(model, params)
    flat = [nn.Flatten()] if len(spec.shape) > 1 else []
    if isinstance(model, Linear):
        return _chain(flat, [_linear(params["weight"], params.get("bias"))])
    if isinstance(model, MLP):
        return _chain(flat, _dense(params, len(model.hidden), nn.ReLU()))
    assert isinstance(model, CNN)
    bend = nn.LeakyReLU(model.leak) if model.leak else nn.ReLU()
    image = [] if len(spec.shape) == 3 else [nn.Flatten(), nn.Unflatten(1, image_shape(spec))]
    layers: list[nn.Module] = []
    for i in range(len(model.channels)):
        weight, bias = params[f"conv{i}"], params[f"conv_bias{i}"]
        pad = model.kernel // 2 if model.padding == "same" else 0
        conv = nn.Conv2d(weight.shape[1], weight.shape[0], model.kernel, padding=pad)
        layers += [_filled(conv, weight, bias), nn.MaxPool2d(2), bend]
    return _chain(image, layers, [nn.Flatten()], _dense(params, len(model.hidden), bend))


def plain(model: Model) -> bool:
    """Whether it is one of foedus' own models; a subclass may compute something else."""
    return type(model) in (Linear, MLP, CNN)


def _chain(*parts: list[Any]) -> nn.Module:
    layers = [layer for part in parts for layer in part]
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _dense(params: Params, hidden: int, bend: nn.Module) -> list[nn.Module]:
    """Fully connected layers with `bend` between them."""
    layers: list[nn.Module] = [_linear(params["weight0"], params["bias0"])]
    for i in range(1, hidden + 1):
        layers += [bend, _linear(params[f"weight{i}"], params[f"bias{i}"])]
    return layers


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    return _filled(layer, weight, bias)


def _filled(layer: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def columns_spec(form: forms.SomeColumns, spec: Spec) -> Spec:
    """The form of the columns that a model is given."""
    assert form.columns is not None
    lead = spec.shape[: form.batch - 1]
    return Spec((*lead, len(form.columns)), spec.classes, spec.outputs)


def feature_layers(features: FeatureMap, spec: Spec, dtype: torch.dtype) -> list[nn.Module]:
    """A feature map as layers that work in `dtype`."""
    start: list[nn.Module] = [nn.Flatten(), Cast(dtype)]
    known(features, "export")
    match features:
        case Identity(intercept=False):
            return start
        case Identity():  # the monomials of degree 1, with the constant at the end
            order = [*range(1, spec.features + 1), 0]
            return [*start, Monomials(torch.tensor(order).unsqueeze(1))]
        case Polynomial():
            return [*start, Monomials(features.factors(spec.features))]
        case RandomFourier():
            waves = features.waves(spec.features, dtype)
            return [*start, _linear(waves[:-1].mT, waves[-1]), Cosine(features.scale)]
        case ModuleFeatures():
            module = copy.deepcopy(features.frozen)
            return [Cast(features.precision or torch.float32), module, nn.Flatten(), Cast(dtype)]
    raise AssertionError(features)


def known(features: FeatureMap, export: str) -> None:
    """Refuse feature maps that are not foedus' own; a subclass may compute something else."""
    if type(features) not in (Identity, Polynomial, RandomFourier, ModuleFeatures):
        raise ModelError(f"the feature map {type(features).__name__} has no {export}")
