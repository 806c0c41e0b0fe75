"""The constants of a preprocessing (means, scales, medians, categories), fitted among clients.

Every exchange is an average of fractions by rows, or a union of texts, so that secure aggregation
and robust means apply to it as to any other, and every byte is counted.

- Survey: which part of a column is present, and below which power of 2^8 its values are in size.
- Moments: the averages of x / b and of ((x - c) / b)^2, b by the survey, c the mean.
- Order statistics: a cell [low, low + width) of each column and rank is cut into 128 bins; the
  server takes the bin in which the rank lies as the next cell, seven times.

A fraction is sent in parts of twelve bits (`fine`), so that a sum in fixed point, whose step may be
a millionth, is as good as one in double precision. Means and standard deviations are then those of
the pooled rows up to rounding. An order statistic x is found to within 2^-40 max |x| below, and
exactly if it is a multiple of that; counts of bins are sent as they are, so that under secure
aggregation its rank may be off by a millionth of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval, MinLen
from torch import Tensor

from foedus.algorithms.preprocessing.encoding import (
    BINS,
    fine,
    histogram,
    magnitudes,
)
from foedus.algorithms.preprocessing.fitting import CONSTANTS, Fitting
from foedus.base import unions
from foedus.base.settings import check_settings
from foedus.base.spec import RawSpec, Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Batching, Client, client_step
from foedus.core.clients import Clients
from foedus.data.preprocess import Preprocessor
from foedus.data.unprepared import Impute, Recipe, Scale
from foedus.errors import ConfigError, ReplyError, unknown

_BATCH = 1 << 24  # bytes of rows that fit a cache


@dataclass(frozen=True)
class FitPreprocessing(Algorithm):
    """Fits a `Preprocessor` to the raw rows of all clients before the first round, when everybody
    is asked and nothing is late; `foedus.prepare` runs it.

    Args:
        columns: The columns of the table.
        texts: Those of them that hold text.
        known: Categories that are given in advance, by column; those of others are found.
        ranges: (column, least, largest) value, for each column of numbers or none; values beyond
            are taken as the nearest. They are needed where noise is added.
        scale, impute, encode, clip: As for `foedus.load`.
        parts: In how many parts a fraction is sent; 1 where noise makes more of them useless.
        doubt: Leave out clients whose means or spreads are a thousand times farther off than
            usual, where single replies are seen.
    """

    columns: Annotated[tuple[str, ...], MinLen(1)]
    texts: tuple[str, ...] = ()
    known: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ranges: tuple[tuple[str, float, float], ...] = ()
    scale: Scale | None = "auto"
    impute: Impute | None = None
    encode: Literal["onehot", "ordinal"] = "onehot"
    clip: float | None = None
    parts: Annotated[int, Interval(ge=1, le=6)] = 6
    doubt: bool = False

    takes_raw: ClassVar[bool] = True
    weighs_rows: ClassVar[bool] = True  # each row counts once, as in scikit-learn
    remedy: ClassVar[str] = "correct the raw rows of that client"

    def __post_init__(self) -> None:
        check_settings(self)
        Recipe(self.scale, self.impute, self.encode, self.clip)
        if len(set(self.columns)) < len(self.columns):
            raise ConfigError("columns names a column twice; rename one")
        given = {"texts": self.texts, "known": [name for name, _ in self.known]}
        given["ranges"] = [name for name, _, _ in self.ranges]
        numbers = [self.columns[i] for i in self.numbers]
        allowed = {"texts": self.columns, "known": self.texts, "ranges": numbers}
        for key, names in given.items():
            if strange := [n for n in names if n not in allowed[key]]:
                raise ConfigError(f"{key}: {unknown('column', strange[0], allowed[key])}")
        if self.ranges and len(self.ranges) < len(numbers):
            lacking = next(n for n in numbers if n not in given["ranges"])
            raise ConfigError(f"ranges: that of {lacking!r} is missing; give all of them, or none")
        for name, low, high in self.ranges:
            if not -np.inf < low < high < np.inf:
                raise ConfigError(f"ranges: {name!r} has [{low}, {high}]; give finite low < high")

    @property
    def numbers(self) -> list[int]:
        """The places of columns that hold numbers."""
        return [i for i, name in enumerate(self.columns) if name not in self.texts]

    @property
    def asked(self) -> list[str]:
        """The columns whose texts are not known in advance."""
        return [name for name in self.texts if name not in dict(self.known)]

    @property
    def quantiles(self) -> bool:
        """Whether order statistics are needed: with them a server can find any value."""
        return self.impute == "median" or self.scale in ("minmax", "robust")

    @property
    def limits(self) -> np.ndarray:
        """Least and largest values of the columns of numbers, where they are given."""
        given = {name: (low, high) for name, low, high in self.ranges}
        return np.array([given[self.columns[i]] for i in self.numbers]).reshape(-1, 2).T

    def check(self, spec: Spec) -> None:
        if spec.shape != (len(self.columns),):
            raise ConfigError(f"{len(self.columns)} columns do not fit rows of shape {spec.shape}")

    def batching(self) -> Batching:
        return Batching(footprint=lambda rows, row_bytes: (1 << 30) * rows * row_bytes // _BATCH)

    # -- clients -----------------------------------------------------------------------------------

    def _rows(self, client: Client, places: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Some columns (..., rows, columns), a fresh copy, NaN where a value is missing; and the
        number of rows.
        """
        weight = client.data.weight.numpy()
        x = client.data.x.numpy()[..., places].astype(np.float64, copy=False)
        if not weight.all():
            x[weight == 0] = np.nan
        return x, weight.sum(-1, dtype=np.float64)[..., None]

    @client_step(batch="loop")
    def strings(self, client: Client, rows: int, columns: list[str]) -> tuple[Tree, None]:
        """The texts of some columns, each behind the place of its column."""
        assert isinstance(client.spec, RawSpec)
        found, x = set(), client.data.x.numpy()
        for number, name in enumerate(columns):
            if name not in self.asked:
                raise ReplyError(f"columns: the texts of {name!r} are not asked for by this fit")
            place = self.columns.index(name)
            texts = client.spec.texts[place] or ()
            codes = x[~np.isnan(x[:, place]), place].astype(np.int64)
            for code in np.flatnonzero(np.bincount(codes, minlength=1)).tolist():
                found.add(number.to_bytes(2, "little") + texts[code].encode())
        return unions.table(found, rows) if rows else unions.listed(found), None

    @client_step(batch="whole")
    def survey(self, client: Client) -> tuple[Tree, None]:
        """Parts of the rows that have a value, by column; the magnitude of the largest; and what
        "auto" looks at.
        """
        x, count = self._rows(client, self.numbers)
        texts, _ = self._rows(client, [self.columns.index(name) for name in self.texts])
        shares = {"present": _present(x) / count, "lacking": 1 - _present(texts) / count}
        if self.scale == "auto":
            size = np.abs(x)
            odd = (size > 1, size >= 0.5, (x < 0) | (x > 255), x % 1 > 0)
            part = [o.sum((-2, -1)) / (count[..., 0] * max(1, x.shape[-1])) for o in odd]
            shares["auto"] = np.stack(part, -1)
        reply = {name: fine(share, self.parts) for name, share in shares.items()}
        if not self.ranges:
            far = np.fmax(np.fmax.reduce(x, -2), -np.fmin.reduce(x, -2))
            reply["magnitudes"] = magnitudes(far)
        return reply, None

    @client_step(batch="whole")
    def moment(
        self, client: Client, center: Tensor, bound: Tensor, power: int
    ) -> tuple[Tree, None]:
        """The sum of ((x - center) / bound)^power over a column's values, and their number, over
        the rows.
        """
        x, count = self._rows(client, self.numbers)
        present, missing = _present(x) / count, x != x
        if self.ranges:
            np.clip(x, *self.limits, out=x)
        x -= center.numpy()
        x /= bound.numpy()
        if power == 2:
            x *= x
        x[missing] = 0
        shares = {"sum": x.sum(-2) / count, "present": present}
        return {name: fine(share, self.parts) for name, share in shares.items()}, None

    @client_step(batch="whole")
    def bins(self, client: Client, low: Tensor, width: Tensor, fill: Tensor) -> tuple[Tree, None]:
        """Parts of the rows in the bins of cells [low, low + width), by cell and column; a missing
        value counts as `fill`, if that is a number.
        """
        if not self.quantiles:
            raise ReplyError("bins: this fit needs no order statistics")
        x, count = self._rows(client, self.numbers)
        if not bool(fill.isnan().all()):
            missing = (x != x) & (client.data.weight.numpy()[..., None] > 0)
            x = np.where(missing, fill.numpy(), x)
        found = np.stack([histogram(x, first, width.numpy(), BINS) for first in low.numpy()], -3)
        return torch.from_numpy((found / count[..., None, None]).astype(np.float32)), None

    # -- the server --------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        return Fitting(self, clients).fitted()

    def round(self, clients: Clients, state: State) -> State:
        return state

    def preprocessor(self, state: State) -> Preprocessor:
        """What was fitted."""
        found = unions.read_list(state.strings)
        by_column: dict[str, list[str]] = {name: [] for name in self.texts}
        for text in sorted(found):
            by_column[self.texts[int.from_bytes(text[:2], "little")]].append(text[2:].decode())
        categories: dict[str, tuple[str | None, ...]] = {}
        for name, lacking in zip(self.texts, state.lacking.tolist(), strict=True):
            known = sorted(by_column[name])
            categories[name] = (*known, None) if lacking else tuple(known)
        arrays = {k: None if state[k] is None else state[k].numpy() for k in CONSTANTS}
        if state.scaling == "unit":
            arrays["divisor"] = 255.0
        return Preprocessor(
            self.columns, categories, **arrays, scaling=state.scaling, encode=self.encode,
            clip=self.clip,
        )  # fmt: skip


def _present(x: np.ndarray) -> np.ndarray:
    """How many rows of each column have a value."""
    return (x == x).sum(-2)
