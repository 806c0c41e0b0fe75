"""A pair of models, global and local: columns, targets, losses and gradients of their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foedus.base.columns import Columns
from foedus.base.spec import Spec
from foedus.errors import ConfigError
from foedus.export.forms import Form, Parametric, SomeColumns, Total, TwoClasses, two_classes
from foedus.models.base import Model, Params, Pull

LOSSES = ("squared", "logistic")


def forward(model: Model, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
    """Outputs (c, b, m) of rows (c, b, ...) by parameters with a client dimension, and the pullback
    of their slope.
    """
    if model.closed_form:
        return model.pullback(params, x.flatten(2))
    with torch.enable_grad():
        z, pull = torch.func.vjp(lambda p: _outputs(model, p, x), params)[:2]
    return z, lambda s: pull(s)[0]


def _outputs(model: Model, params: Params, x: Tensor) -> Tensor:
    if len(x) > 1:
        return torch.func.vmap(model.apply)(params, x)
    return model.apply({k: v[0] for k, v in params.items()}, x[0]).unsqueeze(0)  # it may branch


def value(loss: str, z: Tensor, y: Tensor) -> Tensor:
    """The loss of each row."""
    return ((z - y).square() if loss == "squared" else F.softplus(-y * z)).sum(-1)


def row_loss(loss: str, outputs: Tensor, y: Tensor) -> Tensor:
    """The loss of each row from `logits`, for evaluation."""
    if outputs.shape[-1] == 2 and not y.is_floating_point():
        outputs, y = (
            outputs[..., 1:] - outputs[..., :1],
            (2 * y - 1).to(outputs.dtype).unsqueeze(-1),
        )
    elif not y.is_floating_point():
        y = 2 * F.one_hot(y, outputs.shape[-1]).to(outputs.dtype) - 1
    elif y.dim() < outputs.dim():
        y = y.unsqueeze(-1)
    return value(loss, outputs, y)


def slope(loss: str, z: Tensor, y: Tensor) -> Tensor:
    """Its derivative in the outputs."""
    return 2 * (z - y) if loss == "squared" else -y * torch.sigmoid(-y * z)


def targets(y: Tensor, spec: Spec) -> Tensor:
    """The targets of the outputs: +-1 for labels (one output for two classes), else the values;
    (..., m).
    """
    if spec.classes == 2:
        return (2 * y.float() - 1).unsqueeze(-1)
    if spec.classes:
        return 2 * F.one_hot(y.long(), spec.classes).float() - 1
    return y.float().reshape(*y.shape[:2], spec.outputs)


def logits(z: Tensor, spec: Spec) -> Tensor:
    """One output for each class from the sum of the models."""
    return two_classes(z) if spec.classes == 2 else z


def sum_of(parts: Iterable[tuple[Model | None, Params, Columns]], batch: int = 1) -> Form:
    """The sum of the models that are not `None`, each with its parameters and columns of rows with
    `batch` leading dimensions.
    """
    there = ((m, params, columns) for m, params, columns in parts if m is not None)
    return Total(tuple(SomeColumns(Parametric(m, p), columns, batch) for m, p, columns in there))


def scores(form: Form, spec: Spec) -> Form:
    """As `logits`, of a model."""
    return TwoClasses(form) if spec.classes == 2 else form


def part_spec(spec: Spec, columns: Columns) -> Spec:
    """The form of a subset of the features, with one output for each learned one."""
    return Spec(
        spec.shape if columns is None else (len(columns),),
        None,
        1 if spec.classes == 2 else spec.outputs,
    )


def columns_of(name: str, given: Any) -> tuple[int, ...]:
    values = None if isinstance(given, str | Mapping) or np.ndim(given) != 1 else np.asarray(given)
    if values is None or (len(values) and not np.issubdtype(values.dtype, np.integer)):
        raise ConfigError(f"{name}={given!r} must be numbers of columns")
    columns = tuple(values.tolist())
    if not columns or min(columns) < 0 or len(set(columns)) != len(columns):
        raise ConfigError(f"{name} must be different column numbers from 0 on, at least one")
    return columns


def union(one: Columns, other: Columns) -> tuple[int, ...] | None:
    """The columns of either (`None`: all)."""
    return None if one is None or other is None else tuple(sorted({*one, *other}))


def by_id(name: str, given: Any, f: Callable) -> Any:
    """`f` of a setting, or of the setting of each client."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return f(given)
    if not all(isinstance(k, Integral) and not isinstance(k, bool) for k in given):
        raise ConfigError(
            f"{name} must have client ids as keys, integers; it has {list(given)[:5]}"
        )
    return {int(k): f(v) for k, v in given.items()}
