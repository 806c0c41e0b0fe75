"""The share of y that a shared model, a private one, and both together explain.

FedRes: Agarwal, Langford and Wei, "Federated residual learning". It adds a private model to a
shared one at every client, which helps where tasks differ and have something in common. Here linear
models answer, fitted in closed form.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge

from foedus.base.settings import check_value
from foedus.data.federation import Federation
from foedus.diagnosis.heterogeneity import check_federation

if TYPE_CHECKING:
    import pandas as pd

_FOLDS = 5
_COMPONENTS = 64  # more features are replaced by this number of principal components
_PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4)
_NEVER = 1e9  # a penalty that sets the parameter to zero

MODELS = ("labels", "shared", "private", "both")


@dataclass(frozen=True, eq=False)
class Sharing:
    """The result of `fd.sharing`; `str` of it is a few readable lines.

    `alike` and `itself` are the averages of `similarity` beside the diagonal, and on it.

    Attributes:
        explained: By model ("labels", "shared", "private", "both"), the share of the variance of y
            that it explains on held-out rows: 1 is all of it, 0 no more than the mean of y over all
            rows.
        accuracy: By model, on the same rows; `None` for regression.
        gain: By how much "both" explains more than the better of "shared" and "private", and the
            standard error of that.
        similarity: [clients, clients], the cosine between the predictions of two clients' private
            models. The diagonal compares models of two halves of a client's rows: its distance to 1
            is noise, and a larger distance off the diagonal means that tasks differ. NaN if a
            client's rows do not determine it (a single row, a single label).
        per_client: One row a client: client (its id), rows, and the share that each model explains
            there.

    Example:
        >>> fed = fd.split(fd.load("diabetes"), "iid", clients=3)
        >>> [*fd.sharing(fed).explained]
        ['labels', 'shared', 'private', 'both']
    """

    explained: dict[str, float]
    accuracy: dict[str, float] | None
    gain: tuple[float, float]
    similarity: np.ndarray = field(repr=False)
    per_client: pd.DataFrame = field(repr=False)

    @property
    def alike(self) -> float:
        return _mean(self.similarity[~np.eye(len(self.similarity), dtype=bool)])

    @property
    def itself(self) -> float:
        return _mean(np.diag(self.similarity))

    def __str__(self) -> str:
        names = {
            "labels": "a client's own average of y",
            "shared": "one linear model for all",
            "private": "a linear model of its own",
            "both": "both, added up (as FedRes)",
        }
        accuracy = ", accuracy" if self.accuracy else ""
        lines = [f"on held-out rows: share of the variance of y explained{accuracy}"]
        for model in MODELS:
            hits = f"  {self.accuracy[model]:.4f}" if self.accuracy else ""
            lines.append(f"{names[model]:<28} {self.explained[model]:7.4f}{hits}")
        halves = f"(of a client's two halves: {self.itself:.2f})"
        lines.append(f"similarity of two clients' models: {self.alike:.2f} {halves}")
        return "\n".join(lines)


def sharing(fed: Federation, *, seed: int = 0) -> Sharing:
    """How much of y linear models of four kinds explain, by five-fold cross-validation.

    With x standardized and y centered (classes one against all as 0 and 1), client i predicts

        f_i(x) = w . x + c  +  v_i . x + c_i,
        minimizing  sum over rows of (f_i(x) - y)^2 + s |w, c|^2 + sum_i (l |v_i|^2 + l' c_i^2)

    "shared" leaves out the second half, "private" the first, "labels" all but c_i; "both" has all
    of it, and is what FedRes converges to. The penalties are the best of a few powers of ten (for
    c_i, 1: one imaginary row of the average client). "both" may leave out a half. If private models
    explain much more than the shared one, tasks differ; if "labels" does so already, only label
    frequencies differ. Rows of more than 64 features are replaced by their 64 principal components.
    The order of the clients does not matter.

    Args:
        fed: The federation.
        seed: Seed of the folds.

    Returns:
        The shares of the variance, by model.

    Example:
        >>> x = np.array([[-1.0], [1.0], [-2.0], [2.0]] * 5)
        >>> opposite = fd.sharing(fd.Federation.from_clients([(x, x[:, 0]), (x, -x[:, 0])]))
        >>> (round(opposite.explained["shared"], 2) <= 0, round(opposite.explained["private"], 2),
        ...  round(opposite.alike))
        (True, 1.0, -1)
    """
    check_federation(fed)
    check_value("seed", seed, Annotated[int, Ge(0)])
    import pandas as pd

    owner, fold, half = fed.owners(), *_deal(fed, seed)
    x, (y, mean) = _features(fed, seed), _targets(fed)
    total = np.square(y).sum()
    sums = _Sums(x, y, owner, fold, len(fed))
    candidates = {
        "labels": [(_NEVER, _NEVER, 1.0)],
        "shared": [(s, _NEVER, _NEVER) for s in _PENALTIES],
        "private": [(_NEVER, slopes, 1.0) for slopes in (*_PENALTIES, _NEVER)],
        "both": [(s, slopes, 1.0) for slopes in (*_PENALTIES, _NEVER) for s in _PENALTIES],
    }
    candidates["both"] += candidates["shared"] + candidates["private"]
    chosen = {m: min(some, key=lambda p: sums.errors(*p).sum()) for m, some in candidates.items()}
    errors = {model: sums.errors(*p) for model, p in chosen.items()}
    each = {model: np.bincount(owner, e, len(fed)) for model, e in errors.items()}
    saved = min((errors["shared"], errors["private"]), key=np.sum) - errors["both"]
    accuracy = None
    if fed.data.classes is not None:
        label = fed.data.y_train[fed.rows]
        outputs = {model: sums.outputs(*p) + mean for model, p in chosen.items()}
        accuracy = {m: float((out.argmax(1) == label).mean()) for m, out in outputs.items()}
    # a constant y has no variance to explain
    explained, gain = dict.fromkeys(each, 0.0), (0.0, 0.0)
    if total > 0:
        explained = {model: float(1 - e.sum() / total) for model, e in each.items()}
        gain = float(saved.sum() / total), float(saved.std() * len(saved) ** 0.5 / total)
    spread = np.bincount(owner, np.square(y).sum(1), len(fed))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = {model: 1 - e / spread for model, e in each.items()}
    similarity = _similarity(x, y, owner, half, len(fed), chosen["private"][1])
    table = pd.DataFrame({**fed.client_columns(), "rows": fed.sizes, **shares})
    return Sharing(explained, accuracy, gain, similarity, table)


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else float("nan")


def _deal(fed: Federation, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Fold and half of each row, drawn for each client by its id."""
    ranks = [
        np.random.default_rng([seed, int(i)]).permutation(n)
        for i, n in zip(fed.ids, fed.sizes, strict=True)
    ]
    # the only rows of small clients are not all in the first fold
    shift = np.repeat(fed.ids, fed.sizes)
    rank = np.concatenate(ranks)
    return (rank + shift) % _FOLDS, rank % 2


def _features(fed: Federation, seed: int) -> np.ndarray:
    """Rows as they are compared: standardized, at most `_COMPONENTS` features, and a 1."""
    x = fed.data.x_train[fed.rows].reshape(len(fed.rows), -1).astype(np.float64)
    x -= x.mean(0)
    deviation = x.std(0)
    x = x[:, deviation > 1e-12] / deviation[deviation > 1e-12]
    if x.shape[1] > _COMPONENTS:
        from sklearn.utils.extmath import randomized_svd

        some = x[np.argsort(fed.rows)][:20_000]  # so that the order of clients does not matter
        x = x @ randomized_svd(some, _COMPONENTS, n_iter=3, random_state=seed)[2].T
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def _targets(fed: Federation) -> tuple[np.ndarray, np.ndarray]:
    """y centered, `[n, outputs]`, and its mean; several targets have equal weight."""
    y = fed.data.y_train[fed.rows]
    if fed.data.classes is not None:
        y = np.eye(fed.data.classes)[y]
        return y - y.mean(0), y.mean(0)
    y = y.reshape(len(y), -1).astype(np.float64)
    mean, deviation = y.mean(0), y.std(0)
    return (y - mean) / np.where(deviation > 0, deviation, 1.0), mean


class _Sums:
    """Least squares from sums over the rows outside each fold, `[folds, clients, ...]`."""

    def __init__(
        self, x: np.ndarray, y: np.ndarray, owner: np.ndarray, fold: np.ndarray, clients: int
    ):
        self.x, self.y = x, y
        self.known: dict[tuple[float, float, float], np.ndarray] = {}
        self.eliminated: tuple[tuple[float, float] | None, list[tuple[np.ndarray, ...]]]
        self.eliminated = None, []
        cell = owner * _FOLDS + fold
        order = np.argsort(cell, kind="stable")
        ends = np.searchsorted(cell[order], np.arange(clients * _FOLDS + 1))
        segments = enumerate(itertools.pairwise(ends))
        self.parts = {divmod(k, _FOLDS): order[a:b] for k, (a, b) in segments if b > a}
        shapes = ((_FOLDS, clients, x.shape[1], v.shape[1]) for v in (x, y))
        gram, moment = map(np.zeros, shapes)
        for (i, f), rows in self.parts.items():
            gram[f, i], moment[f, i] = x[rows].T @ x[rows], x[rows].T @ y[rows]
        self.gram, self.moment = gram.sum(0) - gram, moment.sum(0) - moment

    def outputs(self, shared: float, slopes: float, level: float) -> np.ndarray:
        """Predictions of every row by the other folds' models; penalties of (w, c), v_i, c_i."""
        if (shared, slopes, level) not in self.known:
            found = np.empty_like(self.y)
            for f, (left, right, slope, start) in enumerate(self._eliminate(slopes, level)):
                w = np.linalg.solve(left + shared * np.eye(len(left)), right)
                v = start - slope @ w
                for (i, g), rows in self.parts.items():
                    if g == f:
                        found[rows] = self.x[rows] @ (w + v[i])
            self.known[shared, slopes, level] = found
        return self.known[shared, slopes, level]

    def errors(self, shared: float, slopes: float, level: float) -> np.ndarray:
        """Squared error of every row."""
        return np.square(self.outputs(shared, slopes, level) - self.y).sum(1)

    def _eliminate(self, slopes: float, level: float) -> list[tuple[np.ndarray, ...]]:
        """The system for w of each fold without v_i = M_i^-1 (b_i - A_i w), M_i = A_i + penalties.

        Also M_i^-1 A_i and M_i^-1 b_i.

        The last one is kept, since it serves every penalty on w.
        """
        if self.eliminated[0] != (slopes, level):
            size = self.x.shape[1]
            penalty = np.diag(np.append(np.full(size - 1, slopes), level))
            found: list[tuple[np.ndarray, ...]] = []
            for gram, moment in zip(self.gram, self.moment, strict=True):
                solved = np.linalg.solve(gram + penalty, np.concatenate([gram, moment], axis=-1))
                slope, start = solved[..., :size], solved[..., size:]
                left, right = (gram - gram @ slope).sum(0), (moment - gram @ start).sum(0)
                found.append((left, right, slope, start))
            self.eliminated = (slopes, level), found
        return self.eliminated[1]


def _similarity(
    x: np.ndarray, y: np.ndarray, owner: np.ndarray, half: np.ndarray, clients: int, penalty: float
) -> np.ndarray:
    """Cosines between the private slopes' predictions on all rows, half against other half."""
    x = x[:, :-1]
    covariance, ridge = x.T @ x / len(x), min(penalty, _PENALTIES[-1]) * np.eye(x.shape[1])
    fitted = np.zeros((2, clients, x.shape[1], y.shape[1]))
    for i, h in itertools.product(range(clients), (0, 1)):
        rows = np.flatnonzero((owner == i) & (half == h))
        if len(rows) > 1:
            a, b = x[rows] - x[rows].mean(0), y[rows] - y[rows].mean(0)
            fitted[h, i] = np.linalg.solve(a.T @ a + ridge, a.T @ b)
    flat = fitted.reshape(2, clients, -1)
    weighed = (covariance @ fitted).reshape(2, clients, -1)
    norm = np.sqrt((flat * weighed).sum(-1))
    norm[norm < 1e-9] = np.nan
    cosine = flat[0] @ weighed[1].T / (norm[0][:, None] * norm[1])
    return (cosine + cosine.T) / 2
