"""Which pairs of clients share masks: all, or each client with k random others (Bell et al. 2020).

The random graph is a ring in random order; the neighbors of a client are the k / 2 next ones on
either side (a Harary graph, as in Bell, Bonawitz, Gascon, Lepoint and Raykova, "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020). Each secret is shared among
the closed neighborhood, of m = k + 1 clients, and takes t = ceil(threshold m) shares to rebuild.
Let at most A = gamma n clients collude with the server and at most D = delta n drop out, chosen in
any way before the order is drawn:

    connected   the ring falls apart only where k / 2 clients in a row are gone at two places. With
                B = A + D gone, a union over the n (n - k - 1) / 2 pairs of places bounds the
                probability by n (n - k - 1) / 2 * C(B, k) / C(n, k)
    hidden      the number of a client's neighbors who collude is Hypergeometric(n - 1, A, k). It
                must be below 2 t - m: then the honest holders are too few for t shares of both of a
                client's secrets, even if the server tells some of them that the client is there and
                others that it is gone. The bound is n times the probability
    recovered   of a client's k neighbors, at least t must stay:
                n times P[Hypergeometric(n - 1, n - 1 - D, k) < t]

k is the smallest even number for which the first two are at most 2^-41 each (2^-40 together) and
the third is at most 2^-20, with gamma = delta = 1/10. For a threshold of 2/3:

    n       101   200   500   1,000   10,000   100,000
    k        32    58   100     124      160       178

Up to 100 clients all are neighbors of each other, and any dropouts down to the threshold are
tolerated. The random graph tolerates dropouts of a tenth with the probabilities above; beyond that,
some client's neighborhood may be too small, and the aggregation stops with an error.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from foedus.aggregation.secure.shamir import Entropy
from foedus.errors import ConfigError

COMPLETE = 100
"""Up to this number of clients, all are neighbors of each other."""
COLLUDING, DROPPING = 0.1, 0.1
"""gamma and delta."""
SECURITY, CORRECTNESS = 40, 20
"""The probabilities of failure are at most 2^-SECURITY and 2^-CORRECTNESS."""
_MOST = 1000


def part(threshold: float, count: int) -> int:
    """ceil(threshold * count), whatever the rounding of 2/3."""
    return math.ceil(threshold * count - 1e-9)


@functools.lru_cache(maxsize=256)
def degree(n: int, threshold: float) -> int:
    """The number of neighbors of each of n clients; n - 1 if all are neighbors."""
    if n <= COMPLETE:
        return n - 1
    for k in range(2, min(n - 1, _MOST + 1), 2):
        connected, hidden, recovered = risks(n, k, threshold)
        if max(connected, hidden) <= -SECURITY - 1 and recovered <= -CORRECTNESS:
            return k
    if n - 1 <= _MOST:
        return n - 1
    raise ConfigError(
        f"threshold={threshold:g}: no {_MOST} neighbors or fewer are safe enough for {n} clients "
        f"of which {COLLUDING:.0%} may "
        f"collude and {DROPPING:.0%} may drop out; use threshold=2/3, or set neighbours= yourself"
    )


def risks(n: int, k: int, threshold: float) -> tuple[float, float, float]:
    """log2 of the bounds on the probabilities of failure: connected, hidden, recovered."""
    m, colluding, dropping = (
        k + 1,
        math.floor(COLLUDING * n + 1e-9),
        math.floor(DROPPING * n + 1e-9),
    )
    t, gone = part(threshold, m), colluding + dropping
    apart = -math.inf
    if k <= gone and k < n - 1:
        apart = math.log2(n * (n - k - 1) / 2) + float(_choose(gone, k) - _choose(n, k)) / math.log(
            2
        )
    seen = _tail(n - 1, min(colluding, n - 1), k, least=2 * t - m)
    lost = _tail(n - 1, dropping, k, least=k - t + 1)
    return apart, math.log2(n) + seen, math.log2(n) + lost


def _choose(n: np.ndarray | int, k: np.ndarray | int) -> np.ndarray:
    """The logarithm of n over k."""
    from scipy.special import gammaln

    return gammaln(np.add(n, 1)) - gammaln(np.add(k, 1)) - gammaln(np.subtract(n, k) + 1)


def _tail(total: int, marked: int, drawn: int, least: int) -> float:
    """log2 P[at least `least` of the drawn are marked]."""
    i = np.arange(max(least, drawn - (total - marked), 0), min(marked, drawn) + 1)
    if not len(i):
        return -math.inf
    logs = _choose(marked, i) + _choose(total - marked, drawn - i) - _choose(total, drawn)
    return float((logs.max() + np.log(np.exp(logs - logs.max()).sum())) / math.log(2))


def ring(n: int, entropy: Entropy) -> np.ndarray:
    """The clients 0 .. n - 1 in random order: ties among the random numbers have probability n^2 /
    2^65.
    """
    return np.argsort(np.frombuffer(entropy(8 * n), np.uint64), kind="stable")


def neighborhoods(order: np.ndarray, k: int) -> np.ndarray:
    """Each client with its neighbors, in order: (n, min(k, n - 1) + 1)."""
    n = len(order)
    if n <= k + 1:
        return np.tile(np.arange(n), (n, 1))
    around = np.arange(n)[:, None] + np.arange(-k // 2, k // 2 + 1)
    found = np.empty((n, k + 1), np.int64)
    found[order] = np.sort(order[around % n], 1)
    return found


def connected(order: np.ndarray, k: int, present: np.ndarray) -> bool:
    """Whether the clients that are present (booleans) are connected: at most one gap of k / 2 or
    more in the ring.
    """
    if len(order) <= k + 1:
        return True
    places = np.flatnonzero(present[order])
    gaps = np.diff(places, append=places[:1] + len(order))
    return int((gaps > k // 2).sum()) <= 1
