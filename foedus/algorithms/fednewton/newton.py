"""FedNewton: "Efficient Newton-type federated learning with non-IID data" (Algorithm 1), its start
DKRR and its reference KRR.

The objective is ridge regression on features phi, over all rows D of all clients (equation 1):

    F(w) = sum_j p_j F_j(w),   p_j = n_j / n
    F_j(w) = 1/(2 n_j) sum_{i in D_j} |phi(x_i)^T w - y_i|^2 + reg/2 |w|^2

with w of shape (M, k), one column an output: k targets, or k classes one against all (labels as 0
and 1). A client's gradient and Hessian are g_j = H_j w - b_j and H_j = Phi_j^T Phi_j + reg I
(Phi_j: its features divided by sqrt(n_j)), and by Proposition 1 the global ones are their averages,
g = sum_j p_j g_j and H = sum_j p_j H_j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from foedus.algorithms.fednewton import conjugate
from foedus.algorithms.fednewton.divergence import foresee
from foedus.algorithms.fednewton.regression import FeatureRegression
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.passes import Passes, iterate
from foedus.core.predictor import Predictor
from foedus.errors import ConfigError, shown
from foedus.export.forms import OnFeatures
from foedus.export.probabilities import shares_of, simplex_shares
from foedus.models import curvature
from foedus.models.least_squares import DTYPES, product, solve
from foedus.models.losses import Huber, Loss, LossSetting, Squared, loss_for


@dataclass(frozen=True)
class FedNewton(FeatureRegression):
    """Newton's method with the global gradient and local Hessians.

    `solver="newton"` is Algorithm 1, line by line, with two exchanges of M numbers an output in a
    round. (Equations 4 and 5 print the local gradient; the global one of lines 6 to 8 is right:
    only with it is the KRR solution a fixed point.)

        server: w    client j: g_j = H_j w - b_j   line 5    server: g = sum_j p_j g_j        line 6
        server: g    client j: d_j = H_j^-1 g      line 7    server: w <- w - sum_j p_j d_j   line 8

    With P = sum_j p_j H_j^-1 the error is multiplied by I - P H every round. Inversion is
    operator-convex, so P >= H^-1 and every eigenvalue of P H is at least 1: the iteration converges
    if and only if the largest is below 2, and its rate, the spectral radius, is that eigenvalue
    minus 1. Few local rows or strong heterogeneity make it larger. A `DivergenceWarning` comes as
    soon as the gradients of the run prove divergence, in its second round at the earliest: the
    Rayleigh quotient d^T H d / g^T d of d = P g is a lower bound of that eigenvalue (minus 1:
    `radius` in the history), and H d is the difference of two gradients. `fd.diagnose` measures
    the rate before a run.

    `solver="cg"` asks as much of the clients in an iteration, one local solution and one product,
    and converges for every P, where averages are over all clients and replies not rounded:
    conjugate gradients on H w = b preconditioned by P, column by column
    (`foedus.algorithms.fednewton.conjugate`). The H-norm of every column's error falls in every
    iteration, and after at most M iterations it is 0 in exact arithmetic. Its start also brings b
    (one more vector up) and H w (one down, one up). A column whose residual is at most `tol` |b|
    has converged and is no longer sent. With quantized replies (`fd.run(quantise=)`) the recursive
    residual drifts from the true one: every fifth iteration then asks for the gradient (a third
    exchange) and restarts.

    Partial participation and late replies. Lines 6 and 8 are averages over all clients, at one w.
    An average over a cohort leads to the cohort's solution, another one each round. With gradients
    that are D rounds late, a component of the error with the eigenvalue mu of P H follows

        e_{t+1} = e_t - s mu e_{t-D},   stable if and only if  s mu < 2 sin(pi / (4 D + 2)),

    (the roots of z^{D+1} = z^D - s mu leave the unit circle at z = exp(i pi / (2 D + 1))), so full
    steps, s = 1, do not converge for D >= 1 even with a perfect P = H^-1, and conjugate gradients
    lose conjugacy. So an average is a full pass (`foedus.core.passes`): each client is asked once,
    and w stays until all have answered. The iterates are those of full participation without
    delays, and all that is said above holds for any cohorts and delays. An iteration costs the same
    bytes, and about 2 ln(N) / p rounds with a part p of N clients in a round (under secure
    aggregation 2.8 / p^2, if that is more), or 2 D + 1 rounds with a round trip of D. A run that is
    too short for a pass, or waits for long, warns. Where all messages are equally late, waiting is
    no loss: in T rounds at most T / (2 D) products with P H can be made, so every method that
    builds w from them, such as damped steps on late gradients, with or without a memory of older
    ones, has an error q(P H) e_0 with a polynomial q of that degree and q(0) = 1. That of conjugate
    gradients has the smallest H-norm of all of them.

    Other losses (Remark 4), "newton" only, are those with a known second derivative: "logistic"
    (one class against the rest), "cross_entropy" (softmax), "huber" (its curvature is that of
    reweighted least squares), "bce", "poisson" and `fd.losses.WeightedCrossEntropy(weights)`. They
    start at 0, Hessians are those at w, a local system of at most `curvature.DIRECT` unknowns, and
    no more than the client has rows, is factorized and a larger one solved inexactly by conjugate
    gradients without forming it. A third exchange evaluates the clients' objectives at twelve steps
    along d, from 0 to 4 times the last one that was taken, and the best is taken: the objective
    never rises.

    Args:
        loss: "squared", or another loss with a known second derivative.
        solver: "newton", Algorithm 1; or "cg", preconditioned conjugate gradients.
        tol: Relative residual at which a column has converged, for "cg".
        delta: For "huber": residuals beyond it count linearly.
        inner: Steps of conjugate gradients that solve a large local system, for other losses.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> features = fd.RandomFourier(200, bandwidth=4.0)
        >>> run = fd.run(fd.FedNewton(features, reg=1e-3, solver="cg"), fed, rounds=8)
        >>> pooled = fd.run(fd.KRR(features, reg=1e-3), fed, rounds=1)
        >>> abs(run.history.accuracy.iloc[-1] - pooled.history.accuracy.iloc[-1]) < 0.01
        True

    Reference: "Efficient Newton-type federated learning with non-IID data", Algorithm 1.
    """

    loss: LossSetting = "squared"
    solver: Literal["newton", "cg"] = "newton"
    tol: Annotated[float, Gt(0)] = 1e-12
    delta: Annotated[float, Gt(0)] = 1.0
    inner: Annotated[int, Ge(1)] = 50

    remedy: ClassVar[str] = "use solver='cg' (for the squared loss), or a larger reg"

    steps: ClassVar[tuple[float, ...]] = (
        0.0,
        *(2.0**-k for k in (-2, -1, 0, 1, 2, 4, 6, 9, 12, 16, 20)),
    )
    """Steps that are tried, relative to the last one taken."""

    def __post_init__(self) -> None:
        super().__post_init__()
        curvature.check(self.loss)
        if self.solver == "cg" and not self.quadratic:
            raise ConfigError(
                "solver='cg' needs loss='squared', whose Hessian does not change; with "
                f"{shown(self.loss)} use 'newton'"
            )

    @property
    def quadratic(self) -> bool:
        return self.loss == "squared" or isinstance(self.loss, Squared)

    def objective(self, classes: int | None) -> Loss:
        """The loss by row."""
        return Huber(self.delta) if self.loss == "huber" else loss_for(self.loss, classes)

    def check(self, spec: Spec) -> None:
        super().check(spec)
        self.objective(spec.classes).check(spec.classes, spec.outputs)

    def footprint(self, rows: int, row_bytes: int) -> int:
        if self.quadratic:
            return super().footprint(rows, row_bytes)
        size = self.features.rough_size(row_bytes // 4)
        return 3 * rows * (row_bytes + 8 * size) + (
            32 * size**2 if size <= min(rows, curvature.DIRECT) else 0
        )

    def reply_bound(self, step: str, spec: Spec) -> float:
        return math.inf  # gradients grow with the targets, directions with 1 / reg

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        y = y.to(outputs.dtype) if y.is_floating_point() else y
        return self.objective(None if y.is_floating_point() else outputs.shape[-1]).value(
            outputs, y
        )

    def predictor(self, state: State) -> Predictor:
        loss, form = self.objective(state.spec.classes), OnFeatures(self.features, state.w)
        return Predictor(form, state.spec, shares_of(loss, simplex_shares))

    # -- clients -----------------------------------------------------------------------------------

    def prepare(self, data: Rows) -> dict[str, Tensor]:
        if self.quadratic:
            return super().prepare(data)
        return curvature.prepare(self.features, DTYPES[self.dtype], data)

    def init(self, client: Client) -> dict[str, Tensor]:
        """Where the loss is not squared, a client remembers the round's w, so that it need be sent
        only once.
        """
        if self.quadratic:
            return {}
        return {
            "w": torch.zeros(
                self.features.size(client.spec), client.spec.outputs, dtype=DTYPES[self.dtype]
            )
        }

    def begin(self, client: Client) -> tuple[dict[str, Tensor], None]:
        """For conjugate gradients, the start of line 2 and the right-hand side of the system."""
        return {"w": client.prepared["local"], "b": client.prepared["right"]}, None

    def gradient(self, client: Client, w: Tensor) -> tuple[Tensor, Any]:
        """Line 5."""
        if self.quadratic:
            return product(client.prepared, self.reg, w) - client.prepared["right"], None
        loss = self.objective(client.spec.classes)
        return curvature.gradient(client.prepared, loss, self.reg, w), {"w": w}

    def direction(self, client: Client, g: Tensor) -> tuple[Tensor, None]:
        """Line 7."""
        if self.quadratic:
            return solve(client.prepared, self.reg, g), None
        loss = self.objective(client.spec.classes)
        return curvature.solve(
            client.prepared, loss, self.reg, client.state["w"], g, self.inner
        ), None

    def product(self, client: Client, v: Tensor) -> tuple[Tensor, None]:
        return product(client.prepared, self.reg, v), None

    def search(self, client: Client, d: Tensor, last: float) -> tuple[Tensor, None]:
        """The client's objective at w - s d for every step size s."""
        loss = self.objective(client.spec.classes)
        steps = [last * s for s in self.steps]
        return curvature.along(client.prepared, loss, self.reg, client.state["w"], d, steps), None

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        if not self.quadratic:
            size = self.features.size(clients.spec)
            return State(
                w=torch.zeros(size, clients.spec.outputs, dtype=DTYPES[self.dtype]),
                spec=clients.spec,
                step=1.0,
            )
        if self.solver == "newton":
            return super().start(clients)
        return conjugate.begin(self.begin, self.product, clients)

    def begin_at(self, state: State, w: Tree) -> State:
        """With the model of another run; conjugate gradients then ask for its residual."""
        state = super().begin_at(state, w)
        return state.replace(cohort=state.cohort[:0]) if "cohort" in state else state

    def round(self, clients: Clients, state: State) -> State:
        return iterate(self.iteration, clients, state)

    def iteration(self, passes: Passes, state: State) -> State:
        """Lines 5 to 8; all averages are over all clients."""
        if self.solver == "cg":
            steps = (self.gradient, self.direction, self.product)
            return conjugate.iterate(*steps, self.tol, passes, state)
        g = passes.mean(self.gradient, w=state.w)  # lines 5, 6
        d = passes.mean(self.direction, g=g)  # line 7
        if not self.quadratic:
            return self._searched(passes, state, g, d)
        passes.clients.log(gradient=g.norm())
        warned = foresee(self.reg, passes, state, g)
        first = state.get("first", float(g.norm()))
        return state.replace(w=state.w - d, g=g, d=d, warned=warned, first=first)  # line 8

    def _searched(self, passes: Passes, state: State, g: Tensor, d: Tensor) -> State:
        """Line 8 with the best of some steps along d."""
        objectives = passes.mean(self.search, d=d, last=state.step)
        best = int(objectives.argmin())
        if objectives[0] - objectives[best] <= 1e-12 * objectives[0].abs():  # no more than rounding
            best = 0
        step = state.step * self.steps[best]
        passes.clients.log(gradient=g.norm(), objective=objectives[best], step=step)
        # Where none was any good, the next ones to be tried are smaller.
        return state.replace(w=state.w - step * d, step=step or state.step * self.steps[-1])
