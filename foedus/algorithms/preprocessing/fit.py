"""The constants of a preprocessing (means, scales, medians, categories), fitted among clients.

Every exchange is a sum or an average over clients, or a union of texts, so that secure aggregation
and robust means apply to it as to any other, and every byte is counted.

- Survey: how many rows of a column have a value, and the power of 2^8 that bounds their magnitude.
- Moments: the sums of x / b and of ((x - c) / 2b)^2, b by the survey, c the mean.
- Order statistics: a binary key that sorts like the numbers is read as digits to the base 128. Nine
  times, the server asks for the counts of the next digit, and takes the digit that contains the
  rank.

Means and standard deviations are those of the pooled rows up to rounding, under secure aggregation
as well (`encoding.blinded`). Order statistics are exact except for the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import MinLen
from torch import Tensor

from foedus.algorithms.preprocessing.encoding import (
    LEVELS,
    MOST_CELLS,
    UNIT,
    blinded,
    histogram,
    known_bounds,
    magnitudes,
    ordered,
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
_HUGE = 1e150


@dataclass(frozen=True)
class FitPreprocessing(Algorithm):
    """Fits a `Preprocessor` to the raw rows of all clients before the first round, with full
    participation and without delays; `foedus.prepare` runs it.

    Args:
        columns: The columns of the table.
        texts: The columns that hold text.
        known: Categories that are given in advance, by column; those of other columns are
            collected.
        ranges: (column, least, largest) value, for each column of numbers or none; values beyond
            are clipped to it. Ranges are required if noise is added.
        scale, impute, encode, clip: As for `foedus.load`.
        sums: Clients send sums over their rows, for secure aggregation; otherwise averages over
            their rows, which are averaged by rows.
        doubt: Leave out clients whose means or spreads are outliers by a factor of a thousand, if
            single replies are visible.
    """

    columns: Annotated[tuple[str, ...], MinLen(1)]
    texts: tuple[str, ...] = ()
    known: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ranges: tuple[tuple[str, float, float], ...] = ()
    scale: Scale | None = "auto"
    impute: Impute | None = None
    encode: Literal["onehot", "ordinal"] = "onehot"
    clip: float | None = None
    sums: bool = False
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
        """The indices of columns that hold numbers."""
        return [i for i, name in enumerate(self.columns) if name not in self.texts]

    @property
    def asked(self) -> list[str]:
        """The columns whose texts are not known in advance."""
        return [name for name in self.texts if name not in dict(self.known)]

    @property
    def quantiles(self) -> bool:
        """See `Recipe`."""
        return Recipe(self.scale, self.impute, self.encode, self.clip).quantiles

    @property
    def limits(self) -> np.ndarray:
        """Minima and maxima of the columns of numbers, if they are given."""
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

    def _share(self, value: np.ndarray, count: np.ndarray) -> Tensor:
        """A number of rows as it is sent."""
        return torch.from_numpy(value * UNIT if self.sums else value / count)

    @client_step(batch="loop")
    def strings(self, client: Client, rows: int, columns: list[str]) -> tuple[Tree, None]:
        """The texts of some columns, each after the index of its column."""
        assert isinstance(client.spec, RawSpec)
        for name in columns:
            if name not in self.asked:
                raise ReplyError(f"columns: the texts of {name!r} are not asked for by this fit")
        if len(set(columns)) < len(columns) or rows not in (0, *unions.TABLE_ROWS):
            raise ReplyError(f"columns or rows={rows!r} cannot be: each column once, rows one of "
                             f"{(0, *unions.TABLE_ROWS)}")  # fmt: skip
        found, x = set(), client.data.x.numpy()
        for number, name in enumerate(columns):
            place = self.columns.index(name)
            texts = client.spec.texts[place] or ()
            codes = x[~np.isnan(x[:, place]), place].astype(np.int64)
            for code in np.flatnonzero(np.bincount(codes, minlength=1)).tolist():
                found.add(number.to_bytes(2, "little") + texts[code].encode())
        return unions.table(found, rows) if rows else unions.listed(found), None

    @client_step(batch="whole")
    def survey(self, client: Client) -> tuple[Tree, None]:
        """The number of rows with a value or with a missing text, by column; the largest magnitude;
        and the statistics that "auto" needs.
        """
        x, count = self._rows(client, self.numbers)
        texts, _ = self._rows(client, [self.columns.index(name) for name in self.texts])
        counts = {"present": _present(x), "lacking": count - _present(texts)}
        if self.scale == "auto":
            size = np.abs(x)
            odd = (size > 1, size >= 0.5, (x < 0) | (x > 255), x % 1 > 0)
            counts["auto"] = np.stack([o.any(-1).sum(-1) for o in odd], -1)  # rows with such
        reply = {name: self._share(value, count) for name, value in counts.items()}
        if not self.ranges:
            far = np.fmax(np.fmax.reduce(x, -2), -np.fmin.reduce(x, -2))
            reply["magnitudes"] = magnitudes(far) * (UNIT if self.sums else 1)
        return reply, None

    @client_step(batch="whole")
    def moment(
        self, client: Client, center: Tensor, bound: Tensor, power: int
    ) -> tuple[Tree, None]:
        """The sum of ((x - center) / bound)^power over a column's values, and their number."""
        self._check_moment(center.numpy(), bound.numpy(), power)
        x, count = self._rows(client, self.numbers)
        present, missing = _present(x), x != x
        if self.ranges:
            np.clip(x, *self.limits, out=x)
        x -= center.numpy()
        x /= bound.numpy()
        np.clip(x, -_HUGE, _HUGE, out=x)  # finite, also once it is squared
        if power == 2:
            x *= x
        x[missing] = 0
        total = x.sum(-2)
        total = blinded(total) if self.sums else torch.from_numpy(total / count)[..., None]
        return {"sum": total, "present": self._share(present, count)}, None

    def _check_moment(self, center: np.ndarray, bound: np.ndarray, power: int) -> None:
        """Refuse requests that would reveal more than sums and sums of squares: a weight for each
        row, or a bound at which values overflow or are clipped.
        """
        shape = (len(self.numbers),)
        if power not in (1, 2) or center.shape != shape or bound.shape != shape:
            raise ReplyError(f"moment: center and bound must have shape {shape}, power 1 or 2")
        if self.ranges:
            low, high = self.limits
            fine = np.array_equal(bound, (high - low) * power / 2)
            fine &= bool(((center >= low) & (center <= high)).all())
        else:
            fine = bool(np.isin(bound / power, known_bounds()).all())
            fine &= bool((np.abs(center) <= bound).all())
        if not fine:
            raise ReplyError("moment: center and bound are not those of this fit")

    @client_step(batch="whole")
    def bins(self, client: Client, prefix: Tensor, level: int, fill: Tensor) -> tuple[Tree, None]:
        """How many rows have values whose bits, in order, begin with a prefix of `level` digits, by
        the next digit; by prefix and column. A missing value counts as `fill`, if that is a number.
        """
        if not self.quantiles:
            raise ReplyError("bins: this fit needs no order statistics")
        shape = (len(self.numbers),)
        fits = prefix.dtype == torch.int64 and prefix.dim() == 2 and len(prefix) <= MOST_CELLS
        if not fits or prefix.shape[1:] != shape or fill.shape != shape:
            raise ReplyError(f"bins: prefix and fill must have {shape} numbers each")
        if type(level) is not int or not 0 <= level < LEVELS:
            raise ReplyError(f"bins: level={level!r} must be an integer from 0 to {LEVELS - 1}")
        x, count = self._rows(client, self.numbers)
        there = x == x
        if not bool(fill.isnan().all()):
            missing = ~there & (client.data.weight.numpy()[..., None] > 0)
            x = np.where(missing, fill.numpy(), x)
            there = x == x
        key = ordered(x)
        found = [histogram(key, there, p, level) for p in prefix.numpy().view(np.uint64)]
        return self._share(np.stack(found, -3), count[..., None, None]).float(), None

    # -- the server --------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        return Fitting(self, clients).fitted()

    def round(self, clients: Clients, state: State) -> State:
        return state

    def preprocessor(self, state: State) -> Preprocessor:
        """The fitted preprocessor."""
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
