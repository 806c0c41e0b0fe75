"""Divergence of the plain Newton iteration, predicted from the gradients of the run."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from foedus.base.tree import State
from foedus.core.passes import Passes

PROMISE = "solver='cg', which converges at the same cost a round, or"
NO_PROMISE = "full precision and plain averages over all clients with solver='cg', or"


class DivergenceWarning(UserWarning):
    """The plain Newton iteration will not converge on this federation."""


def foresee(reg: float, passes: Passes, state: State, g: Tensor) -> bool:
    """Warn, once, when the last two gradients prove that an eigenvalue of P H is above 2; whether a
    warning has been given.
    """
    if "g" not in state or state.warned:
        return state.get("warned", False)
    proof, clients = "", passes.clients
    exact = passes.everyone and not clients.rounded
    if exact:
        before, d = state.g.double(), state.d.double()
        right = (before * d).sum(0)
        quotient = (
            ((d * (before - g.double())).sum(0)[right > 0] / right[right > 0]).max()
            if (right > 0).any()
            else 1.0
        )
        # Once it has converged, what is left of the gradients is rounding and proves nothing.
        if d.norm() > math.sqrt(torch.finfo(g.dtype).eps) * state.w.norm():
            clients.log(radius=max(float(quotient) - 1, 0.0))
            if quotient > 2:
                proof = (
                    "the spectral radius of its iteration is at least "
                    f"{float(quotient) - 1:.3g}, and must be below 1"
                )
    elif g.norm() > 1e3 * state.first:
        proof = f"the gradient has grown {float(g.norm()) / state.first:.3g}-fold"
    if proof:
        warnings.warn(
            f"round {clients.round}: FedNewton(solver='newton') diverges on this federation: "
            f"{proof}. Use {PROMISE if exact else NO_PROMISE} a larger reg than {reg:g}",
            DivergenceWarning,
            stacklevel=5,
        )
    return bool(proof)
