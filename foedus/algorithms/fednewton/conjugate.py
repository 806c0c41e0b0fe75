"""Preconditioned conjugate gradients on H w = b, column by column: the server of
`FedNewton(solver="cg")`.

    server: r    client j: H_j^-1 r    server: z = sum_j p_j H_j^-1 r
                                       beta = r^T z / (r^T z of before),  p <- z + beta p
    server: p    client j: H_j p       server: q = sum_j p_j H_j p,  alpha = r^T z / p^T q
                                       w <- w + alpha p,  r <- r - alpha q
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foedus.base.tree import State
from foedus.core.clients import Clients
from foedus.core.passes import Passes

Step = Callable


def begin(begin: Step, product: Step, clients: Clients) -> State:
    """The state at the average of the clients' own solutions.

    Args:
        begin: The client step that replies its solution and its right-hand side.
        product: The client step that replies H_j v.
        clients: All clients.
    """
    first = clients.mean(begin)
    r = first["b"] - clients.mean(product, v=first["w"])
    # Residuals are measured against b; against the first of them where b is all but 0.
    scale = torch.maximum(first["b"].norm(dim=0), r.norm(dim=0)).double()
    clients.log(residual=_largest(r, scale))
    zero = torch.zeros_like(r)
    return State(
        w=first["w"],
        spec=clients.spec,
        r=r,
        p=zero,
        rz=zero[0],
        scale=scale,
        cohort=clients.ids if clients.answered is None else clients.answered,
        iteration=1,
    )


def iterate(
    gradient: Step, direction: Step, product: Step, tol: float, passes: Passes, state: State
) -> State:
    """One iteration.

    It begins with the gradient, and without a direction of before, if some clients did not answer
    the iteration before, whose system was another one, or if replies are rounded, every fifth
    time: the residual by recurrence drifts from the true one.

    Args:
        gradient: The client step that replies H_j w - b_j.
        direction: The client step that replies H_j^-1 g.
        product: The client step that replies H_j v.
        tol: The relative residual at which a column has converged.
        passes: The averages over all clients.
        state: The state of the server.
    """
    clients, w, r, p, rz = passes.clients, state.w.clone(), state.r, state.p, state.rz
    if len(state.cohort) < clients.total or (clients.rounded and state.iteration % 5 == 0):
        r = -passes.mean(gradient, w=state.w)
        p, rz = torch.zeros_like(p), torch.zeros_like(rz)
    r, p, rz = r.clone(), p.clone(), rz.clone()
    tol = max(tol, 4 * torch.finfo(r.dtype).eps)
    open_ = torch.nonzero(r.norm(dim=0) > tol * state.scale).flatten()
    if len(open_):
        z = passes.mean(direction, g=r[:, open_])
        new = (r[:, open_] * z).sum(0)
        beta = torch.where(rz[open_] > 0, new / rz[open_], 0)
        p[:, open_] = z + beta * p[:, open_]
        q = passes.mean(product, v=p[:, open_])
        curve = (p[:, open_] * q).sum(0)
        alpha = torch.where(curve > 0, new / curve, 0)
        w[:, open_] += alpha * p[:, open_]
        r[:, open_] -= alpha * q
        rz[open_] = new
    # Where some did not answer, these are the residuals of the others' system.
    name = "residual" if passes.ids is None or passes.everyone else "cohort_residual"
    clients.log(**{name: _largest(r, state.scale)})
    cohort = state.cohort if passes.ids is None else passes.ids
    return state.replace(w=w, r=r, p=p, rz=rz, cohort=cohort, iteration=state.iteration + 1)


def _largest(r: Tensor, scale: Tensor) -> float:
    """The largest residual of a column, relative to its right-hand side."""
    some = scale > 0
    return float((r.norm(dim=0).double()[some] / scale[some]).max()) if bool(some.any()) else 0.0
