"""The server's view of its clients: ask them, and get an average or every reply. Every byte is counted here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from foedus.core import checks, random, tree, wire
from foedus.core.aggregation import Aggregator
from foedus.core.algorithm import Algorithm
from foedus.core.spec import Spec
from foedus.core.tree import Tree
from foedus.errors import ConfigError, DivergenceError, ReplyError, unknown

Accept = Callable[[Tree], dict[int, str]]
"""Of stacked replies: the places of those that must not be used, and why."""

NOT_FINITE = "its reply is not finite (NaN or infinity)"

_SMALL, _SHORT, _BLOCK = 1 << 16, 64, 1 << 14
"""Numbers that are summed in double precision at once; clients in a sum of single precision; numbers of a reply that are added at a time."""


@dataclass
class Ledger:
    """What has been sent so far, in encoded bytes and in messages."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0

    def charge(self, reply: Tree, stacked: bool, clients: int) -> None:
        """So many clients send a reply of this form."""
        each = wire.nbytes(reply, batched=stacked)
        self.bytes_up += clients * each
        self.messages_up += clients * bool(each)


@dataclass(frozen=True, eq=False)
class Replies:
    """Every reply of an exchange, in order of client id.

    Batched steps give `stacked`, one tree whose tensors have a leading client dimension; looped ones a list of trees
    that may differ in shape. `replies[i]` and iteration work for both. `versions` are the rounds whose broadcast they were
    computed from: this one, unless the engine delays messages.
    """

    ids: Tensor
    weights: Tensor
    stacked: Tree | None = None
    separate: list[Tree] | None = None
    versions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Tree:
        return self.separate[i] if self.separate is not None else _tensors(lambda t: t[i], self.stacked)

    def __iter__(self) -> Iterator[Tree]:
        return (self[i] for i in range(len(self)))

    def stack(self) -> Tree:
        """One tree with a leading client dimension; the replies must have one shape."""
        return self.stacked if self.separate is None else _tensors(lambda *ts: torch.stack(ts), *self.separate)


def _tensors(f: Callable, first: Tree, *rest: Tree) -> Tree:
    """`f` on the tensors of a reply; constants stay as they are."""
    return tree.map(lambda t, *ts: f(t, *ts) if isinstance(t, Tensor) else t, first, *rest)


def _form(reply: Tree) -> tuple:
    """What stacked replies must have in common to be joined."""
    leaves, form = tree.flatten(reply)
    return form, [t.shape[1:] if isinstance(t, Tensor) else t for t in leaves]


