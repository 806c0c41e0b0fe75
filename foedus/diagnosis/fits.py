"""Which functions a data set needs, on held-out rows: linear, with a bandwidth, or trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from foedus.data.federation import Federation
from foedus.models.features import FeatureMap, Identity, RandomFourier

_ROWS = 8000  # rows to fit, and at most as many to test
# random features: 500, or 1000 for rows of at least 100 features
_FEATURES, _MANY, _WIDE = 500, 1000, 100
_BANDWIDTHS = (0.35, 0.7, 1.4)  # times the median distance between rows
_REGS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
_LINEAR = 1000  # with more features the system of a linear model is too large for a quick look


@dataclass(frozen=True)
class Fit:
    """A ridge regression on held-out rows: mean squared error, its standard error, the score."""

    features: FeatureMap
    reg: float
    error: float
    noise: float
    score: float


def fits(
    fed: Federation,
    features: FeatureMap | None,
    reg: float | None,
    rng: np.random.Generator,
    seed: int,
) -> tuple[dict[str, float], FeatureMap, float]:
    """Scores of a "linear" model, one on FedNewton's "features", and "trees"; features and reg.

    A score is the accuracy, or for regression the share of the variance that is explained. By
    default, features are the best of three bandwidths, or linear if that is as good, with the
    largest reg that is as good.
    """
    trial = _Trial(fed, rng, seed)
    linear = trial.ridge(Identity(intercept=True), None) if fed.spec.features <= _LINEAR else None
    if features is not None:
        best = trial.ridge(features, reg)
    else:
        near, size = trial.distance(rng), _MANY if fed.spec.features >= _WIDE else _FEATURES
        bandwidths = [float(f"{near * times:.3g}") for times in _BANDWIDTHS]
        maps = [RandomFourier(size, bandwidth=bandwidth) for bandwidth in bandwidths]
        best = min((trial.ridge(m, reg) for m in maps), key=lambda f: f.error)
    if features is None and linear and linear.error <= best.error + best.noise:
        best = linear if reg is None else trial.ridge(linear.features, reg)
    scores = {"linear": linear.score} if linear else {}
    return scores | {"features": best.score, "trees": trial.trees()}, best.features, best.reg


class _Trial:
    """Rows to fit and rows to test."""

    def __init__(self, fed: Federation, rng: np.random.Generator, seed: int):
        rows = rng.permutation(np.sort(fed.rows))
        held, used = np.split(rows, [len(rows) // 4]) if len(rows) >= 4 else (rows, rows)
        self.x, self.x_held = (
            fed.data.x_train[r[:_ROWS]].astype(np.float32, copy=False) for r in (used, held)
        )
        self.label, self.label_held = (fed.data.y_train[r[:_ROWS]] for r in (used, held))
        self.classes, self.seed = fed.data.classes, seed
        self.y, self.y_held = (self._columns(label) for label in (self.label, self.label_held))

    def _columns(self, label: np.ndarray) -> np.ndarray:
        if self.classes is not None:
            return np.eye(self.classes)[label]
        return label.reshape(len(label), -1).astype(np.float64)

    def distance(self, rng: np.random.Generator) -> float:
        """The median distance between two rows (1 if all are equal)."""
        from scipy.spatial.distance import pdist

        some = self.x[rng.permutation(len(self.x))[:500]]
        apart = pdist(some.reshape(len(some), -1).astype(np.float64))
        apart = apart[apart > 0]
        return float(np.median(apart)) if len(apart) else 1.0

    def score(self, outputs: np.ndarray) -> float:
        if self.classes is not None:
            return float((outputs.argmax(1) == self.label_held).mean())
        spread = np.square(self.y_held - self.y.mean(0)).sum()
        return float(1 - np.square(outputs - self.y_held).sum() / spread) if spread > 0 else 0.0

    def ridge(self, features: FeatureMap, reg: float | None) -> Fit:
        """FedNewton's objective on all rows; without reg, the largest as good as the best."""
        mapped = features.seeded(self.seed)
        phi, held = (mapped(torch.from_numpy(x)).numpy() for x in (self.x, self.x_held))
        values, vectors = np.linalg.eigh(phi.T @ phi / len(phi))
        moment, held = vectors.T @ (phi.T @ self.y) / len(phi), held @ vectors
        found = []
        for r in _REGS if reg is None else (reg,):
            outputs = held @ (moment / (values.clip(0) + r)[:, None])
            errors = np.square(outputs - self.y_held).sum(1)
            error, noise = float(errors.mean()), float(errors.std() / len(errors) ** 0.5)
            found.append(Fit(features, r, error, noise, self.score(outputs)))
        best = min(found, key=lambda f: f.error)
        return next(f for f in found if f.error <= best.error + best.noise)  # regs decrease

    def trees(self) -> float:
        from sklearn.ensemble import ExtraTreesRegressor

        x, held = (v.reshape(len(v), -1) for v in (self.x, self.x_held))
        settings = {"max_features": 0.3, "min_samples_leaf": 2, "random_state": self.seed}
        forest = ExtraTreesRegressor(50, **settings)
        y = self.y if self.y.shape[1] > 1 else self.y[:, 0]
        return self.score(forest.fit(x, y).predict(held).reshape(len(held), -1))
