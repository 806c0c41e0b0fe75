"""What this machine can do at most, measured now: multiplications a second and bytes a second."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.timing import seconds


def best(f: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of several calls, after one that is not counted: what the machine can do when
    nothing disturbs it.
    """
    f()
    return min(seconds(f) for _ in range(repeats))


@cache
def peak_flops(dtype: torch.dtype = torch.float32, side: int = 2048) -> float:
    """Floating point operations a second of a product of large matrices, on all threads."""
    a, b, out = (torch.rand(side, side, dtype=dtype) for _ in range(3))
    return 2 * side**3 / best(lambda: torch.mm(a, b, out=out))


@cache
def peak_bytes(megabytes: int = 256) -> float:
    """Bytes read and written a second by a copy that no cache holds, on all threads."""
    a = torch.rand(megabytes << 18)
    out = torch.empty_like(a)
    return 2 * a.numel() * a.element_size() / best(lambda: out.copy_(a))


def flops(f: Callable[[], object]) -> int:
    """Multiplications and additions in products and convolutions of a call, as PyTorch counts
    them.
    """
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


def row_flops(module: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """Those of the loss and its gradient, for one row."""
    return flops(lambda: torch.nn.functional.cross_entropy(module(x), y).backward()) / len(x)


def machine(repeats: int) -> None:
    """The peaks that fractions on this page are of."""
    print("| what | at most |\n|---|---|")
    for dtype in (torch.float32, torch.float64):
        print(
            f"| product of {str(dtype)[6:]} matrices, 2048 x 2048 | {peak_flops(dtype) / 1e9:.0f} "
            "GFLOP/s |"
        )
    print(f"| copy of 256 MB, read and written | {peak_bytes() / 1e9:.1f} GB/s |")
    x = torch.rand(64, 100)
    calls = 2000
    taken = statistics.median(
        seconds(lambda: [torch.add(x, x) for _ in range(calls)]) / calls for _ in range(repeats)
    )
    print(f"| one operation of PyTorch on 6,400 numbers | {1e6 * taken:.1f} us |", flush=True)