class Accumulator:
    """A weighted sum of replies, added up in a stream: stacked batches or single replies, structured arrays included.

    Sums are carried in twice the precision of the replies (`rest` is what doubles leave over), so that how clients were
    batched, or spread over workers that add up their own, leaves next to no trace.
    """

    def __init__(self, remedy: str = Algorithm.remedy) -> None:
        self.remedy = remedy
        self.total: list[Tensor] | None = None
        self.rest: list[Tensor | None] = []
        self.dtypes: list[torch.dtype] = []
        self.form = None

    def add(self, reply: Tree, weights: Tensor, round: int, ids: Tensor) -> None:
        """Add sum_c weights[c] * reply[c]; a sum that is not finite is traced to its clients and refused."""
        leaves, form = tree.flatten(reply, is_leaf=lambda t: hasattr(t, "weighted_sum"))
        if len(weights) == 1 and self._fits(leaves, form):
            if not tree.all_finite(leaves):
                raise not_finite(leaves, round, ids, remedy=self.remedy)
            # By blocks, which stay in cache while they change precision; so small that PyTorch does not wait for threads whose cores
            # other clients are using.
            for total, leaf in zip(self.total, leaves, strict=True):
                for there, part in zip(total.view(-1).split(_BLOCK), leaf.reshape(-1).split(_BLOCK), strict=True):
                    there.add_(part, alpha=float(weights[0]))
            return
        batch = Accumulator(self.remedy)
        sums = [_weighted_sum(leaf, weights) for leaf in leaves]
        batch.total, batch.dtypes, batch.form = [total for total, _ in sums], [dtype for _, dtype in sums], form
        if not tree.all_finite([t.to(d) for t, d in sums]):
            raise not_finite(leaves, round, ids, remedy=self.remedy)
        batch.rest = [torch.zeros_like(t) if d == torch.float64 else None for t, d in sums]
        self.merge(batch, round, ids)

    def _fits(self, leaves: list[Tree], form: tree.Form) -> bool:
        """Whether a single reply can be added where the sum lies: large models come one after the other."""
        return (
            self.total is not None
            and form == self.form
            and all(
                isinstance(leaf, Tensor)
                and leaf.dtype == dtype == torch.float32
                and leaf.shape[1:] == total.shape
                and total.is_contiguous()
                for leaf, total, dtype in zip(leaves, self.total, self.dtypes, strict=True)
            )
        )

    def merge(self, other: Accumulator, round: int, ids: Tensor) -> None:
        """Add another sum, of the clients `ids`."""
        if self.total is None:
            self.total, self.rest, self.dtypes, self.form = other.total, other.rest, other.dtypes, other.form
            return
        if other.form != self.form or [p.shape for p in other.total] != [t.shape for t in self.total]:
            raise ReplyError(f"round {round}: clients {ids.tolist()[:5]} replied with another structure than those before")
        for i, (t, p) in enumerate(zip(self.total, other.total, strict=True)):
            if self.rest[i] is None or other.rest[i] is None:
                t.add_(p)
                continue
            total = t + p  # and what rounding took from it, exactly (Knuth's two-sum)
            grown = total - t
            self.rest[i] += (t - (total - grown)) + (p - grown) + other.rest[i]
            self.total[i] = total

    def result(self) -> Tree:
        sums = (t if r is None else t + r for t, r in zip(self.total, self.rest, strict=True))
        return tree.unflatten([t.to(d) for t, d in zip(sums, self.dtypes, strict=True)], self.form)


def _weighted_sum(leaf: Tree, weights: Tensor) -> tuple[Tensor, torch.dtype]:
    """The sum, in double precision, and the precision that the result should have."""
    if hasattr(leaf, "weighted_sum"):
        found = leaf.weighted_sum(weights)
        return (found.double() if found.is_floating_point() else found), found.dtype
    if not isinstance(leaf, Tensor):
        raise ReplyError(f"a reply to be averaged holds a {type(leaf).__name__}; only tensors have a mean")
    if not leaf.is_floating_point():
        leaf = leaf.float()
    flat, shape = leaf.reshape(len(leaf), -1), leaf.shape[1:]
    if len(flat) == 1:
        return flat[0].to(torch.float64, copy=True).mul_(weights[0]).view(shape), leaf.dtype
    if flat.numel() <= _SMALL or leaf.dtype == torch.float64:
        return torch.mv(flat.mT.double(), weights.double()).view(shape), leaf.dtype
    # Single precision loses digits over thousands of clients, so only short sums are made in it.
    weights, whole = weights.to(leaf.dtype), len(flat) // _SHORT * _SHORT
    if not whole:
        return torch.mv(flat.mT, weights).double().view(shape), leaf.dtype
    parts = torch.bmm(weights[:whole].view(-1, 1, _SHORT), flat[:whole].view(-1, _SHORT, flat.shape[1]))
    total = parts.sum((0, 1), dtype=torch.float64) + torch.mv(flat[whole:].mT, weights[whole:])
    return total.view(shape), leaf.dtype


