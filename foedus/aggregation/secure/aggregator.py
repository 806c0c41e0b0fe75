"""Secure aggregation as part of a run: how `clients.mean` and `clients.sum` are computed with
`fd.run(..., aggregation=fd.SecureAggregation())`.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from foedus import wire
from foedus.aggregation.dp.accounted import Accounted
from foedus.aggregation.dp.distributed import APART, Share
from foedus.aggregation.dp.mechanism import blank, first
from foedus.aggregation.secure.fixedpoint import Noise, dense
from foedus.aggregation.secure.protocol import SecureAggregation, question_of, single_replies
from foedus.aggregation.secure.server import SecureServer, Total
from foedus.aggregation.secure.simulated import Phase, Simulated, conduct, counted
from foedus.base import tree
from foedus.core.aggregation import Aggregator, Setting
from foedus.core.exchange import Batch, stacked_reply
from foedus.core.participation import Poisson, cohort_size
from foedus.core.reduce import not_finite
from foedus.errors import ConfigError, TooFewClients

if TYPE_CHECKING:
    from foedus.base.tree import Tree
    from foedus.core.exchange import Ask, Replies
    from foedus.core.network import RoundTrip


class SecureAggregator(Aggregator):
    """Runs the protocol for every average and sum of a run; single replies are refused unless they
    are empty.

    Weights are numbers of rows, or 1. If the session has `phase`, its clients run elsewhere
    (`foedus.engines.flower.session`); otherwise they run in this process, and only their own steps
    see their replies. All messages of the four phases are charged at their encoded length; the
    payload of a step is sent with `mask`, to the clients that are left then.

    noise: returns integers that each client adds to its fixed-point numbers, within `headroom`; in
    this process only.
    """

    hides = True

    clip: float | None = None
    """The largest norm of a reply, to which clients in this process scale longer ones down."""

    def __init__(self, config: SecureAggregation, setting: Setting, noise: Noise | None = None):
        self.config, self.setting, self.noise = config, setting, noise
        self.phases: dict[str, Phase] = {}
        self.bounds: dict[str, float | None] = {}  # of replies, by step
        total, part = len(setting.ids), setting.participation
        delays = setting.session.conditions.delays
        if setting.quantise is not None:
            raise ConfigError(
                f"quantise={setting.quantise!r} and secure aggregation do not go together: replies "
                "are sent as fixed-point numbers; use SecureAggregation(bits=...) for shorter ones"
            )
        if delays is not None and delays.longest:
            raise ConfigError(
                "fd.Delayed and secure aggregation do not go together: clients mask their replies "
                "for those who answer in the same "
                "exchange, so none can come later; use the engine without delays"
            )
        if total < 2 or (not isinstance(part, Poisson) and cohort_size(part, total) < 2):
            why = (
                f"participation={part:g} is 1 client a round" if total > 1 else "there is 1 client"
            )
            raise ConfigError(
                "secure aggregation needs at least 2 clients in a sum, or it would be a reply; "
                f"{why}"
            )
        self.channel = setting.session.secure(config)
        if self.channel is not None and noise is not None:
            raise ConfigError("noise is added in this process only; sites know nothing of it")

    def total(self, trip: RoundTrip, weights: str | None) -> Tree:
        total = self._summed(trip, weights)
        return total.cast() if weights is None else total.mean()

    def _summed(self, trip: RoundTrip, weights: str | None) -> Total:
        """The weighted sum, and the clients whose replies are in it."""
        ask, channel = trip.asked(), self.channel
        sizes = dict(zip(trip.ids.tolist(), trip.sizes.tolist(), strict=True))
        here = list(sizes) if channel is None else channel.present(ask)
        if len(here) < 2:
            raise TooFewClients(
                f"round {ask.round}: {len(here)} client is asked for {ask.step}; secure "
                "aggregation needs at least 2, or the sum would be "
                "its reply; use a larger participation"
            )
        trip.shares(weights, trip.sizes)  # refuses unknown weights
        own = {i: sizes[i] if weights == "rows" else 1 for i in here}
        name = uuid.uuid4().hex if channel is None else channel.name
        extra = self.extra(ask)
        question = (
            question_of(ask.step, weights, extra)
            if channel is None
            else channel.question(ask, weights, extra)
        )
        server = SecureServer(
            self.settings(trip, ask, len(here)), own, session=name, round=ask.round,
            exchange=ask.exchange, question=question,
        )  # fmt: skip
        try:
            total = self._conduct(trip, ask, weights, server)
        finally:
            if channel is not None:
                channel.leave(server.faults)
            trip.drop(server.faults if channel is None else channel.faults)
        if channel is not None:
            channel.settle(ask, total.ids)
        trip.answered = torch.tensor(total.ids)
        trip.answered_rows = trip.sizes[torch.searchsorted(trip.ids, trip.answered)]
        return total

    def settings(self, trip: RoundTrip, ask: Ask, clients: int) -> SecureAggregation:
        """The settings of one exchange with this number of clients."""
        if ask.step not in self.bounds:
            self.bounds[ask.step] = trip.algorithm.reply_bound(ask.step, trip.network.spec)
        return self.config.bounded_by(self.bounds[ask.step])

    def _conduct(
        self, trip: RoundTrip, ask: Ask, weights: str | None, server: SecureServer
    ) -> Total:
        """All phases, charged to the ledger."""
        self.phases, channel = {}, self.channel
        sizes = {i: wire.nbytes(message) for ids, message in ask.messages() for i in ids.tolist()}
        if channel is not None:

            def inner(phase: str, questions: dict[int, Tree]) -> Iterator[tuple[int, Tree]]:
                channel.leave(server.faults)
                channel.enough(ask)
                yield from channel.phase(
                    ask, phase, questions, weights, self.extra(ask), self.published(server.config)
                ).items()
        else:
            absent = lambda phase: self.absent(phase, ask)  # noqa: E731
            replies = lambda ids: self._replies(trip, ask.of(torch.tensor(ids)))  # noqa: E731
            inner = Simulated(
                server.config, server.weights, replies, self.noise, absent, self.clip
            ).ask

        def asking(phase: str, questions: dict[int, Tree]) -> Iterator[tuple[int, Tree]]:
            if phase == "mask":  # charged to all clients, not sent to dropouts
                trip.charge(down=-sum(size for i, size in sizes.items() if i not in questions))
            yield from counted(inner, self.phases)(phase, questions)
            cost = self.phases[phase]
            trip.charge(cost.up, cost.down, cost.messages)

        return conduct(server, asking)

    def _replies(self, trip: RoundTrip, ask: Ask) -> Iterator[tuple[int, Tree]]:
        """The replies of clients in this process, one after the other, as each is about to mask its
        own.
        """
        if not len(ask.ids):
            return
        for ids, reply, many in trip.network.session.exchange(ask):
            batch = Batch(
                ids,
                trip.sizes[torch.searchsorted(trip.ids, ids)],
                stacked_reply(reply, many),
                True,
                ask.round,
            )
            if not tree.all_finite(batch.reply):
                raise not_finite([batch.reply], ask.round, ids, remedy=trip.algorithm.remedy)
            reply = self.sent(batch)
            for n, i in enumerate(ids.tolist()):
                yield i, tree.map(lambda t, n=n: t[n] if isinstance(t, torch.Tensor) else t, reply)

    def extra(self, ask: Ask) -> dict[str, Any]:
        """What sites must know about an exchange in addition."""
        return {}

    def published(self, settings: SecureAggregation) -> SecureAggregation:
        """The settings of an exchange that sites are sent."""
        return settings

    def sent(self, batch: Batch) -> Tree:
        """Transforms the stacked replies of clients in this process before they are encoded, for
        example clips them.
        """
        return batch.reply

    def absent(self, phase: str, ask: Ask) -> Collection[int]:
        """Clients in this process that stop answering in this phase of an exchange: none.

        Overridden to simulate dropouts.
        """
        return ()

    def gathered(self, trip: RoundTrip, replies: Replies) -> None:
        if any(
            tree.leaves(reply)
            for reply in ([replies.stacked] if replies.separate is None else replies.separate)
        ):
            raise single_replies(trip.algorithm, trip.step)


class PrivateSecureAggregator(Accounted, SecureAggregator):
    """Clients clip and add their shares of the noise before they mask: see
    `foedus.aggregation.dp.distributed`.

    All clients are asked in every round. Each draws for itself whether it takes part, and sends
    only noise if it does not. An average is the sum divided by q times the number of clients whose
    messages are in it.
    """

    apart = APART

    def __init__(self, config: SecureAggregation, setting: Setting):
        assert config.privacy is not None
        Accounted.__init__(self, config.privacy, setting)
        SecureAggregator.__init__(self, config, setting)
        if self.channel is not None and config.privacy.entropy is not None:
            raise ConfigError(
                "entropy is for tests in this process: sites draw their noise themselves; leave "
                "entropy out"
            )
        everybody = len(setting.ids)
        # refuses what has no room
        Share(config, 1.0, everybody).settings.fixed_point.width(everybody, everybody)
        self.member: torch.Tensor | None = None  # of clients in this process

    def among(self, round: int, ids: torch.Tensor) -> slice:
        """All clients: who takes part is secret."""
        if self._begin(round) and self.channel is None:
            self.member = self._draw()
        return slice(None)

    def total(self, trip: RoundTrip, weights: str | None) -> Tree:
        trip.shares(weights, trip.sizes)  # refuses unknown weights
        self._charge(trip)
        total = self._summed(trip, "uniform")  # whatever their numbers of rows
        if not tree.leaves(total.sum):
            self._nothing()
        return total.cast(1.0 if weights is None else self.chance * len(total.ids))

    def settings(self, trip: RoundTrip, ask: Ask, clients: int) -> SecureAggregation:
        share = Share(self.config, self.privacy.clip_of(ask.step), clients)
        self.noise, self.clip = share.noise, share.clip
        return share.settings

    def published(self, settings: SecureAggregation) -> SecureAggregation:
        return self.config  # sites find clip and noise themselves

    def extra(self, ask: Ask) -> dict[str, Any]:
        return {"step": ask.step, "cohort": self.cohort, "probability": self.chance}

    def _replies(self, trip: RoundTrip, ask: Ask) -> Iterator[tuple[int, Tree]]:
        """The replies of clients that take part, and zeros for the others."""
        assert self.member is not None
        taking = self.member[torch.searchsorted(self.ids, ask.ids)]
        form = None
        for i, reply in super()._replies(trip, ask.of(ask.ids[taking])):
            yield i, reply
            form = reply
        if form is None:
            form = first(blank(trip))
        zeros = tree.map(torch.zeros_like, dense(form))
        yield from ((i, zeros) for i in ask.ids[~taking].tolist())
