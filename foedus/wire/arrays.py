"""Structured arrays: what a client may send instead of a dense tensor, and unbiased quantization.

Each is a node of a tree. Its tensor fields may carry leading batch dimensions: the replies of many
clients are stacked field by field, and the message of client `c` is the slice `[c]` of each field.
Static fields describe one message. `dense` gives the tensor that is meant; what has it can be
averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foedus.base import random, tree
from foedus.base.tree import Tree
from foedus.errors import ConfigError, unknown


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is(t: object, *dtypes: torch.dtype) -> bool:
    return isinstance(t, Tensor) and t.dtype in dtypes


def _floating(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


@tree.node(static=("shape",))
@dataclass(frozen=True, eq=False)
class Sparse:
    """A tensor of `shape`, zero but for `values` at the flat `indices`; repeated indices add up.

    indices: int64 or int32 `[..., k]`; values: `[..., k]`.
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]

    def dense(self) -> Tensor:
        """The dense tensor, `[..., *shape]`."""
        lead = self.values.shape[:-1]
        zeros = self.values.new_zeros(*lead, math.prod(self.shape))
        return zeros.scatter_add(-1, self.indices.long(), self.values).reshape((*lead, *self.shape))

    def fault(self) -> str | None:
        """What is wrong with the fields' dtypes and shapes, if anything."""
        if not _is(self.indices, torch.int32, torch.int64):
            return "its indices must be int32 or int64"
        if not isinstance(self.values, Tensor) or self.values.dtype == torch.bool:
            return "its values must be numbers"
        if self.values.dim() < 1 or self.values.shape != self.indices.shape:
            indices, values = list(self.indices.shape), list(self.values.shape)
            return f"indices {indices} and values {values} must have one shape [..., k]"
        return None


@tree.node
@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrix `left @ right^T`. left: `[..., m, r]`; right: `[..., n, r]`."""

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """The dense matrix, `[..., m, n]`."""
        return self.left @ self.right.mT

    def fault(self) -> str | None:
        """What is wrong with the fields' dtypes and shapes, if anything."""
        floating = _floating(self.left) and _floating(self.right)
        if not floating or self.left.dtype != self.right.dtype:
            return "its factors must have one floating dtype"
        left, right = list(self.left.shape), list(self.right.shape)
        same = len(left) == len(right) and left[:-2] == right[:-2] and left[-1:] == right[-1:]
        if len(left) < 2 or not same:
            return f"its factors must be [..., m, r] and [..., n, r], not {left} and {right}"
        return None


