"""Held values: the server's values of which clients have copies, updated by short messages.

An algorithm keeps a held value in its state and passes it like any other argument, under the same
name during the whole run:

    clients.mean(self.step, center=state.center, eta=eta)            state.center is a HeldArrays
    state.replace(center=state.center.moved(1 - eta, add))           the next version

Core knows which version each client has (`Holdings`), and sends nothing, the changes since then, or
the whole value, whichever is shortest. Version 0 is computed by the client itself
(`Algorithm.first_held`), so nothing is sent for it. A client may keep something derived from the
value instead of the value: see `Algorithm.absorb`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foedus import wire
from foedus.base import tree
from foedus.base.settings import check_value
from foedus.base.tree import Tree
from foedus.errors import ReplyError, shown
from foedus.wire.arrays import LowRank, Sparse

if TYPE_CHECKING:
    from foedus.core.algorithm import Algorithm

NOTHING_KNOWN = -1
"""The version of a client of which nothing is known: it is sent the whole value."""


class Held(ABC):
    """A value at the server that clients have copies of."""

    @property
    def version(self) -> int:
        """The number of changes so far; a `HeldItems` has no versions."""
        raise NotImplementedError(f"{type(self).__name__} has no versions")

    @abstractmethod
    def update(self, base: Tree, algorithm: Algorithm) -> Tree:
        """The shortest message that brings a client up to date.

        Args:
            base: The client's version; `NOTHING_KNOWN`: it may have anything.
            algorithm: The algorithm.

        Returns:
            The message; `None`: the client is up to date.
        """

    @property
    @abstractmethod
    def argument(self) -> Tree:
        """The argument that a client step receives, once the client's copy is up to date."""


