"""The server's side of fitting a preprocessing: the exchanges, and the constants that follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foedus.algorithms.preprocessing.checks import (
    wrong_bins,
    wrong_moment,
    wrong_strings,
    wrong_survey,
)
from foedus.algorithms.preprocessing.encoding import (
    BINS,
    LEVELS,
    UNIT,
    bound,
    from_ordered,
    joined,
)
from foedus.base import tree, unions
from foedus.base.tree import State, Tree
from foedus.core.clients import Clients
from foedus.core.exchange import Replies
from foedus.data.formats.frames import MOST
from foedus.errors import DataError

if TYPE_CHECKING:
    from foedus.algorithms.preprocessing.fit import FitPreprocessing

CONSTANTS = ("fill", "shift", "divisor")

_FAR = 1000
"""The largest distance of a client's mean or spread from the median, in median distances."""


class Fitting:
    """One fit, from the first question to the constants.

    Arrays are by column of numbers. `present` is the part of the rows that have a value, `limit` a
    power of two that no value exceeds, in size.
    """

    def __init__(self, recipe: FitPreprocessing, clients: Clients):
        self.recipe, self.clients = recipe, clients
        self.names = [recipe.columns[i] for i in recipe.numbers]
        self.zero = np.zeros(len(self.names))
        self.refused: dict[int, str] = {}
        self.present, self.limit = self.zero + 1, self.zero + 1

    @property
    def rows(self) -> int:
        """Of those who answered the last exchange."""
        answered = self.clients.answered_rows
        return int((self.clients.sizes if answered is None else answered).sum())

    def fitted(self) -> State:
        """The constants, and `refused`: ids of clients that were left out."""
        recipe, found = self.recipe, State(fill=None, shift=None, divisor=None, scaling=None)
        found["strings"] = unions.listed(self._strings())
        lacking = torch.zeros(len(recipe.texts), dtype=torch.bool)
        scale: str | None = recipe.scale
        if recipe.ranges:  # noise tells nothing of a single row
            lacking[:] = True
        if scale or recipe.impute in ("mean", "median") or not recipe.ranges:
            seen = self._survey()
            if not recipe.ranges:
                lacking = torch.from_numpy(self._some(seen["lacking"].double().numpy()))
            scale = self._auto(seen) if scale == "auto" else scale
        if self.names:
            found |= self._numbers(scale)
        refused = torch.tensor(sorted(self.refused), dtype=torch.int64)
        return found.replace(lacking=lacking, refused=refused)

    # -- texts -------------------------------------------------------------------------------------

    def _strings(self) -> list[bytes]:
        """Categories, each behind the place of its column among those of texts."""
        recipe, known = self.recipe, dict(self.recipe.known)
        place = {n: k.to_bytes(2, "little") for k, n in enumerate(recipe.texts)}
        found = {place[name] + text.encode() for name, texts in known.items() for text in texts}
        if asked := recipe.asked:
            check = partial(wrong_strings, columns=len(asked))
            for text in self.clients.union(recipe.strings, check, columns=asked):
                name = asked[int.from_bytes(text[:2], "little")]
                found.add(place[name] + text[2:])
        for name in asked:
            count = sum(text.startswith(place[name]) for text in found)
            if count > MOST:
                raise DataError(
                    f"column {name!r} has {count} different texts; leave it out, or put them into "
                    "a few groups first"
                )
        return sorted(found)

    # -- numbers -----------------------------------------------------------------------------------

    def _total(
        self, step: Callable, check: Callable[[Any], str | None], **sent: Tree
    ) -> tuple[Tree, Replies | None]:
        """The replies to a step, over the rows of all clients that answer; and each single reply,
        if it is needed and visible. check: returns why an untrusted reply is invalid.
        """
        if self.recipe.sums:
            total = self.clients.sum(step, **sent)
            if isinstance(total, dict) and "sum" in total:  # in parts
                total["sum"] = torch.from_numpy(joined(total["sum"])[..., None] * UNIT)
            return tree.map(lambda t: t.double() / (UNIT * self.rows), total), None

        def accept(ids: Tensor, replies: Tree) -> dict[int, str]:
            each = (tree.map(lambda t, i=i: t[i], replies) for i in range(len(ids)))
            return {i: why for i, reply in enumerate(each) if (why := check(reply)) is not None}

        if self.recipe.doubt and step == self.recipe.moment:
            return self.clients.mean_and_each(step, accept=accept, **sent)
        return self.clients.mean(step, accept=accept, **sent), None

    def _survey(self) -> dict[str, Tensor]:
        seen, _ = self._total(self.recipe.survey, wrong_survey)
        self.present = np.clip(seen["present"].double().numpy(), 0, 1)  # noise may leave it
        if "magnitudes" in seen:
            self.limit = bound(seen["magnitudes"].double().numpy())
        return seen

    def _leave_out(self, bad: dict[int, str]) -> None:
        """Continue without these clients."""
        self.refused |= bad
        for i, why in bad.items():
            warnings.warn(f"client {i} is left out of the fit: {why}", stacklevel=2)
        strange = torch.isin(self.clients.ids, torch.tensor(sorted(bad)))
        self.clients = self.clients.some(~strange)

    def _some(self, part: np.ndarray) -> np.ndarray:
        """Whether a part of all rows is at least one row."""
        return part * self.rows > 0.5

    def _auto(self, seen: dict[str, Tensor]) -> str | None:
        """See `foedus.data.preprocess.auto_scale`."""
        beyond, large, no_byte, broken = self._some(seen["auto"].double().numpy())
        if not beyond and large:
            return None
        image = not broken and not no_byte and len(self.names) >= 256
        return "unit" if image else "standard"

    def _numbers(self, scale: str | None) -> State:
        """The constants of the columns of numbers."""
        holes, there = self._some(1 - self.present), self._some(self.present)
        impute = self.recipe.impute
        if impute is None and holes.any() and not self.recipe.ranges:
            raise DataError(
                f"column {self.names[int(holes.argmax())]!r} has missing values; pass "
                "impute='median' (of the training rows), 'mean' or 'zero'"
            )
        mean = spread = fill = self.zero
        if impute == "mean" or scale == "standard":
            mean, spread = self._moments()
        if impute == "mean":
            fill = np.where(there, mean, 0.0)
        elif impute == "median":
            fill = np.where(there, self._quantiles([0.5], self.zero + np.nan)[0], 0.0)
        shift = divisor = None
        if scale == "standard":  # of the imputed rows
            part = np.where(holes, 1 - self.present, 0.0)
            shift = (1 - part) * mean + part * fill
            squares = (1 - part) * (spread**2 + (mean - shift) ** 2) + part * (fill - shift) ** 2
            divisor = np.sqrt(squares)
            divisor = np.where(divisor > 1e-7 * np.maximum(np.abs(shift), 1e-30), divisor, 1.0)
        elif scale in ("minmax", "robust"):
            where = [0.0, 1.0] if scale == "minmax" else [0.25, 0.75, 0.5]
            low, high, *middle = self._quantiles(where, np.where(holes, fill, np.nan))
            shift, divisor = middle[0] if middle else low, np.where(high > low, high - low, 1.0)
        values = (None if impute is None else fill, shift, divisor)
        tensors = [None if v is None else torch.from_numpy(v.copy()) for v in values]
        return State(zip(CONSTANTS, tensors, strict=True), scaling=scale)

    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the values that are present."""
        while True:
            middle, near, least = self.zero, self.limit, self.zero
            if self.recipe.ranges:
                low, high = self.recipe.limits
                middle, near = (low + high) / 2, (high - low) / 2
                least = near / 50  # noise may leave nothing of a small spread
            mean, means = self._moment(1, middle, near)
            center = mean = middle + mean
            if self.recipe.ranges:  # noise may have left them
                center = mean = np.clip(mean, *self.recipe.limits)
            if self.recipe.doubt and means:  # so that no single client can move it
                center = _median(middle + np.array(list(means.values())))
            square, squares = self._moment(2, center, 2 * near)
            bad = self._implausible(means, squares) if self.recipe.doubt else {}
            if not bad:
                return mean, np.sqrt(np.maximum(square - (mean - center) ** 2, least**2))
            self._leave_out(bad)
            self._survey()

    def _moment(
        self, power: int, center: np.ndarray, limit: np.ndarray
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """The mean of (x - center)^power over the values that are present; and for each client, if
        single replies are visible.
        """

        def value(reply: dict[str, Tensor]) -> np.ndarray:
            total, present = joined(reply["sum"]), reply["present"].double().numpy()
            with np.errstate(divide="ignore", invalid="ignore"):
                return total * limit**power / present

        sent: Tree = {"center": torch.from_numpy(center), "bound": torch.from_numpy(limit)}
        total, each = self._total(self.recipe.moment, wrong_moment, **sent, power=power)
        mine = {} if each is None else dict(zip(each.ids.tolist(), map(value, each), strict=True))
        return np.nan_to_num(value(total)), mine

    def _implausible(
        self, means: dict[int, np.ndarray], squares: dict[int, np.ndarray]
    ) -> dict[int, str]:
        """Clients whose rows are outliers, with the reason.

        Judged by medians over clients. A column is skipped if fewer than three clients have a
        value, or if most have the same constant.
        """
        ids = sorted(means.keys() & squares.keys())
        if len(ids) < 3:
            return {}
        mean = np.array([means[i] for i in ids])
        with np.errstate(invalid="ignore"):
            wide = np.sqrt(np.array([squares[i] for i in ids]))
        found: dict[int, str] = {}
        for column in np.flatnonzero((~np.isnan(mean)).sum(0) >= 3).tolist():
            here = mean[:, column]
            off = np.abs(here - np.nanmedian(here))
            usual = max(1.4826 * np.nanmedian(off), np.nanmedian(wide[:, column]))
            if not usual > 0:
                continue
            for i, away, spread in zip(ids, off / usual, wide[:, column] / usual, strict=True):
                if max(away, spread) > _FAR:
                    found.setdefault(
                        i,
                        f"column {self.names[column]!r} is implausible: its mean is {away:.3g} and "
                        f"its spread {spread:.3g} times what is usual at the others",
                    )
        return found

    def _quantiles(self, where: list[float], fill: np.ndarray) -> np.ndarray:
        """Quantiles of the values that are present, (quantiles, columns), interpolated between two
        neighbors; missing values count as `fill`, if that is a number.
        """
        count = np.rint(np.where(np.isnan(fill), self.present, 1.0) * self.rows)
        place = np.array(where)[:, None] * np.maximum(count - 1, 0)
        # the neighbor above, too, where there may be one
        above = [k for k, w in enumerate(where) if w not in (0, 1)]
        ranks = np.concatenate([np.floor(place), np.ceil(place[above])])
        prefix = np.zeros(ranks.shape, np.int64)
        for level in range(LEVELS):
            cells, cell = _different(prefix)
            sent: Tree = {"prefix": torch.from_numpy(cells), "fill": torch.from_numpy(fill)}
            share, _ = self._total(self.recipe.bins, wrong_bins, **sent, level=level)
            counts = np.rint(share.double().numpy() * self.rows)  # (cells, columns, bins)
            counts = np.take_along_axis(counts, cell[..., None], 0)
            below = np.cumsum(counts, -1)
            last = BINS - 1 - (counts[..., ::-1] > 0).argmax(-1)
            chosen = np.minimum((below <= ranks[..., None]).sum(-1), last)
            ranks -= np.take_along_axis(below - counts, chosen[..., None], -1)[..., 0]
            prefix = prefix * BINS + chosen
        values = np.where(count > 0, from_ordered(prefix.view(np.uint64) << np.uint64(1)), 0.0)
        found = values[: len(where)].copy()
        found[above] += (values[len(where) :] - found[above]) * (place - np.floor(place))[above]
        return found


def _median(values: np.ndarray) -> np.ndarray:
    """Of each column, of those that have a value; 0 where none has."""
    there = ~np.isnan(values).all(0)
    found = np.zeros(values.shape[1])
    found[there] = np.nanmedian(values[:, there], 0)
    return found


def _different(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values of each column (cells, columns), and which of them each is; columns of
    fewer values have their first one again.
    """
    order = np.argsort(values, 0, kind="stable")
    ascending = np.take_along_axis(values, order, 0)
    new = np.concatenate([np.zeros((1, values.shape[1]), bool), ascending[1:] != ascending[:-1]])
    rank = np.cumsum(new, 0)
    cell = np.empty_like(rank)
    np.put_along_axis(cell, order, rank, 0)
    cells = np.broadcast_to(ascending[0], (rank.max() + 1, values.shape[1])).copy()
    np.put_along_axis(cells, rank, ascending, 0)
    return cells, cell
