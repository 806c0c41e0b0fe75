"""The server's connection to its clients (`Network`), and one exchange over it (`RoundTrip`).

Every byte is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foedus import wire
from foedus.base import random, tree
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.delays import Mail
from foedus.core.exchange import (
    Accept,
    Ask,
    Batch,
    Broadcast,
    NothingArrived,
    Replies,
    form_of_batch,
    map_tensors,
)
from foedus.core.held import Holdings
from foedus.core.reduce import Accumulator, Ledger, diverged, not_finite
from foedus.core.session import Session, read_replies
from foedus.errors import ConfigError, ReplyError, TooFewClients, unknown
from foedus.wire import checks

if TYPE_CHECKING:
    from foedus.core.aggregation import Aggregator
    from foedus.core.algorithm import Algorithm

_NAMED = 10  # clients that an error names

NOT_FINITE = "its reply is not finite (NaN or infinity)"


@dataclass(eq=False)
class Network:
    """The server's connection to the clients of a run.

    It has the engine's session, the clients, the versions that they hold, and what was sent; the
    number of rounds of the run, and its notes.
    """

    session: Session
    algorithm: Algorithm
    ids: Tensor
    sizes: Tensor
    spec: Spec
    seed_key: Tensor
    quantise: str | None = None
    aggregator: Aggregator | None = None
    ledger: Ledger = field(default_factory=Ledger)
    rounds: int = 0
    notes: list[str] = field(default_factory=list)
    holdings: Holdings = field(init=False)
    mail: Mail | None = field(init=False)

    def __post_init__(self) -> None:
        self.holdings = Holdings(len(self.ids))
        delays = self.session.conditions.delays
        self.mail = Mail(delays, self.ids) if delays is not None and delays.longest else None

    @property
    def shared(self) -> Tensor:
        """A key that all clients have too, constant during the run."""
        return random.fold(self.seed_key, 0)

    @property
    def trusted(self) -> bool:
        """Whether replies can be used unchecked.

        They come from this process, and the aggregation does not treat clients as untrusted.
        """
        return self.session.conditions.trusted and (
            self.aggregator is None or not self.aggregator.checks_replies
        )

    def positions(self, ids: Tensor) -> Tensor:
        """The positions of clients in the order of all ids."""
        return torch.searchsorted(self.ids, ids)


class RoundTrip:
    """One exchange, from the question to the usable replies; what aggregators see of a round.

    `ids` and `sizes` are those of the clients that are asked; `answered` and `answered_rows` those
    of the clients whose replies arrived. `secret`: the set of clients that are asked must stay
    unknown; `hidden`: neither the ledger nor the history shows it. `dropped` are the clients left
    out of this round so far, with reasons; `metrics` is the round's row of the history.
    """

    def __init__(
        self,
        network: Network,
        broadcast: Broadcast,
        step: str,
        ids: Tensor,
        sizes: Tensor,
        exchange: int,
        *,
        free: bool = False,
        secret: bool = False,
        taking: int = 0,
        accept: Accept | None = None,
        dropped: dict[int, list[str]] | None = None,
        metrics: dict[str, float | str] | None = None,
        group: str = "",
    ):
        self.network, self.broadcast, self.step, self.ids, self.sizes = (
            network,
            broadcast,
            step,
            ids,
            sizes,
        )
        self.exchange, self.free, self.secret, self.taking, self.accept = (
            exchange,
            free,
            secret,
            taking or len(ids),
            accept,
        )
        self.dropped = {} if dropped is None else dropped
        self.metrics = {} if metrics is None else metrics
        self.answered, self.answered_rows = ids, sizes
        self.hidden = False
        self.group, self.trusted = (
            group,
            network.session.conditions.trusted if free else network.trusted,
        )
        self.mail = None if free or broadcast.round == 0 else network.mail

    @property
    def round(self) -> int:
        return self.broadcast.round

    @property
    def algorithm(self) -> Algorithm:
        return self.network.algorithm

    @property
    def key(self) -> Tensor:
        """A key for the server's own draws in this round."""
        return random.fold(self.network.seed_key, self.round, 0xFFFFFFFF)

    # -- what is asked -----------------------------------------------------------------------------

    def asked(self, broadcast: Broadcast | None = None, places: Tensor | None = None) -> Ask:
        """The exchange for the engine, with some of the clients.

        The messages to them are charged, and count as received.

        Args:
            broadcast: What they are sent; `None`: this round's broadcast.
            places: The places of the clients; `None`: all.
        """
        now = self.broadcast if broadcast is None else broadcast
        ids, network = self.ids if places is None else self.ids[places], self.network
        about = (
            network.seed_key,
            self.round,
            self.exchange,
            None if self.free else network.quantise,
            self.free,
            self.taking,
        )
        late = None if now.round == self.round else now.round
        ask = Ask(self.step, now.payload, ids, *about, now.held, sent=late)
        if self.free:
            return ask
        if now.held:
            at = network.positions(ids)
            ask = replace(
                ask, updates=network.holdings.updates(now.held, at, self.secret, network.algorithm)
            )
            if not self.secret:  # all are sent the whole value: participation is not recorded
                network.holdings.settle(now.held, at)
        if not self.hidden:
            for members, message in ask.messages():
                network.ledger.bytes_down += len(members) * wire.nbytes(message)
        return ask

    def hide(self, clients: float, reply: Tree) -> None:
        """Publish nothing about which clients are asked.

        The exchange is charged at once, as if the expected number of clients were asked and sent
        such a reply, and the history names no client.

        Args:
            clients: The expected number of clients.
            reply: A reply of the usual form.
        """
        self.hidden, network, now = True, self.network, self.broadcast
        one = torch.zeros(1, dtype=torch.int64)
        updates = network.holdings.updates(now.held, one, True, network.algorithm)
        about = (network.seed_key, self.round, self.exchange)
        ask = Ask(self.step, now.payload, one, *about, held=now.held, updates=updates)
        if network.quantise:
            reply = wire.quantise(reply, network.quantise, self.key)
        up, down = wire.nbytes(reply), sum(wire.nbytes(message) for _, message in ask.messages())
        self.charge(round(clients * up), round(clients * down), round(clients) * bool(up))

    def charge(self, up: int = 0, down: int = 0, messages: int = 0) -> None:
        """Count bytes that an aggregator's own protocol has sent."""
        ledger = self.network.ledger
        ledger.bytes_up, ledger.bytes_down = ledger.bytes_up + up, ledger.bytes_down + down
        ledger.messages_up += messages

    # -- what comes back ---------------------------------------------------------------------------

    def mean(self, weights: str | None) -> Tree:
        """The weighted average of the replies, computed in a stream.

        Args:
            weights: "rows" or "uniform"; `None`: the sum.
        """
        share = self.shares(weights, self.sizes)  # raises on unknown weights
        if self.mail is None and self.trusted:
            ask = self.asked()
            reduced = self.network.session.reduce(ask, share(self.sizes))
            if reduced is not None:
                self.charge(reduced.sent.bytes_up, 0, reduced.sent.messages_up)
                return self._complete(reduced.total, reduced.clients)
            batches: Iterable[Batch] = self._stream(ask)
        else:
            batches = self.batches()
            share = self.shares(weights, self.answered_rows)
        total, count = Accumulator(self.algorithm.remedy), 0
        for batch in batches:
            total.add(batch.tree(), share(batch.sizes), self.round, batch.ids)
            count += len(batch)
        return self._complete(total, count)

    def _complete(self, total: Accumulator, count: int) -> Tree:
        if count != len(self.answered):
            raise ReplyError(
                f"round {self.round}: {count} of {len(self.answered)} clients replied to "
                f"{self.step}"
            )
        return total.result()

    def collect(self, weights: str | None = "rows") -> Replies:
        """Every reply with its weight, in order of client id."""
        parts, bad = [], []
        for part in self.batches():  # checked while other clients still compute
            parts.append(part)
            if not tree.all_finite(part.reply):
                bad.append(part)
        share = self.shares(weights, self.answered_rows)
        if bad:
            each = [not_finite([p.tree()], self.round, p.ids) for p in bad]
            clients = sorted(i for error in each for i in error.clients)
            raise diverged("reply", self.round, clients, self.algorithm.remedy)
        ids = torch.cat([p.ids for p in parts])
        order = torch.argsort(ids, stable=True)
        weight = share(torch.cat([p.sizes for p in parts]))[order]
        versions = torch.cat([torch.full_like(p.ids, p.version) for p in parts])[order]
        broadcasts = {v: self._answered(v) for v in sorted({p.version for p in parts})}
        if all(
            p.stacked and form_of_batch(p.reply) == form_of_batch(parts[0].reply) for p in parts
        ):
            reply = (
                parts[0].reply
                if len(parts) == 1
                else map_tensors(lambda *ts: torch.cat(ts), *(p.reply for p in parts))
            )
            if bool((order[1:] < order[:-1]).any()):
                reply = map_tensors(lambda t: t[order], reply)
            return Replies(ids[order], weight, reply, None, versions, broadcasts)
        single = [
            map_tensors(lambda t, i=i: t[i], part.reply) if part.stacked else part.reply
            for part in parts
            for i in range(len(part))
        ]
        return Replies(
            ids[order], weight, None, [single[i] for i in order.tolist()], versions, broadcasts
        )

    def _answered(self, round: int) -> Broadcast:
        return self.broadcast if self.mail is None else self.mail.sent[self.slot][round]

    def batches(self) -> Iterable[Batch]:
        """The usable replies, batch by batch; what is sent is charged."""
        if self.trusted and self.mail is None:
            return self._stream(self.asked())
        arrived: Iterable[Batch]
        if self.mail is None:
            arrived = self._checked(self._stream(self.asked()))
        else:
            self.slot = self.mail.slot(f"{self.step} {self.group}", self.round)
            for sent, places in self.mail.broadcasts(self.slot, self.broadcast, self.ids):
                for batch in self._checked(self._stream(self.asked(sent, places), sent.round)):
                    self.mail.post(self.slot, self.round, batch)
            arrived = self.mail.collect(self.slot, self.round)
        if not self.trusted and self.accept is not None:
            arrived = [part for batch in arrived for part in self._accepted(batch)]
        arrived = list(arrived)
        if not arrived:
            raise self._nothing()
        ids = torch.cat([b.ids for b in arrived])
        order = ids.argsort(stable=True)
        self.answered, self.answered_rows = ids[order], torch.cat([b.sizes for b in arrived])[order]
        return arrived

    def _nothing(self) -> Exception:
        """The signal that no usable reply has arrived; an error if all clients were left out."""
        if self.hidden or len(self.dropped) < len(self.network.ids):
            return NothingArrived(
                f"round {self.round}: no reply to {self.step} has arrived that can be used"
            )
        some = sorted(self.dropped)[:_NAMED]
        reasons = "; ".join(f"client {i}: {' and '.join(self.dropped[i])}" for i in some)
        more = f"; and {len(self.dropped) - len(some)} more" if self.dropped.keys() - some else ""
        return TooFewClients(
            f"round {self.round}: no client is left, as the replies to {self.step} of all "
            f"{len(self.dropped)} were refused ({reasons}{more}); repair these clients, or run "
            "with others"
        )

    def _stream(self, ask: Ask, version: int | None = None) -> Iterator[Batch]:
        same = ask.ids is self.ids
        ledger = Ledger() if self.hidden else self.network.ledger
        for ids, reply, stacked in read_replies(self.network.session, ask, ledger):
            sizes = (
                self.sizes
                if same and torch.equal(ids, self.ids)
                else self.sizes[torch.searchsorted(self.ids, ids)]
            )
            yield Batch(ids, sizes, reply, stacked, self.round if version is None else version)

    def shares(self, weights: str | None, whole: Tensor) -> Shares:
        """A function from numbers of rows to weights.

        Args:
            weights: "rows" or "uniform"; `None`: weight 1.
            whole: The numbers of rows of all clients that reply.
        """
        if weights not in ("rows", "uniform", None):
            raise ConfigError(unknown("weights", weights, ["rows", "uniform"]))
        return Shares(weights, whole)

    # -- untrusted clients -------------------------------------------------------------------------

    def drop(self, faults: Mapping[int, str]) -> None:
        """Record the clients that did not answer, or whose reply was refused, with reasons.

        Nothing is recorded where it would reveal which clients take part.
        """
        if self.hidden:
            return
        for i, why in faults.items():
            if why not in self.dropped.setdefault(i, []):
                self.dropped[i].append(why)
        if faults and self.broadcast.held:
            self.network.holdings.doubt(self.network.positions(torch.tensor(sorted(faults))))
        if self.dropped:
            self.metrics["left_out"] = "; ".join(
                f"{i}: {' and '.join(self.dropped[i])}" for i in sorted(self.dropped)
            )
        if self.dropped or not self.trusted:
            self.metrics["dropped"] = len(self.dropped)

    def refuse(self, client: int, why: str) -> None:
        """Refuse an unusable reply.

        It is an error or, from an untrusted client, left out of the round.
        """
        if self.trusted:
            raise ReplyError(f"round {self.round}: client {client}: {why}")
        self.network.session.refuse(client, why)
        self.drop({client: why})

    def _checked(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """The replies that are finite; other replies of untrusted clients are refused."""
        if self.trusted:
            return batches
        arrived = list(batches)
        self.drop(self.network.session.faults)
        good = []
        for batch in arrived:
            fine = checks.finite(batch.tree(), len(batch))
            good += self._kept(
                batch, dict.fromkeys(torch.nonzero(~fine).flatten().tolist(), NOT_FINITE)
            )
        return good

    def _accepted(self, batch: Batch) -> list[Batch]:
        """The replies that the algorithm's `accept` does not reject."""
        assert self.accept is not None
        try:
            bad = self.accept(batch.ids, batch.tree())
        except Exception as error:  # an untrusted reply may cause any error
            if len(batch) > 1:
                return [part for i in range(len(batch)) for part in self._accepted(batch.pick([i]))]
            bad = {
                0: str(error)
                if isinstance(error, ReplyError)
                else f"its reply cannot be used: {error!r}"
            }
        return self._kept(batch, bad)

    def _kept(self, batch: Batch, bad: dict[int, str]) -> list[Batch]:
        """A batch without its rejected replies, which are refused; an empty list if none remain."""
        for i, why in bad.items():
            self.refuse(int(batch.ids[i]), why)
        left = [i for i in range(len(batch)) if i not in bad]
        return [batch] if not bad else [batch.pick(left)] if left else []


class Shares:
    """Weights of clients from their numbers of rows: "rows", "uniform", or, for a sum, None."""

    def __init__(self, weights: str | None, whole: Tensor):
        self.weights, self.whole = weights, whole
        self.last: tuple[Tensor, Tensor] | None = None  # often called twice

    def __call__(self, sizes: Tensor) -> Tensor:
        if self.last is None or self.last[0] is not sizes:
            self.last = sizes, self._of(sizes)
        return self.last[1]

    def _of(self, sizes: Tensor) -> Tensor:
        if self.weights == "rows":
            return sizes.double() / self.whole.sum()
        each = 1.0 if self.weights is None else 1.0 / len(self.whole)
        return torch.full((len(sizes),), each, dtype=torch.float64)
