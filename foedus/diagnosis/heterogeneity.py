"""Distances between the clients' rows and those of the federation: the radii of FFGB's theorems.

FFGB: Shen, Hassani, Kale and Karbasi, "Federated functional gradient boosting", Sections 4.1 and
4.3 and Appendix A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge

from foedus.base.settings import Means, check_value
from foedus.data.federation import Federation
from foedus.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

_ALL_PAIRS = 30  # with more clients, W_2 is averaged over a sample of the pairs
_PAIRS = 200
_NUMBERS = 20_000_000  # projections held at once: 160 MB
# POT's own limit of 10^5 stops short of the optimum with some 2000 points a side
_ITERATIONS = 10**8


@dataclass(frozen=True, eq=False)
class Heterogeneity:
    """The result of `fd.heterogeneity`; `str` of it is a few readable lines.

    Attributes:
        omega_tv: Mean total variation distance between α and α_i, equation (12).
        omega_w1: Mean Wasserstein-1 distance between α and α_i, equation (16), in the units of the
            features.
        w2: (1/N²) Σ_{i,s} W_2²(α_s, α_i), so that Theorem 4.4 has G² = 2 L² `w2` + 2 B².
        label_tv: Mean total variation distance between a client's label distribution and the mean
            of them; `None` for regression, or where labels were not asked for.
        exact: Whether optimal transport was solved exactly; if not, `omega_w1` and `w2` are sliced,
            and too small.
        per_client: One row a client: client (its id), rows, tv, w1, label_tv.

    Example:
        >>> fed = fd.Federation.from_clients([([[0.0]], [0]), ([[3.0]], [1])])
        >>> fd.heterogeneity(fed).per_client.columns.tolist()
        ['client', 'rows', 'tv', 'w1', 'label_tv']
    """

    omega_tv: float
    omega_w1: float
    w2: float
    label_tv: float | None
    exact: bool
    per_client: pd.DataFrame = field(repr=False)

    def __str__(self) -> str:
        rows, how = self.per_client["rows"], "exact" if self.exact else "sliced, a lower bound"
        sampled = f", from {_PAIRS} pairs of clients" if len(rows) > _ALL_PAIRS else ""
        size = f"{len(rows)} clients of {rows.min()} to {rows.max()} rows"
        most = self.per_client.max()
        lines = [
            f"{size}; mean distance of a client (and the largest one)",
            f"features, total variation: {self.omega_tv:.4f} ({most['tv']:.4f})",
            f"features, Wasserstein-1:   {self.omega_w1:.4g} ({most['w1']:.4g}), {how}",
            f"features, Wasserstein-2²:  {self.w2:.4g} between two clients, {how}{sampled}",
        ]
        if self.label_tv is not None:
            lines.append(f"labels, total variation:   {self.label_tv:.4f} ({most['label_tv']:.4f})")
        return "\n".join(lines)


def heterogeneity(
    fed: Federation,
    *,
    features: Callable[[np.ndarray], Any] | None = None,
    max_points: int = 2000,
    projections: int = 200,
    classes: bool = True,
    seed: int = 0,
) -> Heterogeneity:
    """Distances between the clients' distributions of training rows, as FFGB defines them.

    α_i is the empirical distribution of the rows of client i, and α the arithmetic mean of all α_i:
    each client has weight 1/N, for any number of rows. Labels are not part of α; `label_tv` is the
    same distance for labels.

    Total variation, (18), is half the L1 distance of the probabilities, where equal rows are one
    point. If features are continuous and no two rows are equal, it is 1 - 1/N for every split and
    not informative; W_1 measures how far apart rows are.

    Wasserstein distances, (19), with the Euclidean norm, are exact where the federation has at most
    `max_points` distinct rows, and for one-dimensional features. Otherwise they are sliced: the
    mean, over `projections` random directions, of the distance (for `w2`, of its square) between
    the projected distributions. Projections are 1-Lipschitz, so the distance in no direction
    exceeds the true one: **sliced W_1 is a lower bound of W_1**, and sliced W_2² of W_2². In d
    dimensions it is smaller by a factor of sqrt(d) (for squares d) and more, so compare sliced
    values only with sliced values of the same features.

    Samples of the same distribution also have a positive distance, which grows with fewer samples
    and more features: compare a split with `"iid"` for as many clients to see what its scheme adds.
    `w2` averages over all pairs of clients up to 30 clients, and estimates that average from 200
    random pairs of more. The order of the clients does not matter.

    Args:
        fed: The federation.
        features: Maps all rows, `[n, ...]`, to the vectors to compare, `[n, d]`, for example an
            embedding. Without it rows are compared as they are; image-shaped ones are flattened.
        max_points: Most distinct rows for exact optimal transport.
        projections: Random directions of sliced distances.
        classes: Whether labels are compared too.
        seed: Seed of directions and pairs.

    Returns:
        The distances.

    Example:
        >>> fed = fd.Federation.from_clients([([[0.0]], [0]), ([[3.0]], [1])])
        >>> h = fd.heterogeneity(fed)
        >>> h.omega_tv, h.omega_w1, h.w2, h.label_tv
        (0.5, 1.5, 4.5, 0.5)

    Reference: Shen, Hassani, Kale and Karbasi, "Federated functional gradient boosting", AISTATS
    2022, Sections 4.1 and 4.3 and Appendix A.
    """
    check_federation(fed)
    both = Means("True (measure the labels too) or False (leave them out)")
    check_value("classes", classes, Annotated[bool, both])
    check_value("max_points", max_points, Annotated[int, Ge(1)])
    check_value("projections", projections, Annotated[int, Ge(1)])
    check_value("seed", seed, Annotated[int, Ge(0)])
    import pandas as pd

    x, rng = _feature_rows(fed, features), np.random.default_rng(seed)
    # before any direction, so that exact and sliced distances use the same pairs
    pairs, share = _pairs(fed, rng)
    atoms = _atoms(x, fed)
    exact = len(fed) == 1 or x.shape[1] == 1 or len(atoms.alpha) <= max_points
    if len(fed) == 1:
        w1, w2 = np.zeros(1), np.zeros(0)
    elif x.shape[1] == 1:
        w1, w2 = _sliced(x, fed, pairs, np.ones((1, 1)))
    elif exact:
        w1, w2 = _exact(x, atoms, pairs)
    else:
        directions = rng.standard_normal((projections, x.shape[1]))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        w1, w2 = _sliced(x, fed, pairs, directions)
    tv, label_tv = _total_variation(atoms), np.full(len(fed), np.nan)
    if labelled := classes and fed.data.classes is not None:
        labels = fed.label_counts() / fed.sizes[:, None]
        label_tv = np.abs(labels - labels.mean(0)).sum(1) / 2
    columns = fed.client_columns()
    columns |= {"rows": fed.sizes, "tv": tv, "w1": w1, "label_tv": label_tv}
    return Heterogeneity(
        omega_tv=float(tv.mean()),
        omega_w1=float(w1.mean()),
        w2=share * float(w2.mean()) if len(w2) else 0.0,
        label_tv=float(label_tv.mean()) if labelled else None,
        exact=exact,
        per_client=pd.DataFrame(columns),
    )


def check_federation(fed: object) -> None:
    if not isinstance(fed, Federation):
        raise ConfigError(f"fed is a {type(fed).__name__}; give a Federation, as fd.split returns")
    fed.data.refuse_raw()
    if fed.spec.steps:
        raise ConfigError(
            f"rows have {fed.spec.steps} labels each, one for each step of a sequence; what is "
            "measured here is for one label a row: give the windows of each step as rows, or a "
            "federation with y[:, -1] as its labels"
        )


def _feature_rows(fed: Federation, features: Callable | None) -> np.ndarray:
    """Rows of all clients one after the other, `[n, d]`, floating point and contiguous."""
    x = fed.data.x_train[fed.rows].astype(np.float32, copy=False)
    if features is None:
        x = x.reshape(len(x), -1)
    elif not callable(features):
        needed = "a function from rows [n, ...] to an array [n, d], or None"
        raise ConfigError(f"features={features!r} must be {needed}")
    else:
        n, x = len(x), np.asarray(features(x))
        if x.ndim != 2 or len(x) != n or x.shape[1] == 0:
            raise ConfigError(
                f"features returned shape {x.shape} for {n} rows; it must return [{n}, d]"
            )
        if x.dtype.kind not in "fiub":
            raise ConfigError(
                f"features returned dtype {x.dtype}; it must return an array of real numbers"
            )
        if not np.isfinite(x).all():
            raise ConfigError(
                "features returned a number that is NaN or infinite; it must return finite ones"
            )
        x = x.astype(x.dtype if x.dtype.kind == "f" else np.float64, copy=False)
    # -0.0 becomes 0.0, which has other bytes but is the same number
    return np.ascontiguousarray(x + 0.0)


def _pairs(fed: Federation, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Positions of the clients of each pair, `[pairs, 2]`, and the share of pairs with i ≠ s."""
    n = len(fed)
    if n <= _ALL_PAIRS:
        pairs = np.stack(np.triu_indices(n, 1), axis=1)
    else:
        first, second = np.divmod(rng.choice(n * (n - 1), _PAIRS, replace=False), n - 1)
        pairs = np.argsort(fed.ids)[np.stack([first, second + (second >= first)], axis=1)]
    return pairs, (n - 1) / n


