"""Runs with a history made by hand."""

from __future__ import annotations

from foedus import Central, FedAvg, Independent
from foedus.base.spec import Spec
from foedus.base.tree import State
from foedus.core.describe import to_config
from foedus.core.history import History
from foedus.core.result import Run


def fake_run(
    metric,
    *,
    algorithm=None,
    name="accuracy",
    up=1_000_000,
    down=500_000,
    seconds=0.5,
    seed=0,
    own=None,
):
    """A run whose round t has metric[t], and cost t * (up, down) bytes and t * seconds.

    None: not evaluated.
    """
    algorithm = algorithm or FedAvg()
    rows = []
    for t, value in enumerate(metric):
        row = {
            "round": t,
            "seconds": t * seconds,
            "bytes_up": t * up,
            "bytes_down": t * down,
            "messages_up": t,
            "clients": 2,
        }
        row |= {} if value is None else {name: value, "loss": 1.0}
        row |= {} if own is None else {f"own_{name}": own[t]}
        rows.append(row)
    scheme = "pool" if algorithm.pooled else "iid"
    settings = {
        "algorithm": to_config(algorithm),
        "federation": {
            "data": "toy",
            "scheme": scheme,
            "settings": {"clients": 2},
            "clients": 2,
            "rows": 8,
        },
        "seed": seed,
        "participation": 1.0,
        "evaluate_every": 1,
        "quantise": None,
    }
    spec = Spec((3,), 2 if name == "accuracy" else None, 2 if name == "accuracy" else 1)
    return Run(algorithm, spec, State(), History(rows), settings)


def central(metric, **options):
    return fake_run(metric, algorithm=Central(), up=0, down=0, **options)


def independent(metric, own, **options):
    return fake_run(metric, algorithm=Independent(), up=0, down=0, own=own, **options)
