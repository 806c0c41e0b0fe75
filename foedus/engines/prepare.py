"""`fd.prepare`: fit the preprocessing of raw tables among the clients that hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MinLen

from foedus.aggregation.dp.mechanism import DifferentialPrivacy
from foedus.aggregation.robust import Robust
from foedus.aggregation.secure.protocol import SecureAggregation
from foedus.algorithms.preprocessing.encoding import UNIT
from foedus.algorithms.preprocessing.fit import FitPreprocessing
from foedus.base.settings import check_value
from foedus.core.aggregation import Aggregation
from foedus.core.describe import to_config
from foedus.core.result import Run
from foedus.core.run import run
from foedus.data.federation import Federation
from foedus.data.unprepared import Recipe, prepared
from foedus.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    from foedus.core.session import Engine

Categories = Mapping[str, Sequence[str]]
Ranges = Mapping[str, tuple[float, float]]


def prepare(
    fed: Federation,
    *,
    engine: Engine | None = None,
    aggregation: Aggregation | None = None,
    categories: Categories | None = None,
    ranges: Ranges | None = None,
    seed: int = 0,
) -> Federation:
    """Fit the preprocessing of raw rows (`fd.load(..., fit=False)`) among the clients.

    What `fd.load` fits on the pooled training rows is fitted here through exchanges with the
    clients: means and standard deviations are the same up to rounding, categories the same,
    quantiles except for the last bit. `fed.settings["preprocess"]` has the bytes and messages.

    Args:
        fed: A federation of raw rows; each client sees only its own.
        engine: As for `fd.run`.
        aggregation: As for `fd.run`: with `fd.SecureAggregation` no single reply is seen.
        categories: Texts by column that are known in advance; those of other columns are found.
        ranges: (least, largest) value by column. Differential privacy needs one for each column of
            numbers, and `categories`.
        seed: Seed of the draws of secure aggregation.

    Returns:
        The federation with rows for models.

    Example:
        >>> north = pd.DataFrame({"age": [30.0, None, 52.0], "well": [1, 0, 1]})
        >>> south = pd.DataFrame({"age": [41.0, 67.0, 35.0], "well": [0, 0, 1]})
        >>> raw = fd.Federation.from_clients({"north": north, "south": south}, label="well",
        ...                                  impute="median", fit=False)
        >>> fed = fd.prepare(raw)
        >>> bool(np.isfinite(fed.data.x_train).all())
        True
    """
    if not isinstance(fed, Federation):
        raise DataError(
            f"fed is a {type(fed).__name__}; give a Federation, as fd.split or "
            "Federation.from_clients returns"
        )
    raw = fed.data.raw
    if raw is None:
        raise DataError(
            f"the rows of {fed.data.name!r} are prepared already; for raw ones pass fit=False to "
            "foedus.load or Federation.from_clients"
        )
    algorithm = recipe_of(
        raw.recipe, raw.names, tuple(raw.categories), categories or {}, ranges or {}, aggregation
    )
    fitted = fit(algorithm, fed, engine, aggregation, seed)
    data = prepared(fed.data, algorithm.preprocessor(fitted.state))
    return replace(
        fed, data=data, settings={**fed.settings, "preprocess": cost(fitted, aggregation)}
    )


def cost(fitted: Run, aggregation: Aggregation | None) -> dict[str, Any]:
    """Bytes and privacy cost of a fit; no times, which a resumed run could not repeat."""
    last = fitted.records.rows[-1]
    keys = ("bytes_up", "bytes_down", "messages_up", "epsilon")
    about: dict[str, Any] = {k: last[k] for k in keys if k in last}
    return {**about, "aggregation": None if aggregation is None else to_config(aggregation)}


def recipe_of(
    recipe: Recipe, columns: tuple[str, ...], texts: tuple[str, ...], categories: Categories,
    ranges: Ranges, aggregation: Aggregation | None,
) -> FitPreprocessing:  # fmt: skip
    """The algorithm that fits a recipe, under this aggregation."""
    if strange := [name for name in categories if name not in texts]:
        raise ConfigError(f"categories: {unknown('column of text', strange[0], texts)}")
    for name, known in categories.items():
        check_value(f"categories[{name!r}]", known, Annotated[Sequence[str], MinLen(1)])
    for name, pair in ranges.items():
        check_value(f"ranges[{name!r}]", tuple(pair) if isinstance(pair, list) else pair,
                    tuple[float, float])  # fmt: skip
    noisy = _privacy(aggregation) is not None
    if ranges and not noisy:
        raise ConfigError("ranges= is for differential privacy, which this fit does not have")
    if recipe.quantiles and isinstance(aggregation, Robust):
        raise ConfigError(
            f"scale={recipe.scale!r} and impute={recipe.impute!r}: a robust mean finds no medians, "
            "quartiles and extremes; use scale='standard' and impute='mean' or 'zero'"
        )
    if noisy:
        if recipe.scale not in ("standard", None) or recipe.impute not in ("mean", "zero"):
            raise ConfigError(
                f"scale={recipe.scale!r} and impute={recipe.impute!r}: with differential privacy "
                "use scale='standard' or None and impute='mean' or 'zero' (whether a value is "
                "missing must stay secret)"
            )
        for key, given, all_of_them in (
            ("ranges", ranges, [c for c in columns if c not in texts]),
            ("categories", categories, texts),
        ):
            if lacking := [c for c in all_of_them if c not in given]:
                raise ConfigError(
                    f"{key}: with differential privacy they must be known in advance, and those of "
                    f"{lacking[0]!r} are not given"
                )
    return FitPreprocessing(
        columns, texts, tuple((k, tuple(map(str, v))) for k, v in categories.items()),
        tuple((k, float(low), float(high)) for k, (low, high) in ranges.items()),
        recipe.scale, recipe.impute, recipe.encode, recipe.clip,
        sums=isinstance(aggregation, SecureAggregation) and not noisy,
    )  # fmt: skip


def fit(
    algorithm: FitPreprocessing,
    fed: Federation,
    engine: Engine | None,
    aggregation: Aggregation | None,
    seed: int,
) -> Run:
    """Run a fit without a progress bar."""
    return run(
        algorithm, fed, 0, engine=engine, aggregation=bounded(aggregation, algorithm), seed=seed,
        evaluate_every=0, progress=False,
    )  # fmt: skip


def bounded(aggregation: Aggregation | None, algorithm: FitPreprocessing) -> Aggregation | None:
    """An aggregation with fitting bounds: fixed-point numbers with the step that sums need, or
    noise for the largest possible replies.
    """
    privacy = _privacy(aggregation)
    if privacy is None and isinstance(aggregation, SecureAggregation):
        return exact(aggregation, "the sums of a preprocessing", ", or fit=True")
    if privacy is None:
        return aggregation
    numbers, texts = len(algorithm.numbers), len(algorithm.texts)
    # all entries are at most 1 in size
    clip = {"survey": math.sqrt(numbers + texts), "moment": math.sqrt(2 * numbers)}
    privacy = replace(privacy, clip={k: max(1.0, v) for k, v in clip.items()})
    if isinstance(aggregation, SecureAggregation):
        return replace(aggregation, privacy=privacy)
    return privacy


def exact(aggregation: SecureAggregation, what: str, instead: str = "") -> SecureAggregation:
    """The same with fixed-point numbers whose step fits sums of integers and `blinded` numbers.

    what, instead: for the error: the name of the sums, and the alternative.
    """
    given = aggregation.fixed_point.range
    wide = max(16.0, 2.0 ** math.ceil(math.log2(given)))
    if (bits := round(math.log2(wide / UNIT)) + 1) > 40:
        raise ConfigError(
            f"range={given:g} leaves no room for {what}; use at most range=2048{instead}"
        )
    return replace(aggregation, range=wide, bits=bits, rounding="nearest")


def _privacy(aggregation: Aggregation | None) -> DifferentialPrivacy | None:
    if isinstance(aggregation, SecureAggregation):
        return aggregation.privacy
    return aggregation if isinstance(aggregation, DifferentialPrivacy) else None
