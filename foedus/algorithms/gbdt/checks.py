"""Which replies of untrusted clients cannot be sums over their rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from foedus.base.tree import Tree
from foedus.core.clients import Clients
from foedus.core.exchange import Accept
from foedus.errors import ReplyError

_ROUNDING = 1e-4
"""Of sums in float32, as a part of the sum of magnitudes."""


def each(clients: Clients, check: Callable[[Tree, float], None], scale: float) -> Accept:
    """A check of each reply, given the client's number of rows times `scale`.

    Replies that were rounded when sent are checked by shape alone: `check` is then told that any
    number of rows may be.
    """
    rows = dict(zip(clients.ids.tolist(), clients.sizes.tolist(), strict=True))

    def accept(ids: Tensor, replies: Tree) -> dict[int, str]:
        bad = {}
        for i, client in enumerate(ids.tolist()):
            most = float("inf") if clients.rounded else scale * rows[client]
            try:
                check({name: t[i] for name, t in replies.items()}, most)
            except ReplyError as error:
                bad[i] = str(error)
        return bad

    return accept


def check_counts(reply: Tree, most: float, shape: torch.Size) -> None:
    """Numbers of rows between thresholds, by feature."""
    rows = _array(reply, "rows", tuple(shape))
    if most < np.inf:
        _require(bool((rows >= 0).all()), "its numbers of rows are negative")
        fits = bool((rows.sum(1) <= most * (1 + _ROUNDING)).all())
        _require(fits, "it counts more rows than it has")


def check_totals(reply: Tree, most: float, outputs: int, classes: bool) -> None:
    """Sums of targets or labels, and of weights."""
    sums, weight = _array(reply, "sums", (outputs,)), _array(reply, "weight", ())
    if most < np.inf:
        _require(bool(weight >= 0), "its weights are negative")
        if classes:
            fits = bool((sums >= 0).all()) and abs(sums.sum() - weight) <= _ROUNDING * weight
            _require(fits, "its labels are not as many as its weights say")


def check_histograms(
    reply: Tree, most: float, nodes: int, offsets: np.ndarray, channels: int
) -> None:
    """Sums by node, feature and bin of slopes, second derivatives (all losses are convex), rows."""
    sums = _array(reply, "sums", (nodes, int(offsets[-1]), channels))
    if most == np.inf:
        return
    _require(bool((sums[..., 1:] >= 0).all()), "its second derivatives or counts are negative")
    totals = np.add.reduceat(sums, offsets[:-1], 1)
    size = np.add.reduceat(np.abs(sums), offsets[:-1], 1)
    fits = bool((totals[..., -1] <= most * (1 + _ROUNDING)).all())
    _require(fits, "it counts more rows than it has")
    apart = np.abs(totals - totals[:, :1])
    same = bool((apart <= _ROUNDING * np.maximum(size, size[:, :1])).all())
    _require(same, "its histograms of different features have different totals")


def _array(reply: Tree, name: str, shape: tuple[int, ...]) -> np.ndarray:
    found = reply[name].double().numpy()
    _require(found.shape == shape, f"{name} has the shape {found.shape}, not {shape}")
    _require(bool(np.isfinite(found).all()), f"{name} is not finite")
    return found


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise ReplyError(why)
