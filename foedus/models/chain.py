"""Users' modules that are chains of linear layers, which compiled training knows.

A chain is a `torch.nn.Sequential` of Linear layers, with BatchNorm1d, ReLU and Dropout between them
in any order, each at most once, and Flatten or Identity where they change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from foedus.kernels import DROPOUT, NORMALIZE, RELU


@dataclass(frozen=True)
class Link:
    """A linear layer and what follows it.

    Args:
        name: The name of the layer in its module.
        operations: What follows it: `NORMALIZE`, `RELU`, `DROPOUT` of `foedus.kernels`.
        norm: The name of the BatchNorm layer; `None` if there is none.
        p: The probability to drop a number.
    """

    name: str
    operations: tuple[int, ...] = ()
    norm: str | None = None
    p: float = 0.0


def chain_of(module: nn.Module, dimensions: int) -> tuple[Link, ...] | None:
    """The layers of a module that is a chain; `None` if it is anything else.

    Args:
        module: The module.
        dimensions: The number of dimensions of a row; rows of several must be flattened first.
    """
    links: list[Link] = []
    is_flat = dimensions == 1
    for name, m in _parts(module):
        kind = type(m)
        if _is_changed(m) or kind not in (*_OPERATIONS, nn.Linear, nn.Flatten, nn.Identity):
            return None
        if isinstance(m, nn.Flatten):
            if (m.start_dim, m.end_dim) != (1, -1):
                return None
            is_flat = True
        elif isinstance(m, nn.Linear) and is_flat:
            links.append(Link(name))
        elif kind in _OPERATIONS:
            link = _followed(links[-1], name, m) if links else None
            if link is None:
                return None
            links[-1] = link
        elif kind is not nn.Identity:
            return None
    layers = [m for _, m in _parts(module) if isinstance(m, nn.Linear | nn.BatchNorm1d)]
    tensors = [t for m in layers for t in (m, *m.parameters())]
    is_alone = len(set(tensors)) == len(tensors)  # none is there twice
    is_whole = bool(links) and not links[-1].operations and is_alone
    is_trained = all(p.requires_grad for p in module.parameters())
    return tuple(links) if is_whole and is_trained and not _watched() else None


_OPERATIONS = {nn.BatchNorm1d: NORMALIZE, nn.ReLU: RELU, nn.Dropout: DROPOUT}


def _followed(link: Link, name: str, m: nn.Module) -> Link | None:
    """The link with one more operation; `None` if compiled training cannot do it."""
    operation = _OPERATIONS[type(m)]
    if isinstance(m, nn.Dropout):
        if m.p == 0:  # it is not called
            return link
        link = replace(link, p=m.p)
    elif isinstance(m, nn.BatchNorm1d):
        if m.running_mean is None or np.float32(m.eps) <= 0:
            return None
        link = replace(link, norm=name)
    if operation in link.operations:
        return None
    return replace(link, operations=(*link.operations, operation))


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested `torch.nn.Sequential` containers in order, by name."""
    if type(module) is not nn.Sequential or _is_changed(module):
        yield prefix.rstrip("."), module
        return
    for name, m in module._modules.items():  # a layer may be there twice
        assert m is not None  # forward would fail
        yield from _parts(m, f"{prefix}{name}.")


def _is_changed(m: nn.Module) -> bool:
    """Whether a user has attached hooks, or a forward function of their own."""
    hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    return any(hooks) or "forward" in vars(m) or bool(set(m._parameters) - {"weight", "bias"})


def _watched() -> bool:
    """Whether hooks are attached to all modules."""
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(nn.modules.module, f"_global_{kind}") for kind in kinds)
