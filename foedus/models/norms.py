"""BatchNorm in federated training: policies for the running statistics.

A client's rows may be padded, and a mini-batch may have one row, so layers of a copy of the user's
module compute their statistics themselves: over real rows only, and with the running statistics if
there is a single value, which has no variance.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active as _transforms_active
from torch._C._functorch import TransformType, _add_batch_dim, _unwrap_batched
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.function import once_differentiable

from foedus import kernels
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
    """Refuse layers that the policy does not cover, and layers that no policy covers."""
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
    """Groups of at least 16 channels (Wu and He, ECCV 2018); one group for fewer than 32
    channels."""
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
    """Make the BatchNorm layers of a copy ignore padding, and return their new statistics."""
    for name, m in batch_norms(module).items():
        m.forward = partial(_normalize, m, f"{name}." if name else "")  # type: ignore[method-assign]


@dataclass
class _Call:
    """The rows of a call, for the layers, and the new statistics that they return."""

    weight: Tensor | None
    padded: bool
    compiled: bool
    found: Params = field(default_factory=dict)


@contextmanager
def rows_of_call(weight: Tensor | None, padded: bool, compiled: bool = True) -> Iterator[Params]:
    """Within it, layers leave out rows of weight 0 where `padded`; yields their new statistics.

    compiled: whether compiled loops can be used: not if `torch.func` computes gradients.
    """
    _CALL.now = _Call(weight, padded, compiled and kernels.ready)
    try:
        yield _CALL.now.found
    finally:
        _CALL.now = None


def _normalize(m: Any, at: str, x: Tensor) -> Tensor:
    m._check_input_dim(x)
    now: _Call | None = getattr(_CALL, "now", None)
    mean, var = m.running_mean.detach(), m.running_var.detach()  # no gradient is asked of them
    if now is None:
        return F.batch_norm(x, mean, var.clamp(min=0), m.weight, m.bias, False, 0.0, m.eps)
    real, rows = None, len(x)
    if now.padded and m.training:
        assert now.weight is not None
        rows = len(now.weight)
        if len(x) % rows:
            raise ModelError(
                f"BatchNorm layer {at.rstrip('.')!r} is given {len(x)} rows of {rows}: padding "
                'rows cannot be told from others; use norm="frozen" or norm="group"'
            )
        real = (now.weight > 0).repeat_interleave(len(x) // rows)
    if m.training and (real is not None or len(x) * math.prod(x.shape[2:]) > 1):
        tensors = [t for t in (x, m.weight, m.bias, mean, var) if t is not None]
        known = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        by = _compiled if now.compiled and known and _is_batched_once() else _by_pytorch
        out, mean, var = by(m, x, mean, var, real)
    else:  # also of one value, which has no variance: the running statistics, which stay
        out = _by_statistics(m, x, mean, var)
    if m.training:
        now.found[f"{at}running_mean"], now.found[f"{at}running_var"] = mean, var
    return out


Found = tuple[Tensor, Tensor, Tensor]
"""Outputs, and the new running mean and variance."""


def _by_statistics(m: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    var = var.clamp(min=0)
    if x.dim() > 2:
        return F.batch_norm(x, mean, var, m.weight, m.bias, False, 0.0, m.eps)
    scale = (var + m.eps).rsqrt()
    if m.weight is None:
        return (x - mean) * scale
    scale = scale * m.weight
    return torch.addcmul(m.bias - mean * scale, x, scale)


def _compiled(m: Any, x: Tensor, mean: Tensor, var: Tensor, real: Tensor | None) -> Found:
    each = math.prod(x.shape[2:])
    padding: tuple[Tensor | None, ...] = (None, None)
    if real is not None:
        padding = (real.to(torch.uint8), real.sum() * each)
    tensors = (x, m.weight, m.bias, mean, var, *padding)
    how = (len(x) * each, m.eps, m.momentum)
    if not _transforms_active():
        out, made = _Normalized.apply(*tensors, *how, True)
        return out, made[3, 0], made[4, 0]
    # The batching rule of an autograd.Function would be looked up through PyTorch's Python layers,
    # which takes longer than the work: the clients' dimension is taken off and put back here.
    clients: Any = retrieve_current_functorch_interpreter()
    level, count = clients.level(), clients.batch_size()
    parts = (_with_clients(t, level, count) for t in tensors)
    with clients.lower():
        out, made = _Normalized.apply(*parts, *how, False)
        batched = (out, made[3], made[4])
    return tuple(_add_batch_dim(t, 0, level) for t in batched)  # type: ignore[return-value]


def _is_batched_once() -> bool:
    """Whether the only active transform of `torch.func`, if any, is one `vmap`."""
    if not _transforms_active():
        return True
    clients = retrieve_current_functorch_interpreter()
    return clients.level() == 1 and clients.key() == TransformType.Vmap


def _with_clients(t: Tensor | None, level: int, count: int) -> Tensor | None:
    """The tensor within `vmap`, with its client dimension first."""
    if t is None:
        return None
    whole, dim = _unwrap_batched(t, level)
    return whole.expand(count, *whole.shape) if dim is None else whole.movedim(dim, 0)


class _Normalized(torch.autograd.Function):
    """BatchNorm of all clients by compiled loops, or of one `alone`, without a client dimension.

    Arguments are those of `kernels.normalize`; `most` numbers of a channel count where no row is
    padding.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor,
        real: Tensor | None, count: Tensor | None, most: int, eps: float, momentum: float,
        alone: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.alone, ctx.needs = alone, [weight is not None, bias is not None]
        of_clients = (weight, bias, mean, var, real, most if count is None else count)
        weight, bias, mean, var, ctx.real, ctx.count = _clients_of(of_clients, alone)
        out, made = kernels.normalize(
            _rows_of(x, alone), weight, bias, mean, var, ctx.real, ctx.count, eps, momentum
        )
        ctx.mark_non_differentiable(made)
        ctx.save_for_backward(x, weight, made)
        return out.view(x.shape), made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, made = ctx.saved_tensors
        rows, slopes = _rows_of(x, ctx.alone), _rows_of(slope, ctx.alone)
        of_x, *others = kernels.normalize_back(rows, slopes, weight, made, ctx.real, ctx.count)
        others = [t[0] if ctx.alone else t for t in others]
        needed = (t if n else None for t, n in zip(others, ctx.needs, strict=True))
        return (of_x.view(x.shape), *needed, *[None] * 8)