# Distributions as probabilities of distinct rows


class _Atoms(NamedTuple):
    """α and all α_i: client `client[k]` has probability `p[k]` at distinct row `atom[k]`."""

    row: np.ndarray  # where each distinct row is found
    alpha: np.ndarray
    client: np.ndarray
    atom: np.ndarray
    p: np.ndarray
    offsets: np.ndarray  # slices of the clients in the three arrays above

    def of(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self.offsets[position], self.offsets[position + 1])
        return self.atom[part], self.p[part]


def _atoms(x: np.ndarray, fed: Federation) -> _Atoms:
    whole_rows = x.view(np.dtype((np.void, x.itemsize * x.shape[1]))).ravel()
    _, row, atom = np.unique(whole_rows, return_index=True, return_inverse=True)
    cell, count = np.unique(fed.owners() * len(row) + atom.ravel(), return_counts=True)
    client, atom = np.divmod(cell, len(row))
    p = count / fed.sizes[client]
    alpha = np.bincount(atom, p / len(fed), minlength=len(row))
    return _Atoms(row, alpha, client, atom, p, np.searchsorted(client, np.arange(len(fed) + 1)))


def _total_variation(atoms: _Atoms) -> np.ndarray:
    """TV(α, α_i) of each client, half the L1 distance: the mass of α_i in excess of α."""
    excess = np.maximum(atoms.p - atoms.alpha[atoms.atom], 0.0)
    return np.minimum(np.add.reduceat(excess, atoms.offsets[:-1]), 1.0)


