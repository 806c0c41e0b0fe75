"""FFGB for the squared loss with Lipschitz functions: Algorithm 3 of "Federated functional gradient boosting"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foedus.algorithms.ffgb.boost import FFGB
from foedus.base import random
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.algorithm import Client
from foedus.errors import ConfigError, positive
from foedus.models.lipschitz import lipschitz_constant, lipschitz_extension
from foedus.models.losses import Loss
from foedus.models.oracles import Oracle, SobolevNet


@dataclass(frozen=True)
class FFGBLipschitz(FFGB):
    """FFGB for the squared loss with functions that stay Lipschitz (Algorithm 3, Theorem 4.4).

    The gradient g - u_i is taken at the Lipschitz extension u_i of the client's labels (13), known everywhere, and only that part is left to the oracle:

        h_k = Q(u_i - Delta_{k-1}),    g_{k+1} = g_k - eta_k (g_k - h_k),    Delta_k = Delta_{k-1} - u_i + h_k

    (the paper's line 4 has the opposite sign, and its line 7 returns g_K where g_{K+1} is meant). The squared loss is 1-strongly convex, so that steps of
    Theorem 4.4 have mu = 1; a `mu` above 0 shrinks f as well. oracle: `fd.SobolevNet(model)`. constant: L, or `None` for the largest slope between two
    of a client's rows.
    """

    oracle: Oracle = None
    loss: str | Loss = "squared"
    step: float | str = "theorem4.1"
    constant: float | None = None

    sign: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.oracle, SobolevNet):
            raise ConfigError(f"oracle={self.oracle!r} must be a fd.SobolevNet(model): functions must be close in slope, too")
        if self.loss != "squared":
            raise ConfigError(f"loss={self.loss!r}: Algorithm 3 is for the squared loss")
        if self.constant is not None:
            positive("constant", self.constant)
        super().__post_init__()

    @property
    def decay(self) -> float:
        return 1.0 + self.mu

    def check(self, spec: Spec) -> None:
        if spec.classes:
            raise ConfigError("FFGBLipschitz is for real targets; the data has classes")
        super().check(spec)

    def boost(self, client: Client, new: list, factors: list, keep: float, scale: float, t: int) -> tuple[Tree, Tree]:
        """Algorithm 3."""
        x, spec = client.data.x, client.spec
        y = client.data.y.reshape(len(x), -1)
        total, constant = self._caught_up(client, new, factors, keep), self.constant or lipschitz_constant(x, y)
        found: list[Tree] = []
        for k in range(1, self.local_steps + 1):

            def phi(z: Tensor, k: int = k) -> Tensor:
                """u - Delta_{k-1}, where Delta_{k-1} = sum_{j < k} (h_j - u)."""
                u = lipschitz_extension(x, y, max(constant, 1e-12), z)
                if not self.residual:
                    return u
                return k * u - sum((self.oracle.model.apply(h, z) for h in found), torch.zeros(()))

            found.append(self.oracle.fit_function(x, phi, random.fold(client.key, k), spec))
        return {"functions": found}, {"sum": total}
