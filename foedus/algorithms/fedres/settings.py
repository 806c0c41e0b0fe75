"""What FedRes' settings must fit: the data, and the clients they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foedus.algorithms.fedres.pair import part_spec
from foedus.base.columns import Columns
from foedus.base.spec import Spec
from foedus.errors import ConfigError, DataError
from foedus.models.base import Model, check_fits

if TYPE_CHECKING:
    from foedus.algorithms.fedres.sgd import FedRes


def check_parts(settings: FedRes, spec: Spec) -> None:
    """Refuse data that the models and columns do not fit."""
    if settings.loss == "logistic" and not spec.classes:
        raise ConfigError(
            "loss='logistic' needs class labels; the data has real targets: use loss='squared'"
        )
    parts: list[tuple[str, Model | None, Columns]] = [
        ("global_model", settings.global_model, settings.shared)
    ]
    if not settings.alike:
        sets = [set(v) for v in (settings.local_model, settings.private) if isinstance(v, Mapping)]
        if sets[0] != sets[-1]:
            raise ConfigError("local_model and private must name the same clients")
        pick = lambda v, i: v[i] if isinstance(v, Mapping) else v  # noqa: E731
        parts += [
            (f"local_model[{i}]", pick(settings.local_model, i), pick(settings.private, i))
            for i in sorted(sets[0])
        ]
    else:
        parts.append(("local_model", *settings.only_local))
    for name, model, columns in parts:
        if columns is not None and max(columns) >= spec.features:
            raise DataError(
                f"column {max(columns)} of {name} is beyond the {spec.features} features of the "
                "data"
            )
        if model is not None:
            check_fits(name, model, part_spec(spec, columns))


def check_schedule(settings: FedRes) -> None:
    """Raise where the schedule needs another setting, or has no use for it."""
    if (settings.schedule == "theorem2") != (settings.theorem is not None):
        raise ConfigError(
            "schedule='theorem2' needs theorem=fd.fedres.Theorem2(...), the constants of its bound"
            "; other schedules do not use it"
        )
    if settings.forget != 1 and settings.schedule in ("constant", "theorem2"):
        raise ConfigError(
            f"forget={settings.forget:g} has no effect on schedule={settings.schedule!r}, whose "
            "steps do not fall; use 'adagrad' or 'sqrt'"
        )


def check_ids(settings: FedRes, ids: list[int]) -> None:
    """Raise where a mapping has no entry for some client."""
    for name in ("local_model", "private"):
        given = getattr(settings, name)
        if isinstance(given, Mapping) and (missing := [i for i in ids if i not in given]):
            raise ConfigError(
                f"{name} says nothing of clients {missing[:10]}: give an entry for each client id"
            )
