"""Full passes: averages over all clients, whoever takes part in a round and however late replies
are.

Some equations hold only for averages over the whole federation, and not for those who happen to
take part, or for late replies to several broadcasts. A *pass* asks every client once, in the first
round in which it takes part, and is complete when all have answered; replies to anything else are
not used. An iteration of several passes then takes several rounds, in which the server's state does
not change. If all clients take part and replies are punctual, a pass is one exchange.

    participation p of N clients    about ln(N) / p rounds a pass
    the same, only sums seen        about 1.4 / p^2 rounds, if that is more: clients go in pairs
    delays                          max_i (down_i + up_i) rounds a pass

Every client is sent one question and sends one reply in a pass, and nobody who has answered is
asked again: waiting costs rounds, not bytes. The server keeps the sum of the replies, not the
replies.

If only sums can be seen (secure aggregation), a pass is a sum of sums over disjoint groups of at
least two clients: a client is asked with another one that has not answered either, and an even
number remains, since the last three would have to come together. A client that is asked and fails
to answer is left out of the pass, and of those that follow it in the iteration: a client may keep
what it needs of an earlier pass. If who takes part is secret (differential privacy), or the mean is
a robust one, which is none of groups, a pass is one exchange with the clients of the round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import State, Tree
from foedus.core import waiting
from foedus.core.exchange import NothingArrived
from foedus.errors import ConfigError

if TYPE_CHECKING:
    from foedus.core.clients import Clients


class PassIncomplete(Exception):  # noqa: N818 - a signal, no error
    """Not all clients have answered: the iteration goes on in another round."""


@tree.node
@dataclass(frozen=True, eq=False)
class Pass:
    """An exchange with all clients that is under way.

    Args:
        step: The name of the client step.
        since: The round of its first broadcast.
        due: For each client, the round in which its reply arrives; -1: it was not asked.
        answered: Whether each client has answered.
        total: The sum of n_j times the reply of client j over these; `None` if there are none.
    """

    step: str
    since: int
    due: Tensor
    answered: Tensor
    total: Tree = None


class Passes:
    """The passes of one iteration of an algorithm; see `iterate`.

    `clients` are those of the round, `began` is the round in which the iteration began, and `ids`
    are the ids of the clients that have answered the last pass.
    """

    def __init__(self, clients: Clients, saved: Tree | None = None):
        self.clients = clients
        saved = saved or {"began": clients.round, "done": {}, "open": None, "ids": None}
        self.began, self.ids = saved["began"], saved["ids"]
        self._done, self._open = dict(saved["done"]), saved["open"]

    def save(self) -> Tree:
        """What the next round needs."""
        return {"began": self.began, "done": self._done, "open": self._open, "ids": self.ids}

    @property
    def waiting(self) -> int:
        """The number of clients that have not answered the pass that is under way."""
        return 0 if self._open is None else int((self._wanted & ~self._open.answered).sum())

    def watch(self) -> None:
        """Warn if the clients that are missing take too long."""
        part = self._open
        assert part is not None
        missing = self.clients.network.ids[self._wanted & ~part.answered]
        waiting.watch(self.clients, self.began == 1, part.since, missing)

    @property
    def everyone(self) -> bool:
        """Whether all clients have answered the last pass, and the result is a plain average."""
        plain = self.ids is not None and not (self._robust or self._secret)
        return plain and len(self.ids) == self.clients.total

    @property
    def _wanted(self) -> Tensor:
        """For each client, whether it is asked: not if it failed in a pass of this iteration."""
        network = self.clients.network
        if self.ids is None or self._secret:
            return torch.ones(len(network.ids), dtype=torch.bool)
        return torch.isin(network.ids, self.ids)

    @property
    def _robust(self) -> bool:
        aggregator = self.clients.network.aggregator
        return aggregator is not None and aggregator.checks_replies

    @property
    def _secret(self) -> bool:
        aggregator = self.clients.network.aggregator
        return aggregator is not None and aggregator.draws

    def mean(self, step: Callable, /, **payload: Tree) -> Tree:
        """The average by rows of `step(client, **payload)` over all clients.

        A step can be asked for once in an iteration.

        Args:
            step: A client step: a method of the algorithm.
            **payload: The arguments of the step, the same in all rounds of the pass.

        Raises:
            PassIncomplete: Some clients have not answered; caught by `iterate`.
        """
        name = step.__name__
        if name not in self._done:
            self._done[name] = self._pass(step, payload)
        return self._done[name]

    def _pass(self, step: Callable, payload: dict[str, Tree]) -> Tree:
        clients = self.clients
        if self._robust and not clients.punctual:
            raise ConfigError(
                f"{type(clients.network.algorithm).__name__} with late replies cannot use a robust "
                "mean, which needs all replies at once; use the engine without delays, or leave "
                "aggregation out"
            )
        once = self._robust or self._secret or len(clients) == clients.total
        if once and clients.punctual and self._open is None:
            some = clients.some(self._wanted[clients.positions(clients.ids)])
            value = some.mean(step, **payload)
            self.ids = some.ids if some.answered is None else some.answered
            return value
        if self._open is None and self.began == 1 and not self._done:
            waiting.foresee(clients)
        part = self._open = self._asked(step, payload)
        failed = (part.due >= 0) & (part.due <= clients.round) & ~part.answered
        failed |= ~self._wanted
        if part.total is None or not bool((part.answered | failed).all()):
            raise PassIncomplete
        rows = float(clients.network.sizes[part.answered].sum())
        self._open, self.ids = None, clients.network.ids[part.answered]
        return tree.map(lambda t: t / rows, part.total)

    def _asked(self, step: Callable, payload: dict[str, Tree]) -> Pass:
        """The pass with the replies of this round.

        They answer this pass: a client is asked when its first broadcast has arrived, and the pass
        before it ended with the last reply.
        """
        clients, network = self.clients, self.clients.network
        part = self._open or Pass(
            step.__name__,
            clients.round,
            torch.full((clients.total,), -1),
            torch.zeros(clients.total, dtype=torch.bool),
        )
        answered, due, late = part.answered.clone(), part.due.clone(), network.mail
        places = clients.positions(clients.ids)
        ask = (self._wanted & ~answered)[places] & (due[places] < clients.round)
        if late is not None:  # those whom the first broadcast has reached
            ask &= clients.round - late.delays.down[places] >= part.since
        elif network.aggregator is not None and network.aggregator.hides:
            ask = self._in_groups(ask, int((self._wanted & ~answered).sum()))
        asked = places[ask]
        due[asked] = clients.round + (0 if late is None else late.delays.up[asked])

        if late is None and not len(asked):
            return part
        some = replace(clients.some(ask), waits=late is not None)
        try:
            mean = some.mean(step, **payload)
        except NothingArrived:
            return replace(part, due=due)
        assert some.answered is not None and some.answered_rows is not None
        answered[clients.positions(some.answered)] = True
        rows = float(some.answered_rows.sum())
        total = tree.map(lambda t: t * rows, mean)
        if part.total is not None:
            total = tree.map(torch.add, part.total, total)
        return replace(part, due=due, answered=answered, total=total)

    def _in_groups(self, ask: Tensor, missing: int) -> Tensor:
        """Those to ask so that no sum has one client, and an even number remains."""
        total, cohort = self.clients.total, round(self.clients.participation * self.clients.total)
        if cohort == 2 and total % 2:
            raise ConfigError(
                f"2 of {total} clients a round: pairs of an odd number of clients leave one over, "
                "whose reply secure aggregation would show; use a larger participation"
            )
        count = int(ask.sum())
        count -= (missing - count) % 2
        chosen = torch.zeros_like(ask)
        if count > 1:
            chosen[torch.nonzero(ask).flatten()[:count]] = True
        return chosen


def iterate(iteration: Callable[[Passes, State], State], clients: Clients, state: State) -> State:
    """Make as much of an iteration as the replies that have arrived allow.

    `iteration(passes, state)` is called in every round until it returns; it must be a function of
    the state and of the averages that `passes.mean` returns. Rounds in which it does not return
    leave the state as it is, but for its entry "passes", and their rows of the history have
    `waiting`, the number of clients whose reply is missing.

    Args:
        iteration: Makes one iteration.
        clients: The clients of the round.
        state: The state of the server.
    """
    passes = Passes(clients, state.get("passes"))
    before = State({name: value for name, value in state.items() if name != "passes"})
    try:
        return iteration(passes, before)
    except PassIncomplete:
        clients.log(waiting=passes.waiting)
        passes.watch()
        return before.replace(passes=passes.save())
