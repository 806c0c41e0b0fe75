"""Secure aggregation as part of a run: what `clients.mean` and `clients.sum` go through with `fd.run(..., aggregation=fd.SecureAggregation())`."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from foedus import wire
from foedus.aggregation.dp.accounted import Accounted
from foedus.aggregation.dp.distributed import APART, Share
from foedus.aggregation.dp.mechanism import blank
from foedus.aggregation.secure.fixedpoint import Noise, dense
from foedus.aggregation.secure.protocol import SecureAggregation, single_replies
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
    from foedus.core.clients import Clients
    from foedus.core.exchange import Ask, Replies


class SecureAggregator(Aggregator):
    """Runs the protocol for every average and every sum of a run; a single reply is refused unless it is empty.

    Weights are numbers of rows, or 1. Where the session has `phase`, its clients are elsewhere and do their part there
    (`foedus.engines.flower.session`); otherwise they do it in this process, and only what clients do before anything is sent sees replies. All messages of
    the four phases are charged as they are encoded; what a step is asked with goes with `mask`, to those who are left then.

    noise: gives whole numbers that each client adds to its fixed-point numbers, within `headroom`; in this process only.
    """

    clip: float | None = None
    """The largest norm of a reply, to which clients in this process scale longer ones down."""

    def __init__(self, config: SecureAggregation, setting: Setting, noise: Noise | None = None):
        self.config, self.setting, self.noise = config, setting, noise
        self.remote = hasattr(setting.session, "phase")
        self.phases: dict[str, Phase] = {}
        total, part = len(setting.ids), setting.participation
        if setting.quantise is not None:
            raise ConfigError(
                f"quantise={setting.quantise!r} and secure aggregation do not go together: replies are sent as fixed-point "
                "numbers; use SecureAggregation(bits=...) for shorter ones"
            )
        if getattr(setting.session, "longest", 0):
            raise ConfigError(
                "fd.Delayed and secure aggregation do not go together: clients mask their replies for those who answer in the same "
                "exchange, so none can come later; use the engine without delays"
            )
        if total < 2 or (not isinstance(part, Poisson) and cohort_size(part, total) < 2):
            why = f"participation={part:g} is 1 client a round" if total > 1 else "there is 1 client"
            raise ConfigError(f"secure aggregation needs at least 2 clients in a sum, or it would be a reply; {why}")
        if self.remote:
            if noise is not None:
                raise ConfigError("noise is added in this process only; sites know nothing of it")
            setting.session.secure(config)

    def total(self, clients: Clients, ask: Ask, weights: str | None) -> Tree:
        total = self._summed(clients, ask, weights)
        return total.cast() if weights is None else total.mean()

    def _summed(self, clients: Clients, ask: Ask, weights: str | None) -> Total:
        """The weighted sum, and whose replies are in it."""
        session, sizes = clients.session, dict(zip(clients.ids.tolist(), clients.sizes.tolist(), strict=True))
        here = session.present(ask) if self.remote else list(sizes)
        if len(here) < 2:
            raise TooFewClients(
                f"round {ask.round}: {len(here)} client is asked for {ask.step}; secure aggregation needs at least 2, or the sum would be "
                "its reply; use a larger participation"
            )
        clients._share_of(weights, clients.sizes)  # refuses what is no kind of weights
        own = {i: sizes[i] if weights == "rows" else 1 for i in here}
        name = session.common["session"] if self.remote else uuid.uuid4().hex
        server = SecureServer(self.settings(ask, len(here)), own, session=name, round=ask.round, exchange=ask.exchange)
        try:
            total = self._conduct(clients, ask, weights, server)
        finally:
            if self.remote:
                session.leave(server.faults)
            clients._left_out(session.faults if self.remote else server.faults)
        if self.remote:
            session.settle(ask, total.ids)
        clients.who = torch.tensor(total.ids)
        clients.came = clients.sizes[torch.searchsorted(clients.ids, clients.who)]
        return total

    def settings(self, ask: Ask, clients: int) -> SecureAggregation:
        """Those of one exchange, with so many clients."""
        return self.config

    def _conduct(self, clients: Clients, ask: Ask, weights: str | None, server: SecureServer) -> Total:
        """All phases, charged to the ledger."""
        self.phases, ledger = {}, clients.ledger
        if self.remote:

            def inner(phase: str, questions: dict[int, Tree]) -> Iterator[tuple[int, Tree]]:
                clients.session.leave(server.faults)
                clients.session.enough(ask)
                yield from clients.session.phase(ask, phase, questions, weights, self.told(ask)).items()
        else:
            absent = lambda phase: self.absent(phase, ask)  # noqa: E731
            replies = lambda ids: self._replies(clients, replace(ask, ids=torch.tensor(ids)))  # noqa: E731
            inner = Simulated(server.config, server.weights, replies, self.noise, absent, self.clip).ask

        def asking(phase: str, questions: dict[int, Tree]) -> Iterator[tuple[int, Tree]]:
            if phase == "mask":
                ledger.bytes_down -= (len(clients) - len(questions)) * wire.nbytes(ask.payload)
            yield from counted(inner, self.phases)(phase, questions)
            cost = self.phases[phase]
            ledger.bytes_up += cost.up
            ledger.bytes_down += cost.down
            ledger.messages_up += cost.messages

        return conduct(server, asking)

    def _replies(self, clients: Clients, ask: Ask) -> Iterator[tuple[int, Tree]]:
        """The replies of clients in this process, one after the other, as each is about to mask its own."""
        if not len(ask.ids):
            return
        for ids, reply, many in clients.session.exchange(ask):
            batch = Batch(ids, clients.sizes[torch.searchsorted(clients.ids, ids)], stacked_reply(reply, many), True, ask.round)
            if not tree.all_finite(batch.reply):
                raise not_finite([batch.reply], ask.round, ids, remedy=clients.algorithm.remedy)
            reply = self.sent(batch)
            for n, i in enumerate(ids.tolist()):
                yield i, tree.map(lambda t, n=n: t[n] if isinstance(t, torch.Tensor) else t, reply)

    def told(self, ask: Ask) -> dict[str, Any]:
        """What sites must know of an exchange besides."""
        return {}

    def sent(self, batch: Batch) -> Tree:
        """What clients in this process make of their replies (stacked) before they encode them: to clip them, say."""
        return batch.reply

    def absent(self, phase: str, ask: Ask) -> Collection[int]:
        """Clients in this process who do not answer from this phase of an exchange on: nobody. Simulated dropouts go here."""
        return ()

    def gathered(self, clients: Clients, ask: Ask, replies: Replies) -> None:
        if any(tree.leaves(reply) for reply in ([replies.stacked] if replies.separate is None else replies.separate)):
            raise single_replies(clients.algorithm, ask.step)


class PrivateSecureAggregator(Accounted, SecureAggregator):
    """Clients clip, and add their shares of the noise, before they mask: see `foedus.aggregation.dp.distributed`.

    All clients are asked in every round. Each draws for itself whether it takes part, and sends noise alone if it does not. An average is the
    sum over the number that is expected to take part of those whose messages are in it.
    """

    apart = APART

    def __init__(self, config: SecureAggregation, setting: Setting):
        Accounted.__init__(self, config.privacy, setting)
        SecureAggregator.__init__(self, config, setting)
        if self.remote and config.privacy.entropy is not None:
            raise ConfigError("entropy is for tests in this process: sites draw their noise themselves; leave entropy out")
        everybody = len(setting.ids)
        Share(config, 1.0, everybody).settings.fixed_point.width(everybody, everybody)  # refuses what has no room
        self.member: torch.Tensor | None = None  # of clients in this process

    def among(self, clients: Clients) -> Clients:
        """All of them: who takes part is for nobody to know."""
        if self._begin(clients) and not self.remote:
            self.member = self._draw()
        return clients

    def total(self, clients: Clients, ask: Ask, weights: str | None) -> Tree:
        clients._share_of(weights, clients.sizes)  # refuses what is no kind of weights
        self._charge(ask)
        total = self._summed(clients, ask, "uniform")  # whatever their numbers of rows
        if not tree.leaves(total.sum):
            self._nothing()
        return total.cast(1.0 if weights is None else self.open_round[0] * len(total.ids))

    def settings(self, ask: Ask, clients: int) -> SecureAggregation:
        share = Share(self.config, self.privacy.clip_of(ask.step), clients)
        self.noise, self.clip = share.noise, share.clip
        return share.settings

    def told(self, ask: Ask) -> dict[str, Any]:
        return {"step": ask.step, "cohort": self.cohort, "probability": self.open_round[0]}

    def _replies(self, clients: Clients, ask: Ask) -> Iterator[tuple[int, Tree]]:
        """The replies of those who take part, and zeros of the others."""
        taking = self.member[torch.searchsorted(self.ids, ask.ids)]
        form = None
        for i, reply in super()._replies(clients, replace(ask, ids=ask.ids[taking])):
            yield i, reply
            form = reply
        if form is None:
            form = tree.map(lambda t: t[0] if isinstance(t, torch.Tensor) else t, blank(clients, ask))
        zeros = tree.map(torch.zeros_like, dense(form))
        yield from ((i, zeros) for i in ask.ids[~taking].tolist())