def not_finite(
    leaves: list[Tree], round: int, ids: Tensor, what: str = "reply", remedy: str = Algorithm.remedy
) -> DivergenceError:
    """The error that says in which round which of the clients `ids` sent (or keep) a number that is not finite."""
    bad = torch.zeros(len(ids), dtype=torch.bool)
    for leaf in tree.leaves(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            bad |= ~torch.isfinite(leaf.reshape(len(ids), -1)).all(1)
    return diverged(what, round, ids[bad].tolist() or ids.tolist(), remedy)


def diverged(what: str, round: int, clients: list[int], remedy: str) -> DivergenceError:
    """The error for clients whose `what` is not finite, which it keeps: a session may find some here and some there."""
    shown = ", ".join(map(str, clients[:10])) + (f" and {len(clients) - 10} more" if len(clients) > 10 else "")
    error = DivergenceError(
        f"round {round}: the {what} of client{'s' * (len(clients) > 1)} {shown} is not finite (NaN or infinity); {remedy}",
        round,
        clients,
    )
    error.what = what
    return error


class NothingArrived(Exception):  # noqa: N818 - a signal, no error
    """An engine that delays messages has no reply to deliver in this round; unless caught, the round leaves the state as it is."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Replies that come together: of clients `ids` with so many rows, computed from the broadcast of round `version`."""

    ids: Tensor
    sizes: Tensor
    reply: Tree
    stacked: bool
    version: int


def _some(batch: Batch, places: list[int]) -> Batch:
    """Some of the replies of a batch."""
    if not batch.stacked:
        return batch
    at = torch.tensor(places)
    return Batch(batch.ids[at], batch.sizes[at], _tensors(lambda t: t[at], batch.reply), True, batch.version)


class Session(Protocol):
    """What an engine offers for one run: see `foedus.engines.local.Local` for the reference.

    One that delays messages also has `late`, which takes what was sent and says what arrives, and `longest`, the longest round
    trip: see `foedus.engines.delay`. One whose clients are on other machines may have `reduce(ask, weights)`, which adds up
    their replies where they are and returns a `Reduced`: see `foedus.engines.ray`. One whose clients may fail to answer has
    `unsure = True`, `faults`, {client: why}, of the last exchange, and `refuse(client, why)` for answers that turn out to be no
    good: replies from strangers must be of the right round, sender and form when it yields them. One that must not send what is only
    measured has `measures = False`: see `foedus.flower.session`.
    """

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]: ...


@dataclass(eq=False)
class Reduced:
    """Replies that a session has added up: their weighted sum, how many clients replied, and what they sent."""

    total: Accumulator
    clients: int = 0
    sent: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True, eq=False)
