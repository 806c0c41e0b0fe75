"""Errors for models that an export does not support."""

from __future__ import annotations

from typing import Any

from foedus.errors import ModelError
from foedus.export import forms
from foedus.models.oracles import Forest, Net, Sklearn

_ITSELF = "run.model itself, which scikit-learn accepts as a fitted estimator"


def kind(form: Any) -> str:
    """The description of a form, for an error."""
    match form:
        case forms.Ensemble(oracle=Forest()):
            return "a weighted sum of trees"
        case forms.Ensemble(oracle=Net()):
            return "a weighted sum of networks"
        case forms.Ensemble(oracle=Sklearn()):
            return "a weighted sum of scikit-learn estimators"
        case forms.Mixture():
            return f"{form.kind} ({type(form.predictors).__name__})"
        case forms.Parametric():
            return f"{form.kind} ({type(form.model).__name__})"
        case forms.OnFeatures():
            return f"{form.kind} ({type(form.features).__name__})"
        case forms.Form():
            return form.kind
    return "a function that foedus cannot look into"


def refuse(method: str, form: Any) -> ModelError:
    """The error for a form that `method` does not support, with an alternative."""
    match form:
        case forms.Ensemble(oracle=Forest()):
            instead = "to_sklearn() or to_onnx(path)"
        case forms.Parametric() | forms.Ensemble(oracle=Net()) if method == "to_sklearn":
            instead = f"{_ITSELF}, or to_torch() or to_onnx(path)"
        case forms.Mixture() if method != "to_sklearn":
            instead = f"to_sklearn() (estimators, densities) or {_ITSELF}"
        case _:
            instead = _ITSELF
    return ModelError(f"this model is {kind(form)}, for which there is no {method}; use {instead}")