@tree.node(static=("shape",))
@dataclass(frozen=True, eq=False)
class Signs:
    """`scale` times a tensor of +1 and -1: element `8 j + i` is +1 if bit `i` of byte `j` is set.

    bits: uint8 `[..., ceil(n / 8)]` with `n = prod(shape)`; scale: floating, `[...]`.
    """

    bits: Tensor
    scale: Tensor
    shape: tuple[int, ...]

    @classmethod
    def pack(cls, signs: Tensor, scale: Tensor | float) -> Signs:
        """From a tensor `[..., *shape]`, by `>= 0` alone, and a scale `[...]` (or a number)."""
        if not isinstance(scale, Tensor):
            dtype = signs.dtype if signs.is_floating_point() else torch.float32
            scale = torch.tensor(scale, dtype=dtype, device=signs.device)
        lead, shape = signs.shape[: scale.dim()], tuple(signs.shape[scale.dim() :])
        ones = (signs >= 0).to(torch.uint8).reshape(*lead, math.prod(shape))
        ones = torch.nn.functional.pad(ones, (0, -ones.shape[-1] % 8))
        place = 2 ** torch.arange(8, dtype=torch.uint8, device=signs.device)
        bits = (ones.reshape(*lead, ones.shape[-1] // 8, 8) * place).sum(-1, dtype=torch.uint8)
        return cls(bits, scale, shape)

    def dense(self) -> Tensor:
        """The dense tensor, `[..., *shape]`, in the dtype of `scale`."""
        lead, n = self.scale.shape, math.prod(self.shape)
        ones = torch.stack([(self.bits >> i) & 1 for i in range(8)], -1)
        ones = ones.reshape(*lead, 8 * self.bits.shape[-1])[..., :n]
        signs = (2 * ones.to(self.scale.dtype) - 1) * self.scale.unsqueeze(-1)
        return signs.reshape((*lead, *self.shape))

    def fault(self) -> str | None:
        """What is wrong with the fields' dtypes and shapes, if anything."""
        if not (_is(self.bits, torch.uint8) and _floating(self.scale)):
            return "its bits must be uint8 and its scale floating"
        count, given = math.prod(self.shape), list(self.bits.shape)
        want = [*self.scale.shape, -(-count // 8)]
        return None if given == want else f"{count} signs take bits of shape {want}, not {given}"


@tree.node(static=("dtype",))
@dataclass(frozen=True, eq=False)
class Quantised:
    """`scale * codes`, in the floating `dtype` (its name) that the tensor had before.

    codes: int8, float16 or bfloat16 `[..., *shape]`; scale: floating, `[...]`.
    """

    codes: Tensor
    scale: Tensor
    dtype: str

    def dense(self) -> Tensor:
        """The dense tensor, `[..., *shape]`, in the original dtype."""
        dtype = getattr(torch, self.dtype)
        ones = [1] * (self.codes.dim() - self.scale.dim())
        return self.codes.to(dtype) * self.scale.to(dtype).reshape((*self.scale.shape, *ones))

    def fault(self) -> str | None:
        """What is wrong with the fields' dtypes and shapes, if anything."""
        kinds = (torch.int8, torch.float16, torch.bfloat16)
        if not _is(self.codes, *kinds) or not _floating(self.scale):
            return "its codes must be int8, float16 or bfloat16 and its scale floating"
        if self.dtype not in ("float16", "bfloat16", "float32", "float64"):
            return f"its dtype must name a floating dtype, not {self.dtype!r}"
        if self.codes.shape[: self.scale.dim()] != self.scale.shape:
            scale, codes = list(self.scale.shape), list(self.codes.shape)
            return f"scale {scale} must be the leading dimensions of codes {codes}"
        return None


@tree.node(static=("features",))
@dataclass(frozen=True, eq=False)
class Trees:
    """Decision trees as nodes: `x[feature[i]] <= threshold[i]`, yes: `left[i]`, no: `right[i]`.

    feature: signed integers `[..., nodes]`, -1 at a leaf; threshold: float32 `[..., nodes]`; left,
    right: signed integers `[..., nodes]`, above the node's own index (at a leaf they are not looked
    at: any of -1 .. nodes - 1); value: float32 `[..., leaves, outputs]`, what the leaves say, in
    the order of their nodes; roots: signed integers `[..., trees]`; features: how many features a
    row has.
    """

    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    value: Tensor
    roots: Tensor
    features: int

    def __getstate__(self) -> dict[str, Any]:
        """Without what is derived from the nodes: a copy is checked and packed anew."""
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def fault(self) -> str | None:
        """What is wrong with the fields' dtypes and shapes, if anything."""
        for name in ("feature", "left", "right", "roots"):
            if not _is(getattr(self, name), torch.int8, torch.int16, torch.int32, torch.int64):
                return f"{name} must be signed integers"
        if not (_is(self.threshold, torch.float32) and _is(self.value, torch.float32)):
            return "threshold and value must be float32"
        shape = list(self.feature.shape)
        nodes = [list(t.shape) for t in (self.threshold, self.left, self.right)]
        if not shape or any(other != shape for other in nodes):
            return "feature, threshold, left and right must have one shape [..., nodes]"
        value, roots = list(self.value.shape), list(self.roots.shape)
        if len(value) != len(shape) + 1 or value[:-2] != shape[:-1]:
            return f"value must be [..., leaves, outputs] for nodes {shape}, not {value}"
        if len(roots) != len(shape) or roots[:-1] != shape[:-1]:
            return f"roots must be [..., trees] for nodes {shape}, not {roots}"
        return None


STRUCTURED = (Sparse, LowRank, Signs, Quantised, Trees)


def _map(f, message: Tree) -> Tree:
    """Apply `f(number, leaf)` to the leaves, a structured array being one leaf."""
    leaves, structure = tree.flatten(message, is_leaf=lambda t: isinstance(t, STRUCTURED))
    return tree.unflatten([f(i, leaf) for i, leaf in enumerate(leaves)], structure)


def _exponent(x: Tensor) -> Tensor:
    """`floor(log2 |x|)` of float64, from its bits; -1023 for zero and subnormal numbers."""
    return ((x.view(torch.int64) >> 52) & 0x7FF) - 1023


def _power(exponent: Tensor) -> Tensor:
    """`2^exponent` in float64, exactly, for exponents in -1022 .. 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _quantise(x: Tensor, kind: str, key: Tensor) -> Quantised:
    exact, limits = x.double(), torch.finfo(x.dtype)
    largest = exact.abs().amax() if x.numel() else exact.sum()
    if kind == "int8":
        scale = (largest / 127).to(x.dtype).clamp(min=limits.tiny)
        # The rounded quotient may be a hair too small, and a code of 128 would not fit.
        above = torch.nextafter(scale, torch.full_like(scale, math.inf))
        scale = torch.where(largest / scale.double() > 127, above, scale).double()
        unit = torch.ones_like(scale)
    else:
        mantissa, lowest = (10, -14) if kind == "float16" else (7, -126)
        # powers of two cost no precision: the largest code is in 2^14 .. 2^15, as float16 allows
        least = -126 if x.dtype == torch.float32 else -1022
        scale = _power((_exponent(largest) - 14).clamp(min=least))
        unit = _power(_exponent(exact / scale).clamp(min=lowest) - mantissa)
    size = (exact / scale).abs() / unit
    below = size.floor()
    up = random.words(key, x.numel()).reshape(x.shape) < (size - below) * 2.0**32
    # next to the largest float there is nothing to round up to
    up = up & ((below + 1) * unit * scale <= limits.max)
    codes = torch.copysign((below + up) * unit, exact)
    scale = torch.where(torch.isfinite(largest), scale, torch.nan)
    return Quantised(codes.to(getattr(torch, kind)), scale.to(x.dtype), _name(x.dtype))


def quantise(message: Tree, kind: str, key: Tensor) -> Tree:
    """Round dense float32 and float64 tensors to "int8", "float16" or "bfloat16", without bias.

    Each number goes to one of the two representable ones next to it, `lo <= x <= hi`: to `hi` with
    probability `(x - lo) / (hi - lo)` (in steps of 2^-32), so that the expectation is `x`. int8
    codes are multiples of `max |x| / 127` over the tensor; the floating kinds have a power of two
    as scale, so that nothing overflows. Leaf number `i` draws from `fold(key, i)`. Integers, other
    dtypes and structured arrays (also the values of `Sparse`, the factors of `LowRank`) stay as
    they are. A tensor with a NaN or an infinity does not come back finite. Works under `vmap`.
    """
    if kind not in ("int8", "float16", "bfloat16"):
        raise ConfigError(unknown("the quantization kind", kind, ("int8", "float16", "bfloat16")))

    def one(i: int, leaf: Tree) -> Tree:
        if not _is(leaf, torch.float32, torch.float64):
            return leaf
        return _quantise(leaf, kind, random.fold(key, i))

    return _map(one, message)


def dequantise(message: Tree) -> Tree:
    """Turn every `Quantised` into a dense tensor of its original dtype."""
    return _map(lambda _, leaf: leaf.dense() if isinstance(leaf, Quantised) else leaf, message)


def densify(message: Tree) -> Tree:
    """Turn every structured array but `Trees` into a dense tensor.

    A few bytes can describe a huge tensor: check untrusted messages with `validate_like` first.
    """
    kinds = Sparse | LowRank | Signs | Quantised
    return _map(lambda _, leaf: leaf.dense() if isinstance(leaf, kinds) else leaf, message)
