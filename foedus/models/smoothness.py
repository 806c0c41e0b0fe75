"""The smoothness of losses in a model's outputs: how long a step downhill may be.

A loss is L-smooth if its second derivative in the outputs has no eigenvalue above L. Then

    loss(f + d) <= loss(f) + <slope, d> + L/2 |d|^2

for every f and d, so that a step of 1/L against the slope goes down by at least |slope|^2 / (2 L),
and every step below 2/L goes down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foedus.models.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    Logistic,
    PoissonNLL,
    SoftLabels,
    Squared,
    WeightedCrossEntropy,
)

LONGEST_MOVE = 0.7
"""By how much the logarithm of a count's mean may rise in one step."""


def smoothness(loss: Any, outputs: int) -> float | None:
    """The largest eigenvalue that the second derivative of a row's loss can have.

    - Squared: the second derivative is the identity, so 1; Huber: it is 1 or 0 in each output.
    - Cross-entropy: diag(p) - p p^T with probabilities p. For a unit vector v, v^T (diag(p) - p
      p^T) v is the variance of v_k under p. A variance is at most a quarter of the squared range,
      and the range of a unit vector is at most sqrt 2: 1/2, reached where two classes have 1/2
      each. Class weights multiply it.
    - Logistic: p (1 - p) <= 1/4 in each output; binary cross-entropy is their mean, 1/4 over the
      number of outputs.

    Args:
        loss: A loss.
        outputs: The number of outputs of the model.

    Returns:
        The eigenvalue; `None`: there is no bound (Poisson, quantile), or none is known.

    Example:
        >>> smoothness(fd.losses.CrossEntropy(), 10), smoothness(fd.losses.PoissonNLL(), 1)
        (0.5, None)
    """
    if isinstance(loss, WeightedCrossEntropy):
        return max(loss.weights) / 2
    known = {
        Squared: 1.0, Huber: 1.0, CrossEntropy: 1 / 2, SoftLabels: 1 / 2, Logistic: 1 / 4,
        BinaryCrossEntropy: 1 / (4 * outputs),
    }  # fmt: skip
    return known.get(type(loss))


def smoothness_nearby(loss: Any, outputs: Tensor) -> Tensor | None:
    """A bound of the second derivative of each row's loss, valid for moves of limited length.

    Poisson's loss exp(f) - y f has the second derivative exp(f), which grows without bound. Where
    no output rises by more than `LONGEST_MOVE`, it stays below exp(f + LONGEST_MOVE), whatever the
    count y; of several outputs the largest counts.

    Args:
        loss: A loss.
        outputs: Outputs f of the model, (n, k).

    Returns:
        The bound of each row, (n,); `None`: there is none, or a constant one (`smoothness`).

    Example:
        >>> smoothness_nearby(fd.losses.PoissonNLL(), torch.zeros(1, 2)).log().tolist()
        [0.699999988079071]
    """
    if not isinstance(loss, PoissonNLL):
        return None
    return torch.exp(outputs.amax(-1) + LONGEST_MOVE)
