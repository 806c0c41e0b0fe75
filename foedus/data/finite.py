"""Find missing and infinite numbers."""

from __future__ import annotations

import numpy as np

_BLOCK = 1 << 22
"""The numbers that are checked at a time, which bounds the additional memory."""


def first_not_finite(x: np.ndarray) -> tuple[int, int, int] | None:
    """The number of NaN or infinite entries, with row and flat column of the first; or `None`."""
    if x.size == 0:
        return None
    width = x.size // len(x)
    many = max(1, _BLOCK // width)
    count, first = 0, (0, 0)
    for start in range(0, len(x), many):
        block = x[start : start + many]
        # min and max propagate NaNs and infinities without an array of flags
        if np.isfinite(block.min()) and np.isfinite(block.max()):
            continue
        bad = ~np.isfinite(block.reshape(len(block), width))
        if not count:
            row, column = np.unravel_index(int(bad.argmax()), bad.shape)
            first = start + int(row), int(column)
        count += int(bad.sum())
    return (count, *first) if count else None
