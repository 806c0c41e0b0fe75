"""Delays in the network, around any engine: clients act on old broadcasts, and their replies come late.

In round t client i acts on the broadcast of round t - down_i (the first one, until that has come), and the server has its reply in
round t + up_i. A round in which no reply has arrived leaves the server as it is. `start` is before time begins: nothing is late
there, and a reply with nothing in it does not travel. Bytes are charged when they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.exchange import Ask, Batch
from foedus.data.federation import Federation
from foedus.engines.local import Local
from foedus.errors import CheckpointError, ConfigError, whole_number

Delays = int | Sequence[int] | Any
LONGEST = 100_000


@dataclass(frozen=True)
class Delayed:
    """An engine whose messages take time.

    up, down: rounds that a reply and a broadcast take; one number, one for each client (in order of id), or a distribution
    to draw them from once, with `seed`: anything with SciPy's `rvs`, such as `scipy.stats.randint(0, 20)`.

    Example:
        >>> fd.run(fd.FedAvg(fd.Linear()), fed, rounds=50, engine=fd.Delayed(fd.Local(), up=2, down=scipy.stats.poisson(3)))
    """

    engine: Any = Local()  # noqa: RUF009 - frozen
    up: Delays = 0
    down: Delays = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            value = getattr(self, name)
            if not hasattr(value, "rvs"):
                found = _whole(name, [value] if np.ndim(value) == 0 else value)
                object.__setattr__(self, name, found[0] if np.ndim(value) == 0 else tuple(found))
            elif isinstance(value, type) or not hasattr(value, "args"):
                raise ConfigError(
                    f"{name}={value!r} must be a distribution with its parameters, such as scipy.stats.poisson(3)"
                )
        whole_number("seed", self.seed, 0)
        if not hasattr(self.engine, "open") or isinstance(self.engine, type | Delayed):
            raise ConfigError(f"engine={self.engine!r} must be an engine such as fd.Local(), itself without delays")

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> DelayedSession:
        """Draw the delays, and open the engine inside."""
        if algorithm.pooled:  # all rows are in one place: nothing is sent that could be late
            return self.engine.open(algorithm, fed, seed_key)
        up, down = self.delays(len(fed))
        inner = self.engine.open(algorithm, fed, seed_key)
        return DelayedSession(inner, torch.from_numpy(np.sort(fed.ids)), up, down)

    def delays(self, clients: int) -> tuple[Tensor, Tensor]:
        """up and down of so many clients, in order of id."""
        draws = np.random.default_rng(self.seed)
        return tuple(self._draw(name, clients, draws) for name in ("up", "down"))

    def _draw(self, name: str, clients: int, draws: np.random.Generator) -> Tensor:
        value = getattr(self, name)
        if hasattr(value, "rvs"):
            value = value.rvs(size=clients, random_state=draws)
        elif np.ndim(value) == 0:
            value = [value] * clients
        if len(value) != clients:
            raise ConfigError(f"{name} has {len(value)} delays; the federation has {clients} clients: give one for each")
        return torch.tensor(_whole(name, value), dtype=torch.int64)


def _whole(name: str, values: Any) -> list[int]:
    """Whole numbers that are not negative, or an error that names the first that is not."""
    for v in np.asarray(values, dtype=object).tolist() if not isinstance(values, str) else [values]:
        whole = not isinstance(v, bool) and (isinstance(v, Integral) or (isinstance(v, float) and v.is_integer()))
        if not whole or not 0 <= v <= LONGEST:
            raise ConfigError(f"{name} has a delay of {v!r}; delays are whole numbers of rounds, from 0 to {LONGEST}")
    return [int(v) for v in values]


class DelayedSession:
    """A session whose clients are asked with the broadcast that has reached them; `late` keeps their replies on the way."""

    def __init__(self, inner: Any, ids: Tensor, up: Tensor, down: Tensor):
        self.inner, self.ids, self.up, self.down = inner, ids, up, down
        self.longest = int((up + down).max())
        inner.delays, inner.longest = ((up, down) if self.longest else None), self.longest
        self.late = self
        self.round, self.calls = 0, {}
        self.sent: dict[str, list[tuple[int, Tree]]] = {}
        self.mail: dict[str, list[tuple[int, Batch]]] = {}

    def concerns(self, ask: Ask) -> bool:
        """Neither what comes before the first round nor what is only measured goes through the network."""
        return ask.round > 0 and not ask.free

    def _slot(self, ask: Ask) -> str:
        """Which broadcast of a round this is: the same step may be asked for more than once, or of several groups."""
        return f"{ask.step} {ask.group} {self.calls[ask.step, ask.group]}"

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        if not self.concerns(ask):
            yield from self.inner.exchange(ask)
            return
        if ask.round != self.round:
            self.round, self.calls = ask.round, {}
        self.calls[ask.step, ask.group] = self.calls.get((ask.step, ask.group), -1) + 1
        past = self.sent.setdefault(self._slot(ask), [])
        past.append((ask.round, ask.payload))
        oldest = ask.round - int(self.down.max())
        while len(past) > 1 and past[1][0] <= oldest:
            del past[0]
        version = self._versions(ask, ask.ids)
        for v, payload in past:
            if bool((version == v).any()):
                yield from self.inner.exchange(replace(ask, payload=payload, ids=ask.ids[version == v]))

    def _versions(self, ask: Ask, ids: Tensor) -> Tensor:
        """The round of the broadcast that each of these clients acts on: the newest that has reached it."""
        rounds = torch.tensor([r for r, _ in self.sent[self._slot(ask)]])
        seen = torch.searchsorted(rounds, ask.round - self.down[torch.searchsorted(self.ids, ids)], right=True) - 1
        return rounds[seen.clamp(min=0)]

    def post(self, ask: Ask, batch: Batch) -> None:
        """Replies on their way to the server."""
        box = self.mail.setdefault(self._slot(ask), [])
        arrives = ask.round + self.up[torch.searchsorted(self.ids, batch.ids)] * bool(tree.leaves(batch.reply))
        version = self._versions(ask, batch.ids)
        for at, v in torch.stack((arrives, version)).unique(dim=1).T.tolist():
            some = torch.nonzero((arrives == at) & (version == v)).flatten()
            if len(some) == len(batch.ids):
                box.append((at, replace(batch, version=v)))
                continue
            pick = lambda t, some=some: t.index_select(0, some) if isinstance(t, Tensor) else t  # noqa: E731
            box.append((at, Batch(batch.ids[some], batch.sizes[some], tree.map(pick, batch.reply), True, v)))

    def collect(self, ask: Ask) -> list[Batch]:
        """What has arrived by now."""
        box = self.mail[self._slot(ask)]
        here = [batch for at, batch in box if at <= ask.round]
        self.mail[self._slot(ask)] = [(at, batch) for at, batch in box if at > ask.round]
        return here

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> Tree:
        """The client states, and all that is on its way."""
        boxes = {
            name: [[at, b.ids, b.sizes, b.reply, b.stacked, b.version] for at, b in box] for name, box in self.mail.items()
        }
        sent = {name: [list(entry) for entry in past] for name, past in self.sent.items()}
        return {**self.inner.save(), "late": {"up": self.up, "down": self.down, "sent": sent, "mail": boxes}}

    def load(self, saved: Tree) -> None:
        """Take up what a checkpoint has."""
        late = saved.get("late")
        if late is None or not torch.equal(late["up"], self.up) or not torch.equal(late["down"], self.down):
            raise CheckpointError("the checkpoint was made with other delays: use the same up, down and seed of fd.Delayed")
        self.sent = {name: [(r, payload) for r, payload in past] for name, past in late["sent"].items()}
        self.mail = {name: [(at, Batch(*rest)) for at, *rest in box] for name, box in late["mail"].items()}
        self.inner.load({k: v for k, v in saved.items() if k != "late"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
