"""BatchNorm in federated training: whose running statistics, and what becomes of them.

A client's rows may be padded, and a mini-batch may have one row, so layers of a copy of the user's
module compute their statistics themselves: over real rows alone, and from the running ones where a
single value has no variance.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foedus.errors import ModelError
from foedus.models.base import Params

Norm = Literal["average", "local", "silo", "frozen", "group"]
UPDATED = ("average", "local", "silo")
"""Policies whose running statistics clients update."""
POLICIES = (
    'norm="average" (running statistics are averaged as weights are), norm="local" (the layer '
    'stays at its client), norm="silo" (its statistics do), norm="frozen" (statistics of the '
    'module are used and stay) or norm="group" (GroupNorm in its place)'
)
_CALL = threading.local()


def batch_norms(module: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm layers of a module, by name."""
    kind = nn.modules.batchnorm._BatchNorm
    return {name: m for name, m in module.named_modules() if isinstance(m, kind)}


def check_norms(module: nn.Module, norm: str | None) -> None:
    """Refuse layers that the policy does not cover, and those that no policy does."""
    for name, m in module.named_modules():
        where = f"layer {name!r} ({type(m).__name__})"
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            if norm is None:
                raise ModelError(
                    f"{where} mixes the rows of a batch, and what its running statistics mean "
                    "where clients with different data are averaged must be said: "
                    f"fd.Module(net, norm=...) with {POLICIES}; or use GroupNorm or LayerNorm"
                )
            if norm in (*UPDATED, "frozen") and m.running_mean is None:
                raise ModelError(
                    f"{where} has no running statistics (track_running_stats=False), so its "
                    f"outputs depend on which rows are together; norm={norm!r} needs them: use "
                    'track_running_stats=True, or norm="group"'
                )
            if norm in UPDATED and m.momentum is None:
                raise ModelError(
                    f"{where} has momentum=None, a plain average over all mini-batches, of which "
                    "there is none when clients take turns; give it a number, such as 0.1"
                )
        elif isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats:
            raise ModelError(
                f"{where} keeps running statistics, for which there is no policy; set "
                "track_running_stats=False, or use GroupNorm"
            )


def statistics_of(module: nn.Module) -> list[str]:
    """The names of a module's running means and variances."""
    stem = {name: f"{name}." if name else "" for name in batch_norms(module)}
    return [f"{at}{part}" for at in stem.values() for part in ("running_mean", "running_var")]


def layers_of(module: nn.Module) -> list[str]:
    """The names of all trained parameters and running statistics of a module's BatchNorm layers."""
    trained = [
        f"{name}.{part}" if name else part
        for name, m in batch_norms(module).items()
        for part, p in m.named_parameters()
        if p.requires_grad
    ]
    return [*trained, *statistics_of(module)]


def groups_of(channels: int) -> int:
    """Groups of at least 16 channels (Wu and He, ECCV 2018); one where there are fewer than 32."""
    return next(g for g in range(max(1, channels // 16), 0, -1) if channels % g == 0)


def with_groups(module: nn.Module) -> nn.Module:
    """The module, changed in place, with GroupNorm in place of BatchNorm, with its weights."""
    for name, m in batch_norms(module).items():
        like = m.weight if m.affine else None
        made = nn.GroupNorm(groups_of(m.num_features), m.num_features, m.eps, m.affine)
        if like is not None:
            made.weight, made.bias = m.weight, m.bias
        if not name:
            return made
        home, _, last = name.rpartition(".")
        setattr(module.get_submodule(home), last, made)
    return module


def with_statistics(module: nn.Module) -> None:
    """Let the BatchNorm layers of a copy leave padding out, and give away what they update."""
    for name, m in batch_norms(module).items():
        m.forward = partial(_normalize, m, f"{name}." if name else "")  # type: ignore[method-assign]


@contextmanager
def rows_of_call(weight: Tensor | None, padded: bool) -> Iterator[Params]:
    """Within it, layers leave out rows of weight 0 where `padded`; yields their new statistics."""
    found: Params = {}
    _CALL.now = (weight, padded, found)
    try:
        yield found
    finally:
        _CALL.now = None


def _normalize(m: Any, at: str, x: Tensor) -> Tensor:
    m._check_input_dim(x)
    now = getattr(_CALL, "now", None)
    mean, var = m.running_mean.detach(), m.running_var.detach()  # no gradient is asked of them
    if now is None or not m.training:
        return F.batch_norm(x, mean, var.clamp(min=0), m.weight, m.bias, False, 0.0, m.eps)
    weight, padded, found = now
    each = x[:1, :1].numel()
    if not padded and len(x) * each > 1:
        mean, var = mean.clone(), var.clone()
        out = F.batch_norm(x, mean, var, m.weight, m.bias, True, m.momentum, m.eps)
        found[f"{at}running_mean"], found[f"{at}running_var"] = mean.detach(), var.detach()
        return out.contiguous()  # batched, it is not: a view after it would fail
    if not padded:  # one value has no variance
        found[f"{at}running_mean"], found[f"{at}running_var"] = mean, var
        return F.batch_norm(x, mean, var.clamp(min=0), m.weight, m.bias, False, 0.0, m.eps)
    if len(x) % len(weight):
        raise ModelError(
            f"BatchNorm layer {at.rstrip('.')!r} is given {len(x)} rows of {len(weight)}: padding "
            'rows cannot be told from others; use norm="frozen" or norm="group"'
        )
    real = (weight > 0).to(x.dtype).repeat_interleave(len(x) // len(weight))
    real = real.view(-1, *[1] * (x.dim() - 1))
    axes = [i for i in range(x.dim()) if i != 1]
    count = real.sum() * each
    least = count.clamp(min=1)
    batch_mean = (x * real).sum(axes, keepdim=True) / least
    apart = x - batch_mean
    batch_var = (apart.square() * real).sum(axes, keepdim=True) / least
    shape = batch_mean.shape
    several = count > 1  # one value has no variance: the running statistics, which stay
    used_mean = torch.where(several, batch_mean, mean.view(shape))
    used_var = torch.where(several, batch_var, var.view(shape).clamp(min=0))
    rate = torch.where(several, m.momentum, 0.0).to(x.dtype)
    unbiased = batch_var * (count / (count - 1).clamp(min=1))
    found[f"{at}running_mean"] = torch.lerp(mean, batch_mean.detach().flatten(), rate)
    found[f"{at}running_var"] = torch.lerp(var, unbiased.detach().flatten(), rate)
    out = (x - used_mean) * (used_var + m.eps).rsqrt()
    if m.weight is None:
        return out
    return out * m.weight.view(shape) + m.bias.view(shape)
