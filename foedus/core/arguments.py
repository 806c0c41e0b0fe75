"""Checks of the arguments and checkpoints of `fd.run`, made before any work is done."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foedus.core.aggregation import check_aggregation
from foedus.core.algorithm import Algorithm
from foedus.core.callbacks import check_callbacks
from foedus.core.metrics import CLASSIFICATION, REGRESSION, Metric, OwnMetric, metrics_of
from foedus.core.participation import Poisson
from foedus.core.steer import best_metric, check_steering
from foedus.data.federation import Federation
from foedus.errors import CheckpointError, ConfigError, is_integer, is_number
from foedus.storage import checkpoint as files

NO_TEST_ROWS = (
    "no test rows: the history has no accuracy and no loss; hold some out: fed.holdout(0.25), or "
    "test=0.25 in fd.load, fd.split or Federation.from_clients (evaluate_every=0: no evaluation)"
)

WEIGHTED = (
    "rows have weights: the objective, and the loss and accuracy (or mse) of the history, are "
    "weighted averages over rows"
)


def check_arguments(
    algorithm: Any,
    fed: Any,
    rounds: Any,
    *,
    seed: Any,
    engine: Any,
    participation: Any,
    evaluate_every: Any,
    target: Any,
    quantise: Any,
    aggregation: Any,
    checkpoint: Any,
    checkpoint_every: Any,
    resume: Any,
    callbacks: Any,
) -> None:
    """Raise `ConfigError` for the first argument that is unknown or out of range."""
    if not isinstance(algorithm, Algorithm):
        given = (
            algorithm.__name__ + " (the class: add parentheses)"
            if isinstance(algorithm, type)
            else repr(algorithm)
        )
        raise ConfigError(
            f"algorithm must be a foedus algorithm such as fd.FedAvg(fd.Linear()), not {given}"
        )
    if not hasattr(fed, "offsets"):
        raise ConfigError(
            f"fed must be a federation: fd.split(data, 'iid', clients=10); got {type(fed).__name__}"
        )
    if not algorithm.takes_raw and isinstance(fed, Federation):
        fed.data.refuse_raw()
    for name, value, least in (
        ("rounds", rounds, 0),
        ("evaluate_every", evaluate_every, 0),
        ("checkpoint_every", checkpoint_every, 1),
    ):
        if not is_integer(value) or value < least:
            raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")
    if not isinstance(participation, Poisson) and not (
        isinstance(participation, int | float) and 0 < participation <= 1
    ):
        raise ConfigError(
            f"participation={participation!r} must be a fraction in (0, 1] or fd.Poisson(p)"
        )
    if quantise not in (None, "float16", "bfloat16", "int8"):
        raise ConfigError(f"quantise={quantise!r} must be None, 'float16', 'bfloat16' or 'int8'")
    if not isinstance(resume, bool) and resume != "auto":
        raise ConfigError(f"resume={resume!r} must be True, False or 'auto'")
    if resume and checkpoint is None:
        raise ConfigError(f"resume={resume!r} needs checkpoint=PATH, the file to go on from")
    if not is_integer(seed) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed!r} must be an integer from 0 to 2^63 - 1")
    if engine is not None and (isinstance(engine, type) or not hasattr(engine, "open")):
        raise ConfigError(f"engine={engine!r} must be an engine such as fd.Local()")
    check_aggregation(aggregation)
    check_callbacks(callbacks)
    if target is None:
        return
    if not is_number(target) or not math.isfinite(target):
        raise ConfigError(f"target={target!r} must be a number")
    if fed.spec.classes and not 0 <= target <= 1:
        raise ConfigError(f"target={target!r} is an accuracy, so it must be between 0 and 1")
    if not evaluate_every or not len(fed.data.x_test):
        raise ConfigError(
            f"target={target!r} needs evaluation: test rows, and evaluate_every of at least 1"
        )


def check_measures(
    algorithm: Algorithm,
    fed: Any,
    evaluate_every: int,
    metrics: Any,
    per_client: Any,
    stop: Any,
    keep_best: Any,
    stop_on_growth: Any,
) -> tuple[Metric, ...]:
    """The metrics of a run.

    Raises:
        ConfigError: Something cannot be measured, or a run cannot be stopped by it.
    """
    for name, value in (("per_client", per_client), ("stop_on_growth", stop_on_growth)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False")
    classes = fed.spec.classes
    found = metrics_of(metrics, classes)
    sites = not isinstance(fed, Federation)
    tested = bool(len(fed.data.x_test)) or sites  # sites have their own test rows
    if sites:
        refuse_functions(found, classes)
        if fed.spec.steps and (found or per_client or stop or keep_best or stop_on_growth):
            raise ConfigError(
                "metrics, per_client, stop, keep_best and stop_on_growth: sites count rows, and "
                f"here a row has {fed.spec.steps} labels, one for each step of a sequence; leave "
                "them out, or measure the model where there are rows"
            )
    for name, asked in (("metrics", found), ("per_client", per_client)):
        if asked and not (evaluate_every and tested):
            value = per_client if name == "per_client" else [m.name for m in found]
            raise ConfigError(
                f"{name}={value!r} needs evaluation: test rows, and evaluate_every of at least 1"
            )
    evaluated = bool(evaluate_every and tested)
    check_steering(stop, keep_best, found, per_client, algorithm.personal, classes, evaluated)
    return found


def refuse_functions(metrics: Sequence[Metric], classes: int | None) -> None:
    """Raise `ConfigError` for metrics that cannot be computed from sums over rows."""
    for metric in metrics:
        if isinstance(metric, OwnMetric):
            names = ", ".join(CLASSIFICATION if classes else REGRESSION)
            raise ConfigError(
                f"metrics: {metric.name!r} is a function, which needs single rows, and sites send "
                f"sums over theirs; use names ({names}), or measure the model where there are rows"
            )


def asks(
    algorithm: Algorithm, metrics: Any, per_client: bool, stop: Any, keep_best: Any,
    stop_on_growth: bool,
) -> bool:  # fmt: skip
    """Whether a run has to measure the global model, which between sites takes an exchange."""
    best = best_metric(keep_best, stop)
    steering = {name for name in (best, None if stop is None else stop.metric) if name is not None}
    steered = any(not name.startswith("own_") for name in steering)
    return bool(metrics) or per_client or steered or (stop_on_growth and not algorithm.personal)


def check_sites(per_client: bool, hides: bool, noisy: bool) -> None:
    """Raise `ConfigError` for measurements that sites cannot give under the aggregation of a run.

    Args:
        per_client: Whether clients are to be measured one by one.
        hides: Whether the server sees no single reply.
        noisy: Whether what is released has noise and a privacy account.
    """
    if noisy:
        raise ConfigError(
            "metrics, per_client, stop and keep_best do not go with differential privacy between "
            "sites: sums over test rows get no noise, and are in no account. Leave them out (with "
            "SecureAggregation(privacy=...) the final model is scored once over all sites, with "
            "noise), or measure the model on rows that may be shown"
        )
    if per_client and hides:
        raise ConfigError(
            "per_client=True: under secure aggregation the server sees sums over the test rows of "
            "all sites, and no single site's; leave it out: metrics of all rows are measured"
        )


def ignores_weights(metric: Metric) -> bool:
    """Whether a metric ignores the weights of rows."""
    return isinstance(metric, OwnMetric) and not metric.weighs


def nothing_to_test(algorithm: Algorithm, fed: Any, evaluate_every: int) -> bool:
    """Whether evaluation is wanted and there are no test rows.

    An algorithm without a model has nothing to evaluate; sites with test rows of their own, of
    which the server has none, evaluate the model themselves.
    """
    makes_model = algorithm.personal or type(algorithm).predictor is not Algorithm.predictor
    ours = isinstance(fed, Federation)
    return bool(evaluate_every and makes_model and ours and not len(fed.data.x_test))


def seed_list(seeds: int | Sequence[int]) -> list[int]:
    """The seeds of several runs: a list, or 0 .. n - 1 for a number n."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise ConfigError(
                f"seeds={seeds!r} must be at least 1 (n stands for the seeds 0 .. n - 1), or a "
                "list of seeds"
            )
        return list(range(seeds))
    listed = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    if (
        not listed
        or len(set(listed)) < len(listed)
        or any(isinstance(s, bool) or not isinstance(s, int) for s in listed)
    ):
        raise ConfigError(
            f"seeds={seeds!r} must be a number of seeds, or a list of different integers"
        )
    return listed


