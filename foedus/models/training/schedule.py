"""The assignment of rows to mini-batches and epochs."""

from __future__ import annotations

import torch
from torch import Tensor

from foedus.base import random
from foedus.models.training.settings import Training


def batch_schedule(
    how: Training, index: Tensor, weight: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of each client and optimizer step: (numbers (T, c, b), weights (T, c, b), steps (c,)).

    Every epoch is a fresh permutation of the client's rows, cut into batches; the last one may be
    smaller. Rows that fit into one batch stay in order. A client's schedule depends only on its own
    rows and key, not on the other clients in its batch.
    """
    clients, n = index.shape
    b = min(how.step_rows or n, n)
    rows = (weight > 0).sum(1)
    per_epoch = torch.div(rows + b - 1, b, rounding_mode="floor").clamp_(min=1)
    steps = torch.full_like(per_epoch, how.steps) if how.steps else per_epoch * how.epochs
    batches = int(per_epoch.max())
    epochs = int(torch.div(steps + per_epoch - 1, per_epoch, rounding_mode="floor").max())
    full = int(rows.min()) == n and bool((weight == 1).all())
    # (augmented, a row's place in its batch must not depend on who else is there)
    if batches == 1 and not how.augment:
        table, table_weight = index.view(1, clients, 1, n), weight.view(1, clients, 1, n)
    else:
        keys = key.unsqueeze(0)
        if epochs > 1:
            keys = torch.cat((keys, random.fold(key, torch.arange(1, epochs).unsqueeze(1))))
        order = random.permutation(keys, n, valid=None if full else weight > 0)
        if not how.augment and bool((per_epoch == 1).any()):
            # one batch of all rows: they stay in order, as without other clients
            order = torch.where((per_epoch == 1).unsqueeze(1), torch.arange(n), order)
        order = torch.nn.functional.pad(order, (0, batches * b - n))
        table = index.expand(epochs, -1, -1).gather(-1, order).view(epochs, clients, batches, b)
        # whole epochs, the same for all clients: no lookup needed
        if full and len(table) * batches == int(steps[0]):
            real = (torch.arange(batches * b) < n).to(weight.dtype).view(batches, 1, b)
            share = (real / real.sum(-1, keepdim=True)).expand(-1, clients, -1)
            used = table.transpose(1, 2).reshape(epochs * batches, clients, b)
            return used, share.repeat(epochs, 1, 1), steps
        table_weight = weight.expand(epochs, -1, -1).gather(-1, order)
        table_weight[..., n:] = 0
        table_weight = table_weight.reshape(epochs, clients, batches, b)
    t = torch.arange(int(steps.max())).unsqueeze(1)
    epoch = torch.div(t, per_epoch, rounding_mode="floor") if batches > 1 else torch.zeros_like(t)
    at = (epoch.clamp_(max=len(table) - 1), torch.arange(clients).unsqueeze(0), t % per_epoch)
    used, used_weight = table[at], table_weight[at]
    return used, used_weight / used_weight.sum(-1, keepdim=True).clamp(min=1e-30), steps
