"""How heterogeneous is a federation, and will FedNewton converge on it? Asked of the clients, not of their data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.algorithms.fednewton import FedNewton
from foedus.core import random
from foedus.core.algorithm import Client
from foedus.core.batching import batched
from foedus.core.clients import Clients
from foedus.core.rows import take
from foedus.core.run import run
from foedus.core.tree import State
from foedus.errors import ConfigError
from foedus.models.features import FeatureMap, whole
from foedus.models.ridge import product

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from foedus.data.federation import Federation


def diagnose(
    fed: Federation,
    features: FeatureMap | nn.Module,
    reg: float = 1e-4,
    *,
    iterations: int = 30,
    confidence: float = 0.95,
    seed: int = 0,
    engine: Any = None,
) -> Diagnosis:
    """Measure what decides how FedNewton does on a federation, by `iterations` rounds of federated power iterations.

    confidence: with which Upsilon's bounds on unseen data hold. See `Diagnosis` for the figures.

    Example:
        >>> print(fd.diagnose(fed, fd.RandomFourier(500, bandwidth=4.0), reg=1e-4))
    """
    if not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence!r} must be above 0 and below 1")
    probe = _Probe(features, reg, solver="cg", iterations=iterations)
    state = run(probe, fed, iterations, seed=seed, engine=engine, evaluate_every=0).state
    shares = state.rows / state.rows.sum()
    logs, kappa = math.log(2 / (1 - confidence)), float(state.kappa)
    # Lemma 1, and Lemma 2 with beta <= min(R, kappa^2 / (kappa^2 + reg)).
    r = 2 * kappa * logs / (reg * state.rows) + (2 * (kappa + 1) * logs / (reg * state.rows)).sqrt()
    p = 1 / (1 - torch.minimum(r, torch.tensor(kappa / (kappa + reg), dtype=r.dtype)))
    d = state.data_shift / reg
    upsilon = float((shares * p * (2 * r + d) * (1 + d)).sum())
    columns = {"client": state.ids, "rows": state.rows.long(), "data_shift": state.data_shift, "model_shift": state.model_shift}
    return Diagnosis(reg, float(state.radius), upsilon, {k: v.tolist() for k, v in columns.items()})


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    radius: the spectral radius of FedNewton's iteration, I - (sum_j p_j H_j^-1) H. `solver="newton"` converges if and
    only if it is below 1, and multiplies its error by it every round. Power iterations approach it from below.
    upsilon: the paper's bound of the same (Theorem 1), with R and P by its Lemmas 1 and 2. Where it is below 1 convergence is
    certain; it never is on data of realistic size, since it grows with 1 / reg: look at `radius`.
    per_client: by client, `data_shift` is Delta_Dj = |C_D - C_Dj|, the spectral norm of the difference of the covariances
    of features, estimated as for the paper's Figure 4; `model_shift` is Delta_fj, the root mean square over the client's
    rows of f - f_j, the KRR solution of all rows minus that of its own (the paper's takes true functions, which data do not
    show; outputs are added up).
    """

    reg: float
    radius: float
    upsilon: float
    columns: dict[str, list]

    @property
    def converges(self) -> bool:
        """Whether plain Newton does."""
        return self.radius < 1

    @property
    def per_client(self) -> pd.DataFrame:
        """One row a client."""
        import pandas as pd

        return pd.DataFrame(self.columns)

    def __str__(self) -> str:
        rows = [f"{'client':>8} {'rows':>8} {'data_shift':>12} {'model_shift':>12}"]
        for client, count, data, model in zip(*self.columns.values(), strict=True):
            rows.append(f"{client:>8} {count:>8} {data:>12.4g} {model:>12.4g}")
        if self.converges:
            verdict = "below 1: FedNewton(solver='newton') converges, and multiplies its error by it every round"
        else:
            verdict = "not below 1: FedNewton(solver='newton') diverges; use solver='cg', or a larger reg"
        bound = f"Upsilon (the paper's bound of it): {self.upsilon:.4g}" + (" - says nothing" if self.upsilon >= 1 else "")
        return "\n".join([*rows, f"spectral radius at reg={self.reg:g}: {self.radius:.4g}, {verdict}", bound])


@dataclass(frozen=True)
class _Probe(FedNewton):
    """Conjugate gradients to the KRR solution and, beside it, the power iterations."""

    iterations: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("iterations", self.iterations)

    def largest(self, client: Client) -> tuple[Tensor, None]:
        """kappa^2 at the client: the largest |phi(x)|^2 of its rows."""
        data = client.data
        return _largest_norm({"index": data.index}, (self.features, data.table_x)), None

    def own(self, client: Client, v: Tensor, ids: Tensor) -> tuple[Tensor, None]:
        """C_Dj v_j, for the client's own column of v."""
        mine = v @ (ids == client.id).to(v.dtype)
        return (product(client.prepared, self.reg, mine.unsqueeze(1)) - self.reg * mine.unsqueeze(1)).squeeze(1), None

    def differ(self, client: Client, w: Tensor) -> tuple[Tensor, None]:
        """The mean square of f - f_j on the client's rows."""
        gap = client.prepared["local"] - w
        return (gap * (product(client.prepared, self.reg, gap) - self.reg * gap)).sum(), None

    def start(self, clients: Clients) -> State:
        key = random.fold(clients.key, 1)
        state = super().start(clients)
        v = random.normal(key, (len(state.w), len(clients) + 1), torch.float64)
        kappa = clients.gather(self.largest).stack().max()
        shift = torch.zeros(len(clients), dtype=torch.float64)
        return state.replace(
            v=v, ids=clients.ids, rows=clients.sizes.double(), kappa=kappa, radius=shift[0], data_shift=shift, model_shift=shift
        )

    def round(self, clients: Clients, state: State) -> State:
        state = super().round(clients, state)
        v = state.v / state.v.norm(dim=0).clamp(min=1e-300)
        every = clients.mean(self.product, v=v)
        u = every[:, :1]  # H v, for the radius
        z = clients.mean(self.direction, g=u)
        radius = ((z - v[:, :1]) * u).sum() / (v[:, :1] * u).sum()  # Rayleigh's quotient of P H - I in H's inner product
        own = clients.gather(self.own, v=v[:, 1:], ids=state.ids).stack().mT
        apart = every[:, 1:] - self.reg * v[:, 1:] - own  # (C_D - C_Dj) v_j, a column a client
        state = state.replace(v=torch.cat((z - v[:, :1], apart), 1), radius=radius, data_shift=apart.norm(dim=0))
        if clients.round == self.iterations:
            state = state.replace(model_shift=clients.gather(self.differ, w=state.w).stack().clamp(min=0).sqrt())
        return state


@batched
def _largest_norm(args: dict[str, Tensor], shared: tuple) -> Tensor:
    features, table_x = shared
    index = args["index"]
    norms = [features(take(table_x, part)).square().sum(1) for part in index.flatten().split(4096)]
    return torch.cat(norms).view(index.shape).amax(1)
