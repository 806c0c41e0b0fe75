"""The server's view of its clients: ask them, and get an average or every reply. Every byte is counted here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foedus import wire
from foedus.base import random, tree
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.aggregation import Aggregator
from foedus.core.exchange import (
    NOT_FINITE,
    Accept,
    Ask,
    Batch,
    NothingArrived,
    Replies,
    form_of_batch,
    map_tensors,
    some_of,
    stacked_reply,
)
from foedus.core.reduce import Accumulator, Ledger, diverged, not_finite
from foedus.core.session import Session, read_replies
from foedus.errors import ConfigError, ReplyError, unknown
from foedus.wire import checks


@dataclass(eq=False)
class Clients:
    """The clients that take part in a round.

    `mean` returns only the weighted average of the replies, `gather` every reply. `ids` are theirs, `sizes` their numbers of
    rows, `total` and `total_rows` count all clients there are; `participation` is the part of them expected in a round; `key`
    is for the server's own random draws in this round; `came` are the numbers of rows of those whose replies the last exchange brought,
    and `who` are their ids, in order. `dropped` are those who were left out of an exchange of this round, and why.
    """

    session: Session
    algorithm: object
    ids: Tensor
    sizes: Tensor
    total: int
    total_rows: int
    spec: Spec
    round: int
    seed_key: Tensor
    ledger: Ledger
    participation: float = 1.0
    quantise: str | None = None
    free: bool = False
    metrics: dict[str, float | str] = field(default_factory=dict)
    came: Tensor | None = None
    who: Tensor | None = None
    group: str = ""
    taking: int = 0
    aggregator: Aggregator | None = None
    dropped: dict[int, list[str]] = field(default_factory=dict)
    exchanges: Iterator[int] = field(default_factory=itertools.count)

    _SERVER = 0xFFFFFFFF

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def key(self) -> Tensor:
        """A key for the server's own draws in this round."""
        return random.fold(self.seed_key, self.round, self._SERVER)

    @property
    def shared(self) -> Tensor:
        """The key that every client has too (`client.shared`), the same all through the run."""
        return random.fold(self.seed_key, 0)

    def log(self, **metrics: float) -> None:
        """Add values to this round's row of the history."""
        self.metrics.update({k: float(v) for k, v in metrics.items()})

    @property
    def longest(self) -> int:
        """The longest round trip of a message, in rounds: 0 unless the engine delays messages."""
        return getattr(self.session, "longest", 0)

    @property
    def device(self) -> torch.device:
        """Where the server should train networks: where the engine has its clients train theirs."""
        return getattr(self.session, "device", torch.device("cpu"))

    @property
    def measures(self) -> bool:
        """Whether what is only measured (`watched`) may be asked for: in a simulation, not between real sites."""
        return getattr(self.session, "measures", True)

    @property
    def wary(self) -> bool:
        """Whether clients are strangers, or a run expects hostile ones: replies are then checked, and bad ones left out."""
        expected = self.aggregator is not None and self.aggregator.wary and not self.free
        return expected or getattr(self.session, "unsure", False)

    def mean(self, step: Callable, /, *, weights: str = "rows", accept: Accept | None = None, **payload: Tree) -> Tree:
        """Run `step(client, **payload)` at every client and average the replies.

        weights: "rows" (by a client's number of rows) or "uniform". Structured replies average to dense tensors.
        accept: see `gather`; nobody is asked where single replies are not seen (secure aggregation).
        """
        return self._total(step, weights, payload, accept)

    def sum(self, step: Callable, /, **payload: Tree) -> Tree:
        """Run `step(client, **payload)` at every client and add up the replies."""
        return self._total(step, None, payload)

    def _total(self, step: Callable, weights: str | None, payload: dict[str, Tree], accept: Accept | None = None) -> Tree:
        if self.aggregator is None or self.free:
            return self.reduce(self._asked(step, payload, accept), weights)
        some = self.aggregator.among(self)
        total = self.aggregator.total(some, some._asked(step, payload, accept), weights)
        self.came, self.who = (self.sizes, self.ids) if self.aggregator.draws else (some.came, some.who)
        return total

    @property
    def hidden(self) -> bool:
        """Whether single replies are seen by nobody, so that only averages and sums may be asked for."""
        return self.aggregator is not None and self.aggregator.hides

    def reduce(self, ask: Ask, weights: str | None) -> Tree:
        """The weighted average of the replies to an exchange (their sum, if weights is None), added up in a stream."""
        if getattr(self.session, "reduce", None) is not None and not self._late(ask) and not self.wary:
            self.came, self.who = self.sizes, self.ids
            reduced = self.session.reduce(ask, self._share_of(weights, self.sizes)(self.sizes))
            self.ledger.bytes_up += reduced.sent.bytes_up
            self.ledger.messages_up += reduced.sent.messages_up
            total, count = reduced.total, reduced.clients
        else:
            self.came, batches = self._replies(ask)
            share, total, count = self._share_of(weights, self.came), Accumulator(self.algorithm.remedy), 0
            for batch in batches:
                total.add(stacked_reply(batch.reply, batch.stacked), share(batch.sizes), self.round, batch.ids)
                count += len(batch.ids)
        if count != len(self.came):
            raise ReplyError(f"round {self.round}: {count} of {len(self.came)} clients replied to {ask.step}")
        return total.result()

    def gather(self, step: Callable, /, *, weights: str = "rows", accept: Accept | None = None, **payload: Tree) -> Replies:
        """Run `step(client, **payload)` at every client and return every reply, in order of client id.

        accept: says of replies, stacked, which must not be used, and why; asked where clients are strangers (`wary`).
        """
        ask = self._asked(step, payload, accept)
        replies = self.collect(ask, weights)
        if self.aggregator is not None and not self.free:
            self.aggregator.gathered(self, ask, replies)
        return replies

    def collect(self, ask: Ask, weights: str | None = "rows") -> Replies:
        """Every reply to an exchange, in order of client id, with their weights: see `gather`."""
        self.came, batches = self._replies(ask)
        parts, bad = [], []
        for part in batches:  # each looked at while others are still at work
            parts.append(part)
            if not tree.all_finite(part.reply):
                bad.append(part)
        share = self._share_of(weights, self.came)
        if bad:
            each = [not_finite([stacked_reply(p.reply, p.stacked)], self.round, p.ids) for p in bad]
            clients = sorted(i for error in each for i in error.clients)
            raise diverged("reply", self.round, clients, self.algorithm.remedy)
        ids = torch.cat([p.ids for p in parts])
        order = torch.argsort(ids, stable=True)
        weight = share(torch.cat([p.sizes for p in parts]))[order]
        versions = torch.cat([torch.full_like(p.ids, p.version) for p in parts])[order]
        if all(p.stacked and form_of_batch(p.reply) == form_of_batch(parts[0].reply) for p in parts):
            reply = parts[0].reply if len(parts) == 1 else map_tensors(lambda *ts: torch.cat(ts), *(p.reply for p in parts))
            if bool((order[1:] < order[:-1]).any()):
                reply = map_tensors(lambda t: t[order], reply)
            return Replies(ids[order], weight, stacked=reply, versions=versions)
        single = [
            map_tensors(lambda t, i=i: t[i], part.reply) if part.stacked else part.reply
            for part in parts
            for i in range(len(part.ids))
        ]
        return Replies(ids[order], weight, separate=[single[i] for i in order.tolist()], versions=versions)

    def stream(self, ask: Ask) -> Iterator[tuple[Tensor, Tree]]:
        """The replies to an exchange batch by batch, with their ids and a leading client dimension; nothing is kept."""
        self.came, batches = self._replies(ask)
        return ((batch.ids, stacked_reply(batch.reply, batch.stacked)) for batch in batches)

    def watched(self, ids: Tensor, sizes: Tensor | None = None) -> Clients:
        """The clients `ids` to be measured for the history only (a gap, a distance): never sent in earnest, so nothing is charged.

        sizes: their numbers of rows, where an average by rows is wanted.
        """
        sizes = torch.ones_like(ids) if sizes is None else sizes
        return replace(self, ids=ids, sizes=sizes, free=True, quantise=None)

    def some(self, chosen: Tensor, group: str = "") -> Clients:
        """Those of the clients where `chosen` (booleans in order of id) is true, to ask them something else than the others.

        group: a name for them, where others are asked for the same step in the same round, so that late broadcasts find them.
        """
        return replace(self, ids=self.ids[chosen], sizes=self.sizes[chosen], group=group)

    def share(self, weights: str = "rows") -> float:
        """How much of the whole federation's weight replied to the last exchange (or takes part): |S| / N, or their part of the rows."""
        sizes = self.sizes if self.came is None else self.came
        self._share_of(weights, sizes)
        if self.aggregator is not None and self.aggregator.draws:  # what is expected: what came is for nobody to know
            return self.participation * len(self) / self.total
        return len(sizes) / self.total if weights == "uniform" else float(sizes.sum()) / self.total_rows

    def _share_of(self, weights: str | None, whole: Tensor) -> Callable[[Tensor], Tensor]:
        """From numbers of rows to weights, where `whole` are the rows of all that reply."""
        if weights == "rows":
            total = whole.sum()
            return lambda sizes: sizes.double() / total
        if weights == "uniform":
            return lambda sizes: torch.full((len(sizes),), 1.0 / len(whole), dtype=torch.float64)
        if weights is None:  # a plain sum
            return lambda sizes: torch.ones(len(sizes), dtype=torch.float64)
        raise ConfigError(unknown("weights", weights, ["rows", "uniform"]))

    def _asked(self, step: Callable, payload: dict[str, Tree], accept: Accept | None = None) -> Ask:
        """What to ask, after charging for it."""
        if getattr(step, "__self__", None) is not self.algorithm:
            raise ReplyError(f"{step!r} is not a client step: it must be a method of {type(self.algorithm).__name__} itself")
        if len(self) == 0 and not (self.aggregator is not None and self.aggregator.draws):
            raise ReplyError(f"round {self.round}: no client takes part, so {step.__name__} has nobody to ask")
        if not self.free:
            self.ledger.bytes_down += len(self) * wire.nbytes(payload)
        exchange = next(self.exchanges)
        more = (self.quantise, self.free, self.group, self.taking or len(self), accept)
        return Ask(step.__name__, payload, self.ids, self.seed_key, self.round, exchange, *more)

    def _late(self, ask: Ask) -> bool:
        late = getattr(self.session, "late", None)
        return late is not None and late.concerns(ask)

    def _replies(self, ask: Ask) -> tuple[Tensor, Iterable[Batch]]:
        """The numbers of rows of all that reply, and their replies, a batch at a time; what is sent is charged."""
        wary, late = self.wary, self._late(ask)
        if not wary and not late:
            self.who = self.ids
            return self.sizes, self._stream(ask)
        arrived: Iterable[Batch] = self._stream(ask)
        if wary:
            arrived = list(arrived)
            self._left_out(self.faults)
            arrived = self._checked(arrived)
        if late:
            for batch in arrived:
                self.session.late.post(ask, batch)
            arrived = self.session.late.collect(ask)
        if wary and ask.accept is not None:
            arrived = [part for batch in arrived for part in self._accepted(batch, ask.accept)]
        if not arrived:
            raise NothingArrived(f"round {self.round}: no reply to {ask.step} has arrived that can be used")
        self.who = torch.cat([b.ids for b in arrived]).sort().values
        return torch.cat([b.sizes for b in arrived]), arrived

    # -- strangers ---------------------------------------------------------------------------------------------------

    @property
    def faults(self) -> dict[int, str]:
        """Those who failed to answer the last exchange, and why."""
        return getattr(self.session, "faults", {})

    def refuse(self, client: int, why: str) -> None:
        """A reply that the algorithm must not use: an error, or, where clients may fail, one more that is left out of the round.

        The caller goes on without it.
        """
        if not self.wary:
            raise ReplyError(f"round {self.round}: client {client}: {why}")
        if getattr(self.session, "unsure", False):
            self.session.refuse(client, why)
        self._left_out({client: why})

    def _checked(self, batches: list[Batch]) -> list[Batch]:
        """The replies that are finite; the others are refused."""
        good = []
        for batch in batches:
            fine = checks.finite(stacked_reply(batch.reply, batch.stacked), len(batch.ids))
            good += self._kept(batch, dict.fromkeys(torch.nonzero(~fine).flatten().tolist(), NOT_FINITE))
        return good

    def _accepted(self, batch: Batch, accept: Accept) -> list[Batch]:
        """What the algorithm lets pass."""
        try:
            bad = accept(stacked_reply(batch.reply, batch.stacked))
        except Exception as error:  # whatever a stranger has sent
            if len(batch.ids) > 1:
                return [part for i in range(len(batch.ids)) for part in self._accepted(some_of(batch, [i]), accept)]
            bad = {0: str(error) if isinstance(error, ReplyError) else f"its reply cannot be used: {error!r}"}
        return self._kept(batch, bad)

    def _kept(self, batch: Batch, bad: dict[int, str]) -> list[Batch]:
        """A batch without those of its replies that are bad, which are refused; none, if nothing is left."""
        for i, why in bad.items():
            self.refuse(int(batch.ids[i]), why)
        left = [i for i in range(len(batch.ids)) if i not in bad]
        return [batch] if not bad else [some_of(batch, left)] if left else []

    def _left_out(self, faults: dict[int, str]) -> None:
        """Name in the history who did not answer in this round, or whose answer was refused, and why; and count them."""
        for i, why in faults.items():
            if why not in self.dropped.setdefault(i, []):
                self.dropped[i].append(why)
        if self.dropped:
            self.metrics["left_out"] = "; ".join(f"{i}: {' and '.join(self.dropped[i])}" for i in sorted(self.dropped))
        if self.dropped or self.wary:
            self.metrics["dropped"] = len(self.dropped)

    def _stream(self, ask: Ask) -> Iterator[Batch]:
        for ids, reply, stacked in read_replies(self.session, ask, self.ledger):
            sizes = self.sizes if torch.equal(ids, self.ids) else self.sizes[torch.searchsorted(self.ids, ids)]
            yield Batch(ids, sizes, reply, stacked, self.round)
