"""Convolutional networks of the papers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt, MinLen
from torch import Tensor
from torch.nn import functional as F

from foedus.base.settings import Means
from foedus.base.spec import Spec
from foedus.errors import ModelError
from foedus.models.base import Model, Params, Widths, image_shape, uniform_init, widths_of


@dataclass(frozen=True)
class CNN(Model):
    """Convolutional network: convolutions, ReLU and 2x2 max pooling, then fully connected layers.

    The networks of the papers are class methods:

    - `CNN.cifar()`: two 5x5 convolutions of 64 filters, fully connected 384 and 192 (FFGB, whose
      text has 394; Acar et al. and the authors' code have 384), leaky ReLU;
    - `CNN.emnist()`: the same convolutions, fully connected 120 and 84 (FFGB), leaky ReLU;
    - `CNN.mnist()`: 32 and 64 filters of 5x5, fully connected 512 (McMahan et al. 2017).

    Args:
        channels: The number of filters of each convolution.
        kernel: The side of the square filters; odd with padding="same".
        hidden: The widths of the fully connected hidden layers.
        padding: "valid" shrinks the image at each convolution, "same" keeps its size.
        leak: The slope of ReLU below zero.

    Raises:
        ModelError: A setting is out of range; or, for given data, rows are not images or too small.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> net = fd.CNN(channels=(8,), kernel=3, hidden=(16,))
        >>> fd.run(fd.FedAvg(net, lr=0.05), fed, rounds=1).model.predict(fed.data.x_test).shape
        (451,)
    """

    channels: Annotated[
        Widths, MinLen(1), Means("one or more positive layer widths, such as (32, 64)")
    ] = (32, 64)
    kernel: Annotated[int, Ge(1), Means("a positive integer, and odd with padding='same'")] = 5
    hidden: Annotated[Widths, Means("positive layer widths, such as (512,)")] = (512,)
    padding: Literal["valid", "same"] = "valid"
    leak: Annotated[float, Ge(0), Lt(1)] = 0.0

    # a batch of clients would hold all activations, and gain little: see `foedus.models.module`
    batchable = False

    def __post_init__(self) -> None:
        for name in ("channels", "hidden"):
            object.__setattr__(self, name, widths_of(getattr(self, name)))
        super().__post_init__()
        if self.padding == "same" and self.kernel % 2 == 0:
            raise ModelError(f"kernel={self.kernel!r} must be odd with padding='same'")

    @classmethod
    def cifar(cls) -> CNN:
        """The CIFAR network of the FFGB paper.

        Example:
            >>> fd.CNN.cifar().hidden
            (384, 192)
        """
        return cls(channels=(64, 64), hidden=(384, 192), leak=0.01)

    @classmethod
    def emnist(cls) -> CNN:
        """The EMNIST network of the FFGB paper.

        Example:
            >>> fd.CNN.emnist().hidden
            (120, 84)
        """
        return cls(channels=(64, 64), hidden=(120, 84), leak=0.01)

    @classmethod
    def mnist(cls) -> CNN:
        """The MNIST network of McMahan et al. (2017).

        Example:
            >>> fd.CNN.mnist().channels
            (32, 64)
        """
        return cls(channels=(32, 64), hidden=(512,), padding="same")

    def _sizes(self, spec: Spec) -> tuple[int, int, int, int]:
        c, h, w = image_shape(spec)
        for _ in self.channels:
            if self.padding == "valid":
                h, w = h - self.kernel + 1, w - self.kernel + 1
            h, w = h // 2, w // 2
        if h < 1 or w < 1:
            layers = f"{len(self.channels)} convolutions of {self.kernel}x{self.kernel}"
            raise ModelError(
                f"images of {image_shape(spec)} are too small for {layers} with pooling; use "
                "padding='same', a smaller kernel or MLP()"
            )
        return c, h, w, self.channels[-1] * h * w

    def check(self, spec: Spec) -> None:
        self._sizes(spec)

    def init(self, spec: Spec, key: Tensor) -> Params:
        c, _, _, flat = self._sizes(spec)
        params, number = {}, 0
        for i, (a, b) in enumerate(zip((c, *self.channels), self.channels, strict=False)):
            fan_in = a * self.kernel**2
            params[f"conv{i}"] = uniform_init(key, number, (b, a, self.kernel, self.kernel), fan_in)
            params[f"conv_bias{i}"] = uniform_init(key, number + 1, (b,), fan_in)
            number += 2
        sizes = (flat, *self.hidden, spec.outputs)
        for i, (a, b) in enumerate(itertools.pairwise(sizes)):
            params[f"weight{i}"] = uniform_init(key, number, (b, a), a)
            params[f"bias{i}"] = uniform_init(key, number + 1, (b,), a)
            number += 2
        return params

    def apply(self, params: Params, x: Tensor) -> Tensor:
        if x.dim() != 4:
            channels = params["conv0"].shape[1]
            side = math.isqrt(x[0].numel() // channels)
            x = x.reshape(len(x), channels, *(x.shape[1:] if x.dim() == 3 else (side, side)))
        pad = self.kernel // 2 if self.padding == "same" else 0
        x = x.to(params["conv0"].dtype)
        bend = (lambda z: F.leaky_relu(z, self.leak)) if self.leak else torch.relu
        # Without colors it suffices that the image is laid out so.
        lay = _channels_last if x.shape[1] > 1 else lambda kernel: kernel
        x = _channels_last(x)
        for i in range(len(self.channels)):
            # Pool first: ReLU is monotone, so it can be applied to a quarter of the numbers.
            x = F.conv2d(x, lay(params[f"conv{i}"]), params[f"conv_bias{i}"], padding=pad)
            x = bend(F.max_pool2d(x, 2))
        x = x.flatten(1)
        for i in range(len(self.hidden)):
            x = bend(F.linear(x, params[f"weight{i}"], params[f"bias{i}"]))
        last = len(self.hidden)
        return F.linear(x, params[f"weight{last}"], params[f"bias{last}"])


def _channels_last(t: Tensor) -> Tensor:
    """The same numbers with the channels of a pixel adjacent in memory: fastest for convolutions on
    CPUs.

    A third less time for images with colors, a sixth for those without. With operations that vmap
    supports, unlike PyTorch's memory formats.
    """
    n, channels, height, width = t.shape
    if channels == 1:  # nothing to move, but PyTorch must see it
        return t.reshape(n, height, width, 1).permute(0, 3, 1, 2)
    return t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
