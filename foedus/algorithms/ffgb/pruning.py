"""Smaller models for deployment from an ensemble of FFGB: by leaving out functions, or by
distillation into one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foedus import wire
from foedus.algorithms.ffgb.boost import FFGB
from foedus.base import random
from foedus.base.settings import Settings
from foedus.base.tree import Tree
from foedus.core.predictor import Predictor
from foedus.core.result import Run
from foedus.errors import ConfigError, DataError
from foedus.export.forms import Ensemble
from foedus.models.oracles import Forest, Oracle


@dataclass(frozen=True, eq=False)
class Small(Settings):
    """A small model for deployment, from `fd.prune` or `fd.distil`.

    Attributes:
        model: Predicts.
        functions: The functions of the oracle that it consists of.
        weights: The weight of each.
        nbytes: Bytes that it takes to send it.

    Example:
        >>> data = fd.load("breast_cancer")
        >>> fed = fd.split(data, "iid", clients=3)
        >>> small = fd.distil(fd.run(fd.FFGB(fd.Forest(trees=5)), fed, rounds=3), data.x_train)
        >>> len(small), small.nbytes > 0
        (1, True)
    """

    model: Predictor
    functions: Tree
    weights: Tensor
    nbytes: int

    def __len__(self) -> int:
        return len(self.weights)


def prune(run: Run, x: Any, y: Any, tolerance: float = 0.01, refit: bool = True) -> Small:
    """Leave out the functions of an ensemble that do not matter on validation rows.

    Functions go in order of the size of what they add, |weight| times the root of the mean square
    of their values on x, smallest first, for as long as the loss on (x, y) stays within `tolerance`
    of the whole ensemble's.

    Args:
        run: A run of `fd.FFGB`.
        x: Validation rows.
        y: Their labels.
        tolerance: By how much the loss may grow, relative to that of the whole ensemble.
        refit: Whether the weights of the functions that stay are then fitted, by least squares on x
            to the values of the whole ensemble; kept only if the loss is lower for it.

    Returns:
        The smaller model.

    Example:
        >>> data = fd.load("breast_cancer")
        >>> fed = fd.split(data, "iid", clients=3)
        >>> run = fd.run(fd.FFGB(fd.Forest(trees=5)), fed, rounds=5)
        >>> small = fd.prune(run, data.x_train, data.y_train, tolerance=0.1)
        >>> len(small) < 15
        True
    """
    algorithm, functions, weights, rows = _whole(run, x)
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"tolerance={tolerance!r} must be a part of the loss, 0 or more")
    labels = torch.as_tensor(np.asarray(y, np.int64 if run.spec.classes else np.float32))
    if len(labels) != len(rows):
        raise DataError(f"x has {len(rows)} rows and y {len(labels)}")
    oracle, spec = algorithm.oracle, run.spec
    singles = [oracle.pick(functions, j) for j in range(len(weights))]
    said = torch.stack(
        [
            weights[j].float() * oracle.values(h, torch.ones(1), rows, spec)
            for j, h in enumerate(singles)
        ]
    )
    order = torch.argsort(said.square().mean((1, 2)))
    whole = said.sum(0)
    # What is left after the smallest 0, 1, 2, ... are gone.
    left, best = whole.clone(), 0
    limit = float(algorithm.row_loss(whole, labels).mean()) * (1 + tolerance)
    for gone, j in enumerate(order[:-1].tolist(), start=1):
        left = left - said[j]
        if float(algorithm.row_loss(left, labels).mean()) <= limit:
            best = gone
    stay = order[best:].sort().values
    kept = weights[stay].double()
    if refit and best:
        columns = said[stay].flatten(1).double()  # already times their weights: factors near 1
        system = columns @ columns.mT
        ridge = 1e-3 * system.diagonal().mean() * torch.eye(len(stay), dtype=system.dtype)
        factor = torch.linalg.solve(
            system + ridge, columns @ whole.flatten().double() + ridge.sum(1)
        )
        better = torch.einsum("j,jnk->nk", factor.float(), said[stay])
        if float(algorithm.row_loss(better, labels).mean()) < float(
            algorithm.row_loss(said[stay].sum(0), labels).mean()
        ):
            kept = kept * factor
    return _small(oracle, oracle.concat([singles[j] for j in stay.tolist()]), kept, run)


def distil(run: Run, x: Any, oracle: Oracle | None = None, seed: int = 0) -> Small:
    """Fit one function of an oracle to the outputs of an ensemble on unlabeled rows.

    Args:
        run: A run of `fd.FFGB`.
        x: Rows; their labels are not needed.
        oracle: What fits the function; by default a forest of 50 trees.
        seed: Of the oracle's random numbers.

    Returns:
        The smaller model.

    Example:
        >>> data = fd.load("breast_cancer")
        >>> fed = fd.split(data, "iid", clients=3)
        >>> run = fd.run(fd.FFGB(fd.Forest(trees=5)), fed, rounds=5)
        >>> small = fd.distil(run, data.x_train, fd.Forest(trees=10))
        >>> (small.model.predict(data.x_test) == data.y_test).mean() > 0.9
        True
    """
    algorithm, functions, weights, rows = _whole(run, x)
    oracle = Forest(trees=50) if oracle is None else oracle
    oracle.check(run.spec)
    teacher = algorithm.oracle.values(functions, weights, rows, run.spec)
    found = oracle.fit(rows, teacher, random.key(seed), run.spec)
    return _small(oracle, oracle.join([found]), torch.ones(1, dtype=torch.float64), run)


def _whole(run: Run, x: Any) -> tuple[FFGB, Tree, Tensor, Tensor]:
    if not isinstance(run.algorithm, FFGB):
        raise ConfigError(f"this is for runs of FFGB, not of {type(run.algorithm).__name__}")
    functions, weights = run.algorithm.ensemble(run.state)
    if not len(weights):
        raise ConfigError("the ensemble is empty: run at least one round")
    rows = torch.from_numpy(np.ascontiguousarray(x, np.float32))
    if tuple(rows.shape[1:]) != run.spec.shape or not len(rows):
        raise DataError(
            f"x has shape {tuple(rows.shape)}; the model expects rows of shape {run.spec.shape}"
        )
    return run.algorithm, functions, weights, rows


def _small(oracle: Oracle, functions: Tree, weights: Tensor, run: Run) -> Small:
    assert isinstance(run.algorithm, FFGB)
    model = run.algorithm.predictor_of(Ensemble(oracle, functions, weights, run.spec))
    return Small(
        model, functions, weights, wire.nbytes({"functions": functions, "weights": weights})
    )
