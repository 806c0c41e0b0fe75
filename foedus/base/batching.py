"""Leave `vmap` for a while: run a hot loop on the whole batch of clients at once.

A client step is written for one client and batched by `torch.func.vmap`, which costs several
microseconds for each operation and forbids in-place updates. Inside a long local loop that is most
of the time. `batched` marks a function written for a leading client dimension; called from a step,
it receives the tensors of all clients of the batch, without `vmap` around it, and may work in place
on tensors that it made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from foedus.base import tree


class _Batched(torch.autograd.Function):
    @staticmethod
    def forward(run: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.squeeze(0) for t in run([t.unsqueeze(0) for t in tensors]))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info, in_dims, run: Callable, *tensors: Tensor):
        size = info.batch_size
        whole = [
            t.unsqueeze(0).expand(size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, in_dims[1:], strict=True)
        ]
        out = tuple(run(whole))
        return out, (0,) * len(out)


Result = TypeVar("Result", covariant=True)


class Batched(Protocol[Result]):
    """A function wrapped by `batched`; the original is `__wrapped__`."""

    @property
    def __wrapped__(self) -> Callable[[Any, Any], Result]: ...
    def __call__(self, args: tree.Tree, shared: object = None) -> Result: ...


def batched(f: Callable[[Any, Any], Result]) -> Batched[Result]:
    """Decorator: `f(args, shared)` gets every tensor of `args` with a leading client dimension.

    It returns a tree of tensors that have it too. The caller passes `args` without that dimension,
    as a client step sees them; `shared` (anything, tensors included) is the same for all clients
    and passed on as it is. A tensor in `args` that all clients share arrives expanded, not copied,
    so it must be cloned before it is changed in place.
    """

    @functools.wraps(f)
    def call(args: tree.Tree, shared: object = None) -> tree.Tree:
        leaves, form = tree.flatten(args)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        out_form = None

        def run(tensors: list[Tensor]) -> list[Tensor]:
            nonlocal out_form
            for i, t in zip(where, tensors, strict=True):
                leaves[i] = t
            with torch.no_grad():
                result, out_form = tree.flatten(f(tree.unflatten(leaves, form), shared))
            return result

        result = _Batched.apply(run, *(leaves[i] for i in where))
        return tree.unflatten(list(result), out_form)

    return call
