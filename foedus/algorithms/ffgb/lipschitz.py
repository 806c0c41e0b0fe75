"""FFGB for the squared loss with Lipschitz functions: Algorithm 3 of "Federated functional gradient
boosting".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from foedus.algorithms.ffgb.boost import FFGB
from foedus.base import random
from foedus.base.settings import Means, Remedy
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.core.algorithm import Client
from foedus.errors import ConfigError
from foedus.models.lipschitz import lipschitz_constant, lipschitz_extension
from foedus.models.oracles import SobolevNet


@dataclass(frozen=True)
class FFGBLipschitz(FFGB):
    """FFGB for the squared loss with functions that stay Lipschitz (Algorithm 3, Theorem 4.4).

    The gradient g - u_i is taken at the Lipschitz extension u_i of the client's labels (13), which
    is defined everywhere, and the oracle fits only that part:

        h_k = Q(u_i - Delta_{k-1})
        g_{k+1} = g_k - eta_k (g_k - h_k)
        Delta_k = Delta_{k-1} - u_i + h_k

    (the paper's line 4 has the opposite sign, and its line 7 returns g_K where g_{K+1} is meant).
    The squared loss is 1-strongly convex, so that steps of Theorem 4.4 have mu = 1; a `mu` above 0
    shrinks f as well.

    Args:
        oracle: A `fd.SobolevNet(model)`: functions must be close in slope, too.
        loss: "squared": Algorithm 3 has no other.
        step: As in `fd.FFGB`, with 1 + `mu` in place of mu.
        constant: L, or `None` for the largest slope between two of a client's rows.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, (60, 2)).astype(np.float32)
        >>> data = fd.Data.from_arrays(x[:40], x[:40, 0], x[40:], x[40:, 0])
        >>> fed = fd.split(data, "iid", clients=2)
        >>> oracle = fd.SobolevNet(fd.MLP(4), steps=8, lr=0.1)
        >>> run = fd.run(fd.FFGBLipschitz(oracle), fed, rounds=2)
        >>> bool(run.history.mse.iloc[-1] < run.history.mse.iloc[0])
        True
    """

    weighs_rows: ClassVar[bool] = False

    oracle: Annotated[
        SobolevNet, Means("a fd.SobolevNet(model)"), Remedy("functions must be close in slope, too")
    ] = None  # type: ignore[assignment]  # it must be given, but follows fields with defaults
    loss: Any = "squared"
    step: Annotated[float, Gt(0)] | Literal["theorem4.1", "theorem4.3"] = "theorem4.1"
    constant: Annotated[float, Gt(0)] | None = None

    sign: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.loss != "squared":
            raise ConfigError(f"loss={self.loss!r}: Algorithm 3 is for the squared loss")
        super().__post_init__()

    @property
    def decay(self) -> float:
        return 1.0 + self.mu

    def check(self, spec: Spec) -> None:
        if spec.classes:
            raise ConfigError("FFGBLipschitz is for real targets; the data has classes")
        super().check(spec)

    def boost(self, client: Client, t: int, eta: float | None = None) -> tuple[Tree, None]:
        """Algorithm 3."""
        x, spec = client.data.x, client.spec
        y = client.data.y.reshape(len(x), -1)
        constant = self.constant or lipschitz_constant(x, y)
        found: list[Tree] = []
        for k in range(1, self.local_steps + 1):

            def phi(z: Tensor, k: int = k) -> Tensor:
                """u - Delta_{k-1}, where Delta_{k-1} = sum_{j < k} (h_j - u)."""
                u = lipschitz_extension(x, y, max(constant, 1e-12), z)
                if not self.residual:
                    return u
                return k * u - sum((self.oracle.model.apply(h, z) for h in found), torch.zeros(()))

            found.append(self.oracle.fit_function(x, phi, random.fold(client.key, k), spec))
        return {"functions": found}, None
