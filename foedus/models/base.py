"""What a model is to foedus: a function of (parameters, rows). It holds no numbers itself."""

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
    """Answers for the dropout functions that are called within it: one of `foedus.models.dropout`.

    `sites` are the calls so far.
    """

    sites: list[Any]

    def __enter__(self) -> Any: ...
    def __exit__(self, *raised: Any) -> Any: ...


class Model(Settings):
    """Base of the models: frozen dataclasses with `init` and `apply`.

    A model with a closed-form derivative also defines `pullback`; the others are differentiated by
    autograd.
    """

    if TYPE_CHECKING:  # a constant of the class or a property

        @property
        def batchable(self) -> bool:
            """Whether training many clients in one batched call is the faster way."""

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
    """Names of matrices whose gradients lie in memory as they do, however they are batched."""

    trains_apart: ClassVar[bool] = False
    """Whether it is called otherwise in training (`train_outputs`)."""

    sequences: ClassVar[bool] = False
    """Whether it can have outputs for each step of a sequence."""

    def __post_init__(self) -> None:
        check_settings(self, ModelError)

    def check(self, spec: Spec) -> None:
        """Refuse data that the model cannot take, with the reason."""

    def takes_integers(self, spec: Spec) -> bool:
        """Whether rows of integers reach it as int64; otherwise as float32."""
        return False

    def init(self, spec: Spec, key: Tensor) -> Params:
        """Starting parameters, drawn from `key`."""
        raise NotImplementedError

    def ready(self, device: torch.device) -> None:
        """Get ready to be called with tensors on a device, which `torch.func` may then do."""

    def apply(self, params: Params, x: Tensor) -> Tensor:
        """Outputs (n, outputs) of rows x (n, *shape); (n, t, outputs) where rows have t labels."""
        raise NotImplementedError

    @property
    def statistics(self) -> frozenset[str]:
        """Names of parameters that no gradient moves: running statistics, which training updates
        and a server averages.
        """
        return frozenset()

    @property
    def kept(self) -> frozenset[str]:
        """Names of parameters that stay at their client: those of BatchNorm with norm="local"."""
        return frozenset()

    def drops(self, spec: Spec) -> bool:
        """Whether it has dropout in training."""
        return False

    def dropout_calls(self, params: Params, x: Tensor, weight: Tensor, padded: bool) -> Any:
        """A note of the calls of dropout in training on such rows of one client
        (`foedus.models.dropout.Record`), where it `trains_apart`.
        """
        raise NotImplementedError

    def train_outputs(
        self, params: Params, x: Tensor, weight: Tensor, padded: bool, drops: Drops | None
    ) -> tuple[Tensor, Params]:
        """Outputs while a client trains, and the new running statistics.

        Args:
            params: Parameters and statistics.
            x: The rows of a mini-batch.
            weight: What rows count; 0 for padding.
            padded: Whether there is padding.
            drops: Answers for dropout; `None`: the model is known to have none.
        """
        return self.apply(params, x), {}

    def pullback(self, params: Params, x: Tensor) -> tuple[Tensor, Pull]:
        """Outputs of parameters and flat rows with a client dimension, and what their slope does.

        `pull(slope)` returns the gradient. `pull(slope, alpha, beta)` makes the step p <- beta p +
        alpha g in place instead, without ever holding the gradient, which for a wide layer saves as
        much time as computing it.
        """
        raise NotImplementedError


_WIDE = 1 << 15
"""Numbers of a matrix from which its gradient should lie in memory as it does."""


def derives_within(model: Model, params: Params) -> bool:
    """Whether gradients of several clients are taken within `torch.func.vmap`, rather than through
    it, which is faster, but leaves gradients of matrices transposed that are not of a linear layer:
    steps along them are slow where they are wide.

    params: Of one client.
    """
    transposed = (v for k, v in params.items() if v.dim() == 2 and k not in model.row_major)
    return model.recurrent or any(v.numel() >= _WIDE for v in transposed)


def widths_of(given: Any) -> Any:
    """Layer widths as a tuple, of one number or of a sequence; others stay, to be refused."""
    if isinstance(given, Integral):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else given


def check_fits(name: str, model: Model, spec: Spec, descends: bool = False) -> None:
    """Refuse a model that does not take such rows, or returns another number of outputs.

    descends: whether it is trained by mini-batch descent, which knows dropout and statistics.
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
    """Refuse a model with running statistics, for an algorithm that does not average them."""
    raise ModelError(
        f'{name} does not average the running statistics of BatchNorm (norm="average"); use '
        'norm="frozen" or norm="group", or fd.FedAvg, fd.FedProx, fd.Scaffold or fd.FedDyn'
    )


def raise_kept(name: str) -> NoReturn:
    """Refuse a model with layers that stay at their client, for an algorithm without them."""
    raise ModelError(
        f'{name} has no place for layers that stay at their clients (norm="local" or "silo"); use '
        'norm="average", "frozen" or "group", or fd.FedAvg, fd.FedProx, fd.FedAdam, fd.FedNova or '
        "fd.FedPer"
    )


def check_sequences(model: Model, spec: Spec) -> None:
    """Refuse a model with one output a row for labels of each step of a sequence."""
    if spec.steps and not model.sequences:
        raise ModelError(
            f"{type(model).__name__} predicts one label a row, and rows have {spec.steps} labels "
            f"each: give a torch.nn.Module with outputs (n, {spec.steps}, {spec.outputs}); or, "
            "where these are several labels of one row (multi-label), y.astype(np.float32)"
        )


def check_plain(name: str, model: Model, spec: Spec) -> None:
    """Refuse a model that is called otherwise in training, for an algorithm that does not train by
    mini-batch descent: with running statistics, or dropout.
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
    """(channels, height, width) of a row; a flat row of a square number is one grey image."""
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
    """A foedus model from what the user passed: one of ours, or any `torch.nn.Module`."""
    from foedus.models.module import Module

    if isinstance(model, Model):
        return model
    if isinstance(model, torch.nn.Module):
        return Module(model)
    given = repr(model)
    if isinstance(model, type):
        given = f"{model.__name__} (the class: add parentheses)"
    raise ModelError(f"model must be a foedus model or a torch.nn.Module, not {given}")
