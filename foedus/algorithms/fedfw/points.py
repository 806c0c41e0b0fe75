"""Extreme points as FedFW's clients send them: the set of each client, membership, and sums."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.base import random, tree
from foedus.base.tree import State, Tree
from foedus.core.clients import Clients
from foedus.core.copies import Copies
from foedus.core.exchange import Replies
from foedus.core.held import shortest
from foedus.errors import ConfigError
from foedus.geometry import ModelDomain, domain_of, inside
from foedus.models.base import Params
from foedus.wire.arrays import LowRank

if TYPE_CHECKING:
    from foedus.algorithms.fedfw.fedfw import FedFW

MEMBER = 1e-4
"""How far, relative to the size of the set, a point may be outside of it by rounding: float32 with
millions of entries needs less.
"""


class Supersets(tuple):
    """Larger sets of some clients, as pairs (client, set) in order of client; an error names the
    entry that is wrong.
    """

    @classmethod
    def of(cls, given: Any) -> Supersets:
        pairs = given.items() if isinstance(given, Mapping) else given
        try:
            pairs = [(client, outer) for client, outer in pairs]
        except (TypeError, ValueError):
            raise ConfigError(
                f"supersets={given!r} must be a dict {{client: set}}, such as {{3: L2Ball(10.0)}}"
            ) from None
        for client, outer in pairs:
            if isinstance(client, bool) or not isinstance(client, Integral):
                raise ConfigError(
                    f"supersets[{client!r}]: a client is named by its number, "
                    "such as {3: L2Ball(10.0)}"
                )
            try:
                domain_of(outer)
            except ConfigError as error:
                raise ConfigError(f"supersets[{client}]: {error}") from None
        if len({client for client, _ in pairs}) < len(pairs):
            raise ConfigError("supersets names a client twice; give each one set")
        return cls(sorted(((int(c), o) for c, o in pairs), key=lambda pair: pair[0]))

    def check(self, domain: ModelDomain, given: Any, x: Params) -> None:
        """Refuse sets that do not contain the domain."""
        for client, outer in self:
            if not inside(domain_of(outer), domain, x):
                raise ConfigError(
                    f"supersets[{client}]={outer} does not contain {given}; give a larger set"
                )

    def check_clients(self, ids: Tensor, domain: Any) -> None:
        """Refuse supersets of unknown clients, and of all: the sets of all clients must have the
        domain in common.
        """
        known = set(ids.tolist())
        unknown = [client for client, _ in self if client not in known]
        if unknown:
            raise ConfigError(
                f"supersets[{unknown[0]}] is for a client that does not exist; "
                f"there are {len(ids)} clients"
            )
        if self and len(self) == len(ids) and all(outer != domain for _, outer in self):
            raise ConfigError(
                f"supersets are given for all {len(ids)} clients; "
                f"at least one must keep to {domain}"
            )

    def mixed(self, domain: ModelDomain) -> bool:
        """Whether some sets are of a model's tensors one by one and others of all of them; points
        are then sent as parameters.
        """
        return any(type(domain_of(outer)) is not type(domain) for _, outer in self)

    def kinds(self, ids: Tensor) -> Tensor | None:
        """0 for clients of the domain itself, k for those of the (k - 1)-th superset."""
        if not self:
            return None
        kinds, sets = torch.zeros_like(ids), [outer for _, outer in self]
        for client, outer in self:
            kinds[ids == client] = sets.index(outer) + 1
        return kinds


def outside(algorithm: FedFW, ids: Tensor, points: Tree, like: Params) -> dict[int, str]:
    """The places of points that are not in the set of their clients, all of one kind."""
    kinds = algorithm.kinds(ids)
    kind = 0 if kinds is None else int(kinds[0])
    found = ~algorithm.set_of(kind).contains(algorithm.dense(kind, points, like), MEMBER, batch=1)
    return dict.fromkeys(
        torch.nonzero(found).flatten().tolist(), "its point lies outside of the set"
    )


def dense_points(algorithm: FedFW, replies: Replies, like: Params) -> Params:
    """The points of replies as dense parameters with a leading client dimension."""
    kinds = algorithm.kinds(replies.ids)
    if kinds is None:
        return algorithm.dense(0, replies.stack(), like)
    points = tree.map(lambda v: v.new_empty(len(replies), *v.shape), like)
    for kind in kinds.unique().tolist():
        places = torch.nonzero(kinds == kind).flatten()
        some = algorithm.dense(kind, replies.pick(places).stack(), like)
        tree.map(lambda all_, own, places=places: all_.index_copy_(0, places, own), points, some)
    return points


def averaged(
    algorithm: FedFW, clients: Clients, sent: dict[str, Any], rate: float, like: Params
) -> dict[str, Tree]:
    """`rate` times the average of the points, in its shortest form: matrices of rank one add up to
    one of low rank.
    """
    step = algorithm.step
    if not algorithm.set.low_rank(like):
        mean = clients.mean(step, **sent)
        return shortest(tree.scale(algorithm.dense(0, mean, like), rate))
    mean, each = clients.mean_and_each(step, **sent)
    dense = tree.scale(algorithm.dense(0, mean, like), rate)
    return shortest(
        dense, None if each is None or algorithm.supersets else wide_sum(each, rate, dense)
    )


def moved_copies(
    algorithm: FedFW, clients: Clients, state: State, replies: Replies
) -> tuple[Copies, Params]:
    """The x_i of the clients whose points arrived, after the steps that these were made with; and
    the sum of their moves.
    """
    copies, like = state.copies, state.center.value
    total = tree.zeros_like(like)
    for broadcast, some in replies.by_broadcast():
        rate = algorithm.rate(broadcast.round, clients.participation)
        positions = clients.positions(some.ids)
        copies, moves = copies.moved(positions, dense_points(algorithm, some, like), rate)
        total = tree.add(total, moves)
    return copies, total


def wide_sum(replies: Replies, rate: float, dense: Params) -> dict[str, LowRank]:
    """rate times the average of points, as matrices of as many ranks as there are points, by the
    tensor that they are of.
    """
    points = replies.stack()
    points = points if isinstance(points, dict) else {next(iter(dense)): points}
    wide = {}
    for name, point in points.items():
        if isinstance(point, LowRank):
            left, right = point.left * (rate / len(point.left)), point.right
            wide[name] = LowRank(left.movedim(0, -2).flatten(-2), right.movedim(0, -2).flatten(-2))
    return wide


def noisy(g: Params, noise: float, key: Tensor) -> Params:
    """g plus normal noise, of `noise` times the root mean square of g's entries (Section 3.2)."""
    if not noise:
        return g
    total = reduce(torch.add, (v.square().sum() for v in g.values()))
    deviation = noise * (total / sum(v.numel() for v in g.values())).sqrt()
    return {
        k: v + deviation * random.normal(random.fold(key, i), v.shape)
        for i, (k, v) in enumerate(g.items())
    }
