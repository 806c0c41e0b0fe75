"""What a model must know of the data: the shape of one row, and what is predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foedus.base import tree


@tree.node(static=("shape", "classes", "outputs", "integers", "weighted", "steps"))
@dataclass(frozen=True)
class Spec:
    """The shape of a row, the number of classes (`None`: regression), and a model's outputs.

    integers: rows are int64, such as tokens; otherwise they are float32. weighted: rows count by
    weights of their own (`Rows.worth`). steps: the number of labels of a row, one for each step of
    a sequence, and outputs (steps, classes); `None`: one label.
    """

    shape: tuple[int, ...]
    classes: int | None
    outputs: int
    integers: bool = False
    weighted: bool = False
    steps: int | None = None

    @property
    def features(self) -> int:
        """Numbers in one row."""
        return math.prod(self.shape)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a model's outputs for one row."""
        return (self.outputs,) if self.steps is None else (self.steps, self.outputs)


@tree.node(static=("shape", "classes", "outputs", "integers", "weighted", "steps", "texts"))
@dataclass(frozen=True)
class RawSpec(Spec):
    """Rows of a table before preprocessing: numbers, NaN where one is missing, and codes of texts.

    texts: for each column that holds text, what its codes 0, 1, ... mean; `None` for numbers.
    """

    texts: tuple[tuple[str, ...] | None, ...] = ()