def _rows_of(x: Tensor, alone: bool) -> Tensor:
    """Of all clients: (c, b, channels, n)."""
    return x.reshape(1, *x.shape[:2], -1) if alone else x.reshape(*x.shape[:3], -1)


def _clients_of(values: Iterable[Any], alone: bool) -> list[Any]:
    """With a client dimension."""
    return [v.unsqueeze(0) if alone and isinstance(v, Tensor) else v for v in values]


def _by_pytorch(m: Any, x: Tensor, mean: Tensor, var: Tensor, real: Tensor | None) -> Found:
    each = math.prod(x.shape[2:])
    n = len(x) * each
    if real is None and (x.dim() > 2 or x.dtype != mean.dtype):
        mean, var = mean.clone(), var.clone()
        out = F.batch_norm(x, mean, var, m.weight, m.bias, True, m.momentum, m.eps)
        # batched, it is not contiguous: a view after it would fail
        return out.contiguous(), mean.detach(), var.detach()
    if real is None:
        batch_mean = x.mean(0)
        apart = x - batch_mean
        rest = apart.detach().mean(0)  # of rounding, many times larger where the variance is small
        apart = apart - rest
        batch_var = (apart * apart).mean(0)
        scale = (batch_var + m.eps).rsqrt()
        out = apart * scale if m.weight is None else torch.addcmul(m.bias, apart, scale * m.weight)
        mean = torch.lerp(mean, batch_mean.detach() + rest, m.momentum)
        return out, mean, torch.lerp(var, batch_var.detach() * (n / (n - 1)), m.momentum)
    real = real.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
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
    mean = torch.lerp(mean, batch_mean.detach().flatten(), rate)
    var = torch.lerp(var, unbiased.detach().flatten(), rate)
    out = (x - used_mean) * (used_var + m.eps).rsqrt()
    if m.weight is not None:
        out = out * m.weight.view(shape) + m.bias.view(shape)
    return out, mean, var
