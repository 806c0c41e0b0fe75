"""A device that is not there, for tests of what lies where: it computes with the CPU's numbers, and
refuses, like a GPU, tensors of two devices in one operation.

Within `other_device()`, PyTorch's device "meta" is such a device: what is made or copied there has
numbers, and comes back by `.to("cpu")` alone. A run on it can therefore be compared with one on the
CPU. Like mps it has no float64. It shows that tensors are moved, and moved back; not that a GPU's
kernels exist for every operation, nor what they round, nor what they cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


_PRODUCTS = tuple(
    getattr(torch.ops.aten, name)
    for name in ("mm", "bmm", "addmm", "baddbmm", "baddbmm_", "addbmm", "mv", "convolution")
)


class There(torch.Tensor):
    """A tensor on the other device; `numbers` are its own, on the CPU."""

    numbers: torch.Tensor
    __slots__ = ("numbers",)

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> There:
        if numbers.dtype == torch.float64:
            raise TypeError("the device has no float64")
        made = torch.Tensor._make_wrapper_subclass(
            cls, numbers.size(), numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype,
            layout=numbers.layout, requires_grad=numbers.requires_grad, device="meta",
        )  # fmt: skip
        made.numbers = numbers
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def requires_grad_(self, requires_grad=True):
        # asked for by nn.Parameter of a subclass alone, and refused within torch.func
        return (
            self if self.requires_grad == requires_grad else super().requires_grad_(requires_grad)
        )

    def tolist(self):
        return self.numbers.tolist()

    def numpy(self, **_):
        raise TypeError("can't convert meta device type tensor to numpy; use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


class _Device(TorchDispatchMode):
    """Knows what the device has computed: `products` counts matrix products and convolutions."""

    def __init__(self, rounding: float) -> None:
        super().__init__()
        self.products, self.rounding = 0, rounding
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = _compute(func, args, kwargs or {})
        if isinstance(made, There) and func.overloadpacket in _PRODUCTS:
            self.products += 1
            if self.rounding:
                noise = torch.randn(made.shape, generator=self.generator)
                made.numbers.mul_(1 + self.rounding * noise)
        return made


class _Tensor(TorchFunctionMode):
    """`torch.tensor(..., device="meta")`, whose numbers PyTorch would not keep."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and torch.device(device).type == "meta":
            kwargs["device"] = "cpu"
            return func(*args, **kwargs).to("meta")
        return func(*args, **kwargs)


def _compute(func, args, kwargs):
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    there = any(isinstance(t, There) for t in tensors)
    if there and func not in _COPIES:
        for t in tensors:
            if not isinstance(t, There) and t.dim() > 0:
                raise RuntimeError(
                    f"{func}: expected all tensors to be on the same device, but found meta and "
                    f"cpu (of shape {tuple(t.shape)})"
                )
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked).type
    inner = tree_map(lambda t: t.numbers if isinstance(t, There) else t, (args, kwargs))
    if asked == "meta":
        inner[1]["device"] = "cpu"
    if not there and asked != "meta":
        return func(*inner[0], **inner[1])
    found = func(*inner[0], **inner[1])
    if func is torch.ops.aten.copy_.default:
        return args[0]
    if asked == "cpu":
        return found.clone() if there else found
    found = tree_map(lambda t: There(t) if isinstance(t, torch.Tensor) else t, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if there else found


@contextmanager
def other_device(rounding: float = 0.0) -> Iterator[_Device]:
    """Within it, "meta" is a device that computes, in this thread; matrix products are off by
    `rounding`, relatively, as another order of their sums would make them.
    """
    with _Device(rounding) as mode, _Tensor():
        yield mode
