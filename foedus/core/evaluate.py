"""Scores of outputs on test rows: sums over rows, and their averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foedus.base.rows import tensor_of
from foedus.base.steps import mean_over_steps
from foedus.core.algorithm import Algorithm
from foedus.core.predictor import Predictor

if TYPE_CHECKING:
    from foedus.data.dataset import Data


def scored_rows(
    algorithm: Algorithm, predictor: Predictor, data: Data, outputs: bool = False
) -> dict[str, torch.Tensor]:
    """The scores of all test rows, computed in blocks of rows.

    The outputs of all rows at once may exceed memory (with a vocabulary of classes).

    Args:
        algorithm: The algorithm, which defines the loss of a row.
        predictor: The model.
        data: The data set with the test rows.
        outputs: Whether the outputs are returned, too.
    """
    return scores_of(algorithm, predictor, data.x_test, data.y_test, data.classes, outputs)


def scores_of(
    algorithm: Algorithm, predictor: Predictor, x: np.ndarray, y: np.ndarray,
    classes: int | None, outputs: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """As `scored_rows`, for given rows."""
    blocks = zip(*(tensor_of(t).split(predictor.block) for t in (x, y)), strict=True)
    parts = []
    for bx, by in blocks:
        out = predictor.outputs(bx)
        scores = row_scores(algorithm, out, by, classes)
        parts.append(scores | {"outputs": out} if outputs else scores)
    return {k: torch.cat([p[k] for p in parts]).double() for k in parts[0]}


def score(rows: dict[str, torch.Tensor], data: Data) -> dict[str, float]:
    """Averages over all test rows.

    Args:
        rows: The result of `scored_rows`.
        data: The data set.
    """
    found = {"loss": rows["loss"]}
    found |= {"accuracy": rows["hits"]} if data.classes else {"mse": rows["error"]}
    if data.weights_test is None:
        return {k: float(v.mean()) for k, v in found.items()}
    weight = torch.from_numpy(data.weights_test)
    return {k: float(weight @ v / weight.sum()) for k, v in found.items()}


def averages(sums: dict[str, torch.Tensor], classes: int | None) -> dict[str, float]:
    """Averages over rows from sums by client, and the worst client's score.

    They are weighted if the sums are.
    """
    count = sums.get("weight", sums["rows"]).double()
    total, some = count.sum(), count > 0
    if total == 0:
        return {}
    name, key = ("accuracy", "hits") if classes else ("mse", "error")
    each = sums[key][some] / count[some]
    worst = each.min() if classes else each.max()
    return {
        "loss": float(sums["loss"].sum() / total),
        name: float(sums[key].sum() / total),
        f"{name}_worst": float(worst),
    }


def row_scores(
    algorithm: Algorithm, outputs: Tensor, y: Tensor, classes: int | None
) -> dict[str, Tensor]:
    """The terms that evaluation adds up over rows: the loss, and hits or squared errors."""
    loss = algorithm.row_loss(outputs, y)
    if classes and outputs.dim() == 3:  # sequences: the fraction of correct steps
        return {"loss": loss, "hits": mean_over_steps((outputs.argmax(-1) == y).double(), y)}
    if classes:
        return {"loss": loss, "hits": outputs.argmax(-1) == y}
    target = y if y.dim() == outputs.dim() else y.unsqueeze(-1)
    return {"loss": loss, "error": (outputs - target).square().mean(-1)}
