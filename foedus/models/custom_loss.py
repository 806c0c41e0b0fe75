"""A user's own loss: any function of (outputs, y), or a loss module of `torch.nn`.

foedus needs the loss of each row: rows of a padded batch have weight 0, and rows may have weights.
A function that returns one number a row is called with all rows. A function that returns their mean
is called on each row by itself, in one batched call (`torch.func.vmap`). For a module of `torch.nn`
with `reduction="mean"`, a copy with `reduction="none"` is called. A loss that is not a mean over
rows, such as one that compares rows with each other, has no such form; it is refused before the run
starts.

Where rows are sequences, a function is given outputs (n, t, classes) and labels (n, t), -100 where
a step has none, and returns one number a step, one a row, or the mean. A module of `torch.nn` is
given all steps as rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foedus.base import random
from foedus.base.spec import Spec
from foedus.base.steps import IGNORED, mean_over_steps
from foedus.errors import ConfigError, ModelError, shown
from foedus.models.base import Model
from foedus.models.losses import Loss
from foedus.models.unbatched import call

_ROWS = 5
"""Rows that a loss is tried on; another number where a model has as many outputs."""

_REMEDY = "return one number a row, of shape (n,), or their mean, of shape ()"
_STEPS_REMEDY = "return one number a step, (n, t), one a row, (n,), or their mean, ()"


@dataclass(frozen=True, eq=False)
class _Custom(Loss):
    """A function of (outputs, y), differentiated by autograd.

    Args:
        function: Returns the losses of the rows, or their mean.
        across: Whether the numbers of a row are averaged: a module with `reduction="mean"`.
        on: Copies of a module by device.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    across: bool = False
    on: dict[torch.device, nn.Module] = field(default_factory=dict, init=False, repr=False)

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.dim() > 2 and len(outputs) == 1:
            return self.value(outputs[0], y[0]).unsqueeze(0)
        if outputs.dim() > 2:
            return torch.func.vmap(self.value)(outputs, y)
        if y.is_floating_point() and y.dim() < outputs.dim():
            y = y.unsqueeze(-1)  # (n, 1) beside (n,) would be broadcast to (n, n)
        found = self.losses(outputs, y)
        if self.across and found.dim() > 1:
            found = found.flatten(1).mean(1)
        return found.squeeze(1) if found.dim() == 2 and found.shape[1] == 1 else found

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The losses of the rows; a function that returns a mean is called row by row."""
        found = self.called(outputs, y)
        return found if found.dim() else torch.func.vmap(self._of_one)(outputs, y)

    def _of_one(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.called(outputs.unsqueeze(0), y.unsqueeze(0))

    def called(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The result of the function; a module is called on the device of the outputs."""
        device, function = outputs.device, self.function
        if isinstance(function, nn.Module):
            function = self.on.get(device) or self._placed(function, device)
        try:
            return call(f"loss={shown(self.function)}", function, outputs, y)
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            raise ConfigError(
                f"loss={shown(self.function)} uses tensors on another device than the outputs, "
                f"which are on {device}: write weights.to(outputs.device), or give a module of "
                f"torch.nn, whose buffers are moved: {error}"
            ) from error

    def _placed(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module, or a copy of it where its tensors are on another device."""
        tensors = (*module.parameters(), *module.buffers())
        there = all(t.device == device for t in tensors)
        self.on[device] = module if there else copy.deepcopy(module).to(device)
        return self.on[device]


@dataclass(frozen=True, eq=False)
class _CustomSteps(_Custom):
    """A function of outputs (n, t, classes) and labels (n, t)."""

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.dim() > 3:
            return torch.func.vmap(self.value)(outputs, y)
        found = self.losses(outputs, y)
        return mean_over_steps(found, y) if found.dim() == 2 else found

    def called(self, outputs: Tensor, y: Tensor) -> Tensor:
        if not _is_loss_module(self.function):  # which has classes in the second dimension
            return super().called(outputs, y)
        found = super().called(outputs.flatten(0, 1), y.flatten())
        return found.unflatten(0, y.shape) if found.dim() else found


def _is_loss_module(function: Any) -> bool:
    return isinstance(function, nn.Module) and hasattr(function, "reduction")


def custom_loss(function: Callable[[Tensor, Tensor], Tensor], steps: bool = False) -> Loss:
    """The loss by row of a function, or of a module of `torch.nn`; steps: rows are sequences."""
    made = _by_row(function)
    if not steps:
        return made
    ignored = getattr(function, "ignore_index", IGNORED)
    if _is_loss_module(function) and ignored != IGNORED:
        raise ConfigError(
            f"loss={shown(function)} ignores label {ignored}, and here steps without a label have "
            f"{IGNORED}; leave ignore_index out, and give such steps the label {IGNORED}: "
            f"np.where(y == {ignored}, {IGNORED}, y)"
        )
    return _CustomSteps(made.function, made.across)


def _by_row(function: Callable[[Tensor, Tensor], Tensor]) -> _Custom:
    if not isinstance(function, nn.Module):
        return _Custom(function)
    if any(p.requires_grad for p in function.parameters()):
        raise ConfigError(
            f"loss={shown(function)} has parameters, which would not be trained; put them into the "
            "model, or call loss.requires_grad_(False)"
        )
    reduction = getattr(function, "reduction", None)
    if reduction == "sum":
        raise ConfigError(
            f"loss={shown(function)} has reduction='sum', but clients minimize a mean over rows: "
            "use reduction='mean'"
        )
    if reduction != "mean":
        return _Custom(function)
    by_row = copy.copy(function)
    by_row.reduction = "none"  # type: ignore[assignment]
    return _Custom(by_row, across=True)


def check_custom(loss: Loss, model: Model | None, spec: Spec) -> None:
    """Try a user's loss on a few rows, with the model's outputs (or draws near 0, where there is no
    model); refuse what cannot be trained.

    Raises:
        ConfigError: It fails, returns no floating-point tensor, or one of another shape, or NaN; it
            does not depend on the outputs, or its gradient is NaN; or it is not the mean of the
            losses of single rows.
    """
    if not isinstance(loss, _Custom):
        return
    name = f"loss={shown(loss.function)}"
    n = _ROWS if spec.outputs != _ROWS else _ROWS + 1
    outputs, y = _try_outputs(model, spec, n), try_targets(spec, n)
    before, remedy = torch.get_rng_state(), _STEPS_REMEDY if spec.steps else _REMEDY
    try:
        found: Any = loss.called(outputs, y)
    except Exception as error:  # any exception of a user's function
        raise ConfigError(
            f"{name} fails for outputs {_form(outputs)} and y {_form(y)}: {error}; it is called as "
            "loss(outputs, y), with raw outputs, and class numbers or targets"
        ) from error
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ConfigError(
            f"{name} draws random numbers, so runs could not be repeated; take the random part out"
        )
    if not isinstance(found, Tensor):
        raise ConfigError(f"{name} returns {type(found).__name__}, not a tensor; {remedy}")
    if not found.is_floating_point():
        raise ConfigError(
            f"{name} returns {found.dtype}, which has no gradient; return floating-point numbers, "
            "such as (outputs.softmax(-1) ...).sum(-1) in place of counts of errors"
        )
    wide = loss.across and found.shape[:1] == (n,) and not spec.steps
    by_row = (n, spec.steps or 1)
    if not wide and tuple(found.shape) not in ((), (n,), by_row):
        average = ".mean(-1)" if found.shape[:1] == (n,) else ""
        raise ConfigError(
            f"{name} returns shape {tuple(found.shape)} for {n} rows; {remedy}"
            f"{f', such as by {average}' if average else ''}"
        )
    if not bool(found.isfinite().all()):
        raise ConfigError(
            f"{name} returns {found.detach().flatten()[~found.isfinite().flatten()][0].item()} for "
            "the model's raw outputs at its start; take logarithms of a softmax (log_softmax), not "
            "of outputs, and keep denominators away from 0"
        )
    if not found.requires_grad:
        raise ConfigError(
            f"{name} has no gradient in the outputs: it does not use them, or detaches them; use "
            "functions of torch only"
        )
    [slope] = torch.autograd.grad(found.sum(), outputs, retain_graph=True)
    if not bool(slope.isfinite().all()):
        raise ConfigError(
            f"{name} has a gradient of {slope[~slope.isfinite()][0].item()} at the model's start; "
            "roots and norms have an infinite slope at 0 (add a small number under the root), and "
            "torch.where has the NaN of the side that it leaves out"
        )
    try:
        together = loss.value(outputs, y)
    except (RuntimeError, ModelError) as error:
        raise ConfigError(
            f"{name} returns a mean, and cannot be batched over rows by torch.func.vmap: {error}; "
            "return one number a row, of shape (n,)"
        ) from error
    alone = torch.cat([loss.value(outputs[i : i + 1], y[i : i + 1]) for i in range(n)])
    mean = found if found.dim() == 0 else together.mean()
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-5) or not torch.allclose(
        mean, together.mean(), rtol=1e-3, atol=1e-5
    ):
        raise ConfigError(
            f"{name} is not a mean of the losses of single rows ({mean.item():.4g} for {n} rows, "
            f"{alone.mean().item():.4g} row by row), so rows cannot have weights, nor be padded; "
            "return one number a row that depends on that row alone: for class weights use "
            "fd.losses.WeightedCrossEntropy(weights), or F.cross_entropy(..., reduction='none')"
        )
    if spec.steps:
        _check_ignored(name, loss, outputs, y)


def _check_ignored(name: str, loss: Loss, outputs: Tensor, y: Tensor) -> None:
    """Refuse a loss that depends on outputs at steps without a label."""
    y = y.clone()
    y[0, -1] = IGNORED
    remedy = f"leave them out, as F.cross_entropy does (ignore_index={IGNORED})"
    try:
        value = loss.value(outputs, y)[0]
        (slope,) = torch.autograd.grad(value, outputs)
    except Exception as error:  # any exception of a user's function
        raise ConfigError(
            f"{name} fails where a step has no label ({IGNORED}): {error}; {remedy}, or put any "
            f"class in their place, y.clamp(min=0), and return one number a step, of shape (n, t)"
        ) from error
    if not bool(value.isfinite()) or bool(slope[0, -1].any()):
        raise ConfigError(
            f"{name} counts steps without a label ({IGNORED}); {remedy}, or return one number a "
            "step, of shape (n, t): foedus then leaves them out"
        )


def _form(t: Tensor) -> str:
    return f"of shape {tuple(t.shape)} ({str(t.dtype).removeprefix('torch.')})"


def _try_outputs(model: Model | None, spec: Spec, n: int) -> Tensor:
    """Outputs near the model's start, where they are in the range that its last layer has."""
    key = random.key(0)
    if model is None:
        return random.normal(key, (n, spec.outputs)).mul_(0.1).requires_grad_()
    params = {
        k: v + 0.1 * random.normal(random.fold(key, i), v.shape).to(v.dtype)
        if v.is_floating_point()
        else v
        for i, (k, v) in enumerate(model.init(spec, key).items())
    }
    whole = spec.integers
    rows = (
        random.integers(key, (n, *spec.shape), 2) if whole else random.normal(key, (n, *spec.shape))
    )
    with torch.no_grad():
        outputs = model.apply(params, rows)
    return outputs.detach().requires_grad_()


def try_targets(spec: Spec, n: int) -> Tensor:
    """All labels in turn; or numbers between 0 and 1, which are valid probabilities, counts and
    values."""
    if spec.classes and spec.steps:
        return (torch.arange(n * spec.steps) % spec.classes).view(n, spec.steps)
    if spec.classes:
        return torch.arange(n) % spec.classes
    return random.uniform(random.key(1), (n, spec.outputs))
