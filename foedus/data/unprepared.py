"""Raw rows of a table whose preprocessing is still to be fitted, by the clients that hold them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Gt

from foedus.base.settings import check_settings
from foedus.data.formats.raw import Raw
from foedus.data.preprocess import UNSEEN, Preprocessor
from foedus.errors import DataError

if TYPE_CHECKING:
    from foedus.data.dataset import Data

_BLOCK = 1 << 14  # rows that are transformed at a time
Scale = Literal["auto", "standard", "minmax", "robust", "unit"]
Impute = Literal["median", "mean", "zero"]


@dataclass(frozen=True)
class Recipe:
    """The preprocessing to fit; the arguments of `foedus.load`."""

    scale: Scale | None = "auto"
    impute: Impute | None = None
    encode: Literal["onehot", "ordinal"] = "onehot"
    clip: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        check_settings(self, DataError)

    @property
    def quantiles(self) -> bool:
        """Whether order statistics are needed, from which a server can find any value."""
        return self.impute == "median" or self.scale in ("minmax", "robust")


@dataclass(frozen=True, eq=False)
class Unprepared:
    """The columns of raw rows, and the preprocessing to fit.

    Args:
        names: The columns, in order.
        categories: For each column of texts, by name, the texts of its codes 0, 1, ...
        recipe: The preprocessing that `foedus.prepare` fits.
    """

    names: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recipe: Recipe = Recipe()

    @property
    def texts(self) -> tuple[tuple[str, ...] | None, ...]:
        """The texts of each column, as in `RawSpec`."""
        return tuple(self.categories.get(name) for name in self.names)

    def checked(self, x: Any, where: str) -> np.ndarray:
        """Raw rows in float64, NaN for missing values; raises `DataError` for infinite numbers."""
        x = np.ascontiguousarray(x, np.float64)
        if x.ndim != 2 or x.shape[1] != len(self.names):
            raise DataError(f"{where} has shape {x.shape} for {len(self.names)} columns")
        if np.isinf(x).any():
            row, column = np.argwhere(np.isinf(x))[0].tolist()
            raise DataError(f"{where}: column {self.names[column]!r} is infinite in row {row}")
        return x

    def recoded(self, x: np.ndarray, fitted: Preprocessor) -> np.ndarray:
        """Rows with codes among the categories of `fitted`."""
        x = x.copy()
        for place, name in enumerate(self.names):
            if (texts := self.categories.get(name)) is not None:
                known = {text: k for k, text in enumerate(fitted.categories[name])}
                new = np.array([known.get(t, UNSEEN) for t in texts] or [UNSEEN])
                old = x[:, place]
                code = new[np.nan_to_num(old).astype(np.int64)]
                x[:, place] = np.where(np.isnan(old), old, code)
        return x

    def apply(self, x: np.ndarray, fitted: Preprocessor) -> np.ndarray:
        """Raw rows as a model receives them."""
        out = np.empty((len(x), len(fitted.feature_names or ())), np.float32)
        for first in range(0, len(x), _BLOCK):
            part = x[first : first + _BLOCK]
            out[first : first + _BLOCK] = fitted.apply(self.recoded(part, fitted))
        return out


def unprepared(raw: Raw, recipe: Recipe, name: str) -> Unprepared:
    """The columns of a table that was read."""
    if raw.feature_names is None:
        raise DataError(
            f"fit=False: the columns of {name!r} have no names; arrays are taken as they are, or "
            "give a table"
        )
    return Unprepared(tuple(map(str, raw.feature_names)), raw.categories or {}, recipe)


def prepared(data: Data, fitted: Preprocessor) -> Data:
    """A data set of raw rows, transformed by a fitted preprocessing."""
    raw = data.raw
    assert raw is not None
    for name, texts in raw.categories.items():
        codes = data.x_train[:, raw.names.index(name)]
        known = fitted.categories[name]
        there = np.unique(codes[~np.isnan(codes)]).astype(np.int64)
        if lost := [texts[k] for k in there if texts[k] not in known]:
            warnings.warn(
                f"column {name!r} has categories that were not named ("
                f"{', '.join(map(repr, lost[:5]))}): they are treated as unknown",
                stacklevel=3,
            )
    return replace(
        data, x_train=raw.apply(data.x_train, fitted), x_test=raw.apply(data.x_test, fitted),
        preprocess=fitted, scaling=fitted.scaling, raw=None,
    )  # fmt: skip
