"""`fd.spectrum`: will FedNewton converge on a federation?

Measured by exchanges with its clients, not on their rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from foedus.algorithms.fednewton.newton import FedNewton
from foedus.base import random
from foedus.base.batching import batched
from foedus.base.rows import take
from foedus.base.settings import check_settings, check_value
from foedus.base.tree import State
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.run import run
from foedus.models.features import FeatureMap, features_of
from foedus.models.least_squares import product

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from foedus.data.federation import Federation


def spectrum(
    fed: Federation,
    features: FeatureMap | nn.Module,
    reg: float = 1e-4,
    *,
    iterations: int = 30,
    per_client: bool = True,
    confidence: float = 0.95,
    seed: int = 0,
    engine: Any = None,
) -> Spectrum:
    """Measure whether FedNewton converges, by rounds of federated power iterations.

    Args:
        fed: The federation.
        features: The feature map of the `fd.FedNewton`.
        reg: lambda of the `fd.FedNewton`.
        iterations: Power iterations.
        per_client: Whether to measure the clients' shifts and Upsilon too, which takes a vector for
            each client in every message (without, only the spectral radius: one vector).
        confidence: Confidence of a client's bounds in Upsilon.
        seed: Seed of the random vectors.
        engine: As in `fd.run`.

    Returns:
        The spectral radius, and the shifts of the clients.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=5, alpha=0.3)
        >>> features = fd.RandomFourier(100, bandwidth=4.0)
        >>> fd.spectrum(fed, features, reg=1e-3, per_client=False).converges
        False
    """
    check_value("confidence", confidence, Annotated[float, Gt(0), Lt(1)])
    options: dict[str, Any] = {"iterations": iterations, "per_client": per_client}
    probe = _Probe(features_of(features), reg, solver="cg", **options)
    state = run(probe, fed, iterations, seed=seed, engine=engine, evaluate_every=0).state
    columns: dict[str, list] = {"client": state.ids.tolist()}
    if fed.names is not None:
        names = dict(zip(fed.ids.tolist(), fed.names, strict=True))
        columns["name"] = [names[i] for i in columns["client"]]
    columns["rows"] = state.rows.long().tolist()
    if not per_client:
        return Spectrum(reg, float(state.radius), None, columns)
    shares = state.rows / state.rows.sum()
    logs, kappa2 = math.log(2 / (1 - confidence)), float(state.kappa2)
    # Lemma 1, and Lemma 2 with beta <= min(R, kappa^2 / (kappa^2 + reg)).
    scale = reg * state.rows
    r = 2 * kappa2 * logs / scale + (2 * (kappa2 + 1) * logs / scale).sqrt()
    p = 1 / (1 - r.clamp(max=kappa2 / (kappa2 + reg)))
    d = state.data_shift / reg
    upsilon = float((shares * p * (2 * r + d) * (1 + d)).sum())
    columns |= {k: state[k].tolist() for k in ("data_shift", "model_shift")}
    return Spectrum(reg, float(state.radius), upsilon, columns)


@dataclass(frozen=True)
class Spectrum:
    """The result of `fd.spectrum`.

    Attributes:
        reg: lambda of the `fd.FedNewton`.
        radius: The spectral radius of FedNewton's iteration, I - (sum_j p_j H_j^-1) H.
            `solver="newton"` converges if and only if it is below 1, and multiplies its error by it
            every round. Power iterations approach it from below.
        upsilon: The paper's bound of the same (Theorem 1), with R and P by its Lemmas 1 and 2.
            If it is below 1, convergence is certain; on data of realistic size it never is, since
            it grows with 1 / reg: use `radius`.
        columns: The columns of `per_client`: `data_shift` is Delta_Dj = |C_D - C_Dj|, the spectral
            norm of the difference of the covariances of features, estimated as for the paper's
            Figure 4; `model_shift` is Delta_fj, the root mean square over the client's rows of f -
            f_j, the solution of all rows (by as many rounds of cg) minus that of its own (the
            paper's takes true functions, which data do not show; outputs are added up).

    Example:
        >>> fed = fd.split(fd.load("diabetes"), "iid", clients=2)
        >>> found = fd.spectrum(fed, fd.Identity(), reg=1e-2, iterations=10)
        >>> found.radius < 1, len(found.per_client)
        (True, 2)
    """

    reg: float
    radius: float
    upsilon: float | None
    columns: dict[str, list]

    @property
    def converges(self) -> bool:
        """Whether `solver="newton"` converges."""
        return self.radius < 1

    @property
    def per_client(self) -> pd.DataFrame:
        """One row a client."""
        import pandas as pd

        return pd.DataFrame(self.columns)

    def __str__(self) -> str:
        newton = "FedNewton(solver='newton')"
        if self.radius >= 1:
            verdict = f"not below 1: {newton} diverges; use solver='cg', or a larger reg"
        elif self.radius >= 0.9:
            verdict = "close to 1, and approached from below: more iterations may find it above; "
            verdict += "use solver='cg'"
        else:
            verdict = f"below 1: {newton} converges, and multiplies its error by it every round"
        lines = [f"spectral radius at reg={self.reg:g}: {self.radius:.4g}, {verdict}"]
        if self.upsilon is not None:
            table = [f"{'client':>8} {'rows':>8} {'data_shift':>12} {'model_shift':>12}"]
            for client, count, data, model in zip(*self.columns.values(), strict=True):
                table.append(f"{client:>8} {count:>8} {data:>12.4g} {model:>12.4g}")
            says = " - says nothing" if self.upsilon >= 1 else ""
            lines = [*table, *lines, f"Upsilon (the paper's bound of it): {self.upsilon:.4g}{says}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Probe(FedNewton):
    """Conjugate gradients to the KRR solution and, beside it, the power iterations."""

    iterations: Annotated[int, Ge(1)] = 30
    per_client: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)

    def largest(self, client: Client) -> tuple[Tensor, None]:
        """kappa^2 at the client: the largest |phi(x)|^2 of its rows."""
        data = client.data
        return _largest_norm({"index": data.index}, (self.features, data.table_x)), None

    def own(self, client: Client, v: Tensor, ids: Tensor) -> tuple[Tensor, None]:
        """C_Dj v_j, for the client's own column of v."""
        mine = (v @ (ids == client.id).to(v.dtype)).unsqueeze(1)
        return (product(client.prepared, self.reg, mine) - self.reg * mine).squeeze(1), None

    def differ(self, client: Client, w: Tensor) -> tuple[Tensor, None]:
        """The mean square of f - f_j on the client's rows."""
        gap = client.prepared["local"] - w
        return (gap * (product(client.prepared, self.reg, gap) - self.reg * gap)).sum(), None

    def start(self, clients: Clients) -> State:
        state = State(w=torch.zeros(self.features.size(clients.spec), 1))
        if self.per_client:
            state = super().start(clients)
        columns = 1 + len(clients) * self.per_client
        v = random.normal(random.fold(clients.key, 1), (len(state.w), columns), torch.float64)
        radius = torch.zeros((), dtype=torch.float64)
        state = state.replace(v=v, ids=clients.ids, rows=clients.sizes.double(), radius=radius)
        if not self.per_client:
            return state
        none, kappa2 = torch.zeros_like(state.rows), clients.gather(self.largest).stack().max()
        return state.replace(kappa2=kappa2, data_shift=none, model_shift=none)

    def round(self, clients: Clients, state: State) -> State:
        if self.per_client:
            state = super().round(clients, state)
        v = state.v / state.v.norm(dim=0).clamp(min=1e-300)
        every = clients.mean(self.product, v=v)
        before, u = v[:, :1], every[:, :1]  # u = H v, for the radius
        after = clients.mean(self.direction, g=u) - before
        # Rayleigh's quotient of P H - I in H's inner product
        radius = ((after * u).sum() / (before * u).sum()).clamp(min=0)
        if after.norm() <= 1e-13 * before.norm():  # Newton is exact here: the error is zero
            after, radius = before, torch.zeros_like(radius)
        state = state.replace(v=after, radius=radius)
        if not self.per_client:
            return state
        own = clients.gather(self.own, v=v[:, 1:], ids=state.ids).stack().mT
        apart = every[:, 1:] - self.reg * v[:, 1:] - own  # (C_D - C_Dj) v_j, a column a client
        state = state.replace(v=torch.cat((after, apart), 1), data_shift=apart.norm(dim=0))
        if clients.round == self.iterations:
            squares = clients.gather(self.differ, w=state.w).stack()
            state = state.replace(model_shift=squares.clamp(min=0).sqrt())
        return state


@batched
def _largest_norm(args: dict[str, Tensor], shared: tuple) -> Tensor:
    features, table_x = shared
    index = args["index"]
    norms = [features(take(table_x, part)).square().sum(1) for part in index.flatten().split(4096)]
    return torch.cat(norms).view(index.shape).amax(1)
