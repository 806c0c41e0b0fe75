"""The rows a client holds, as a client step sees them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foedus.base.spec import Spec


@dataclass(frozen=True, eq=False)
class Rows:
    """A client's rows, padded to the largest client of its batch; padding has weight 0.

    Its objective is sum_j share_j loss_j, where share_j is 1/n for each of its n rows; or w_j / n,
    if rows have weights w_j, whose mean over the rows of all clients is 1 (`table_w`; `None`: equal
    weights).

    The rows of all clients are in one table; `index` has those of this client. Reading `x` and `y`
    copies them (or returns a view, if the engine keeps the batch stacked); a mini-batch loop reads
    the rows it needs by `index`, once. `spec` is the form of the data (classes, outputs), which
    `Algorithm.prepare` needs as well. The table may be on another device than `index` and `weight`:
    rows are copied to the device of the index, and training runs on that of the table.
    """

    table_x: Tensor
    table_y: Tensor
    index: Tensor
    weight: Tensor
    spec: Spec
    stacked: tuple[Tensor, Tensor] | None = None
    table_w: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """Features, (n, *shape)."""
        return self._column(0)

    @property
    def y(self) -> Tensor:
        """Labels (n,) as int64, or targets as floats."""
        return self._column(1)

    def _column(self, i: int) -> Tensor:
        if self.stacked:
            return self.stacked[i].to(self.index.device)
        return take((self.table_x, self.table_y)[i], self.index)

    @property
    def there(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and weights on the table's device."""
        index = self.index.to(device := self.table_x.device)
        x, y = self.stacked or (take(t, index) for t in (self.table_x, self.table_y))
        return x, y, self.weight.to(device)

    @property
    def worth(self) -> Tensor | None:
        """The weights of the rows; `None` if they are equal."""
        return None if self.table_w is None else take(self.table_w, self.index)

    @property
    def counted(self) -> dict[str, Tensor]:
        """Index and weights, for functions of a whole batch of clients; with "worth" if rows have
        weights.
        """
        args = {"index": self.index, "weight": self.weight}
        return args if self.table_w is None else {**args, "worth": take(self.table_w, self.index)}

    @property
    def count(self) -> Tensor:
        """How many rows are real."""
        return self.weight.sum(-1)


def shares(args: dict[str, Tensor]) -> Tensor:
    """The share of each row in its client's objective, from `Rows.counted` (n last)."""
    share = args["weight"] / args["weight"].sum(-1, keepdim=True)
    return share * args["worth"] if "worth" in args else share


def tensor_of(array: np.ndarray, integers: bool | None = None) -> Tensor:
    """An array as a read-only tensor: without a copy, unless its type differs.

    integers: whether it must hold int64 or float32 numbers; `None`: as it is.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    if integers is None:
        return tensor
    return tensor.long() if integers else tensor.float()


def take(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table at an index of any shape, copied once, to the index's device."""
    rows = torch.index_select(table, 0, index.reshape(-1).to(table.device))
    return rows.reshape(*index.shape, *table.shape[1:]).to(index.device)
