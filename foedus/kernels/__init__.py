"""The inner loops that dominate the time of a round, compiled from C if there was a compiler.

`ready` tells whether they are available. Otherwise callers use their own versions in Python: random
words and permutations in `foedus.base.random`, training of linear models and fully connected
networks in `foedus.models.training`, BatchNorm in `foedus.models.norms`, sums of trees in
`foedus.models.trees`, histograms in `foedus.models.histograms`, sums of replies in
`foedus.core.reduce`. Integers and sums are bitwise equal in both versions, training is equal up to
rounding. FOEDUS_COMPILED=0 in the environment disables the compiled loops.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

try:
    from foedus.kernels import _compiled
except ImportError:  # there was no compiler
    _compiled = None  # type: ignore[assignment]  # a module or nothing: there is no type for that

_VERSION = 6
"""Version of the functions' arguments: an older build, from before an update, is not used."""

ready = _compiled is not None and _compiled.version() == _VERSION
ready = ready and os.environ.get("FOEDUS_COMPILED") != "0"

MOST_LAYERS = 32
"""The largest number of layers of a network that `train` supports."""

Layer = tuple[Tensor | None, Tensor | None]
"""Weights and bias."""

NORMALIZE, RELU, DROPOUT = 1, 2, 3
"""What can follow a layer."""


@dataclass(frozen=True)
class Between:
    """What follows a layer of all clients: each operation at most once, in their order.

    Args:
        operations: `NORMALIZE` (BatchNorm by the rows of the mini-batch), `RELU`, `DROPOUT`.
        norm: Its scale, shift, running mean and running variance (c, out), changed in place; scale
            and shift may be `None`.
        more: What is added to the gradients in scale and shift.
        fixed: Whether normalization takes the running statistics, which then stay.
        eps: Added to variances.
        momentum: How far running statistics move towards those of the mini-batch.
        keys: Keys (most, c, 2) of the masks of dropout.
        dropped: Dropout puts 0 where 16 random bits are less.
        kept: The factor of other numbers.
    """

    operations: tuple[int, ...] = ()
    norm: tuple[Tensor | None, ...] = (None,) * 4
    more: tuple[Tensor | None, ...] = (None,) * 2
    fixed: bool = False
    eps: float = 1e-5
    momentum: float = 0.1
    keys: Tensor | None = None
    dropped: int = 0
    kept: float = 1.0

    def parts(self) -> tuple:
        """As compiled code takes it."""
        operations = (*self.operations, 0, 0, 0)[:3]
        arrays = (_NONE if t is None else t.numpy() for t in (*self.norm, *self.more, self.keys))
        numbers = (self.fixed, self.eps, self.momentum, self.dropped, self.kept)
        return (*operations, *numbers, *arrays)


_NONE = np.empty(0, np.float32)


