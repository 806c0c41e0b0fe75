"""Calls of users' models and losses under `torch.func.vmap`, with readable errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foedus.errors import ModelError


class _OneHot(TorchFunctionMode):
    """Replaces `one_hot`, which reads values even if the number of classes is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (_one_hot if func is F.one_hot else func)(*args, **kwargs)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # the largest label of a batch says how many classes there are
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def call(
    what: str, function: Callable[..., Any], *args: Any, again: Callable[[], Any] | None = None
) -> Any:
    """The result of a user's function; if it cannot be batched, an error with the remedy.

    Args:
        what: Its name in the error.
        function: The function.
        args: Its arguments.
        again: Called before the function is called a second time.
    """
    try:
        return function(*args)
    except (RuntimeError, NotImplementedError) as error:
        if not batching_fails(error):
            raise
    if again is not None:
        again()
    try:
        with _OneHot():
            return function(*args)
    except (RuntimeError, NotImplementedError) as error:
        raise_unbatched(what, error)


def batching_fails(error: Exception) -> bool:
    """Whether an error comes from an operation that `torch.func.vmap` does not support."""
    return any(word in str(error) for word in ("vmap", "functorch", "Batching rule"))


def raise_unbatched(what: str, error: Exception) -> NoReturn:
    """The remedy for a model or a loss that cannot be batched."""
    raise ModelError(
        f"{what} cannot be batched over clients, as by an `if` on values of a tensor, a mask "
        "(x[x > 0] = 0) or .item(); use engine=fd.Local(batch=False) or fd.Ray(batch=False), "
        "which train one client after the other (fd.FedRes with send='gradient'), or torch.where "
        f"in place of the `if`: {error}"
    ) from error
