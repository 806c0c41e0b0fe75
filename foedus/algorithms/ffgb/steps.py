"""Step sizes of FFGB: those of the theorems, one that follows the loss, and a line search.

**By the loss.** `step="auto"` is c / L, where L is the smoothness of the loss in the outputs
(`foedus.models.smoothness`). For one client and an exact oracle, every factor below 2 goes down in
every round. What boosting practice takes is less for losses whose curvature stays, since functions
fit noise: a shrinkage of 0.4. It is more for cross-entropy and logistic losses, whose curvature
fades where rows are classified well: p (1 - p) is 1/2 L at p = 0.15 and 1/5 L at p = 0.05, and the
slope is bounded, so that a step that is too long is turned back by the next: a factor of 5, which
is the authors' step of 10 for cross-entropy.

**Counts.** Poisson's loss is not smooth. Its step is a Newton step that is kept within reach: with
L_j = exp(f(x_j) + delta) and delta = 0.7, a move d of at most delta in each output satisfies

    loss(f + d) <= loss(f) + slope_j d + L_j/2 |d|^2        for every row j

so the function is fitted to slope_j / L_j with the weights L_j, which minimizes the right side over
the leaves of a tree, and its values are clipped to delta / eta. Every client's move, and so the
average, stays within reach of the bound.

**Line search.** `step="search"` needs no smoothness. The server sends the direction d of the round,
clients reply their loss at f + s d for a grid of s that includes 0, and the server takes
SHRINKAGE s* of the best one. For a convex loss the mean F over the clients of the round cannot
rise: F[f + a s* d] <= (1 - a) F[f] + a F[f + s* d] <= F[f].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foedus.base.tree import State, Tree
from foedus.core.algorithm import Algorithm, Client
from foedus.core.clients import Clients
from foedus.core.held import HeldSum
from foedus.errors import ConfigError
from foedus.models.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Logistic,
    PoissonNLL,
    SoftLabels,
    WeightedCrossEntropy,
)
from foedus.models.smoothness import LONGEST_MOVE, smoothness, smoothness_nearby

STEPS = {"theorem4.1": 4.0, "theorem4.3": 2.0}
"""Step sizes c / (mu (t K + k + 1)) of the theorems."""

FADING, STEADY = 5.0, 0.4
"""Factors of 1 / L for losses whose curvature fades far from the optimum, and for others."""

COUNTS = 0.7
"""The factor of Poisson's step, which its bound has already halved."""

FADE = (CrossEntropy, WeightedCrossEntropy, SoftLabels, Logistic, BinaryCrossEntropy)

SHRINKAGE = 0.5
"""The part of the best step of a line search that is made."""

OCTAVES = 12
"""A line search looks at steps up to 2^OCTAVES times longer or shorter than the last one."""

_WORST = 1e30
"""A loss that is not finite counts as this."""


def step_of_loss(loss: Any, outputs: int, bounds: bool) -> float | None:
    """The step of `step="auto"`; `None`: by line search.

    Args:
        loss: The loss.
        outputs: The number of outputs.
        bounds: Whether the oracle can bound the values of a function.
    """
    if isinstance(loss, PoissonNLL):
        return COUNTS if bounds else None
    bound = smoothness(loss, outputs)
    return (FADING if isinstance(loss, FADE) else STEADY) / bound if bound else None


def within_reach(
    loss: Any, g: Tensor, slope: Tensor, eta: float, fit: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """The target at g, and what the oracle is told besides: for a loss that is smooth nearby only,
    slope / L_j, the weights L_j over their mean, and the largest value of the function.
    """
    if (bound := smoothness_nearby(loss, g)) is None:
        return slope, fit
    weight = bound * fit.get("weight", 1.0)
    fit = {**fit, "weight": weight / weight.mean(), "bound": LONGEST_MOVE / eta}
    return slope / bound.unsqueeze(-1), fit


class LineSearch(Algorithm):
    """The exchanges of `step="search"`: clients keep f without its newest part beside f."""

    weights: str

    def begin_search(self, clients: Clients, state: State) -> State:
        """With the step around which the first round searches."""
        if not clients.punctual:
            raise ConfigError(
                "a line search needs answers in the round of the question; give step= a number "
                "where messages are late"
            )
        return state.replace(step=1.0)

    def searched(self, clients: Clients, state: State, trial: HeldSum) -> State:
        """f^t + SHRINKAGE s* (trial - f^t), and the step around which the next round searches."""
        grid = torch.cat([torch.zeros(1), 2.0 ** torch.arange(-OCTAVES, OCTAVES + 1)])
        losses = clients.mean(self.along, weights=self.weights, f=trial, scales=grid)["losses"]
        best = float(grid[losses.argmin()])
        taken = SHRINKAGE * best
        clients.sum(self.settle, f=trial, scale=taken)
        weights = [*trial.weights[:-1], taken * trial.weights[-1]]
        step = state.step * (best or 2.0**-OCTAVES)
        return state.replace(f=replace(trial, weights=weights), step=step)

    def along(self, client: Client, scales: Tensor) -> tuple[Tree, None]:
        """The client's loss at f + s d, d its newest part, for every s."""
        f, y, share = client.state["before"], client.data.y, client.data.weight
        if (worth := client.data.worth) is not None:
            share = share * worth
        d = client.state["f"] - f
        at = (self.row_loss(f + float(s) * d, y) for s in scales)
        losses = torch.stack([(share * loss).sum() / client.data.count for loss in at])
        return {"losses": losses.nan_to_num(_WORST, _WORST, _WORST).clamp(max=_WORST)}, None

    def settle(self, client: Client, scale: float) -> tuple[Tree, dict[str, Tensor]]:
        """Make the newest part `scale` times as large."""
        f = client.state["before"]
        f = f + scale * (client.state["f"] - f)
        return {"settled": torch.ones(())}, {"f": f, "before": f}
