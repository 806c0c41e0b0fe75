"""Delays in the network, around any engine: clients act on old broadcasts, and their replies come
late; see `foedus.core.delays`.

In round t client i acts on the broadcast of round t - down_i (the first one, until that has
arrived), and the server has its reply in round t + up_i. A round in which no reply has arrived
leaves the server unchanged. `start` is not delayed, and empty replies are not sent. Bytes are
charged when they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from torch import Tensor

from foedus.base.settings import Settings, check_settings
from foedus.core.algorithm import Algorithm
from foedus.core.delays import Delays, Rounds, draw_delays, whole_rounds
from foedus.core.session import Session
from foedus.data.federation import Federation
from foedus.engines.local import Local
from foedus.errors import ConfigError


@dataclass(frozen=True)
class Delayed(Settings):
    """An engine whose messages take time.

    Args:
        engine: The engine inside.
        up: Rounds that a reply takes: one number, one for each client (in order of id), or a
            distribution to draw them from once: anything with SciPy's `rvs`, such as
            `scipy.stats.randint(0, 20)`.
        down: Rounds that a broadcast takes, as `up`.
        seed: Seed of the drawn delays.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> late = fd.Delayed(fd.Local(), up=1, down=2)
        >>> run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=8, engine=late)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True
    """

    engine: Any = Local()  # noqa: RUF009 - frozen
    up: Rounds = 0
    down: Rounds = 0
    seed: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            value = getattr(self, name)
            if not hasattr(value, "rvs"):
                found = whole_rounds(name, [value] if np.ndim(value) == 0 else value)
                object.__setattr__(self, name, found[0] if np.ndim(value) == 0 else tuple(found))
            elif isinstance(value, type) or not hasattr(value, "args"):
                raise ConfigError(
                    f"{name}={value!r} must be a distribution with its parameters, such as "
                    "scipy.stats.poisson(3)"
                )
        check_settings(self)
        if not hasattr(self.engine, "open") or isinstance(self.engine, type | Delayed):
            raise ConfigError(
                f"engine={self.engine!r} must be an engine such as fd.Local(), itself without "
                "delays"
            )

    def open(self, algorithm: Algorithm, fed: Federation, seed_key: Tensor) -> Session:
        """Draw the delays, open the engine inside, and tell its clients."""
        if algorithm.pooled:  # all rows are in one place: nothing is sent that could be late
            return self.engine.open(algorithm, fed, seed_key)
        delays = self.delays(len(fed))
        session = self.engine.open(algorithm, fed, seed_key)
        if delays.longest:
            session.delay(delays)
        return session

    def delays(self, clients: int) -> Delays:
        """Delays of this number of clients, in order of id."""
        return draw_delays(self.up, self.down, clients, self.seed)