def words(keys: np.ndarray, count: int) -> np.ndarray:
    """The first `count` 32-bit words (..., count), in int64, of the streams of keys (..., 2)."""
    out = np.empty((*keys.shape[:-1], count), np.int64)
    _compiled.words(out, np.ascontiguousarray(keys), keys.size // 2, count)
    return out


def fold(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """New keys (..., 2): two words of each counter's (..., 4) block under its key (..., 2)."""
    if keys.ndim > 1:
        shape = np.broadcast_shapes(keys.shape[:-1], counters.shape[:-1])
        keys, counters = np.broadcast_to(keys, (*shape, 2)), np.broadcast_to(counters, (*shape, 4))
    out = np.empty((*counters.shape[:-1], 2), np.int64)
    _compiled.fold(out, np.ascontiguousarray(keys), np.ascontiguousarray(counters), out.size // 2)
    return out


def order(keys: np.ndarray, n: int, valid: np.ndarray | None) -> np.ndarray:
    """Permutations (..., n) by the words of keys (..., 2), those not valid (..., n) last."""
    batch = keys.shape[:-1]
    if valid is not None and valid.shape != (*batch[len(batch) - valid.ndim + 1 :], n):
        batch = np.broadcast_shapes(batch, valid.shape[:-1])
        keys, valid = np.broadcast_to(keys, (*batch, 2)), np.broadcast_to(valid, (*batch, n))
    out = np.empty((*batch, n), np.int64)
    known = b"" if valid is None else np.ascontiguousarray(valid, bool)
    rows = 0 if valid is None else valid.size // max(n, 1)
    _compiled.order(
        out, np.ascontiguousarray(keys), known, keys.size // 2, n, rows, torch.get_num_threads()
    )
    return out


def train(
    layers: list[Layer], more: list[Layer], x: Tensor, y: Tensor, used: Tensor, shares: Tensor,
    steps: Tensor, *, between: Sequence[Between] = (), loss: int, lr: float, keep: float,
    delta: float = 1.0,
) -> None:  # fmt: skip
    """All steps of a batch of clients, in place: w <- keep w - lr (gradient of the mini-batch +
    more).

    layers: weights (c, out, in) and a bias (c, out), or none, of each layer; more: terms that are
    added to their gradients, likewise; between: what follows each layer but the last, ReLU unless
    given. Step t of client i takes the rows used[t, i] of x (n, d) and y, with weights
    shares[t, i]; it makes steps[i] of them. y are labels (n,) in int64, or targets (n, k). loss:
    cross-entropy (0), squared (1), logistic (2) or Huber's (3).
    """
    between = (*(between or [Between((RELU,))] * (len(layers) - 1)), Between())
    most, clients, b = used.shape
    weights = [weight for weight, _ in layers if weight is not None]
    sizes = (weights[0].shape[-1], *(weight.shape[-2] for weight in weights))
    parts = [
        tuple(_NONE if part is None else part.numpy() for part in parts)
        for pair in (layers, more)
        for parts in zip(*pair, strict=True)
    ]
    _compiled.train(
        parts[0], parts[1], parts[2], parts[3], tuple(b.parts() for b in between), sizes, x.numpy(),
        y.numpy(), used.numpy(), shares.numpy(), steps.numpy(), (len(x), most, clients, b),
        y.dtype == torch.int64, loss, lr, keep, delta, torch.get_num_threads(),
    )  # fmt: skip


def pack_trees(
    feature: np.ndarray,
    threshold: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    roots: np.ndarray,
    features: int,
) -> tuple[np.ndarray, int] | None:
    """Nodes for `sum_trees`, and the number of leaves; None if a node is invalid."""
    nodes = np.empty((len(feature), 4), np.int32)
    leaves = _compiled.pack_trees(
        nodes, feature, threshold, left, right, roots, len(feature), len(roots), features
    )
    return (nodes, leaves) if leaves >= 0 else None


def sum_trees(
    x: np.ndarray,
    nodes: np.ndarray,
    roots: np.ndarray,
    shares: np.ndarray,
    values: np.ndarray,
    threads: int,
) -> np.ndarray:
    """sum_t shares[t] tree_t(x): (n, k), of rows x (n, d) and leaves' values (leaves, k)."""
    out = np.empty((len(x), values.shape[1]), np.float32)
    sizes = (len(x), x.shape[1], values.shape[1], len(roots), len(nodes), len(values))
    _compiled.sum_trees(out, x, nodes, roots, shares, values, sizes, threads)
    return out


def sum_histograms(
    bins: np.ndarray, offsets: np.ndarray, node: np.ndarray, values: np.ndarray, nodes: int
) -> np.ndarray:
    """Sums of values (n, channels) by node, feature and bin: (nodes, offsets[-1], channels).

    bins (d, n) in uint8; feature j has the places offsets[j] .. offsets[j + 1] - 1; node (n,) in
    int32, -1 for rows that do not count.
    """
    (d, n), channels, total = bins.shape, values.shape[1], int(offsets[-1])
    out = np.zeros((nodes, total, channels))
    sizes = (n, d, total, nodes, channels)
    _compiled.sum_histograms(out, bins, offsets, node, values, sizes, torch.get_num_threads())
    return out


def sum_replies(total: Tensor, rest: Tensor, x: Tensor, weights: Tensor) -> None:
    """Add sum_c weights[c] x[c] to total + rest: (n,), (n,) and (c,) in float64; x (c, n) float32
    or float64. `rest` has the rounding errors of `total`.
    """
    _compiled.sum_replies(
        total.numpy(), rest.numpy(), x.numpy(), weights.numpy(), len(x), x.shape[1],
        x.dtype == torch.float64, torch.get_num_threads(),
    )  # fmt: skip


def sum_sparse(
    total: Tensor, rest: Tensor, indices: Tensor, values: Tensor, weights: Tensor
) -> None:
    """As `sum_replies`, for vectors that are `values` (c, k) at `indices` (c, k), and zero
    elsewhere."""
    _compiled.sum_sparse(
        total.numpy(), rest.numpy(), indices.numpy(), values.numpy(), weights.numpy(),
        len(indices), indices.shape[1], len(total), values.dtype == torch.float64,
    )  # fmt: skip


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    real: Tensor | None, count: Tensor | int, eps: float, momentum: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """BatchNorm of x (c, b, channels, n), by the statistics of each client's own mini-batch.

    Args:
        x: Numbers in single precision.
        weight: (c, channels), or none.
        bias: Likewise.
        mean: Running means: used for clients of which at most one number counts; likewise.
        var: Running variances.
        real: Rows (c, b) that count, in uint8; `None`: all.
        count: How many numbers of a channel count, of each client (c,) in int64.
        eps: Added to variances.
        momentum: How far running statistics move towards those of the mini-batch.

    Returns:
        Outputs like x, and (5, c, channels): means, unbiased variances, inverses of deviations,
        and the new running means and variances (those of the mini-batch if none are given).
    """
    x, out = x.detach().contiguous(), torch.empty(x.shape, dtype=x.dtype)
    made = x.new_empty(5, len(x), x.shape[2])
    parts = (out, x, None, weight, bias, mean, var, real, _counts(count, x), made, None)
    _normalize(x, eps, momentum, parts)
    return out, made


def normalize_back(
    x: Tensor, slope: Tensor, weight: Tensor | None, made: Tensor, real: Tensor | None,
    count: Tensor | int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients in x, weight and bias of `normalize`, from the gradient in its outputs and its
    statistics."""
    x, out = x.detach().contiguous(), torch.empty(x.shape, dtype=x.dtype)
    slopes = x.new_empty(2, len(x), x.shape[2])
    parts = (out, x, slope, weight, None, None, None, real, _counts(count, x), made, slopes)
    _normalize(x, 0.0, 0.0, parts)
    return out, slopes[0], slopes[1]


def _normalize(x: Tensor, eps: float, momentum: float, parts: Sequence[Tensor | None]) -> None:
    arrays = (_NONE if t is None else t.detach().contiguous().numpy() for t in parts)
    _compiled.normalize(tuple(x.shape), eps, momentum, torch.get_num_threads(), *arrays)


def _counts(count: Tensor | int, x: Tensor) -> Tensor:
    return count if isinstance(count, Tensor) else torch.full((len(x),), count)
