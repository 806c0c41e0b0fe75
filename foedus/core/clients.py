"""The server's view of its clients: exchanges that return averages, replies or measurements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foedus.base import random, tree, unions
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.exchange import Accept, Broadcast, Replies
from foedus.core.held import Held
from foedus.core.network import Network, RoundTrip
from foedus.core.reduce import Accumulator
from foedus.errors import ReplyError

if TYPE_CHECKING:
    from foedus.core.copies import Copies


@dataclass(eq=False)
class Clients:
    """The clients that take part in a round.

    `mean` returns the weighted average of the replies, `gather` every reply. An argument that is a
    held value (`foedus.core.held`) is sent as the difference to the client's copy.

    `ids` are the ids of the clients that take part and `sizes` their numbers of rows; `total` and
    `total_rows` count all clients and their rows; `participation` is the expected fraction of
    clients in a round; `answered` are the ids of the clients whose replies the last exchange
    brought; `dropped` are the clients left out of this round, with reasons. With `waits`, late
    replies are collected even if no client is asked.
    """

    network: Network
    ids: Tensor
    sizes: Tensor
    round: int
    participation: float = 1.0
    free: bool = False
    metrics: dict[str, float | str] = field(default_factory=dict)
    dropped: dict[int, list[str]] = field(default_factory=dict)
    answered: Tensor | None = None
    answered_rows: Tensor | None = None
    group: str = ""
    waits: bool = False
    exchanges: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def total(self) -> int:
        """The number of all clients."""
        return len(self.network.ids)

    @property
    def total_rows(self) -> int:
        """The number of rows of all clients."""
        return int(self.network.sizes.sum())

    @property
    def spec(self) -> Spec:
        """The form of the rows."""
        return self.network.spec

    @property
    def key(self) -> Tensor:
        """A key for the server's own draws in this round."""
        return random.fold(self.network.seed_key, self.round, 0xFFFFFFFF)

    @property
    def shared(self) -> Tensor:
        """The key that every client has, too (`client.shared`), constant during the run."""
        return self.network.shared

    @property
    def punctual(self) -> bool:
        """Whether replies answer the broadcast of their own round.

        Otherwise each says which one it answers (`Replies.versions`).
        """
        return self.network.mail is None

    @property
    def rounded(self) -> bool:
        """Whether replies are rounded when sent, without bias (`fd.run(quantise=...)`)."""
        return self.network.quantise is not None

    def log(self, **metrics: float | Tensor) -> None:
        """Add values to this round's row of the history.

        Args:
            **metrics: Numbers by column.
        """
        self.metrics.update({k: float(v) for k, v in metrics.items()})

    def place(self, t: Tensor) -> Tensor:
        """A tensor on the device where the run trains its networks.

        Args:
            t: The tensor.
        """
        return t.to(self.network.session.conditions.device)

    # -- exchanges ---------------------------------------------------------------------------------

    def mean(
        self,
        step: Callable,
        /,
        *,
        weights: str = "rows",
        accept: Accept | None = None,
        **payload: Tree,
    ) -> Tree:
        """Run `step(client, **payload)` at every client and average the replies.

        Args:
            step: A client step: a method of the algorithm.
            weights: "rows" (by a client's number of rows) or "uniform".
            accept: See `gather`; not used if the server sees no single reply (secure aggregation).
            **payload: The arguments of the step.

        Returns:
            The average; structured arrays average to dense tensors.
        """
        return self._total(step, weights, payload, accept)

    def sum(self, step: Callable, /, *, accept: Accept | None = None, **payload: Tree) -> Tree:
        """Run `step(client, **payload)` at every client and add up the replies.

        Args:
            step: A client step: a method of the algorithm.
            accept: As for `mean`.
            **payload: The arguments of the step.
        """
        return self._total(step, None, payload, accept)

    def mean_by_broadcast(
        self, step: Callable, /, *, weights: str = "rows", note: Tree = None, **payload: Tree
    ) -> list[tuple[Broadcast, Tree]]:
        """The average of the replies in parts, one for each broadcast that is answered.

        It is for replies that are meaningful only together with what was sent. The parts add up to
        the average.

        Args:
            step: A client step: a method of the algorithm.
            weights: "rows" or "uniform".
            note: What the server wants to record with this broadcast.
            **payload: The arguments of the step.
        """
        if self.punctual:
            return [
                (
                    Broadcast(self.round, payload, {}, note),
                    self._total(step, weights, payload, None),
                )
            ]
        parts = []
        for broadcast, replies in self.gather(
            step, weights=weights, note=note, **payload
        ).by_broadcast():
            part = Accumulator(self.network.algorithm.remedy)
            part.add(replies.stack(), replies.weights, self.round, replies.ids)
            parts.append((broadcast, part.result()))
        return parts

    def mean_and_each(
        self,
        step: Callable,
        /,
        *,
        weights: str = "rows",
        accept: Accept | None = None,
        **payload: Tree,
    ) -> tuple[Tree, Replies | None]:
        """The average of the replies and, if the server sees them, all replies.

        Args:
            step: A client step: a method of the algorithm.
            weights: "rows" or "uniform".
            accept: See `gather`.
            **payload: The arguments of the step.
        """
        if self.network.aggregator is not None and not self.free:
            return self.mean(step, weights=weights, accept=accept, **payload), None
        replies = self.gather(step, weights=weights, accept=accept, **payload)
        total = Accumulator(self.network.algorithm.remedy)
        for places in self._alike(replies):
            some = replies.pick(places)
            total.add(some.stack(), some.weights, self.round, some.ids)
        return total.result(), replies

    def _alike(self, replies: Replies) -> list[Tensor]:
        """The places of the replies of each kind of clients."""
        kinds = self.network.algorithm.kinds(replies.ids)
        if kinds is None:
            return [torch.arange(len(replies))]
        return [torch.nonzero(kinds == kind).flatten() for kind in kinds.unique().tolist()]

    def gather(
        self,
        step: Callable,
        /,
        *,
        weights: str = "rows",
        accept: Accept | None = None,
        note: Tree = None,
        **payload: Tree,
    ) -> Replies:
        """Run `step(client, **payload)` at every client and return all replies, in order of id.

        Args:
            step: A client step: a method of the algorithm.
            weights: "rows" or "uniform", for `Replies.weights`.
            accept: A function of ids and stacked replies of untrusted clients that returns the
                places of unusable replies, with reasons.
            note: A note that stays at the server with the record of the broadcast
                (`Replies.broadcasts`).
            **payload: The arguments of the step.
        """
        trip = self._trip(step, payload, self.ids, self.sizes, accept, note)
        replies = trip.collect(weights)
        self.answered, self.answered_rows = trip.answered, trip.answered_rows
        if self.network.aggregator is not None and not self.free:
            self.network.aggregator.gathered(trip, replies)
        return replies

    def union(
        self, step: Callable, check: Callable[[Collection[bytes]], str | None], /, **payload: Tree
    ) -> list[bytes]:
        """The union of sets of byte strings that clients have, sorted.

        If the server sees single replies, `step(client, rows=0, **payload)` replies its strings
        (`unions.listed`); if it sees only sums, a table of this number of rows (`unions.table`),
        larger each time until the sum of all tables can be read.

        Args:
            step: A client step: a method of the algorithm.
            check: Returns a reason why a set of strings is invalid, or `None`.
            **payload: The arguments of the step.
        """
        aggregator = None if self.free else self.network.aggregator
        if aggregator is None or not aggregator.hides:

            def strange(_: Tensor, reply: Tree) -> dict[int, str]:
                why = check(unions.read_list(reply[0]))
                return {} if why is None else {0: why}

            # robust aggregation does not apply: a client's texts do not change those of others
            sent = {"rows": 0, **payload}
            each = self._trip(step, sent, self.ids, self.sizes, strange).collect()
            return sorted(set().union(*(unions.read_list(reply) for reply in each)))
        for rows in unions.TABLE_ROWS:
            found = unions.peeled(self.sum(step, rows=rows, **payload))
            if found is not None and (why := check(found)) is not None:
                raise ReplyError(f"the texts of all clients cannot be used: {why}")
            if found is not None:
                return found
        raise ReplyError(
            f"the texts of all clients cannot be read from a sum of {unions.TABLE_ROWS[-1]} rows: "
            "there are too many, or a client has sent something else; name the categories in "
            "advance"
        )

    def _total(
        self, step: Callable, weights: str | None, payload: dict[str, Tree], accept: Accept | None
    ) -> Tree:
        aggregator = None if self.free else self.network.aggregator
        if aggregator is None:
            trip = self._trip(step, payload, self.ids, self.sizes, accept)
            total = trip.mean(weights)
        else:
            chosen = aggregator.among(self.round, self.ids)
            trip = self._trip(step, payload, self.ids[chosen], self.sizes[chosen], accept)
            total = aggregator.total(trip, weights)
        source = trip if aggregator is None or not aggregator.draws else self
        self.answered = source.answered if source is trip else self.ids
        self.answered_rows = source.answered_rows if source is trip else self.sizes
        return total

    def _trip(
        self,
        step: Callable,
        payload: dict[str, Tree],
        ids: Tensor,
        sizes: Tensor,
        accept: Accept | None,
        note: Tree = None,
    ) -> RoundTrip:
        algorithm, aggregator = self.network.algorithm, self.network.aggregator
        if getattr(step, "__self__", None) is not algorithm:
            raise ReplyError(
                f"{step!r} is not a client step: it must be a method of {type(algorithm).__name__} "
                "itself"
            )
        draws = aggregator is not None and aggregator.draws and not self.free
        if len(ids) == 0 and not draws and not self.waits:
            raise ReplyError(
                f"round {self.round}: no client takes part, so {step.__name__} cannot run"
            )
        held = {name: value for name, value in payload.items() if isinstance(value, Held)}
        plain = {name: value for name, value in payload.items() if name not in held}
        return RoundTrip(
            self.network,
            Broadcast(self.round, plain, held, note),
            step.__name__,
            ids,
            sizes,
            next(self.exchanges),
            free=self.free,
            secret=draws and self.participation < 1,
            taking=len(ids) if draws else len(self.ids),
            accept=accept,
            dropped=self.dropped,
            metrics=self.metrics,
            group=self.group,
        )

    def some(self, chosen: Tensor, group: str = "") -> Clients:
        """The clients for which `chosen` is true, to ask them something else than the others.

        Args:
            chosen: Booleans, in order of id.
            group: A name for these clients, if others are asked for the same step in the same
                round, so that late broadcasts find them.
        """
        return replace(
            self,
            ids=self.ids[chosen],
            sizes=self.sizes[chosen],
            answered=None,
            answered_rows=None,
            group=group,
        )

    # -- what is only measured ---------------------------------------------------------------------

    def measure(
        self, step: Callable, /, *, weights: str | None = "rows", **payload: Tree
    ) -> Tree | None:
        """The average of a step's replies over all clients, for the history only.

        Nothing is sent, so nothing is charged.

        Args:
            step: A client step: a method of the algorithm.
            weights: "rows" or "uniform"; `None`: the sum.
            **payload: The arguments of the step.

        Returns:
            The average; `None` between real sites, which are asked only for what is needed.
        """
        trip = self._measuring(step, payload)
        return None if trip is None else trip.mean(weights)

    def measure_each(self, step: Callable, /, **payload: Tree) -> Tree | None:
        """As `measure`, but the stacked replies of all clients in order of id.

        Args:
            step: A client step: a method of the algorithm.
            **payload: The arguments of the step.
        """
        trip = self._measuring(step, payload)
        return None if trip is None else trip.collect().stack()

    def _measuring(self, step: Callable, payload: dict[str, Tree]) -> RoundTrip | None:
        network = self.network
        if not network.session.conditions.measures:
            return None
        plain = {
            name: value.argument if isinstance(value, Held) else value
            for name, value in payload.items()
        }
        about = (
            Broadcast(self.round, plain),
            step.__name__,
            network.ids,
            network.sizes,
            next(self.exchanges),
        )
        return RoundTrip(network, *about, free=True)

    # -- who came ----------------------------------------------------------------------------------

    def share(self, weights: str = "rows") -> float:
        """The fraction of the whole federation's weight that replied to the last exchange.

        Before an exchange it is that of the clients that take part: |S| / N, or their fraction of
        the rows.

        Args:
            weights: "rows" or "uniform".
        """
        sizes = self.sizes if self.answered_rows is None else self.answered_rows
        aggregator = self.network.aggregator
        # the expected fraction: who takes part is secret
        if aggregator is not None and aggregator.draws:
            return self.participation * len(self) / self.total
        return (
            len(sizes) / self.total
            if weights == "uniform"
            else float(sizes.sum()) / self.total_rows
        )

    def positions(self, ids: Tensor) -> Tensor:
        """The positions of clients in the order of all ids.

        Args:
            ids: The ids of the clients.
        """
        return self.network.positions(ids)

    def copies(self, value: Tree) -> Copies | None:
        """The server's table of the clients' values, for algorithms whose replies change them.

        Args:
            value: The first value at each client.

        Returns:
            The table; `None` if the server sees no single reply, or if no table is needed because
            every client answers every round at once and averages suffice.
        """
        from foedus.core.copies import Copies

        hidden = self.network.aggregator is not None and self.network.aggregator.hides
        if hidden or (self.participation == 1 and self.punctual):
            return None
        return Copies(tree.map(lambda t: t.expand(self.total, *t.shape).clone(), value))
