"""Trees of real numbers as integers modulo 2^32 or 2^64, whose sums do not wrap."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from foedus import wire
from foedus.aggregation.secure.shamir import Entropy
from foedus.base import tree
from foedus.base.settings import Means, Remedy, check_settings
from foedus.base.tree import Tree
from foedus.errors import ConfigError, DivergenceError, ReplyError
from foedus.wire.arrays import Trees

Noise = Callable[[int], np.ndarray]
"""Returns this number of integers (int64), to be added before masking, in units of the step."""

Range = Annotated[
    float,
    Interval(ge=1e-100, le=1e100),
    Means("a positive number, from 1e-100 to 1e100"),
    Remedy("scale what clients send"),
]
Bits = Annotated[int, Interval(ge=2, le=40), Remedy("single precision has 24")]
Rounding = Literal["nearest", "stochastic"]

FINE = 1024
"""For differential privacy: the least number of grid steps in each entry of a reply of the largest
norm with equal entries.
"""

_HAIR = 1 - 1e-9  # covers the rounding of a norm


@dataclass(frozen=True)
class FixedPoint:
    """Numbers in [-range, range] as multiples q of a step: q = round(x / step), step = range /
    2^(bits - 1).

    So |q| <= Q = 2^(bits - 1). A client of integer weight w sends w q + e modulo 2^width, where e
    is noise, |e| <= headroom = E, or 0. Over clients of total weight W the sum lies within B = W Q
    + n E of 0. Read as a signed number of `width` bits it is right if and only if it does not wrap,
    that is if B <= 2^(width - 1) - 1: `width` gives 32 or 64, or an error. Without noise, sum_i w_i
    q_i step / W differs from the weighted mean of x_i by the weighted mean of the rounding errors:
    at most step / 2 (nearest), or less than step (stochastic, where each error has mean 0).

    range, bits: the largest magnitude, and the number of bits, of which one is the sign.
    rounding: "nearest" or "stochastic" (up with probability x / step - floor(x / step)).
    headroom: the largest magnitude of a client's noise, in steps.
    """

    range: Range = 16.0
    bits: Bits = 24
    rounding: Rounding = "nearest"
    headroom: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def step(self) -> float:
        return math.ldexp(self.range, 1 - self.bits)

    def width(self, weight: int, clients: int) -> int:
        """Bits of the modulus for a number of clients with a total weight."""
        bound = weight * 2 ** (self.bits - 1) + clients * self.headroom
        for width in (32, 64):
            if bound < 2 ** (width - 1):
                return width
        raise ConfigError(
            f"bits={self.bits}: {clients} clients of total weight {weight} may sum to {bound:.3g} "
            "steps, beyond 64 bits; "
            f"use fewer bits, smaller weights or less headroom than {self.headroom}"
        )

    def encode(
        self,
        reply: Tree,
        weight: int,
        width: int,
        *,
        noise: Noise | None = None,
        clip: float | None = None,
        entropy: Entropy = os.urandom,
        round: int = 0,
        client: int = 0,
    ) -> np.ndarray:
        """The numbers of a reply, one tensor after the other, as unsigned integers of `width` bits;
        raises if one does not fit.

        clip: the largest norm of the whole reply; longer replies are scaled down, so no number is
        out of range.
        """
        flat = np.empty(sum(t.numel() for t in tree.leaves(reply)), np.dtype(f"u{width // 8}"))
        extra = None if noise is None else self._noise(noise, len(flat))
        at = 0
        for q in self._steps(reply, clip, entropy, round, client):
            q *= weight
            if extra is not None:
                q += extra[at : at + len(q)]
            flat[at : at + len(q)] = q.astype(flat.dtype)  # two's complement
            at += len(q)
        return flat

    def _steps(
        self, reply: Tree, clip: float | None, entropy: Entropy, round: int, client: int
    ) -> Iterator[np.ndarray]:
        """The numbers of a reply in steps: tensor by tensor, or clipped together."""
        largest, whole = self.range if clip is None else sys.float_info.max, []
        for number, t in enumerate(tree.leaves(reply)):
            x = t.detach().cpu().reshape(-1).double().numpy()
            if not np.abs(x).max(initial=0.0) <= largest:  # true for NaN as well
                raise self._refused(reply, number, x, round, client)
            if clip is None:
                yield self._rounded(x, entropy).astype(np.int64)
            else:
                whole.append(x)
        if clip is not None and whole:
            yield clipped(torch.from_numpy(np.concatenate(whole))[None], clip, self.step)[0].numpy()

    def _refused(
        self, reply: Tree, number: int, x: np.ndarray, round: int, client: int
    ) -> ReplyError | DivergenceError:
        """The error for tensor `number` of a reply, with the numbers x."""
        name = list(tree.dissolve(reply)[1])[number].removeprefix("t").removeprefix(".")
        where = f"round {round}: client {client}: {name or 'the reply'}"
        if not np.isfinite(x).all():
            why = (
                f"{where} holds {x[~np.isfinite(x)][0]}, which has no fixed-point form; nothing "
                "was sent"
            )
            return DivergenceError(f"{why}. Lower the learning rate, or clip", round, (client,))
        worst = float(x[np.abs(x).argmax()])
        return ReplyError(
            f"{where} holds {worst!r}, outside -{self.range:g} .. {self.range:g}; nothing was "
            "sent. Use "
            f"SecureAggregation(range={1.1 * abs(worst):.2g}) or more, or clip at the client"
        )

    def _rounded(self, x: np.ndarray, entropy: Entropy) -> np.ndarray:
        scaled = x * (1 / self.step)
        if self.rounding == "nearest":
            return np.rint(scaled, out=scaled)
        scaled += np.frombuffer(entropy(4 * len(x)), np.uint32) * 2.0**-32
        np.floor(scaled, out=scaled)
        # with many bits, just below 1 may have become 1
        return np.minimum(scaled, 2.0 ** (self.bits - 1), out=scaled)

    def _noise(self, noise: Noise, size: int) -> np.ndarray:
        drawn = np.asarray(noise(size))
        if drawn.shape != (size,) or drawn.dtype != np.int64:
            raise ConfigError(
                f"noise must give {size} integers (int64), got {drawn.dtype} {list(drawn.shape)}"
            )
        if size and max(int(drawn.max()), -int(drawn.min())) > self.headroom:
            largest = max(int(drawn.max()), -int(drawn.min()))
            raise ConfigError(
                f"headroom={self.headroom} is too small for noise of {largest} steps; raise it"
            )
        return drawn

    def decode(self, total: np.ndarray) -> np.ndarray:
        """A sum of encoded numbers as floating-point numbers."""
        return total.view(np.dtype(f"i{total.itemsize}")).astype(np.float64) * self.step


def clipped(flat: Tensor, clip: float, step: float) -> Tensor:
    """Rows of at most the norm `clip`, as multiples of `step`: scaled down where they are longer,
    then rounded.
    """
    # rounding adds at most half a step to every entry
    limit = (clip - step * math.sqrt(flat.shape[1]) / 2) * _HAIR
    # In two steps: the square of a finite number may overflow.
    size = (
        flat.abs().amax(1, keepdim=True).clamp(min=torch.finfo(flat.dtype).tiny)
        if flat.shape[1]
        else flat.new_ones(len(flat), 1)
    )
    norm = torch.linalg.vector_norm(flat / size, dim=1, keepdim=True)
    factor = torch.where(norm * size > limit, limit / norm, size)
    return (flat / size * (factor / step)).round().long()


def dense(reply: Tree) -> Tree:
    """A reply with only plain tensors; raises for values that have no mean."""
    reply = wire.densify(reply)
    for leaf in tree.pytree.tree_leaves(reply, is_leaf=lambda t: isinstance(t, Trees)):
        if not isinstance(leaf, Tensor):
            raise ReplyError(
                f"a reply to be averaged holds a {type(leaf).__name__}; only tensors have a mean"
            )
    return reply


def dtype_of(t: Tensor) -> str:
    """The type in which a mean of such tensors is given: their own, or float32 for integers."""
    return str(t.dtype if t.is_floating_point() else torch.float32).removeprefix("torch.")
