"""Random crops and flips of images."""

from __future__ import annotations

import torch
from torch import Tensor

from foedus.base import random


def crop_flip(x: Tensor, key: Tensor, pad: int = 4) -> Tensor:
    """Crop images (..., b, channels, height, width) after padding, and flip some; keys (..., 2)."""
    b, channels, height, width = x.shape[-4:]
    draws = random.uniform(key, (b, 3)).reshape(-1, 3).to(x.device)
    top, left = (draws[:, :2] * (2 * pad + 1)).long().unbind(1)
    flip = draws[:, 2:] < 0.5
    images = torch.nn.functional.pad(x.reshape(-1, channels, height, width), (pad,) * 4)
    across, n, c = (torch.arange(size, device=x.device) for size in (width, len(images), channels))
    rows = top.unsqueeze(1) + torch.arange(height, device=x.device)
    columns = left.unsqueeze(1) + torch.where(flip, across.flip(0), across)
    n, c = n.view(-1, 1, 1, 1), c.view(1, -1, 1, 1)
    return images[n, c, rows.view(-1, 1, height, 1), columns.view(-1, 1, 1, width)].reshape(x.shape)
