"""Many independent repetitions of FedRes at once: rollouts are another dimension of the batch of
clients.

A study of an online learner repeats short runs on small tasks. One after the other, almost all of
the time is overhead of calls; together, a round of all rollouts costs little more than a round of
one. The arithmetic is exactly that of `FedRes`: `foedus.algorithms.fedres.sgd.act` and its server's
step, with the clients of all rollouts in one batch and a global model for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foedus.algorithms.fedres.repeated import Study
from foedus.algorithms.fedres.sgd import FedRes
from foedus.core.delays import Rounds, draw_delays
from foedus.core.progress import RoundProgress
from foedus.errors import ConfigError, SplitError, whole_number

if TYPE_CHECKING:
    import pandas as pd

    from foedus.data.federation import Federation

Make = Callable[["Federation"], FedRes]


def rollouts(
    schemes: Mapping[str, Make],
    feds: Sequence[Federation],
    rounds: int,
    *,
    up: Rounds = 0,
    down: Rounds = 0,
    watch: Callable[[str, int, dict[str, Any]], None] | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Run each scheme on each federation, all federations of a scheme at once.

    Args:
        schemes: {name: function from a federation to a `fd.FedRes`}; a scheme's algorithms may
            differ in their columns alone, and their models must have closed-form gradients and a
            start that is not random (`fd.Linear()`).
        feds: The federations, with equal numbers of clients.
        rounds: Rounds of each rollout.
        up: Delay of replies as in `fd.Delayed`, the same in each rollout.
        down: Delay of broadcasts as in `fd.Delayed`, the same in each rollout.
        watch: Called after each round with the name of the scheme, the round, and {"loss": of each
            rollout's clients in it, "w": the global models}.
        progress: Whether to show progress; `None`: in a terminal.

    Returns:
        A row for each scheme and rollout, with the values that `fd.run` ends with: `own_accuracy`
            (or
        `own_mse`), `own_accuracy_worst`, `online_loss`.

    Example:
        >>> data = fd.load("digits")
        >>> feds = [fd.split(data, "tasks", clients=5, seed=s) for s in range(3)]
        >>> def fedres(fed):
        ...     shared, private = fed.settings["global_features"], fed.settings["local_features"]
        ...     return fd.FedRes(shared=shared, private=private)
        >>> table = fd.rollouts({"FedRes": fedres}, feds, rounds=30, up=1)
        >>> len(table), table.columns.tolist()
        (3, ['scheme', 'rollout', 'own_accuracy', 'own_accuracy_worst', 'online_loss'])
    """
    import pandas as pd

    whole_number("rounds", rounds)
    if not feds or len({len(f) for f in feds}) > 1:
        raise SplitError("feds must be at least one federation, all with as many clients")
    clients = len(feds[0])
    delays = draw_delays(up, down, clients)
    if not schemes:
        raise ConfigError(
            "schemes={} has nothing to run: give {name: function from a federation to a FedRes}"
        )
    parts = []
    with RoundProgress("rollouts", rounds * len(schemes), progress) as bar, torch.no_grad():
        for k, (name, make) in enumerate(schemes.items()):
            study = Study([make(f) for f in feds], feds, delays.up, delays.down)
            for t in range(1, rounds + 1):
                seen = study.round(t)
                if watch is not None:
                    watch(name, t, seen)
                bar.update(k * rounds + t)
            parts.append(
                pd.DataFrame({"scheme": name, "rollout": range(len(feds)), **study.scores()})
            )
    return pd.concat(parts, ignore_index=True)