def refuse_to_overwrite(path: Path) -> None:
    """Raise `CheckpointError` if a new run would overwrite an old checkpoint or another file."""
    if not files.exists(path):
        return
    path = path if path.exists() else files.previous_of(path)
    try:
        _, meta = files.read(path)
    except CheckpointError as error:
        before = (
            "; resume=True goes on from the one before it"
            if files.previous_of(path).is_file()
            else ""
        )
        raise CheckpointError(
            f"checkpoint={str(path)!r} exists and is no foedus file, or it is damaged; choose "
            f"another name{before}"
        ) from error
    done = meta.get("rounds_done", len(meta.get("history", [])) - 1)
    raise CheckpointError(
        f"{path} holds a run at round {done}; pass resume=True to go on, or remove it to begin "
        "again"
    )


def refuse_to_begin(path: Path) -> None:
    """Raise `CheckpointError` if `resume=True` has no checkpoint: the path may be mistyped."""
    if not files.exists(path):
        raise CheckpointError(
            f'{path}: there is no checkpoint to go on from; check the path, or use resume="auto" '
            "to begin where there is none"
        )


def checkpoint_file(checkpoint: str | os.PathLike | None) -> Path | None:
    """The path of a checkpoint file; a name without an ending is a folder."""
    if checkpoint is None:
        return None
    path = Path(checkpoint)
    return path / "checkpoint.safetensors" if path.is_dir() or not path.suffix else path


def without_fingerprint(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run without the checksums of its rows, which older runs do not have."""
    federation = {k: v for k, v in settings["federation"].items() if k != "fingerprint"}
    return {**settings, "federation": federation}


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """The differences between two settings, as readable text."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{at}.{k}".lstrip("."))]
    return [] if a == b else [f"{at} was {a!r}, now {b!r}"]
