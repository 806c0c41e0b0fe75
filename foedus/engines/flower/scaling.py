"""One scaling of the columns for all sites, from the sums in their greetings.

A greeting comes from an untrusted site, and one is enough to move everybody's columns: sums of
1e12 leave the rows of all others at one point. So a site far away from all others is refused and
named, and where replies are averaged robustly, centre and scale are medians over sites, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foedus.errors import ConfigError

_FAR = 1000
"""How many usual distances from the others a site's mean or spread may be."""


def _moments(said: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, means and standard deviations, by site and column; NaN where a site has no value."""
    count, total, squares = (
        np.array([s["sums"][k] for s in said], np.float64) for k in ("count", "sum", "squares")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = total / count
        return count, mean, np.sqrt(np.maximum(squares / count - mean**2, 0))


def implausible(said: dict[int, dict[str, Any]]) -> dict[int, str]:
    """Nodes whose sums cannot be of rows like those of most others, and why.

    By the medians over sites: with fewer than three sites with a value, or where most have one and
    the same constant, nothing can be said of a column.
    """
    if len(said) < 3:
        return {}
    count, mean, spread = _moments(list(said.values()))
    found: dict[int, str] = {}
    for column in np.flatnonzero((count > 0).sum(0) >= 3).tolist():
        here, usual = mean[:, column], np.nanmedian(spread[:, column])
        middle = np.nanmedian(here)
        distance = max(usual, 1.4826 * np.nanmedian(np.abs(here - middle)))
        if not distance:
            continue
        for n, node in enumerate(said):
            away, wide = abs(here[n] - middle) / distance, spread[n, column] / distance
            if max(away, wide) > _FAR:
                found.setdefault(
                    node,
                    f"the sums of column {column} are implausible: the mean is {away:.3g} and the "
                    f"spread {wide:.3g} times what is usual at the others",
                )
    return found


def scaling(
    said: list[dict[str, Any]], how: str, columns: tuple[str, ...], robust: bool = False
) -> tuple[list[float], list[float]]:
    """Centre and scale of every column; missing values do not count.

    Those of the rows of all sites; `robust`: the median over sites of their means, and of how far
    their rows are from it.
    """
    count, means, spreads = _moments(said)
    total = count.sum(0)
    if (total == 0).any():
        raise ConfigError(
            f"column {columns[int(np.argmax(total == 0))]!r} has no value at any site; leave it out"
        )
    if robust:
        center = np.nanmedian(means, 0)
        spread = np.nanmedian(np.hypot(spreads, means - center), 0)
    else:
        parts = count / total
        center = np.nansum(parts * means, 0)
        spread = np.sqrt(np.nansum(parts * (spreads**2 + (means - center) ** 2), 0))
    if how == "none":
        return center.tolist(), np.ones_like(center).tolist()
    near = spread <= 1e-12 * np.maximum(1, np.abs(center))
    return center.tolist(), np.where(near, 1.0, spread).tolist()
