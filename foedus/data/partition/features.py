"""Feature skew: clients with rotated images, noisy features, or another part of the feature space.

A client's test rows are changed in the same way as its training rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from annotated_types import Ge

from foedus.base.settings import Means, check_value
from foedus.data.dataset import Data
from foedus.data.partition.base import (
    Division,
    check_min_rows,
    deal_test_rows,
    even_owners,
    repair,
)
from foedus.errors import SplitError

_ANGLES = float | Annotated[Sequence[float], Means("a list of angles in degrees")]


def rotations(
    data: Data,
    clients: int,
    rng: np.random.Generator,
    *,
    angles: float | tuple[float, ...] = 90.0,
) -> Division:
    """Rows at random; the images of client k are rotated counterclockwise by its angle."""
    check_value("angles", angles, _ANGLES, SplitError)
    data.refuse_raw()
    if isinstance(angles, Sequence):
        if not len(angles):
            raise SplitError("angles=() is empty; give a number, or a list of angles in degrees")
        angle = np.resize(np.array(angles, np.float64), clients)
    else:
        angle = np.arange(clients) * np.float64(angles)
    angle %= 360
    owner = even_owners(len(data.y_train), clients, rng)
    test_owner = deal_test_rows(data, owner, clients, rng)
    rotated = replace(
        data,
        x_train=turned(data, data.x_train, angle[owner]),
        x_test=turned(data, data.x_test, angle[test_owner]),
    )
    degrees = f"{angle.min():g} to {angle.max():g}"
    return Division(owner, test_owner, rotated, {"degrees": degrees, "angle": angle})


def turned(data: Data, x: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Images, each rotated counterclockwise around its center by a number of degrees.

    Quarter turns move pixels; others interpolate between four of them, with zeros from outside.
    """
    from scipy import ndimage

    images = x.astype(np.float32, copy=False).reshape(len(x), *_image_shape(data))
    result = images.copy()
    for angle in np.unique(degrees):
        rows = degrees == angle
        if angle % 90 == 0:
            result[rows] = np.rot90(images[rows], int(angle // 90), axes=(-2, -1))
        else:
            result[rows] = ndimage.rotate(
                images[rows], angle, axes=(-2, -1), reshape=False, order=1
            )
    return result.reshape(x.shape)


def _image_shape(data: Data) -> tuple[int, ...]:
    """The shape of a row as a square image; a flat row of square length is one."""
    shape = data.x_train.shape[1:]
    side = math.isqrt(math.prod(shape))
    if len(shape) == 1 and side**2 == shape[0]:
        return side, side
    if len(shape) in (2, 3) and shape[-1] == shape[-2]:
        return shape
    raise SplitError(
        f"rows of {data.name!r} have shape {shape}; only square images can be rotated: give rows "
        "of shape [side, side], [channels, side, side] or [side * side]"
    )


def noise(data: Data, clients: int, rng: np.random.Generator, *, sigma: float) -> Division:
    """Rows at random; client k adds N(0, sigma_k^2), sigma_k = sigma k / (clients - 1)."""
    check_value("sigma", sigma, Annotated[float, Ge(0)], SplitError)
    data.refuse_raw()
    level = np.linspace(0, sigma, clients) if clients > 1 else np.array([float(sigma)])
    owner = even_owners(len(data.y_train), clients, rng)
    test_owner = deal_test_rows(data, owner, clients, rng)

    def noisy(x: np.ndarray, who: np.ndarray) -> np.ndarray:
        scale = level[who].reshape(-1, *[1] * (x.ndim - 1))
        return x + scale * rng.standard_normal(x.shape)

    x_train, x_test = noisy(data.x_train, owner), noisy(data.x_test, test_owner)
    return Division(
        owner, test_owner, replace(data, x_train=x_train, x_test=x_test), {"level": level}
    )


def covariate(
    data: Data,
    clients: int,
    rng: np.random.Generator,
    *,
    tilt: float,
    direction: int | None = None,
    min_rows: int = 1,
) -> Division:
    """Row x goes to client k with probability proportional to exp(tilt c_k z(x)), c_k in [-1, 1].

    Client k thus sees the density p(x) exp(tilt c_k z(x)) / Z(x) up to a factor, and the
    distribution of labels given x is the same at all clients.
    """
    check_value("tilt", tilt, Annotated[float, Ge(0)], SplitError)
    check_min_rows(data, clients, min_rows)
    size = math.prod(data.x_train.shape[1:])
    x_train, x_test = (x.reshape(len(x), size) for x in (data.x_train, data.x_test))
    check_value("direction", direction, Annotated[int, Ge(0)] | None, SplitError)
    if direction is not None and direction >= size:
        raise SplitError(
            f"direction={direction} is not a feature of {data.name!r}, which has "
            f"{size}: give 0 .. {size - 1}, or None for a random direction"
        )
    if direction is None:
        line = rng.standard_normal(size)
    else:
        line = np.bincount([direction], minlength=size).astype(np.float64)
    along = x_train @ line
    if not along.std() > 0:
        raise SplitError(f"rows of {data.name!r} are all alike along direction={direction}")
    z, z_test = ((v - along.mean()) / along.std() for v in (along, x_test @ line))
    owner = repair(_tilted(z, clients, rng, tilt), clients, min_rows, rng)
    return Division(owner, _tilted(z_test, clients, rng, tilt), settings={"line": line})


def _tilted(z: np.ndarray, clients: int, rng: np.random.Generator, tilt: float) -> np.ndarray:
    """A client k for each z, with probability proportional to exp(tilt (2 k / (N - 1) - 1) z).

    That is r^k for r = exp(2 tilt z / (N - 1)), a truncated geometric distribution, whose
    cumulative probabilities (r^(k+1) - 1) / (r^N - 1) are inverted.
    """
    u = rng.random(len(z))
    if clients == 1:
        return np.zeros(len(z), np.int64)
    log_r = 2 * tilt * z / (clients - 1)
    flat = np.abs(log_r) < 1e-9
    # counted from the more probable end, where nothing overflows
    h = np.where(flat, -1.0, -np.abs(log_r))
    k = np.where(flat, u * clients, np.log1p(u * np.expm1(h * clients)) / h)
    k = np.minimum(k.astype(np.int64), clients - 1)
    return np.where(log_r > 0, clients - 1 - k, k)