@tree.node
@dataclass(frozen=True, eq=False)
class HeldArrays(Held, Mapping):
    """Arrays by name that change by `value <- keep * value + add`.

    The server computes the new value from what is sent, so that copies and original are bitwise
    equal.

    Args:
        value: The arrays.
        version: The number of changes so far.
        log: The last changes, [keep, add] each, oldest first.
    """

    value: dict[str, Tensor]
    version: int = 0
    log: list[Tree] = field(default_factory=list)

    def __getitem__(self, name: str) -> Tensor:
        return self.value[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def moved(self, keep: float, add: dict[str, Tree]) -> HeldArrays:
        """The next version.

        Args:
            keep: The factor of the old value.
            add: What is added, in any form: dense, sparse or of low rank; the shorter the better.
        """
        change = [keep, add]
        log, size, whole = [change], wire.nbytes([change]), wire.nbytes(self.value)
        # kept as long as all changes together are shorter than the value
        for older in reversed(self.log):
            size += wire.nbytes([older])
            if size >= whole:
                break
            log.append(older)
        return HeldArrays(apply_change(self.value, change), self.version + 1, log[::-1])

    def update(self, base: int, algorithm: Algorithm) -> Tree:
        if base == self.version:
            return None
        missed = self.version - base
        if base == NOTHING_KNOWN or missed > len(self.log):
            return self.value
        changes = self.log[-missed:]
        return changes if wire.nbytes(changes) < wire.nbytes(self.value) else self.value

    @property
    def argument(self) -> Tree:
        return self.value


def apply_change(value: dict[str, Tensor], change: Tree) -> dict[str, Tensor]:
    """keep * value + add; dimensions in front of the value's own are clients."""
    keep, add = change
    return {
        k: keep * v + (add[k] if isinstance(add[k], Tensor) else add[k].dense())
        for k, v in value.items()
    }


def rebuilt(copy: dict[str, Tensor], update: Tree) -> dict[str, Tensor]:
    """A client's copy of arrays, brought up to date by a message."""
    if update is None:
        return copy
    if isinstance(update, dict):
        return update
    for change in update:
        copy = apply_change(copy, change)
    return copy


def rebuilt_from_wire(name: str, copy: dict[str, Tensor], update: Tree) -> dict[str, Tensor]:
    """As `rebuilt`, for an update from an untrusted peer.

    Names, forms, shapes and dtypes must be those of the client's copy before anything becomes
    dense. Changes must be shorter than the value, as `HeldArrays.update` makes them, so that no
    message costs more than the value itself. The result must be finite.

    Args:
        name: The name of the held value.
        copy: The client's copy.
        update: The message.

    Raises:
        ReplyError: The update is invalid; the error states the part and what is expected.
    """
    if isinstance(update, dict):
        _check_arrays(name, copy, update, (Tensor,))
        update = {key: update[key] for key in copy}
    elif update is not None:
        if not isinstance(update, list) or not update:
            raise ReplyError(f"{name} must be arrays or a list of changes, not {shown(update)}")
        for n, change in enumerate(update):
            what = f"{name}, change {n}"
            if not isinstance(change, list) or len(change) != 2:
                raise ReplyError(f"{what}: it must be [keep, add], not {shown(change)}")
            check_value(f"{what}: keep", change[0], float, ReplyError)
            _check_arrays(what, copy, change[1], (Tensor, Sparse, LowRank))
        if (size := wire.nbytes(update)) >= (whole := wire.nbytes(copy)):
            raise ReplyError(f"{name}: the changes take {size} bytes, the whole value {whole}")
    new = rebuilt(copy, update)
    if not tree.all_finite(new):
        raise ReplyError(f"{name} is not finite after its update")
    return new


def _check_arrays(what: str, like: dict[str, Tensor], arrays: Tree, forms: tuple) -> None:
    """Raise `ReplyError` for arrays with other names, shapes or dtypes than these."""
    if not isinstance(arrays, dict) or set(arrays) != set(like):
        names = list(arrays) if isinstance(arrays, dict) else arrays
        raise ReplyError(f"{what}: it must have the arrays {list(like)}, not {shown(names)}")
    for key, own in like.items():
        array = arrays[key]
        if not isinstance(array, forms):
            allowed = " or ".join(form.__name__ for form in forms)
            raise ReplyError(f"{what}: {key} must be a {allowed}, not a {type(array).__name__}")
        shape, dtype = _dense_form(array)
        if shape != own.shape or dtype != own.dtype:
            raise ReplyError(
                f"{what}: {key} must be {own.dtype} of shape {list(own.shape)}, not {dtype} of "
                f"shape {list(shape)}"
            )


def _dense_form(array: Tensor | Sparse | LowRank) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of an array once it is dense."""
    if isinstance(array, Sparse):
        return (*array.values.shape[:-1], *array.shape), array.values.dtype
    if isinstance(array, LowRank):
        return (*array.left.shape[:-1], array.right.shape[-2]), array.left.dtype
    return tuple(array.shape), array.dtype


def shortest(add: dict[str, Tensor], wide: dict[str, LowRank] | None = None) -> dict[str, Tree]:
    """Each tensor in its shortest form: dense, sparse, or the low-rank matrix that `wide` has."""
    forms: dict[str, Tree] = {}
    for name, dense in add.items():
        flat = dense.flatten()
        where = flat.nonzero().flatten()
        choices: list[Tree] = [
            dense,
            Sparse(where.to(torch.int32), flat[where], tuple(dense.shape)),
        ]
        if wide is not None and name in wide:
            choices.append(wide[name])
        forms[name] = min(choices, key=wire.nbytes)
    return forms


@tree.node
@dataclass(frozen=True, eq=False)
class HeldSum(Held):
    """A weighted sum of functions, f <- keep * f + sum_j weights_j h_j, one part per version.

    Args:
        parts: The functions of each version, in the algorithm's own form.
        weights: The weights of each part's functions at the time they were added.
        keeps: The factor that everything before was multiplied by at that time.
    """

    parts: list[Tree] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    keeps: list[float] = field(default_factory=list)

    @property
    def version(self) -> int:
        return len(self.parts)

    def grown(self, keep: float, functions: Tree, weights: Tensor) -> HeldSum:
        """The next version.

        Args:
            keep: The factor of the old sum.
            functions: The new functions.
            weights: Their weights.
        """
        return HeldSum([*self.parts, functions], [*self.weights, weights], [*self.keeps, keep])

    def since(self, base: int) -> tuple[float, list[Tensor]]:
        """The present factor of the sum of the first `base` parts, and the others' weights.

        Args:
            base: The number of parts.
        """
        keep, weights = 1.0, []
        for factor, weight in zip(
            reversed(self.keeps[base:]), reversed(self.weights[base:]), strict=True
        ):
            weights.append(weight * keep)
            keep *= factor
        return keep, weights[::-1]

    def update(self, base: int, algorithm: Algorithm) -> Tree:
        """[factor of the client's copy, parts, their weights]; `None` if it is up to date.

        Args:
            base: The client's version.
            algorithm: The algorithm.
        """
        if base == self.version:
            return None
        keep, weights = self.since(max(base, 0))
        return [keep if base > 0 else 0.0, self.parts[max(base, 0) :], weights]

    @property
    def argument(self) -> Tree:
        return None  # clients keep what `Algorithm.absorb` makes of it


def sum_from_wire(name: str, update: Tree) -> list[tuple[Tree, Tensor]]:
    """The parts of a `HeldSum` update from an untrusted peer, with the weights of each part.

    The algorithm checks the parts themselves (`Algorithm.check_updates`).

    Raises:
        ReplyError: The update does not have the form of one.
    """
    if not isinstance(update, list) or len(update) != 3:
        raise ReplyError(f"{name} must be [keep, parts, weights], not {shown(update)}")
    keep, parts, weights = update
    check_value(f"{name}: keep", keep, float, ReplyError)
    if not isinstance(parts, list) or not isinstance(weights, list) or len(parts) != len(weights):
        raise ReplyError(f"{name}: there must be a list of parts, and as many weights")
    for n, weight in enumerate(weights):
        vector = isinstance(weight, Tensor) and weight.dtype == torch.float64 and weight.dim() == 1
        if not vector or not len(weight) or not tree.all_finite(weight):
            raise ReplyError(f"{name}: the weights of part {n} must be finite float64, one or more")
    return list(zip(parts, weights, strict=True))


@tree.node
@dataclass(frozen=True, eq=False)
class HeldItems(Held):
    """Some of a number of items that clients keep once they have them, such as predictors.

    See `Algorithm.items`.

    Args:
        which: The indices of the items.
        size: The number of all items.
    """

    which: Tensor
    size: int

    def update(self, base: Tensor, algorithm: Algorithm) -> Tree:
        """The items that a client lacks.

        Args:
            base: For all items, whether the client has them.
            algorithm: The algorithm.
        """
        lacking = self.which[~base[self.which]]
        return algorithm.items(lacking) if len(lacking) else None

    @property
    def argument(self) -> Tree:
        return None


class Holdings:
    """Which version of each held value every client has, in order of client id."""

    def __init__(self, clients: int):
        self.clients = clients
        self.versions: dict[str, Tensor] = {}

    def _of(self, name: str, held: Held) -> Tensor:
        if name not in self.versions:
            shape = (self.clients, held.size) if isinstance(held, HeldItems) else (self.clients,)
            self.versions[name] = torch.zeros(
                shape, dtype=torch.bool if len(shape) > 1 else torch.int64
            )
        return self.versions[name]

    def updates(
        self, held: dict[str, Held], positions: Tensor, whole: bool, algorithm: Algorithm
    ) -> list[tuple[Tensor, dict[str, Tree]]]:
        """The messages that bring clients up to date: (places in `positions`, {name: message}).

        There is one entry for each group of clients with the same versions.

        Args:
            held: The held values.
            positions: The positions of the clients.
            whole: Whether all clients are sent the whole value, so that the size of a message does
                not reveal who has taken part before.
            algorithm: The algorithm.
        """
        if not held:
            return [(torch.arange(len(positions)), {})]
        columns = [
            self._of(name, h)[positions].reshape(len(positions), -1).long()
            for name, h in held.items()
        ]
        if whole:
            columns = [
                torch.full_like(c, 0 if isinstance(h, HeldItems) else NOTHING_KNOWN)
                for c, h in zip(columns, held.values(), strict=True)
            ]
        table = torch.cat(columns, 1)
        if len(table) and bool((table == table[0]).all()):
            kinds, group = table[:1], torch.zeros(len(table), dtype=torch.int64)
        else:
            kinds, group = table.unique(dim=0, return_inverse=True)
        found = []
        for k, row in enumerate(kinds):
            bases = row.split([c.shape[1] for c in columns])
            updates = {
                name: h.update(b.bool() if isinstance(h, HeldItems) else int(b), algorithm)
                for (name, h), b in zip(held.items(), bases, strict=True)
            }
            found.append((torch.nonzero(group == k).flatten(), updates))
        return found

    def settle(self, held: dict[str, Held], positions: Tensor) -> None:
        """Record that clients at these positions are up to date."""
        for name, h in held.items():
            own = self._of(name, h)
            if isinstance(h, HeldItems):
                own[positions.unsqueeze(1), h.which] = True
            else:
                own[positions] = h.version

    def doubt(self, positions: Tensor) -> None:
        """Record that the versions of these clients are unknown: an answer was lost or refused."""
        for name, own in self.versions.items():
            self.versions[name] = own.index_fill(
                0, positions, False if own.dim() > 1 else NOTHING_KNOWN
            )

    def forget(self, positions: Tensor) -> None:
        """Record that these clients start again, with what they can compute themselves."""
        for name, own in self.versions.items():
            self.versions[name] = own.index_fill(0, positions, 0)

    def save(self) -> Tree:
        return {name: own.clone() for name, own in self.versions.items()}

    def load(self, saved: Tree) -> None:
        self.versions = {name: own.clone() for name, own in saved.items()}
