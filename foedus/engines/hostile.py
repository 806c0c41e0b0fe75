"""Hostile clients, simulated: around an engine, some clients send wrong replies.

The session treats its clients as untrusted, as with real sites: a reply that fails a check is left
out of the round, named and counted, and the run continues. The server does not know which clients
are hostile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from annotated_types import Gt, Interval
from torch import Tensor

from foedus import wire
from foedus.base import random, tree
from foedus.base.settings import Means, Settings, check_settings
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.delays import Delays
from foedus.core.exchange import Ask
from foedus.core.session import Session
from foedus.data.federation import Federation
from foedus.data.poison import poison
from foedus.engines.delayed import Delayed
from foedus.engines.local import Local
from foedus.errors import CheckpointError, ConfigError, WireError
from foedus.wire.arrays import STRUCTURED, LowRank, Quantised, Signs, Sparse, Trees
from foedus.wire.checks import form_of

Attack = Literal["sign_flip", "scale", "nan", "stale", "garbage", "label_flip"]
ATTACKS: tuple[str, ...] = get_args(Attack)
_DRAW, _GARBAGE = 0xFFFFFFFB, 0xFFFFFFFA


@dataclass(frozen=True)
class Hostile(Settings):
    """An engine with some hostile clients.

    The attacks:

        "sign_flip"   -strength times the honest reply (strength 1 unless given)
        "scale"       strength times the honest reply (10 unless given)
        "nan"         numbers that are not finite
        "stale"       the first reply, repeated in every round
        "garbage"     random bytes in place of a message
        "label_flip"  honest replies from flipped labels (`fd.poison`)

    Measurements for the history are not attacked. Put delays around it:
    `fd.Delayed(fd.Hostile(...), up=2)`.

    Args:
        engine: The engine inside.
        clients: Ids of the hostile clients, or their fraction of all clients, drawn by the seed of
            the run.
        attack: What they send.
        strength: Factor of "sign_flip" and "scale".

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> hostile = fd.Hostile(clients=0.3, attack="sign_flip", strength=10.0)
        >>> plain = fd.run(fd.FedAvg(fd.Linear()), fed, 5, engine=hostile)
        >>> robust = fd.run(fd.FedAvg(fd.Linear()), fed, 5, engine=hostile, aggregation=fd.Median())
        >>> bool(plain.history.accuracy.iloc[-1] < robust.history.accuracy.iloc[-1])
        True
    """

    engine: Any = Local()  # noqa: RUF009 - frozen
    clients: Annotated[
        Annotated[float, Interval(ge=0, le=1)] | Sequence[int],
        Means("a part from 0 to 1, or a list of client ids"),
    ] = 0.2
    attack: Attack = "sign_flip"
    strength: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.engine, "open") or isinstance(self.engine, type | Delayed | Hostile):
            raise ConfigError(
                f"engine={self.engine!r} must be fd.Local() or fd.Ray(); delays go around: "
                "fd.Delayed(fd.Hostile(...))"
            )
        check_settings(self)
        if isinstance(self.clients, Sequence):
            object.__setattr__(self, "clients", tuple(sorted({int(i) for i in self.clients})))

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> Session:
        """Draw the hostile clients, and open the engine inside."""
        if algorithm.pooled:  # all rows are in one place: nothing is sent
            return self.engine.open(algorithm, fed, seed_key)
        hostile = self.who(torch.from_numpy(fed.ids).sort().values, seed_key)
        flipped = poison(fed, hostile.tolist())  # also raises on unknown client ids
        inner = self.engine.open(
            algorithm, flipped if self.attack == "label_flip" else fed, seed_key
        )
        if not inner.conditions.trusted:
            inner.close()
            raise ConfigError(
                f"engine={self.engine!r}: hostile clients are simulated with fd.Local() or fd.Ray()"
            )
        return HostileSession(inner, self, hostile)

    def who(self, ids: Tensor, seed_key: Tensor) -> Tensor:
        """The ids of the hostile clients, of all of these."""
        if isinstance(self.clients, Sequence):
            return torch.tensor(self.clients, dtype=torch.int64)
        count = int(self.clients * len(ids) + 0.5)
        return ids[random.permutation(random.fold(seed_key, _DRAW), len(ids))[:count]].sort().values


class HostileSession(Session):
    """A session that corrupts some replies."""

    def __init__(self, inner: Session, settings: Hostile, hostile: Tensor):
        self.inner, self.settings, self.hostile = inner, settings, hostile
        self.conditions = replace(inner.conditions, trusted=False)
        self.faults: dict[int, str] = {}
        self.last = (-1, -1)
        # what each hostile client sent at first, by step
        self.first: dict[str, dict[str, Tree]] = {}

    def exchange(self, ask: Ask) -> Iterator[tuple[Tensor, Tree, bool]]:
        """The replies, some of them corrupted; messages that cannot be read are left out."""
        if self.last != (ask.round, ask.exchange):  # late broadcasts make several of one exchange
            self.last, self.faults = (ask.round, ask.exchange), {}
        attack, strength = self.settings.attack, self.settings.strength
        factors = {"sign_flip": -(strength or 1.0), "scale": strength or 10.0, "nan": torch.nan}
        for ids, reply, stacked in self.inner.exchange(ask):
            bad = torch.isin(ids, self.hostile)
            if ask.free or attack == "label_flip" or not bool(bad.any()):
                yield ids, reply, stacked
            elif attack in factors:
                factor = torch.where(bad, factors[attack], 1.0)
                yield ids, _times(reply, factor if stacked else factor[0]), stacked
            else:
                yield from self._replaced(ask, ids, reply, stacked, bad)

    def _replaced(
        self, ask: Ask, ids: Tensor, reply: Tree, stacked: bool, bad: Tensor
    ) -> Iterator[tuple[Tensor, Tree, bool]]:
        """Replies with those of hostile clients replaced, if the replacement can be decoded and has
        the expected form.
        """
        one = (lambda i: _pick(reply, i)) if stacked else (lambda i: reply)
        others: dict[int, Tree] = {}
        for i in torch.nonzero(bad).flatten().tolist():
            client, honest = int(ids[i]), one(i)
            if self.settings.attack == "garbage":
                try:
                    others[i] = wire.decode(_garbage(ask, client, wire.nbytes(honest)))
                except WireError as error:
                    self.refuse(client, str(error))
                continue
            sent = self.first.setdefault(ask.step, {}).setdefault(str(client), honest)
            if form_of(sent) == form_of(honest):
                others[i] = sent
            else:
                self.refuse(client, "its reply has the form of an earlier exchange")
        keep = [i for i in range(len(ids)) if not bad[i] or i in others]
        if not stacked:
            yield from ((ids, others.get(0, reply), False) for _ in keep)
        elif keep:
            pieces = [others[i] if i in others else one(i) for i in keep]
            joined = tree.map(
                lambda t, *ts: torch.stack((t, *ts)) if isinstance(t, Tensor) else t, *pieces
            )
            yield ids[keep], joined, True

    def refuse(self, client: int, why: str) -> None:
        """A reply that is left out."""
        self.faults[client] = why

    def delay(self, delays: Delays) -> None:
        super().delay(delays)
        self.inner.delay(delays)

    def evaluate_own(self, metrics: Sequence[str] = ()) -> dict[str, Tensor]:
        return self.inner.evaluate_own(metrics)

    def evaluate_global(
        self, x: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self.inner.evaluate_global(x, y, weight)

    def keep(self, folder: Path) -> None:
        self.inner.keep(folder)

    def save(self) -> Tree:
        """The client states, and what hostile clients keep."""
        return {**self.inner.save(), "hostile": {"ids": self.hostile, "first": self.first}}

    def load(self, saved: Tree) -> None:
        """Restore the states of a checkpoint."""
        kept = saved.get("hostile")
        if kept is None or not torch.equal(kept["ids"], self.hostile):
            raise CheckpointError(
                "the checkpoint was made with other hostile clients: use the same clients= of "
                "fd.Hostile"
            )
        self.first = kept["first"]
        self.inner.load({k: v for k, v in saved.items() if k != "hostile"})

    def close(self) -> None:
        self.inner.close()


def _pick(reply: Tree, i: int) -> Tree:
    return tree.map(lambda t: t[i].clone() if isinstance(t, Tensor) else t, reply)


def _garbage(ask: Ask, client: int, size: int) -> bytes:
    """Random bytes, as long as the message would have been."""
    drawn = random.words(
        random.fold(random.fold(ask.key, ask.round, ask.exchange, client), _GARBAGE),
        max(1, -(-size // 4)),
    )
    return drawn.to(torch.int32).numpy().tobytes()[: max(1, size)]


def _times(reply: Tree, factor: Tensor) -> Tree:
    """Replies times a factor, or a factor for each client; integers are unchanged."""

    def times(t: Tensor) -> Tensor:
        return (
            t * factor.to(t.dtype).reshape(-1, *[1] * (t.dim() - 1))
            if factor.dim()
            else t * factor.to(t.dtype)
        )

    def one(t: Tree) -> Tree:
        if isinstance(t, Sparse):
            return replace(t, values=times(t.values))
        if isinstance(t, LowRank):
            return replace(t, left=times(t.left))
        if isinstance(t, Signs | Quantised):
            return replace(t, scale=times(t.scale))
        if isinstance(t, Trees):
            return replace(t, value=times(t.value))
        return times(t) if isinstance(t, Tensor) and t.is_floating_point() else t

    return tree.pytree.tree_map(one, reply, is_leaf=lambda t: isinstance(t, STRUCTURED))
