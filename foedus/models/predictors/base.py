"""Given predictors, which FedBoost learns to mix: q maps from rows to probabilities.

A collection has three functions for its members: what a client derives from them on its own rows
(`prepare`, once), the loss of a mixture of some of them with its gradient in the weights (`loss`),
and the message by which a client obtains them (`message`). Nothing is ever pickled: densities and
networks are sent as arrays, scikit-learn estimators as skops archives, which are loaded only if
skops trusts every type in them.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from foedus.base.rows import Rows
from foedus.base.settings import Settings
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.errors import DataError, ModelError

LOSSES = ("log", "squared")


class Predictors(Settings):
    """Base of the collections; `len` is the number of members q.

    A simulation holds one copy of the members for all clients (`at_hand`), so steps need not unpack
    messages. `remote()` is the same collection as a site sees it, which has nothing but the
    messages; the numbers are the same.
    """

    at_hand: bool = True

    spread: float = 1.5
    """As `Algorithm.spread`: how unequal the clients of a padded batch may be."""

    @property
    def takes_batches(self) -> bool:
        """Whether `loss` also takes what many clients have prepared, with a leading dimension."""
        return False

    def remote(self) -> Self:
        """The collection as seen by a site, which has only messages."""
        other = copy.copy(self)
        other.at_hand = False
        return other

    def __len__(self) -> int:
        raise NotImplementedError

    def check(self, spec: Spec, loss: str) -> None:
        """Raise an error for data that the members do not fit.

        Args:
            spec: The form of the data.
            loss: The loss, "log" or "squared".
        """
        raise NotImplementedError

    def prepare(self, data: Rows, loss: str) -> Tree:
        """Values that a client derives once from its rows and from the members, if it has them.

        Args:
            data: The client's rows.
            loss: The loss, "log" or "squared".
        """
        raise NotImplementedError

    def message(self, which: Tensor) -> Tree:
        """The message by which a client obtains some of the members.

        Args:
            which: The indices of the members.
        """
        raise NotImplementedError

    def loss(
        self,
        prepared: Tree,
        data: Rows,
        which: Tensor,
        models: Tree,
        weight: Tensor,
        loss: str,
        floor: float,
        excess: Tensor | None,
        slope: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The mean loss of sum_{k in which} weight_k h_k on a client's rows, with its gradient.

        Args:
            prepared: What `prepare` returned.
            data: The client's rows.
            which: The indices of the members.
            models: The message with the members; `None`: they are taken from the collection (a
                simulation).
            weight: The weight of each of these members.
            loss: The loss, "log" or "squared".
            floor: A constant that the log loss adds to the mixture's probabilities.
            excess: For the squared loss, a number for each member: weight_k excess_k mean |h_k|^2
                is subtracted from the loss, and twice excess_k mean |h_k|^2 from the gradient.
            slope: Whether the gradient is computed.

        Returns:
            The loss, and its gradient in the weights or `None`.
        """
        raise NotImplementedError

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        """The probabilities (n, classes) of the mixture of all members.

        Args:
            weight: The weight of each member.
            x: Rows.
        """
        raise NotImplementedError

    def nbytes(self) -> list[int]:
        """The encoded length of every member."""
        from foedus import wire

        return [wire.nbytes({"models": self.message(torch.tensor([k]))}) for k in range(len(self))]

    def state_dict(self) -> dict[str, Tensor]:
        """All members as tensors: two collections are equal if these are."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)})"


def number_array(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values)).float()
    except (TypeError, ValueError) as error:
        raise ModelError(f"{name} must be an array of numbers: {error}") from error


def label_count(fed: Any) -> int:
    if fed.data.classes is None:
        raise DataError("the data has no labels; predictors return a probability for each label")
    return fed.data.classes


def probabilities(table: Tensor, what: str) -> None:
    """Raise `ModelError` for the first row that is not a probability distribution."""
    bad = (table < 0).any(1) | ~((table.double().sum(1) - 1).abs() <= 1e-3)
    if bool(bad.any()):
        k = int(bad.nonzero()[0])
        total, low = float(table[k].double().sum()), float(table[k].min())
        raise ModelError(
            f"{what} {k} is not a probability distribution: it sums to {total:.6g}, its least "
            f"entry is {low:.4g}"
        )
