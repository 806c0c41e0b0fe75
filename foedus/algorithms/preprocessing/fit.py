"""The constants of a preprocessing (means, scales, medians, categories), fitted among clients.

Every exchange is an average of fractions by rows, or a union of texts, so that secure aggregation
and robust means apply to it as to any other, and every byte is counted.

- Survey: which part of a column is present, and between which powers of 2^8 its values lie.
- Moments: the average of (x - c) / b and of its square, b from the survey, c the mean.
- Order statistics: a cell [low, low + width) of each column and rank is cut into 128 bins; the
  server takes the bin in which the rank lies as the next cell, seven times.

A fraction is sent in four parts of twelve bits (`fine`), so that a sum in fixed point, whose step
may be a millionth, is right to about 1e-16. Means and standard deviations are then those of the
pooled rows up to rounding. An order statistic x is found to within 2^-40 max |x| below, and exactly
if it is a multiple of that; counts of bins are sent as they are, so that under secure aggregation
its rank may be off by a millionth of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval, MinLen
from torch import Tensor

from foedus.algorithms.preprocessing.encoding import (
    BINS,
    MAGNITUDES,
    fine,
    histogram,
    magnitude,
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
from foedus.errors import ConfigError, unknown

_BATCH = 1 << 24  # bytes of rows that fit a cache


@dataclass(frozen=True)
class FitPreprocessing(Algorithm):
    """Fits a `Preprocessor` to the raw rows of all clients in one round; `foedus.prepare` runs it.

    Args:
        columns: The columns of the table.
        texts: Those of them that hold text.
        known: Categories that are given in advance, by column; those of others are found.
        ranges: (column, least, largest) value, for columns whose range is given in advance; values
            beyond are taken as the nearest. Where noise is added, all columns need one.
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
    parts: Annotated[int, Interval(ge=1, le=4)] = 4
    doubt: bool = False

    remedy = "the raw rows of a client are not finite"

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
        for name, low, high in self.ranges:
            if not -np.inf < low < high < np.inf:
                raise ConfigError(f"ranges: {name!r} has [{low}, {high}]; give finite low < high")

    @property
    def numbers(self) -> list[int]:
        """The places of columns that hold numbers."""
        return [i for i, name in enumerate(self.columns) if name not in self.texts]

    def check(self, spec: Spec) -> None:
        if spec.shape != (len(self.columns),):
            raise ConfigError(f"{len(self.columns)} columns do not fit rows of shape {spec.shape}")

    def batching(self) -> Batching:
        return Batching(footprint=lambda rows, row_bytes: (1 << 30) * rows * row_bytes // _BATCH)

    # -- clients -----------------------------------------------------------------------------------

    def _rows(self, client: Client, places: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Some columns (..., rows, columns), NaN where a value is missing, and numbers of rows."""
        weight = client.data.weight.numpy()
        x = client.data.x.numpy()[..., places]
        if not weight.all():
            x[weight == 0] = np.nan
        return x, weight.sum(-1)[..., None]

    @client_step(batch="loop")
    def strings(self, client: Client, rows: int, columns: list[str]) -> tuple[Tree, None]:
        """The texts of some columns, each behind the place of its column."""
        assert isinstance(client.spec, RawSpec)
        found = set()
        for name in columns:
            place = self.columns.index(name)
            codes = client.data.x.numpy()[:, place]
            texts = client.spec.texts[place] or ()
            for code in np.unique(codes[~np.isnan(codes)]).astype(int):
                found.add(columns.index(name).to_bytes(2, "little") + texts[code].encode())
        return unions.table(found, rows) if rows else unions.listed(found), None

    @client_step(batch="whole")
    def survey(self, client: Client, center: Tensor, magnitudes: bool) -> tuple[Tree, None]:
        """Parts of the rows: that have a value, by column; of which magnitude |x - center| is; and
        what "auto" looks at.
        """
        x, count = self._rows(client, self.numbers)
        texts, _ = self._rows(client, [self.columns.index(name) for name in self.texts])
        reply = {"present": fine((~np.isnan(x)).sum(-2) / count, self.parts)}
        reply["lacking"] = fine(1 - (~np.isnan(texts)).sum(-2) / count, self.parts)
        if magnitudes:
            found = histogram(magnitude(x - center.numpy()), MAGNITUDES)
            reply["magnitudes"] = torch.from_numpy((found / count[..., None]).astype(np.float32))
        if self.scale == "auto":
            size = np.abs(x)
            odd = (size > 1, size >= 0.5, (x < 0) | (x > 255), x % 1 > 0)
            share = [(o & ~np.isnan(x)).sum((-2, -1)) / (count[..., 0] * x.shape[-1]) for o in odd]
            reply["auto"] = fine(np.stack(share, -1), self.parts)
        return reply, None

    @client_step(batch="whole")
    def moment(
        self, client: Client, center: Tensor, bound: Tensor, power: int
    ) -> tuple[Tree, None]:
        """The sum of ((x - center) / bound)^power over a column's values, and their number, over
        the rows.
        """
        x, count = self._rows(client, self.numbers)
        present = (~np.isnan(x)).sum(-2) / count
        x -= center.numpy()
        x /= bound.numpy()
        np.clip(x, -1, 1, out=x)
        if power == 2:
            x *= x
        reply = {"sum": np.nansum(x, -2) / count, "present": present}
        return {name: fine(value, self.parts) for name, value in reply.items()}, None

    @client_step(batch="whole")
    def bins(
        self, client: Client, low: Tensor, width: Tensor, fill: Tensor
    ) -> tuple[Tree, None]:
        """Parts of the rows in the bins of cells [low, low + width), by cell and column; a missing
        value counts as `fill`, if that is a number.
        """
        x, count = self._rows(client, self.numbers)
        missing = np.isnan(x)
        if missing.any():
            real = client.data.weight.numpy()[..., None] > 0
            x = np.where(missing & real, fill.numpy(), x)
        scale = BINS / width.numpy()
        found = np.stack([histogram((x - first) * scale, BINS) for first in low.numpy()], -3)
        return torch.from_numpy((found / count[..., None, None]).astype(np.float32)), None

    # -- the server --------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        return State()

    def round(self, clients: Clients, state: State) -> State:
        return Fitting(self, clients).fitted()

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

