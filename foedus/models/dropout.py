"""Dropout whose masks are drawn from a client's key, in place of PyTorch's global generator.

While a module is called for training, a `TorchFunctionMode` answers for PyTorch's dropout
functions, inside attention and recurrent layers too. The mask of the i-th call in step t of a
client depends only on the client's key, t, i, and the position in the tensor: it is the same
batched or looped, and on every engine. Rows are the first dimension of a mask's stream, so padding
rows change nothing; if rows are not the first dimension, the dimension of their size is used.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foedus.base import random
from foedus.errors import ModelError

_ALPHA = -1.7580993408473766
"""-lambda alpha of SELU: the value of dropped numbers in alpha dropout."""

_LEVELS = 1 << 16


@dataclass(frozen=True)
class Site:
    """A call of a dropout function: its mask's shape and dimension of rows, the probability to
    drop, and the value of a mask where it keeps.
    """

    shape: tuple[int, ...]
    rows: int
    p: float
    kept: float = 1.0


class Masks:
    """Masks of all steps of a batch of clients.

    Args:
        keys: The clients' keys (c, 2).
        steps: The number of steps.
    """

    def __init__(self, keys: Tensor, steps: int) -> None:
        self.keys, self.steps = keys, torch.arange(steps).unsqueeze(1)
        self._sites: list[Tensor] = []

    def draw(self, number: int, site: Site, like: Tensor, step: int, clients: slice) -> Tensor:
        """The mask of some clients (c, *shape)."""
        keys = self.keys_of(number)[step, clients]
        return draw_mask(keys, site).to(like.device, like.dtype)

    def keys_of(self, number: int) -> Tensor:
        """Keys (steps, c, 2) of the masks of a call."""
        while len(self._sites) <= number:
            call = random.fold(self.keys, 0xD20, len(self._sites))
            self._sites.append(random.fold(call, self.steps))
        return self._sites[number]


def draw_mask(keys: Tensor, site: Site) -> Tensor:
    """Masks (c, *shape) by the 16-bit halves of the words of keys (c, 2)."""
    lead, *others = (site.shape[site.rows], *site.shape[: site.rows], *site.shape[site.rows + 1 :])
    count = math.prod(site.shape)
    halves = random.words(keys, -(-count // 2)).numpy().astype("<u4").view("<u2")[..., :count]
    mask = torch.from_numpy(np.multiply(halves >= dropped(site.p), np.float32(site.kept)))
    return mask.view(len(keys), lead, *others).movedim(1, site.rows + 1)


def dropped(p: float) -> int:
    """Of 2^16 values, those that drop: p is met to 2^-17."""
    return round(p * _LEVELS)


_NOW = threading.local()


class _Mode(TorchFunctionMode):
    """Replaces dropout functions and layers (`with_layers`); subclasses define the masks.

    Args:
        rows: How many rows a client has in this step.
        functions: Whether functions are replaced, not only layers: checking every function call
            costs time.
    """

    def __init__(self, rows: int, functions: bool = True) -> None:
        super().__init__()
        self.row_count, self.functions = rows, functions
        self.sites: list[Site] = []
        self.by_function = False

    def __enter__(self) -> Self:
        _NOW.mode = self
        return super().__enter__() if self.functions else self

    def __exit__(self, *raised: Any) -> None:
        _NOW.mode = None
        if self.functions:
            super().__exit__(*raised)

    def mask(self, number: int, site: Site, like: Tensor) -> Tensor:
        raise NotImplementedError

    def keep(self, x: Tensor, p: float, shape: Sequence[int], kept: float) -> Tensor:
        """A mask for x, of a shape that broadcasts against it."""
        shape = tuple(shape)
        n = self.row_count
        rows = 0 if not shape or shape[0] == n or n not in shape else shape.index(n)
        site = Site(shape or (1,), rows, p, kept)
        self.sites.append(site)
        return self.mask(len(self.sites) - 1, site, x).view(shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            self.by_function = True
            return answer(self, *args, **kwargs)
        if getattr(func, "__name__", "") in _RECURRENT:
            self.by_function = True
            return _recurrent(self, func, *args, **kwargs)
        return func(*args, **kwargs)


class Record(_Mode):
    """Records the calls, and drops nothing."""

    def mask(self, number: int, site: Site, like: Tensor) -> Tensor:
        return torch.full(site.shape, site.kept, dtype=like.dtype, device=like.device)


class Given(_Mode):
    """Masks that were drawn before, for all clients of a batch.

    Args:
        rows: How many rows a client has in this step.
        plan: The calls that were noted.
        masks: A mask for each.
    """

    def __init__(self, rows: int, plan: Record, masks: Sequence[Tensor]) -> None:
        super().__init__(rows, plan.by_function)
        self.plan, self.masks = plan.sites, masks

    def mask(self, number: int, site: Site, like: Tensor) -> Tensor:
        if number >= len(self.plan) or self.plan[number] != site:
            raise ModelError(
                "the model calls dropout on other shapes from one client to the next; use "
                "fd.Local(batch=False), which trains one client after the other"
            )
        return self.masks[number]


class Drawn(_Mode):
    """Masks drawn at each call, for a single client."""

    def __init__(
        self, rows: int, plan: Record, draw: Callable[[int, Site, Tensor], Tensor]
    ) -> None:
        super().__init__(rows, plan.by_function)
        self.draw = draw

    def mask(self, number: int, site: Site, like: Tensor) -> Tensor:
        return self.draw(number, site, like)


def _active(p: float, training: bool) -> bool:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return training and p > 0


def _result(x: Tensor, found: Tensor, inplace: bool) -> Tensor:
    return x.copy_(found) if inplace else found


def kept_scale(p: float) -> float:
    """1 over the probability to be kept, as it is drawn."""
    kept = 1 - dropped(p) / _LEVELS
    return 1 / kept if kept else 0.0


def _dropout(
    mode: _Mode, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not _active(p, training):
        return input
    return _result(input, input * mode.keep(input, p, input.shape, kept_scale(p)), inplace)


def _torch_dropout(mode: _Mode, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train)


def _torch_dropout_(mode: _Mode, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train, True)


def _channels(x: Tensor, single: int) -> tuple[int, ...]:
    """The shape of a mask by channel; `single`: dimensions of an input without rows."""
    named = 1 if x.dim() == single else 2
    return (*x.shape[:named], *[1] * (x.dim() - named))


def _by_channel(single: int) -> Callable[..., Tensor]:
    def drop(
        mode: _Mode, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not _active(p, training):
            return input
        keep = mode.keep(input, p, _channels(input, single), kept_scale(p))
        return _result(input, input * keep, inplace)

    return drop


def _alpha(mode: _Mode, x: Tensor, p: float, shape: tuple[int, ...], inplace: bool) -> Tensor:
    """a (m x + (1 - m) alpha') + b, which leaves mean 0 and variance 1 as they are."""
    p = dropped(p) / _LEVELS
    if p == 1:
        return _result(x, x * 0, inplace)
    a = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5
    keep = mode.keep(x, p, shape, 1.0)
    found = a * (x * keep + _ALPHA * (1 - keep)) - a * _ALPHA * p
    return _result(x, found, inplace)


def _alpha_dropout(
    mode: _Mode, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _alpha(mode, input, p, input.shape, inplace) if _active(p, training) else input


def _feature_alpha_dropout(
    mode: _Mode, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    shape = _channels(input, 0)
    return _alpha(mode, input, p, shape, inplace) if _active(p, training) else input


def _attention(
    mode: _Mode,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, as PyTorch documents it."""
    if not dropout_p:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -math.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    return _dropout(mode, scores.softmax(-1), dropout_p) @ value


def _heads(mode: _Mode, *args: Any, **kwargs: Any) -> Any:
    """`multi_head_attention_forward`, whose own calls of dropout are answered for, too."""
    given = F.multi_head_attention_forward
    names = {
        **given.__globals__,
        "has_torch_function": lambda tensors: False,
        "dropout": lambda *a, **k: _dropout(mode, *a, **k),
        "scaled_dot_product_attention": lambda *a, **k: _attention(mode, *a, **k),
    }
    own = types.FunctionType(given.__code__, names, given.__name__, given.__defaults__)
    own.__kwdefaults__ = given.__kwdefaults__
    return own(*args, **kwargs)


def with_layers(module: nn.Module) -> None:
    """Let the dropout layers of a copy ask for masks themselves, without a mode."""
    for m in module.modules():
        answer = _LAYERS.get(type(m))
        if answer is not None:
            m.forward = partial(_layer, m, answer)


def _layer(m: Any, answer: Callable[..., Tensor], x: Tensor) -> Tensor:
    mode = getattr(_NOW, "mode", None)
    if mode is None:  # there is nothing to drop
        return x
    return answer(mode, x, m.p, m.training, m.inplace)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _recurrent(mode: _Mode, func: Callable, x: Any, *rest: Any) -> Any:
    """Layer by layer, with dropout between the layers."""
    if isinstance(rest[0], Tensor) and not rest[0].is_floating_point():  # packed: its batch sizes
        if rest[4] > 1 and _active(rest[5], rest[6]):
            raise ModelError(
                "dropout between the layers of a recurrent network needs padded sequences, not "
                "packed ones; pass tensors, or set dropout=0"
            )
        return func(x, *rest)
    state, weights, bias, layers, p, train, both, first = rest[:8]
    if layers == 1 or not _active(p, train):
        return func(x, *rest)
    paired = isinstance(state, list | tuple)
    states = list(state) if paired else [state]
    ways = 2 if both else 1
    each = len(weights) // layers
    ends: list[list[Tensor]] = []
    for i in range(layers):
        if i:
            x = _dropout(mode, x, p)
        own = [s[i * ways : (i + 1) * ways] for s in states]
        part = weights[i * each : (i + 1) * each]
        begin: Any = own if paired else own[0]
        x, *end = func(x, begin, part, bias, 1, 0.0, train, both, first)
        ends.append(end)
    return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.dropout1d: _by_channel(2),
    F.dropout2d: _by_channel(0),
    F.dropout3d: _by_channel(4),
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _feature_alpha_dropout,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _heads,
    torch.dropout: _torch_dropout,
    torch.dropout_: _torch_dropout_,
}
_LAYERS: dict[type, Callable[..., Tensor]] = {
    nn.Dropout: _dropout,
    nn.Dropout1d: _by_channel(2),
    nn.Dropout2d: _by_channel(0),
    nn.Dropout3d: _by_channel(4),
    nn.AlphaDropout: _alpha_dropout,
    nn.FeatureAlphaDropout: _feature_alpha_dropout,
}
