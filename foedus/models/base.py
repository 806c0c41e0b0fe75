"""The interface of models: a function of (parameters, rows) that holds no parameters itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, Protocol

import torch
from annotated_types import Ge
from torch import Tensor

from foedus.base import random
from foedus.base.settings import Settings, check_settings
from foedus.base.spec import Spec
from foedus.errors import ModelError

Params = dict[str, Tensor]
Pull = Callable[..., Params]
Widths = tuple[Annotated[int, Ge(1)], ...]
"""Sizes of layers."""


class Drops(Protocol):
    """A context that handles calls of dropout functions made within it (`foedus.models.dropout`).

    `sites` are the calls so far.
    """

    sites: list[Any]

    def __enter__(self) -> Any: ...
    def __exit__(self, *raised: Any) -> Any: ...


class Model(Settings):
    """Base of the models: frozen dataclasses with `init` and `apply`.

        f(x) = apply(params, x),    params = init(spec, key)

    A model with a closed-form derivative also defines `pullback`; others are differentiated by
    autograd. Subclass it for a model that is not a `torch.nn.Module`.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Scale(fd.Model):
        ...     def init(self, spec, key):
        ...         return {"a": torch.ones(spec.outputs)}
        ...     def apply(self, params, x):
        ...         return params["a"] * x.flatten(1).mean(1, keepdim=True)
        >>> fed = fd.split(fd.load("diabetes"), "iid", clients=3)
        >>> fd.run(fd.FedAvg(Scale()), fed, rounds=1).model.predict(fed.data.x_test).shape
        (111,)
    """

    if TYPE_CHECKING:  # a constant of the class or a property

        @property
        def batchable(self) -> bool:
            """Whether training many clients in one batched call is faster."""

        @property
        def closed_form(self) -> bool:
            """Whether it has a `pullback`."""
    else:
        batchable: bool = True
        closed_form: ClassVar[bool] = False

    recurrent: ClassVar[bool] = False
    """Whether it has layers that PyTorch batches only where it takes derivatives:
    `torch.nn.RNNBase`.
    """

    row_major: ClassVar[frozenset[str]] = frozenset()
    """Names of matrices whose gradients have the same memory layout, however they are batched."""

    trains_apart: ClassVar[bool] = False
    """Whether it is called differently in training (`train_outputs`)."""

    sequences: ClassVar[bool] = False
    """Whether it can have outputs for each step of a sequence."""

    def __post_init__(self) -> None:
        check_settings(self, ModelError)

    def check(self, spec: Spec) -> None:
        """Raise `ModelError` for data that the model cannot take.

        Args:
            spec: The form of the data.
        """

    def takes_integers(self, spec: Spec) -> bool:
        """Whether integer rows reach it as int64; otherwise they are float32.

        Args:
            spec: The form of the data.
        """
        return False

    def init(self, spec: Spec, key: Tensor) -> Params:
        """The initial parameters.

        Args:
            spec: The form of the data.
            key: The random key they are drawn from (`foedus.base.random`).

        Returns:
            Tensors by name.
        """
        raise NotImplementedError

    def ready(self, device: torch.device) -> None:
        """Prepare for calls with tensors on a device, possibly within `torch.func`.

        Args:
            device: The device.
        """

    def apply(self, params: Params, x: Tensor) -> Tensor:
        """The outputs of rows.

        Args:
            params: The parameters, by name.
            x: Rows (n, *shape).

        Returns:
            A tensor (n, outputs), or (n, t, outputs) if rows have t labels.
        """
        raise NotImplementedError

    @property
    def statistics(self) -> frozenset[str]:
        """Names of parameters without gradients: running statistics, which training updates.

        A server averages them.
        """
        return frozenset()

    @property
    def kept(self) -> frozenset[str]:
        """Names of parameters that stay at their client: those of BatchNorm with norm="local"."""
        return frozenset()

    def drops(self, spec: Spec) -> bool:
        """Whether it uses dropout in training.

        Args:
            spec: The form of the data.
        """
        return False

    def dropout_calls(self, params: Params, x: Tensor, weight: Tensor, padded: bool) -> Any:
        """A record of the calls of dropout in training (`foedus.models.dropout.Record`).

        It is asked for if the model `trains_apart`.

        Args:
            params: The parameters.
            x: Rows of one client.
            weight: The weight of each row; 0 for padding.
            padded: Whether there is padding.
        """
        raise NotImplementedError

    def train_outputs(
        self, params: Params, x: Tensor, weight: Tensor, padded: bool, drops: Drops | None
    ) -> tuple[Tensor, Params]:
        """The outputs while a client trains, and the new running statistics.

        Args:
            params: Parameters and statistics.
            x: The rows of a mini-batch.
            weight: The weight of each row; 0 for padding.
            padded: Whether there is padding.
            drops: Handles calls of dropout; `None`: the model is known to have none.

        Returns:
            The outputs, and statistics by name.
        """
        return self.apply(params, x), {}

    def pullback(self, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
        """Outputs with a function that computes the gradient from the derivative in the outputs.

        `pull(slope)` returns the gradient g. `pull(slope, alpha, beta)` instead makes the step p <-
        beta p + alpha g in place without storing the gradient, which for a wide layer saves as much
        time as computing it.

        Args:
            params: The parameters, with a leading client dimension.
            x: Flat rows, with a leading client dimension.

        Returns:
            The outputs and `pull`.
        """
        raise NotImplementedError


_WIDE = 1 << 15
"""Size of a matrix from which its gradient should have the same memory layout."""


def derives_within(model: Model, params: Params) -> bool:
    """Whether gradients of several clients are taken within `torch.func.vmap`, not through it.

    Through it is faster, but leaves gradients of matrices transposed that do not belong to a linear
    layer, and steps along transposed gradients are slow for wide matrices.

    Args:
        model: The model.
        params: The parameters of one client.
    """
    transposed = (v for k, v in params.items() if v.dim() == 2 and k not in model.row_major)
    return model.recurrent or any(v.numel() >= _WIDE for v in transposed)


def widths_of(given: Any) -> Any:
    """Layer widths as a tuple, from one number or a sequence; other values are returned unchanged.

    The field's check refuses those.
    """
    if isinstance(given, Integral):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else given


def check_fits(name: str, model: Model, spec: Spec, descends: bool = False) -> None:
    """Raise `ModelError` if a model does not take these rows or has another number of outputs.

    Args:
        name: The name of the model in the message.
        model: The model.
        spec: The form of the data.
        descends: Whether it is trained by mini-batch descent, which handles dropout and statistics.
    """
    try:
        model.check(spec)
        if not descends:
            check_plain("this algorithm", model, spec)
        with torch.no_grad():
            params = model.init(spec, random.key(0))
            found = tuple(model.apply(params, torch.zeros(2, *spec.shape)).shape)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    if found != (wanted := (2, spec.outputs)):
        needed = f"it must return {spec.outputs} a row: {wanted}"
        raise ModelError(f"{name} returns shape {found} for two rows; {needed}")


def raise_statistics(name: str) -> NoReturn:
    """Raise `ModelError` for a model with running statistics, which `name` does not average."""
    raise ModelError(
        f'{name} does not average the running statistics of BatchNorm (norm="average"); use '
        'norm="frozen" or norm="group", or fd.FedAvg, fd.FedProx, fd.Scaffold or fd.FedDyn'
    )


def raise_kept(name: str) -> NoReturn:
    """Raise `ModelError` for a model with layers that stay at their client."""
    raise ModelError(
        f'{name} has no place for layers that stay at their clients (norm="local" or "silo"); use '
        'norm="average", "frozen" or "group", or fd.FedAvg, fd.FedProx, fd.FedAdam, fd.FedNova or '
        "fd.FedPer"
    )


def check_sequences(model: Model, spec: Spec) -> None:
    """Raise `ModelError` for a model that cannot predict a label for each step of a sequence."""
    if spec.steps and not model.sequences:
        raise ModelError(
            f"{type(model).__name__} predicts one label a row, and rows have {spec.steps} labels "
            f"each: give a torch.nn.Module with outputs (n, {spec.steps}, {spec.outputs}); or, "
            "where these are several labels of one row (multi-label), y.astype(np.float32)"
        )


def check_plain(name: str, model: Model, spec: Spec) -> None:
    """Raise `ModelError` for a model with running statistics or dropout.

    For algorithms that do not train by mini-batch descent: such layers behave differently in
    training.
    """
    if model.kept:
        raise_kept(name)
    if model.statistics:
        raise_statistics(name)
    if model.drops(spec):
        raise ModelError(
            f"{name} does not train by mini-batch descent, and dropout would be off; set its p to "
            "0, or use fd.FedAvg"
        )


def product(slope: Tensor, x: Tensor, weight: Tensor, alpha: float | None, beta: float) -> Tensor:
    """slope^T x, the gradient in a weight matrix; or the step beta weight + alpha slope^T x."""
    # one row: an outer product, for which bmm takes ten times as long
    if alpha is None and x.shape[-2] == 1:
        return slope.mT * x
    if alpha is None:
        return torch.bmm(slope.mT, x)
    return weight.baddbmm_(slope.mT, x, alpha=alpha, beta=beta)


def total(slope: Tensor, bias: Tensor, alpha: float | None, beta: float) -> Tensor:
    """The gradient in a bias; or the step on it, in place."""
    sums = slope.sum(-2)
    if alpha is None:
        return sums
    return (bias if beta == 1 else bias.mul_(beta)).add_(sums, alpha=alpha)


def uniform_init(key: Tensor, number: int, shape: Sequence[int], fan_in: int) -> Tensor:
    """Uniform on +-1/sqrt(fan_in), PyTorch's start for linear and convolutional layers."""
    bound = 1.0 / math.sqrt(max(fan_in, 1))
    return random.uniform(random.fold(key, number), shape).mul_(2 * bound).sub_(bound)


def image_shape(spec: Spec) -> tuple[int, int, int]:
    """(channels, height, width) of a row; a flat row of square length is one gray image."""
    if len(spec.shape) == 3:
        return spec.shape
    side = math.isqrt(spec.features)
    if len(spec.shape) == 2:
        return (1, *spec.shape)
    if side * side == spec.features:
        return (1, side, side)
    rows = f"rows of shape {spec.shape} are none"
    raise ModelError(f"a convolutional model needs images; {rows}: use Linear() or MLP()")


def model_of(model: Model | torch.nn.Module) -> Model:
    """A foedus model from the user's argument: a foedus model, or any `torch.nn.Module`."""
    from foedus.models.module import Module

    if isinstance(model, Model):
        return model
    if isinstance(model, torch.nn.Module):
        return Module(model)
    given = repr(model)
    if isinstance(model, type):
        given = f"{model.__name__} (the class: add parentheses)"
    raise ModelError(f"model must be a foedus model or a torch.nn.Module, not {given}")
