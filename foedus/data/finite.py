"""Where numbers are missing or infinite."""

from __future__ import annotations

import numpy as np


def first_not_finite(x: np.ndarray) -> tuple[int, int, int] | None:
    """How many numbers are NaN or infinite, and row and flat column of the first; or `None`."""
    # min and max carry NaN and infinities along without an array of flags as large as the data.
    if x.size == 0 or (np.isfinite(x.min()) and np.isfinite(x.max())):
        return None
    bad = ~np.isfinite(x.reshape(len(x), -1))
    row, column = np.unravel_index(int(bad.argmax()), bad.shape)
    return int(bad.sum()), int(row), int(column)
