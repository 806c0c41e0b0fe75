"""What a model must know of the data: the shape of one row, and what is predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foedus.base import tree


@tree.node(static=("shape", "classes", "outputs", "integers", "weighted", "steps"))
@dataclass(frozen=True)
class Spec:
    """The form of the data, which a model needs to know.

    Args:
        shape: The shape of a row.
        classes: The number of classes; `None` for regression.
        outputs: The number of outputs of a model: classes, or targets.
        integers: Whether rows are int64, such as tokens; otherwise they are float32.
        weighted: Whether rows have weights (`Rows.worth`).
        steps: The number of labels of a row, one for each step of a sequence; outputs are then
            (steps, classes). `None`: one label per row.

    Example:
        >>> spec = fd.load("digits").spec
        >>> spec.shape, spec.classes, spec.output_shape
        ((64,), 10, (10,))
    """

    shape: tuple[int, ...]
    classes: int | None
    outputs: int
    integers: bool = False
    weighted: bool = False
    steps: int | None = None

    @property
    def features(self) -> int:
        """The number of entries of a row."""
        return math.prod(self.shape)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a model's outputs for one row."""
        return (self.outputs,) if self.steps is None else (self.steps, self.outputs)


@tree.node(static=("shape", "classes", "outputs", "integers", "weighted", "steps", "texts"))
@dataclass(frozen=True)
class RawSpec(Spec):
    """The form of raw rows of a table: numbers, NaN if missing, and codes of texts.

    Args:
        shape: As in `Spec`.
        classes: As in `Spec`.
        outputs: As in `Spec`.
        integers: As in `Spec`.
        weighted: As in `Spec`.
        steps: As in `Spec`.
        texts: For each column of texts, the meaning of its codes 0, 1, ...; `None` for numbers.
    """

    texts: tuple[tuple[str, ...] | None, ...] = ()