def _exact(x: np.ndarray, atoms: _Atoms, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W_1(α, α_i) of each client and W_2² of each pair, by the network simplex."""
    import ot
    from scipy.spatial.distance import pdist, squareform

    cost = squareform(pdist(x[atoms.row].astype(np.float64)))

    def transport(a: np.ndarray, b: np.ndarray, cost: np.ndarray) -> float:
        return float(ot.emd2(a / a.sum(), b / b.sum(), cost, numItermax=_ITERATIONS))

    w1 = np.zeros(len(atoms.offsets) - 1)
    for i in range(len(w1)):
        atom, p = atoms.of(i)
        surplus = atoms.alpha.copy()
        surplus[atom] -= p
        # By duality W_1 depends only on α - α_i: mass that both have in common is not moved, and
        # not part of the problem.
        source, sink = np.flatnonzero(surplus > 1e-15), np.flatnonzero(surplus < -1e-15)
        if len(source) and len(sink):
            mass = surplus[source].sum()
            w1[i] = mass * transport(
                surplus[source], -surplus[sink], np.ascontiguousarray(cost[np.ix_(source, sink)])
            )
    np.square(cost, out=cost)
    w2 = np.zeros(len(pairs))
    for k, (i, s) in enumerate(pairs):
        (atom_i, p_i), (atom_s, p_s) = atoms.of(i), atoms.of(s)
        w2[k] = transport(p_i, p_s, np.ascontiguousarray(cost[np.ix_(atom_i, atom_s)]))
    return w1, w2


# Distributions projected on lines


def _sliced(
    x: np.ndarray, fed: Federation, pairs: np.ndarray, directions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Means over directions of each client's W_1(α, α_i), and of each pair's W_2², projected."""
    w1, w2 = np.zeros(len(fed)), np.zeros(len(pairs))
    line = _Line(fed)
    step = max(1, _NUMBERS // len(x))
    for start in range(0, len(directions), step):
        block = directions[start : start + step].T
        projected = np.concatenate(
            [x[k : k + 8192].astype(np.float64) @ block for k in range(0, len(x), 8192)]
        )
        projected = np.ascontiguousarray(projected.T)
        for z in projected:
            w1 += line.w1(z)  # leaves z sorted within each client
        for k, (i, s) in enumerate(pairs):
            a, b = (projected[:, fed.offsets[j] : fed.offsets[j + 1]] for j in (i, s))
            w2[k] += _squared_w2(a, b)
    return w1 / len(directions), w2 / len(directions)


class _Line:
    """W_1(α, α_i) of all clients on a line, ∫ |F - F_i|, by their distribution functions F.

    F_i is constant between neighboring rows of client i, say c, and F rises; so |F - F_i| is c - F
    up to the quantile of F at c, and F - c from there. With the integral of F at hand each piece
    takes a few operations, and all clients together O(n log n), where comparing each client with
    all n rows would take n N.
    """

    def __init__(self, fed: Federation):
        self.owner, self.sizes = fed.owners(), fed.sizes
        self.weights = 1.0 / (len(fed) * self.sizes[self.owner])
        # a client of m rows has m + 1 pieces: before its first row, between rows, after its last
        self.first = fed.offsets[:-1] + np.arange(len(fed))
        self.ends_at = np.arange(len(self.owner)) + self.owner
        pieces = self.sizes + 1
        rank = np.arange(pieces.sum()) - np.repeat(self.first, pieces)
        self.level = rank / np.repeat(self.sizes, pieces)

    def w1(self, z: np.ndarray) -> np.ndarray:
        """W_1 of each client from the points of all rows; sorts those of each client in place."""
        n = len(z)
        order = np.argsort(z)
        t = z[order]
        F = np.cumsum(self.weights[order])
        # ∫ F from the least point to each
        area = np.concatenate([[0.0], np.cumsum(F[:-1] * np.diff(t))])
        place = np.argsort(self.owner[order], kind="stable")
        z[:] = t[place]
        start, end = np.zeros(n + len(self.sizes), np.int64), np.full(n + len(self.sizes), n - 1)
        start[self.ends_at + 1] = place
        end[self.ends_at] = place
        c, quantile = self.level, np.clip(np.searchsorted(F, self.level), start, end)
        below = c * (t[quantile] - t[start]) - (area[quantile] - area[start])
        above = (area[end] - area[quantile]) - c * (t[end] - t[quantile])
        return np.maximum(np.add.reduceat(below + above, self.first), 0.0)


def _squared_w2(a: np.ndarray, b: np.ndarray) -> float:
    """Sum over directions of W_2² between sorted points `[directions, n]` and `[directions, m]`.

    It is ∫ (F_a⁻¹ - F_b⁻¹)².
    """
    n, m = a.shape[1], b.shape[1]
    # Quantile functions step at multiples of 1/n and 1/m: in units of 1/(n m), integers.
    ends = np.unique(np.concatenate([np.arange(1, n + 1) * m, np.arange(1, m + 1) * n]))
    gap = a[:, (ends - 1) // m] - b[:, (ends - 1) // n]
    return float((gap**2 @ np.diff(ends, prepend=0)).sum()) / (n * m)