class Ask:
    """One exchange: which step, what is sent, to whom, and the key from which each client's key is folded.

    A free one is not sent in earnest (a measurement, or a reference with all rows in one place). `group` tells apart exchanges of
    a round that ask different clients for the same step; `taking` is how many clients take part in the round. `accept` says which
    replies the algorithm must not use: it stays at the server.
    """

    step: str
    payload: dict[str, Tree]
    ids: Tensor
    key: Tensor
    round: int
    exchange: int
    quantise: str | None = None
    free: bool = False
    group: str = ""
    taking: int = 0
    accept: Accept | None = None


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
                total.add(_stacked(batch.reply, batch.stacked), share(batch.sizes), self.round, batch.ids)
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
            each = [not_finite([_stacked(p.reply, p.stacked)], self.round, p.ids) for p in bad]
            clients = sorted(i for error in each for i in error.clients)
            raise diverged("reply", self.round, clients, self.algorithm.remedy)
        ids = torch.cat([p.ids for p in parts])
        order = torch.argsort(ids, stable=True)
        weight = share(torch.cat([p.sizes for p in parts]))[order]
        versions = torch.cat([torch.full_like(p.ids, p.version) for p in parts])[order]
        if all(p.stacked and _form(p.reply) == _form(parts[0].reply) for p in parts):
            reply = parts[0].reply if len(parts) == 1 else _tensors(lambda *ts: torch.cat(ts), *(p.reply for p in parts))
            if bool((order[1:] < order[:-1]).any()):
                reply = _tensors(lambda t: t[order], reply)
            return Replies(ids[order], weight, stacked=reply, versions=versions)
        single = [
            _tensors(lambda t, i=i: t[i], part.reply) if part.stacked else part.reply
            for part in parts
            for i in range(len(part.ids))
        ]
        return Replies(ids[order], weight, separate=[single[i] for i in order.tolist()], versions=versions)

    def stream(self, ask: Ask) -> Iterator[tuple[Tensor, Tree]]:
        """The replies to an exchange batch by batch, with their ids and a leading client dimension; nothing is kept."""
        self.came, batches = self._replies(ask)
        return ((batch.ids, _stacked(batch.reply, batch.stacked)) for batch in batches)

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
            fine = checks.finite(_stacked(batch.reply, batch.stacked), len(batch.ids))
            good += self._kept(batch, dict.fromkeys(torch.nonzero(~fine).flatten().tolist(), NOT_FINITE))
        return good

    def _accepted(self, batch: Batch, accept: Accept) -> list[Batch]:
        """What the algorithm lets pass."""
        try:
            bad = accept(_stacked(batch.reply, batch.stacked))
        except Exception as error:  # whatever a stranger has sent
            if len(batch.ids) > 1:
                return [part for i in range(len(batch.ids)) for part in self._accepted(_some(batch, [i]), accept)]
            bad = {0: str(error) if isinstance(error, ReplyError) else f"its reply cannot be used: {error!r}"}
        return self._kept(batch, bad)

    def _kept(self, batch: Batch, bad: dict[int, str]) -> list[Batch]:
        """A batch without those of its replies that are bad, which are refused; none, if nothing is left."""
        for i, why in bad.items():
            self.refuse(int(batch.ids[i]), why)
        left = [i for i in range(len(batch.ids)) if i not in bad]
        return [batch] if not bad else [_some(batch, left)] if left else []

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
        for ids, reply, stacked in _read(self.session, ask, self.ledger):
            sizes = self.sizes if torch.equal(ids, self.ids) else self.sizes[torch.searchsorted(self.ids, ids)]
            yield Batch(ids, sizes, reply, stacked, self.round)


def _read(session: Session, ask: Ask, ledger: Ledger) -> Iterator[tuple[Tensor, Tree, bool]]:
    """The replies as the server reads them, batch by batch; the ledger is charged with what they are on the wire."""
    for ids, reply, stacked in session.exchange(ask):
        if not ask.free:
            ledger.charge(reply, stacked, len(ids))
        yield ids, wire.dequantise(reply) if ask.quantise else reply, stacked


def add_up(session: Session, ask: Ask, weights: Tensor, remedy: str) -> Reduced:
    """What `Session.reduce` does, for sessions that are near their clients; weights are those of `ask.ids`."""
    reduced = Reduced(Accumulator(remedy))
    for ids, reply, stacked in _read(session, ask, reduced.sent):
        share = weights[torch.searchsorted(ask.ids, ids)]
        reduced.total.add(_stacked(reply, stacked), share, ask.round, ids)
        reduced.clients += len(ids)
    return reduced


def _stacked(reply: Tree, stacked: bool) -> Tree:
    """A reply with its leading client dimension."""
    return reply if stacked else _tensors(lambda t: t.unsqueeze(0), reply)


def cohort(participation: float | Poisson, total: int, key: Tensor) -> Tensor:
    """Positions of the clients that take part in a round, in order."""
    if isinstance(participation, Poisson):
        return torch.nonzero(random.uniform(key, total, torch.float64) < participation.probability).flatten()
    if participation == 1:
        return torch.arange(total)
    return random.subset(key, total, _size(participation, total))


def _size(participation: float, total: int) -> int:
    return max(1, math.floor(participation * total + 0.5))


def expected(participation: float | Poisson, total: int) -> float:
    """The part of all clients that takes part in a round, on average: whole clients, and at least one."""
    return participation.probability if isinstance(participation, Poisson) else _size(participation, total) / total


@dataclass(frozen=True)
class Poisson:
    """Participation in which every client takes part independently, with this probability, in each round.

    A round in which nobody takes part leaves the state as it is.
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigError(f"Poisson({self.probability!r}): the probability must be above 0 and at most 1")
