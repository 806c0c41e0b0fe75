"""The step size of Theorem 2 (Appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from foedus.models.schedules import Schedule


@dataclass(frozen=True)
class Theorem2(Schedule):
    """The step size with which Theorem 2 bounds the regret of `fd.FedRes`.

    With W^2 = |w*_g|^2 + sum_i |w*_i|^2, both models make steps of

        eta = min{ sqrt(W^2 / (T P sigma^2)),  cbrt(W^2 / (gamma P^3 G^2 tau^2 T)) },

    the second of which applies if there are delays. Each makes two terms of the bound (26) equal:
    W^2 / eta and eta T P sigma^2, or W^2 / eta and gamma eta^2 P^3 G^2 T tau^2.

    Args:
        rounds: T.
        clients: P.
        norm: W, the norm of the best pair of models, all clients' together.
        deviation: sigma; sigma^2 bounds the variance of a gradient.
        smoothness: gamma, of the loss in both models.
        gradient: G, the largest norm of a gradient.
        delay: tau, the longest round trip.

    Example:
        >>> fd.fedres.Theorem2(rounds=100, clients=4, norm=2.0, deviation=0.5).size
        0.2

    Reference: Agarwal, Langford and Wei, "Federated residual learning", 2020, Theorem 2.
    """

    rounds: Annotated[int, Ge(1)]
    clients: Annotated[int, Ge(1)]
    norm: Annotated[float, Gt(0)]
    deviation: Annotated[float, Gt(0)]
    smoothness: Annotated[float, Gt(0)] = 1.0
    gradient: Annotated[float, Gt(0)] = 1.0
    delay: Annotated[int, Ge(0)] = 0

    @property
    def size(self) -> float:
        """eta."""
        noise = self.norm / (self.rounds * self.clients) ** 0.5 / self.deviation
        if not self.delay:
            return noise
        late = self.smoothness * self.clients**3 * (self.gradient * self.delay) ** 2 * self.rounds
        return min(noise, (self.norm**2 / late) ** (1 / 3))

    @property
    def counted(self) -> frozenset[str]:
        """The counters it depends on: none."""
        return frozenset()

    @property
    def lowest(self) -> float:
        """The smallest step size."""
        return self.size

    def at(self, round: int, step: int) -> float:
        return self.size
