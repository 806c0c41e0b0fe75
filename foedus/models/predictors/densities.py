"""Predictors that give the same probabilities to every row: densities."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foedus.base.batching import batched
from foedus.base.rows import Rows, take
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.errors import DataError, ModelError
from foedus.models.predictors.base import Predictors, label_count, number_array, probabilities
from foedus.wire.arrays import Sparse

_SWELL = 8
"""How many times its size an archive of skops may unpack to."""


class Densities(Predictors):
    """Given predictors: distributions over a finite domain; row k of `table` is h_k.

    Features are not used. With a background, h_k is sent as the non-zero entries of h_k - rest_k
    background: a smoothed unigram model costs as many bytes as the words that it has seen. Point
    masses and other sparse rows are short without a background.

    Args:
        table: The densities, (q, |Y|).
        background: A distribution that all clients know.
        rest: The share of the background in each h_k, from smoothing: a number, or one for each.

    Raises:
        ModelError: A row is not a distribution, or shapes do not match.

    Example:
        >>> fed = fd.split(fd.load("digits"), "labels", clients=5, per_client=2)
        >>> table = np.eye(10) * 0.9 + 0.01
        >>> densities = fd.Densities(table / table.sum(1)[:, None])
        >>> run = fd.run(fd.FedBoost(densities, budget=3), fed, rounds=2)
        >>> run.model.predict_proba(fed.data.x_test).shape
        (451, 10)
    """

    spread = math.inf

    def __init__(self, table: Any, background: Any = None, rest: Any = 0.0) -> None:
        table = number_array("table", table)
        if table.dim() != 2 or not len(table) or not table.shape[1]:
            raise ModelError(
                "a table of densities has a row for each predictor and a column for each element, "
                f"not {tuple(table.shape)}"
            )
        probabilities(table, "predictor")
        self.table, rest = table, number_array("rest", rest)
        if rest.shape not in ((), (len(table),)) or not bool(((rest >= 0) & (rest <= 1)).all()):
            raise ModelError(
                f"rest must be a share from 0 to 1, or one for each of the {len(table)} predictors"
            )
        self.rest = rest.expand(len(table)).clone()
        self.background = None if background is None else number_array("background", background)
        if self.background is not None:
            if self.background.shape != table.shape[1:]:
                given = f"background has shape {tuple(self.background.shape)}"
                raise ModelError(f"{given}, the table {table.shape[1]} columns")
            probabilities(self.background.unsqueeze(0), "background")
        elif bool(self.rest.any()):
            raise ModelError("rest is the share of a background: give that too")
        pieces = torch.arange(len(table)).split(max(1, _PIECE // table.shape[1]))
        self.counts = torch.cat([self.own(piece).count_nonzero(1) for piece in pieces])

    def own(self, which: Tensor) -> Tensor:
        """Some densities without their shares of the background.

        Args:
            which: The indices of the members.
        """
        table = self.table.index_select(0, which)
        if self.background is None:
            return table
        own = table - self.rest[which].unsqueeze(1) * self.background
        return torch.where(own.abs() <= 1e-6 * table, 0, own)  # what only rounding has left

    @classmethod
    def of_clients(cls, fed: Any, rest: float = 0.1) -> Densities:
        """One density per client: the smoothed frequencies of its training labels.

        They are mixed with the uniform distribution.

        With a federation of words (`word_federation`), these are smoothed unigram language models.

        Args:
            fed: The federation.
            rest: The share of the uniform distribution, from 0 to 1.

        Example:
            >>> fed = fd.split(fd.load("digits"), "labels", clients=5, per_client=2)
            >>> len(fd.Densities.of_clients(fed))
            5
        """
        classes = label_count(fed)
        if not 0 <= rest <= 1:
            raise ModelError(f"rest={rest!r} must be a share from 0 to 1")
        table = fed.label_counts() / fed.sizes[:, None]
        even = np.full(classes, 1 / classes)
        return cls((1 - rest) * table + rest * even, even if rest else None, rest)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def takes_batches(self) -> bool:
        return self.at_hand

    def check(self, spec: Spec, loss: str) -> None:
        if spec.classes != (size := self.table.shape[1]):
            data = f"the data has {spec.classes} labels"
            raise DataError(f"the densities are over {size} elements, {data}")

    def prepare(self, data: Rows, loss: str) -> dict[str, Tensor]:
        """The client's own distribution: the elements that occur in it, and the share of each.

        Args:
            data: The client's rows.
            loss: The loss, "log" or "squared".
        """
        args = {"index": data.index, "weight": data.weight}
        return _distinct(args, (data.table_y, self.table.shape[1]))

    def message(self, which: Tensor) -> Tree:
        size, counts = self.table.shape[1], self.counts[which]
        if int(counts.sum()) * 2 >= len(which) * size:
            return {"dense": self.table[which].mT.contiguous()}
        members = self.own(which)
        member, column = members.nonzero().unbind(1)
        kind = torch.int32 if size * len(which) < 2**31 else torch.int64
        place = (column * len(which) + member).to(kind)
        own = {"own": Sparse(place, members[member, column], (size, len(which)))}
        return own if self.background is None else {**own, "rest": self.rest[which]}

    def rows_of(self, models: Tree) -> Tensor:
        """The densities (|Y|, C) that a message holds.

        Args:
            models: The message.
        """
        if "dense" in models:
            return models["dense"]
        own = models["own"].dense()
        return own if self.background is None else own.addr_(self.background, models["rest"])

    @cached_property
    def upright(self) -> Tensor:
        """The table with one row per element, for products with few densities."""
        return self.table.mT.contiguous()

    def loss(self, prepared, data, which, models, weight, loss, floor, excess, slope=True):
        if models is not None and not self.at_hand:
            columns, some = self.rows_of(models), slice(None)
        elif 3 * len(which) < len(self):
            # rows are copied whole, so that the time does not grow with q
            columns, some = self.table.index_select(0, which).mT.contiguous(), slice(None)
        else:  # To leave out few columns takes longer than to use them all.
            columns, some = self.upright, which
            weight = torch.zeros(len(self)).index_put((which,), weight)
            excess = None if excess is None else torch.zeros(len(self)).index_put((which,), excess)
        shared = (columns, weight, loss, floor, excess, slope)
        # of a batch of clients, without the detour by which a step leaves `vmap`
        of_elements = _of_elements.__wrapped__ if prepared["share"].dim() == 2 else _of_elements
        found = of_elements(prepared, shared)
        return found["loss"], found["slope"][..., some] if slope else None

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        return (weight.float() @ self.table).expand(len(x), -1)

    def state_dict(self) -> dict[str, Tensor]:
        return {"table": self.table}


_PIECE = 1 << 22  # entries of the table that are looked at at a time


@batched
def _distinct(args: dict[str, Tensor], shared: tuple) -> dict[str, Tensor]:
    table_y, size = shared
    index, weight = args["index"], args["weight"]
    clients = len(index)
    keys = take(table_y, index) + size * torch.arange(clients).unsqueeze(1)
    found, inverse = keys.flatten().unique(return_inverse=True)
    counts = torch.zeros(len(found)).index_add_(0, inverse.flatten(), weight.flatten().float())
    owner = found // size
    first = torch.searchsorted(owner, torch.arange(clients))
    place = torch.arange(len(found)) - first[owner]
    element = torch.zeros(clients, int(place.max()) + 1, dtype=torch.int64)
    share = torch.zeros(element.shape)
    element[owner, place], share[owner, place] = found % size, counts
    return {"element": element, "share": share / weight.sum(1, keepdim=True)}


@batched
def _of_elements(args: dict[str, Tensor], shared: tuple) -> dict[str, Tensor]:
    """Loss and gradient from the clients' elements: one sparse product (an embedding bag)."""
    columns, weight, loss, floor, excess, slope = shared
    mixed = columns @ weight
    # clients have different numbers of elements: what follows is one long list of all of them
    real = args["share"] > 0
    if bool(real.all()):
        element, share = args["element"].flatten(), args["share"].flatten()
        lengths = torch.full((len(real),), real.shape[1])
    else:
        element, share, lengths = args["element"][real], args["share"][real], real.sum(1)
    at = mixed[element]
    if loss == "log":
        at += floor
        each, pull = -share * at.log(), -share / at
    else:
        each, pull = -2 * share * at, -2 * share
    owner = torch.repeat_interleave(torch.arange(len(real)), lengths)
    found = {"loss": torch.zeros(len(real)).index_add_(0, owner, each)}
    squares = None if excess is None else columns.square().sum(0)
    if loss == "squared":
        found["loss"] += mixed @ mixed + 1 - (0 if excess is None else (weight * excess) @ squares)
    if not slope:
        return found
    starts = lengths.cumsum(0) - lengths
    found["slope"] = F.embedding_bag(element, columns, starts, per_sample_weights=pull, mode="sum")
    if loss == "squared":
        found["slope"] += 2 * (mixed @ columns)
        if excess is not None:
            found["slope"] -= 2 * excess * squares
    return found
