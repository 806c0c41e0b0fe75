"""Whether a loss is convex in the outputs, by a random test."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from foedus.base import random
from foedus.base.spec import Spec
from foedus.errors import shown
from foedus.models.custom_loss import try_targets

_PAIRS, _SCALES, _ROUNDING = 256, (0.3, 1.0, 3.0, 10.0), 1e-4


def above_its_chords(loss: Any, spec: Spec) -> bool:
    """Whether the loss half-way between two outputs is above the mean of its values there: then it
    is not convex. The outputs are drawn.
    """
    y = try_targets(spec, _PAIRS)
    for i, scale in enumerate(_SCALES):
        a, b = scale * random.normal(random.key(i), (2, _PAIRS, spec.outputs))
        chord = (loss.value(a, y) + loss.value(b, y)) / 2
        over = loss.value((a + b) / 2, y) - chord
        if bool((over > _ROUNDING * (1 + chord.abs())).any()):
            return True
    return False


def warn_unless_convex(name: str, setting: Any, loss: Any, spec: Spec) -> None:
    """Warn that an algorithm's theorems need a convex loss, if this one is not convex."""
    with torch.no_grad():
        found = above_its_chords(loss, spec)
    if found:
        warnings.warn(
            f"loss={shown(setting)} is not convex in the outputs: {name} runs, but its theorems, "
            "and the bounds that follow from them, are for convex losses; a smaller step is safer",
            stacklevel=4,
        )
