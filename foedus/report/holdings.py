"""Who holds what: the rows of each client by label, or by ranges of the number to predict."""

from __future__ import annotations

import itertools

import numpy as np

from foedus.data.federation import Federation
from foedus.report.charts import Cells

_ROWS = 100
"""More clients than this are sorted and averaged in groups."""
_RANGES = 12


def chart(fed: Federation) -> Cells:
    """Rows of each client, by label or by range of the targets."""
    kind = "steps" if fed.data.spec.steps else "rows"
    if fed.data.classes is None:
        counts, names = _by_range(fed)
        how, axis = "by range of the number to predict", "number to predict"
    else:
        counts = fed.label_counts()
        names = [*map(str, fed.data.class_names or range(fed.data.classes))]
        how, axis = "by label", "label"
    rows, caption = [*map(str, fed.called)], f"Training {kind} of each client, {how}."
    if len(fed) > _ROWS:
        groups = np.array_split(np.argsort(counts.argmax(1), kind="stable"), _ROWS)
        counts = np.stack([counts[g].mean(0) for g in groups])
        rows = [f"{len(g)} clients like {rows[g[0]]}" for g in groups]
        caption += (
            f" Clients are sorted by what they hold most of; rows are means of {_ROWS} groups."
        )
    label, axes = f"training {kind}", ("client", axis)
    return Cells("Who holds what", caption, label, rows, names, counts.tolist(), axes)


def _by_range(fed: Federation) -> tuple[np.ndarray, list[str]]:
    """Rows of each client in ranges of equal width; of several numbers a row, by their mean."""
    y = fed.data.y_train.reshape(len(fed.data.y_train), -1).mean(1, dtype=np.float64)
    edges = np.histogram_bin_edges(y[fed.rows], _RANGES)
    held = [y[fed.client_rows(i)] for i in range(len(fed))]
    names = [f"{a:.3g} to {b:.3g}" for a, b in itertools.pairwise(edges)]
    return np.stack([np.histogram(values, edges)[0] for values in held]), names
